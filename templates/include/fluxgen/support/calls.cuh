// Whole calls, queued launch by launch, or captured into a graph.
#ifndef FLUXGEN_SUPPORT_CALLS_CUH_
#define FLUXGEN_SUPPORT_CALLS_CUH_

#include <memory>
#include <vector>

#include "fluxgen/calls.h"
#include "fluxgen/support/copies.cuh"

namespace fluxgen {

// The CUDA graph of one kind of call, captured once, and its nodes that have arguments.
struct CallGraph {
  cudaGraph_t graph = nullptr;
  cudaGraphNode_t begin = nullptr;  // or null
  cudaGraphNode_t reduce = nullptr;
  cudaGraphNode_t collect = nullptr;
  std::vector<cudaGraphNode_t> gemms;
  std::vector<cudaGraphNode_t> copies;  // of the transport, in its order
  bool fixed_copies = false;            // they have several pieces each

  CallGraph() = default;
  CallGraph(CallGraph const&) = delete;
  ~CallGraph() {
    if (graph != nullptr) {
      cudaGraphDestroy(graph);
    }
  }
};

// The node of what was last queued on a capturing stream.
inline cudaError_t last_node(cudaStream_t stream, cudaGraphNode_t* node) {
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  cudaGraphNode_t const* nodes = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  cudaError_t const error =
      cudaStreamGetCaptureInfo(stream, &capturing, nullptr, nullptr, &nodes, nullptr, &count);
#else
  cudaError_t const error =
      cudaStreamGetCaptureInfo_v2(stream, &capturing, nullptr, nullptr, &nodes, &count);
#endif
  if (error == cudaSuccess && (capturing != cudaStreamCaptureStatusActive || count != 1)) {
    return cudaErrorStreamCaptureInvalidated;
  }
  *node = error == cudaSuccess ? nodes[0] : nullptr;
  return error;
}

// Queue the kernel of `args`; where `node` is given, the stream is capturing.
template <class Args>
int queue_kernel(Args const& args, cudaStream_t stream, bool early, cudaGraphNode_t* node,
                 char* message, int64_t size) {
  int const status = launch(args, stream, early, message, size);
  return status != FLUXGEN_OK || node == nullptr
             ? status
             : cuda_status(last_node(stream, node), "capture", message, size);
}

inline int queue_gemm(fluxgen_gemm_call const& gemm, cudaStream_t stream, CallGraph* into,
                      char* message, int64_t size) {
  int const status = gemm.launch(gemm.args, stream, message, size);
  if (status != FLUXGEN_OK || into == nullptr) {
    return status;
  }
  into->gemms.push_back(nullptr);
  return cuda_status(last_node(stream, &into->gemms.back()), "capture", message, size);
}

// Queue the copies of a call; where `into` is given, that is a capture.
inline int queue_copies(fluxgen_copy_args const& args, int chunks, CopyStreams const& streams,
                        CallGraph* into, char* message, int64_t size) {
  auto const note = [&] {
    if (into == nullptr) {
      return cudaSuccess;
    }
    into->copies.push_back(nullptr);
    return last_node(streams.copies, &into->copies.back());
  };
  int const status =
      cuda_status(queue_copies(args, chunks, streams, note), "copies", message, size);
  for (int i = 0; into != nullptr && i < int(into->copies.size()); ++i) {
    into->fixed_copies = into->fixed_copies || slab_copy(args, chunks, i).rows != 1;
  }
  return status;
}

// Order `stream` behind the side streams that were used, the others being null. `status`: of what was
// queued so far, and is kept if bad.
inline int join(CopyStreams const& streams, cudaStream_t stream, int status, char* message,
                int64_t size) {
  for (cudaStream_t side : {streams.awaits, streams.copies, streams.flags}) {
    if (side != nullptr) {
      int const joined =
          order(side, stream, streams.event, status == FLUXGEN_OK ? message : nullptr, size);
      status = status == FLUXGEN_OK ? joined : status;
    }
  }
  return status;
}

// Queue a reduction, and what collects the peers' rows where they share. `early`: as in `launch`.
inline int queue_reduction(fluxgen_reduce_args const& args, cudaStream_t stream, bool early,
                           CallGraph* into, char* message, int64_t size) {
  int const status =
      queue_kernel(args, stream, early, into != nullptr ? &into->reduce : nullptr, message, size);
  return status == FLUXGEN_OK && collects(args)
             ? queue_kernel(CollectArguments{args}, stream, false,
                            into != nullptr ? &into->collect : nullptr, message, size)
             : status;
}

// Queue a call launch by launch; where `into` is given, that is a capture.
inline int queue(fluxgen_gather_call const& call, cudaStream_t stream, CopyStreams const& streams,
                 CallGraph* into, char* message, int64_t size) {
  int chunks = 0;
  if (call.copy != nullptr) {  // before a peer is told anything
    if (int const status = check_copies(*call.copy, &chunks, message, size)) {
      return status;
    }
  }
  auto const fork = [&] { return order(stream, streams.awaits, streams.event, message, size); };
  // Alone there is nothing to copy, and a stream that was not forked cannot be joined in a capture.
  bool const copies = call.copy != nullptr && count_copies(*call.copy, chunks) > 0;
  bool const pulls = copies && call.copy->kind == FLUXGEN_PULL;
  bool const pushes = copies && call.copy->kind != FLUXGEN_PULL;
  int status = pulls ? fork() : FLUXGEN_OK;
  bool began = false;
  if (status == FLUXGEN_OK) {
    status = queue_kernel(*call.begin, stream, false, into != nullptr ? &into->begin : nullptr,
                          message, size);
    began = status == FLUXGEN_OK;
  }
  if (began && pushes) {
    status = fork();
  }
  bool const forked = pulls || (began && pushes);
  if (began && forked && status == FLUXGEN_OK) {
    status = queue_copies(*call.copy, chunks, streams, into, message, size);
  }
  for (int64_t i = 0; i < call.count && status == FLUXGEN_OK; ++i) {
    status = queue_gemm(call.gemms[i], stream, into, message, size);
  }
  bool const failed = status != FLUXGEN_OK;
  if (forked) {  // also after an error: the copies write into what the caller frees next
    status = join(streams, stream, status, message, size);
  }
  if (began && (failed || call.count == 0)) {
    settle_kernel<<<1, 1, 0, stream>>>(call.begin->group);
  }
  return status;
}

inline int queue(fluxgen_scatter_call const& call, cudaStream_t stream, CopyStreams const& streams,
                 CallGraph* into, char* message, int64_t size) {
  // Before the GEMM raises a flag: a call that ends without its reduction leaves the epoch as it is.
  SupportLaunch unused;
  if (int const status = prepare(*call.reduce, &unused, message, size)) {
    return status;
  }
  int chunks = 0;
  if (call.copy != nullptr) {
    if (int const status = check_copies(*call.copy, &chunks, message, size)) {
      return status;
    }
  }
  bool const copies = call.copy != nullptr && count_copies(*call.copy, chunks) > 0;
  int status = copies ? order(stream, streams.awaits, streams.event, message, size) : FLUXGEN_OK;
  bool const forked = copies && status == FLUXGEN_OK;
  if (status == FLUXGEN_OK) {
    status = queue_gemm(call.gemm, stream, into, message, size);
  }
  if (status == FLUXGEN_OK && forked) {
    status = queue_copies(*call.copy, chunks, streams, into, message, size);
  }
  if (status == FLUXGEN_OK) {
    status = queue_reduction(*call.reduce, stream, true, into, message, size);
  }
  return forked ? join(streams, stream, status, message, size) : status;
}

template <class Call>
CopyStreams streams_of(Call const& call) {
  return {static_cast<cudaStream_t>(call.awaits), static_cast<cudaStream_t>(call.copies),
          static_cast<cudaStream_t>(call.flags), static_cast<cudaEvent_t>(call.event)};
}

}  // namespace fluxgen
#endif  // FLUXGEN_SUPPORT_CALLS_CUH_
