// Loads, stores and fences that ranks and blocks synchronise with: PTX on the device, the compiler's
// atomics on the host, where tests run ranks as threads.
#ifndef FLUXGEN_PROTOCOL_MEMORY_CUH_
#define FLUXGEN_PROTOCOL_MEMORY_CUH_

#include <stdint.h>

#include "fluxgen/host_device.h"

namespace fluxgen {

#if defined(__CUDA_ARCH__)

__device__ __forceinline__ uint32_t load_acquire_system(uint32_t const* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_release_system(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t add_acquire_release(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}
// Store `value` where there is zero; what was there before.
__device__ __forceinline__ uint32_t claim(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.cas.acq_rel.sys.global.b32 %0, [%1], 0, %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}
__device__ __forceinline__ uint32_t load_relaxed(uint32_t const* address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_relaxed_system(uint32_t const* address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed_system(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Two packets, 16-byte aligned: one access, of which each packet is whole (PTX: a vector is accessed as
// its elements, in any order).
__device__ __forceinline__ void load_packets(uint64_t const* address, uint64_t (&two)[2]) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(two[0]), "=l"(two[1])
               : "l"(address)
               : "memory");
}
__device__ __forceinline__ void store_packets(uint64_t* address, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(address), "l"(first),
               "l"(second)
               : "memory");
}
__device__ __forceinline__ uint32_t add_relaxed(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ uint64_t clock_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ void pause() { __nanosleep(64); }

#else  // host: the compiler's atomics; the tests run ranks as threads

inline uint32_t load_acquire_system(uint32_t const* address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline void store_release_system(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
inline uint32_t add_acquire_release(uint32_t* address, uint32_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
inline uint32_t claim(uint32_t* address, uint32_t value) {
  uint32_t old = 0;
  __atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return old;
}
inline uint32_t load_relaxed(uint32_t const* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}
inline void store_relaxed(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
}
inline uint32_t load_relaxed_system(uint32_t const* address) { return load_relaxed(address); }
inline void store_relaxed_system(uint32_t* address, uint32_t value) {
  store_relaxed(address, value);
}
inline void load_packets(uint64_t const* address, uint64_t (&two)[2]) {
  two[0] = __atomic_load_n(address, __ATOMIC_RELAXED);
  two[1] = __atomic_load_n(address + 1, __ATOMIC_RELAXED);
}
inline void store_packets(uint64_t* address, uint64_t first, uint64_t second) {
  __atomic_store_n(address + 1, second, __ATOMIC_RELAXED);
  __atomic_store_n(address, first, __ATOMIC_RELAXED);
}
inline uint32_t add_relaxed(uint32_t* address, uint32_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline void fence_device() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
inline void fence_system() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
uint64_t clock_ns();  // the test supplies them
void pause();

#endif

}  // namespace fluxgen
#endif  // FLUXGEN_PROTOCOL_MEMORY_CUH_
