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

// Whether the workspaces have room for what a call puts there: an ag_gemm its slab in the stage, or,
// where slabs are pushed, all of them in the gathered matrix; a gemm_rs all of them in the outbox.
inline bool slabs_fit(fluxgen_group const& group, int64_t slab, int32_t kind) {
  return kind == FLUXGEN_PULL
             ? slab <= group.stage_bytes
             : group.world * slab <=
                   (kind == FLUXGEN_DRAIN ? group.drained_bytes : group.gathered_bytes);
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
    return refuse(
        message, size,
        "x: expected rows of a positive multiple of 16 bytes at 16-byte aligned addresses");
  }
  if (reinterpret_cast<uintptr_t>(args.gathered) % 16 ||
      (args.gathered == nullptr && (args.keep || args.pull))) {
    return refuse(message, size, "gathered: expected a 16-byte aligned address");
  }
  if (args.push && args.pull) {
    return refuse(message, size, "expected at most one of pull and push");
  }
  int64_t const slab = args.rows * args.row_bytes;
  if (!slabs_fit(args.group, slab, args.push ? FLUXGEN_PUSH : FLUXGEN_PULL)) {
    return refuse(message, size, "the slabs do not fit the workspace");
  }
  bool const copies = !args.push || args.keep;
  int64_t work = copies ? (slab / 16 + kBeginThreads - 1) / kBeginThreads : 1;
  if (args.pull && work < args.group.world - 1) {
    work = args.group.world - 1;  // a block for each peer
  }
  // One block an SM at most: with pull all have to be resident.
  int const blocks = block_count(args.blocks, kBeginPerSm, work);
  *prepared = {reinterpret_cast<void*>(&begin_kernel), blocks, kBeginThreads, "begin"};
  return FLUXGEN_OK;
}

// The reduction's kernels: by dtype, those that share behind those that do not, then those of packets.
inline void* const* reduce_kernels() {
  static void* const kernels[] = {reinterpret_cast<void*>(&reduce_kernel<__nv_bfloat162, false>),
                                  reinterpret_cast<void*>(&reduce_kernel<__half2, false>),
                                  reinterpret_cast<void*>(&reduce_kernel<__nv_bfloat162, true>),
                                  reinterpret_cast<void*>(&reduce_kernel<__half2, true>),
                                  reinterpret_cast<void*>(&packed_reduce_kernel<__nv_bfloat162>),
                                  reinterpret_cast<void*>(&packed_reduce_kernel<__half2>)};
  return kernels;
}
constexpr int kReduceKernels = 6;

inline int prepare(fluxgen_reduce_args const& args, SupportLaunch* prepared, char* message,
                   int64_t size) {
  if (int const status = check_common(args, message, size)) {
    return status;
  }
  if (args.rows < 1 || args.n < 8 || args.n % 8 || args.d == nullptr ||
      reinterpret_cast<uintptr_t>(args.d) % 16 || args.d_row_stride % 8 ||
      args.d_row_stride < args.n) {
    return refuse(
        message, size,
        "d: expected rows of a positive multiple of 8 elements at 16-byte aligned addresses");
  }
  if (args.chunk_rows < 0 ||
      (args.chunk_rows > 0 &&
       (args.rows + args.chunk_rows - 1) / args.chunk_rows > FLUXGEN_MAX_CHUNKS)) {
    return refuse(message, size, "chunk_rows: expected at most 16 chunks");
  }
  if (args.bias != nullptr && reinterpret_cast<uintptr_t>(args.bias) % 16) {
    return refuse(message, size, "bias: expected a 16-byte aligned address, or null");
  }
  if (args.drain < 0 || args.drain > 1) {
    return refuse(message, size, "drain: expected 0 or 1");
  }
  bool const packed = args.packed != 0;
  if (packed && (args.packed != 1 || args.drain || args.chunk_rows ||
                 (args.shares && args.shares != FLUXGEN_ONE_SHOT))) {
    return refuse(message, size,
                  "packed: expected 0, or 1 of whole slabs of a gemm_rs or of one shot");
  }
  if (packed && args.group.world * args.rows * args.n * 4 > args.group.packet_bytes) {
    return refuse(message, size, "the packets do not fit one half of their part of the workspace");
  }
  int64_t const inbox = packed ? 0 : args.group.world * args.rows * args.n * 2;
  if (inbox > (args.drain ? args.group.drained_bytes : args.group.half_bytes)) {
    return refuse(message, size,
                  args.drain
                      ? "the inbox does not fit the part of the workspace that is drained into"
                      : "the inbox does not fit one half of the workspace");
  }
  if (args.dtype != 0 && args.dtype != 1) {
    return refuse(message, size, "dtype: expected 0 (bf16) or 1 (fp16)");
  }
  if (args.shares < 0 || args.shares > FLUXGEN_EXCHANGE) {
    return refuse(message, size, "shares: expected 0, or one of enum fluxgen_shares");
  }
  if (args.shares == FLUXGEN_ONE_SHOT && args.drain) {
    return refuse(message, size, "drain: one shot is stored, not drained");
  }
  if (args.shares && args.d_row_stride != args.n) {
    return refuse(message, size, "d: expected contiguous rows where all ranks get them");
  }
  if (args.shares == FLUXGEN_TWO_SHOTS && inbox > args.group.result_bytes) {
    return refuse(message, size, "the rows of all ranks do not fit the workspace's result");
  }
  bool const exchanges = args.shares == FLUXGEN_EXCHANGE;
  if (exchanges && (args.bias != nullptr || args.scale != 1.0f)) {
    return refuse(message, size, "bias, scale: expected none, as nothing is added up");
  }
  if (args.residual != nullptr &&
      (!args.shares || exchanges || reinterpret_cast<uintptr_t>(args.residual) % 16)) {
    return refuse(
        message, size,
        "residual: expected null, or a 16-byte aligned address where all ranks get the rows");
  }
  int64_t const words = (exchanges ? args.group.world : 1) * args.rows * (args.n / 8);
  int64_t const work = (words + kThreads - 1) / kThreads;
  *prepared = {exchanges ? reinterpret_cast<void*>(&exchange_kernel)
                         : reduce_kernels()[args.dtype + (packed        ? 4
                                                          : args.shares ? 2
                                                                        : 0)],
               block_count(args.blocks, args.drain ? kBlocksPerSmBesideCopies : kBlocksPerSm, work),
               kThreads, "reduce"};
  return FLUXGEN_OK;
}

// Of a reduction that was prepared before.
inline int prepare(CollectArguments const& args, SupportLaunch* prepared, char*, int64_t) {
  fluxgen_reduce_args const& reduce = args.reduce;
  int64_t const slab = reduce.rows * (reduce.n / 8), each = kThreads * kCopiesInFlight;
  int64_t const work = (reduce.group.world - 1) * ((slab + each - 1) / each);
  *prepared = {reinterpret_cast<void*>(&collect_kernel),
               block_count(reduce.blocks, kBlocksPerSm, work), kThreads, "collect"};
  return FLUXGEN_OK;
}
inline bool collects(fluxgen_reduce_args const& args) {
  return args.shares == FLUXGEN_TWO_SHOTS && args.group.world > 1;
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

// What the copies need to be right, checked before anything is queued.
inline int check_copies(fluxgen_copy_args const& args, int* chunks, char* message, int64_t size) {
  if (int const status = check_common(args, message, size)) {
    return status;
  }
  if (args.rows < 1 || args.row_bytes < 16 || args.row_bytes % 16 || args.chunk_size < 0 ||
      args.cut < 0 || args.cut > args.group.world) {
    return refuse(message, size,
                  "expected rows of a positive multiple of 16 bytes, and at most world slabs cut");
  }
  bool const drains = args.kind == FLUXGEN_DRAIN;
  bool const pushes = args.kind == FLUXGEN_PUSH || args.kind == FLUXGEN_RING;
  if (args.kind < FLUXGEN_PULL || args.kind > FLUXGEN_RING) {
    return refuse(message, size, "kind: expected one of enum fluxgen_copies");
  }
  void const* const given = pushes ? args.x : args.gathered;
  if (!drains &&
      (given == nullptr || reinterpret_cast<uintptr_t>(given) % 16 ||
       (pushes && (args.row_stride_bytes % 16 || args.row_stride_bytes < args.row_bytes)))) {
    return refuse(message, size,
                  pushes ? "x: expected rows at 16-byte aligned addresses"
                         : "gathered: expected a 16-byte aligned address");
  }
  bool const along_k = args.chunk_axis == FLUXGEN_CHUNK_K;
  if (args.x_step_bytes != 0 &&
      (args.kind != FLUXGEN_PUSH || args.x_step_bytes < 0 || args.x_step_bytes % 16)) {
    return refuse(message, size, "x_step_bytes: expected 0, or of pushes a multiple of 16");
  }
  if (drains && along_k) {
    return refuse(message, size, "chunk_axis: a gemm_rs is drained in chunks of rows");
  }
  int64_t const extent = along_k ? args.row_bytes : args.rows;
  int64_t const piece = args.chunk_size > 0 ? args.chunk_size : extent;
  *chunks = along_k ? k_chunk_count(piece, extent) : int((extent + piece - 1) / piece);
  if (*chunks > FLUXGEN_MAX_CHUNKS ||
      !slabs_fit(args.group, args.rows * args.row_bytes, args.kind)) {
    return refuse(message, size, "expected at most 16 chunks of slabs that fit the workspace");
  }
  return FLUXGEN_OK;
}

// One copy of the transport: `rows` pieces of `width` bytes, so far apart.
struct SlabCopy {
  int peer;  // where it comes from, or goes to; round the ring whose slab it is
  int chunk;
  bool last;          // of this peer's, or of all that are drained
  uint32_t awaited;   // peers to be ready before it
  int awaited_chunk;  // of a gemm_rs or round the ring: which has to be here before it
  char* to;
  char const* from;
  size_t width;
  size_t rows;
  size_t to_pitch;
  size_t from_pitch;
};

// Slabs in the order that GEMMs walk them: pulled from the next rank first, drained to the next rank
// first, pushed to the one before first, as its next; round the ring the own one first, which is the
// next of the rank before. Of the first `cut` slabs chunks of K come piece by piece, the later slabs whole;
// chunks of rows come slab by slab.
inline int cut_peers(fluxgen_copy_args const& args, int chunks) {
  bool const cuts = args.chunk_axis == FLUXGEN_CHUNK_K && chunks > 1;
  return cuts ? (args.cut > 0 ? args.cut : args.group.world) - 1 : 0;
}
inline int count_copies(fluxgen_copy_args const& args, int chunks) {
  int const peers = args.group.world - 1, cut = cut_peers(args, chunks);
  return args.chunk_axis == FLUXGEN_CHUNK_K ? cut * chunks + peers - cut : peers * chunks;
}
inline SlabCopy slab_copy(fluxgen_copy_args const& args, int chunks, int i) {
  fluxgen_group const& group = args.group;
  bool const along_k = args.chunk_axis == FLUXGEN_CHUNK_K;
  int const cut = cut_peers(args, chunks);
  bool const columns = along_k && i < cut * chunks;
  bool const pushes = args.kind == FLUXGEN_PUSH, drains = args.kind == FLUXGEN_DRAIN;
  bool const ring = args.kind == FLUXGEN_RING;
  int const turn = columns ? i % cut : (along_k ? i - cut * chunks + cut : i / chunks);
  auto const peer_of = [&](int visit) {
    return (group.rank + (pushes ? group.world - 1 - visit
                          : ring ? visit
                                 : 1 + visit)) %
           group.world;
  };
  SlabCopy copy{};
  copy.peer = peer_of(turn);
  copy.chunk = columns ? i / cut : (along_k ? 0 : i % chunks);
  copy.last = copy.chunk == (along_k && !columns ? 1 : chunks) - 1;
  // Round the ring the last slab that comes piece by piece is sent whole: once its last piece is here.
  copy.awaited_chunk =
      ring && along_k && !columns && cut > 0 && turn == cut ? chunks - 1 : copy.chunk;
  if (drains) {
    copy.awaited = 1u << copy.peer;
    copy.last = i == count_copies(args, chunks) - 1;
  } else if (ring) {  // each chunk of another's slab by itself
    copy.awaited = copy.peer != group.rank || i == 0 ? 1u << copy.peer : 0u;
  } else if (columns ? i == 0 : copy.chunk == 0) {
    for (int visit = turn; visit < (columns ? cut : turn + 1); ++visit) {
      copy.awaited |= 1u << peer_of(visit);
    }
  }
  int64_t const unit = args.chunk_size > 0 ? args.chunk_size : args.rows;
  int64_t row = 0, rows = args.rows, column = 0, width = args.row_bytes;
  if (columns) {
    column = k_chunk_begin(args.chunk_size, copy.chunk);
    width = k_chunk_end(args.chunk_size, copy.chunk, args.row_bytes) - column;
  } else if (!along_k) {
    row = copy.chunk * unit;
    rows = row + unit < args.rows ? unit : args.rows - row;
  }
  int64_t const slab = args.rows * args.row_bytes;
  bool const from_x = pushes || (ring && copy.peer == group.rank);
  int64_t const pitch = from_x ? args.row_stride_bytes : args.row_bytes;
  char* to = nullptr;
  char const* from = static_cast<char const*>(args.x);
  if (drains) {
    to = drained_slab(group, copy.peer, group.rank, slab);
    from = outbox_slab(group, copy.peer, slab);
  } else if (ring) {
    to = pushed_matrix(group, rank_before(group)) + copy.peer * slab;
    from = from_x ? from : pushed_matrix(group, group.rank) + copy.peer * slab;
  } else if (pushes) {
    to = pushed_matrix(group, copy.peer) + group.rank * slab;
    from += copy.peer * args.x_step_bytes;
  } else {
    to = static_cast<char*>(args.gathered) + copy.peer * slab;
    from = stage(group, copy.peer);
  }
  copy.to = to + row * args.row_bytes + column;
  copy.from = from + row * pitch + column;
  bool const one = width == args.row_bytes && pitch == args.row_bytes;
  copy.width = size_t(one ? rows * width : width);
  copy.rows = size_t(one ? 1 : rows);
  copy.to_pitch = size_t(one ? rows * width : args.row_bytes);
  copy.from_pitch = size_t(one ? rows * width : pitch);
  return copy;
}

// A peer's memory may also lie in the host's: CUDA finds out by the address.
inline cudaError_t queue_copy(SlabCopy const& copy, cudaStream_t stream) {
  return copy.rows == 1 ? cudaMemcpyAsync(copy.to, copy.from, copy.width, cudaMemcpyDefault, stream)
                        : cudaMemcpy2DAsync(copy.to, copy.to_pitch, copy.from, copy.from_pitch,
                                            copy.width, copy.rows, cudaMemcpyDefault, stream);
}

// The same for a node of an executable graph that was captured from such a copy of one piece. CUDA
// updates no copy of several (cudaGraphExecMemcpyNodeSetParams: "must be 1-dimensional").
inline cudaError_t update_copy(SlabCopy const& copy, cudaGraphExec_t graph, cudaGraphNode_t node) {
  return copy.rows == 1 ? cudaGraphExecMemcpyNodeSetParams1D(graph, node, copy.to, copy.from,
                                                             copy.width, cudaMemcpyDefault)
                        : cudaErrorNotSupported;
}

// The same for a node of the graph itself: for what is instantiated from it afterwards.
inline cudaError_t update_copy(SlabCopy const& copy, cudaGraphNode_t node) {
  cudaMemcpy3DParms node_params{};
  node_params.srcPtr =
      make_cudaPitchedPtr(const_cast<char*>(copy.from), copy.from_pitch, copy.width, copy.rows);
  node_params.dstPtr = make_cudaPitchedPtr(copy.to, copy.to_pitch, copy.width, copy.rows);
  node_params.extent = make_cudaExtent(copy.width, copy.rows, 1);
  node_params.kind = cudaMemcpyDefault;
  return cudaGraphMemcpyNodeSetParams(node, &node_params);
}

// Where the copies of a call run, the kernels that wait for what each copies, and those that raise its
// flag: beside other copies, which would have to wait for them in one stream (measured: 4 us a copy).
// `event` orders one behind the other.
struct CopyStreams {
  cudaStream_t awaits;
  cudaStream_t copies;
  cudaStream_t flags;
  cudaEvent_t event;
};

// Queue the copies behind what is on `streams.awaits`: the first waits. `note` is called after each.
template <class Note>
cudaError_t queue_copies(fluxgen_copy_args const& args, int chunks, CopyStreams const& streams,
                         Note note) {
  int const copies = count_copies(args, chunks);
  cudaError_t error = cudaSuccess;
  for (int i = 0; i < copies && error == cudaSuccess; ++i) {
    SlabCopy const copy = slab_copy(args, chunks, i);
    if (copy.awaited != 0u) {
      await_kernel<<<1, FLUXGEN_MAX_WORLD, 0, streams.awaits>>>(
          AwaitArguments{args.group, args.kind, copy.awaited, copy.awaited_chunk});
      error = cudaEventRecord(streams.event, streams.awaits);
      if (error == cudaSuccess) {
        error = cudaStreamWaitEvent(streams.copies, streams.event, 0);
      }
    }
    if (error == cudaSuccess) {
      error = queue_copy(copy, streams.copies);
    }
    if (error == cudaSuccess) {
      error = note();
    }
    if (error == cudaSuccess) {
      error = cudaEventRecord(streams.event, streams.copies);
    }
    if (error == cudaSuccess) {
      error = cudaStreamWaitEvent(streams.flags, streams.event, 0);
    }
    if (error == cudaSuccess) {
      raise_kernel<<<1, 1, 0, streams.flags>>>(
          RaiseArguments{args.group, args.kind, copy.peer, copy.chunk, copy.last});
    }
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

// Queue the copies behind what is on `stream`; those of a gemm_rs wait for its GEMM by themselves.
inline int copy(fluxgen_copy_args const& args, cudaStream_t stream, CopyStreams const& streams,
                char* message, int64_t size) {
  int chunks = 0;
  if (int const status = check_copies(args, &chunks, message, size)) {
    return status;
  }
  if (int const status = order(stream, streams.awaits, streams.event, message, size)) {
    return status;
  }
  return cuda_status(queue_copies(args, chunks, streams, [] { return cudaSuccess; }), "copies",
                     message, size);
}

}  // namespace fluxgen
#endif  // FLUXGEN_SUPPORT_LAUNCH_CUH_
