// What the support kernels take, checked on the host, and on how many blocks each runs.
#ifndef FLUXGEN_SUPPORT_ARGUMENTS_CUH_
#define FLUXGEN_SUPPORT_ARGUMENTS_CUH_

#include <cstdio>

#include "fluxgen/support/begin.cuh"
#include "fluxgen/support/reduce.cuh"
#include "fluxgen/support/transport.cuh"

namespace fluxgen {

constexpr int kBeginPerSm = 1;  // blocks; fewer in all stage a slab slower than they leave room

inline int refuse(char* message, int64_t size, char const* text) {
  if (message != nullptr && size > 0) {
    std::snprintf(message, size_t(size), "%s", text);
  }
  return FLUXGEN_BAD_ARGUMENT;
}

inline int cuda_status(cudaError_t error, char const* what, char* message, int64_t size) {
  if (error == cudaSuccess) {
    return FLUXGEN_OK;
  }
  if (message != nullptr && size > 0) {
    std::snprintf(message, size_t(size), "%s: %s", what, cudaGetErrorString(error));
  }
  return error == cudaErrorNoKernelImageForDevice ? FLUXGEN_WRONG_DEVICE : FLUXGEN_CUDA_ERROR;
}

template <class Args>
int check_version(Args const& args, char* message, int64_t size) {
  if (args.abi_version != FLUXGEN_CALLS_VERSION || args.struct_size != sizeof(Args)) {
    refuse(message, size, "argument struct does not match this library's version");
    return FLUXGEN_BAD_ABI;
  }
  return FLUXGEN_OK;
}

template <class Args>
int check_common(Args const& args, char* message, int64_t size) {
  if (int const status = check_version(args, message, size)) {
    return status;
  }
  if (args.group.world < 1 || args.group.world > FLUXGEN_MAX_WORLD || args.group.rank < 0 ||
      args.group.rank >= args.group.world) {
    return refuse(message, size, "expected 0 <= rank < world <= 16");
  }
  for (int peer = 0; peer < args.group.world; ++peer) {
    if (args.group.peers[peer] == nullptr) {
      return refuse(message, size, "a peer's workspace address is null");
    }
  }
  return FLUXGEN_OK;
}

// Blocks for `work`: at most as many as asked for, or, where none are, `per_sm` for each SM.
inline int block_count(int asked, int per_sm, int64_t work) {
  int64_t most = asked;
  if (asked <= 0) {
    int device = 0, sms = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    most = int64_t(sms) * per_sm;
  }
  return int(work < 1 ? 1 : (work < most ? work : most));
}

// Whether the workspaces have room for what a call puts there: an ag_gemm its slab in the stage, or,
// where slabs are pushed, all of them in the gathered matrix; a gemm_rs all of them in the outbox.
inline bool slabs_fit(fluxgen_group const& group, int64_t slab, int32_t kind) {
  return kind == FLUXGEN_PULL
             ? slab <= group.stage_bytes
             : group.world * slab <=
                   (kind == FLUXGEN_DRAIN ? group.drained_bytes : group.gathered_bytes);
}

// Which kernel runs on how many blocks; its one parameter is the argument struct.
struct SupportLaunch {
  void* kernel;
  int blocks;
  int threads;
  char const* name;
};

inline int prepare(fluxgen_begin_args const& args, SupportLaunch* prepared, char* message,
                   int64_t size) {
  if (int const status = check_common(args, message, size)) {
    return status;
  }
  if (args.rows < 1 || args.row_bytes < 16 || args.row_bytes % 16 || args.row_stride_bytes % 16 ||
      args.row_stride_bytes < args.row_bytes || args.x == nullptr ||
      reinterpret_cast<uintptr_t>(args.x) % 16) {
    return refuse(
        message, size,
        "x: expected rows of a positive multiple of 16 bytes at 16-byte aligned addresses");
  }
  if (reinterpret_cast<uintptr_t>(args.gathered) % 16 ||
      (args.gathered == nullptr && (args.keep || args.pull))) {
    return refuse(message, size, "gathered: expected a 16-byte aligned address");
  }
  if (args.push && args.pull) {
    return refuse(message, size, "expected at most one of pull and push");
  }
  int64_t const slab = args.rows * args.row_bytes;
  if (!slabs_fit(args.group, slab, args.push ? FLUXGEN_PUSH : FLUXGEN_PULL)) {
    return refuse(message, size, "the slabs do not fit the workspace");
  }
  bool const copies = !args.push || args.keep;
  int64_t work = copies ? (slab / 16 + kBeginThreads - 1) / kBeginThreads : 1;
  if (args.pull && work < args.group.world - 1) {
    work = args.group.world - 1;  // a block for each peer
  }
  // One block an SM at most: with pull all have to be resident.
  int const blocks = block_count(args.blocks, kBeginPerSm, work);
  *prepared = {reinterpret_cast<void*>(&begin_kernel), blocks, kBeginThreads, "begin"};
  return FLUXGEN_OK;
}

// The reduction's kernels: by dtype, those that share behind those that do not, then those of packets.
inline void* const* reduce_kernels() {
  static void* const kernels[] = {reinterpret_cast<void*>(&reduce_kernel<__nv_bfloat162, false>),
                                  reinterpret_cast<void*>(&reduce_kernel<__half2, false>),
                                  reinterpret_cast<void*>(&reduce_kernel<__nv_bfloat162, true>),
                                  reinterpret_cast<void*>(&reduce_kernel<__half2, true>),
                                  reinterpret_cast<void*>(&packed_reduce_kernel<__nv_bfloat162>),
                                  reinterpret_cast<void*>(&packed_reduce_kernel<__half2>)};
  return kernels;
}
constexpr int kReduceKernels = 6;

inline int prepare(fluxgen_reduce_args const& args, SupportLaunch* prepared, char* message,
                   int64_t size) {
  if (int const status = check_common(args, message, size)) {
    return status;
  }
  if (args.rows < 1 || args.n < 8 || args.n % 8 || args.d == nullptr ||
      reinterpret_cast<uintptr_t>(args.d) % 16 || args.d_row_stride % 8 ||
      args.d_row_stride < args.n) {
    return refuse(
        message, size,
        "d: expected rows of a positive multiple of 8 elements at 16-byte aligned addresses");
  }
  if (args.chunk_rows < 0 ||
      (args.chunk_rows > 0 &&
       (args.rows + args.chunk_rows - 1) / args.chunk_rows > FLUXGEN_MAX_CHUNKS)) {
    return refuse(message, size, "chunk_rows: expected at most 16 chunks");
  }
  fluxgen_operand const& bias = args.operands[FLUXGEN_BIAS];
  fluxgen_operand const& residual = args.operands[FLUXGEN_RESIDUAL];
  for (int kind = 0; kind < FLUXGEN_OPERANDS; ++kind) {
    fluxgen_operand const& operand = args.operands[kind];
    if (operand.data == nullptr) {
      continue;
    }
    if (kind != FLUXGEN_BIAS && kind != FLUXGEN_RESIDUAL) {
      return refuse(message, size, "operands: expected a bias and a residual at most");
    }
    if (operand.dtype != args.dtype) {
      return refuse(message, size, "operands: expected the dtype of D");
    }
  }
  if (reinterpret_cast<uintptr_t>(bias.data) % 16) {
    return refuse(message, size, "bias: expected a 16-byte aligned address, or null");
  }
  if (args.drain < 0 || args.drain > 1) {
    return refuse(message, size, "drain: expected 0 or 1");
  }
  bool const packed = args.packed != 0;
  if (packed && (args.packed != 1 || args.drain || args.chunk_rows ||
                 (args.shares && args.shares != FLUXGEN_ONE_SHOT))) {
    return refuse(message, size,
                  "packed: expected 0, or 1 of whole slabs of a gemm_rs or of one shot");
  }
  if (packed && args.group.world * args.rows * args.n * 4 > args.group.packet_bytes) {
    return refuse(message, size, "the packets do not fit one half of their part of the workspace");
  }
  int64_t const inbox = packed ? 0 : args.group.world * args.rows * args.n * 2;
  if (inbox > (args.drain ? args.group.drained_bytes : args.group.half_bytes)) {
    return refuse(message, size,
                  args.drain
                      ? "the inbox does not fit the part of the workspace that is drained into"
                      : "the inbox does not fit one half of the workspace");
  }
  if (args.dtype != FLUXGEN_BF16 && args.dtype != FLUXGEN_FP16) {
    return refuse(message, size, "dtype: expected 0 (bf16) or 1 (fp16)");
  }
  if (args.shares < 0 || args.shares > FLUXGEN_EXCHANGE) {
    return refuse(message, size, "shares: expected 0, or one of enum fluxgen_shares");
  }
  if (args.shares == FLUXGEN_ONE_SHOT && args.drain) {
    return refuse(message, size, "drain: one shot is stored, not drained");
  }
  if (args.shares && args.d_row_stride != args.n) {
    return refuse(message, size, "d: expected contiguous rows where all ranks get them");
  }
  if (args.shares == FLUXGEN_TWO_SHOTS && inbox > args.group.result_bytes) {
    return refuse(message, size, "the rows of all ranks do not fit the workspace's result");
  }
  bool const exchanges = args.shares == FLUXGEN_EXCHANGE;
  if (exchanges && (bias.data != nullptr || args.scale != 1.0f)) {
    return refuse(message, size, "bias, scale: expected none, as nothing is added up");
  }
  if (residual.data != nullptr &&
      (!args.shares || exchanges || reinterpret_cast<uintptr_t>(residual.data) % 16)) {
    return refuse(
        message, size,
        "residual: expected null, or a 16-byte aligned address where all ranks get the rows");
  }
  if (residual.data != nullptr && (residual.row_stride < args.n || residual.row_stride % 8)) {
    return refuse(message, size, "residual: expected rows of n elements, at multiples of 16 bytes");
  }
  int64_t const words = (exchanges ? args.group.world : 1) * args.rows * (args.n / 8);
  int64_t const work = (words + kThreads - 1) / kThreads;
  *prepared = {exchanges ? reinterpret_cast<void*>(&exchange_kernel)
                         : reduce_kernels()[args.dtype + (packed        ? 4
                                                          : args.shares ? 2
                                                                        : 0)],
               block_count(args.blocks, args.drain ? kBlocksPerSmBesideCopies : kBlocksPerSm, work),
               kThreads, "reduce"};
  return FLUXGEN_OK;
}

// Of a reduction that was prepared before.
inline int prepare(CollectArguments const& args, SupportLaunch* prepared, char*, int64_t) {
  fluxgen_reduce_args const& reduce = args.reduce;
  int64_t const slab = reduce.rows * (reduce.n / 8), each = kThreads * kCopiesInFlight;
  int64_t const work = (reduce.group.world - 1) * ((slab + each - 1) / each);
  *prepared = {reinterpret_cast<void*>(&collect_kernel),
               block_count(reduce.blocks, kBlocksPerSm, work), kThreads, "collect"};
  return FLUXGEN_OK;
}
inline bool collects(fluxgen_reduce_args const& args) {
  return args.shares == FLUXGEN_TWO_SHOTS && args.group.world > 1;
}

}  // namespace fluxgen
#endif  // FLUXGEN_SUPPORT_ARGUMENTS_CUH_
