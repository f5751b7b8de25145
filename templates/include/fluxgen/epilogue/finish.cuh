// What is done to a sum before it is rounded. An epilogue runs where the sum is final: in the GEMM of what
// gathers, in the reduction of what reduces. Both are to take it from here.
#ifndef FLUXGEN_EPILOGUE_FINISH_CUH_
#define FLUXGEN_EPILOGUE_FINISH_CUH_

#include "fluxgen/abi.h"
#include "fluxgen/epilogue/pairs.cuh"

namespace fluxgen {

// Eight columns of a row, from column 8 * `word` on: scale * sum + bias, with `kResidual` the residual, rounded
// once. What is to be stored.
template <class Pair, bool kResidual>
__device__ __forceinline__ uint4 finish_word(fluxgen_operand const (&operands)[FLUXGEN_OPERANDS],
                                             float scale, float2 const (&sum)[4], int64_t row,
                                             int64_t word) {
  Pair added[4] = {};
  if (operands[FLUXGEN_BIAS].data != nullptr) {
    uint4 const raw = static_cast<uint4 const*>(operands[FLUXGEN_BIAS].data)[word];
    memcpy(added, &raw, 16);
  }
  Pair last[4] = {};
  if (kResidual && operands[FLUXGEN_RESIDUAL].data != nullptr) {
    int64_t const at = (row * operands[FLUXGEN_RESIDUAL].row_stride + word * 8) * 2;
    uint4 const raw = *reinterpret_cast<uint4 const*>(
        static_cast<char const*>(operands[FLUXGEN_RESIDUAL].data) + at);
    memcpy(last, &raw, 16);
  }
  Pair rounded[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    float2 const bias = to_float2(added[p]), residual = to_float2(last[p]);
    float2 value = make_float2(sum[p].x * scale + bias.x, sum[p].y * scale + bias.y);
    if constexpr (kResidual) {
      value = make_float2(value.x + residual.x, value.y + residual.y);
    }
    rounded[p] = from_float2<Pair>(value);
  }
  uint4 out;
  memcpy(&out, rounded, 16);
  return out;
}

}  // namespace fluxgen
#endif  // FLUXGEN_EPILOGUE_FINISH_CUH_
