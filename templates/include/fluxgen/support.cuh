// The small kernels around a fused GEMM: begin and pull (ag_gemm), reduce (gemm_rs).
// No CUTLASS; the same source for every architecture.
#ifndef FLUXGEN_SUPPORT_CUH_
#define FLUXGEN_SUPPORT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdio>

#include "fluxgen/abi.h"
#include "fluxgen/calls.h"
#include "fluxgen/protocol.cuh"

namespace fluxgen {

constexpr int kThreads = 256;
constexpr int kInFlight = 8;       // loads of one thread in the reduction
constexpr int kBlocksPerSm = 4;    // of the reduction and the slab copy, where none is asked for
constexpr uint32_t kReduceOp = 2;
constexpr uint32_t kTransportOp = 3;

// The last block to call it gets true; the ticket is back at zero for the next call.
__device__ __forceinline__ bool last_block(void* workspace, int64_t ticket_offset) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* ticket = workspace_word(workspace, ticket_offset);
    last = add_acquire_release(ticket, 1u) == gridDim.x - 1;
    if (last) {
      store_relaxed(ticket, 0u);
    }
  }
  __syncthreads();
  return last;
}

// rows of `vectors` 16-byte words, by all blocks of the grid; `also` may be null.
__device__ __forceinline__ void copy_rows(char* to, char* also, int64_t to_stride,
                                          char const* from, int64_t from_stride, int64_t rows,
                                          int64_t vectors) {
  int64_t const total = rows * vectors;
  int64_t const step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    int64_t const row = i / vectors;
    int64_t const column = (i - row * vectors) * 16;
    uint4 const value = *reinterpret_cast<uint4 const*>(from + row * from_stride + column);
    *reinterpret_cast<uint4*>(to + row * to_stride + column) = value;
    if (also != nullptr) {
      *reinterpret_cast<uint4*>(also + row * to_stride + column) = value;
    }
  }
}

// ag_gemm, first kernel: wait until the peers have pulled the last slab, advance the epoch, copy x
// (rows, row_bytes) into the stage and to its place in the gathered matrix, mark it gathered, and
// tell every peer that it may be pulled. With args.pull it then copies the peers' slabs itself:
// all blocks must be resident, as they wait for peers that wait for this rank's first half.
__global__ void __launch_bounds__(kThreads) begin_kernel(fluxgen_begin_args args) {
  fluxgen_group const& group = args.group;
  void* mine = group.peers[group.rank];
  uint32_t const epoch = current_epoch(mine, 1);
  uint32_t const staged = load_relaxed(workspace_word(mine, kStagedOffset));
  int const thread = threadIdx.x;
  bool const is_peer = thread < group.world && thread != group.rank;
  if (is_peer) {
    wait_epoch(pulled_flag(mine, thread), staged, group, kTransportOp, thread, 0);
  }
  __syncthreads();
  int64_t const vectors = args.row_bytes / 16;
  int64_t const slab = args.rows * args.row_bytes;
  char* gathered = static_cast<char*>(args.gathered);
  char* own = gathered + group.rank * slab;
  // A peer may still be pulling what an aborted group has in the stage.
  bool const aborted = aborted_by(group) != 0u;
  copy_rows(aborted ? own : stage(group, group.rank), aborted ? nullptr : own, args.row_bytes,
            static_cast<char const*>(args.x), args.row_stride_bytes, args.rows, vectors);
  fence_system();
  if (last_block(mine, kTicketOffset)) {
    fence_system();
    if (thread == 0) {
      store_relaxed(workspace_word(mine, kStagedOffset), epoch);
      store_relaxed(workspace_word(mine, kEpochOffset), epoch);
      report_abort(group, kTransportOp, epoch);
    }
    if (thread < FLUXGEN_MAX_CHUNKS) {
      store_release_system(gathered_flag(mine, group.rank, thread), epoch);
    }
    if (is_peer && aborted_by(group) == 0u) {
      store_release_system(ready_flag(group.peers[thread], group.rank), epoch);
    }
  }
  if (!args.pull) {
    return;
  }
  for (int step = 1; step < group.world; ++step) {
    int const peer = (group.rank + step) % group.world;
    if (thread == 0) {
      wait_epoch(ready_flag(mine, peer), epoch, group, kTransportOp, peer, 0);
    }
    __syncthreads();
    copy_rows(gathered + peer * slab, nullptr, args.row_bytes, stage(group, peer),
              args.row_bytes, args.rows, vectors);
  }
  fence_system();
  // A ticket of its own: a block may be here before another has taken its first.
  if (last_block(mine, kPullTicketOffset) && is_peer) {
    for (int chunk = 0; chunk < FLUXGEN_MAX_CHUNKS; ++chunk) {
      store_release_system(gathered_flag(mine, thread, chunk), epoch);
    }
    if (aborted_by(group) == 0u) {
      store_release_system(pulled_flag(group.peers[thread], group.rank), epoch);
    } else {
      report_abort(group, kTransportOp, epoch);
    }
  }
}

// Between two copies of the copy-engine transport: raise the flag of what has just been copied,
// tell its source if that was all of it, and wait for the next source. Negative: nothing to do.
struct StepArguments {
  fluxgen_group group;
  int32_t source;
  int32_t chunk;
  int32_t pulled;
  int32_t next;
};

__global__ void step_kernel(StepArguments args) {
  fluxgen_group const& group = args.group;
  void* mine = group.peers[group.rank];
  uint32_t const epoch = current_epoch(mine, 0);
  if (args.source >= 0) {
    store_release_system(gathered_flag(mine, args.source, args.chunk), epoch);
  }
  if (args.pulled >= 0) {
    if (aborted_by(group) == 0u) {
      store_release_system(pulled_flag(group.peers[args.pulled], group.rank), epoch);
    } else {
      report_abort(group, kTransportOp, epoch);
    }
  }
  if (args.next >= 0) {
    wait_epoch(ready_flag(mine, args.next), epoch, group, kTransportOp, args.next, 0);
  }
}

template <class T>
__device__ __forceinline__ float2 to_float2(T pair);
template <>
__device__ __forceinline__ float2 to_float2(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
template <>
__device__ __forceinline__ float2 to_float2(__half2 pair) { return __half22float2(pair); }
template <class T>
__device__ __forceinline__ T from_float2(float2 pair);
template <>
__device__ __forceinline__ __nv_bfloat162 from_float2(float2 p) { return __float22bfloat162_rn(p); }
template <>
__device__ __forceinline__ __half2 from_float2(float2 p) { return __float22half2_rn(p); }

// gemm_rs, last kernel: D (rows, n) = scale * (sum of the inbox over sources) + bias, fp32, in rank
// order, rounded once: bitwise the same on every run. Chunk by chunk, so that early chunks are reduced while late
// ones travel; the last block advances the epoch.
template <class Pair>
__global__ void __launch_bounds__(kThreads) reduce_kernel(fluxgen_reduce_args args) {
  fluxgen_group const& group = args.group;
  void* mine = group.peers[group.rank];
  uint32_t const epoch = current_epoch(mine, 1);
  char const* inbox = inbox_slab(group, group.rank, epoch, 0, 0);
  int64_t const vectors = args.n / 8;  // 16 bytes each
  int64_t const slab = args.rows * vectors;
  int64_t const chunk_rows = args.chunk_rows > 0 ? args.chunk_rows : args.rows;
  int chunk = 0;
  for (int64_t begin = 0; begin < args.rows; begin += chunk_rows, ++chunk) {
    if (threadIdx.x < group.world) {
      wait_epoch(arrived_flag(mine, threadIdx.x, chunk), epoch, group, kReduceOp, threadIdx.x,
                 chunk);
    }
    __syncthreads();
    int64_t const end = begin + chunk_rows < args.rows ? begin + chunk_rows : args.rows;
    int64_t const stop = end * vectors;
    int64_t const step = int64_t(gridDim.x) * kThreads;
    for (int64_t i = begin * vectors + int64_t(blockIdx.x) * kThreads + threadIdx.x; i < stop;
         i += step) {
      float2 sum[4] = {};
      // Eight sources are in flight at once; they are still added in rank order.
      for (int first = 0; first < group.world; first += kInFlight) {
        uint4 raw[kInFlight];
#pragma unroll
        for (int s = 0; s < kInFlight; ++s) {
          if (first + s < group.world) {
            raw[s] = __ldcs(reinterpret_cast<uint4 const*>(inbox) + (first + s) * slab + i);
          }
        }
#pragma unroll
        for (int s = 0; s < kInFlight; ++s) {
          if (first + s < group.world) {
            Pair pairs[4];
            memcpy(pairs, &raw[s], 16);
#pragma unroll
            for (int p = 0; p < 4; ++p) {
              float2 const value = to_float2(pairs[p]);
              sum[p].x += value.x;
              sum[p].y += value.y;
            }
          }
        }
      }
      int64_t const row = i / vectors;
      int64_t const column = i - row * vectors;
      Pair added[4] = {};
      if (args.bias != nullptr) {
        uint4 const raw = static_cast<uint4 const*>(args.bias)[column];
        memcpy(added, &raw, 16);
      }
      Pair rounded[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        float2 const bias = to_float2(added[p]);
        rounded[p] = from_float2<Pair>(
            make_float2(sum[p].x * args.scale + bias.x, sum[p].y * args.scale + bias.y));
      }
      char* to = static_cast<char*>(args.d) + (row * args.d_row_stride + column * 8) * 2;
      uint4 out;
      memcpy(&out, rounded, 16);
      *reinterpret_cast<uint4*>(to) = out;
    }
  }
  if (last_block(mine, kTicketOffset) && threadIdx.x == 0) {
    store_relaxed(workspace_word(mine, kEpochOffset), epoch);
    report_abort(group, kReduceOp, epoch);
  }
}

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

inline int begin(fluxgen_begin_args const& args, cudaStream_t stream, char* message, int64_t size) {
  if (int const status = check_common(args, message, size)) {
    return status;
  }
  if (args.rows < 1 || args.row_bytes < 16 || args.row_bytes % 16 || args.row_stride_bytes % 16 ||
      args.row_stride_bytes < args.row_bytes || args.x == nullptr ||
      reinterpret_cast<uintptr_t>(args.x) % 16) {
    return refuse(message, size,
                  "x: expected rows of a positive multiple of 16 bytes at 16-byte aligned addresses");
  }
  if (args.gathered == nullptr || reinterpret_cast<uintptr_t>(args.gathered) % 16) {
    return refuse(message, size, "gathered: expected a 16-byte aligned address");
  }
  if (args.rows * args.row_bytes > args.group.stage_bytes) {
    return refuse(message, size, "the slab does not fit the stage of the workspace");
  }
  int64_t const work = (args.rows * (args.row_bytes / 16) + kThreads - 1) / kThreads;
  // With pull, one block an SM at most: all are resident.
  int const blocks = block_count(args.blocks, args.pull ? 1 : kBlocksPerSm, work);
  begin_kernel<<<blocks, kThreads, 0, stream>>>(args);
  return cuda_status(cudaGetLastError(), "begin", message, size);
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

// Queue the copies on `copy`. Peers in the order that the GEMM walks: K chunks piece by piece, row
// chunks source by source.
inline cudaError_t queue_pulls(fluxgen_pull_args const& args, int chunks, cudaStream_t copy) {
  fluxgen_group const& group = args.group;
  bool const along_k = args.chunk_axis == FLUXGEN_CHUNK_K;
  int64_t const extent = along_k ? args.row_bytes : args.rows;
  int64_t const piece = args.chunk_size > 0 ? args.chunk_size : extent;
  int64_t const slab = args.rows * args.row_bytes;
  int const peers = group.world - 1;
  cudaError_t error = cudaSuccess;
  StepArguments step{group, -1, -1, -1, -1};
  for (int i = 0; i < peers * chunks && error == cudaSuccess; ++i) {
    int const turn = along_k ? i % peers : i / chunks;
    int const chunk = along_k ? i / peers : i % chunks;
    int const source = (group.rank + 1 + turn) % group.world;
    step.next = chunk == 0 ? source : -1;
    if (step.source >= 0 || step.next >= 0) {
      step_kernel<<<1, 1, 0, copy>>>(step);
    }
    int64_t const begin = chunk * piece;
    int64_t const length = begin + piece < extent ? piece : extent - begin;
    char* to = static_cast<char*>(args.gathered) + source * slab;
    char const* from = stage(group, source);
    if (along_k && chunks > 1) {
      error = cudaMemcpy2DAsync(to + begin, size_t(args.row_bytes), from + begin,
                                size_t(args.row_bytes), size_t(length), size_t(args.rows),
                                cudaMemcpyDeviceToDevice, copy);
    } else {
      int64_t const unit = along_k ? args.rows : args.row_bytes;  // bytes of one of `extent`
      error = cudaMemcpyAsync(to + begin * unit, from + begin * unit, size_t(length * unit),
                              cudaMemcpyDeviceToDevice, copy);
    }
    step = {group, source, chunk, chunk == chunks - 1 ? source : -1, -1};
  }
  if (peers > 0 && error == cudaSuccess) {
    step_kernel<<<1, 1, 0, copy>>>(step);
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
  return cuda_status(queue_pulls(args, chunks, copy), "pull", message, size);
}

// The pulls as a graph, which costs one launch in place of two a chunk. `gathered` stays where it is
// for as long as the graph lives. Made on `copy`, which is idle or not capturing.
inline int pull_graph(fluxgen_pull_args const& args, cudaStream_t copy, cudaGraphExec_t* graph,
                      char* message, int64_t size) {
  int chunks = 0;
  if (int const status = check_pull(args, &chunks, message, size)) {
    return status;
  }
  cudaGraph_t captured = nullptr;
  cudaError_t error = cudaStreamBeginCapture(copy, cudaStreamCaptureModeThreadLocal);
  if (error == cudaSuccess) {
    error = queue_pulls(args, chunks, copy);
    cudaError_t const ended = cudaStreamEndCapture(copy, &captured);
    error = error == cudaSuccess ? ended : error;
  }
  if (error == cudaSuccess) {
    error = cudaGraphInstantiate(graph, captured, 0);
  }
  if (captured != nullptr) {
    cudaGraphDestroy(captured);
  }
  return cuda_status(error, "graph of the pulls", message, size);
}

inline int gather(fluxgen_gather_call const& call, cudaStream_t stream, char* message,
                  int64_t size) {
  if (int const status = check_version(call, message, size)) {
    return status;
  }
  cudaStream_t const copy = static_cast<cudaStream_t>(call.copy);
  int chunks = 0;
  if (call.pull != nullptr) {  // before a peer is told anything
    if (int const status = check_pull(*call.pull, &chunks, message, size)) {
      return status;
    }
  }
  int status = begin(*call.begin, stream, message, size);
  bool const forks = status == FLUXGEN_OK && call.pull != nullptr;
  if (forks) {
    status = order(stream, copy, static_cast<cudaEvent_t>(call.forked), message, size);
  }
  if (forks && status == FLUXGEN_OK) {
    cudaError_t const queued =
        call.pull_graph != nullptr
            ? cudaGraphLaunch(static_cast<cudaGraphExec_t>(call.pull_graph), copy)
            : queue_pulls(*call.pull, chunks, copy);
    status = cuda_status(queued, "pull", message, size);
  }
  for (int64_t i = 0; i < call.count && status == FLUXGEN_OK; ++i) {
    status = call.gemms[i].launch(call.gemms[i].args, stream, message, size);
  }
  if (forks) {  // also after an error: the copies write into what the caller frees next
    bool const failed = status != FLUXGEN_OK;
    int const joined = order(copy, stream, static_cast<cudaEvent_t>(call.joined),
                             failed ? nullptr : message, size);
    status = failed ? status : joined;
  }
  return status;
}

inline int reduce(fluxgen_reduce_args const& args, cudaStream_t stream, char* message,
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
  int64_t const work = (args.rows * (args.n / 8) + kThreads - 1) / kThreads;
  int const blocks = block_count(args.blocks, kBlocksPerSm, work);
  if (args.dtype == 0) {
    reduce_kernel<__nv_bfloat162><<<blocks, kThreads, 0, stream>>>(args);
  } else if (args.dtype == 1) {
    reduce_kernel<__half2><<<blocks, kThreads, 0, stream>>>(args);
  } else {
    return refuse(message, size, "dtype: expected 0 (bf16) or 1 (fp16)");
  }
  return cuda_status(cudaGetLastError(), "reduce", message, size);
}

inline int scatter(fluxgen_scatter_call const& call, cudaStream_t stream, char* message,
                   int64_t size) {
  if (int const status = check_version(call, message, size)) {
    return status;
  }
  int const status = call.gemm.launch(call.gemm.args, stream, message, size);
  return status == FLUXGEN_OK ? reduce(*call.reduce, stream, message, size) : status;
}

}  // namespace fluxgen

#define FLUXGEN_EXPORT_SUPPORT()                                                               \
  extern "C" __attribute__((visibility("default"))) int fluxgen_abi_version(void) {            \
    return FLUXGEN_ABI_VERSION;                                                                \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_begin(                         \
      fluxgen_begin_args const* args, void* stream, char* message, int64_t size) {             \
    return fluxgen::begin(*args, static_cast<cudaStream_t>(stream), message, size);            \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_pull(                          \
      fluxgen_pull_args const* args, void* stream, void* copy, void* forked, char* message,    \
      int64_t size) {                                                                          \
    return fluxgen::pull(*args, static_cast<cudaStream_t>(stream),                             \
                         static_cast<cudaStream_t>(copy), static_cast<cudaEvent_t>(forked),    \
                         message, size);                                                       \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_order(                         \
      void* before, void* after, void* event, char* message, int64_t size) {                   \
    return fluxgen::order(static_cast<cudaStream_t>(before), static_cast<cudaStream_t>(after), \
                          static_cast<cudaEvent_t>(event), message, size);                     \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_pull_graph(                    \
      fluxgen_pull_args const* args, void* copy, void** graph, char* message, int64_t size) {  \
    return fluxgen::pull_graph(*args, static_cast<cudaStream_t>(copy),                         \
                               reinterpret_cast<cudaGraphExec_t*>(graph), message, size);      \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) void fluxgen_graph_free(void* graph) {     \
    cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));                                 \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_gather(                        \
      fluxgen_gather_call const* call, void* stream, char* message, int64_t size) {            \
    return fluxgen::gather(*call, static_cast<cudaStream_t>(stream), message, size);           \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_scatter(                       \
      fluxgen_scatter_call const* call, void* stream, char* message, int64_t size) {           \
    return fluxgen::scatter(*call, static_cast<cudaStream_t>(stream), message, size);          \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_reduce(                        \
      fluxgen_reduce_args const* args, void* stream, char* message, int64_t size) {            \
    return fluxgen::reduce(*args, static_cast<cudaStream_t>(stream), message, size);           \
  }

#endif  // FLUXGEN_SUPPORT_CUH_
