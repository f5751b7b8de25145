// The C ABI of a compiled fused GEMM: plain C, loaded with ctypes, no Torch headers. The support library's
// calls build on it (calls.h) and have a version of their own.
//
// Sizes and strides are 64-bit and count elements unless a name says bytes. Every call returns a
// status code and, when it is not FLUXGEN_OK, writes one line of text for the caller to show.
#ifndef FLUXGEN_ABI_H_
#define FLUXGEN_ABI_H_

#include <stdint.h>

#define FLUXGEN_ABI_VERSION 10
#define FLUXGEN_MAX_WORLD 16
#define FLUXGEN_MAX_CHUNKS 16
#define FLUXGEN_OPERANDS 8

#ifdef __cplusplus
extern "C" {
#endif

enum fluxgen_status {
  FLUXGEN_OK = 0,
  FLUXGEN_BAD_ABI = 1,       // struct of another version or size
  FLUXGEN_BAD_ARGUMENT = 2,  // a size, stride or pointer this kernel cannot take
  FLUXGEN_CUDA_ERROR = 3,    // a CUDA call failed; the text names it
  FLUXGEN_WRONG_DEVICE = 4   // the current device cannot run this library's code
};

enum fluxgen_op { FLUXGEN_AG_GEMM = 0, FLUXGEN_GEMM_RS = 1 };
// What else may wait for a flag: numbers behind those of the ops.
enum fluxgen_waiter { FLUXGEN_REDUCTION = 2, FLUXGEN_TRANSPORT = 3, FLUXGEN_COLLECTION = 4 };
enum fluxgen_dtype { FLUXGEN_BF16 = 0, FLUXGEN_FP16 = 1 };
// Of a gemm_rs: each row to its owner, or all to all ranks; announced by flags, or in packets of 32 bits of
// data and their epoch, which nothing announces. All but the first of flat kernels only.
enum fluxgen_sends {
  FLUXGEN_TO_OWNERS = 0,
  FLUXGEN_TO_ALL = 1,
  FLUXGEN_PACKETS_TO_OWNERS = 2,
  FLUXGEN_PACKETS_TO_ALL = 3
};
enum fluxgen_chunk_axis { FLUXGEN_CHUNK_M = 0, FLUXGEN_CHUNK_K = 1 };

// Where an epilogue finds what it adds or fills, beside A, B and D: places in an array, of which those of
// the kinds that are not named yet are free.
enum fluxgen_operand_kind {
  FLUXGEN_BIAS = 0,     // (n), added to each row
  FLUXGEN_RESIDUAL = 1  // as D, added last
};
typedef struct fluxgen_operand {
  void* data;          // null: none
  int64_t row_stride;  // elements; of a vector 0
  int32_t dtype;       // enum fluxgen_dtype
  float value;         // of a kind that is a number
} fluxgen_operand;

// What a wait that passed its deadline leaves in host-mapped memory, of this rank or, by way of the
// group's mark, of another. `code` is written last.
typedef struct fluxgen_report {
  uint32_t code;  // 0: none; 1: this rank's wait timed out; 2: `peer` has given up
  uint32_t op;    // enum fluxgen_op or fluxgen_waiter
  uint32_t rank;
  uint32_t peer;
  uint32_t chunk;
  uint32_t expected;
  uint32_t seen;
  uint32_t reserved;
} fluxgen_report;

// One rank's view of its group: who it is, where everybody's workspace lies, how long to wait.
typedef struct fluxgen_group {
  int32_t world;                   // 1..FLUXGEN_MAX_WORLD
  int32_t rank;                    // 0..world-1
  int64_t stage_bytes;             // bytes of a workspace's stage: one slab of ag_gemm
  int64_t half_bytes;              // bytes of one of the two halves of its inbox (gemm_rs)
  int64_t gathered_bytes;          // bytes of its matrix that peers push into (ag_gemm)
  int64_t drained_bytes;           // bytes of its outbox, and of the inbox that copies drain into
  int64_t result_bytes;            // bytes of the result of an all-reduce, which its peers fill
  int64_t packet_bytes;            // bytes of one of the two halves that take packets
  void* peers[FLUXGEN_MAX_WORLD];  // workspace bases, this rank's own included
  uint64_t timeout_ns;             // deadline of each device-side wait
  fluxgen_report* report;          // host-mapped, or device memory; may be null
} fluxgen_group;

// One fused GEMM. ag_gemm: A is the gathered (m, k) that a transport is filling, D is (m, n); it may
// run beside the kernel that begins the call: tiles of the own slab wait for nothing.
// gemm_rs: A is the caller's (m, k), tiles of D go to the owners' inboxes, or, with `drain`, to this
// rank's outbox, where copies take them.
typedef struct fluxgen_gemm_args {
  uint32_t abi_version;  // FLUXGEN_ABI_VERSION
  uint32_t struct_size;  // sizeof(fluxgen_gemm_args)
  fluxgen_group group;
  int64_t rows;  // m / world
  int64_t n;
  int64_t k;
  const void* a;  // (m, k)
  int64_t a_row_stride;
  const void* b;  // (n, k), or (k, n) where the kernel was compiled for it, row-major
  int64_t b_row_stride;
  void* d;  // ag_gemm only
  int64_t d_row_stride;
  int32_t chunk_axis;   // enum fluxgen_chunk_axis
  int32_t group_count;  // arrival groups; 0: all ranks in one
  int32_t groups[FLUXGEN_MAX_WORLD];
  int32_t panel;       // clusters along n in one panel; 0: all
  int64_t chunk_size;  // rows (M) of a chunk; elements of K of the first; 0: the whole slab
  int32_t sms;         // SMs to use; 0: all
  int32_t span;        // adjacent ranks whose slabs are tiled as one; 0: 1
  const void* own;     // ag_gemm: this rank's slab (rows, k), read where it is; null: out of a
  int64_t own_row_stride;
  int32_t ends_call;  // ag_gemm: 1 for the last GEMM of a call
  int32_t cut;        // K chunks: so many slabs, from this rank's on, come in chunks; 0: all
  int32_t drain;      // gemm_rs: 1: copies send what it computes
  int32_t split;      // flat kernels: parts that K is computed in, 1, 2, 4 or 8; 0: 1
  int32_t sends;      // enum fluxgen_sends; to all, `rows` are all m rows
  uint32_t reserved;
  fluxgen_operand operands[FLUXGEN_OPERANDS];  // that the epilogue compiled in takes
} fluxgen_gemm_args;

// What a library holds, for the loader to compare with the manifest.
typedef struct fluxgen_kernel_info {
  uint32_t abi_version;
  uint32_t struct_size;  // in: sizeof(fluxgen_kernel_info) of the caller
  int32_t op;            // enum fluxgen_op
  int32_t dtype;         // enum fluxgen_dtype, of A and B
  int32_t out_dtype;     // of D
  uint32_t epilogue;     // 1 << kind for each operand that it takes
  int32_t tile_m, tile_n, tile_k;
  int32_t cluster_m, cluster_n;
  int32_t cooperative;  // 0: ping-pong, and on sm80
  int32_t stages;
  int32_t smem_bytes;    // dynamic shared memory of one block
  int32_t b_transposed;  // 1: B is (k, n)
  int32_t warps;         // sm80: of the MMA; else 0
  int32_t flat;          // 1: tiles span the rows of all ranks
} fluxgen_kernel_info;

#ifdef __cplusplus
}
#endif
#endif  // FLUXGEN_ABI_H_
