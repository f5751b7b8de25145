// What the support kernels share. No CUTLASS; the same source for every architecture.
#ifndef FLUXGEN_SUPPORT_DEVICE_CUH_
#define FLUXGEN_SUPPORT_DEVICE_CUH_

#include <cuda_runtime.h>

#include "fluxgen/calls.h"
#include "fluxgen/protocol/flags.cuh"

namespace fluxgen {

constexpr int kThreads = 256;
constexpr int kBeginThreads = 512;
constexpr int kInFlight = 8;                 // loads of one thread in the reduction
constexpr int kCopiesInFlight = 4;           // loads of one thread that copies a slab
constexpr int kBlocksPerSm = 4;              // of the reduction, where none is asked for
constexpr int kBlocksPerSmBesideCopies = 1;  // the kernels that it waits for need room

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

// rows of `vectors` 16-byte words, contiguous in `to` and `also` (which may be null), by `blocks`
// blocks, of which this is number `block`.
__device__ __forceinline__ void copy_rows(char* to, char* also, char const* from,
                                          int64_t from_stride, int64_t rows, int64_t vectors,
                                          int64_t block, int64_t blocks) {
  int64_t const total = rows * vectors;
  bool const contiguous = from_stride == vectors * 16;
  int64_t const step = blocks * blockDim.x;
  int64_t first = block * blockDim.x + threadIdx.x;
  for (; first < total; first += step * kCopiesInFlight) {
    uint4 values[kCopiesInFlight];
#pragma unroll
    for (int c = 0; c < kCopiesInFlight; ++c) {
      int64_t const i = first + c * step;
      if (i < total) {
        int64_t const row = contiguous ? 0 : i / vectors;
        values[c] =
            *reinterpret_cast<uint4 const*>(from + row * from_stride + (i - row * vectors) * 16);
      }
    }
#pragma unroll
    for (int c = 0; c < kCopiesInFlight; ++c) {
      int64_t const i = first + c * step;
      if (i < total) {
        reinterpret_cast<uint4*>(to)[i] = values[c];
        if (also != nullptr) {
          reinterpret_cast<uint4*>(also)[i] = values[c];
        }
      }
    }
  }
}

}  // namespace fluxgen
#endif  // FLUXGEN_SUPPORT_DEVICE_CUH_
