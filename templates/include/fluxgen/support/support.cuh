// The support library: its symbols.
#ifndef FLUXGEN_SUPPORT_SUPPORT_CUH_
#define FLUXGEN_SUPPORT_SUPPORT_CUH_

#include "fluxgen/support/graphs.cuh"

namespace fluxgen {

// Queue a whole call on a stream.
template <class Call>
int run(Call const& call, cudaStream_t stream, char* message, int64_t size) {
  if (int const status = check_version(call, message, size)) {
    return status;
  }
  if (call.graphs != nullptr) {
    CallGraphs& graphs = *static_cast<CallGraphs*>(call.graphs);
    if (ReadyCall* const ready = ready_for(graphs, call)) {
      if (cudaGraphLaunch(ready->exec, stream) == cudaSuccess) {
        return FLUXGEN_OK;
      }
      cudaGetLastError();
      graphs.forget(ready);
      ++graphs.failures;
    }
  }
  return queue(call, stream, streams_of(call), nullptr, message, size);
}

}  // namespace fluxgen

#define FLUXGEN_EXPORT_SUPPORT()                                                                \
  extern "C" __attribute__((visibility("default"))) int fluxgen_abi_version(void) {             \
    return FLUXGEN_CALLS_VERSION;                                                               \
  }                                                                                             \
  extern "C" __attribute__((visibility("default"))) int fluxgen_begin(                          \
      fluxgen_begin_args const* args, void* stream, char* message, int64_t size) {              \
    return fluxgen::launch(*args, static_cast<cudaStream_t>(stream), false, message, size);     \
  }                                                                                             \
  extern "C" __attribute__((visibility("default"))) int fluxgen_reduce(                         \
      fluxgen_reduce_args const* args, void* stream, char* message, int64_t size) {             \
    return fluxgen::queue_reduction(*args, static_cast<cudaStream_t>(stream), false, nullptr,   \
                                    message, size);                                             \
  }                                                                                             \
  extern "C" __attribute__((visibility("default"))) int fluxgen_copy(                           \
      fluxgen_copy_args const* args, void* stream, void* awaits, void* copies, void* flags,     \
      void* event, char* message, int64_t size) {                                               \
    return fluxgen::copy(*args, static_cast<cudaStream_t>(stream),                              \
                         {static_cast<cudaStream_t>(awaits), static_cast<cudaStream_t>(copies), \
                          static_cast<cudaStream_t>(flags), static_cast<cudaEvent_t>(event)},   \
                         message, size);                                                        \
  }                                                                                             \
  extern "C" __attribute__((visibility("default"))) int fluxgen_order(                          \
      void* before, void* after, void* event, char* message, int64_t size) {                    \
    return fluxgen::order(static_cast<cudaStream_t>(before), static_cast<cudaStream_t>(after),  \
                          static_cast<cudaEvent_t>(event), message, size);                      \
  }                                                                                             \
  extern "C" __attribute__((visibility("default"))) int fluxgen_gather(                         \
      fluxgen_gather_call const* call, void* stream, char* message, int64_t size) {             \
    return fluxgen::run(*call, static_cast<cudaStream_t>(stream), message, size);               \
  }                                                                                             \
  extern "C" __attribute__((visibility("default"))) int fluxgen_scatter(                        \
      fluxgen_scatter_call const* call, void* stream, char* message, int64_t size) {            \
    return fluxgen::run(*call, static_cast<cudaStream_t>(stream), message, size);               \
  }                                                                                             \
  extern "C" __attribute__((visibility("default"))) void* fluxgen_graphs(int64_t most,          \
                                                                         int64_t* left) {       \
    return new fluxgen::CallGraphs(most, left);                                                 \
  }                                                                                             \
  extern "C" __attribute__((visibility("default"))) int64_t fluxgen_graphs_made(                \
      void const* graphs) {                                                                     \
    return int64_t(static_cast<fluxgen::CallGraphs const*>(graphs)->ready.size());              \
  }                                                                                             \
  extern "C" __attribute__((visibility("default"))) void fluxgen_graphs_free(void* graphs) {    \
    delete static_cast<fluxgen::CallGraphs*>(graphs);                                           \
  }

#endif  // FLUXGEN_SUPPORT_SUPPORT_CUH_
