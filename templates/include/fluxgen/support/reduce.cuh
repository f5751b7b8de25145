// The kernels that end a gemm_rs: its reduction, of an all-reduce too, of packets, and the exchange.
#ifndef FLUXGEN_SUPPORT_REDUCE_CUH_
#define FLUXGEN_SUPPORT_REDUCE_CUH_

#include <cuda_runtime.h>

#include "fluxgen/epilogue/finish.cuh"
#include "fluxgen/epilogue/pairs.cuh"
#include "fluxgen/protocol/packets.cuh"
#include "fluxgen/support/device.cuh"

namespace fluxgen {

// Eight columns of a row of D, from their sums. What was stored.
template <class Pair, bool Shares>
__device__ __forceinline__ uint4 store_word(fluxgen_reduce_args const& args, float2 const (&sum)[4],
                                            int64_t row, int64_t word) {
  uint4 const out = finish_word<Pair, Shares>(args.operands, args.scale, sum, row, word);
  char* const d = static_cast<char*>(args.d) + (row * args.d_row_stride + word * 8) * 2;
  *reinterpret_cast<uint4*>(d) = out;
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
      uint4 const out = store_word<Pair, Shares>(args, sum, above + row, i - row * vectors);
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
      store_word<Pair, true>(args, sum, row, i - row * vectors);
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
#endif  // FLUXGEN_SUPPORT_REDUCE_CUH_
