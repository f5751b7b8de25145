// Which rows a flat tile holds, and whose they are: one pure mapping, shared by host and device.
//
// A flat GEMM has no slabs: its tiles span the rows of several ranks, of all of them if these are few.
//
//      world = 4, rows = 3 a rank, tiles of 8 tokens      token  0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
//                                                         rank   0       1       2       3
//                                                         tile   0 0 0   0 0 0   0 0 1   1 1 1
//
// In one shot every rank gets all tokens: `rows` is then their number, and every tile goes to all.
#ifndef FLUXGEN_ORDER_FLAT_TILES_CUH_
#define FLUXGEN_ORDER_FLAT_TILES_CUH_

#include "fluxgen/order/tile_order.cuh"

namespace fluxgen {

struct FlatTiles {
  int32_t world;
  int32_t rows;    // of a rank; in one shot: of all
  int32_t tokens;  // rows of the whole problem
  int32_t tile;    // tokens of a tile
  int32_t tiles_m;
  int32_t tiles_n;  // tiles of columns
  int32_t one_shot;
  int32_t packed;  // the data carry their epoch, see protocol.cuh
};

// Ranks [first, end) whose rows a tile holds, or that get it.
struct Ranks {
  int32_t first;
  int32_t end;
};

// Tiles that share columns of B come one behind the other, so that B is read from memory once.
FLUXGEN_HOST_DEVICE void flat_tile_at(FlatTiles const& tiles, int32_t linear, int32_t* m,
                                      int32_t* n) {
  *n = linear / tiles.tiles_m;
  *m = linear - *n * tiles.tiles_m;
}
FLUXGEN_HOST_DEVICE int32_t flat_tile_tokens(FlatTiles const& tiles, int32_t m) {
  int32_t const left = tiles.tokens - m * tiles.tile;
  return left < tiles.tile ? left : tiles.tile;
}
FLUXGEN_HOST_DEVICE Ranks ranks_of(FlatTiles const& tiles, int32_t m) {
  if (tiles.one_shot) {
    return {0, tiles.world};
  }
  int32_t const first = m * tiles.tile;
  return {first / tiles.rows, (first + flat_tile_tokens(tiles, m) - 1) / tiles.rows + 1};
}
// Tiles, of all columns, that hold rows of a rank.
FLUXGEN_HOST_DEVICE uint32_t tiles_of(FlatTiles const& tiles, int32_t rank) {
  if (tiles.one_shot) {
    return uint32_t(tiles.tiles_m) * uint32_t(tiles.tiles_n);
  }
  int32_t const first = rank * tiles.rows / tiles.tile;
  int32_t const last = ((rank + 1) * tiles.rows - 1) / tiles.tile;
  return uint32_t(last - first + 1) * uint32_t(tiles.tiles_n);
}
// Steps of K that part `part` of `parts` adds up: whole, in order, as equal as can be.
FLUXGEN_HOST_DEVICE int32_t split_begin(int32_t steps, int32_t part, int32_t parts) {
  return int32_t(int64_t(steps) * part / parts);
}

inline bool sends_to_all(fluxgen_gemm_args const& args) {
  return args.sends == FLUXGEN_TO_ALL || args.sends == FLUXGEN_PACKETS_TO_ALL;
}

inline FlatTiles make_flat_tiles(fluxgen_gemm_args const& args, int32_t tile_tokens,
                                 int32_t tile_columns) {
  FlatTiles tiles;
  tiles.world = args.group.world;
  tiles.rows = int32_t(args.rows);
  tiles.one_shot = sends_to_all(args);
  tiles.packed = args.sends >= FLUXGEN_PACKETS_TO_OWNERS;
  tiles.tokens = int32_t(tiles.one_shot ? args.rows : args.rows * args.group.world);
  tiles.tile = tile_tokens;
  tiles.tiles_m = (tiles.tokens + tile_tokens - 1) / tile_tokens;
  tiles.tiles_n = int32_t((args.n + tile_columns - 1) / tile_columns);
  return tiles;
}

}  // namespace fluxgen
#endif  // FLUXGEN_ORDER_FLAT_TILES_CUH_
