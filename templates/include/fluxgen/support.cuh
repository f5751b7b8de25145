// The support library: whole calls, each queued launch by launch or as one CUDA graph, and the
// kernels that are not GEMMs.
#ifndef FLUXGEN_SUPPORT_CUH_
#define FLUXGEN_SUPPORT_CUH_

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "fluxgen/calls.h"
#include "fluxgen/support_launch.cuh"

namespace fluxgen {

// The CUDA graph of one kind of call, captured once, and its nodes that have arguments.
struct CallGraph {
  cudaGraph_t graph = nullptr;
  cudaGraphNode_t begin = nullptr;  // or null
  cudaGraphNode_t reduce = nullptr;
  cudaGraphNode_t collect = nullptr;
  std::vector<cudaGraphNode_t> gemms;
  std::vector<cudaGraphNode_t> copies;  // of the transport, in its order
  bool fixed_copies = false;            // they have several pieces each

  CallGraph() = default;
  CallGraph(CallGraph const&) = delete;
  ~CallGraph() {
    if (graph != nullptr) {
      cudaGraphDestroy(graph);
    }
  }
};

// One executable graph, and the arguments that its nodes have. It runs a whole call in one launch,
// in place of two to a hundred. Launches in flight keep the arguments that they were made with.
struct ReadyCall {
  cudaGraphExec_t exec = nullptr;
  fluxgen_begin_args begin{};
  fluxgen_reduce_args reduce{};
  CollectArguments collect{};
  fluxgen_copy_args copy{};
  std::vector<fluxgen_gemm_args> gemms;

  ReadyCall() = default;
  ReadyCall(ReadyCall const&) = delete;
  ~ReadyCall() {
    if (exec != nullptr) {
      cudaGraphExecDestroy(exec);
    }
  }
};

constexpr int kFailures = 3;         // to make or update a graph, until no more is tried
constexpr size_t kRemembered = 256;  // operands that a kind of call was last made with
constexpr uint32_t kRenewed = 8;     // of so many calls that find no room, one replaces another

// A ready graph and a hash of where its operands are, which is all that a search reads of most.
struct KeptCall {
  uint64_t operands;
  std::unique_ptr<ReadyCall> call;
};

// The ready graphs of one kind of call, for the operands that it is made with over and over: the
// layers of a model, each with its weight and, from step to step, with the same activations. The
// first of them is given the operands of all calls that have none of their own.
struct CallGraphs {
  CallGraphs(int64_t most_ready, int64_t* left_of_all)
      : most(size_t(most_ready)), left(left_of_all) {}
  CallGraphs(CallGraphs const&) = delete;
  ~CallGraphs() { *left += int64_t(ready.size()); }

  size_t most;
  int64_t* left;     // how many more there may be of all kinds that share it
  bool ran = false;  // its kernels are loaded
  int failures = 0;
  uint32_t dice = 1;
  std::unique_ptr<CallGraph> graph;
  std::vector<KeptCall> ready;
  std::vector<uint64_t> seen;
  size_t next_seen = 0;

  uint32_t roll(uint32_t sides) {
    dice = dice * 1664525u + 1013904223u;
    return (dice >> 16) % sides;
  }
  bool full() const { return ready.size() >= most || *left <= 0; }
  // Whether these operands have been here before; from now on they have.
  bool returns(uint64_t operands) {
    for (uint64_t other : seen) {
      if (other == operands) {
        return true;
      }
    }
    if (seen.size() < kRemembered) {
      seen.push_back(operands);
    } else {
      seen[next_seen] = operands;
      next_seen = (next_seen + 1) % kRemembered;
    }
    return false;
  }
  void forget(ReadyCall const* call) {
    for (KeptCall& each : ready) {
      if (each.call.get() == call) {
        std::swap(each, ready.back());
        ready.pop_back();
        ++*left;
        return;
      }
    }
  }
};

// The node of what was last queued on a capturing stream.
inline cudaError_t last_node(cudaStream_t stream, cudaGraphNode_t* node) {
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  cudaGraphNode_t const* nodes = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  cudaError_t const error =
      cudaStreamGetCaptureInfo(stream, &capturing, nullptr, nullptr, &nodes, nullptr, &count);
#else
  cudaError_t const error =
      cudaStreamGetCaptureInfo_v2(stream, &capturing, nullptr, nullptr, &nodes, &count);
#endif
  if (error == cudaSuccess && (capturing != cudaStreamCaptureStatusActive || count != 1)) {
    return cudaErrorStreamCaptureInvalidated;
  }
  *node = error == cudaSuccess ? nodes[0] : nullptr;
  return error;
}

// Queue the kernel of `args`; where `node` is given, the stream is capturing.
template <class Args>
int queue_kernel(Args const& args, cudaStream_t stream, bool early, cudaGraphNode_t* node,
                 char* message, int64_t size) {
  int const status = launch(args, stream, early, message, size);
  return status != FLUXGEN_OK || node == nullptr
             ? status
             : cuda_status(last_node(stream, node), "capture", message, size);
}

inline int queue_gemm(fluxgen_gemm_call const& gemm, cudaStream_t stream, CallGraph* into,
                      char* message, int64_t size) {
  int const status = gemm.launch(gemm.args, stream, message, size);
  if (status != FLUXGEN_OK || into == nullptr) {
    return status;
  }
  into->gemms.push_back(nullptr);
  return cuda_status(last_node(stream, &into->gemms.back()), "capture", message, size);
}

// Queue the copies of a call; where `into` is given, that is a capture.
inline int queue_copies(fluxgen_copy_args const& args, int chunks, CopyStreams const& streams,
                        CallGraph* into, char* message, int64_t size) {
  auto const note = [&] {
    if (into == nullptr) {
      return cudaSuccess;
    }
    into->copies.push_back(nullptr);
    return last_node(streams.copies, &into->copies.back());
  };
  int const status =
      cuda_status(queue_copies(args, chunks, streams, note), "copies", message, size);
  for (int i = 0; into != nullptr && i < int(into->copies.size()); ++i) {
    into->fixed_copies = into->fixed_copies || slab_copy(args, chunks, i).rows != 1;
  }
  return status;
}

// Order `stream` behind the side streams that were used, the others being null. `status`: of what was
// queued so far, and is kept if bad.
inline int join(CopyStreams const& streams, cudaStream_t stream, int status, char* message,
                int64_t size) {
  for (cudaStream_t side : {streams.awaits, streams.copies, streams.flags}) {
    if (side != nullptr) {
      int const joined =
          order(side, stream, streams.event, status == FLUXGEN_OK ? message : nullptr, size);
      status = status == FLUXGEN_OK ? joined : status;
    }
  }
  return status;
}

// Queue a reduction, and what collects the peers' rows where they share. `early`: as in `launch`.
inline int queue_reduction(fluxgen_reduce_args const& args, cudaStream_t stream, bool early,
                           CallGraph* into, char* message, int64_t size) {
  int const status =
      queue_kernel(args, stream, early, into != nullptr ? &into->reduce : nullptr, message, size);
  return status == FLUXGEN_OK && collects(args)
             ? queue_kernel(CollectArguments{args}, stream, false,
                            into != nullptr ? &into->collect : nullptr, message, size)
             : status;
}

// Queue a call launch by launch; where `into` is given, that is a capture.
inline int queue(fluxgen_gather_call const& call, cudaStream_t stream, CopyStreams const& streams,
                 CallGraph* into, char* message, int64_t size) {
  int chunks = 0;
  if (call.copy != nullptr) {  // before a peer is told anything
    if (int const status = check_copies(*call.copy, &chunks, message, size)) {
      return status;
    }
  }
  auto const fork = [&] { return order(stream, streams.awaits, streams.event, message, size); };
  // Alone there is nothing to copy, and a stream that was not forked cannot be joined in a capture.
  bool const copies = call.copy != nullptr && count_copies(*call.copy, chunks) > 0;
  bool const pulls = copies && call.copy->kind == FLUXGEN_PULL;
  bool const pushes = copies && call.copy->kind != FLUXGEN_PULL;
  int status = pulls ? fork() : FLUXGEN_OK;
  bool began = false;
  if (status == FLUXGEN_OK) {
    status = queue_kernel(*call.begin, stream, false, into != nullptr ? &into->begin : nullptr,
                          message, size);
    began = status == FLUXGEN_OK;
  }
  if (began && pushes) {
    status = fork();
  }
  bool const forked = pulls || (began && pushes);
  if (began && forked && status == FLUXGEN_OK) {
    status = queue_copies(*call.copy, chunks, streams, into, message, size);
  }
  for (int64_t i = 0; i < call.count && status == FLUXGEN_OK; ++i) {
    status = queue_gemm(call.gemms[i], stream, into, message, size);
  }
  bool const failed = status != FLUXGEN_OK;
  if (forked) {  // also after an error: the copies write into what the caller frees next
    status = join(streams, stream, status, message, size);
  }
  if (began && (failed || call.count == 0)) {
    settle_kernel<<<1, 1, 0, stream>>>(call.begin->group);
  }
  return status;
}

inline int queue(fluxgen_scatter_call const& call, cudaStream_t stream, CopyStreams const& streams,
                 CallGraph* into, char* message, int64_t size) {
  // Before the GEMM raises a flag: a call that ends without its reduction leaves the epoch as it is.
  SupportLaunch unused;
  if (int const status = prepare(*call.reduce, &unused, message, size)) {
    return status;
  }
  int chunks = 0;
  if (call.copy != nullptr) {
    if (int const status = check_copies(*call.copy, &chunks, message, size)) {
      return status;
    }
  }
  bool const copies = call.copy != nullptr && count_copies(*call.copy, chunks) > 0;
  int status = copies ? order(stream, streams.awaits, streams.event, message, size) : FLUXGEN_OK;
  bool const forked = copies && status == FLUXGEN_OK;
  if (status == FLUXGEN_OK) {
    status = queue_gemm(call.gemm, stream, into, message, size);
  }
  if (status == FLUXGEN_OK && forked) {
    status = queue_copies(*call.copy, chunks, streams, into, message, size);
  }
  if (status == FLUXGEN_OK) {
    status = queue_reduction(*call.reduce, stream, true, into, message, size);
  }
  return forked ? join(streams, stream, status, message, size) : status;
}

template <class Call>
CopyStreams streams_of(Call const& call) {
  return {static_cast<cudaStream_t>(call.awaits), static_cast<cudaStream_t>(call.copies),
          static_cast<cudaStream_t>(call.flags), static_cast<cudaEvent_t>(call.event)};
}

template <class Args>
bool same(Args const& a, Args const& b) {
  return std::memcmp(&a, &b, sizeof(Args)) == 0;
}
inline bool same_gemms(ReadyCall const& ready, fluxgen_gemm_call const* gemms) {
  for (size_t i = 0; i < ready.gemms.size(); ++i) {
    if (!same(ready.gemms[i], *gemms[i].args)) {
      return false;
    }
  }
  return true;
}
inline bool serves(ReadyCall const& ready, fluxgen_gather_call const& call) {
  return same(ready.begin, *call.begin) && same_gemms(ready, call.gemms) &&
         (call.copy == nullptr || same(ready.copy, *call.copy));
}
inline bool serves(ReadyCall const& ready, fluxgen_scatter_call const& call) {
  return same_gemms(ready, &call.gemm) && same(ready.reduce, *call.reduce) &&
         (call.copy == nullptr || same(ready.copy, *call.copy));
}

inline uint64_t mix(uint64_t hash, void const* address) {
  return (hash ^ reinterpret_cast<uintptr_t>(address)) * 0x9e3779b97f4a7c15ull;
}
inline uint64_t operands(fluxgen_gather_call const& call) {
  uint64_t hash = mix(mix(1, call.begin->x), call.begin->gathered);
  for (int64_t i = 0; i < call.count; ++i) {
    hash = mix(mix(hash, call.gemms[i].args->b), call.gemms[i].args->d);
  }
  return hash;
}
inline uint64_t operands(fluxgen_scatter_call const& call) {
  return mix(mix(mix(mix(1, call.gemm.args->a), call.gemm.args->b), call.reduce->d),
             call.reduce->residual);
}

// Give the nodes of a ready graph the arguments of a call, those that differ.
template <class Args>
int refresh_kernel(cudaGraphExec_t exec, cudaGraphNode_t node, Args& has, Args const& args) {
  if (same(has, args)) {
    return FLUXGEN_OK;
  }
  int const status = update(args, exec, node, nullptr, 0);
  if (status == FLUXGEN_OK) {
    has = args;
  }
  return status;
}
inline int refresh_gemms(CallGraph const& graph, ReadyCall& ready, fluxgen_gemm_call const* gemms) {
  int status = FLUXGEN_OK;
  for (size_t i = 0; i < ready.gemms.size() && status == FLUXGEN_OK; ++i) {
    if (!same(ready.gemms[i], *gemms[i].args)) {
      status = gemms[i].update(gemms[i].args, ready.exec, graph.gemms[i], nullptr, 0);
    }
    if (status == FLUXGEN_OK) {
      ready.gemms[i] = *gemms[i].args;
    }
  }
  return status;
}
inline int refresh_copies(CallGraph const& graph, ReadyCall& ready, fluxgen_copy_args const& args) {
  if (same(ready.copy, args)) {
    return FLUXGEN_OK;
  }
  int chunks = 0;
  int status = check_copies(args, &chunks, nullptr, 0);
  for (size_t i = 0; i < graph.copies.size() && status == FLUXGEN_OK; ++i) {
    status = cuda_status(update_copy(slab_copy(args, chunks, int(i)), ready.exec, graph.copies[i]),
                         "", nullptr, 0);
  }
  if (status == FLUXGEN_OK) {
    ready.copy = args;
  }
  return status;
}
// Before a graph is instantiated for a call: its copies of several pieces, which cannot be given
// other addresses afterwards.
inline int place_copies(CallGraph const& graph, ReadyCall& ready, fluxgen_gather_call const& call) {
  if (!graph.fixed_copies) {
    return FLUXGEN_OK;
  }
  int chunks = 0;
  int status = check_copies(*call.copy, &chunks, nullptr, 0);
  for (size_t i = 0; i < graph.copies.size() && status == FLUXGEN_OK; ++i) {
    status = cuda_status(update_copy(slab_copy(*call.copy, chunks, int(i)), graph.copies[i]), "",
                         nullptr, 0);
  }
  ready.copy = *call.copy;
  return status;
}
inline int place_copies(CallGraph const&, ReadyCall&, fluxgen_scatter_call const&) {
  return FLUXGEN_OK;
}
// Whether a ready graph can be given the operands of a call.
inline bool can_refresh(CallGraph const& graph, ReadyCall const& ready,
                        fluxgen_gather_call const& call) {
  return !graph.fixed_copies || same(ready.copy, *call.copy);
}
inline bool can_refresh(CallGraph const&, ReadyCall const&, fluxgen_scatter_call const&) {
  return true;
}
inline int refresh(CallGraph const& graph, ReadyCall& ready, fluxgen_gather_call const& call) {
  int status = refresh_kernel(ready.exec, graph.begin, ready.begin, *call.begin);
  if (status == FLUXGEN_OK && call.copy != nullptr) {
    status = refresh_copies(graph, ready, *call.copy);
  }
  return status == FLUXGEN_OK ? refresh_gemms(graph, ready, call.gemms) : status;
}
inline int refresh(CallGraph const& graph, ReadyCall& ready, fluxgen_scatter_call const& call) {
  int status = refresh_gemms(graph, ready, &call.gemm);
  if (status == FLUXGEN_OK && call.copy != nullptr) {
    status = refresh_copies(graph, ready, *call.copy);
  }
  if (status == FLUXGEN_OK) {
    status = refresh_kernel(ready.exec, graph.reduce, ready.reduce, *call.reduce);
  }
  return status == FLUXGEN_OK && graph.collect != nullptr
             ? refresh_kernel(ready.exec, graph.collect, ready.collect,
                              CollectArguments{*call.reduce})
             : status;
}

// What the nodes of a graph that was captured from a call have.
inline void describe(ReadyCall& ready, fluxgen_gather_call const& call) {
  ready.begin = *call.begin;
  for (int64_t i = 0; i < call.count; ++i) {
    ready.gemms.push_back(*call.gemms[i].args);
  }
  if (call.copy != nullptr) {
    ready.copy = *call.copy;
  }
}
inline void describe(ReadyCall& ready, fluxgen_scatter_call const& call) {
  ready.gemms.push_back(*call.gemm.args);
  ready.reduce = *call.reduce;
  ready.collect = {*call.reduce};
  if (call.copy != nullptr) {
    ready.copy = *call.copy;
  }
}

// Capture a call: nothing runs. On streams of its own: the caller's may be one that cannot capture,
// and the copies' may be in use elsewhere. Null if it cannot be captured.
template <class Call>
std::unique_ptr<CallGraph> capture(Call const& call) {
  auto graph = std::make_unique<CallGraph>();
  cudaStream_t stream = nullptr;
  CopyStreams side{};
  int lowest = 0, highest = 0;
  cudaDeviceGetStreamPriorityRange(&lowest, &highest);
  auto const make = [&](cudaStream_t* to, int priority) {
    return cudaStreamCreateWithPriority(to, cudaStreamNonBlocking, priority) == cudaSuccess;
  };
  bool made = make(&stream, lowest) && make(&side.copies, highest) && make(&side.flags, highest) &&
              make(&side.awaits, highest) &&
              cudaEventCreateWithFlags(&side.event, cudaEventDisableTiming) == cudaSuccess &&
              cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
  if (made) {
    int const status = queue(call, stream, side, graph.get(), nullptr, 0);
    cudaError_t const ended = cudaStreamEndCapture(stream, &graph->graph);
    made = status == FLUXGEN_OK && ended == cudaSuccess;
  }
  for (cudaStream_t each : {stream, side.awaits, side.copies, side.flags}) {
    if (each != nullptr) {
      cudaStreamDestroy(each);
    }
  }
  if (side.event != nullptr) {
    cudaEventDestroy(side.event);
  }
  if (!made) {
    graph.reset();
  }
  return graph;
}

// A ready graph with the arguments of a call, or null.
template <class Call>
std::unique_ptr<ReadyCall> make_ready(CallGraphs& graphs, Call const& call) {
  auto ready = std::make_unique<ReadyCall>();
  if (graphs.graph == nullptr) {
    graphs.graph = capture(call);
    if (graphs.graph == nullptr) {
      return nullptr;
    }
    describe(*ready, call);
  } else {
    ready->gemms.resize(graphs.graph->gemms.size());  // of no arguments that a call could have
    if (place_copies(*graphs.graph, *ready, call) != FLUXGEN_OK) {
      return nullptr;
    }
  }
  // Kernels of the copies' stream keep its priority: they come before the blocks of a GEMM.
  if (cudaGraphInstantiate(&ready->exec, graphs.graph->graph,
                           cudaGraphInstantiateFlagUseNodePriority) != cudaSuccess ||
      refresh(*graphs.graph, *ready, call) != FLUXGEN_OK) {
    return nullptr;
  }
  return ready;
}

// The ready graph for a call: the one with its operands; else, when they come back, one more; else
// the first that can be given them. Null: queue the call launch by launch, also after an
// error, since the peers do not know of it.
template <class Call>
ReadyCall* ready_for(CallGraphs& graphs, Call const& call) {
  if (!graphs.ran || graphs.failures >= kFailures) {
    graphs.ran = true;
    return nullptr;
  }
  uint64_t const where = operands(call);
  for (KeptCall& kept : graphs.ready) {
    if (kept.operands == where && serves(*kept.call, call)) {
      return kept.call.get();
    }
  }
  bool const returns = graphs.returns(where);
  KeptCall* kept = nullptr;
  for (KeptCall& each : graphs.ready) {
    if (can_refresh(*graphs.graph, *each.call, call)) {
      kept = &each;
      break;
    }
  }
  bool make = graphs.ready.empty() || (returns && !graphs.full());
  if (make && graphs.full()) {
    return nullptr;
  }
  if (!make) {
    bool const renew = returns && graphs.ready.size() > 1 && graphs.roll(kRenewed) == 0;
    if (renew) {
      kept = &graphs.ready[1 + graphs.roll(uint32_t(graphs.ready.size() - 1))];
    }
    if (kept == nullptr) {
      return nullptr;
    }
    if (!can_refresh(*graphs.graph, *kept->call, call)) {
      graphs.forget(kept->call.get());
      make = true;
    } else if (refresh(*graphs.graph, *kept->call, call) != FLUXGEN_OK) {
      graphs.forget(kept->call.get());
      kept = nullptr;
    }
  }
  if (make) {
    kept = nullptr;
    if (std::unique_ptr<ReadyCall> made = make_ready(graphs, call)) {
      graphs.ready.push_back({where, std::move(made)});
      --*graphs.left;
      kept = &graphs.ready.back();
    }
  }
  if (kept == nullptr) {
    cudaGetLastError();
    ++graphs.failures;
    return nullptr;
  }
  kept->operands = where;
  return kept->call.get();
}

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
    return FLUXGEN_ABI_VERSION;                                                                 \
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

#endif  // FLUXGEN_SUPPORT_CUH_
