// How a support kernel is launched, and how a node of a graph is given other arguments.
#ifndef FLUXGEN_SUPPORT_LAUNCH_CUH_
#define FLUXGEN_SUPPORT_LAUNCH_CUH_

#include "fluxgen/support/arguments.cuh"

namespace fluxgen {

// An SM divides its memory between L1 and shared memory as the kernels on it ask for, and kernels
// that ask for different parts may not run beside each other. GEMMs take all as shared memory: so
// does what is to run beside them.
inline void prefer_shared_memory(void const* kernel) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                       cudaSharedmemCarveoutMaxShared);
}
inline void prepare_for_neighbours() {
  static bool const done = [] {
    prefer_shared_memory(reinterpret_cast<void const*>(&begin_kernel));
    prefer_shared_memory(reinterpret_cast<void const*>(&await_kernel));
    prefer_shared_memory(reinterpret_cast<void const*>(&raise_kernel));
    prefer_shared_memory(reinterpret_cast<void const*>(&exchange_kernel));
    for (int i = 0; i < kReduceKernels; ++i) {
      prefer_shared_memory(reduce_kernels()[i]);
    }
    return true;
  }();
  (void)done;
}

// Whether a kernel may be launched programmatically on the current device: from Hopper on.
inline bool launches_early() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 9;
}

// Queue the kernel of `args` (begin, reduce or collect) on a stream. `early`: it may start while the kernel
// before it ends, where the device can do that.
template <class Args>
int launch(Args const& args, cudaStream_t stream, bool early, char* message, int64_t size) {
  SupportLaunch prepared;
  if (int const status = prepare(args, &prepared, message, size)) {
    return status;
  }
  prepare_for_neighbours();
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(prepared.blocks));
  config.blockDim = dim3(unsigned(prepared.threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early && launches_early() ? 1 : 0;
  void* parameters[] = {const_cast<Args*>(&args)};
  cudaError_t const error = cudaLaunchKernelExC(&config, prepared.kernel, parameters);
  return cuda_status(error, prepared.name, message, size);
}

// The same for a node of a graph that was captured from such a launch.
template <class Args>
int update(Args const& args, cudaGraphExec_t graph, cudaGraphNode_t node, char* message,
           int64_t size) {
  SupportLaunch prepared;
  if (int const status = prepare(args, &prepared, message, size)) {
    return status;
  }
  void* parameters[] = {const_cast<Args*>(&args)};
  cudaKernelNodeParams node_params{};
  node_params.func = prepared.kernel;
  node_params.gridDim = dim3(unsigned(prepared.blocks));
  node_params.blockDim = dim3(unsigned(prepared.threads));
  node_params.kernelParams = parameters;
  return cuda_status(cudaGraphExecKernelNodeSetParams(graph, node, &node_params), prepared.name,
                     message, size);
}

}  // namespace fluxgen
#endif  // FLUXGEN_SUPPORT_LAUNCH_CUH_
