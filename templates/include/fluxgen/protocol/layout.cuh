// Where the flags and the data of a workspace lie.
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
#ifndef FLUXGEN_PROTOCOL_LAYOUT_CUH_
#define FLUXGEN_PROTOCOL_LAYOUT_CUH_

#include <stdint.h>

#include "fluxgen/abi.h"
#include "fluxgen/host_device.h"

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
// Where this rank's GEMM puts its part of the owner's slab.
FLUXGEN_HOST_DEVICE char* partial_slab(fluxgen_group const& group, int32_t owner, uint32_t epoch,
                                       int64_t slab_bytes, bool drain) {
  if (!drain) {
    return inbox_slab(group, owner, epoch, group.rank, slab_bytes);
  }
  return owner == group.rank ? drained_slab(group, owner, owner, slab_bytes)
                             : outbox_slab(group, owner, slab_bytes);
}

}  // namespace fluxgen
#endif  // FLUXGEN_PROTOCOL_LAYOUT_CUH_
