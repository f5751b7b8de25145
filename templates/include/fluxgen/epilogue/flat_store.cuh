// Where the finished rows of a flat tile go, eight elements of 16 bits at a time: to D, to their owner, or to
// all ranks, into inboxes or in packets. The same on every architecture.
#ifndef FLUXGEN_EPILOGUE_FLAT_STORE_CUH_
#define FLUXGEN_EPILOGUE_FLAT_STORE_CUH_

#include "fluxgen/order/flat_tiles.cuh"
#include "fluxgen/protocol/packets.cuh"

namespace fluxgen {

// What a kernel knows of its stores before it has anything to store.
template <class Element>
struct FlatStore {
  fluxgen_group const& group;
  FlatTiles const& tiles;
  int32_t n;
  Element* d;  // of an ag_gemm
  int64_t d_row_stride;
  uint32_t epoch;  // of a gemm_rs
  bool silent;     // a rank of the group has given up: no packet leaves

  // Of a gemm_rs, by every thread that stores. Its packets come after all that this rank has read in its
  // calls before; no fence is needed between them.
  static __device__ FlatStore begin(fluxgen_group const& group, FlatTiles const& tiles, int32_t n) {
    uint32_t const epoch = current_epoch(group.peers[group.rank], 1);
    bool silent = false;
    if (tiles.packed) {
      silent = aborted_by(group) != 0u;
      fence_system();
    }
    return {group, tiles, n, nullptr, 0, epoch, silent};
  }

  // Eight columns of a token, from `column` on, a multiple of 8.
  template <bool kAllGather>
  __device__ void put(int32_t token, int32_t column, float const (&sum)[8]) const {
    static_assert(sizeof(Element) == 2, "eight are 16 bytes");
    alignas(16) Element rounded[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      rounded[j] = Element(sum[j]);
    }
    uint4 const out = *reinterpret_cast<uint4 const*>(rounded);
    if constexpr (kAllGather) {
      *reinterpret_cast<uint4*>(d + token * d_row_stride + column) = out;
      return;
    }
    int const owner = tiles.one_shot ? group.rank : token / tiles.rows;
    int const of_owner = tiles.one_shot ? token : token - owner * tiles.rows;
    int const copies = tiles.one_shot ? tiles.world : 1;
    int64_t const slab = int64_t(tiles.rows) * n, offset = int64_t(of_owner) * n + column;
    uint32_t const mark = packet_mark(epoch);
    for (int copy = 1; copy <= copies; ++copy) {  // this rank's own last
      int const to = tiles.one_shot ? (owner + copy) % tiles.world : owner;
      if (!tiles.packed) {
        *reinterpret_cast<uint4*>(inbox_slab(group, to, epoch, group.rank, slab * 2) + offset * 2) =
            out;
      } else if (!silent) {
        auto* const at = reinterpret_cast<uint64_t*>(
            packet_slab(group, to, epoch, group.rank, slab * 4) + offset * 4);
        store_packets(at, make_packet(out.x, mark), make_packet(out.y, mark));
        store_packets(at + 2, make_packet(out.z, mark), make_packet(out.w, mark));
      }
    }
  }

  // After all stores of a tile, when its block has met at a barrier: `thread` tells one owner, in its `share` of
  // what that waits for. Packets tell by themselves.
  __device__ void signal(int32_t tile_m, int32_t thread, uint32_t shares) const {
    Ranks const owners = ranks_of(tiles, tile_m);
    int const owner = owners.first + thread;
    if (!tiles.packed && owner < owners.end) {
      fence_device();  // all threads' stores: they are before the barrier just passed
      signal_tile(group, owner, 0, tiles_of(tiles, owner) * shares, epoch, false);
    }
  }
};

}  // namespace fluxgen
#endif  // FLUXGEN_EPILOGUE_FLAT_STORE_CUH_
