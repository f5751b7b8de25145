// CUTLASS's sm80 mainloop (cp.async, ldmatrix, mma.sync) for a tile: layouts, copies and MMA.
//
// K-major operands are kept as rows of up to 64 elements and read with ldmatrix; a (k, n) B as columns,
// read with the transposing ldmatrix. Loads bypass L1: what has just arrived from a peer is in L2 or
// memory, and L1 is coherent with neither.
#ifndef FLUXGEN_FAMILIES_SM80_COLLECTIVES_CUH_
#define FLUXGEN_FAMILIES_SM80_COLLECTIVES_CUH_

#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cute/arch/copy_sm75.hpp"
#include "cute/arch/copy_sm80.hpp"
#include "cute/atom/copy_atom.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cutlass/gemm/collective/collective_mma.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/numeric_types.h"

namespace fluxgen {

// One operand: rows of MN, columns of K, in shared memory. kThreads copy 16 bytes each.
template <class Element, int kThreads, int kTileMN, int kTileK, bool kAlongMN>
struct Sm80Operand;

template <class Element, int kThreads, int kTileMN, int kTileK>
struct Sm80Operand<Element, kThreads, kTileMN, kTileK, false> {  // K-major
  static constexpr int kRow = kTileK >= 64 ? 64 : 32;
  static constexpr int kAcross = kRow / 8;  // threads along K
  using SmemLayoutAtom =
      decltype(cute::composition(cute::Swizzle < kRow == 64 ? 3 : 2, 3, 3 > {},
                                 cute::Layout<cute::Shape<cute::_8, cute::Int<kRow>>,
                                              cute::Stride<cute::Int<kRow>, cute::_1>>{}));
  using SmemCopyAtom = cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>;
  using GmemTiledCopy = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>, Element>{},
      cute::Layout<cute::Shape<cute::Int<kThreads / kAcross>, cute::Int<kAcross>>,
                   cute::Stride<cute::Int<kAcross>, cute::_1>>{},
      cute::Layout<cute::Shape<cute::_1, cute::_8>>{}));
  static_assert(kTileMN % (kThreads / kAcross) == 0, "the tile's rows do not fill the copy");
};

template <class Element, int kThreads, int kTileMN, int kTileK>
struct Sm80Operand<Element, kThreads, kTileMN, kTileK, true> {  // MN-major
  static constexpr int kColumn = kTileMN % 64 == 0 ? 64 : 32;
  static constexpr int kAcross = kColumn / 8;  // threads along MN
  using SmemLayoutAtom =
      decltype(cute::composition(cute::Swizzle < kColumn == 64 ? 3 : 2, 3, 3 > {},
                                 cute::Layout<cute::Shape<cute::Int<kColumn>, cute::_8>,
                                              cute::Stride<cute::_1, cute::Int<kColumn>>>{}));
  using SmemCopyAtom = cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>;
  using GmemTiledCopy = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>, Element>{},
      cute::Layout<cute::Shape<cute::Int<kAcross>, cute::Int<kThreads / kAcross>>,
                   cute::Stride<cute::_1, cute::Int<kAcross>>>{},
      cute::Layout<cute::Shape<cute::_8, cute::_1>>{}));
  static_assert(kTileK % (kThreads / kAcross) == 0, "the tile's columns do not fill the copy");
};

template <class Config>
struct Sm80Collectives {
  using Element = typename Config::Element;
  static constexpr int kThreads = 32 * Config::kWarpsM * Config::kWarpsN;
  using TileShape =
      cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>;
  using Mma =
      cute::conditional_t<cute::is_same_v<Element, cutlass::half_t>,
                          cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  // Two atoms along N: one ldmatrix.x4 then serves both.
  using TiledMma = cute::TiledMMA<
      cute::MMA_Atom<Mma>,
      cute::Layout<cute::Shape<cute::Int<Config::kWarpsM>, cute::Int<Config::kWarpsN>, cute::_1>>,
      cute::Tile<cute::Int<16 * Config::kWarpsM>, cute::Int<16 * Config::kWarpsN>, cute::_16>>;
  using A = Sm80Operand<Element, kThreads, Config::kTileM, Config::kTileK, false>;
  using B = Sm80Operand<Element, kThreads, Config::kTileN, Config::kTileK, Config::kBTransposed>;
  using StrideA = cute::Stride<int64_t, cute::_1, int64_t>;
  using StrideB =
      cute::conditional_t<Config::kBTransposed, cute::Stride<cute::_1, int64_t, int64_t>,
                          cute::Stride<int64_t, cute::_1, int64_t>>;
  using Mainloop = cutlass::gemm::collective::CollectiveMma<
      cutlass::gemm::MainloopSm80CpAsync<Config::kStages>, TileShape, Element, StrideA, Element,
      StrideB, TiledMma, typename A::GmemTiledCopy, typename A::SmemLayoutAtom,
      typename A::SmemCopyAtom, cute::identity, typename B::GmemTiledCopy,
      typename B::SmemLayoutAtom, typename B::SmemCopyAtom, cute::identity>;

  // A finished tile in shared memory, where the mainloop had its stages: rows of 16-byte words.
  static constexpr int kOutRow = Config::kTileN % 64 == 0 ? 64 : 32;
  using OutLayout = decltype(cute::tile_to_shape(
      cute::composition(cute::Swizzle < kOutRow == 64 ? 3 : 2, 3, 3 > {},
                        cute::Layout<cute::Shape<cute::_8, cute::Int<kOutRow>>,
                                     cute::Stride<cute::Int<kOutRow>, cute::_1>>{}),
      cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>>{}));
  static constexpr int kOutBytes = Config::kTileM * Config::kTileN * int(sizeof(Element));
  static constexpr int kLoopBytes = int(sizeof(typename Mainloop::SharedStorage));
  static constexpr int kSharedBytes = kOutBytes > kLoopBytes ? kOutBytes : kLoopBytes;
};

}  // namespace fluxgen
#endif  // FLUXGEN_FAMILIES_SM80_COLLECTIVES_CUH_
