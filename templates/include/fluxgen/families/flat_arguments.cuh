// What every flat GEMM checks of its arguments, beside what all GEMMs do.
#ifndef FLUXGEN_FAMILIES_FLAT_ARGUMENTS_CUH_
#define FLUXGEN_FAMILIES_FLAT_ARGUMENTS_CUH_

#include "fluxgen/order/flat_tiles.cuh"
#include "fluxgen/families/arguments.cuh"

namespace fluxgen {

inline int check_flat(fluxgen_gemm_args const& args, GemmFacts const& facts, char* message,
                      int64_t size) {
  if (int const status = check_gemm(args, facts, message, size)) {
    return status;
  }
  if (args.chunk_size != 0 || args.drain != 0) {
    return fail(
        message, size, FLUXGEN_BAD_ARGUMENT,
        "chunk_size=%lld, drain=%lld: a flat kernel has whole slabs, and stores to their owners",
        args.chunk_size, args.drain);
  }
  if (!sends_to_all(args) && args.group.world > 1 && args.span != args.group.world) {
    return fail(message, size, FLUXGEN_BAD_ARGUMENT,
                "span=%lld: a flat kernel tiles all %lld slabs as one", args.span,
                args.group.world);
  }
  return FLUXGEN_OK;
}

}  // namespace fluxgen
#endif  // FLUXGEN_FAMILIES_FLAT_ARGUMENTS_CUH_
