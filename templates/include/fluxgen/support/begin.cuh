// The kernel that begins an ag_gemm, and the SM copy that it may be.
#ifndef FLUXGEN_SUPPORT_BEGIN_CUH_
#define FLUXGEN_SUPPORT_BEGIN_CUH_

#include <cuda_runtime.h>

#include "fluxgen/support/device.cuh"

namespace fluxgen {

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

}  // namespace fluxgen
#endif  // FLUXGEN_SUPPORT_BEGIN_CUH_
