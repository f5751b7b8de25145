// The small kernels around a fused GEMM: begin and pull (ag_gemm), reduce and collect (gemm_rs).
// No CUTLASS; the same source for every architecture.
#ifndef FLUXGEN_SUPPORT_KERNELS_CUH_
#define FLUXGEN_SUPPORT_KERNELS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "fluxgen/calls.h"
#include "fluxgen/protocol.cuh"

namespace fluxgen {

constexpr int kThreads = 256;
constexpr int kBeginThreads = 512;
constexpr int kInFlight = 8;                 // loads of one thread in the reduction
constexpr int kCopiesInFlight = 4;           // loads of one thread that copies a slab
constexpr int kBlocksPerSm = 4;              // of the reduction, where none is asked for
constexpr int kBlocksPerSmBesideCopies = 1;  // the kernels that it waits for need room

// The last block to call it gets true; the ticket is back at zero for the next call.
__device__ __forceinline__ bool last_block(void* workspace, int64_t ticket_offset) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* ticket = workspace_word(workspace, ticket_offset);
    last = add_acquire_release(ticket, 1u) == gridDim.x - 1;
    if (last) {
      store_relaxed(ticket, 0u);
    }
  }
  __syncthreads();
  return last;
}

// rows of `vectors` 16-byte words, contiguous in `to` and `also` (which may be null), by `blocks`
// blocks, of which this is number `block`.
__device__ __forceinline__ void copy_rows(char* to, char* also, char const* from,
                                          int64_t from_stride, int64_t rows, int64_t vectors,
                                          int64_t block, int64_t blocks) {
  int64_t const total = rows * vectors;
  bool const contiguous = from_stride == vectors * 16;
  int64_t const step = blocks * blockDim.x;
  int64_t first = block * blockDim.x + threadIdx.x;
  for (; first < total; first += step * kCopiesInFlight) {
    uint4 values[kCopiesInFlight];
#pragma unroll
    for (int c = 0; c < kCopiesInFlight; ++c) {
      int64_t const i = first + c * step;
      if (i < total) {
        int64_t const row = contiguous ? 0 : i / vectors;
        values[c] =
            *reinterpret_cast<uint4 const*>(from + row * from_stride + (i - row * vectors) * 16);
      }
    }
#pragma unroll
    for (int c = 0; c < kCopiesInFlight; ++c) {
      int64_t const i = first + c * step;
      if (i < total) {
        reinterpret_cast<uint4*>(to)[i] = values[c];
        if (also != nullptr) {
          reinterpret_cast<uint4*>(also)[i] = values[c];
        }
      }
    }
  }
}

// ag_gemm, first kernel: wait until the peers have pulled the last slab, copy x (rows, row_bytes)
// into the stage and, with args.keep, to its place in the gathered matrix, advance the epoch, and
// tell every peer that the slab may be pulled; with args.push, that it may push. With args.pull it then
// copies the peers' slabs itself: all blocks must be resident, as they wait for peers that wait for this
// rank's first half.
__global__ void __launch_bounds__(kBeginThreads) begin_kernel(fluxgen_begin_args args) {
#if __CUDA_ARCH__ >= 900
  if (!args.pull) {  // the GEMM may take the SMs that this kernel leaves, once all its blocks are here
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
#endif
  fluxgen_group const& group = args.group;
  void* mine = group.peers[group.rank];
  uint32_t const epoch = current_epoch(mine, 1);
  uint32_t const staged = load_relaxed(workspace_word(mine, kStagedOffset));
  int const thread = threadIdx.x;
  bool const is_peer = thread < group.world && thread != group.rank;
  if (is_peer && !args.push) {
    wait_epoch(pulled_flag(mine, thread), staged, group, FLUXGEN_TRANSPORT, thread, 0);
  }
  __syncthreads();
  int64_t const vectors = args.row_bytes / 16;
  int64_t const slab = args.rows * args.row_bytes;
  char* gathered = static_cast<char*>(args.gathered);
  char* own = gathered + group.rank * slab;
  // A peer may still be pulling what an aborted group has in the stage.
  bool const aborted = aborted_by(group) != 0u;
  bool const stages = !aborted && !args.push;
  char* to = stages ? stage(group, group.rank) : (args.keep ? own : nullptr);
  if (to != nullptr) {
    copy_rows(to, args.keep && stages ? own : nullptr, static_cast<char const*>(args.x),
              args.row_stride_bytes, args.rows, vectors, blockIdx.x, gridDim.x);
  }
  fence_system();
  if (last_block(mine, kTicketOffset)) {
    fence_system();
    if (thread < FLUXGEN_MAX_CHUNKS) {
      store_release_system(gathered_flag(mine, group.rank, thread), epoch);
    }
    if (thread == 0) {
      store_relaxed(workspace_word(mine, kEpochOffset), epoch);
      if (!args.push) {
        store_relaxed(workspace_word(mine, kStagedOffset), epoch);
      }
      store_release_system(workspace_word(mine, kBegunOffset), epoch);
      report_abort(group, FLUXGEN_TRANSPORT, epoch);
    }
    if (is_peer && aborted_by(group) == 0u) {
      store_release_system(ready_flag(group.peers[thread], group.rank), epoch);
    }
  }
  if (!args.pull) {
    return;
  }
  // Blocks have a peer each, in turn: all slabs are on their way at once.
  int const peers = group.world - 1;
  int const parts = peers > 0 ? max(1, int(gridDim.x) / peers) : 0;
  for (int unit = blockIdx.x; unit < parts * peers; unit += gridDim.x) {
    int const peer = (group.rank + 1 + unit % peers) % group.world;
    if (thread == 0) {
      wait_epoch(ready_flag(mine, peer), epoch, group, FLUXGEN_TRANSPORT, peer, 0);
    }
    __syncthreads();
    copy_rows(gathered + peer * slab, nullptr, stage(group, peer), args.row_bytes, args.rows,
              vectors, unit / peers, parts);
  }
  fence_system();
  // A ticket of its own: a block may be here before another has taken its first.
  if (last_block(mine, kPullTicketOffset) && is_peer) {
    for (int chunk = 0; chunk < FLUXGEN_MAX_CHUNKS; ++chunk) {
      store_release_system(gathered_flag(mine, thread, chunk), epoch);
    }
    if (aborted_by(group) == 0u) {
      store_release_system(pulled_flag(group.peers[thread], group.rank), epoch);
    } else {
      report_abort(group, FLUXGEN_TRANSPORT, epoch);
    }
  }
}

// After a call whose GEMMs were not all queued: without it the next one's would take this call's
// epoch for theirs.
__global__ void settle_kernel(fluxgen_group group) {
  void* mine = group.peers[group.rank];
  store_relaxed(workspace_word(mine, kMultipliedOffset),
                load_relaxed(workspace_word(mine, kBegunOffset)));
}

// The rank that this one sends to round the ring.
__host__ __device__ __forceinline__ int32_t rank_before(fluxgen_group const& group) {
  return (group.rank + group.world - 1) % group.world;
}

// The epoch of a call, for its copies. Pushes come after the kernel that begins an ag_gemm, pulls
// beside it, and before its GEMMs end. A gemm_rs ends after the last of its copies.
__device__ __forceinline__ uint32_t copies_epoch(fluxgen_group const& group, int32_t kind) {
  void* mine = group.peers[group.rank];
  return kind == FLUXGEN_DRAIN  ? current_epoch(mine, 1)
         : kind == FLUXGEN_PULL ? gather_epoch(group)
                                : load_relaxed(workspace_word(mine, kBegunOffset));
}

// Before a copy: wait until the peers it comes from, or goes to, are ready. One bit, one thread each.
// Drained: until the chunk is in the outbox, and the owner has read what came into its inbox before.
// Round the ring: of this rank's own slab until the next one is ready, of another until it is here.
struct AwaitArguments {
  fluxgen_group group;
  int32_t kind;  // enum fluxgen_copies
  uint32_t peers;
  int32_t chunk;
};

__global__ void await_kernel(AwaitArguments args) {
  fluxgen_group const& group = args.group;
  void* mine = group.peers[group.rank];
  int32_t const peer = int32_t(threadIdx.x);
  if ((args.peers >> peer & 1u) == 0u) {
    return;
  }
  uint32_t const epoch = copies_epoch(group, args.kind);
  if (args.kind == FLUXGEN_DRAIN) {
    if (args.chunk == 0) {
      wait_epoch(consumed_flag(mine, peer), load_relaxed(workspace_word(mine, kDrainedOffset)),
                 group, FLUXGEN_TRANSPORT, peer, 0);
    }
    wait_epoch(filled_flag(mine, peer, args.chunk), epoch, group, FLUXGEN_TRANSPORT, group.rank,
               args.chunk);
  } else if (args.kind == FLUXGEN_RING && peer != group.rank) {
    wait_epoch(gathered_flag(mine, peer, args.chunk), epoch, group, FLUXGEN_TRANSPORT, peer,
               args.chunk);
  } else {
    int32_t const of = args.kind == FLUXGEN_RING ? rank_before(group) : peer;
    wait_epoch(ready_flag(mine, of), epoch, group, FLUXGEN_TRANSPORT, of, 0);
  }
}

// After a copy: raise its flag, here or where it went; `whole`: tell the source of what was pulled
// that this was all of it, or the reduction that all of a gemm_rs is out.
struct RaiseArguments {
  fluxgen_group group;
  int32_t kind;  // enum fluxgen_copies
  int32_t peer;  // the source, or the rank it went to; round the ring the slab's
  int32_t chunk;
  int32_t whole;
};

__global__ void raise_kernel(RaiseArguments args) {
  fluxgen_group const& group = args.group;
  void* mine = group.peers[group.rank];
  uint32_t const epoch = copies_epoch(group, args.kind);
  if (args.kind == FLUXGEN_DRAIN) {
    if (aborted_by(group) == 0u) {
      store_release_system(arrived_flag(group.peers[args.peer], group.rank, args.chunk), epoch);
    }
    if (args.whole) {
      store_release_system(workspace_word(mine, kSentOffset), epoch);
    }
    return;
  }
  if (args.kind != FLUXGEN_PULL) {
    bool const ring = args.kind == FLUXGEN_RING;
    int32_t const to = ring ? rank_before(group) : args.peer;
    int32_t const slab = ring ? args.peer : group.rank;
    if (aborted_by(group) == 0u) {
      store_release_system(gathered_flag(group.peers[to], slab, args.chunk), epoch);
    }
    return;
  }
  store_release_system(gathered_flag(mine, args.peer, args.chunk), epoch);
  if (args.whole) {
    if (aborted_by(group) == 0u) {
      store_release_system(pulled_flag(group.peers[args.peer], group.rank), epoch);
    } else {
      report_abort(group, FLUXGEN_TRANSPORT, epoch);
    }
  }
}

template <class T>
__device__ __forceinline__ float2 to_float2(T pair);
template <>
__device__ __forceinline__ float2 to_float2(__nv_bfloat162 pair) {
  return __bfloat1622float2(pair);
}
template <>
__device__ __forceinline__ float2 to_float2(__half2 pair) {
  return __half22float2(pair);
}
template <class T>
__device__ __forceinline__ T from_float2(float2 pair);
template <>
__device__ __forceinline__ __nv_bfloat162 from_float2(float2 p) {
  return __float22bfloat162_rn(p);
}
template <>
__device__ __forceinline__ __half2 from_float2(float2 p) {
  return __float22half2_rn(p);
}

// Eight elements of one source, 16 bytes, to their sums.
template <class Pair>
__device__ __forceinline__ void add_word(float2 (&sum)[4], void const* word) {
  Pair pairs[4];
  memcpy(pairs, word, 16);
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    float2 const value = to_float2(pairs[p]);
    sum[p].x += value.x;
    sum[p].y += value.y;
  }
}

// From the sums of eight elements to D: scaled, with the bias, with `Shares` the residual, rounded once.
// `column` in words. What was stored.
template <class Pair, bool Shares>
__device__ __forceinline__ uint4 finish_word(fluxgen_reduce_args const& args,
                                             float2 const (&sum)[4], int64_t row, int64_t column) {
  Pair added[4] = {};
  if (args.bias != nullptr) {
    uint4 const raw = static_cast<uint4 const*>(args.bias)[column];
    memcpy(added, &raw, 16);
  }
  int64_t const at = (row * args.d_row_stride + column * 8) * 2;
  Pair last[4] = {};
  if (Shares && args.residual != nullptr) {
    uint4 const raw = *reinterpret_cast<uint4 const*>(static_cast<char const*>(args.residual) + at);
    memcpy(last, &raw, 16);
  }
  Pair rounded[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    float2 const bias = to_float2(added[p]), residual = to_float2(last[p]);
    float2 value = make_float2(sum[p].x * args.scale + bias.x, sum[p].y * args.scale + bias.y);
    if constexpr (Shares) {
      value = make_float2(value.x + residual.x, value.y + residual.y);
    }
    rounded[p] = from_float2<Pair>(value);
  }
  uint4 out;
  memcpy(&out, rounded, 16);
  *reinterpret_cast<uint4*>(static_cast<char*>(args.d) + at) = out;
  return out;
}

// The end of a call that has read its inbox, by the last block that did: peers may drain into it again, and
// the epoch is advanced.
__device__ __forceinline__ void end_scatter(fluxgen_reduce_args const& args, uint32_t epoch) {
  fluxgen_group const& group = args.group;
  void* mine = group.peers[group.rank];
  if (args.drain && group.world > 1) {
    if (threadIdx.x < group.world && threadIdx.x != group.rank && aborted_by(group) == 0u) {
      fence_system();
      store_release_system(consumed_flag(group.peers[threadIdx.x], group.rank), epoch);
    }
    if (threadIdx.x == 0) {  // this rank's copies take their epoch from the word that changes now
      wait_epoch(workspace_word(mine, kSentOffset), epoch, group, FLUXGEN_TRANSPORT, group.rank, 0);
      store_relaxed(workspace_word(mine, kDrainedOffset), epoch);
    }
  }
  if (threadIdx.x == 0) {
    store_relaxed(workspace_word(mine, kEpochOffset), epoch);
    report_abort(group, FLUXGEN_REDUCTION, epoch);
  }
}

// gemm_rs, last kernel: D (rows, n) = scale * (sum of the inbox over sources) + bias, fp32, in rank
// order, rounded once: bitwise the same on every run. Chunk by chunk, so that early chunks are reduced while late
// ones travel; the last block advances the epoch. `Shares`: an all-reduce, with a residual; in two shots
// the rows also go to every peer, and D and the residual have those of all ranks.
template <class Pair, bool Shares>
__global__ void __launch_bounds__(kThreads) reduce_kernel(fluxgen_reduce_args args) {
  fluxgen_group const& group = args.group;
  void* mine = group.peers[group.rank];
  uint32_t const epoch = current_epoch(mine, 1);
  char const* inbox = args.drain ? drained_slab(group, group.rank, 0, 0)
                                 : inbox_slab(group, group.rank, epoch, 0, 0);
  int64_t const vectors = args.n / 8;  // 16 bytes each
  int64_t const slab = args.rows * vectors;
  int64_t const chunk_rows = args.chunk_rows > 0 ? args.chunk_rows : args.rows;
  bool const two_shots = Shares && args.shares == FLUXGEN_TWO_SHOTS;
  int64_t const above = two_shots ? group.rank * args.rows : 0;  // rows of other ranks in D
  int chunk = 0;
  for (int64_t begin = 0; begin < args.rows; begin += chunk_rows, ++chunk) {
    bool arrived = true;
    if (threadIdx.x < group.world) {
      arrived = wait_epoch(arrived_flag(mine, threadIdx.x, chunk), epoch, group, FLUXGEN_REDUCTION,
                           threadIdx.x, chunk);
    }
    // Peers that are not in this call yet may still read what they have of an earlier one.
    bool const pushes = __syncthreads_and(arrived) && two_shots;
    int64_t const end = begin + chunk_rows < args.rows ? begin + chunk_rows : args.rows;
    int64_t const stop = end * vectors;
    int64_t const step = int64_t(gridDim.x) * kThreads;
    for (int64_t i = begin * vectors + int64_t(blockIdx.x) * kThreads + threadIdx.x; i < stop;
         i += step) {
      float2 sum[4] = {};
      // Eight sources are in flight at once; they are still added in rank order.
      for (int first = 0; first < group.world; first += kInFlight) {
        uint4 raw[kInFlight];
#pragma unroll
        for (int s = 0; s < kInFlight; ++s) {
          if (first + s < group.world) {
            raw[s] = __ldcs(reinterpret_cast<uint4 const*>(inbox) + (first + s) * slab + i);
          }
        }
#pragma unroll
        for (int s = 0; s < kInFlight; ++s) {
          if (first + s < group.world) {
            add_word<Pair>(sum, &raw[s]);
          }
        }
      }
      int64_t const row = i / vectors;
      uint4 const out = finish_word<Pair, Shares>(args, sum, above + row, i - row * vectors);
      for (int step = 1; pushes && step < group.world; ++step) {
        int const peer = (group.rank + step) % group.world;
        reinterpret_cast<uint4*>(result_slab(group, peer, group.rank, slab * 16))[i] = out;
      }
    }
  }
  if (two_shots) {
    fence_system();
  }
  if (!last_block(mine, kTicketOffset)) {
    return;
  }
  if constexpr (Shares) {
    if (two_shots && threadIdx.x < group.world && threadIdx.x != group.rank &&
        aborted_by(group) == 0u) {
      fence_system();
      store_release_system(reduced_flag(group.peers[threadIdx.x], group.rank), epoch);
    }
  }
  end_scatter(args, epoch);
}

// gemm_rs and gemm_ar in packets, last kernel: as the reduction, of packets, which it waits for one by one.
// They come from all ranks at about the same time: a warp first waits for one of this rank's own, so that
// what it asks of memory meanwhile is little, as the GEMM runs beside it.
template <class Pair>
__global__ void __launch_bounds__(kThreads) packed_reduce_kernel(fluxgen_reduce_args args) {
  fluxgen_group const& group = args.group;
  void* mine = group.peers[group.rank];
  uint32_t const epoch = current_epoch(mine, 1);
  char* const packets = packet_slab(group, group.rank, epoch, 0, 0);
  int64_t const vectors = args.n / 8, total = args.rows * vectors;
  int64_t const slab = total * 32;
  int64_t const step = int64_t(gridDim.x) * kThreads;
  int const lane = int(threadIdx.x) & 31;
  int64_t warp_first = int64_t(blockIdx.x) * kThreads + (threadIdx.x - lane);
  for (bool here = true; here && warp_first < total; warp_first += step) {
    int64_t const i = warp_first + lane;
    char* const at = packets + i * 32;
    if (lane == 0) {
      here = wait_packet(reinterpret_cast<uint64_t const*>(at + group.rank * slab), epoch, group,
                         FLUXGEN_REDUCTION, group.rank);
    }
    __syncwarp();
    float2 sum[4] = {};
    for (int first = 0; i < total && here && first < group.world; first += kInFlight) {
      int const count = min(kInFlight, group.world - first);
      uint32_t words[kInFlight][4];
      here = take_packets(at, slab, first, count, epoch, group, FLUXGEN_REDUCTION, words);
#pragma unroll
      for (int s = 0; s < kInFlight; ++s) {
        if (s < count) {
          add_word<Pair>(sum, words[s]);
        }
      }
    }
    if (i < total) {
      int64_t const row = i / vectors;
      finish_word<Pair, true>(args, sum, row, i - row * vectors);
    }
    here = __all_sync(~0u, here);
  }
  fence_system();  // what was taken is before what the calls behind this one send
  if (last_block(mine, kTicketOffset)) {
    end_scatter(args, epoch);
  }
}

// gemm_a2a, last kernel: the slabs of the inbox, into D one behind the other. Blocks have a source each, in
// turn, the own one last.
__global__ void __launch_bounds__(kThreads) exchange_kernel(fluxgen_reduce_args args) {
  fluxgen_group const& group = args.group;
  void* mine = group.peers[group.rank];
  uint32_t const epoch = current_epoch(mine, 1);
  char const* inbox = args.drain ? drained_slab(group, group.rank, 0, 0)
                                 : inbox_slab(group, group.rank, epoch, 0, 0);
  int64_t const chunk_rows = args.chunk_rows > 0 ? args.chunk_rows : args.rows;
  int const chunks = int((args.rows + chunk_rows - 1) / chunk_rows);
  int const parts = max(1, int(gridDim.x) / group.world);
  int64_t const row_bytes = args.n * 2, slab = args.rows * row_bytes;
  for (int unit = blockIdx.x; unit < parts * group.world; unit += gridDim.x) {
    int const source = (group.rank + 1 + unit % group.world) % group.world;
    if (threadIdx.x < chunks) {
      wait_epoch(arrived_flag(mine, source, threadIdx.x), epoch, group, FLUXGEN_REDUCTION, source,
                 threadIdx.x);
    }
    __syncthreads();
    copy_rows(static_cast<char*>(args.d) + source * slab, nullptr, inbox + source * slab, row_bytes,
              args.rows, row_bytes / 16, unit / group.world, parts);
  }
  if (last_block(mine, kTicketOffset)) {
    end_scatter(args, epoch);
  }
}

// The last kernel of an all-reduce, behind the reduction: the rows that the peers have reduced, out of
// this rank's result into D. Blocks have a peer each, in turn.
struct CollectArguments {
  fluxgen_reduce_args reduce;
};

__global__ void __launch_bounds__(kThreads) collect_kernel(CollectArguments args) {
  fluxgen_reduce_args const& reduce = args.reduce;
  fluxgen_group const& group = reduce.group;
  void* mine = group.peers[group.rank];
  uint32_t const epoch = current_epoch(mine, 0);
  int const peers = group.world - 1;
  int const parts = max(1, int(gridDim.x) / peers);
  int64_t const row_bytes = reduce.n * 2;
  for (int unit = blockIdx.x; unit < parts * peers; unit += gridDim.x) {
    int const source = (group.rank + 1 + unit % peers) % group.world;
    if (threadIdx.x == 0) {
      wait_epoch(reduced_flag(mine, source), epoch, group, FLUXGEN_COLLECTION, source, 0);
    }
    __syncthreads();
    copy_rows(static_cast<char*>(reduce.d) + source * reduce.rows * row_bytes, nullptr,
              result_slab(group, group.rank, source, reduce.rows * row_bytes), row_bytes,
              reduce.rows, row_bytes / 16, unit / peers, parts);
  }
  if (last_block(mine, kTicketOffset) && threadIdx.x == 0) {
    report_abort(group, FLUXGEN_COLLECTION, epoch);
  }
}

}  // namespace fluxgen
#endif  // FLUXGEN_SUPPORT_KERNELS_CUH_
