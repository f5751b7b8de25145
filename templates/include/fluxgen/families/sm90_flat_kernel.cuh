// A flat Hopper GEMM for few tokens: D (tokens, n) = A B^T with tiles that span the rows of several ranks.
//
// With few tokens a GEMM reads B and little else. So operands are swapped: columns of D lie on the side of
// wgmma that is at least 64 long, tokens on the side that may be 16. K is split over the blocks of a
// cluster, so that all SMs read B; each block keeps its part of the tile in shared memory, and each adds
// up a share of the tile out of all of them, in the order of K, and stores 16 bytes at a time.
//
//   producer warp    B, and once the ranks' slabs are here A   ->  stages
//   MMA warps        stages  ->  part of the tile (fp32)  ->  shares  ->  D, or the inboxes of the owners
//
// No block waits for one that is not resident: the blocks of a cluster are resident together.
#ifndef FLUXGEN_FAMILIES_SM90_FLAT_KERNEL_CUH_
#define FLUXGEN_FAMILIES_SM90_FLAT_KERNEL_CUH_

#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cute/atom/copy_atom.hpp"
#include "cute/atom/copy_traits_sm90_tma.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cutlass/gemm/collective/builders/sm90_common.inl"
#include "cutlass/numeric_types.h"

#include "fluxgen/epilogue/flat_store.cuh"
#include "fluxgen/order/flat_tiles.cuh"
#include "fluxgen/protocol/flags.cuh"
#include "fluxgen/families/sm90_cluster.cuh"

namespace fluxgen {

// Config has: kOp, Element, kBTransposed (B is (k, n)), kTileM (tokens), kTileN (columns), kTileK,
// kStages (0: as many as fit).
template <class Config>
struct Sm90Flat {
  using Element = typename Config::Element;
  static constexpr bool kAllGather = Config::kOp == FLUXGEN_AG_GEMM;
  static constexpr int kTokens = Config::kTileM, kColumns = Config::kTileN, kDepth = Config::kTileK;
  static constexpr int kGroups = kColumns / 64;  // warpgroups that multiply
  static constexpr int kConsumers = 128 * kGroups;
  static constexpr int kThreads = kConsumers + 32;

  static constexpr cute::GMMA::Major kMajor =
      Config::kBTransposed ? cute::GMMA::Major::MN : cute::GMMA::Major::K;
  using StrideB = cute::conditional_t<Config::kBTransposed, cute::Stride<cute::_1, int64_t>,
                                      cute::Stride<int64_t, cute::_1>>;
  using StrideA = cute::Stride<int64_t, cute::_1>;
  using StepB = cute::conditional_t<Config::kBTransposed, cute::Step<cute::_2, cute::_1, cute::_3>,
                                    cute::Step<cute::_1, cute::_2, cute::_3>>;
  using ShapeB = cute::Shape<cute::Int<kColumns>, cute::Int<kDepth>>;
  using ShapeA = cute::Shape<cute::Int<kTokens>, cute::Int<kDepth>>;
  using AtomB = decltype(cutlass::gemm::collective::detail::ss_smem_selector<
                         kMajor, Element, cute::Int<kColumns>, cute::Int<kDepth>>());
  using AtomA = decltype(cutlass::gemm::collective::detail::ss_smem_selector<
                         cute::GMMA::Major::K, Element, cute::Int<kTokens>, cute::Int<kDepth>>());

  static constexpr int kStageBytes = (kColumns + kTokens) * kDepth * int(sizeof(Element));
  static constexpr int kPitch = kColumns + 4;  // floats: eight rows of a fragment hit all banks
  static constexpr int kPass = kTokens < 32 ? kTokens : 32;  // tokens that are exchanged at a time
  static constexpr int kPartBytes = kPass * kPitch * 4;
  static constexpr int kSharedLimit = 227 * 1024;
  static constexpr int kFit = (kSharedLimit - kPartBytes - 2048) / kStageBytes;
  static constexpr int kStages = Config::kStages ? Config::kStages : (kFit < 16 ? kFit : 16);

  using LayoutB = decltype(cute::tile_to_shape(
      AtomB{}, cute::make_shape(cute::Int<kColumns>{}, cute::Int<kDepth>{}, cute::Int<kStages>{}),
      StepB{}));
  using LayoutA = decltype(cute::tile_to_shape(
      AtomA{}, cute::make_shape(cute::Int<kTokens>{}, cute::Int<kDepth>{}, cute::Int<kStages>{})));

  using TiledMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<kColumns>, cute::Int<kTokens>, cute::Int<kDepth>>, kMajor,
          cute::GMMA::Major::K>(),
      cute::Layout<cute::Shape<cute::Int<kGroups>, cute::_1, cute::_1>>{}));

  template <class Stride, class Layout, class Shape>
  static auto descriptor(Element const* base, int rows, int k, Stride stride, Layout, Shape) {
    auto const matrix = cute::make_tensor(cute::make_gmem_ptr(base),
                                          cute::make_layout(cute::make_shape(rows, k), stride));
    return cute::make_tma_copy(cute::SM90_TMA_LOAD{}, matrix,
                               Layout{}(cute::_, cute::_, cute::Int<0>{}), Shape{}, cute::_1{});
  }
  using TmaB = decltype(descriptor(nullptr, 0, 0, StrideB{}, LayoutB{}, ShapeB{}));
  using TmaA = decltype(descriptor(nullptr, 0, 0, StrideA{}, LayoutA{}, ShapeA{}));

  struct Params {
    TmaB b;
    TmaA a;
    fluxgen_group group;
    FlatTiles tiles;
    int32_t n;
    int32_t k;
    Element* d;
    int64_t d_row_stride;
    int32_t ends_call;
  };

  struct Shared {
    alignas(1024) Element b[cute::cosize_v<LayoutB>];
    alignas(1024) Element a[cute::cosize_v<LayoutA>];
    alignas(16) float part[kPass * kPitch];
    uint64_t full[kStages];
    uint64_t empty[kStages];
    uint64_t ready;  // all blocks' parts of some tokens are in their shared memory
    uint64_t read;   // all blocks have read this one's
  };
  static constexpr int kSharedBytes = int(sizeof(Shared));
  static_assert(kStages >= 2 && kSharedBytes <= kSharedLimit, "the stages do not fit");

  // What of the walk this block has: its cluster's tiles, and its part of K.
  struct Walk {
    int part;
    int parts;
    int first;
    int step;
    int total;
    int k_begin;
    int k_end;

    CUTLASS_DEVICE explicit Walk(Params const& p) {
      part = int(cute::block_rank_in_cluster());
      parts = int(cute::cluster_shape().x);
      first = int(blockIdx.x) / parts;
      step = int(gridDim.x) / parts;
      total = p.tiles.tiles_m * p.tiles.tiles_n;
      int const steps = (p.k + kDepth - 1) / kDepth;
      k_begin = split_begin(steps, part, parts);
      k_end = split_begin(steps, part + 1, parts);
    }
  };

  // One warp. The own slab is in the gathered matrix like the others'.
  CUTLASS_DEVICE static void produce(Params const& p, Shared& shared) {
    using namespace cute;
    int const lane = int(threadIdx.x) & 31;
    Walk const walk(p);
    Tensor sB = make_tensor(make_smem_ptr(shared.b), LayoutB{});
    Tensor sA = make_tensor(make_smem_ptr(shared.a), LayoutA{});
    auto const all_b =
        local_tile(p.b.get_tma_tensor(make_shape(p.n, p.k)), ShapeB{}, make_coord(_, _));
    auto const all_a =
        local_tile(p.a.get_tma_tensor(make_shape(p.tiles.tokens, p.k)), ShapeA{}, make_coord(_, _));
    auto const cut_b = p.b.get_slice(_0{});
    auto const cut_a = p.a.get_slice(_0{});
    Tensor to_b = cut_b.partition_D(sB);
    Tensor to_a = cut_a.partition_D(sA);

    uint32_t epoch = 0, come = 0;  // sources whose slabs are here
    bool knows_epoch = false;
    uint32_t filled = 0;  // stages, of the whole walk
    for (int linear = walk.first; linear < walk.total; linear += walk.step) {
      int tile_m, tile_n;
      flat_tile_at(p.tiles, linear, &tile_m, &tile_n);
      Tensor from_b = cut_b.partition_S(all_b(_, _, tile_n, _));
      Tensor from_a = cut_a.partition_S(all_a(_, _, tile_m, _));
      auto const begin_stage = [&](int step) {
        uint32_t const at = filled + uint32_t(step - walk.k_begin), stage = at % kStages;
        if (at >= kStages) {
          wait_parity(&shared.empty[stage], (at / kStages - 1u) & 1u);
        }
        arrive_expecting(&shared.full[stage], kStageBytes);
        copy(p.b.with(shared.full[stage]), from_b(_, _, _, step), to_b(_, _, _, stage));
      };
      // B waits for nobody: of the first tile all stages have it before the flags are looked at.
      int early = walk.k_begin;
      if (kAllGather) {
        if (filled == 0) {
          early = min(walk.k_end, walk.k_begin + kStages);
          for (int step = walk.k_begin; lane == 0 && step < early; ++step) {
            begin_stage(step);
          }
        }
        if (!knows_epoch) {
          epoch = gather_epoch(p.group);
          knows_epoch = true;
        }
        Ranks const sources = ranks_of(p.tiles, tile_m);
        int const source = sources.first + lane;
        if (source < sources.end && (come >> source & 1u) == 0u) {
          wait_epoch(gathered_flag(p.group.peers[p.group.rank], source, 0), epoch, p.group,
                     FLUXGEN_AG_GEMM, source, 0);
        }
        come |= (2u << (sources.end - 1)) - (1u << sources.first);
        __syncwarp();
        asm volatile("fence.proxy.async;" ::: "memory");  // what TMA reads came with those flags
      }
      for (int step = walk.k_begin; lane == 0 && step < walk.k_end; ++step) {
        if (step >= early) {
          begin_stage(step);
        }
        uint32_t const stage = (filled + uint32_t(step - walk.k_begin)) % kStages;
        copy(p.a.with(shared.full[stage]), from_a(_, _, _, step), to_a(_, _, _, stage));
      }
      filled += uint32_t(walk.k_end - walk.k_begin);
      __syncwarp();
    }
    if (kAllGather && p.ends_call != 0 && lane == 0) {
      end_gather(p.group, knows_epoch ? epoch : gather_epoch(p.group), gridDim.x);
    }
  }

  CUTLASS_DEVICE static void consume(Params const& p, Shared& shared) {
    using namespace cute;
    int const thread = int(threadIdx.x);
    Walk const walk(p);
    FlatStore<Element> const output =
        kAllGather ? FlatStore<Element>{p.group, p.tiles, p.n, p.d, p.d_row_stride, 0u, false}
                   : FlatStore<Element>::begin(p.group, p.tiles, p.n);
    Tensor sB = make_tensor(make_smem_ptr(shared.b), LayoutB{});
    Tensor sA = make_tensor(make_smem_ptr(shared.a), LayoutA{});
    TiledMma mma;
    auto const of_group = mma.get_slice(cutlass::canonical_warp_group_idx() * 128);
    Tensor rB = of_group.make_fragment_A(of_group.partition_A(sB));  // columns are wgmma's rows
    Tensor rA = of_group.make_fragment_B(of_group.partition_B(sA));
    auto const mine = mma.get_slice(thread);
    Tensor accum = partition_fragment_C(mma, Shape<Int<kColumns>, Int<kTokens>>{});
    Tensor where = mine.partition_C(make_identity_tensor(Shape<Int<kColumns>, Int<kTokens>>{}));

    uint32_t used = 0;   // stages, of the whole walk
    uint32_t round = 0;  // exchanges
    for (int linear = walk.first; linear < walk.total; linear += walk.step) {
      int tile_m, tile_n;
      flat_tile_at(p.tiles, linear, &tile_m, &tile_n);
      mma.accumulate_ = GMMA::ScaleOut::Zero;
      auto const multiply = [&] {
        uint32_t const stage = used % kStages;
        wait_parity(&shared.full[stage], used / kStages & 1u);
        ++used;
        warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < size<2>(rB); ++k) {
          gemm(mma, rB(_, _, k, stage), rA(_, _, k, stage), accum);
          mma.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
      };
      warpgroup_fence_operand(accum);
      multiply();  // each part has a step
      warpgroup_fence_operand(accum);
      for (int step = walk.k_begin + 1; step < walk.k_end; ++step) {
        warpgroup_fence_operand(accum);
        multiply();
        warpgroup_wait<1>();
        warpgroup_fence_operand(accum);
        release(shared, used - 2u);
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(accum);
      release(shared, used - 1u);

      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kTokens; first += kPass, ++round) {
        if (first >= flat_tile_tokens(p.tiles, tile_m)) {
          break;
        }
        if (round > 0) {
          wait_parity_of_cluster(&shared.read, (round - 1u) & 1u);
        }
        // A thread's accumulators are in the order of their tokens: a part of them are a pass's.
        constexpr int kEach = decltype(size(accum))::value * kPass / kTokens;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kEach; ++i) {
          auto const at = where(first / kPass * kEach + i);
          shared.part[(get<1>(at) - first) * kPitch + get<0>(at)] =
              accum(first / kPass * kEach + i);
        }
        sync_threads(1, kConsumers);
        if (thread < walk.parts) {
          arrive_in(&shared.ready, uint32_t(thread));
        }
        wait_parity_of_cluster(&shared.ready, round & 1u);
        store(output, walk, shared, tile_m, tile_n, first);
        sync_threads(1, kConsumers);
        if (thread < walk.parts) {
          arrive_in(&shared.read, uint32_t(thread));
        }
      }
      if constexpr (!kAllGather) {
        output.signal(tile_m, thread, uint32_t(walk.parts));
      }
    }
    if (round > 0) {  // shared memory stays until nobody reads it
      wait_parity_of_cluster(&shared.read, (round - 1u) & 1u);
    }
  }

  CUTLASS_DEVICE static void release(Shared& shared, uint32_t used) {
    if ((threadIdx.x & 127) == 0) {
      arrive(&shared.empty[used % kStages]);
    }
  }

  // This block's share of a tile's tokens from `first` on: added up in the order of K, rounded once.
  CUTLASS_DEVICE static void store(FlatStore<Element> const& output, Walk const& walk,
                                   Shared& shared, int tile_m, int tile_n, int first) {
    constexpr int kWords = kColumns / 8;
    constexpr int kTotal = kPass * kWords;
    int const tokens = flat_tile_tokens(output.tiles, tile_m);
    uint32_t const parts_at = shared_address(shared.part);
    int const end = kTotal * (walk.part + 1) / walk.parts;
    for (int i = kTotal * walk.part / walk.parts + int(threadIdx.x); i < end; i += kConsumers) {
      int const row = i / kWords, word = i % kWords;
      int const column = tile_n * kColumns + word * 8;
      if (first + row >= tokens || column >= output.n) {  // n is a multiple of 8
        continue;
      }
      uint32_t const at = parts_at + uint32_t(row * kPitch + word * 8) * 4u;
      float sum[8] = {};
      for (int part = 0; part < walk.parts; ++part) {
        float4 const low = load_in(at, uint32_t(part)), high = load_in(at + 16u, uint32_t(part));
        sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
        sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
      }
      output.template put<kAllGather>(tile_m * kTokens + first + row, column, sum);
    }
  }

  CUTLASS_DEVICE static void run(Params const& p, Shared& shared) {
    if constexpr (!kAllGather) {
      // The reduction may start: it waits for flags, not for this kernel. All blocks are resident, so it
      // takes no place that one of them needs.
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
    bool const producer = cutlass::canonical_warp_idx_sync() >= kConsumers / 32;
    if (threadIdx.x == kConsumers) {
      cute::prefetch_tma_descriptor(p.b.get_tma_descriptor());
      cute::prefetch_tma_descriptor(p.a.get_tma_descriptor());
      uint32_t const parts = cute::cluster_shape().x;
      for (int stage = 0; stage < kStages; ++stage) {
        init_barrier(&shared.full[stage], 1);
        init_barrier(&shared.empty[stage], kGroups);
      }
      init_barrier(&shared.ready, parts);
      init_barrier(&shared.read, parts);
    }
    __syncwarp();
    publish_barriers();
    if (producer) {
      produce(p, shared);
    } else {
      consume(p, shared);
    }
  }
};

}  // namespace fluxgen
#endif  // FLUXGEN_FAMILIES_SM90_FLAT_KERNEL_CUH_
