// A fused Ampere GEMM: a persistent kernel around CUTLASS's sm80 mainloop, and its launch.
//
//   for each tile of the walk:  wait (ag_gemm)  ->  mainloop  ->  store  ->  signal (gemm_rs)
//
// The walk, the flags and the epochs are those of the Hopper kernels: tile_order.cuh, protocol.cuh.
// A block finishes one tile before it waits for another's data, and no block waits for a block of its
// own rank: no split of K over blocks, whose partners would wait with the one that waits for a peer.
#ifndef FLUXGEN_FAMILIES_SM80_CUH_
#define FLUXGEN_FAMILIES_SM80_CUH_

#include "fluxgen/families/launch.cuh"
#include "fluxgen/families/sm80_collectives.cuh"

namespace fluxgen {

struct Sm80Params {
  fluxgen_gemm_args args;
  TileOrder order;
  int32_t tiles_m;  // rows of tiles of `span` slabs
  int32_t tiles_n;
  int32_t chunk_rows;   // M chunks of ag_gemm: of the slab if there is one
  int32_t chunk_k;      // K chunks: elements of the first; 0: none
  int32_t chunk_tiles;  // gemm_rs: rows of tiles in one chunk
  int32_t cut;
};

// Where a tile lies.
struct Sm80Tile {
  int row;   // first row inside its `span` slabs
  int rows;  // that exist
  int column;
  int columns;
  int slab;  // of `span` ranks
};

// The first warp waits for a source's chunk [first, last], one lane a chunk.
__device__ __forceinline__ void sm80_wait(Sm80Params const& p, int source, int first, int last,
                                          uint32_t epoch) {
  fluxgen_group const& group = p.args.group;
  for (int chunk = first + int(threadIdx.x); chunk <= last; chunk += 32) {
    wait_epoch(gathered_flag(group.peers[group.rank], source, chunk), epoch, group, FLUXGEN_AG_GEMM,
               source, chunk);
  }
}

// All rows of a tile, or with K chunks the `chunk`-th part of their columns. By the first warp.
__device__ __forceinline__ void sm80_wait_tile(Sm80Params const& p, Sm80Tile const& tile, int chunk,
                                               uint32_t epoch) {
  int const slab_rows = int(p.args.rows), span = p.args.span > 1 ? p.args.span : 1;
  for (int row = tile.row; row < tile.row + tile.rows;) {
    int const place = row / slab_rows, source = tile.slab * span + place;
    int const begin = place * slab_rows;
    int const end = min(begin + slab_rows, tile.row + tile.rows);
    if (p.chunk_k == 0) {
      sm80_wait(p, source, (row - begin) / p.chunk_rows, (end - 1 - begin) / p.chunk_rows, epoch);
    } else {
      fluxgen_group const& group = p.args.group;
      int const visit = (source < group.rank ? group.world : 0) + source - group.rank;
      int const of = visit < p.cut ? chunk : 0;
      sm80_wait(p, source, of, of, epoch);
    }
    row = end;
  }
}

template <class Config>
struct Sm80Gemm {
  using C = Sm80Collectives<Config>;
  using Element = typename Config::Element;
  static constexpr bool kAllGather = Config::kOp == FLUXGEN_AG_GEMM;
  static constexpr int kThreads = C::kThreads;
  static constexpr int kSharedBytes = C::kSharedBytes;

  // accum += A[:, k0:k1] B[:, k0:k1]^T. The mainloop takes a K that its tile does not divide at its
  // first tile, hence the negative residue.
  template <class Accumulators>
  CUTLASS_DEVICE static void multiply(Accumulators& accum, Sm80Params const& p,
                                      Sm80Tile const& tile, Element const* a, int64_t a_stride,
                                      int k0, int k1, char* shared) {
    using namespace cute;
    int const tiles = (k1 - k0 + Config::kTileK - 1) / Config::kTileK;
    int const residue = k1 - k0 - tiles * Config::kTileK;
    auto gA = make_tensor(make_gmem_ptr(a + k0),
                          make_shape(Int<Config::kTileM>{}, Int<Config::kTileK>{}, tiles),
                          make_stride(a_stride, _1{}, Int<Config::kTileK>{}));
    Element const* b = static_cast<Element const*>(p.args.b);
    auto const shape_b = make_shape(Int<Config::kTileN>{}, Int<Config::kTileK>{}, tiles);
    int64_t const b_stride = p.args.b_row_stride;
    auto const k_tiles = make_coord_iterator(tiles);
    auto const residues = make_tuple(tile.rows, tile.columns, residue);
    typename C::Mainloop mainloop;
    if constexpr (Config::kBTransposed) {
      auto gB = make_tensor(make_gmem_ptr(b + k0 * b_stride + tile.column), shape_b,
                            make_stride(_1{}, b_stride, Config::kTileK * b_stride));
      mainloop(accum, gA, gB, accum, k_tiles, tiles, residues, int(threadIdx.x), shared);
    } else {
      auto gB = make_tensor(make_gmem_ptr(b + tile.column * b_stride + k0), shape_b,
                            make_stride(b_stride, _1{}, Int<Config::kTileK>{}));
      mainloop(accum, gA, gB, accum, k_tiles, tiles, residues, int(threadIdx.x), shared);
    }
  }

  // Through shared memory, so that each thread stores 16 bytes of a row. Row r goes to place(r).
  template <class Accumulators, class Place>
  CUTLASS_DEVICE static void store(Accumulators const& accum, Sm80Tile const& tile, char* shared,
                                   Place place) {
    using namespace cute;
    auto sC =
        make_tensor(make_smem_ptr(reinterpret_cast<Element*>(shared)), typename C::OutLayout{});
    auto rounded = make_tensor_like<Element>(accum);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(accum); ++i) {
      rounded(i) = Element(accum(i));
    }
    auto const copy_out =
        make_tiled_copy_C(Copy_Atom<UniversalCopy<uint32_t>, Element>{}, typename C::TiledMma{});
    auto const mine = copy_out.get_thread_slice(threadIdx.x);
    copy(copy_out, mine.retile_S(rounded), mine.partition_D(sC));
    __syncthreads();
    constexpr int kWords = Config::kTileN / 8;
    for (int i = threadIdx.x; i < Config::kTileM * kWords; i += kThreads) {
      int const row = i / kWords, column = i % kWords * 8;
      if (row < tile.rows && column < tile.columns) {  // n is a multiple of 8
        uint4 const word = *reinterpret_cast<uint4 const*>(&sC(row, column));
        *reinterpret_cast<uint4*>(place(tile.row + row) + tile.column + column) = word;
      }
    }
    __syncthreads();  // the next tile's loads go where this one's words were
  }

  // Count the tile for each owner of its rows; whoever counts the last of a chunk tells the owner.
  CUTLASS_DEVICE static void signal(Sm80Params const& p, Sm80Tile const& tile, uint32_t epoch) {
    int const slab_rows = int(p.args.rows), span = p.args.span > 1 ? p.args.span : 1;
    int const first = tile.row / slab_rows, last = (tile.row + tile.rows - 1) / slab_rows;
    int const place = first + int(threadIdx.x);
    if (place > last) {
      return;
    }
    fence_device();  // all threads' stores: they are before the barrier that this thread has passed
    int const tile_m = tile.row / Config::kTileM;
    int chunk = 0, tiles = 0;
    if (span > 1) {  // in one chunk
      int const begin = place * slab_rows / Config::kTileM;
      tiles = ((place + 1) * slab_rows - 1) / Config::kTileM - begin + 1;
    } else {
      chunk = tile_m / p.chunk_tiles;
      tiles = min(p.chunk_tiles, p.tiles_m - chunk * p.chunk_tiles);
    }
    signal_tile(p.args.group, tile.slab * span + place, chunk, uint32_t(tiles) * p.tiles_n, epoch,
                p.args.drain != 0);
  }

  CUTLASS_DEVICE static void run(Sm80Params const& p, char* shared) {
    using namespace cute;
    fluxgen_gemm_args const& args = p.args;
    fluxgen_group const& group = args.group;
    int const span = args.span > 1 ? args.span : 1;
    int const slab_rows = int(args.rows) * span, n = int(args.n), k = int(args.k);
    bool knows_epoch = !kAllGather;  // of an ag_gemm: by the first warp, once it needs it
    uint32_t epoch = kAllGather ? 0u : current_epoch(group.peers[group.rank], 1);
    typename C::TiledMma mma;
    for (uint32_t linear = blockIdx.x; linear < p.order.total; linear += gridDim.x) {
      TileCoord const at = tile_at(p.order, linear, 0);
      Sm80Tile tile{at.m * Config::kTileM, 0, at.n * Config::kTileN, 0, at.l};
      tile.rows = min(Config::kTileM, slab_rows - tile.row);
      tile.columns = min(Config::kTileN, n - tile.column);
      auto accum = partition_fragment_C(mma, Shape<Int<Config::kTileM>, Int<Config::kTileN>>{});
      clear(accum);

      bool const own = kAllGather && args.own != nullptr && span == 1 && at.l == group.rank;
      int64_t const a_stride = own ? args.own_row_stride : args.a_row_stride;
      int64_t const first_row = own ? tile.row : int64_t(at.l) * slab_rows + tile.row;
      Element const* a =
          static_cast<Element const*>(own ? args.own : args.a) + first_row * a_stride;
      if constexpr (kAllGather) {
        bool const pieces = !own && p.chunk_k > 0;
        for (int chunk = 0, k0 = 0; k0 < k; ++chunk) {
          int const k1 = pieces ? int(k_chunk_end(p.chunk_k, chunk, k)) : k;
          if (!own) {
            if (threadIdx.x < 32) {
              epoch = knows_epoch ? epoch : gather_epoch(group);
              knows_epoch = true;
              sm80_wait_tile(p, tile, chunk, epoch);
            }
            __syncthreads();
          }
          multiply(accum, p, tile, a, a_stride, k0, k1, shared);
          k0 = k1;
        }
        Element* d = static_cast<Element*>(args.d) + int64_t(at.l) * slab_rows * args.d_row_stride;
        store(accum, tile, shared, [&](int row) { return d + row * args.d_row_stride; });
      } else {
        multiply(accum, p, tile, a, a_stride, 0, k, shared);
        int64_t const slab_bytes = args.rows * n * int64_t(sizeof(Element));
        store(accum, tile, shared, [&](int row) {
          int const place = span > 1 ? row / int(args.rows) : 0;
          char* const slab =
              partial_slab(group, at.l * span + place, epoch, slab_bytes, args.drain != 0);
          return reinterpret_cast<Element*>(slab) + int64_t(row - place * int(args.rows)) * n;
        });
        signal(p, tile, epoch);
      }
    }
    if (kAllGather && args.ends_call != 0 && threadIdx.x == 0) {
      end_gather(group, knows_epoch ? epoch : gather_epoch(group), gridDim.x);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Sm80Gemm<Config>::kThreads, 1)
    sm80_kernel(__grid_constant__ Sm80Params const params) {
  extern __shared__ __align__(128) char shared[];
  Sm80Gemm<Config>::run(params, shared);
}

// What its launches depend on: the blocks that are resident on one SM.
template <class Config>
DeviceFacts const& sm80_device(int device) {
  using Gemm = Sm80Gemm<Config>;
  return device_facts<&sm80_kernel<Config>, Gemm::kSharedBytes>(device, [](DeviceFacts& found) {
    cudaError_t const error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &found.resident, sm80_kernel<Config>, Gemm::kThreads, Gemm::kSharedBytes);
    return error == cudaSuccess && found.resident < 1 ? cudaErrorInvalidConfiguration : error;
  });
}

template <class Config>
int check(fluxgen_gemm_args const& args, char* message, int64_t size) {
  if (int const status = check_gemm(args, facts_of<Config>(), message, size)) {
    return status;
  }
  if (Config::kOp == FLUXGEN_GEMM_RS && args.span > 1 && args.chunk_size) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT, "span=%lld: gemm_rs then has one chunk",
                args.span);
  }
  return FLUXGEN_OK;
}

template <class Config>
struct GemmParameter {
  using Type = Sm80Params;
};

template <class Config>
int prepare(fluxgen_gemm_args const& args, GemmLaunch* launch,
            typename GemmParameter<Config>::Type* parameter, char* message, int64_t size) {
  if (int const status = check<Config>(args, message, size)) {
    return status;
  }
  int device = 0;
  if (cudaError_t const error = cudaGetDevice(&device)) {
    return cuda_fail(message, size, "cudaGetDevice", error);
  }
  DeviceFacts const& facts = sm80_device<Config>(device);
  if (int const status = device_status(
          facts, device, "this library's code: expected an Ampere GPU or newer", message, size)) {
    return status;
  }
  Sm80Params& p = *parameter;
  if (!order_of(args, facts_of<Config>(), Config::kTileN, 1, &p.order)) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "groups: expected positive counts that sum to world=%lld", args.group.world);
  }
  int const span = args.span > 1 ? args.span : 1;
  bool const along_k = args.chunk_axis == FLUXGEN_CHUNK_K;
  p.args = args;
  p.tiles_m = int32_t((args.rows * span + Config::kTileM - 1) / Config::kTileM);
  p.tiles_n = int32_t((args.n + Config::kTileN - 1) / Config::kTileN);
  p.chunk_rows = int32_t(along_k || args.chunk_size == 0 ? args.rows : args.chunk_size);
  p.chunk_k = int32_t(along_k ? args.chunk_size : 0);
  p.chunk_tiles = int32_t(args.chunk_size ? args.chunk_size / Config::kTileM : p.tiles_m);
  p.cut = args.cut > 0 ? args.cut : args.group.world;
  int const sms = args.sms > 0 && args.sms < facts.sms ? args.sms : facts.sms;
  int64_t const blocks = int64_t(sms) * facts.resident;
  *launch = {reinterpret_cast<void const*>(&sm80_kernel<Config>),
             dim3(unsigned(blocks < int64_t(p.order.total) ? blocks : p.order.total)),
             dim3(Sm80Gemm<Config>::kThreads),
             Sm80Gemm<Config>::kSharedBytes,
             0,
             0,
             false};
  return FLUXGEN_OK;
}

template <class Config>
int describe(fluxgen_kernel_info* info) {
  if (!describe_common<Config>(info, cute::is_same_v<typename Config::Element, cutlass::half_t>)) {
    return FLUXGEN_BAD_ABI;
  }
  info->warps = Config::kWarpsM * Config::kWarpsN;
  info->stages = Config::kStages;
  info->smem_bytes = Sm80Gemm<Config>::kSharedBytes;
  return FLUXGEN_OK;
}

}  // namespace fluxgen
#endif  // FLUXGEN_FAMILIES_SM80_CUH_
