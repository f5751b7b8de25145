// The prologue of ag_gemm: the producer warp waits for the chunks of A that a tile needs, then
// lets CUTLASS's mainloop load them. The MMA warps never see a flag.
//
// M chunks: the tile's rows decide which chunks it waits for, once, before its first load.
// K chunks: the load runs in pieces, one per chunk, and waits before each: every tile starts early.
#ifndef FLUXGEN_SM90_WAIT_MAINLOOP_CUH_
#define FLUXGEN_SM90_WAIT_MAINLOOP_CUH_

#include "cutlass/gemm/collective/collective_mma.hpp"
#include "fluxgen/protocol.cuh"

namespace fluxgen {

struct WaitArguments {
  fluxgen_group group{};
  int32_t rows = 0;            // of one slab
  int32_t chunk_rows = 0;      // M axis; as large as rows for one chunk
  int32_t chunk_k_tiles = 0;   // K axis: tiles of K in one chunk; 0 on the M axis
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
  };

  // A has 2 W slabs, the slots of both halves: the half is chosen on the device, by the epoch.
  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args,
                                        void* workspace) {
    auto [m, n, k, l] = cute::append<4>(problem, 1);
    Params params;
    static_cast<typename Base::Params&>(params) =
        Base::to_underlying_arguments(cute::make_shape(m, n, k, 2 * l), args, workspace);
    params.wait = args.wait;
    return params;
  }

  template <class LoadInputs, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState state,
                           LoadInputs const& inputs, BlockCoord const& coord,
                           KTileIterator k_tile, int k_tile_count, int lane,
                           uint32_t block_rank_in_cluster, TensorStorage& storage) {
    WaitArguments const& wait = params.wait;
    uint32_t const epoch = current_epoch(wait.group.peers[wait.group.rank], 0);
    auto [m, n, k, source] = coord;
    // Tiles past the edge exist inside a cluster. Nobody sets flags for them, and they load
    // nothing of A (but their share of B, which a partner needs): they must not wait.
    int const row = int(m) * kTileM;
    bool const inside = row < wait.rows;
    auto const half_coord =
        cute::make_coord(m, n, k, int(source) + int(epoch & 1u) * wait.group.world);

    if (wait.chunk_k_tiles == 0) {
      if (inside) {
        int const first = row / wait.chunk_rows;
        int const last = (cute::min(row + kTileM, wait.rows) - 1) / wait.chunk_rows;
        wait_chunks(wait, source, first, last, epoch, lane);
      }
      Base::load(params, pipeline, state, inputs, half_coord, k_tile, k_tile_count, lane,
                 block_rank_in_cluster, storage);
      return;
    }
    for (int chunk = 0; k_tile_count > 0; ++chunk) {
      if (inside) {
        wait_chunks(wait, source, chunk, chunk, epoch, lane);
      }
      int const piece = cute::min(k_tile_count, wait.chunk_k_tiles);
      Base::load(params, pipeline, state, inputs, half_coord, k_tile, piece, lane,
                 block_rank_in_cluster, storage);
      state.advance(piece);
      for (int i = 0; i < piece; ++i) {
        ++k_tile;
      }
      k_tile_count -= piece;
    }
  }

 private:
  // The whole warp waits, one lane a chunk; whichever lane issues the TMA load afterwards is then
  // ordered behind all of them. The load runs in the async proxy, hence the proxy fence.
  CUTLASS_DEVICE static void wait_chunks(WaitArguments const& wait, int source, int first,
                                         int last, uint32_t epoch, int lane) {
    for (int chunk = first + lane; chunk <= last; chunk += 32) {
      wait_epoch(gathered_flag(wait.group.peers[wait.group.rank], source, chunk), epoch, wait.group,
                 FLUXGEN_AG_GEMM, source, chunk);
    }
    __syncwarp();
    asm volatile("fence.proxy.async;" ::: "memory");
  }
};

}  // namespace fluxgen
#endif  // FLUXGEN_SM90_WAIT_MAINLOOP_CUH_
