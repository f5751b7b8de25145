// A flat Ampere GEMM for few tokens: D (tokens, n) = A B^T with tiles that span the rows of several ranks.
//
// As on Hopper (sm90_flat.cuh) operands are swapped: columns of D lie on the side of mma.sync that is 16 long,
// tokens on that of 8. There are no clusters: K is split over the warps of a block, and tiles of 16 columns
// give every SM one where n is short.
//
//   warp w of 8    steps w, w + 8, ... of K  ->  its own stages  ->  its part of the tile (fp32)
//   block          the parts, in the order of the warps  ->  D, or the inboxes of the owners
//
// Warps meet only where a tile ends.
#ifndef FLUXGEN_FAMILIES_SM80_FLAT_CUH_
#define FLUXGEN_FAMILIES_SM80_FLAT_CUH_

#include "cutlass/cutlass.h"
#include "cute/arch/copy_sm75.hpp"
#include "cute/arch/copy_sm80.hpp"
#include "cute/arch/mma_sm80.hpp"
#include "cutlass/numeric_types.h"

#include "fluxgen/families/flat_arguments.cuh"
#include "fluxgen/epilogue/flat_store.cuh"
#include "fluxgen/order/flat_tiles.cuh"
#include "fluxgen/families/launch.cuh"
#include "fluxgen/protocol/flags.cuh"

namespace fluxgen {

// Rows of kChunks times 16 bytes in shared memory; 16 bytes of eight rows one below the other lie in
// different banks.
template <int kChunks>
struct Sm80Rows {
  static_assert(kChunks == 2 || kChunks == 4 || kChunks == 8, "rows of 32, 64 or 128 bytes");
  CUTLASS_HOST_DEVICE static constexpr int at(int row, int chunk) {  // in 16 bytes
    return row * kChunks + (chunk ^ ((row / (8 / kChunks)) & (kChunks - 1)));
  }
};

struct Sm80FlatParams {
  fluxgen_group group;
  FlatTiles tiles;
  int32_t n;
  int32_t k;
  void const* a;
  void const* b;
  int64_t a_row_stride;
  int64_t b_row_stride;
  void* d;
  int64_t d_row_stride;
  int32_t ends_call;
};

// Config has: kOp, Element, kBTransposed (B is (k, n)), kTileM (tokens), kTileN (columns), kTileK (of
// a warp's step), kStages (of a warp).
template <class Config>
struct Sm80Flat {
  using Element = typename Config::Element;
  static constexpr bool kAllGather = Config::kOp == FLUXGEN_AG_GEMM;
  static constexpr int kTokens = Config::kTileM, kColumns = Config::kTileN, kDepth = Config::kTileK;
  static constexpr int kStages = Config::kStages;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kEach = 8;  // elements in 16 bytes
  using RowsA = Sm80Rows<kDepth / kEach>;
  using RowsB = Sm80Rows<(Config::kBTransposed ? kColumns : kDepth) / kEach>;
  static constexpr int kWordsB = kColumns * kDepth / kEach;  // of a stage, of 16 bytes each
  static constexpr int kWordsA = kTokens * kDepth / kEach;
  static constexpr int kStageWords = kWordsB + kWordsA;
  static constexpr int kPitch = kColumns + 4;  // floats: a fragment's words hit all banks
  static constexpr int kLoadBytes = kWarps * kStages * kStageWords * 16;
  static constexpr int kPartBytes = kWarps * kTokens * kPitch * 4;
  static constexpr int kSharedBytes = kLoadBytes > kPartBytes ? kLoadBytes : kPartBytes;
  static_assert(kWordsB % 32 == 0 && kWordsA % 32 == 0, "all lanes load");
  static_assert(kColumns % 16 == 0 && kTokens % 16 == 0 && kDepth % 16 == 0, "whole fragments");
  using Mma =
      cute::conditional_t<cute::is_same_v<Element, cutlass::half_t>,
                          cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>;

  // A warp's sums: of 16 columns and 8 tokens each, four a lane.
  using Sums = float[kColumns / 16][kTokens / 8][4];

  // One tile as a warp sees it.
  struct Tile {
    Element const* a;  // its first token
    Element const* b;  // its first column
    int tokens;
    int columns;
  };

  // 16 bytes, or zeros; past L1: what came from a peer is in L2 or memory.
  CUTLASS_DEVICE static void load(uint4* to, Element const* from, bool inside) {
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
        *reinterpret_cast<cute::uint128_t const*>(from), *reinterpret_cast<cute::uint128_t*>(to),
        inside);
  }

  CUTLASS_DEVICE static void load_b(Sm80FlatParams const& p, Tile const& tile, int k0,
                                    uint4* stage) {
    int const lane = int(threadIdx.x) & 31;
    constexpr int kAcross = (Config::kBTransposed ? kColumns : kDepth) / kEach;
    CUTLASS_PRAGMA_UNROLL
    for (int i = lane; i < kWordsB; i += 32) {
      int const row = i / kAcross, chunk = i % kAcross;
      int const k = k0 + (Config::kBTransposed ? row : chunk * kEach);
      int const column = Config::kBTransposed ? chunk * kEach : row;
      bool const inside = k < p.k && column < tile.columns;
      int64_t const at =
          Config::kBTransposed ? k * p.b_row_stride + column : column * p.b_row_stride + k;
      load(stage + RowsB::at(row, chunk), inside ? tile.b + at : tile.b, inside);
    }
  }

  CUTLASS_DEVICE static void load_a(Sm80FlatParams const& p, Tile const& tile, int k0,
                                    uint4* stage) {
    int const lane = int(threadIdx.x) & 31;
    constexpr int kAcross = kDepth / kEach;
    CUTLASS_PRAGMA_UNROLL
    for (int i = lane; i < kWordsA; i += 32) {
      int const row = i / kAcross, chunk = i % kAcross;
      int const k = k0 + chunk * kEach;
      bool const inside = k < p.k && row < tile.tokens;
      load(stage + kWordsB + RowsA::at(row, chunk),
           inside ? tile.a + row * p.a_row_stride + k : tile.a, inside);
    }
  }

  CUTLASS_DEVICE static void multiply(uint4 const* stage, Sums& sums) {
    int const lane = int(threadIdx.x) & 31;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kDepth / 16; ++k) {
      uint32_t b[kColumns / 16][4], a[kTokens / 16][4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns / 16; ++i) {
        if constexpr (Config::kBTransposed) {
          int const row = k * 16 + (lane & 7) + (lane >> 4) * 8;
          cute::SM75_U16x8_LDSM_T::copy(word(stage + RowsB::at(row, i * 2 + (lane >> 3 & 1))),
                                        b[i][0], b[i][1], b[i][2], b[i][3]);
        } else {
          cute::SM75_U32x4_LDSM_N::copy(
              word(stage + RowsB::at(i * 16 + (lane & 15), k * 2 + (lane >> 4))), b[i][0], b[i][1],
              b[i][2], b[i][3]);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kTokens / 16; ++j) {
        int const row = j * 16 + (lane & 7) + (lane >> 4) * 8;
        cute::SM75_U32x4_LDSM_N::copy(
            word(stage + kWordsB + RowsA::at(row, k * 2 + (lane >> 3 & 1))), a[j][0], a[j][1],
            a[j][2], a[j][3]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns / 16; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kTokens / 8; ++j) {
          float (&sum)[4] = sums[i][j];
          Mma::fma(sum[0], sum[1], sum[2], sum[3], b[i][0], b[i][1], b[i][2], b[i][3],
                   a[j / 2][j % 2 * 2], a[j / 2][j % 2 * 2 + 1], sum[0], sum[1], sum[2], sum[3]);
        }
      }
    }
  }
  CUTLASS_DEVICE static cute::uint128_t const& word(uint4 const* at) {
    return *reinterpret_cast<cute::uint128_t const*>(at);
  }

  // This block's parts of a tile, one behind the other: added up in the order of the warps.
  CUTLASS_DEVICE static void store(FlatStore<Element> const& output, float const* parts, int tile_m,
                                   int tile_n) {
    constexpr int kWords = kColumns / 8;
    int const tokens = flat_tile_tokens(output.tiles, tile_m);
    for (int i = int(threadIdx.x); i < kTokens * kWords; i += kThreads) {
      int const row = i / kWords, column = i % kWords * 8;
      if (row >= tokens || tile_n * kColumns + column >= output.n) {  // n is a multiple of 8
        continue;
      }
      float sum[8] = {};
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kWarps; ++part) {
        auto const* from =
            reinterpret_cast<float4 const*>(parts + (part * kTokens + row) * kPitch + column);
        float4 const low = from[0], high = from[1];
        sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
        sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
      }
      output.template put<kAllGather>(tile_m * kTokens + row, tile_n * kColumns + column, sum);
    }
  }

  CUTLASS_DEVICE static void run(Sm80FlatParams const& p, char* shared) {
    int const warp = cutlass::canonical_warp_idx_sync(), lane = int(threadIdx.x) & 31;
    uint4* const stages = reinterpret_cast<uint4*>(shared) + warp * kStages * kStageWords;
    auto const* const parts = reinterpret_cast<float const*>(shared);
    float* const part = reinterpret_cast<float*>(shared) + warp * kTokens * kPitch;
    auto* const d = static_cast<Element*>(p.d);
    FlatStore<Element> const output =
        kAllGather ? FlatStore<Element>{p.group, p.tiles, p.n, d, p.d_row_stride, 0u, false}
                   : FlatStore<Element>::begin(p.group, p.tiles, p.n);
    int const all_steps = (p.k + kDepth - 1) / kDepth;
    int const steps = (all_steps - warp + kWarps - 1) / kWarps;  // of this warp; none if k is short
    uint32_t epoch = 0, come = 0;                                // sources whose slabs are here
    bool knows_epoch = false;
    int const total = p.tiles.tiles_m * p.tiles.tiles_n;
    for (int linear = int(blockIdx.x); linear < total; linear += int(gridDim.x)) {
      int tile_m, tile_n;
      flat_tile_at(p.tiles, linear, &tile_m, &tile_n);
      int64_t const column = int64_t(tile_n) * kColumns;
      Tile const tile{static_cast<Element const*>(p.a) + int64_t(tile_m) * kTokens * p.a_row_stride,
                      static_cast<Element const*>(p.b) +
                          (Config::kBTransposed ? column : column * p.b_row_stride),
                      flat_tile_tokens(p.tiles, tile_m), min(kColumns, p.n - int(column))};
      auto const first_k = [&](int step) { return (step * kWarps + warp) * kDepth; };
      // B waits for nobody: all stages ask for it before the flags are looked at.
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kStages - 1; ++step) {
        if (step < steps) {
          load_b(p, tile, first_k(step), stages + step * kStageWords);
        }
      }
      if constexpr (kAllGather) {
        epoch = knows_epoch ? epoch : gather_epoch(p.group);
        knows_epoch = true;
        Ranks const sources = ranks_of(p.tiles, tile_m);
        int const source = sources.first + lane;
        if (source < sources.end && (come >> source & 1u) == 0u) {
          wait_epoch(gathered_flag(p.group.peers[p.group.rank], source, 0), epoch, p.group,
                     FLUXGEN_AG_GEMM, source, 0);
        }
        come |= (2u << (sources.end - 1)) - (1u << sources.first);
        __syncwarp();
      }
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kStages - 1; ++step) {
        if (step < steps) {
          load_a(p, tile, first_k(step), stages + step * kStageWords);
        }
        cute::cp_async_fence();
      }
      Sums sums = {};
      int filled = kStages - 1, used = 0;  // stages, modulo their number
      for (int step = 0; step < steps; ++step) {
        cute::cp_async_wait<kStages - 2>();
        __syncwarp();  // all lanes' loads of this step are here, and all have read the one before
        int const next = step + kStages - 1;
        if (next < steps) {
          load_b(p, tile, first_k(next), stages + filled * kStageWords);
          load_a(p, tile, first_k(next), stages + filled * kStageWords);
        }
        cute::cp_async_fence();
        filled = filled + 1 == kStages ? 0 : filled + 1;
        multiply(stages + used * kStageWords, sums);
        used = used + 1 == kStages ? 0 : used + 1;
      }
      cute::cp_async_wait<0>();
      __syncthreads();  // parts lie where stages were
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns / 16; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kTokens / 8; ++j) {
          CUTLASS_PRAGMA_UNROLL
          for (int c = 0; c < 4; ++c) {
            int const token = j * 8 + (lane & 3) * 2 + (c & 1);
            part[token * kPitch + i * 16 + (lane >> 2) + (c >> 1) * 8] = sums[i][j][c];
          }
        }
      }
      __syncthreads();
      store(output, parts, tile_m, tile_n);
      __syncthreads();
      if constexpr (!kAllGather) {
        output.signal(tile_m, int(threadIdx.x), 1u);
      }
    }
    if (kAllGather && p.ends_call != 0) {
      __syncthreads();
      if (threadIdx.x == 0) {
        end_gather(p.group, knows_epoch ? epoch : gather_epoch(p.group), gridDim.x);
      }
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Sm80Flat<Config>::kThreads, 1)
    sm80_flat_kernel(__grid_constant__ Sm80FlatParams const params) {
  extern __shared__ __align__(128) char shared[];
  Sm80Flat<Config>::run(params, shared);
}

template <class Config>
DeviceFacts const& sm80_flat_device(int device) {
  using Flat = Sm80Flat<Config>;
  return device_facts<&sm80_flat_kernel<Config>, Flat::kSharedBytes>(
      device, [](DeviceFacts& found) {
        cudaError_t const error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &found.resident, sm80_flat_kernel<Config>, Flat::kThreads, Flat::kSharedBytes);
        return error == cudaSuccess && found.resident < 1 ? cudaErrorInvalidConfiguration : error;
      });
}

template <class Config>
int check(fluxgen_gemm_args const& args, char* message, int64_t size) {
  if (int const status = check_flat(args, facts_of<Config>(true), message, size)) {
    return status;
  }
  if (args.split > 1) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "split=%lld: expected 1, as Ampere splits K over the warps of a block", args.split);
  }
  return FLUXGEN_OK;
}

template <class Config>
struct GemmParameter {
  using Type = Sm80FlatParams;
};

template <class Config>
int prepare(fluxgen_gemm_args const& args, GemmLaunch* launch,
            typename GemmParameter<Config>::Type* parameter, char* message, int64_t size) {
  using Flat = Sm80Flat<Config>;
  if (int const status = check<Config>(args, message, size)) {
    return status;
  }
  int device = 0;
  if (cudaError_t const error = cudaGetDevice(&device)) {
    return cuda_fail(message, size, "cudaGetDevice", error);
  }
  DeviceFacts const& facts = sm80_flat_device<Config>(device);
  if (int const status = device_status(
          facts, device, "this library's code: expected an Ampere GPU or newer", message, size)) {
    return status;
  }
  FlatTiles const tiles = make_flat_tiles(args, Flat::kTokens, Flat::kColumns);
  bool const alone = args.group.world == 1 && args.own != nullptr;  // nothing was gathered
  *parameter = {args.group,
                tiles,
                int32_t(args.n),
                int32_t(args.k),
                alone ? args.own : args.a,
                args.b,
                alone ? args.own_row_stride : args.a_row_stride,
                args.b_row_stride,
                args.d,
                args.d_row_stride,
                args.ends_call};
  int const sms = args.sms > 0 && args.sms < facts.sms ? args.sms : facts.sms;
  int64_t const blocks = int64_t(sms) * facts.resident;
  int64_t const total = int64_t(tiles.tiles_m) * tiles.tiles_n;
  *launch = {reinterpret_cast<void const*>(&sm80_flat_kernel<Config>),
             dim3(unsigned(blocks < total ? blocks : total)),
             dim3(Flat::kThreads),
             Flat::kSharedBytes,
             0,
             0,
             false};
  return FLUXGEN_OK;
}

template <class Config>
int describe(fluxgen_kernel_info* info) {
  if (!describe_common<Config>(info, cute::is_same_v<typename Config::Element, cutlass::half_t>)) {
    return FLUXGEN_BAD_ABI;
  }
  info->warps = Sm80Flat<Config>::kWarps;
  info->stages = Config::kStages;
  info->smem_bytes = Sm80Flat<Config>::kSharedBytes;
  info->flat = 1;
  return FLUXGEN_OK;
}

}  // namespace fluxgen
#endif  // FLUXGEN_FAMILIES_SM80_FLAT_CUH_
