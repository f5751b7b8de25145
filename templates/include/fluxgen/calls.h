// The support library's calls: its own kernels, the copies, and whole ops, through the GEMMs of other
// libraries. Apart from abi.h, since compiled GEMMs do not depend on it: a change here has another version,
// and compiles no GEMM again. A change of what is in abi.h changes both.
#ifndef FLUXGEN_CALLS_H_
#define FLUXGEN_CALLS_H_

#include "fluxgen/abi.h"

#define FLUXGEN_CALLS_VERSION 10

#ifdef __cplusplus
extern "C" {
#endif

// What copy engines move: peers' slabs out of their stages, x into the peers' matrices, the finished
// partial slabs of a gemm_rs into their owners' inboxes, or x and then every slab that comes to the
// matrix of the rank before, round the ring.
enum fluxgen_copies { FLUXGEN_PULL = 0, FLUXGEN_PUSH = 1, FLUXGEN_DRAIN = 2, FLUXGEN_RING = 3 };

// What else becomes of an inbox than the rows of a gemm_rs. An all-reduce: each rank reduces its rows and
// sends them to all, or it has all ranks' parts of all. A gemm_a2a: what came is D.
enum fluxgen_shares { FLUXGEN_TWO_SHOTS = 1, FLUXGEN_ONE_SHOT = 2, FLUXGEN_EXCHANGE = 3 };

// The reduction of gemm_rs: D (rows, n) = scale * (sum over sources, in rank order, of this rank's
// inbox) + bias. With `shares` every rank gets the rows of all: D is (world * rows, n), contiguous, and
// the residual is added last. In one shot `rows` are all rows, and D is (rows, n). Exchanged, the slabs
// of the inbox are D, one behind the other, as they are.
typedef struct fluxgen_reduce_args {
  uint32_t abi_version;  // FLUXGEN_CALLS_VERSION
  uint32_t struct_size;  // sizeof(fluxgen_reduce_args)
  fluxgen_group group;
  int64_t rows;
  int64_t n;
  int64_t chunk_rows;  // rows of one chunk, as in the GEMM; 0: the whole slab
  void* d;
  int64_t d_row_stride;
  fluxgen_operand operands[FLUXGEN_OPERANDS];  // bias; with shares a residual. 16-byte aligned
  float scale;
  int32_t dtype;   // enum fluxgen_dtype
  int32_t blocks;  // thread blocks; 0: as many as fit well
  int32_t drain;   // as in the GEMM
  int32_t shares;  // enum fluxgen_shares; 0: a gemm_rs
  int32_t packed;  // 1: it comes in packets, not to the inbox; not with two shots or exchanged
} fluxgen_reduce_args;

// The start of ag_gemm: copy the caller's slab into the stage and, with `keep`, to its place in the
// gathered matrix, then tell every peer. With `pull`, the same kernel also copies the peers' slabs.
// With `push` nothing is staged: peers are told that the gathered matrix is theirs to fill.
typedef struct fluxgen_begin_args {
  uint32_t abi_version;  // FLUXGEN_CALLS_VERSION
  uint32_t struct_size;  // sizeof(fluxgen_begin_args)
  fluxgen_group group;
  const void* x;  // (rows, row_bytes), 16-byte aligned rows
  int64_t rows;
  int64_t row_bytes;  // a multiple of 16
  int64_t row_stride_bytes;
  void* gathered;  // (world * rows, row_bytes), contiguous, 16-byte aligned
  int32_t blocks;  // thread blocks; 0: as many as fit well. With `pull` all must be resident
  int32_t pull;    // 1: the SM-copy transport
  int32_t keep;    // 1: the gathered matrix needs the own slab: the GEMM or the caller reads it
  int32_t push;    // 1: the copies go out of x, pushed or round the ring
} fluxgen_begin_args;

// The copy-engine transports, chunk by chunk. ag_gemm: pull every peer's slab out of its stage, or
// push x into every peer's gathered matrix, which then is the one in its workspace, or forward x and
// what has come into it to the rank before. gemm_rs: drain the outbox, each chunk once its tiles are
// there.
typedef struct fluxgen_copy_args {
  uint32_t abi_version;  // FLUXGEN_CALLS_VERSION
  uint32_t struct_size;  // sizeof(fluxgen_copy_args)
  fluxgen_group group;
  void* gathered;  // pull: as in fluxgen_begin_args
  const void* x;   // push and ring: as in fluxgen_begin_args
  int64_t row_stride_bytes;
  int64_t x_step_bytes;  // push: from one peer's part of x to the next one's; 0: all get the same
  int64_t rows;
  int64_t row_bytes;   // drain: of D
  int64_t chunk_size;  // rows (M) of a chunk; bytes of a row (K) of the first; 0: the whole slab
  int32_t chunk_axis;  // enum fluxgen_chunk_axis
  int32_t cut;         // as in fluxgen_gemm_args
  int32_t kind;        // enum fluxgen_copies
  uint32_t reserved;
} fluxgen_copy_args;

// A fused GEMM of one library as another library launches it, or updates its node in a graph.
typedef int (*fluxgen_gemm_launcher)(fluxgen_gemm_args const* args, void* stream, char* message,
                                     int64_t size);
typedef int (*fluxgen_gemm_updater)(fluxgen_gemm_args const* args, void* graph, void* node,
                                    char* message, int64_t size);
typedef struct fluxgen_gemm_call {
  fluxgen_gemm_launcher launch;
  fluxgen_gemm_updater update;
  fluxgen_gemm_args const* args;
} fluxgen_gemm_call;

// A whole ag_gemm in one call: begin, the transport, a GEMM for each weight, the join.
//
//   stream  -----> begin ==> GEMM, GEMM, ... ------>
//   awaits    `-*-------*--> wait, wait, ... -----'     pulls from the first *, pushes from the second
//   copies                    `-> copy, copy, ... '
//   flags                          `-> flag, ... -'
//
// The first GEMM starts once all blocks of `begin` have (a programmatic launch), or, where they pull, as they end.
// All of them wait for each other's flags and words only.
typedef struct fluxgen_gather_call {
  uint32_t abi_version;  // FLUXGEN_CALLS_VERSION
  uint32_t struct_size;  // sizeof(fluxgen_gather_call)
  fluxgen_begin_args const* begin;
  fluxgen_copy_args const* copy;  // null: begin pulls by itself, or nobody copies
  fluxgen_gemm_call const* gemms;
  int64_t count;
  void* awaits;  // the stream of the copies' waits
  void* copies;  // that of the copies
  void* flags;   // and that of their flags
  void* event;   // that orders streams
  void* graphs;  // of fluxgen_graphs, for this call alone; null: launch by launch
} fluxgen_gather_call;

// A whole gemm_rs in one call: the GEMM, the reduction, and, where it is drained, its copies. Where the
// reduction shares, the kernel that collects the peers' rows comes behind it.
//
//   stream  -----> GEMM =================> reduce -->
//   awaits    `-> wait, wait, ...
//   copies          `-> copy, copy, ... ---------'
//   flags                 `-> flag, flag, ... ---'
typedef struct fluxgen_scatter_call {
  uint32_t abi_version;  // FLUXGEN_CALLS_VERSION
  uint32_t struct_size;  // sizeof(fluxgen_scatter_call)
  fluxgen_gemm_call gemm;
  fluxgen_reduce_args const* reduce;
  fluxgen_copy_args const* copy;  // null: the GEMM stores into the owners' inboxes
  void* awaits;                   // as above
  void* copies;
  void* flags;
  void* event;
  void* graphs;  // as above
} fluxgen_scatter_call;

#ifdef __cplusplus
}
#endif
#endif  // FLUXGEN_CALLS_H_
