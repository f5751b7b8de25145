// The prologue of ag_gemm: the producer warp waits for the chunks of A that a tile needs, then
// lets CUTLASS's mainloop load them. The MMA warps never see a flag.
//
// The own slab is read where the caller has it, and waits for nothing: its tiles start while the
// slab is still being staged for the peers.
//
// M chunks: the tile's rows decide which chunks it waits for, once, before its first load.
// K chunks: the load runs in pieces, one per chunk, and waits before each: every tile starts early.
// Only the first `cut` slabs need come so; of the later ones every piece waits for the whole slab.
//
// A flag read costs about a microsecond, as much as two stages of the pipeline hold, so the warp asks
// once: it keeps the epoch of the call, and which slabs have come whole. A tile of those is loaded
// like any other. It first asks for all of that while the kernel still sets up its barriers.
//
// The gathered A is one (m, k) matrix, so one TMA descriptor reaches all of it. A tile of the last
// rows of a slab reads on into the next slab, which may not have arrived: those rows are never
// stored. `span` adjacent slabs may be tiled as one, so that slabs
// shorter than a tile fill it; the tile then waits for each source that it touches.
#ifndef FLUXGEN_FAMILIES_SM90_WAIT_MAINLOOP_CUH_
#define FLUXGEN_FAMILIES_SM90_WAIT_MAINLOOP_CUH_

#include "cutlass/gemm/collective/collective_mma.hpp"
#include "fluxgen/order/chunks.cuh"
#include "fluxgen/protocol/flags.cuh"

namespace fluxgen {

struct WaitArguments {
  fluxgen_group group{};
  int32_t rows = 0;  // of one source's slab
  int32_t span = 1;  // sources tiled as one slab
  int32_t k = 0;
  int32_t chunk_rows = 0;     // M axis; as large as rows for one chunk
  int32_t chunk_k_tiles = 0;  // K axis: tiles of K in the first chunk; 0 on the M axis
  int32_t cut = 0;            // K axis: slabs that come in chunks, from this rank's on
  int32_t last_chunk = 0;     // of a slab that comes in chunks, along either axis
  void const* own = nullptr;  // this rank's slab; null: it is waited for like the others
  int64_t own_row_stride = 0;
  int32_t ends_call = 0;
};

template <class Base>
struct WaitMainloop : Base {
  using PipelineState = typename Base::PipelineState;
  using MainloopPipeline = typename Base::MainloopPipeline;
  using TensorStorage = typename Base::TensorStorage;
  static constexpr int kTileM = cute::size<0>(typename Base::TileShape{});

  struct Arguments : Base::Arguments {
    WaitArguments wait{};
  };
  struct Params : Base::Params {
    WaitArguments wait{};
    typename Base::Params own;
  };

  // The problem is (rows * span, n, k, world / span); A is (m, k, 1).
  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args,
                                        void* workspace) {
    auto [m, n, k, l] = cute::append<4>(problem, 1);
    Params params;
    static_cast<typename Base::Params&>(params) =
        Base::to_underlying_arguments(cute::make_shape(m * l, n, k, 1), args, workspace);
    params.wait = args.wait;
    params.own = params;
    if (args.wait.own != nullptr) {
      typename Base::Arguments own = args;
      own.ptr_A = static_cast<decltype(own.ptr_A)>(args.wait.own);
      cute::get<0>(own.dA) = args.wait.own_row_stride;
      params.own = Base::to_underlying_arguments(cute::make_shape(m, n, k, 1), own, workspace);
    }
    return params;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    cute::prefetch_tma_descriptor(params.own.tma_load_a.get_tma_descriptor());
  }

  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(ProblemShape const& problem, Params const& params) {
    if (threadIdx.x < cutlass::NumThreadsPerWarp) {  // the warp that calls load()
      look(params.wait, int(threadIdx.x));
    }
    return Base::load_init(problem, params);
  }

  template <class LoadInputs, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState state,
                           LoadInputs const& inputs, BlockCoord const& coord, KTileIterator k_tile,
                           int k_tile_count, int lane, uint32_t block_rank_in_cluster,
                           TensorStorage& storage) {
    WaitArguments const& wait = params.wait;
    wait_ = &wait;
    auto [m, n, k, slab] = coord;
    if (wait.own != nullptr && int(slab) == wait.group.rank) {
      auto const own = rows_of(params.own, wait.rows, wait.k, 0);
      Base::load(params.own, pipeline, state, cute::make_tuple(own, cute::get<1>(inputs)),
                 cute::make_coord(m, n, k, 0), k_tile, k_tile_count, lane, block_rank_in_cluster,
                 storage);
      return;
    }
    int const slab_rows = wait.rows * wait.span;
    int const row = int(m) * kTileM;
    // Tiles past the edge exist inside a cluster. Nobody sets flags for them, and they load
    // nothing of A that is stored (but their share of B, which a partner needs): they do not wait.
    int const end = row < slab_rows ? cute::min(row + kTileM, slab_rows) : row;
    auto const tiles =
        rows_of(params, slab_rows * (wait.group.world / wait.span), wait.k, int(slab) * slab_rows);
    auto const from_slab = cute::make_tuple(tiles, cute::get<1>(inputs));
    auto const in_slab = cute::make_coord(m, n, k, 0);
    int const first = int(slab) * wait.span + row / wait.rows;
    int const last = row < end ? int(slab) * wait.span + (end - 1) / wait.rows : first - 1;
    bool const starts = starts_;
    starts_ = false;
    if (row < end && !knows_epoch_) {
      epoch_ = gather_epoch(wait.group);
      knows_epoch_ = true;
    }

    if (wait.chunk_k_tiles == 0 || are_whole(first, last) ||
        (!starts && have_come(wait, first, last, lane))) {
      wait_rows(wait, int(slab) * wait.span, row, end, lane);
      Base::load(params, pipeline, state, from_slab, in_slab, k_tile, k_tile_count, lane,
                 block_rank_in_cluster, storage);
      return;
    }
    for (int chunk = 0; k_tile_count > 0; ++chunk) {
      wait_columns(wait, first, last, chunk, lane);
      int const next = int(k_chunk_end(wait.chunk_k_tiles, chunk, INT32_MAX) -
                           k_chunk_begin(wait.chunk_k_tiles, chunk));
      int const piece = cute::min(k_tile_count, next);
      Base::load(params, pipeline, state, from_slab, in_slab, k_tile, piece, lane,
                 block_rank_in_cluster, storage);
      state.advance(piece);
      for (int i = 0; i < piece; ++i) {
        ++k_tile;
      }
      k_tile_count -= piece;
    }
    note_whole(first, last);
  }

  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState state) {
    Base::load_tail(pipeline, state);
    if (wait_ != nullptr && wait_->ends_call != 0 && cute::elect_one_sync()) {
      uint32_t const epoch = knows_epoch_ ? epoch_ : gather_epoch(wait_->group);
      end_gather(wait_->group, epoch, gridDim.x * gridDim.y * gridDim.z);
    }
  }

 private:
  // Tiles of `rows` rows of what a descriptor reaches, from row `first` on.
  CUTLASS_DEVICE static auto rows_of(typename Base::Params const& params, int rows, int k,
                                     int first) {
    auto const all = cute::domain_offset(
        cute::make_coord(first, 0, 0),
        params.tma_load_a.get_tma_tensor(cute::make_shape(rows, k, cute::Int<1>{})));
    return cute::local_tile(all, typename Base::TileShape{},
                            cute::make_coord(cute::_, cute::_, cute::_),
                            cute::Step<cute::_1, cute::Underscore, cute::_1>{});
  }

  // Flag of the last chunk of a source's slab: copies and flags come in order.
  CUTLASS_DEVICE static int last_chunk(WaitArguments const& wait, int source) {
    bool const by_rows = wait.chunk_k_tiles == 0;
    return by_rows || visit_of(wait, source) < wait.cut ? wait.last_chunk : 0;
  }
  CUTLASS_DEVICE static int visit_of(WaitArguments const& wait, int source) {
    return (source < wait.group.rank ? wait.group.world : 0) + source - wait.group.rank;
  }
  CUTLASS_DEVICE static uint32_t bits(int first, int last) { return (2u << last) - (1u << first); }
  CUTLASS_DEVICE void note_whole(int first, int last) {
    if (first <= last) {
      whole_ |= bits(first, last);
    }
  }

  CUTLASS_DEVICE bool are_whole(int first, int last) const {
    return first > last || (bits(first, last) & ~whole_) == 0u;
  }

  // The epoch of the call, if it is known by now, and the slabs that have come: three loads at once.
  CUTLASS_DEVICE void look(WaitArguments const& wait, int lane) {
    void* mine = wait.group.peers[wait.group.rank];
    uint32_t const done = load_relaxed(workspace_word(mine, kMultipliedOffset));
    uint32_t const begun = load_relaxed(workspace_word(mine, kBegunOffset));
    uint32_t flag = begun - 1u;
    if (lane < wait.group.world) {
      flag = load_acquire_system(flag_of(wait, lane, last_chunk(wait, lane)));
    }
    knows_epoch_ = epoch_reached(begun, done + 1u);
    epoch_ = begun;
    uint32_t const come = __ballot_sync(0xffffffffu, epoch_reached(flag, begun));
    whole_ = knows_epoch_ ? come : 0u;
    order_loads();
  }

  // Whether all these sources' slabs are here, where the answer was no before. Not for a block's first
  // tile, which would wait for it.
  CUTLASS_DEVICE bool have_come(WaitArguments const& wait, int first, int last, int lane) {
    bool come = true;
    for (int source = first + lane; source <= last; source += 32) {
      uint32_t const* flag = flag_of(wait, source, last_chunk(wait, source));
      come = come && epoch_reached(load_acquire_system(flag), epoch_);
    }
    come = __all_sync(0xffffffffu, come);
    if (come) {
      note_whole(first, last);
      order_loads();
    }
    return come;
  }

  // The whole warp waits, one lane a chunk; whichever lane issues the TMA load afterwards is then
  // ordered behind all of them. The load runs in the async proxy, hence the proxy fence.
  CUTLASS_DEVICE void wait_rows(WaitArguments const& wait, int first_source, int row, int end,
                                int lane) {
    if (row >= end) {
      return;
    }
    bool waited = false;
    while (row < end) {
      int const place = row / wait.rows;
      int const source = first_source + place;
      int const begin = place * wait.rows;
      int const stop = cute::min(end, begin + wait.rows);
      if ((whole_ >> source & 1u) == 0u) {
        int const last = (stop - 1 - begin) / wait.chunk_rows;
        for (int chunk = (row - begin) / wait.chunk_rows + lane; chunk <= last; chunk += 32) {
          wait_flag(wait, source, chunk);
        }
        // Earlier chunks come earlier, so the last one is all of them.
        if (last == wait.last_chunk) {
          whole_ |= 1u << source;
        }
        waited = true;
      }
      row = stop;
    }
    if (waited) {
      order_loads();
    }
  }

  CUTLASS_DEVICE void wait_columns(WaitArguments const& wait, int first, int last, int chunk,
                                   int lane) {
    for (int source = first + lane; source <= last; source += 32) {
      if ((whole_ >> source & 1u) == 0u) {
        wait_flag(wait, source, visit_of(wait, source) < wait.cut ? chunk : 0);
      }
    }
    order_loads();
  }

  CUTLASS_DEVICE static uint32_t* flag_of(WaitArguments const& wait, int source, int chunk) {
    return gathered_flag(wait.group.peers[wait.group.rank], source, chunk);
  }

  CUTLASS_DEVICE void wait_flag(WaitArguments const& wait, int source, int chunk) {
    wait_epoch(flag_of(wait, source, chunk), epoch_, wait.group, FLUXGEN_AG_GEMM, source, chunk);
  }

  CUTLASS_DEVICE static void order_loads() {
    __syncwarp();
    asm volatile("fence.proxy.async;" ::: "memory");
  }

  WaitArguments const* wait_ = nullptr;
  uint32_t whole_ = 0;  // sources whose slabs have come whole
  uint32_t epoch_ = 0;
  bool knows_epoch_ = false;
  bool starts_ = true;
};

}  // namespace fluxgen
#endif  // FLUXGEN_FAMILIES_SM90_WAIT_MAINLOOP_CUH_
