// The copies of a transport: which there are, how they are queued, and updated in a graph.
#ifndef FLUXGEN_SUPPORT_COPIES_CUH_
#define FLUXGEN_SUPPORT_COPIES_CUH_

#include "fluxgen/order/chunks.cuh"
#include "fluxgen/support/launch.cuh"

namespace fluxgen {

// What the copies need to be right, checked before anything is queued.
inline int check_copies(fluxgen_copy_args const& args, int* chunks, char* message, int64_t size) {
  if (int const status = check_common(args, message, size)) {
    return status;
  }
  if (args.rows < 1 || args.row_bytes < 16 || args.row_bytes % 16 || args.chunk_size < 0 ||
      args.cut < 0 || args.cut > args.group.world) {
    return refuse(message, size,
                  "expected rows of a positive multiple of 16 bytes, and at most world slabs cut");
  }
  bool const drains = args.kind == FLUXGEN_DRAIN;
  bool const pushes = args.kind == FLUXGEN_PUSH || args.kind == FLUXGEN_RING;
  if (args.kind < FLUXGEN_PULL || args.kind > FLUXGEN_RING) {
    return refuse(message, size, "kind: expected one of enum fluxgen_copies");
  }
  void const* const given = pushes ? args.x : args.gathered;
  if (!drains &&
      (given == nullptr || reinterpret_cast<uintptr_t>(given) % 16 ||
       (pushes && (args.row_stride_bytes % 16 || args.row_stride_bytes < args.row_bytes)))) {
    return refuse(message, size,
                  pushes ? "x: expected rows at 16-byte aligned addresses"
                         : "gathered: expected a 16-byte aligned address");
  }
  bool const along_k = args.chunk_axis == FLUXGEN_CHUNK_K;
  if (args.x_step_bytes != 0 &&
      (args.kind != FLUXGEN_PUSH || args.x_step_bytes < 0 || args.x_step_bytes % 16)) {
    return refuse(message, size, "x_step_bytes: expected 0, or of pushes a multiple of 16");
  }
  if (drains && along_k) {
    return refuse(message, size, "chunk_axis: a gemm_rs is drained in chunks of rows");
  }
  int64_t const extent = along_k ? args.row_bytes : args.rows;
  int64_t const piece = args.chunk_size > 0 ? args.chunk_size : extent;
  *chunks = along_k ? k_chunk_count(piece, extent) : int((extent + piece - 1) / piece);
  if (*chunks > FLUXGEN_MAX_CHUNKS ||
      !slabs_fit(args.group, args.rows * args.row_bytes, args.kind)) {
    return refuse(message, size, "expected at most 16 chunks of slabs that fit the workspace");
  }
  return FLUXGEN_OK;
}

// One copy of the transport: `rows` pieces of `width` bytes, so far apart.
struct SlabCopy {
  int peer;  // where it comes from, or goes to; round the ring whose slab it is
  int chunk;
  bool last;          // of this peer's, or of all that are drained
  uint32_t awaited;   // peers to be ready before it
  int awaited_chunk;  // of a gemm_rs or round the ring: which has to be here before it
  char* to;
  char const* from;
  size_t width;
  size_t rows;
  size_t to_pitch;
  size_t from_pitch;
};

// Slabs in the order that GEMMs walk them: pulled from the next rank first, drained to the next rank
// first, pushed to the one before first, as its next; round the ring the own one first, which is the
// next of the rank before. Of the first `cut` slabs chunks of K come piece by piece, the later slabs whole;
// chunks of rows come slab by slab.
inline int cut_peers(fluxgen_copy_args const& args, int chunks) {
  bool const cuts = args.chunk_axis == FLUXGEN_CHUNK_K && chunks > 1;
  return cuts ? (args.cut > 0 ? args.cut : args.group.world) - 1 : 0;
}
inline int count_copies(fluxgen_copy_args const& args, int chunks) {
  int const peers = args.group.world - 1, cut = cut_peers(args, chunks);
  return args.chunk_axis == FLUXGEN_CHUNK_K ? cut * chunks + peers - cut : peers * chunks;
}
inline SlabCopy slab_copy(fluxgen_copy_args const& args, int chunks, int i) {
  fluxgen_group const& group = args.group;
  bool const along_k = args.chunk_axis == FLUXGEN_CHUNK_K;
  int const cut = cut_peers(args, chunks);
  bool const columns = along_k && i < cut * chunks;
  bool const pushes = args.kind == FLUXGEN_PUSH, drains = args.kind == FLUXGEN_DRAIN;
  bool const ring = args.kind == FLUXGEN_RING;
  int const turn = columns ? i % cut : (along_k ? i - cut * chunks + cut : i / chunks);
  auto const peer_of = [&](int visit) {
    return (group.rank + (pushes ? group.world - 1 - visit
                          : ring ? visit
                                 : 1 + visit)) %
           group.world;
  };
  SlabCopy copy{};
  copy.peer = peer_of(turn);
  copy.chunk = columns ? i / cut : (along_k ? 0 : i % chunks);
  copy.last = copy.chunk == (along_k && !columns ? 1 : chunks) - 1;
  // Round the ring the last slab that comes piece by piece is sent whole: once its last piece is here.
  copy.awaited_chunk =
      ring && along_k && !columns && cut > 0 && turn == cut ? chunks - 1 : copy.chunk;
  if (drains) {
    copy.awaited = 1u << copy.peer;
    copy.last = i == count_copies(args, chunks) - 1;
  } else if (ring) {  // each chunk of another's slab by itself
    copy.awaited = copy.peer != group.rank || i == 0 ? 1u << copy.peer : 0u;
  } else if (columns ? i == 0 : copy.chunk == 0) {
    for (int visit = turn; visit < (columns ? cut : turn + 1); ++visit) {
      copy.awaited |= 1u << peer_of(visit);
    }
  }
  int64_t const unit = args.chunk_size > 0 ? args.chunk_size : args.rows;
  int64_t row = 0, rows = args.rows, column = 0, width = args.row_bytes;
  if (columns) {
    column = k_chunk_begin(args.chunk_size, copy.chunk);
    width = k_chunk_end(args.chunk_size, copy.chunk, args.row_bytes) - column;
  } else if (!along_k) {
    row = copy.chunk * unit;
    rows = row + unit < args.rows ? unit : args.rows - row;
  }
  int64_t const slab = args.rows * args.row_bytes;
  bool const from_x = pushes || (ring && copy.peer == group.rank);
  int64_t const pitch = from_x ? args.row_stride_bytes : args.row_bytes;
  char* to = nullptr;
  char const* from = static_cast<char const*>(args.x);
  if (drains) {
    to = drained_slab(group, copy.peer, group.rank, slab);
    from = outbox_slab(group, copy.peer, slab);
  } else if (ring) {
    to = pushed_matrix(group, rank_before(group)) + copy.peer * slab;
    from = from_x ? from : pushed_matrix(group, group.rank) + copy.peer * slab;
  } else if (pushes) {
    to = pushed_matrix(group, copy.peer) + group.rank * slab;
    from += copy.peer * args.x_step_bytes;
  } else {
    to = static_cast<char*>(args.gathered) + copy.peer * slab;
    from = stage(group, copy.peer);
  }
  copy.to = to + row * args.row_bytes + column;
  copy.from = from + row * pitch + column;
  bool const one = width == args.row_bytes && pitch == args.row_bytes;
  copy.width = size_t(one ? rows * width : width);
  copy.rows = size_t(one ? 1 : rows);
  copy.to_pitch = size_t(one ? rows * width : args.row_bytes);
  copy.from_pitch = size_t(one ? rows * width : pitch);
  return copy;
}

// A peer's memory may also lie in the host's: CUDA finds out by the address.
inline cudaError_t queue_copy(SlabCopy const& copy, cudaStream_t stream) {
  return copy.rows == 1 ? cudaMemcpyAsync(copy.to, copy.from, copy.width, cudaMemcpyDefault, stream)
                        : cudaMemcpy2DAsync(copy.to, copy.to_pitch, copy.from, copy.from_pitch,
                                            copy.width, copy.rows, cudaMemcpyDefault, stream);
}

// The same for a node of an executable graph that was captured from such a copy of one piece. CUDA
// updates no copy of several (cudaGraphExecMemcpyNodeSetParams: "must be 1-dimensional").
inline cudaError_t update_copy(SlabCopy const& copy, cudaGraphExec_t graph, cudaGraphNode_t node) {
  return copy.rows == 1 ? cudaGraphExecMemcpyNodeSetParams1D(graph, node, copy.to, copy.from,
                                                             copy.width, cudaMemcpyDefault)
                        : cudaErrorNotSupported;
}

// The same for a node of the graph itself: for what is instantiated from it afterwards.
inline cudaError_t update_copy(SlabCopy const& copy, cudaGraphNode_t node) {
  cudaMemcpy3DParms node_params{};
  node_params.srcPtr =
      make_cudaPitchedPtr(const_cast<char*>(copy.from), copy.from_pitch, copy.width, copy.rows);
  node_params.dstPtr = make_cudaPitchedPtr(copy.to, copy.to_pitch, copy.width, copy.rows);
  node_params.extent = make_cudaExtent(copy.width, copy.rows, 1);
  node_params.kind = cudaMemcpyDefault;
  return cudaGraphMemcpyNodeSetParams(node, &node_params);
}

// Where the copies of a call run, the kernels that wait for what each copies, and those that raise its
// flag: beside other copies, which would have to wait for them in one stream (measured: 4 us a copy).
// `event` orders one behind the other.
struct CopyStreams {
  cudaStream_t awaits;
  cudaStream_t copies;
  cudaStream_t flags;
  cudaEvent_t event;
};

// Queue the copies behind what is on `streams.awaits`: the first waits. `note` is called after each.
template <class Note>
cudaError_t queue_copies(fluxgen_copy_args const& args, int chunks, CopyStreams const& streams,
                         Note note) {
  int const copies = count_copies(args, chunks);
  cudaError_t error = cudaSuccess;
  for (int i = 0; i < copies && error == cudaSuccess; ++i) {
    SlabCopy const copy = slab_copy(args, chunks, i);
    if (copy.awaited != 0u) {
      await_kernel<<<1, FLUXGEN_MAX_WORLD, 0, streams.awaits>>>(
          AwaitArguments{args.group, args.kind, copy.awaited, copy.awaited_chunk});
      error = cudaEventRecord(streams.event, streams.awaits);
      if (error == cudaSuccess) {
        error = cudaStreamWaitEvent(streams.copies, streams.event, 0);
      }
    }
    if (error == cudaSuccess) {
      error = queue_copy(copy, streams.copies);
    }
    if (error == cudaSuccess) {
      error = note();
    }
    if (error == cudaSuccess) {
      error = cudaEventRecord(streams.event, streams.copies);
    }
    if (error == cudaSuccess) {
      error = cudaStreamWaitEvent(streams.flags, streams.event, 0);
    }
    if (error == cudaSuccess) {
      raise_kernel<<<1, 1, 0, streams.flags>>>(
          RaiseArguments{args.group, args.kind, copy.peer, copy.chunk, copy.last});
    }
  }
  cudaError_t const launched = cudaGetLastError();
  return error == cudaSuccess ? launched : error;
}

// Everything queued on `after` from now on waits for everything queued on `before` until now.
inline int order(cudaStream_t before, cudaStream_t after, cudaEvent_t event, char* message,
                 int64_t size) {
  cudaError_t error = cudaEventRecord(event, before);
  if (error == cudaSuccess) {
    error = cudaStreamWaitEvent(after, event, 0);
  }
  return cuda_status(error, "order of streams", message, size);
}

// Queue the copies behind what is on `stream`; those of a gemm_rs wait for its GEMM by themselves.
inline int copy(fluxgen_copy_args const& args, cudaStream_t stream, CopyStreams const& streams,
                char* message, int64_t size) {
  int chunks = 0;
  if (int const status = check_copies(args, &chunks, message, size)) {
    return status;
  }
  if (int const status = order(stream, streams.awaits, streams.event, message, size)) {
    return status;
  }
  return cuda_status(queue_copies(args, chunks, streams, [] { return cudaSuccess; }), "copies",
                     message, size);
}

}  // namespace fluxgen
#endif  // FLUXGEN_SUPPORT_COPIES_CUH_
