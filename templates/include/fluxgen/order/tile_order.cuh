// Which output tile a persistent block computes next: one pure mapping, shared by host and device,
// by Hopper and Ampere, by the kernel and its tests.
//
// The problem is rank-batched: W slabs of tiles_m x tiles_n tiles. Slabs are visited in arrival
// order, cut into groups; inside a group, panels of N; inside a panel, all rows of all the group's
// slabs, so that B is read from memory once per group and not once per rank.
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
//
// A cluster of cluster_m blocks takes that many consecutive rows of its group, also across the
// border of two slabs: B, which the cluster shares by multicast, is the same for both. So a slab
// of a single row of tiles still shares B, and padding is at most one cluster row per group.
#ifndef FLUXGEN_ORDER_TILE_ORDER_CUH_
#define FLUXGEN_ORDER_TILE_ORDER_CUH_

#include <stdint.h>

#include "fluxgen/abi.h"
#include "fluxgen/host_device.h"

namespace fluxgen {

struct TileCoord {
  int32_t m;  // row of tiles inside the slab; tiles_m for the padding of a group's last cluster
  int32_t n;  // column of clusters
  int32_t l;  // rank that owns the slab
};

struct TileOrder {
  uint32_t total;  // clusters of the whole walk
  int32_t world;
  int32_t first;    // rank visited first
  int32_t tiles_m;  // rows of tiles of one slab
  int32_t tiles_n;  // columns of clusters
  int32_t cluster_m;
  int32_t panel;  // columns of clusters in one panel
  int32_t group_count;
  int32_t group_visit[FLUXGEN_MAX_WORLD + 1];   // first visit index of each group
  uint32_t group_start[FLUXGEN_MAX_WORLD + 1];  // first cluster of each group
};

// Rank of the i-th visited slab.
FLUXGEN_HOST_DEVICE int32_t visited_rank(TileOrder const& order, int32_t visit) {
  int32_t rank = order.first + visit;
  return rank >= order.world ? rank - order.world : rank;
}

// The tile of block `cta_m` of the cluster at position `linear`, which is below order.total.
FLUXGEN_HOST_DEVICE TileCoord tile_at(TileOrder const& order, uint32_t linear, int32_t cta_m) {
  int32_t group = 0;
  while (group + 1 < order.group_count && linear >= order.group_start[group + 1]) {
    ++group;
  }
  int32_t const visit = order.group_visit[group];
  uint32_t const slabs = uint32_t(order.group_visit[group + 1] - visit);
  uint32_t const rows = slabs * uint32_t(order.tiles_m);
  uint32_t const cluster_m = uint32_t(order.cluster_m);
  uint32_t const cluster_rows = (rows + cluster_m - 1) / cluster_m;
  uint32_t const panel = uint32_t(order.panel);
  uint32_t const full_panels = uint32_t(order.tiles_n) / panel;
  uint32_t const full = full_panels * panel * cluster_rows;
  uint32_t rest = linear - order.group_start[group];
  uint32_t column, width;
  if (rest < full) {
    width = panel;
    column = rest / (panel * cluster_rows) * panel;
    rest -= column * cluster_rows;
  } else {
    width = uint32_t(order.tiles_n) - full_panels * panel;
    column = full_panels * panel;
    rest -= full;
  }
  uint32_t const cluster_row = rest / width;
  uint32_t const row = cluster_row * cluster_m + uint32_t(cta_m);
  TileCoord coord;
  coord.n = int32_t(column + rest - cluster_row * width);
  if (row >= rows) {
    coord.m = order.tiles_m;
    coord.l = visited_rank(order, visit + int32_t(slabs) - 1);
  } else {
    uint32_t const slab = row / uint32_t(order.tiles_m);
    coord.m = int32_t(row - slab * uint32_t(order.tiles_m));
    coord.l = visited_rank(order, visit + int32_t(slab));
  }
  return coord;
}

// Build the walk of `rank`. Returns false when the groups do not sum to the world, or a count is
// out of range, or the walk has more clusters than 32 bits count.
inline bool make_tile_order(TileOrder* order, int32_t op, int32_t world, int32_t rank,
                            int64_t tiles_m, int64_t tiles_n, int32_t cluster_m, int32_t panel,
                            int32_t const* groups, int32_t group_count) {
  if (world < 1 || world > FLUXGEN_MAX_WORLD || rank < 0 || rank >= world || tiles_m < 1 ||
      tiles_n < 1 || cluster_m < 1 || panel < 0 || group_count < 0 || group_count > world) {
    return false;
  }
  if (tiles_m > INT32_MAX || tiles_n > INT32_MAX ||
      (tiles_m * world + cluster_m) * tiles_n > int64_t(UINT32_MAX / 2)) {
    return false;
  }
  order->world = world;
  order->first = op == FLUXGEN_AG_GEMM ? rank : (rank + 1) % world;
  order->tiles_m = int32_t(tiles_m);
  order->tiles_n = int32_t(tiles_n);
  order->cluster_m = cluster_m;
  order->panel = panel == 0 || panel > tiles_n ? int32_t(tiles_n) : panel;
  order->group_count = group_count == 0 ? 1 : group_count;
  order->group_visit[0] = 0;
  order->group_start[0] = 0;
  int64_t start = 0;
  int32_t visit = 0;
  for (int32_t g = 0; g < order->group_count; ++g) {
    int32_t const slabs = group_count == 0 ? world : groups[g];
    if (slabs < 1 || slabs > world) {
      return false;
    }
    visit += slabs;
    start += (slabs * tiles_m + cluster_m - 1) / cluster_m * tiles_n;
    order->group_visit[g + 1] = visit;
    order->group_start[g + 1] = uint32_t(start);
  }
  order->total = uint32_t(start);
  return visit == world && start <= int64_t(UINT32_MAX / 2);
}

}  // namespace fluxgen
#endif  // FLUXGEN_ORDER_TILE_ORDER_CUH_
