// Functions that are compiled for the device and, for tests, for the host alone.
#ifndef FLUXGEN_HOST_DEVICE_H_
#define FLUXGEN_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define FLUXGEN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLUXGEN_HOST_DEVICE inline
#endif

#endif  // FLUXGEN_HOST_DEVICE_H_
