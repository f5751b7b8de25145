// The small kernels around a fused GEMM: begin (ag_gemm), wait (transports), reduce (gemm_rs).
// No CUTLASS; the same source for every architecture.
#ifndef FLUXGEN_SUPPORT_CUH_
#define FLUXGEN_SUPPORT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdio>

#include "fluxgen/abi.h"
#include "fluxgen/protocol.cuh"

namespace fluxgen {

constexpr int kThreads = 256;
constexpr int kInFlight = 8;       // loads of one thread in the reduction
constexpr int kBlocksPerSm = 4;    // of the reduction and the slab copy, where none is asked for
constexpr uint32_t kReduceOp = 2;
constexpr uint32_t kTransportOp = 3;

// The last block to call it gets true; the ticket is back at zero for the next call.
__device__ __forceinline__ bool last_block(void* workspace) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* ticket = workspace_word(workspace, kTicketOffset);
    last = add_acquire_release(ticket, 1u) == gridDim.x - 1;
    if (last) {
      store_relaxed(ticket, 0u);
    }
  }
  __syncthreads();
  return last;
}

// ag_gemm, first kernel: advance the epoch, copy x (rows, row_bytes) into this rank's slab of the
// gather half, mark it gathered here, and tell every peer that it may be pulled.
__global__ void __launch_bounds__(kThreads) begin_kernel(fluxgen_begin_args args) {
  fluxgen_group const& group = args.group;
  void* mine = group.peers[group.rank];
  uint32_t const epoch = current_epoch(mine, 1);
  char* slab = data_slab(group, group.rank, epoch, group.rank, args.rows * args.row_bytes);
  int64_t const vectors = args.row_bytes / 16;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    uint4 const* from = reinterpret_cast<uint4 const*>(static_cast<char const*>(args.x) +
                                                       row * args.row_stride_bytes);
    uint4* to = reinterpret_cast<uint4*>(slab + row * args.row_bytes);
    for (int64_t i = threadIdx.x; i < vectors; i += kThreads) {
      to[i] = from[i];
    }
  }
  fence_system();
  if (last_block(mine)) {
    fence_system();
    if (threadIdx.x == 0) {
      store_relaxed(workspace_word(mine, kEpochOffset), epoch);
    }
    if (threadIdx.x < FLUXGEN_MAX_CHUNKS) {
      store_release_system(gathered_flag(mine, group.rank, threadIdx.x), epoch);
    }
    if (threadIdx.x < group.world) {
      store_release_system(ready_flag(group.peers[threadIdx.x], group.rank), epoch);
    }
  }
}

// A transport's wait: returns once the peer's slab of the current epoch may be pulled.
__global__ void wait_kernel(fluxgen_wait_args args) {
  void* mine = args.group.peers[args.group.rank];
  wait_epoch(ready_flag(mine, args.peer), current_epoch(mine, 0), args.group, kTransportOp,
             args.peer, 0);
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

// gemm_rs, last kernel: D (rows, n) = sum of the inbox over sources, fp32, in rank order, rounded
// once: bitwise the same on every run. Chunk by chunk, so that early chunks are reduced while late
// ones travel; the last block advances the epoch.
template <class Pair>
__global__ void __launch_bounds__(kThreads) reduce_kernel(fluxgen_reduce_args args) {
  fluxgen_group const& group = args.group;
  void* mine = group.peers[group.rank];
  uint32_t const epoch = current_epoch(mine, 1);
  char const* inbox = data_slab(group, group.rank, epoch, 0, 0);
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
      Pair rounded[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        rounded[p] = from_float2<Pair>(sum[p]);
      }
      int64_t const row = i / vectors;
      int64_t const column = i - row * vectors;
      char* to = static_cast<char*>(args.d) + (row * args.d_row_stride + column * 8) * 2;
      uint4 out;
      memcpy(&out, rounded, 16);
      *reinterpret_cast<uint4*>(to) = out;
    }
  }
  if (last_block(mine) && threadIdx.x == 0) {
    store_relaxed(workspace_word(mine, kEpochOffset), epoch);
  }
}

inline int refuse(char* message, int64_t size, char const* text) {
  if (message != nullptr && size > 0) {
    std::snprintf(message, size_t(size), "%s", text);
  }
  return FLUXGEN_BAD_ARGUMENT;
}

inline int finish_launch(char* message, int64_t size, char const* what) {
  cudaError_t const error = cudaGetLastError();
  if (error == cudaSuccess) {
    return FLUXGEN_OK;
  }
  if (message != nullptr && size > 0) {
    std::snprintf(message, size_t(size), "%s: %s", what, cudaGetErrorString(error));
  }
  return error == cudaErrorNoKernelImageForDevice ? FLUXGEN_WRONG_DEVICE : FLUXGEN_CUDA_ERROR;
}

template <class Args>
int check_common(Args const& args, char* message, int64_t size) {
  if (args.abi_version != FLUXGEN_ABI_VERSION || args.struct_size != sizeof(Args)) {
    refuse(message, size, "argument struct does not match this library's version");
    return FLUXGEN_BAD_ABI;
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

inline int block_count(int asked, int64_t work) {
  int device = 0, sms = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  int64_t const most = asked > 0 ? asked : sms * kBlocksPerSm;
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
  if (args.group.world * args.rows * args.row_bytes > args.group.half_bytes) {
    return refuse(message, size, "the gathered slabs do not fit one half of the workspace");
  }
  begin_kernel<<<block_count(args.blocks, args.rows), kThreads, 0, stream>>>(args);
  return finish_launch(message, size, "begin");
}

inline int wait(fluxgen_wait_args const& args, cudaStream_t stream, char* message, int64_t size) {
  if (int const status = check_common(args, message, size)) {
    return status;
  }
  if (args.peer < 0 || args.peer >= args.group.world) {
    return refuse(message, size, "peer: expected 0 <= peer < world");
  }
  wait_kernel<<<1, 1, 0, stream>>>(args);
  return finish_launch(message, size, "wait");
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
  if (args.group.world * args.rows * args.n * 2 > args.group.half_bytes) {
    return refuse(message, size, "the inbox does not fit one half of the workspace");
  }
  int const blocks = block_count(args.blocks, (args.rows * (args.n / 8) + kThreads - 1) / kThreads);
  if (args.dtype == 0) {
    reduce_kernel<__nv_bfloat162><<<blocks, kThreads, 0, stream>>>(args);
  } else if (args.dtype == 1) {
    reduce_kernel<__half2><<<blocks, kThreads, 0, stream>>>(args);
  } else {
    return refuse(message, size, "dtype: expected 0 (bf16) or 1 (fp16)");
  }
  return finish_launch(message, size, "reduce");
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
  extern "C" __attribute__((visibility("default"))) int fluxgen_wait(                          \
      fluxgen_wait_args const* args, void* stream, char* message, int64_t size) {              \
    return fluxgen::wait(*args, static_cast<cudaStream_t>(stream), message, size);             \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_reduce(                        \
      fluxgen_reduce_args const* args, void* stream, char* message, int64_t size) {            \
    return fluxgen::reduce(*args, static_cast<cudaStream_t>(stream), message, size);           \
  }

#endif  // FLUXGEN_SUPPORT_CUH_
