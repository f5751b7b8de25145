// The support library: whole calls, each queued launch by launch or as one CUDA graph, and the
// kernels that are not GEMMs.
#ifndef FLUXGEN_SUPPORT_CUH_
#define FLUXGEN_SUPPORT_CUH_

#include <cstring>
#include <memory>
#include <vector>

#include "fluxgen/calls.h"
#include "fluxgen/support_launch.cuh"

namespace fluxgen {

// A node of a graph and the arguments that it has.
template <class Args>
struct GraphNode {
  cudaGraphNode_t node = nullptr;
  Args args{};
};

// A whole call as a CUDA graph: one launch in place of two to a hundred. Other operands are given to
// its nodes; launches in flight keep theirs. Its copies cannot be changed.
struct CallGraph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  uint64_t operands = 0;  // a hash of where they are
  GraphNode<fluxgen_begin_args> begin;
  GraphNode<fluxgen_reduce_args> reduce;
  std::vector<GraphNode<fluxgen_gemm_args>> gemms;
  fluxgen_pull_args pull{};

  CallGraph() = default;
  CallGraph(CallGraph const&) = delete;
  ~CallGraph() {
    if (exec != nullptr) {
      cudaGraphExecDestroy(exec);
    }
    if (graph != nullptr) {
      cudaGraphDestroy(graph);
    }
  }
};

// The graphs of one kind of call, for the operands that it is made with over and over: the layers
// of a model, each with its weight and, from step to step, with the same activations.
struct CallGraphs {
  explicit CallGraphs(int64_t most_graphs) : most(size_t(most_graphs)) {}

  size_t most;
  bool ran = false;     // its kernels are loaded
  bool failed = false;  // no graph can be made of it
  uint32_t dice = 1;
  std::vector<std::unique_ptr<CallGraph>> made;
};

// The node of what was last queued on a capturing stream.
inline cudaError_t last_node(cudaStream_t stream, cudaGraphNode_t* node) {
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  cudaGraphNode_t const* nodes = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  cudaError_t const error = cudaStreamGetCaptureInfo(stream, &capturing, nullptr, nullptr, &nodes,
                                                     nullptr, &count);
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

// Queue the kernel of `args`; where `into` is given, the stream is capturing and it gets the node.
template <class Args>
int queue_kernel(Args const& args, cudaStream_t stream, GraphNode<Args>* into, char* message,
                 int64_t size) {
  int const status = launch(args, stream, message, size);
  if (status != FLUXGEN_OK || into == nullptr) {
    return status;
  }
  into->args = args;
  return cuda_status(last_node(stream, &into->node), "capture", message, size);
}

inline int queue_gemm(fluxgen_gemm_call const& gemm, cudaStream_t stream, CallGraph* into,
                      char* message, int64_t size) {
  int const status = gemm.launch(gemm.args, stream, message, size);
  if (status != FLUXGEN_OK || into == nullptr) {
    return status;
  }
  GraphNode<fluxgen_gemm_args> added;
  added.args = *gemm.args;
  int const captured = cuda_status(last_node(stream, &added.node), "capture", message, size);
  into->gemms.push_back(added);
  return captured;
}

// Queue a call launch by launch.
inline int queue(fluxgen_gather_call const& call, cudaStream_t stream, CallGraph* into,
                 char* message, int64_t size) {
  cudaStream_t const copy = static_cast<cudaStream_t>(call.copy);
  int chunks = 0;
  if (call.pull != nullptr) {  // before a peer is told anything
    if (int const status = check_pull(*call.pull, &chunks, message, size)) {
      return status;
    }
  }
  int status =
      queue_kernel(*call.begin, stream, into != nullptr ? &into->begin : nullptr, message, size);
  bool const forks = status == FLUXGEN_OK && call.pull != nullptr;
  if (forks) {
    status = order(stream, copy, static_cast<cudaEvent_t>(call.forked), message, size);
  }
  if (forks && status == FLUXGEN_OK) {
    status = cuda_status(queue_pulls(*call.pull, chunks, copy), "pull", message, size);
  }
  for (int64_t i = 0; i < call.count && status == FLUXGEN_OK; ++i) {
    status = queue_gemm(call.gemms[i], stream, into, message, size);
  }
  if (forks) {  // also after an error: the copies write into what the caller frees next
    bool const failed = status != FLUXGEN_OK;
    int const joined = order(copy, stream, static_cast<cudaEvent_t>(call.joined),
                             failed ? nullptr : message, size);
    status = failed ? status : joined;
  }
  return status;
}

inline int queue(fluxgen_scatter_call const& call, cudaStream_t stream, CallGraph* into,
                 char* message, int64_t size) {
  int const status = queue_gemm(call.gemm, stream, into, message, size);
  return status == FLUXGEN_OK
             ? queue_kernel(*call.reduce, stream, into != nullptr ? &into->reduce : nullptr,
                            message, size)
             : status;
}

inline fluxgen_pull_args const* pulls_of(fluxgen_gather_call const& call) { return call.pull; }
inline fluxgen_pull_args const* pulls_of(fluxgen_scatter_call const&) { return nullptr; }

template <class Args>
bool same(Args const& a, Args const& b) {
  return std::memcmp(&a, &b, sizeof(Args)) == 0;
}
inline bool same_gemms(CallGraph const& graph, fluxgen_gemm_call const* gemms) {
  for (size_t i = 0; i < graph.gemms.size(); ++i) {
    if (!same(graph.gemms[i].args, *gemms[i].args)) {
      return false;
    }
  }
  return true;
}
inline bool same_copies(CallGraph const& graph, fluxgen_gather_call const& call) {
  return call.pull == nullptr || same(graph.pull, *call.pull);
}
inline bool same_copies(CallGraph const&, fluxgen_scatter_call const&) { return true; }
inline bool serves(CallGraph const& graph, fluxgen_gather_call const& call) {
  return same(graph.begin.args, *call.begin) && same_gemms(graph, call.gemms) &&
         same_copies(graph, call);
}
inline bool serves(CallGraph const& graph, fluxgen_scatter_call const& call) {
  return same_gemms(graph, &call.gemm) && same(graph.reduce.args, *call.reduce);
}

inline uint64_t mix(uint64_t hash, void const* address) {
  return (hash ^ reinterpret_cast<uintptr_t>(address)) * 0x9e3779b97f4a7c15ull;
}
inline uint64_t operands(fluxgen_gather_call const& call) {
  uint64_t hash = mix(mix(1, call.begin->x), call.begin->gathered);
  for (int64_t i = 0; i < call.count; ++i) {
    hash = mix(mix(hash, call.gemms[i].args->b), call.gemms[i].args->d);
  }
  return hash;
}
inline uint64_t operands(fluxgen_scatter_call const& call) {
  return mix(mix(mix(1, call.gemm.args->a), call.gemm.args->b), call.reduce->d);
}

// Give the nodes of a graph the arguments of a call.
template <class Args>
int refresh(GraphNode<Args>& node, Args const& args, cudaGraphExec_t exec, char* message,
            int64_t size) {
  int const status =
      same(node.args, args) ? FLUXGEN_OK : update(args, exec, node.node, message, size);
  if (status == FLUXGEN_OK) {
    node.args = args;
  }
  return status;
}
inline int refresh(CallGraph& graph, fluxgen_gemm_call const* gemms, char* message, int64_t size) {
  int status = FLUXGEN_OK;
  for (size_t i = 0; i < graph.gemms.size() && status == FLUXGEN_OK; ++i) {
    GraphNode<fluxgen_gemm_args>& node = graph.gemms[i];
    if (!same(node.args, *gemms[i].args)) {
      status = gemms[i].update(gemms[i].args, graph.exec, node.node, message, size);
    }
    if (status == FLUXGEN_OK) {
      node.args = *gemms[i].args;
    }
  }
  return status;
}
inline int refresh(CallGraph& graph, fluxgen_gather_call const& call, char* message,
                   int64_t size) {
  int const status = refresh(graph.begin, *call.begin, graph.exec, message, size);
  return status == FLUXGEN_OK ? refresh(graph, call.gemms, message, size) : status;
}
inline int refresh(CallGraph& graph, fluxgen_scatter_call const& call, char* message,
                   int64_t size) {
  int const status = refresh(graph, &call.gemm, message, size);
  return status == FLUXGEN_OK ? refresh(graph.reduce, *call.reduce, graph.exec, message, size)
                              : status;
}

// The graph of a call, by capturing it: nothing runs. Null if none can be made.
template <class Call>
std::unique_ptr<CallGraph> make_graph(Call const& call) {
  auto graph = std::make_unique<CallGraph>();
  if (pulls_of(call) != nullptr) {
    graph->pull = *pulls_of(call);
  }
  cudaStream_t stream = nullptr;  // the caller's may be one that cannot capture
  bool made = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess;
  if (made && cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess) {
    int const status = queue(call, stream, graph.get(), nullptr, 0);
    cudaError_t const ended = cudaStreamEndCapture(stream, &graph->graph);
    // The copies come before the blocks of a GEMM, as on the stream that they were captured from.
    made = status == FLUXGEN_OK && ended == cudaSuccess &&
           cudaGraphInstantiate(&graph->exec, graph->graph,
                                cudaGraphInstantiateFlagUseNodePriority) == cudaSuccess;
  } else {
    made = false;
  }
  if (stream != nullptr) {
    cudaStreamDestroy(stream);
  }
  if (!made) {
    cudaGetLastError();
    graph.reset();
  }
  return graph;
}

// The graph with the arguments of a call: one that has them, else a new one, else one that is given
// them. Which one that is, is left to chance: a model with more layers than there are graphs would
// find none again if it were the oldest. Null: the call is to be queued launch by launch.
template <class Call>
CallGraph* graph_for(CallGraphs& graphs, Call const& call, int* status, char* message,
                     int64_t size) {
  if (!graphs.ran || graphs.failed || graphs.most == 0) {
    graphs.ran = true;
    return nullptr;
  }
  uint64_t const where = operands(call);
  for (std::unique_ptr<CallGraph>& graph : graphs.made) {
    if (graph->operands == where && serves(*graph, call)) {
      return graph.get();
    }
  }
  bool const full = graphs.made.size() == graphs.most;
  graphs.dice = graphs.dice * 1664525u + 1013904223u;
  size_t const place = full ? (graphs.dice >> 16) % graphs.most : graphs.made.size();
  if (full && same_copies(*graphs.made[place], call)) {
    CallGraph& graph = *graphs.made[place];
    *status = refresh(graph, call, message, size);
    graph.operands = where;
    return &graph;
  }
  std::unique_ptr<CallGraph> graph = make_graph(call);
  if (graph == nullptr) {
    graphs.failed = true;
    return nullptr;
  }
  graph->operands = where;
  if (full) {
    graphs.made[place] = std::move(graph);
  } else {
    graphs.made.push_back(std::move(graph));
  }
  return graphs.made[place].get();
}

// Queue a whole call on a stream.
template <class Call>
int run(Call const& call, cudaStream_t stream, char* message, int64_t size) {
  if (int const status = check_version(call, message, size)) {
    return status;
  }
  CallGraph* graph = nullptr;
  int status = FLUXGEN_OK;
  if (call.graphs != nullptr) {
    graph = graph_for(*static_cast<CallGraphs*>(call.graphs), call, &status, message, size);
  }
  if (status != FLUXGEN_OK) {
    return status;
  }
  return graph == nullptr
             ? queue(call, stream, nullptr, message, size)
             : cuda_status(cudaGraphLaunch(graph->exec, stream), "launch of a graph", message, size);
}

}  // namespace fluxgen

#define FLUXGEN_EXPORT_SUPPORT()                                                               \
  extern "C" __attribute__((visibility("default"))) int fluxgen_abi_version(void) {            \
    return FLUXGEN_ABI_VERSION;                                                                \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_begin(                         \
      fluxgen_begin_args const* args, void* stream, char* message, int64_t size) {             \
    return fluxgen::launch(*args, static_cast<cudaStream_t>(stream), message, size);           \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_reduce(                        \
      fluxgen_reduce_args const* args, void* stream, char* message, int64_t size) {            \
    return fluxgen::launch(*args, static_cast<cudaStream_t>(stream), message, size);           \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_pull(                          \
      fluxgen_pull_args const* args, void* stream, void* copy, void* forked, char* message,    \
      int64_t size) {                                                                          \
    return fluxgen::pull(*args, static_cast<cudaStream_t>(stream),                             \
                         static_cast<cudaStream_t>(copy), static_cast<cudaEvent_t>(forked),    \
                         message, size);                                                       \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_order(                         \
      void* before, void* after, void* event, char* message, int64_t size) {                   \
    return fluxgen::order(static_cast<cudaStream_t>(before), static_cast<cudaStream_t>(after), \
                          static_cast<cudaEvent_t>(event), message, size);                     \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_gather(                        \
      fluxgen_gather_call const* call, void* stream, char* message, int64_t size) {            \
    return fluxgen::run(*call, static_cast<cudaStream_t>(stream), message, size);              \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int fluxgen_scatter(                       \
      fluxgen_scatter_call const* call, void* stream, char* message, int64_t size) {           \
    return fluxgen::run(*call, static_cast<cudaStream_t>(stream), message, size);              \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) void* fluxgen_graphs(int64_t most) {       \
    return new fluxgen::CallGraphs(most);                                                      \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) int64_t fluxgen_graphs_made(               \
      void const* graphs) {                                                                    \
    return int64_t(static_cast<fluxgen::CallGraphs const*>(graphs)->made.size());              \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) void fluxgen_graphs_free(void* graphs) {   \
    delete static_cast<fluxgen::CallGraphs*>(graphs);                                          \
  }

#endif  // FLUXGEN_SUPPORT_CUH_
