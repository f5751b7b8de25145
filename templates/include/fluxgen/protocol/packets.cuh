// With few tokens a gemm_rs and an all-reduce may go in packets: each holds two elements and the epoch, is written and
// read as one, and needs neither a count of tiles nor a fence nor a flag. Nothing else is ever written
// there, whatever the call's shape, so that a word that is read as an epoch was written as one, and no
// data can be taken for it. Who has read a packet empties it: its epoch is compared for equality, and after
// 2^32 calls an old one would be equal again. Halves as of the inbox.
#ifndef FLUXGEN_PROTOCOL_PACKETS_CUH_
#define FLUXGEN_PROTOCOL_PACKETS_CUH_

#include <stdint.h>

#include "fluxgen/protocol/flags.cuh"

#if defined(__CUDA_ARCH__)
#define FLUXGEN_UNROLL _Pragma("unroll")
#else
#define FLUXGEN_UNROLL
#endif

namespace fluxgen {

// What a packet of a call carries beside its data; never that of an empty one.
FLUXGEN_HOST_DEVICE uint32_t packet_mark(uint32_t epoch) { return epoch == 0u ? 1u : epoch; }
FLUXGEN_HOST_DEVICE uint64_t make_packet(uint32_t data, uint32_t mark) {
  return uint64_t(mark) << 32 | data;
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

}  // namespace fluxgen
#endif  // FLUXGEN_PROTOCOL_PACKETS_CUH_
