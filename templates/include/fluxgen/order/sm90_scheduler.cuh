// The tile scheduler of Hopper kernels: a persistent walk in the order of tile_order.cuh.
//
// Derived from CUTLASS's persistent scheduler for the parts without an order. Every accessor that
// yields work goes through work_at(): the ping-pong kernel also calls get_current_work() directly,
// and producers and consumers that disagree about L compute wrong tiles.
//
// One cluster is one unit of the walk, so tiles past the edge exist only inside a cluster.
#ifndef FLUXGEN_ORDER_SM90_SCHEDULER_CUH_
#define FLUXGEN_ORDER_SM90_SCHEDULER_CUH_

#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "fluxgen/order/tile_order.cuh"

namespace fluxgen {

struct RankBatchedScheduler {};  // the tag for TileSchedulerSelector

template <class ClusterShape>
class Sm90RankBatchedScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;
  static constexpr int kClusterM = cute::size<0>(ClusterShape{});
  static constexpr int kClusterN = cute::size<1>(ClusterShape{});

 public:
  using WorkTileInfo = typename Base::WorkTileInfo;
  struct Arguments : Base::Arguments {
    TileOrder order{};
    int clusters = 0;  // resident clusters, the grid
  };
  struct Params : Base::Params {
    TileOrder order{};
    int clusters = 0;
  };

  template <class ProblemShape, class TileShape, class Cluster>
  static Params to_underlying_arguments(ProblemShape problem, TileShape tile, Cluster cluster,
                                        cutlass::KernelHardwareInfo const& hw_info,
                                        Arguments const& arguments, void* = nullptr, uint32_t = 1,
                                        uint32_t = 1) {
    Params params;
    static_cast<typename Base::Params&>(params) =
        Base::to_underlying_arguments(problem, tile, cluster, hw_info, arguments);
    params.order = arguments.order;
    params.clusters = arguments.clusters;
    return params;
  }

  // Grid (cluster_m, cluster_n * clusters): the second index over cluster_n is the cluster's.
  template <class ProblemShape, class TileShape, class Cluster>
  static dim3 get_grid_shape(Params const& params, ProblemShape, TileShape, Cluster,
                             cutlass::KernelHardwareInfo, Arguments = Arguments{}, bool = true) {
    return dim3(kClusterM, kClusterN * params.clusters, 1);
  }

  template <class ProblemShape, class ElementAccumulator>
  static size_t get_workspace_size(Arguments const&, ProblemShape,
                                   cutlass::KernelHardwareInfo const&, uint32_t, uint32_t = 1,
                                   uint32_t = 1) {
    return 0;
  }
  template <class ProblemShape, class ElementAccumulator>
  static cutlass::Status initialize_workspace(Arguments const&, void*, cudaStream_t, ProblemShape,
                                              cutlass::KernelHardwareInfo const&, uint32_t,
                                              uint32_t = 1, uint32_t = 1,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  static bool can_implement(Arguments const&) { return true; }

  CUTLASS_HOST_DEVICE Sm90RankBatchedScheduler() {}
  CUTLASS_DEVICE explicit Sm90RankBatchedScheduler(Params const& params)
      : params_(&params), linear_(blockIdx.y / kClusterN) {}

  template <class Cluster>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(Cluster) const {
    return work_at(linear_);
  }
  CUTLASS_DEVICE WorkTileInfo get_current_work() const { return work_at(linear_); }
  CUTLASS_DEVICE WorkTileInfo get_current_work_for_linear_idx(uint64_t linear) const {
    return work_at(uint32_t(linear));
  }
  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) {
    linear_ += uint32_t(params_->clusters) * count;
  }
  CUTLASS_DEVICE bool is_last_tile(WorkTileInfo&, uint32_t count = 1) const {
    return linear_ + uint32_t(params_->clusters) * count >= params_->order.total;
  }
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }
  template <class Pipeline, class State>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo work, Pipeline&, State) {
    return fetch_next_work(work);
  }
  // Static members of the base that take the base's Params keep their meaning here.
  CUTLASS_HOST_DEVICE static bool requires_separate_reduction(Params const&) { return false; }
  CUTLASS_HOST_DEVICE static bool compute_epilogue(WorkTileInfo const&, Params const&) {
    return true;
  }

 private:
  CUTLASS_DEVICE WorkTileInfo work_at(uint32_t linear) const {
    if (linear >= params_->order.total) {
      return WorkTileInfo::invalid_work_tile();
    }
    dim3 const block = cute::block_id_in_cluster();
    TileCoord const tile = tile_at(params_->order, linear, int32_t(block.x));
    return {tile.m, tile.n * kClusterN + int32_t(block.y), tile.l, true};
  }

  Params const* params_ = nullptr;  // the kernel's parameters: a copy would land in local memory
  uint32_t linear_ = 0;
};

}  // namespace fluxgen

namespace cutlass::gemm::kernel::detail {

template <class ArchTag, class TileShape, class ClusterShape, uint32_t Stages>
struct TileSchedulerSelector<fluxgen::RankBatchedScheduler, ArchTag, TileShape, ClusterShape,
                             Stages> {
  using Scheduler = fluxgen::Sm90RankBatchedScheduler<ClusterShape>;
};

}  // namespace cutlass::gemm::kernel::detail
#endif  // FLUXGEN_ORDER_SM90_SCHEDULER_CUH_
