// How every fused GEMM is launched, and given other arguments in a graph, and the symbols of a compiled
// one: what does not depend on the architecture. A kernel has one parameter.
//
//   args  ->  prepare<Config>  ->  GemmLaunch and parameter  ->  launch, or update of a graph's node
#ifndef FLUXGEN_FAMILIES_LAUNCH_CUH_
#define FLUXGEN_FAMILIES_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "fluxgen/families/arguments.cuh"

namespace fluxgen {

// What of a device its launches depend on. `resident`: clusters of a Hopper kernel on the GPU, blocks of
// an Ampere one on an SM.
struct DeviceFacts {
  int sms = 0;
  int resident = 0;
  cudaError_t error = cudaSuccess;
};

// Found once per device and process: the kernel may use its shared memory, and `count(facts)` says how
// much of it is resident. After an error it is tried again.
template <auto kKernel, int kSharedBytes, class Count>
DeviceFacts const& device_facts(int device, Count count) {
  constexpr int kMaxDevices = 64;
  static DeviceFacts known[kMaxDevices];
  DeviceFacts& mine = known[device % kMaxDevices];
  if (mine.sms == 0) {
    DeviceFacts found;
    found.error =
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (found.error == cudaSuccess) {
      found.error = cudaDeviceGetAttribute(&found.sms, cudaDevAttrMultiProcessorCount, device);
    }
    if (found.error == cudaSuccess) {
      found.error = count(found);
    }
    if (found.error != cudaSuccess) {
      found.sms = 0;
    }
    mine = found;
  }
  return mine;
}

// Why this device cannot run the kernel, as a status. `needs`: "sm_90a code: expected a Hopper GPU".
inline int device_status(DeviceFacts const& facts, int device, char const* needs, char* message,
                         int64_t size) {
  if (facts.error == cudaSuccess) {
    return FLUXGEN_OK;
  }
  cudaGetLastError();
  if (facts.error != cudaErrorNoKernelImageForDevice &&
      facts.error != cudaErrorInvalidDeviceFunction) {
    return cuda_fail(message, size, "preparing the kernel", facts.error);
  }
  if (message != nullptr && size > 0) {
    std::snprintf(message, size_t(size), "device %d cannot run %s", device, needs);
  }
  return FLUXGEN_WRONG_DEVICE;
}

// How a kernel is launched.
struct GemmLaunch {
  void const* kernel;
  dim3 grid;
  dim3 block;
  int shared_bytes;
  int cluster_m;  // 0: no clusters
  int cluster_n;
  bool early;  // may start while the kernel before it ends, once that one's blocks are resident
};

inline int launch_gemm(GemmLaunch const& launch, void* parameter, cudaStream_t stream,
                       char* message, int64_t size) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = launch.block;
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (launch.cluster_m > 0) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {unsigned(launch.cluster_m), unsigned(launch.cluster_n), 1u};
  }
  if (launch.early) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  void* parameters[] = {parameter};
  cudaError_t const error = cudaLaunchKernelExC(&config, launch.kernel, parameters);
  return error == cudaSuccess ? FLUXGEN_OK : cuda_fail(message, size, "launch", error);
}

// The same for a node of a graph that was captured from a launch of this kernel: from its next
// launch on, the graph uses the parameter. The cluster's shape stays the node's.
inline int update_gemm(GemmLaunch const& launch, void* parameter, cudaGraphExec_t graph,
                       cudaGraphNode_t node, char* message, int64_t size) {
  void* parameters[] = {parameter};
  cudaKernelNodeParams node_params{};
  node_params.func = const_cast<void*>(launch.kernel);
  node_params.gridDim = launch.grid;
  node_params.blockDim = launch.block;
  node_params.sharedMemBytes = launch.shared_bytes;
  node_params.kernelParams = parameters;
  cudaError_t const error = cudaGraphExecKernelNodeSetParams(graph, node, &node_params);
  return error == cudaSuccess ? FLUXGEN_OK : cuda_fail(message, size, "update of a graph", error);
}

// Of each architecture: the type of a kernel's one parameter; what a call launches; what it refuses;
// what a library says of itself.
template <class Config>
struct GemmParameter;
template <class Config>
int prepare(fluxgen_gemm_args const& args, GemmLaunch* launch,
            typename GemmParameter<Config>::Type* parameter, char* message, int64_t size);
template <class Config>
int check(fluxgen_gemm_args const& args, char* message, int64_t size);
template <class Config>
int describe(fluxgen_kernel_info* info);

template <class Config>
int launch(fluxgen_gemm_args const& args, cudaStream_t stream, char* message, int64_t size) {
  GemmLaunch how{};
  typename GemmParameter<Config>::Type parameter;
  int const status = prepare<Config>(args, &how, &parameter, message, size);
  return status == FLUXGEN_OK ? launch_gemm(how, &parameter, stream, message, size) : status;
}
template <class Config>
int update(fluxgen_gemm_args const& args, cudaGraphExec_t graph, cudaGraphNode_t node,
           char* message, int64_t size) {
  GemmLaunch how{};
  typename GemmParameter<Config>::Type parameter;
  int const status = prepare<Config>(args, &how, &parameter, message, size);
  return status == FLUXGEN_OK ? update_gemm(how, &parameter, graph, node, message, size) : status;
}

}  // namespace fluxgen

// The symbols of a compiled kernel.
#define FLUXGEN_EXPORT_GEMM(Config)                                                          \
  extern "C" __attribute__((visibility("default"))) int fluxgen_kernel_describe(             \
      fluxgen_kernel_info* info) {                                                           \
    return fluxgen::describe<Config>(info);                                                  \
  }                                                                                          \
  extern "C" __attribute__((visibility("default"))) int fluxgen_gemm_check(                  \
      fluxgen_gemm_args const* args, char* message, int64_t size) {                          \
    return fluxgen::check<Config>(*args, message, size);                                     \
  }                                                                                          \
  extern "C" __attribute__((visibility("default"))) int fluxgen_gemm_launch(                 \
      fluxgen_gemm_args const* args, void* stream, char* message, int64_t size) {            \
    return fluxgen::launch<Config>(*args, static_cast<cudaStream_t>(stream), message, size); \
  }                                                                                          \
  extern "C" __attribute__((visibility("default"))) int fluxgen_gemm_update(                 \
      fluxgen_gemm_args const* args, void* graph, void* node, char* message, int64_t size) { \
    return fluxgen::update<Config>(*args, static_cast<cudaGraphExec_t>(graph),               \
                                   static_cast<cudaGraphNode_t>(node), message, size);       \
  }

#endif  // FLUXGEN_FAMILIES_LAUNCH_CUH_
