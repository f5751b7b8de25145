// How a flat Hopper GEMM is launched behind the C ABI: what it refuses, and its clusters.
//
//   Config  ->  Sm90Flat<Config>  ->  prepare<Config>(args, launch, parameter)
#ifndef FLUXGEN_FAMILIES_SM90_FLAT_CUH_
#define FLUXGEN_FAMILIES_SM90_FLAT_CUH_

#include "fluxgen/families/flat_arguments.cuh"
#include "fluxgen/families/launch.cuh"
#include "fluxgen/families/sm90_flat_kernel.cuh"

namespace fluxgen {

constexpr int kMaxSplit = 8;  // blocks of a cluster that any Hopper GPU can hold

template <class Config>
__global__ void __launch_bounds__(Sm90Flat<Config>::kThreads, 1)
    sm90_flat_kernel(__grid_constant__ typename Sm90Flat<Config>::Params const params) {
  extern __shared__ __align__(1024) char shared[];
  Sm90Flat<Config>::run(params, *reinterpret_cast<typename Sm90Flat<Config>::Shared*>(shared));
}

// Clusters of so many blocks that are resident together.
template <class Config>
struct FlatClusters {
  static constexpr int kSharedBytes = Sm90Flat<Config>::kSharedBytes;
  static cudaError_t count(int sms, int parts, int* clusters) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(sms / parts * parts), 1, 1);
    config.blockDim = dim3(Sm90Flat<Config>::kThreads);
    config.dynamicSmemBytes = kSharedBytes;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(parts), 1u, 1u};
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(clusters, sm90_flat_kernel<Config>, &config);
  }
};

template <class Config, int kParts>
DeviceFacts const& sm90_flat_device(int device) {
  return device_facts<&sm90_flat_kernel<Config>, Sm90Flat<Config>::kSharedBytes>(
      device, [](DeviceFacts& found) {
        return FlatClusters<Config>::count(found.sms, kParts, &found.resident);
      });
}

template <class Config>
int check(fluxgen_gemm_args const& args, char* message, int64_t size) {
  if (int const status = check_flat(args, facts_of<Config>(true), message, size)) {
    return status;
  }
  int const steps = int((args.k + Config::kTileK - 1) / Config::kTileK);
  if (args.split < 0 || args.split > kMaxSplit || (args.split & (args.split - 1)) != 0 ||
      args.split > steps) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "split=%lld: expected 1, 2, 4 or 8 parts of K, each at least one of its %lld tiles",
                args.split, steps);
  }
  return FLUXGEN_OK;
}

template <class Config>
struct GemmParameter {
  using Type = typename Sm90Flat<Config>::Params;
};

template <class Config>
int prepare(fluxgen_gemm_args const& args, GemmLaunch* launch,
            typename GemmParameter<Config>::Type* parameter, char* message, int64_t size) {
  using Flat = Sm90Flat<Config>;
  using Element = typename Flat::Element;
  if (int const status = check<Config>(args, message, size)) {
    return status;
  }
  int device = 0;
  if (cudaError_t const error = cudaGetDevice(&device)) {
    return cuda_fail(message, size, "cudaGetDevice", error);
  }
  int const parts = args.split > 1 ? args.split : 1;
  DeviceFacts const& facts = parts == 1   ? sm90_flat_device<Config, 1>(device)
                             : parts == 2 ? sm90_flat_device<Config, 2>(device)
                             : parts == 4 ? sm90_flat_device<Config, 4>(device)
                                          : sm90_flat_device<Config, 8>(device);
  if (int const status =
          device_status(facts, device, "sm_90a code: expected a Hopper GPU", message, size)) {
    return status;
  }
  int const sms = args.sms > 0 && args.sms < facts.sms ? args.sms : facts.sms;
  int64_t clusters = facts.resident < sms / parts ? facts.resident : sms / parts;
  if (clusters < 1) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "sms=%lld: expected at least the %lld blocks of one cluster", args.sms, parts);
  }
  int const n = int(args.n), k = int(args.k);
  auto& p = *parameter;
  p.tiles = make_flat_tiles(args, Flat::kTokens, Flat::kColumns);
  typename Flat::StrideB stride_b;
  cute::get<Config::kBTransposed ? 1 : 0>(stride_b) = args.b_row_stride;
  p.b = Flat::descriptor(static_cast<Element const*>(args.b), n, k, stride_b,
                         typename Flat::LayoutB{}, typename Flat::ShapeB{});
  bool const alone = args.group.world == 1 && args.own != nullptr;  // nothing was gathered
  p.a = Flat::descriptor(
      static_cast<Element const*>(alone ? args.own : args.a), p.tiles.tokens, k,
      cute::make_stride(alone ? args.own_row_stride : args.a_row_stride, cute::_1{}),
      typename Flat::LayoutA{}, typename Flat::ShapeA{});
  p.group = args.group;
  p.n = n;
  p.k = k;
  p.d = static_cast<Element*>(args.d);
  p.d_row_stride = args.d_row_stride;
  p.ends_call = args.ends_call;
  int64_t const tiles = int64_t(p.tiles.tiles_m) * p.tiles.tiles_n;
  clusters = clusters < tiles ? clusters : tiles;
  // An ag_gemm may start early: it waits for flags, never for the kernel that begins its call.
  *launch = {reinterpret_cast<void const*>(&sm90_flat_kernel<Config>),
             dim3(unsigned(clusters * parts)),
             dim3(Flat::kThreads),
             Flat::kSharedBytes,
             parts,
             1,
             Flat::kAllGather};
  return FLUXGEN_OK;
}

template <class Config>
int describe(fluxgen_kernel_info* info) {
  using Flat = Sm90Flat<Config>;
  if (!describe_common<Config>(info, cute::is_same_v<typename Config::Element, cutlass::half_t>)) {
    return FLUXGEN_BAD_ABI;
  }
  info->stages = Flat::kStages;
  info->smem_bytes = Flat::kSharedBytes;
  info->flat = 1;
  return FLUXGEN_OK;
}

}  // namespace fluxgen
#endif  // FLUXGEN_FAMILIES_SM90_FLAT_CUH_
