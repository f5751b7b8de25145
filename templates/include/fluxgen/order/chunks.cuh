// How a slab is cut into chunks of K.
#ifndef FLUXGEN_ORDER_CHUNKS_CUH_
#define FLUXGEN_ORDER_CHUNKS_CUH_

#include <stdint.h>

#include "fluxgen/abi.h"
#include "fluxgen/host_device.h"

namespace fluxgen {

// A chunk of K: the first is `unit` long, each further one as long as all before it. Short chunks
// let the first tiles start, few of them keep the copies large.
FLUXGEN_HOST_DEVICE int64_t k_chunk_begin(int64_t unit, int32_t chunk) {
  return chunk == 0 ? 0 : unit << (chunk - 1);
}
FLUXGEN_HOST_DEVICE int64_t k_chunk_end(int64_t unit, int32_t chunk, int64_t extent) {
  int64_t const end = unit << chunk;
  return end < extent ? end : extent;
}
FLUXGEN_HOST_DEVICE int32_t k_chunk_count(int64_t unit, int64_t extent) {
  int32_t count = 1;
  while (count <= FLUXGEN_MAX_CHUNKS && unit << (count - 1) < extent) {
    ++count;
  }
  return count;
}

}  // namespace fluxgen
#endif  // FLUXGEN_ORDER_CHUNKS_CUH_
