// Whole calls in one: what the support library launches for the runtime, through the GEMMs of other
// libraries. Apart from abi.h, since compiled GEMMs do not depend on it.
#ifndef FLUXGEN_CALLS_H_
#define FLUXGEN_CALLS_H_

#include "fluxgen/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

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
//   copies    `-*-------*--> copy, copy, ... -----'     pulls from the first *, pushes from the second
//   flags                      `-----`---> flags -'
//
// The first GEMM starts once all blocks of `begin` have (a programmatic launch), or, where `begin`
// pulls, as they end. All three wait for each other's flags and words only.
typedef struct fluxgen_gather_call {
  uint32_t abi_version;
  uint32_t struct_size;         // sizeof(fluxgen_gather_call)
  fluxgen_begin_args const* begin;
  fluxgen_copy_args const* copy;     // null: begin pulls by itself, or nobody copies
  fluxgen_gemm_call const* gemms;
  int64_t count;
  void* copies;                 // the copies' stream
  void* flags;                  // and that of their flags
  void* event;                  // that orders streams
  void* graphs;                 // of fluxgen_graphs, for this call alone; null: launch by launch
} fluxgen_gather_call;

// A whole gemm_rs in one call: the GEMM, the reduction, and, where it is drained, its copies.
//
//   stream  -----> GEMM =================> reduce -->
//   awaits    `-> wait, wait, ...
//   copies          `-> copy, copy, ... ---------'
//   flags                 `-> flag, flag, ... ---'
typedef struct fluxgen_scatter_call {
  uint32_t abi_version;
  uint32_t struct_size;         // sizeof(fluxgen_scatter_call)
  fluxgen_gemm_call gemm;
  fluxgen_reduce_args const* reduce;
  fluxgen_copy_args const* copy;  // null: the GEMM stores into the owners' inboxes
  void* awaits;                 // the stream of the copies' waits
  void* copies;                 // and as above
  void* flags;
  void* event;
  void* graphs;                 // as above
} fluxgen_scatter_call;

#ifdef __cplusplus
}
#endif
#endif  // FLUXGEN_CALLS_H_
