// The host side of the support kernels: what each takes, how it is launched, and how a node of a
// graph is given other arguments.
#ifndef FLUXGEN_SUPPORT_LAUNCH_CUH_
#define FLUXGEN_SUPPORT_LAUNCH_CUH_

#include <cstdio>

#include "fluxgen/support_kernels.cuh"

namespace fluxgen {

constexpr int kBeginPerSm = 1;  // blocks; fewer in all stage a slab slower than they leave room

inline int refuse(char* message, int64_t size, char const* text) {
  if (message != nullptr && size > 0) {
    std::snprintf(message, size_t(size), "%s", text);
  }
  return FLUXGEN_BAD_ARGUMENT;
}

inline int cuda_status(cudaError_t error, char const* what, char* message, int64_t size) {
  if (error == cudaSuccess) {
    return FLUXGEN_OK;
  }
  if (message != nullptr && size > 0) {
    std::snprintf(message, size_t(size), "%s: %s", what, cudaGetErrorString(error));
  }
  return error == cudaErrorNoKernelImageForDevice ? FLUXGEN_WRONG_DEVICE : FLUXGEN_CUDA_ERROR;
}

template <class Args>
int check_version(Args const& args, char* message, int64_t size) {
  if (args.abi_version != FLUXGEN_ABI_VERSION || args.struct_size != sizeof(Args)) {
    refuse(message, size, "argument struct does not match this library's version");
    return FLUXGEN_BAD_ABI;
  }
  return FLUXGEN_OK;
}

template <class Args>
int check_common(Args const& args, char* message, int64_t size) {
  if (int const status = check_version(args, message, size)) {
    return status;
  }
  if (args.group.world < 1 || args.group.world > FLUXGEN_MAX_WORLD || args.group.rank < 0 ||
      args.group.rank >= args.group.world) {
    return refuse(message, size, "expected 0 <= rank < world <= 16");
  }
  for (int peer = 0; peer < args.group.world; ++peer) {
    if (args.group.peers[peer] == nullptr) {
      return refuse(message, size, "a peer's workspace address is null");
    }
  }
  return FLUXGEN_OK;
}

// Blocks for `work`: at most as many as asked for, or, where none are, `per_sm` for each SM.
inline int block_count(int asked, int per_sm, int64_t work) {
  int64_t most = asked;
  if (asked <= 0) {
    int device = 0, sms = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    most = int64_t(sms) * per_sm;
  }
  return int(work < 1 ? 1 : (work < most ? work : most));
}

// Which kernel runs on how many blocks; its one parameter is the argument struct.
struct SupportLaunch {
  void* kernel;
  int blocks;
  int threads;
  char const* name;
};

inline int prepare(fluxgen_begin_args const& args, SupportLaunch* prepared, char* message,
                   int64_t size) {
  if (int const status = check_common(args, message, size)) {
    return status;
  }
  if (args.rows < 1 || args.row_bytes < 16 || args.row_bytes % 16 || args.row_stride_bytes % 16 ||
      args.row_stride_bytes < args.row_bytes || args.x == nullptr ||
      reinterpret_cast<uintptr_t>(args.x) % 16) {
    return refuse(message, size,
                  "x: expected rows of a positive multiple of 16 bytes at 16-byte aligned addresses");
  }
  if (reinterpret_cast<uintptr_t>(args.gathered) % 16 ||
      (args.gathered == nullptr && (args.keep || args.pull))) {
    return refuse(message, size, "gathered: expected a 16-byte aligned address");
  }
  if (args.rows * args.row_bytes > args.group.stage_bytes) {
    return refuse(message, size, "the slab does not fit the stage of the workspace");
  }
  int64_t const work = (args.rows * (args.row_bytes / 16) + kBeginThreads - 1) / kBeginThreads;
  // One block an SM at most: with pull all have to be resident.
  int const blocks = block_count(args.blocks, kBeginPerSm, work);
  *prepared = {reinterpret_cast<void*>(&begin_kernel), blocks, kBeginThreads, "begin"};
  return FLUXGEN_OK;
}

inline int prepare(fluxgen_reduce_args const& args, SupportLaunch* prepared, char* message,
                   int64_t size) {
  if (int const status = check_common(args, message, size)) {
    return status;
  }
  if (args.rows < 1 || args.n < 8 || args.n % 8 || args.d == nullptr ||
      reinterpret_cast<uintptr_t>(args.d) % 16 || args.d_row_stride % 8 ||
      args.d_row_stride < args.n) {
    return refuse(message, size,
                  "d: expected rows of a positive multiple of 8 elements at 16-byte aligned addresses");
  }
  if (args.chunk_rows < 0 ||
      (args.chunk_rows > 0 && (args.rows + args.chunk_rows - 1) / args.chunk_rows >
                                  FLUXGEN_MAX_CHUNKS)) {
    return refuse(message, size, "chunk_rows: expected at most 16 chunks");
  }
  if (args.bias != nullptr && reinterpret_cast<uintptr_t>(args.bias) % 16) {
    return refuse(message, size, "bias: expected a 16-byte aligned address, or null");
  }
  if (args.group.world * args.rows * args.n * 2 > args.group.half_bytes) {
    return refuse(message, size, "the inbox does not fit one half of the workspace");
  }
  if (args.dtype != 0 && args.dtype != 1) {
    return refuse(message, size, "dtype: expected 0 (bf16) or 1 (fp16)");
  }
  int64_t const work = (args.rows * (args.n / 8) + kThreads - 1) / kThreads;
  *prepared = {args.dtype == 0 ? reinterpret_cast<void*>(&reduce_kernel<__nv_bfloat162>)
                               : reinterpret_cast<void*>(&reduce_kernel<__half2>),
               block_count(args.blocks, kBlocksPerSm, work), kThreads, "reduce"};
  return FLUXGEN_OK;
}

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
    prefer_shared_memory(reinterpret_cast<void const*>(&step_kernel));
    prefer_shared_memory(reinterpret_cast<void const*>(&reduce_kernel<__nv_bfloat162>));
    prefer_shared_memory(reinterpret_cast<void const*>(&reduce_kernel<__half2>));
    return true;
  }();
  (void)done;
}

// Queue the kernel of `args` (begin or reduce) on a stream. `early`: it may start while the kernel
// before it ends.
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
  config.numAttrs = early ? 1 : 0;
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

// What the copies need to be right, checked before anything is queued.
inline int check_pull(fluxgen_pull_args const& args, int* chunks, char* message, int64_t size) {
  if (int const status = check_common(args, message, size)) {
    return status;
  }
  if (args.rows < 1 || args.row_bytes < 16 || args.row_bytes % 16 || args.gathered == nullptr ||
      reinterpret_cast<uintptr_t>(args.gathered) % 16 || args.chunk_size < 0) {
    return refuse(message, size,
                  "gathered: expected rows of a positive multiple of 16 bytes at a 16-byte aligned "
                  "address");
  }
  int64_t const extent = args.chunk_axis == FLUXGEN_CHUNK_K ? args.row_bytes : args.rows;
  int64_t const piece = args.chunk_size > 0 ? args.chunk_size : extent;
  *chunks = int((extent + piece - 1) / piece);
  if (*chunks > FLUXGEN_MAX_CHUNKS || args.rows * args.row_bytes > args.group.stage_bytes) {
    return refuse(message, size, "expected at most 16 chunks of a slab that fits the stage");
  }
  return FLUXGEN_OK;
}

// One copy of the transport: `rows` pieces of `width` bytes, `pitch` bytes apart in both.
struct PullCopy {
  int source;
  int chunk;
  char* to;
  char const* from;
  size_t width;
  size_t rows;
  size_t pitch;
};

// The i-th copy of a call. Peers in the order that the GEMM walks: K chunks piece by piece, row
// chunks source by source.
inline PullCopy pull_copy(fluxgen_pull_args const& args, int chunks, int i) {
  fluxgen_group const& group = args.group;
  bool const along_k = args.chunk_axis == FLUXGEN_CHUNK_K;
  int64_t const extent = along_k ? args.row_bytes : args.rows;
  int64_t const piece = args.chunk_size > 0 ? args.chunk_size : extent;
  int const peers = group.world - 1;
  int const turn = along_k ? i % peers : i / chunks;
  PullCopy copy{};
  copy.chunk = along_k ? i / peers : i % chunks;
  copy.source = (group.rank + 1 + turn) % group.world;
  int64_t const begin = copy.chunk * piece;
  int64_t const length = begin + piece < extent ? piece : extent - begin;
  bool const columns = along_k && chunks > 1;
  int64_t const unit = columns ? 1 : (along_k ? args.rows : args.row_bytes);  // bytes of one of extent
  copy.to = static_cast<char*>(args.gathered) + copy.source * args.rows * args.row_bytes +
            begin * unit;
  copy.from = stage(group, copy.source) + begin * unit;
  copy.width = size_t(length * unit);
  copy.rows = columns ? size_t(args.rows) : 1;
  copy.pitch = size_t(args.row_bytes);
  return copy;
}

inline cudaError_t queue_copy(PullCopy const& copy, cudaStream_t stream) {
  return copy.rows == 1 ? cudaMemcpyAsync(copy.to, copy.from, copy.width,
                                          cudaMemcpyDeviceToDevice, stream)
                        : cudaMemcpy2DAsync(copy.to, copy.pitch, copy.from, copy.pitch, copy.width,
                                            copy.rows, cudaMemcpyDeviceToDevice, stream);
}

// The same for a node of an executable graph that was captured from such a copy of one piece. CUDA
// updates no copy of several (cudaGraphExecMemcpyNodeSetParams: "must be 1-dimensional").
inline cudaError_t update_copy(PullCopy const& copy, cudaGraphExec_t graph, cudaGraphNode_t node) {
  return copy.rows == 1 ? cudaGraphExecMemcpyNodeSetParams1D(graph, node, copy.to, copy.from,
                                                             copy.width, cudaMemcpyDeviceToDevice)
                        : cudaErrorNotSupported;
}

// The same for a node of the graph itself: for what is instantiated from it afterwards.
inline cudaError_t update_copy(PullCopy const& copy, cudaGraphNode_t node) {
  cudaMemcpy3DParms node_params{};
  node_params.srcPtr =
      make_cudaPitchedPtr(const_cast<char*>(copy.from), copy.pitch, copy.width, copy.rows);
  node_params.dstPtr = make_cudaPitchedPtr(copy.to, copy.pitch, copy.width, copy.rows);
  node_params.extent = make_cudaExtent(copy.width, copy.rows, 1);
  node_params.kind = cudaMemcpyDeviceToDevice;
  return cudaGraphMemcpyNodeSetParams(node, &node_params);
}

// Queue the copies on `stream`; `note` is called after each copy.
template <class Note>
cudaError_t queue_pulls(fluxgen_pull_args const& args, int chunks, cudaStream_t stream, Note note) {
  fluxgen_group const& group = args.group;
  int const copies = (group.world - 1) * chunks;
  cudaError_t error = cudaSuccess;
  StepArguments step{group, -1, -1, -1, -1};
  for (int i = 0; i < copies && error == cudaSuccess; ++i) {
    PullCopy const copy = pull_copy(args, chunks, i);
    step.next = copy.chunk == 0 ? copy.source : -1;
    if (step.source >= 0 || step.next >= 0) {
      step_kernel<<<1, 1, 0, stream>>>(step);
    }
    error = queue_copy(copy, stream);
    if (error == cudaSuccess) {
      error = note();
    }
    step = {group, copy.source, copy.chunk, copy.chunk == chunks - 1 ? copy.source : -1, -1};
  }
  if (copies > 0 && error == cudaSuccess) {
    step_kernel<<<1, 1, 0, stream>>>(step);
  }
  cudaError_t const launched = cudaGetLastError();
  return error == cudaSuccess ? launched : error;
}

// Everything queued on `after` from now on waits for everything queued on `before` until now.
inline int order(cudaStream_t before, cudaStream_t after, cudaEvent_t event, char* message,
                 int64_t size) {
  cudaError_t error = cudaEventRecord(event, before);
  if (error == cudaSuccess) {
    error = cudaStreamWaitEvent(after, event, 0);
  }
  return cuda_status(error, "order of streams", message, size);
}

// Queue the pulls on `copy`, behind what is on `stream`; `forked` is an event for that order.
inline int pull(fluxgen_pull_args const& args, cudaStream_t stream, cudaStream_t copy,
                cudaEvent_t forked, char* message, int64_t size) {
  int chunks = 0;
  if (int const status = check_pull(args, &chunks, message, size)) {
    return status;
  }
  if (int const status = order(stream, copy, forked, message, size)) {
    return status;
  }
  return cuda_status(queue_pulls(args, chunks, copy, [] { return cudaSuccess; }), "pull", message,
                     size);
}

}  // namespace fluxgen
#endif  // FLUXGEN_SUPPORT_LAUNCH_CUH_
