// The CUTLASS 2.x GEMM that the Ampere kernels are measured beside: D (m, n) = A (m, k) B (n, k)^T in
// bf16, fp32 sums, 16-byte accesses, threadblocks swizzled in columns of eight.
#include "cutlass/gemm/device/gemm.h"

using Element = cutlass::bfloat16_t;
using Gemm = cutlass::gemm::device::Gemm<
    Element, cutlass::layout::RowMajor, Element, cutlass::layout::ColumnMajor, Element,
    cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<TILE_M, TILE_N, TILE_K>,
    cutlass::gemm::GemmShape<WARP_M, WARP_N, TILE_K>, cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<Element, 8, float, float>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, STAGES>;

extern "C" __attribute__((visibility("default"))) int cutlass2x(void const* a, void const* b,
                                                                void* d, int m, int n, int k,
                                                                void* stream) {
  Element const* const A = static_cast<Element const*>(a);
  Element const* const B = static_cast<Element const*>(b);
  Element* const D = static_cast<Element*>(d);
  Gemm gemm;
  return int(gemm({{m, n, k}, {A, k}, {B, k}, {D, n}, {D, n}, {1.0f, 0.0f}}, nullptr,
                  static_cast<cudaStream_t>(stream)));
}
