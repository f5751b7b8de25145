// What every fused GEMM checks of its arguments on the host, before anything is launched. The same
// for every architecture.
#ifndef FLUXGEN_FAMILIES_ARGUMENTS_CUH_
#define FLUXGEN_FAMILIES_ARGUMENTS_CUH_

#include <cstdio>

#include <cuda_runtime.h>

#include "fluxgen/abi.h"
#include "fluxgen/order/chunks.cuh"
#include "fluxgen/order/tile_order.cuh"
#include "fluxgen/protocol/flags.cuh"

namespace fluxgen {

inline int fail(char* message, int64_t size, int status, char const* format, long long a = 0,
                long long b = 0) {
  if (message != nullptr && size > 0) {
    std::snprintf(message, size_t(size), format, a, b);
  }
  return status;
}
inline int cuda_fail(char* message, int64_t size, char const* what, cudaError_t error) {
  if (message != nullptr && size > 0) {
    std::snprintf(message, size_t(size), "%s: %s", what, cudaGetErrorString(error));
  }
  return FLUXGEN_CUDA_ERROR;
}

inline bool aligned16(void const* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & 15u) == 0u;
}

// What every entry checks of a group; `need` is the bytes of one half that the call uses.
inline int check_group(fluxgen_group const& group, int64_t need, char* message, int64_t size) {
  if (group.world < 1 || group.world > FLUXGEN_MAX_WORLD || group.rank < 0 ||
      group.rank >= group.world) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "rank %lld of world %lld: expected 0 <= rank < world <= 16", group.rank,
                group.world);
  }
  for (int peer = 0; peer < group.world; ++peer) {
    if (group.peers[peer] == nullptr || (reinterpret_cast<uintptr_t>(group.peers[peer]) & 255u)) {
      return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                  "workspace of rank %lld: expected a 256-byte aligned address", peer);
    }
  }
  if (group.stage_bytes % 1024 != 0 || group.stage_bytes < 0) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "stage_bytes: expected a multiple of 1024; found %lld", group.stage_bytes);
  }
  if (group.half_bytes % 1024 != 0 || group.half_bytes < need) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "half_bytes: expected a multiple of 1024 of at least %lld; found %lld", need,
                group.half_bytes);
  }
  return FLUXGEN_OK;
}

// What of a kernel its arguments have to fit.
struct GemmFacts {
  bool gathers;
  bool b_transposed;
  int tile_m;
  int tile_k;
  int element_bytes;
  bool flat;
  uint32_t operands;  // 1 << kind for each that the epilogue takes
};

template <class Config>
constexpr GemmFacts facts_of(bool flat = false) {
  return {Config::kOp == FLUXGEN_AG_GEMM,
          Config::kBTransposed,
          Config::kTileM,
          Config::kTileK,
          int(sizeof(typename Config::Element)),
          flat,
          0u};
}

// What every library says of itself; the caller adds what its architecture has. False: another ABI.
template <class Config>
bool describe_common(fluxgen_kernel_info* info, bool half) {
  if (info == nullptr || info->struct_size != sizeof(*info)) {
    return false;
  }
  info->abi_version = FLUXGEN_ABI_VERSION;
  info->op = Config::kOp;
  info->dtype = info->out_dtype = half ? FLUXGEN_FP16 : FLUXGEN_BF16;
  info->epilogue = facts_of<Config>().operands;
  info->tile_m = Config::kTileM;
  info->tile_n = Config::kTileN;
  info->tile_k = Config::kTileK;
  info->cluster_m = info->cluster_n = 1;
  info->b_transposed = Config::kBTransposed;
  return true;
}

inline int check_gemm(fluxgen_gemm_args const& args, GemmFacts const& facts, char* message,
                      int64_t size) {
  if (args.abi_version != FLUXGEN_ABI_VERSION || args.struct_size != sizeof(args)) {
    return fail(message, size, FLUXGEN_BAD_ABI,
                "argument struct version %lld of %lld bytes does not match this library",
                args.abi_version, args.struct_size);
  }
  if (int const status = check_group(args.group, 0, message, size)) {
    return status;  // first: what follows divides by the world
  }
  int64_t const align = 16 / facts.element_bytes;
  constexpr int64_t kMaxDim = INT32_MAX - 1024;
  if (args.rows < 1 || args.n < 1 || args.k < 1 || args.rows > kMaxDim || args.n > kMaxDim ||
      args.k > kMaxDim) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "rows, n, k: expected 1 to 2^31-1025 each; a zero size is never launched");
  }
  if (args.n % align || args.k % align) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "n=%lld, k=%lld: 16-byte accesses need both to be multiples of 8", args.n, args.k);
  }
  int64_t const b_row = facts.b_transposed ? args.n : args.k;
  if (args.a_row_stride < args.k || args.b_row_stride < b_row ||
      (facts.gathers && args.d_row_stride < args.n)) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT, "a row stride is shorter than its row");
  }
  if (args.a_row_stride % align || args.b_row_stride % align ||
      (facts.gathers && args.d_row_stride % align)) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "row strides: expected multiples of 8 elements (16 bytes)");
  }
  if (!aligned16(args.a) || args.a == nullptr || !aligned16(args.b) || args.b == nullptr ||
      (facts.gathers && (args.d == nullptr || !aligned16(args.d)))) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "pointers: expected non-null addresses that are multiples of 16 bytes");
  }
  if (args.own != nullptr && (!facts.gathers || !aligned16(args.own) ||
                              args.own_row_stride < args.k || args.own_row_stride % align)) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "own: expected rows of k elements, at multiples of 16 bytes, of an ag_gemm");
  }
  bool const along_k = args.chunk_axis == FLUXGEN_CHUNK_K;
  int64_t const extent = along_k ? args.k : args.rows;
  int64_t const unit = along_k ? facts.tile_k : (facts.gathers ? 1 : facts.tile_m);
  if (args.chunk_axis < 0 || args.chunk_axis > (facts.gathers ? 1 : 0) || args.chunk_size < 0 ||
      args.chunk_size % unit) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "chunk_size=%lld: expected a multiple of %lld on an axis this op has",
                args.chunk_size, unit);
  }
  int64_t const chunks = args.chunk_size == 0 ? 1
                         : along_k            ? k_chunk_count(args.chunk_size, extent)
                                              : (extent + args.chunk_size - 1) / args.chunk_size;
  if (chunks > FLUXGEN_MAX_CHUNKS) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "chunk_size=%lld cuts %lld into more than 16 chunks", args.chunk_size, extent);
  }
  if (args.cut < 0 || args.cut > args.group.world) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "cut=%lld: expected at most world=%lld slabs that come in chunks", args.cut,
                args.group.world);
  }
  if (args.span < 0 || (args.span > 1 && args.group.world % args.span)) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT, "span=%lld: expected a divisor of world=%lld",
                args.span, args.group.world);
  }
  for (int g = 0; args.span > 1 && g < args.group_count && g < FLUXGEN_MAX_WORLD; ++g) {
    if (args.groups[g] % args.span) {
      return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                  "groups: expected multiples of span=%lld; found %lld", args.span, args.groups[g]);
    }
  }
  if (!facts.flat && (args.split > 1 || args.sends != 0)) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "split=%lld, sends=%lld: expected 0, as only flat kernels have them", args.split,
                args.sends);
  }
  if (args.rows > kMaxDim / args.group.world) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT, "m=%lld rows: expected at most 2^31-1025",
                args.rows * args.group.world);
  }
  if (args.drain < 0 || args.drain > (facts.gathers ? 0 : 1)) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT, "drain=%lld: expected 0, or 1 of a gemm_rs",
                args.drain);
  }
  if (args.sends < 0 || args.sends > (facts.gathers ? 0 : FLUXGEN_PACKETS_TO_ALL)) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "sends=%lld: expected 0, or of a gemm_rs one of enum fluxgen_sends", args.sends);
  }
  for (int kind = 0; kind < FLUXGEN_OPERANDS; ++kind) {
    bool const takes = (facts.operands >> kind & 1u) != 0u;
    if (takes != (args.operands[kind].data != nullptr)) {
      return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                  takes ? "operand %lld: the epilogue of this kernel takes one; found none"
                        : "operand %lld: expected none; the epilogue of this kernel takes no such",
                  kind);
    }
  }
  bool const packed = args.sends >= FLUXGEN_PACKETS_TO_OWNERS;
  int64_t const packets = packed ? args.group.world * args.rows * args.n * 4 : 0;
  if (args.group.packet_bytes % 1024 || args.group.packet_bytes < packets) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "packet_bytes: expected a multiple of 1024 of at least %lld; found %lld", packets,
                args.group.packet_bytes);
  }
  int64_t const inbox =
      facts.gathers || packed ? 0 : args.group.world * args.rows * args.n * facts.element_bytes;
  if (args.drain && (args.group.drained_bytes % 1024 || args.group.drained_bytes < inbox)) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "drained_bytes: expected a multiple of 1024 of at least %lld; found %lld", inbox,
                args.group.drained_bytes);
  }
  return check_group(args.group, args.drain ? 0 : inbox, message, size);
}

// The walk of a call; false where its groups do not fit.
inline bool order_of(fluxgen_gemm_args const& args, GemmFacts const& facts, int tile_columns,
                     int cluster_m, TileOrder* order) {
  int const span = args.span > 1 ? args.span : 1;
  int32_t groups[FLUXGEN_MAX_WORLD] = {};
  for (int g = 0; g < args.group_count && g < FLUXGEN_MAX_WORLD; ++g) {
    groups[g] = args.groups[g] / span;
  }
  return make_tile_order(
      order, facts.gathers ? FLUXGEN_AG_GEMM : FLUXGEN_GEMM_RS, args.group.world / span,
      args.group.rank / span, (args.rows * span + facts.tile_m - 1) / facts.tile_m,
      (args.n + tile_columns - 1) / tile_columns, cluster_m, args.panel, groups, args.group_count);
}

}  // namespace fluxgen
#endif  // FLUXGEN_FAMILIES_ARGUMENTS_CUH_
