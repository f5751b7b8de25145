// Which output tile a persistent block computes next: one pure mapping, shared by host and device,
// by Hopper and Ampere, by the kernel and its tests.
//
// The problem is rank-batched: W slabs of tiles_m x tiles_n clusters of tiles. Slabs are visited in
// arrival order, cut into groups; inside a group, panels of N; inside a panel, all rows of all the
// group's slabs, so that B is read from memory once per group and not once per rank.
//
//      W = 4, groups (1, 3), panel = 2, this rank = 2      n 0  1 | 2  3 | 4
//      arrival order (AG: own slab first)                     ------+------+----
//      group 0: slab 2                               m 0 |  0  1 |  4  5 |  8
//                                                    m 1 |  2  3 |  6  7 |  9
//      group 1: slabs 3, 0, 1                        m 0 | 10 11 | 22 23 | 34      slab 3
//                                                    m 1 | 12 13 | 24 25 | 35
//                                                    m 0 | 14 15 | 26 27 | 36      slab 0
//                                                    ...
//
// RS uses the same walk with the own slab last: its stores stay local, and the remote ones leave
// as early as possible.
#ifndef FLUXGEN_TILE_ORDER_CUH_
#define FLUXGEN_TILE_ORDER_CUH_

#include <stdint.h>

#include "fluxgen/abi.h"

#if defined(__CUDACC__)
#define FLUXGEN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLUXGEN_HOST_DEVICE inline
#endif

namespace fluxgen {

struct TileCoord {
  int32_t m;  // cluster index inside the slab
  int32_t n;
  int32_t l;  // rank that owns the slab
};

struct TileOrder {
  uint32_t total;   // clusters of all slabs
  int32_t world;
  int32_t first;    // rank visited first
  int32_t tiles_m;  // clusters of one slab along m
  int32_t tiles_n;
  int32_t panel;    // clusters along n in one panel
  int32_t group_count;
  int32_t group_begin[FLUXGEN_MAX_WORLD + 1];  // first visit index of each group
};

// Rank of the i-th visited slab.
FLUXGEN_HOST_DEVICE int32_t visited_rank(TileOrder const& order, int32_t visit) {
  int32_t rank = order.first + visit;
  return rank >= order.world ? rank - order.world : rank;
}

// The cluster at position `linear` of the walk; linear must be below order.total.
FLUXGEN_HOST_DEVICE TileCoord tile_at(TileOrder const& order, uint32_t linear) {
  uint32_t const slab = uint32_t(order.tiles_m) * uint32_t(order.tiles_n);
  uint32_t const visit_of_linear = linear / slab;
  int32_t group = 0;
  while (group + 1 < order.group_count &&
         visit_of_linear >= uint32_t(order.group_begin[group + 1])) {
    ++group;
  }
  uint32_t const begin = uint32_t(order.group_begin[group]);
  uint32_t const ranks = uint32_t(order.group_begin[group + 1]) - begin;
  uint32_t const rows = ranks * uint32_t(order.tiles_m);
  uint32_t const panel = uint32_t(order.panel);
  uint32_t const full_panels = uint32_t(order.tiles_n) / panel;
  uint32_t rest = linear - begin * slab;
  uint32_t const full = full_panels * panel * rows;
  uint32_t column, width;
  if (rest < full) {
    width = panel;
    column = rest / (panel * rows) * panel;
    rest -= column * rows;
  } else {
    width = uint32_t(order.tiles_n) - full_panels * panel;
    column = full_panels * panel;
    rest -= full;
  }
  uint32_t const row = rest / width;
  TileCoord coord;
  coord.n = int32_t(column + rest - row * width);
  coord.l = visited_rank(order, int32_t(begin + row / uint32_t(order.tiles_m)));
  coord.m = int32_t(row % uint32_t(order.tiles_m));
  return coord;
}

// Build the walk of `rank`. Returns false when the groups do not sum to the world, or a count is
// out of range, or the walk has more clusters than 32 bits count.
inline bool make_tile_order(TileOrder* order, int32_t op, int32_t world, int32_t rank,
                            int64_t tiles_m, int64_t tiles_n, int32_t panel,
                            int32_t const* groups, int32_t group_count) {
  if (world < 1 || world > FLUXGEN_MAX_WORLD || rank < 0 || rank >= world || tiles_m < 1 ||
      tiles_n < 1 || panel < 0 || group_count < 0 || group_count > world) {
    return false;
  }
  if (tiles_m > INT32_MAX || tiles_n > INT32_MAX ||
      tiles_m * tiles_n > int64_t(UINT32_MAX / 2) / world) {
    return false;
  }
  order->total = uint32_t(tiles_m * tiles_n * world);
  order->world = world;
  order->first = op == FLUXGEN_AG_GEMM ? rank : (rank + 1) % world;
  order->tiles_m = int32_t(tiles_m);
  order->tiles_n = int32_t(tiles_n);
  order->panel = panel == 0 || panel > tiles_n ? int32_t(tiles_n) : panel;
  order->group_count = group_count == 0 ? 1 : group_count;
  order->group_begin[0] = 0;
  if (group_count == 0) {
    order->group_begin[1] = world;
    return true;
  }
  int32_t sum = 0;
  for (int32_t g = 0; g < group_count; ++g) {
    if (groups[g] < 1 || groups[g] > world) {
      return false;
    }
    sum += groups[g];
    order->group_begin[g + 1] = sum;
  }
  return sum == world;
}

}  // namespace fluxgen
#endif  // FLUXGEN_TILE_ORDER_CUH_
