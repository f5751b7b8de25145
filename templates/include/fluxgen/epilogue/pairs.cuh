// Words of eight 16-bit elements, in fp32.
#ifndef FLUXGEN_EPILOGUE_PAIRS_CUH_
#define FLUXGEN_EPILOGUE_PAIRS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace fluxgen {

template <class T>
__device__ __forceinline__ float2 to_float2(T pair);
template <>
__device__ __forceinline__ float2 to_float2(__nv_bfloat162 pair) {
  return __bfloat1622float2(pair);
}
template <>
__device__ __forceinline__ float2 to_float2(__half2 pair) {
  return __half22float2(pair);
}
template <class T>
__device__ __forceinline__ T from_float2(float2 pair);
template <>
__device__ __forceinline__ __nv_bfloat162 from_float2(float2 p) {
  return __float22bfloat162_rn(p);
}
template <>
__device__ __forceinline__ __half2 from_float2(float2 p) {
  return __float22half2_rn(p);
}

// Eight elements of one source, 16 bytes, to their sums.
template <class Pair>
__device__ __forceinline__ void add_word(float2 (&sum)[4], void const* word) {
  Pair pairs[4];
  memcpy(pairs, word, 16);
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    float2 const value = to_float2(pairs[p]);
    sum[p].x += value.x;
    sum[p].y += value.y;
  }
}

}  // namespace fluxgen
#endif  // FLUXGEN_EPILOGUE_PAIRS_CUH_
