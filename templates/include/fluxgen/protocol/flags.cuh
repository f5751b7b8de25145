// How ranks tell each other that data is there: epochs, two buffers, no barriers. The workspace that
// is spoken of is drawn in layout.cuh.
//
// Every flag has one writer at a time (with arrived and gathered in one block, a late copy of one
// call would overwrite a peer's flag of the next) and carries the epoch of the call that raised it;
// epochs only grow and are compared modulo 2^32, so nothing is ever reset.
//
// Why two halves of the inbox are enough: a rank raises epoch e+1 only after, in stream order, it
// has read everything of epoch e. Each call waits for a flag of every peer, so a rank that has
// finished call e+1 knows that all peers have finished e, and may overwrite the half of e in call
// e+2. Kernels choose the half by the epoch in memory, so a captured graph may be replayed.
//
// A wait past its deadline gives up for the whole group: it marks its own workspace and all peers'
// as aborted. From then on a rank raises no flag on another and leaves its stage alone, so a peer
// that is only late cannot take later data for earlier; and each call looks at the mark when it
// ends, so that its host is told.
//
// The stage is single: a copy engine's addresses are fixed when it is queued (or captured), it
// cannot choose a half. Instead the next ag_gemm overwrites the stage once every peer has pulled
// the last one. That costs no overlap: the peers' pulls came early in a call that this rank has
// finished since. The gathered matrix is this rank's alone, ordered by its streams.
//
// Where slabs are pushed, the copies read x where it lies and nothing is staged. `ready` then says
// that my matrix may be written: in stream order, all my calls that read it have ended. The source
// raises `gathered` on me, which is its alone in this call: my own copies of earlier calls have
// ended too. A rank that gives up copies nevertheless (a copy engine asks nobody): what it may have
// written over belongs to a call that has not ended, and that ends with a report of the mark.
//
// Round the ring, each rank sends to the one before it: x, then each slab that the one behind it has
// sent, as soon as its flag is up. So they come in the order of the walk, and a slab crosses each
// link once. `ready` is asked of that one rank; the forwarded copies read the matrix, which nobody
// writes before this rank is ready again.
//
// Where a gemm_rs is drained, its copies read the outbox and write an inbox that has no halves. The
// GEMM raises `filled` here, each copy waits for its chunk and then raises `arrived` on the owner.
// The outbox is free again when the call ends, as its side streams are joined. The owner raises
// `consumed` when it has reduced, and the copies of the next drained call wait for that. They take
// their epoch from a word that the reduction advances: it first waits for `sent`, which the last of
// them writes.
//
// An all-reduce is a gemm_rs whose reduction also pushes the rows that it owns into the result of every
// peer, and raises `reduced` there; then each rank takes its peers' rows from its own result. That is
// single: a peer pushes into it once this rank's flags of the same call are up, which in stream order
// come after all that this rank has read before. A rank whose waits gave up pushes nothing.
//
// Compiled for the host too: the same functions, over the compiler's atomics, are run by threads
// in the tests.
#ifndef FLUXGEN_PROTOCOL_FLAGS_CUH_
#define FLUXGEN_PROTOCOL_FLAGS_CUH_

#include <stdint.h>

#include "fluxgen/abi.h"
#include "fluxgen/protocol/layout.cuh"
#include "fluxgen/protocol/memory.cuh"

namespace fluxgen {

// Whether a flag that shows `seen` has reached `expected`: a comparison modulo 2^32.
FLUXGEN_HOST_DEVICE bool epoch_reached(uint32_t seen, uint32_t expected) {
  return int32_t(seen - expected) >= 0;
}

// The epoch of the call in progress. The first kernel of a call advances the word, or, where the
// call has no such kernel, the last one does and `offset` is 1 for all of them.
FLUXGEN_HOST_DEVICE uint32_t current_epoch(void* base, uint32_t offset) {
  return load_relaxed(workspace_word(base, kEpochOffset)) + offset;
}

// Whether a rank of the group has given up: 0, or 1 + that rank. Peers write it.
FLUXGEN_HOST_DEVICE uint32_t aborted_by(fluxgen_group const& group) {
  return load_acquire_system(workspace_word(group.peers[group.rank], kAbortedOffset));
}

enum fluxgen_report_code : uint32_t { kTimeout = 1, kPeerAborted = 2 };

FLUXGEN_HOST_DEVICE void write_report(fluxgen_group const& group, uint32_t code, uint32_t op,
                                      uint32_t peer, uint32_t chunk, uint32_t expected,
                                      uint32_t seen) {
  group.report->op = op;
  group.report->rank = uint32_t(group.rank);
  group.report->peer = peer;
  group.report->chunk = chunk;
  group.report->expected = expected;
  group.report->seen = seen;
  store_release_system(&group.report->code, code);
}

// At the end of a call: tell this rank's host if another rank has given up, for then the data of
// this call may be that rank's of another.
FLUXGEN_HOST_DEVICE void report_abort(fluxgen_group const& group, uint32_t op, uint32_t epoch) {
  uint32_t const by = aborted_by(group);
  if (by != 0u && by != uint32_t(group.rank) + 1u && group.report != nullptr &&
      load_acquire_system(&group.report->code) == 0u) {
    write_report(group, kPeerAborted, op, by - 1u, 0u, epoch, epoch);
  }
}

// Whether a wait that has found nothing since `start` gives up: its deadline has passed, or a rank has
// given up before. Then the report names the first wait that did, and the caller goes on without the
// data, so that all that is queued ends soon and the GPU stays usable. A group that has aborted
// once holds no promise any more: the hosts raise and make new workspaces.
FLUXGEN_HOST_DEVICE bool gives_up(fluxgen_group const& group, uint64_t start, uint32_t op,
                                  int32_t peer, int32_t chunk, uint32_t epoch, uint32_t seen) {
  if (aborted_by(group) != 0u) {
    return true;
  }
  if (clock_ns() - start <= group.timeout_ns) {
    return false;
  }
  // One thread of this rank tells everybody, unless a peer has told it meanwhile.
  if (claim(workspace_word(group.peers[group.rank], kAbortedOffset), uint32_t(group.rank) + 1u) ==
      0u) {
    for (int32_t other = 0; other < group.world; ++other) {
      if (other != group.rank) {
        store_release_system(workspace_word(group.peers[other], kAbortedOffset),
                             uint32_t(group.rank) + 1u);
      }
    }
    if (group.report != nullptr) {
      write_report(group, kTimeout, op, uint32_t(peer), uint32_t(chunk), epoch, seen);
    }
  }
  return true;
}

// Wait until the flag reaches `epoch`; false if that gave up.
FLUXGEN_HOST_DEVICE bool wait_epoch(uint32_t const* flag, uint32_t epoch,
                                    fluxgen_group const& group, uint32_t op, int32_t peer,
                                    int32_t chunk) {
  uint32_t seen = load_acquire_system(flag);
  if (epoch_reached(seen, epoch)) {
    return true;
  }
  uint64_t const start = clock_ns();
  for (uint32_t spin = 1;; ++spin) {
    seen = load_acquire_system(flag);
    if (epoch_reached(seen, epoch)) {
      return true;
    }
    if ((spin & 63u) == 0u) {
      if (gives_up(group, start, op, peer, chunk, epoch, seen)) {
        return false;
      }
      pause();
    }
  }
}

// The epoch of the ag_gemm in progress, for its GEMMs. They run beside the kernel that begins the
// call and advances the epoch at its end: until `begun` has left `multiplied` behind, which nobody
// changes as long as they run, it is not known. Waits for that.
FLUXGEN_HOST_DEVICE uint32_t gather_epoch(fluxgen_group const& group) {
  void* mine = group.peers[group.rank];
  uint32_t const* begun = workspace_word(mine, kBegunOffset);
  uint32_t const done = load_relaxed(workspace_word(mine, kMultipliedOffset));
  wait_epoch(begun, done + 1u, group, FLUXGEN_AG_GEMM, group.rank, 0);
  return load_acquire_system(begun);
}

// Every block of a call's last GEMM, when all that it loads has been loaded: the last one says that
// the call's GEMMs have ended, and if a peer has given up. `epoch` is that of the call.
FLUXGEN_HOST_DEVICE void end_gather(fluxgen_group const& group, uint32_t epoch, uint32_t blocks) {
  void* mine = group.peers[group.rank];
  uint32_t* ticket = workspace_word(mine, kGemmTicketOffset);
  if (add_acquire_release(ticket, 1u) == blocks - 1u) {
    store_relaxed(ticket, 0u);
    store_relaxed(workspace_word(mine, kMultipliedOffset), epoch);
    report_abort(group, FLUXGEN_AG_GEMM, epoch);
  }
}

// Count one finished tile of a chunk of `owner`'s slab; whoever finishes the chunk tells the owner,
// or, with `drain`, this rank's copies. The tile's stores must be complete, and this thread must have
// fenced them (fence_device). The counter returns to zero by its last user, so that the next call finds
// it so.
//
// Two fences are all: that one releases this tile to whoever on this GPU counts last, whose own takes
// in all the tiles counted before and releases them to the system with the flag (PTX's memory model:
// causality order is transitive, whatever the scopes on the way). The mark is read beside the count: a
// flag that goes out although a peer has given up meanwhile belongs to data that is there, of a call in
// progress.
FLUXGEN_HOST_DEVICE void signal_tile(fluxgen_group const& group, int32_t owner, int32_t chunk,
                                     uint32_t tiles_in_chunk, uint32_t epoch, bool drain) {
  void* mine = group.peers[group.rank];
  uint32_t const aborted = load_relaxed_system(workspace_word(mine, kAbortedOffset));
  uint32_t* counter = chunk_counter(mine, owner, chunk);
  if (add_relaxed(counter, 1u) == tiles_in_chunk - 1u) {
    store_relaxed(counter, 0u);
    fence_system();
    if (drain && owner != group.rank) {
      store_relaxed_system(filled_flag(mine, owner, chunk), epoch);
    } else if (aborted == 0u) {
      store_relaxed_system(arrived_flag(group.peers[owner], group.rank, chunk), epoch);
    }
  }
}

}  // namespace fluxgen
#endif  // FLUXGEN_PROTOCOL_FLAGS_CUH_
