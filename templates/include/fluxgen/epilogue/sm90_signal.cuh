// The epilogue of gemm_rs: a tile is stored by TMA into its owner's inbox, then counted; the last
// tile of a chunk raises the owner's flag.
//
// A tile's stores must be complete (not only read out of shared memory) before it is counted, and
// only the warp that issued them can wait for that. It does so in the tail, which a ping-pong kernel
// has after each tile, or before the next tile is stored. Counting takes two fences and the answer of
// an atomic, about 2 us; a warp that is idle otherwise, the one that would load C, does it:
//
//   storing warp    store ... complete | free? , done! | store ...
//   counting warp   free! | done? | fence, count, fence, flag | free! ...
//
// With `span` owners in one tile (slabs shorter than a tile), each subtile of the epilogue goes to
// the owner of its rows; the owner's descriptor is shifted so that the tile's rows fall on its slab.
#ifndef FLUXGEN_EPILOGUE_SM90_SIGNAL_CUH_
#define FLUXGEN_EPILOGUE_SM90_SIGNAL_CUH_

#include "cutlass/epilogue/collective/collective_epilogue.hpp"
#include "fluxgen/protocol/flags.cuh"
#include "fluxgen/epilogue/sm90_owner_store.cuh"

namespace fluxgen {

struct SignalArguments {
  fluxgen_group group{};
  int32_t span = 1;     // owners of one tile, each with tile_m / span of its rows
  int32_t tiles_m = 0;  // of one slab, those inside the edge
  int32_t tiles_n = 0;
  int32_t chunk_tiles_m = 0;  // tiles along m in one chunk
  int32_t drain = 0;          // 1: into the outbox, whose tiles copies send
};

// Base: CUTLASS's epilogue with OwnerStore. kCanSpan: whether the subtile loop is compiled in. It keeps its counters in registers beside the
// accumulators, so the largest tiles do without.
template <class Base, bool kCanSpan>
class SignalEpilogue : public Base {
 public:
  using LoadPipeline = typename Base::LoadPipeline;
  using LoadPipelineState = typename Base::LoadPipelineState;
  using StorePipeline = typename Base::StorePipeline;
  using StorePipelineState = typename Base::StorePipelineState;
  using TensorStorage = typename Base::TensorStorage;
  static constexpr int kTileM = cute::size<0>(typename Base::CtaTileMNK{});
  static constexpr int kSubtileM = cute::size<0>(typename Base::EpilogueTile{});
  static constexpr int kSubtilesM = kTileM / kSubtileM;
  static constexpr int kSubtiles = kSubtilesM * (cute::size<1>(typename Base::CtaTileMNK{}) /
                                                 cute::size<1>(typename Base::EpilogueTile{}));

  struct Arguments : Base::Arguments {
    SignalArguments signal{};
  };
  // One TMA descriptor per owner. Each spans this rank's slab in both halves
  // of that owner's inbox: the half is chosen on the device, by the epoch. An outbox has none.
  struct Params : Base::Params {
    SignalArguments signal{};
    cute::TmaDescriptor owner[FLUXGEN_MAX_WORLD];
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args,
                                        void* workspace) {
    auto [m, n, k, l] = cute::append<4>(problem, 1);
    Params params;
    params.signal = args.signal;
    fluxgen_group const& group = args.signal.group;
    int const rows = m / args.signal.span;
    int64_t const slab = int64_t(rows) * n;
    for (int owner = 0; owner < group.world; ++owner) {
      typename Base::Arguments to_owner = args;
      int const place = owner % args.signal.span;  // of the owner's rows in the tile
      to_owner.ptr_D = reinterpret_cast<typename Base::ElementD*>(partial_slab(
                           group, owner, 0, slab * int64_t(sizeof(typename Base::ElementD)),
                           args.signal.drain != 0)) -
                       place * slab;
      cute::get<0>(to_owner.dD) = n;
      cute::get<2>(to_owner.dD) = group.half_bytes / int64_t(sizeof(typename Base::ElementD));
      static_cast<typename Base::Params&>(params) = Base::to_underlying_arguments(
          cute::make_shape((place + 1) * rows, n, k, args.signal.drain ? 1 : 2), to_owner,
          workspace);
      params.owner[owner] = *params.tma_store_d.get_tma_descriptor();
    }
    return params;
  }

  // A block's first tile may be anyone's.
  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    for (int owner = 0; owner < params.signal.group.world; ++owner) {
      cute::prefetch_tma_descriptor(&params.owner[owner]);
    }
  }

  CUTLASS_HOST_DEVICE SignalEpilogue(Params const& params, TensorStorage& storage)
      : Base(params, storage), params_(params) {
    fluxgen_group const& group = params.signal.group;
    epoch_ = current_epoch(group.peers[group.rank], 1);  // long before it is needed
  }

  template <class ProblemShape, class TileShape, class TileCoord, class Engine, class Layout,
            class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadPipelineState load_state,
                            StorePipeline store_pipeline, StorePipelineState store_state,
                            ProblemShape problem, TileShape tile_shape, TileCoord coord,
                            cute::Tensor<Engine, Layout> accumulators, TiledMma tiled_mma,
                            int thread, TensorStorage& storage, int subtile = -1) {
    auto [m, n, k, slab] = coord;
    SignalArguments const& signal = params_.signal;
    issuer_ = thread / cutlass::NumThreadsPerWarp == 0;
    hand_over();
    auto const in_half = cute::make_coord(m, n, k, signal.drain ? 0 : int(epoch_ & 1u));
    int const span = kCanSpan ? signal.span : 1;
    auto store_to = [&](int owner, int which) CUTLASS_LAMBDA_FUNC_INLINE {
      typename Base::Params params = params_;
      params.tma_store_d.owner = &params_.owner[owner];
      Base to_owner(params, storage);
      auto const [next_load, next_store] =
          to_owner.store(load_pipeline, load_state, store_pipeline, store_state, problem,
                         tile_shape, in_half, accumulators, tiled_mma, thread, storage, which);
      load_state = next_load;
      store_state = next_store;
    };
    if constexpr (kCanSpan) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < (span == 1 ? 1 : kSubtiles); ++step) {
        int const place = span == 1 ? 0 : step % kSubtilesM * span / kSubtilesM;
        store_to(int(slab) * span + place, span == 1 ? subtile : step);
      }
    } else {
      store_to(int(slab), subtile);
    }
    stored_ = true;
    return cute::make_tuple(load_state, store_state);
  }

  CUTLASS_DEVICE auto store_tail(LoadPipeline load_pipeline, LoadPipelineState load_state,
                                 StorePipeline store_pipeline, StorePipelineState store_state) {
    // The reduction may start where blocks have ended: it waits for flags, not for this kernel. All
    // blocks are resident by now, so it takes no place that one of them needs.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    auto result = Base::store_tail(load_pipeline, load_state, store_pipeline, store_state);
    hand_over();
    return result;
  }

  // What the kernel asks before it lets the warp that loads C walk the tiles.
  CUTLASS_DEVICE bool is_producer_load_needed() const { return true; }

  // That warp, for each tile in order: counts it once it is stored.
  template <class ProblemShape, class TileShape, class TileCoord, class TiledMma>
  CUTLASS_DEVICE auto load(LoadPipeline, LoadPipelineState state, ProblemShape, TileShape,
                           TileCoord coord, TiledMma, int lane, TensorStorage&, int = -1,
                           bool = false) {
    auto [m, n, k, slab] = coord;
    cutlass::arch::NamedBarrier::arrive(kBothWarps, kFree);
    cutlass::arch::NamedBarrier::sync(kBothWarps, kDone);
    SignalArguments const& signal = params_.signal;
    // Tiles past the edge exist inside a cluster; they store nothing and are not counted.
    if (int(m) < signal.tiles_m && int(n) < signal.tiles_n && lane == 0) {
      fence_device();  // before the count that another block's count builds on
      int const chunk = int(m) / signal.chunk_tiles_m;
      int const begin = chunk * signal.chunk_tiles_m;
      int const tiles_m = cute::min(signal.chunk_tiles_m, signal.tiles_m - begin);
      for (int place = 0; place < signal.span; ++place) {
        signal_tile(signal.group, int(slab) * signal.span + place, chunk,
                    uint32_t(tiles_m) * signal.tiles_n, epoch_, signal.drain != 0);
      }
    }
    __syncwarp();
    return state;
  }

  CUTLASS_DEVICE auto load_tail(LoadPipeline, LoadPipelineState state) { return state; }

 private:
  static constexpr uint32_t kBothWarps = 2 * cutlass::NumThreadsPerWarp;
  static constexpr uint32_t kFree = 0, kDone = 1;  // named barriers, behind those of CUTLASS

  // The last tile, if there is one, to the warp that counts.
  CUTLASS_DEVICE void hand_over() {
    if (stored_ && issuer_) {
      // Complete, from the async proxy into the generic one.
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      asm volatile("fence.proxy.async;" ::: "memory");
      cutlass::arch::NamedBarrier::sync(kBothWarps, kFree);
      cutlass::arch::NamedBarrier::arrive(kBothWarps, kDone);
    }
    stored_ = false;
  }

  Params const& params_;
  uint32_t epoch_ = 0;
  bool stored_ = false;  // a tile that has not been handed over
  bool issuer_ = false;
};

}  // namespace fluxgen
#endif  // FLUXGEN_EPILOGUE_SM90_SIGNAL_CUH_
