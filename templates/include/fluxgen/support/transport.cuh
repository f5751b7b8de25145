// The kernels around each copy of a transport: what waits before it, what raises its flag.
#ifndef FLUXGEN_SUPPORT_TRANSPORT_CUH_
#define FLUXGEN_SUPPORT_TRANSPORT_CUH_

#include <cuda_runtime.h>

#include "fluxgen/support/device.cuh"

namespace fluxgen {

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

}  // namespace fluxgen
#endif  // FLUXGEN_SUPPORT_TRANSPORT_CUH_
