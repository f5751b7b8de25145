// A fused Hopper GEMM: CUTLASS's warp-specialised kernel with fluxgen's three pieces around it
// (wait prologue or signal epilogue, rank-batched scheduler), and its launch behind the C ABI.
//
//   Config  ->  Sm90Gemm<Config>::Kernel  ->  prepare<Config>(args, launch, parameter)
#ifndef FLUXGEN_FAMILIES_SM90_CUH_
#define FLUXGEN_FAMILIES_SM90_CUH_

#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cutlass/numeric_types.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/device_kernel.h"

#include "fluxgen/families/launch.cuh"
#include "fluxgen/order/sm90_scheduler.cuh"
#include "fluxgen/epilogue/sm90_signal.cuh"
#include "fluxgen/families/sm90_wait_mainloop.cuh"

namespace fluxgen {

// Config has: op, Element, kBTransposed (B is (k, n)), TileM/N/K, ClusterM/N, kCooperative, kStages
// (0: as many as fit).
template <class Config>
struct Sm90Gemm {
  using Element = typename Config::Element;
  using TileShape =
      cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>;
  using ClusterShape =
      cute::Shape<cute::Int<Config::kClusterM>, cute::Int<Config::kClusterN>, cute::_1>;
  static constexpr int kAlign = 16 / sizeof(Element);
  static constexpr bool kAllGather = Config::kOp == FLUXGEN_AG_GEMM;

  using MainloopSchedule =
      cute::conditional_t<Config::kCooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                          cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  using EpilogueSchedule =
      cute::conditional_t<Config::kCooperative, cutlass::epilogue::TmaWarpSpecializedCooperative,
                          cutlass::epilogue::TmaWarpSpecialized>;

  using BaseEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void,
      cutlass::layout::RowMajor, kAlign, Element, cutlass::layout::RowMajor, kAlign,
      EpilogueSchedule>::CollectiveOp;
  static constexpr int kAccumulators =
      Config::kTileM * Config::kTileN / (Config::kCooperative ? 256 : 128);  // of one thread
  static constexpr bool kCanSpan = kAllGather || kAccumulators <= 160;
  using Epilogue =
      cute::conditional_t<kAllGather, BaseEpilogue,
                          SignalEpilogue<typename WithOwnerStore<BaseEpilogue>::Type, kCanSpan>>;

  using AutoStages = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
      sizeof(typename BaseEpilogue::SharedStorage))>;
  using Stages = cute::conditional_t<Config::kStages == 0, AutoStages,
                                     cutlass::gemm::collective::StageCount<Config::kStages>>;
  using LayoutB = cute::conditional_t<Config::kBTransposed, cutlass::layout::RowMajor,
                                      cutlass::layout::ColumnMajor>;
  using BaseMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor,
      kAlign, Element, LayoutB, kAlign, float, TileShape, ClusterShape, Stages,
      MainloopSchedule>::CollectiveOp;
  using Mainloop = cute::conditional_t<kAllGather, WaitMainloop<BaseMainloop>, BaseMainloop>;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                      Epilogue, RankBatchedScheduler>;
  static_assert(alignof(typename Kernel::Params) >= 64, "TMA descriptors need 64-byte alignment");
  static_assert(sizeof(typename Kernel::Params) <= 4096, "larger parameters slow the launch");
  static constexpr int kStageCount = BaseMainloop::DispatchPolicy::Stages;
};

// The most a persistent kernel may launch on this device: clusters that are resident together.
template <class Kernel>
cudaError_t resident_clusters(int sms, int cluster_m, int cluster_n, int* clusters) {
  int const cluster = cluster_m * cluster_n;
  if (cluster == 1) {
    *clusters = sms;
    return cudaSuccess;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(cluster_m, cluster_n * (sms / cluster > 0 ? sms / cluster : 1), 1);
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(cluster_m), unsigned(cluster_n), 1u};
  config.attrs = &attribute;
  config.numAttrs = 1;
  int fit = 0;
  cudaError_t const error =
      cudaOccupancyMaxActiveClusters(&fit, cutlass::device_kernel<Kernel>, &config);
  *clusters = fit < sms / cluster ? fit : sms / cluster;
  return error;
}

// What its launches depend on: the clusters that are resident together.
template <class Config>
DeviceFacts const& sm90_device(int device) {
  using Kernel = typename Sm90Gemm<Config>::Kernel;
  return device_facts<&cutlass::device_kernel<Kernel>, Kernel::SharedStorageSize>(
      device, [](DeviceFacts& found) {
        return resident_clusters<Kernel>(found.sms, Config::kClusterM, Config::kClusterN,
                                         &found.resident);
      });
}

// Everything the TMA path cannot take is refused here, before anything is launched.
template <class Config>
int check(fluxgen_gemm_args const& args, char* message, int64_t size) {
  using Gemm = Sm90Gemm<Config>;
  if (int const status = check_gemm(args, facts_of<Config>(), message, size)) {
    return status;
  }
  if constexpr (!Gemm::kAllGather) {
    if (args.span > 1 && (!Gemm::kCanSpan || args.rows * args.span != Config::kTileM ||
                          args.chunk_size || args.rows % Gemm::Epilogue::kSubtileM)) {
      return fail(
          message, size, FLUXGEN_BAD_ARGUMENT,
          "span=%lld with slabs of %lld rows: gemm_rs needs their product to be one tile of "
          "at most 160 accumulators a thread, whole subtiles a slab, and no chunks",
          args.span, args.rows);
    }
  }
  return FLUXGEN_OK;
}

template <class Config>
struct GemmParameter {
  using Type = typename Sm90Gemm<Config>::Kernel::Params;
};

template <class Config>
int prepare(fluxgen_gemm_args const& args, GemmLaunch* launch,
            typename GemmParameter<Config>::Type* parameter, char* message, int64_t size) {
  using Gemm = Sm90Gemm<Config>;
  using Kernel = typename Gemm::Kernel;
  using Element = typename Gemm::Element;
  if (int const status = check<Config>(args, message, size)) {
    return status;
  }
  int device = 0;
  if (cudaError_t const error = cudaGetDevice(&device)) {
    return cuda_fail(message, size, "cudaGetDevice", error);
  }
  DeviceFacts const& facts = sm90_device<Config>(device);
  if (int const status =
          device_status(facts, device, "sm_90a code: expected a Hopper GPU", message, size)) {
    return status;
  }

  int const span = args.span > 1 ? args.span : 1;
  TileOrder order;
  if (!order_of(args, facts_of<Config>(), Config::kTileN * Config::kClusterN, Config::kClusterM,
                &order)) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "groups: expected positive counts that sum to world=%lld", args.group.world);
  }
  constexpr int kCluster = Config::kClusterM * Config::kClusterN;
  int const sms = args.sms > 0 && args.sms < facts.sms ? args.sms : facts.sms;
  int64_t clusters = facts.resident < sms / kCluster ? facts.resident : sms / kCluster;
  if (clusters < 1) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "sms=%lld: expected at least the %lld blocks of one cluster", args.sms, kCluster);
  }
  clusters = clusters < int64_t(order.total) ? clusters : int64_t(order.total);

  int const rows = int(args.rows), n = int(args.n), k = int(args.k);
  int const chunk = int(args.chunk_size);
  typename Kernel::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = cute::make_shape(rows * span, n, k, args.group.world / span);
  arguments.mainloop.ptr_B = static_cast<Element const*>(args.b);
  cute::get<Config::kBTransposed ? 1 : 0>(arguments.mainloop.dB) = args.b_row_stride;
  cute::get<2>(arguments.mainloop.dB) = 0;
  arguments.mainloop.ptr_A = static_cast<Element const*>(args.a);
  cute::get<0>(arguments.mainloop.dA) = args.a_row_stride;
  cute::get<2>(arguments.mainloop.dA) = args.rows * span * args.a_row_stride;
  if constexpr (Gemm::kAllGather) {
    arguments.mainloop.wait.group = args.group;
    arguments.mainloop.wait.rows = rows;
    arguments.mainloop.wait.span = span;
    arguments.mainloop.wait.k = k;
    arguments.mainloop.wait.own = span == 1 ? args.own : nullptr;
    arguments.mainloop.wait.own_row_stride = args.own_row_stride;
    arguments.mainloop.wait.ends_call = args.ends_call;
    bool const along_k = args.chunk_axis == FLUXGEN_CHUNK_K;
    arguments.mainloop.wait.chunk_rows = along_k || chunk == 0 ? rows : chunk;
    arguments.mainloop.wait.chunk_k_tiles =
        !along_k
            ? 0
            : (chunk == 0 ? (k + Config::kTileK - 1) / Config::kTileK : chunk / Config::kTileK);
    arguments.mainloop.wait.last_chunk =
        chunk == 0 ? 0 : (along_k ? k_chunk_count(chunk, k) : (rows + chunk - 1) / chunk) - 1;
    arguments.mainloop.wait.cut = args.cut > 0 ? args.cut : args.group.world;
    arguments.epilogue.ptr_D = static_cast<Element*>(args.d);
    cute::get<0>(arguments.epilogue.dD) = args.d_row_stride;
    cute::get<2>(arguments.epilogue.dD) = args.rows * span * args.d_row_stride;
  } else {
    arguments.epilogue.signal.group = args.group;
    arguments.epilogue.signal.span = span;
    arguments.epilogue.signal.drain = args.drain;
    arguments.epilogue.signal.tiles_m = (rows * span + Config::kTileM - 1) / Config::kTileM;
    arguments.epilogue.signal.tiles_n = (n + Config::kTileN - 1) / Config::kTileN;
    arguments.epilogue.signal.chunk_tiles_m =
        chunk == 0 ? arguments.epilogue.signal.tiles_m : chunk / Config::kTileM;
  }
  arguments.epilogue.thread.alpha = 1.0f;
  arguments.epilogue.thread.beta = 0.0f;
  arguments.hw_info.device_id = device;
  arguments.hw_info.sm_count = sms;
  arguments.hw_info.max_active_clusters = int(clusters);
  arguments.scheduler.order = order;
  arguments.scheduler.clusters = int(clusters);

  *parameter = Kernel::to_underlying_arguments(arguments, nullptr);
  // An ag_gemm may start early: it waits for flags, never for the kernel that begins its call.
  *launch = {reinterpret_cast<void const*>(&cutlass::device_kernel<Kernel>),
             Kernel::get_grid_shape(*parameter),
             Kernel::get_block_shape(),
             Kernel::SharedStorageSize,
             Config::kClusterM,
             Config::kClusterN,
             Gemm::kAllGather};
  return FLUXGEN_OK;
}

template <class Config>
int describe(fluxgen_kernel_info* info) {
  using Gemm = Sm90Gemm<Config>;
  if (!describe_common<Config>(info, cute::is_same_v<typename Config::Element, cutlass::half_t>)) {
    return FLUXGEN_BAD_ABI;
  }
  info->cluster_m = Config::kClusterM;
  info->cluster_n = Config::kClusterN;
  info->cooperative = Config::kCooperative;
  info->stages = Gemm::kStageCount;
  info->smem_bytes = Gemm::Kernel::SharedStorageSize;
  return FLUXGEN_OK;
}

}  // namespace fluxgen

#endif  // FLUXGEN_FAMILIES_SM90_CUH_
