// How ranks tell each other that data is there: epochs, two buffers, no barriers.
//
// A workspace, one per rank, the same layout on all:
//
//      0      control   epoch, aborted, tickets, begun, multiplied, staged, sent, drained
//      256    ready     [source]         source's slab is in its stage   (the source writes)
//      384    pulled    [peer]           peer has copied my stage        (the peer writes)
//      512    arrived   [source][chunk]  stored into my inbox            (the source writes)
//      1536   gathered  [source][chunk]  copied into my gathered matrix  (my copies, or the source's)
//      2560   counters  [owner][chunk]   finished tiles of what I send   (my kernels write)
//      3584   filled    [owner][chunk]   all of them are in my outbox    (my kernels write)
//      4608   consumed  [peer]           peer has read what I drained    (the peer writes)
//      4672   reduced   [source]         source's rows are in my result  (the source writes)
//      5120   stage     [row][column]    my slab of ag_gemm, for the peers to pull
//      ...    inbox     [half][source][row][column] of gemm_rs, half = epoch % 2
//      ...    matrix    [row][column]    the gathered A of ag_gemm, where peers push
//      ...    drained   [source][row][column] the inbox of gemm_rs that copies fill
//      ...    outbox    [owner][row][column]  what my copies take from
//      ...    result    [row][column]    D of an all-reduce, where its owners push
//      ...    packets   [half][source][row][column / 2] {32 bits of data, 32 bits of epoch}
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
// With few tokens a gemm_rs and an all-reduce may go in packets: each holds two elements and the epoch, is written and
// read as one, and needs neither a count of tiles nor a fence nor a flag. Nothing else is ever written
// there, whatever the call's shape, so that a word that is read as an epoch was written as one, and no
// data can be taken for it. Who has read a packet empties it: its epoch is compared for equality, and after
// 2^32 calls an old one would be equal again. Halves as of the inbox.
//
// Compiled for the host too: the same functions, over the compiler's atomics, are run by threads
// in the tests.
#ifndef FLUXGEN_PROTOCOL_CUH_
#define FLUXGEN_PROTOCOL_CUH_

#include <stdint.h>

#include "fluxgen/abi.h"
#include "fluxgen/tile_order.cuh"

#if defined(__CUDA_ARCH__)
#define FLUXGEN_UNROLL _Pragma("unroll")
#else
#define FLUXGEN_UNROLL
#endif

namespace fluxgen {

constexpr int64_t kEpochOffset = 0;
constexpr int64_t kAbortedOffset = 4;
constexpr int64_t kTicketOffset = 8;
constexpr int64_t kPullTicketOffset = 12;
constexpr int64_t kBegunOffset = 16;       // the epoch of the last ag_gemm that began
constexpr int64_t kMultipliedOffset = 20;  // of the last one whose GEMMs have ended
constexpr int64_t kGemmTicketOffset = 24;
constexpr int64_t kStagedOffset = 28;   // of the last one whose slab is in the stage
constexpr int64_t kSentOffset = 32;     // the epoch of the last gemm_rs whose copies are all out
constexpr int64_t kDrainedOffset = 36;  // of the last one that was drained and has ended
constexpr int64_t kReadyOffset = 256;
constexpr int64_t kPulledOffset = 384;
constexpr int64_t kFlagBlockBytes = FLUXGEN_MAX_WORLD * FLUXGEN_MAX_CHUNKS * 4;
constexpr int64_t kArrivedOffset = 512;
constexpr int64_t kGatheredOffset = kArrivedOffset + kFlagBlockBytes;
constexpr int64_t kCountersOffset = kGatheredOffset + kFlagBlockBytes;
constexpr int64_t kFilledOffset = kCountersOffset + kFlagBlockBytes;
constexpr int64_t kConsumedOffset = kFilledOffset + kFlagBlockBytes;
constexpr int64_t kReducedOffset = kConsumedOffset + FLUXGEN_MAX_WORLD * 4;
constexpr int64_t kDataOffset = 5120;
static_assert(kReducedOffset + FLUXGEN_MAX_WORLD * 4 <= kDataOffset, "blocks overlap");
static_assert(kDataOffset % 1024 == 0, "TMA needs aligned data");

FLUXGEN_HOST_DEVICE uint32_t* workspace_word(void* base, int64_t offset) {
  return reinterpret_cast<uint32_t*>(static_cast<char*>(base) + offset);
}
FLUXGEN_HOST_DEVICE uint32_t* ready_flag(void* base, int32_t source) {
  return workspace_word(base, kReadyOffset + 4 * int64_t(source));
}
FLUXGEN_HOST_DEVICE uint32_t* pulled_flag(void* base, int32_t peer) {
  return workspace_word(base, kPulledOffset + 4 * int64_t(peer));
}
FLUXGEN_HOST_DEVICE uint32_t* arrived_flag(void* base, int32_t source, int32_t chunk) {
  return workspace_word(base, kArrivedOffset + 4 * (int64_t(source) * FLUXGEN_MAX_CHUNKS + chunk));
}
FLUXGEN_HOST_DEVICE uint32_t* gathered_flag(void* base, int32_t source, int32_t chunk) {
  return workspace_word(base, kGatheredOffset + 4 * (int64_t(source) * FLUXGEN_MAX_CHUNKS + chunk));
}
FLUXGEN_HOST_DEVICE uint32_t* chunk_counter(void* base, int32_t owner, int32_t chunk) {
  return workspace_word(base, kCountersOffset + 4 * (int64_t(owner) * FLUXGEN_MAX_CHUNKS + chunk));
}
FLUXGEN_HOST_DEVICE uint32_t* filled_flag(void* base, int32_t owner, int32_t chunk) {
  return workspace_word(base, kFilledOffset + 4 * (int64_t(owner) * FLUXGEN_MAX_CHUNKS + chunk));
}
FLUXGEN_HOST_DEVICE uint32_t* consumed_flag(void* base, int32_t peer) {
  return workspace_word(base, kConsumedOffset + 4 * int64_t(peer));
}
FLUXGEN_HOST_DEVICE uint32_t* reduced_flag(void* base, int32_t source) {
  return workspace_word(base, kReducedOffset + 4 * int64_t(source));
}
// The slab of `rank` for its peers to pull.
FLUXGEN_HOST_DEVICE char* stage(fluxgen_group const& group, int32_t rank) {
  return static_cast<char*>(group.peers[rank]) + kDataOffset;
}
// Slabs of an inbox lie one behind the other, as one (m, n) matrix; halves lie half_bytes apart
// whatever the call, or a call would reach into the half of the one before.
FLUXGEN_HOST_DEVICE char* inbox_slab(fluxgen_group const& group, int32_t owner, uint32_t epoch,
                                     int32_t source, int64_t slab_bytes) {
  return stage(group, owner) + group.stage_bytes + int64_t(epoch & 1u) * group.half_bytes +
         source * slab_bytes;
}

// The matrix of `rank` that its peers push slabs into.
FLUXGEN_HOST_DEVICE char* pushed_matrix(fluxgen_group const& group, int32_t rank) {
  return stage(group, rank) + group.stage_bytes + 2 * group.half_bytes;
}

// Slabs of the inbox of `owner` that copies drain into, and of this rank's outbox.
FLUXGEN_HOST_DEVICE char* drained_slab(fluxgen_group const& group, int32_t owner, int32_t source,
                                       int64_t slab_bytes) {
  return pushed_matrix(group, owner) + group.gathered_bytes + source * slab_bytes;
}
FLUXGEN_HOST_DEVICE char* outbox_slab(fluxgen_group const& group, int32_t owner,
                                      int64_t slab_bytes) {
  return drained_slab(group, group.rank, 0, 0) + group.drained_bytes + owner * slab_bytes;
}
// The rows of `source` in the result of `rank`.
FLUXGEN_HOST_DEVICE char* result_slab(fluxgen_group const& group, int32_t rank, int32_t source,
                                      int64_t slab_bytes) {
  return drained_slab(group, rank, 0, 0) + 2 * group.drained_bytes + source * slab_bytes;
}
// The packets of `source` at `owner`.
FLUXGEN_HOST_DEVICE char* packet_slab(fluxgen_group const& group, int32_t owner, uint32_t epoch,
                                      int32_t source, int64_t slab_bytes) {
  return result_slab(group, owner, 0, 0) + group.result_bytes +
         int64_t(epoch & 1u) * group.packet_bytes + source * slab_bytes;
}
// What a packet of a call carries beside its data; never that of an empty one.
FLUXGEN_HOST_DEVICE uint32_t packet_mark(uint32_t epoch) { return epoch == 0u ? 1u : epoch; }
FLUXGEN_HOST_DEVICE uint64_t make_packet(uint32_t data, uint32_t mark) {
  return uint64_t(mark) << 32 | data;
}
// Where this rank's GEMM puts its part of the owner's slab.
FLUXGEN_HOST_DEVICE char* partial_slab(fluxgen_group const& group, int32_t owner, uint32_t epoch,
                                       int64_t slab_bytes, bool drain) {
  if (!drain) {
    return inbox_slab(group, owner, epoch, group.rank, slab_bytes);
  }
  return owner == group.rank ? drained_slab(group, owner, owner, slab_bytes)
                             : outbox_slab(group, owner, slab_bytes);
}

// A chunk of K: the first is `unit` long, each further one as long as all before it. Short chunks
// let the first tiles start, few of them keep the copies large.
FLUXGEN_HOST_DEVICE int64_t k_chunk_begin(int64_t unit, int32_t chunk) {
  return chunk == 0 ? 0 : unit << (chunk - 1);
}
FLUXGEN_HOST_DEVICE int64_t k_chunk_end(int64_t unit, int32_t chunk, int64_t extent) {
  int64_t const end = unit << chunk;
  return end < extent ? end : extent;
}
FLUXGEN_HOST_DEVICE int32_t k_chunk_count(int64_t unit, int64_t extent) {
  int32_t count = 1;
  while (count <= FLUXGEN_MAX_CHUNKS && unit << (count - 1) < extent) {
    ++count;
  }
  return count;
}

// Whether a flag that shows `seen` has reached `expected`: a comparison modulo 2^32.
FLUXGEN_HOST_DEVICE bool epoch_reached(uint32_t seen, uint32_t expected) {
  return int32_t(seen - expected) >= 0;
}

#if defined(__CUDA_ARCH__)

__device__ __forceinline__ uint32_t load_acquire_system(uint32_t const* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_release_system(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t add_acquire_release(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}
// Store `value` where there is zero; what was there before.
__device__ __forceinline__ uint32_t claim(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.cas.acq_rel.sys.global.b32 %0, [%1], 0, %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}
__device__ __forceinline__ uint32_t load_relaxed(uint32_t const* address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_relaxed_system(uint32_t const* address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed_system(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Two packets, 16-byte aligned: one access, of which each packet is whole (PTX: a vector is accessed as
// its elements, in any order).
__device__ __forceinline__ void load_packets(uint64_t const* address, uint64_t (&two)[2]) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(two[0]), "=l"(two[1])
               : "l"(address)
               : "memory");
}
__device__ __forceinline__ void store_packets(uint64_t* address, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(address), "l"(first),
               "l"(second)
               : "memory");
}
__device__ __forceinline__ uint32_t add_relaxed(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ uint64_t clock_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ void pause() { __nanosleep(64); }

#else  // host: the compiler's atomics; the tests run ranks as threads

inline uint32_t load_acquire_system(uint32_t const* address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline void store_release_system(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
inline uint32_t add_acquire_release(uint32_t* address, uint32_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
inline uint32_t claim(uint32_t* address, uint32_t value) {
  uint32_t old = 0;
  __atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return old;
}
inline uint32_t load_relaxed(uint32_t const* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}
inline void store_relaxed(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
}
inline uint32_t load_relaxed_system(uint32_t const* address) { return load_relaxed(address); }
inline void store_relaxed_system(uint32_t* address, uint32_t value) {
  store_relaxed(address, value);
}
inline void load_packets(uint64_t const* address, uint64_t (&two)[2]) {
  two[0] = __atomic_load_n(address, __ATOMIC_RELAXED);
  two[1] = __atomic_load_n(address + 1, __ATOMIC_RELAXED);
}
inline void store_packets(uint64_t* address, uint64_t first, uint64_t second) {
  __atomic_store_n(address + 1, second, __ATOMIC_RELAXED);
  __atomic_store_n(address, first, __ATOMIC_RELAXED);
}
inline uint32_t add_relaxed(uint32_t* address, uint32_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline void fence_device() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
inline void fence_system() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
uint64_t clock_ns();  // the test supplies them
void pause();

#endif

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

// Wait for a packet without taking it: a sign that others are due. False if that gave up.
FLUXGEN_HOST_DEVICE bool wait_packet(uint64_t const* at, uint32_t epoch, fluxgen_group const& group,
                                     uint32_t op, int32_t source) {
  uint64_t const start = clock_ns();
  for (uint32_t spin = 1;; ++spin) {
    uint64_t two[2];
    load_packets(at, two);
    if (uint32_t(two[0] >> 32) == packet_mark(epoch)) {
      return true;
    }
    if ((spin & 63u) == 0u &&
        gives_up(group, start, op, source, 0, epoch, uint32_t(two[0] >> 32))) {
      return false;
    }
    pause();
  }
}

// Take eight elements of each of `count` sources, from `first` on: four packets each, `slab_bytes` apart. Waits
// until all are of this epoch, and empties them. False if that gave up: then `words` are whatever was there.
template <int kMost>
FLUXGEN_HOST_DEVICE bool take_packets(char* at, int64_t slab_bytes, int32_t first, int32_t count,
                                      uint32_t epoch, fluxgen_group const& group, uint32_t op,
                                      uint32_t (&words)[kMost][4]) {
  uint32_t const mark = packet_mark(epoch);
  uint64_t start = 0;
  bool whole = false;
  for (uint32_t spin = 1; !whole; ++spin) {
    uint64_t packets[kMost][2][2];
    FLUXGEN_UNROLL
    for (int s = 0; s < kMost; ++s) {
      if (s < count) {
        auto const* from = reinterpret_cast<uint64_t const*>(at + (first + s) * slab_bytes);
        load_packets(from, packets[s][0]);
        load_packets(from + 2, packets[s][1]);
      }
    }
    int32_t missing = -1;
    uint32_t seen = 0;
    FLUXGEN_UNROLL
    for (int s = 0; s < kMost; ++s) {
      FLUXGEN_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (s < count) {
          uint64_t const packet = packets[s][i / 2][i % 2];
          words[s][i] = uint32_t(packet);
          if (uint32_t(packet >> 32) != mark) {
            missing = first + s;
            seen = uint32_t(packet >> 32);
          }
        }
      }
    }
    whole = missing < 0;
    if (!whole && (spin & 63u) == 0u) {
      if (start == 0) {
        start = clock_ns();
      } else if (gives_up(group, start, op, missing, 0, epoch, seen)) {
        return false;
      }
      pause();
    }
  }
  FLUXGEN_UNROLL
  for (int s = 0; s < kMost; ++s) {
    if (s < count) {
      auto* const from = reinterpret_cast<uint64_t*>(at + (first + s) * slab_bytes);
      store_packets(from, 0, 0);
      store_packets(from + 2, 0, 0);
    }
  }
  return true;
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
#endif  // FLUXGEN_PROTOCOL_CUH_
