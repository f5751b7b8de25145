// The CUDA graphs of a kind of call: captured once, kept for the operands that it is made with over
// and over, and given others.
#ifndef FLUXGEN_SUPPORT_GRAPHS_CUH_
#define FLUXGEN_SUPPORT_GRAPHS_CUH_

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "fluxgen/support/calls.cuh"

namespace fluxgen {

// One executable graph, and the arguments that its nodes have. It runs a whole call in one launch,
// in place of two to a hundred. Launches in flight keep the arguments that they were made with.
struct ReadyCall {
  cudaGraphExec_t exec = nullptr;
  fluxgen_begin_args begin{};
  fluxgen_reduce_args reduce{};
  CollectArguments collect{};
  fluxgen_copy_args copy{};
  std::vector<fluxgen_gemm_args> gemms;

  ReadyCall() = default;
  ReadyCall(ReadyCall const&) = delete;
  ~ReadyCall() {
    if (exec != nullptr) {
      cudaGraphExecDestroy(exec);
    }
  }
};

constexpr int kFailures = 3;         // to make or update a graph, until no more is tried
constexpr size_t kRemembered = 256;  // operands that a kind of call was last made with
constexpr uint32_t kRenewed = 8;     // of so many calls that find no room, one replaces another

// A ready graph and a hash of where its operands are, which is all that a search reads of most.
struct KeptCall {
  uint64_t operands;
  std::unique_ptr<ReadyCall> call;
};

// The ready graphs of one kind of call, for the operands that it is made with over and over: the
// layers of a model, each with its weight and, from step to step, with the same activations. The
// first of them is given the operands of all calls that have none of their own.
struct CallGraphs {
  CallGraphs(int64_t most_ready, int64_t* left_of_all)
      : most(size_t(most_ready)), left(left_of_all) {}
  CallGraphs(CallGraphs const&) = delete;
  ~CallGraphs() { *left += int64_t(ready.size()); }

  size_t most;
  int64_t* left;     // how many more there may be of all kinds that share it
  bool ran = false;  // its kernels are loaded
  int failures = 0;
  uint32_t dice = 1;
  std::unique_ptr<CallGraph> graph;
  std::vector<KeptCall> ready;
  std::vector<uint64_t> seen;
  size_t next_seen = 0;

  uint32_t roll(uint32_t sides) {
    dice = dice * 1664525u + 1013904223u;
    return (dice >> 16) % sides;
  }
  bool full() const { return ready.size() >= most || *left <= 0; }
  // Whether these operands have been here before; from now on they have.
  bool returns(uint64_t operands) {
    for (uint64_t other : seen) {
      if (other == operands) {
        return true;
      }
    }
    if (seen.size() < kRemembered) {
      seen.push_back(operands);
    } else {
      seen[next_seen] = operands;
      next_seen = (next_seen + 1) % kRemembered;
    }
    return false;
  }
  void forget(ReadyCall const* call) {
    for (KeptCall& each : ready) {
      if (each.call.get() == call) {
        std::swap(each, ready.back());
        ready.pop_back();
        ++*left;
        return;
      }
    }
  }
};

template <class Args>
bool same(Args const& a, Args const& b) {
  return std::memcmp(&a, &b, sizeof(Args)) == 0;
}
inline bool same_gemms(ReadyCall const& ready, fluxgen_gemm_call const* gemms) {
  for (size_t i = 0; i < ready.gemms.size(); ++i) {
    if (!same(ready.gemms[i], *gemms[i].args)) {
      return false;
    }
  }
  return true;
}
inline bool serves(ReadyCall const& ready, fluxgen_gather_call const& call) {
  return same(ready.begin, *call.begin) && same_gemms(ready, call.gemms) &&
         (call.copy == nullptr || same(ready.copy, *call.copy));
}
inline bool serves(ReadyCall const& ready, fluxgen_scatter_call const& call) {
  return same_gemms(ready, &call.gemm) && same(ready.reduce, *call.reduce) &&
         (call.copy == nullptr || same(ready.copy, *call.copy));
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
  return mix(mix(mix(mix(1, call.gemm.args->a), call.gemm.args->b), call.reduce->d),
             call.reduce->operands[FLUXGEN_RESIDUAL].data);
}

// Give the nodes of a ready graph the arguments of a call, those that differ.
template <class Args>
int refresh_kernel(cudaGraphExec_t exec, cudaGraphNode_t node, Args& has, Args const& args) {
  if (same(has, args)) {
    return FLUXGEN_OK;
  }
  int const status = update(args, exec, node, nullptr, 0);
  if (status == FLUXGEN_OK) {
    has = args;
  }
  return status;
}
inline int refresh_gemms(CallGraph const& graph, ReadyCall& ready, fluxgen_gemm_call const* gemms) {
  int status = FLUXGEN_OK;
  for (size_t i = 0; i < ready.gemms.size() && status == FLUXGEN_OK; ++i) {
    if (!same(ready.gemms[i], *gemms[i].args)) {
      status = gemms[i].update(gemms[i].args, ready.exec, graph.gemms[i], nullptr, 0);
    }
    if (status == FLUXGEN_OK) {
      ready.gemms[i] = *gemms[i].args;
    }
  }
  return status;
}
inline int refresh_copies(CallGraph const& graph, ReadyCall& ready, fluxgen_copy_args const& args) {
  if (same(ready.copy, args)) {
    return FLUXGEN_OK;
  }
  int chunks = 0;
  int status = check_copies(args, &chunks, nullptr, 0);
  for (size_t i = 0; i < graph.copies.size() && status == FLUXGEN_OK; ++i) {
    status = cuda_status(update_copy(slab_copy(args, chunks, int(i)), ready.exec, graph.copies[i]),
                         "", nullptr, 0);
  }
  if (status == FLUXGEN_OK) {
    ready.copy = args;
  }
  return status;
}
// Before a graph is instantiated for a call: its copies of several pieces, which cannot be given
// other addresses afterwards.
inline int place_copies(CallGraph const& graph, ReadyCall& ready, fluxgen_gather_call const& call) {
  if (!graph.fixed_copies) {
    return FLUXGEN_OK;
  }
  int chunks = 0;
  int status = check_copies(*call.copy, &chunks, nullptr, 0);
  for (size_t i = 0; i < graph.copies.size() && status == FLUXGEN_OK; ++i) {
    status = cuda_status(update_copy(slab_copy(*call.copy, chunks, int(i)), graph.copies[i]), "",
                         nullptr, 0);
  }
  ready.copy = *call.copy;
  return status;
}
inline int place_copies(CallGraph const&, ReadyCall&, fluxgen_scatter_call const&) {
  return FLUXGEN_OK;
}
// Whether a ready graph can be given the operands of a call.
inline bool can_refresh(CallGraph const& graph, ReadyCall const& ready,
                        fluxgen_gather_call const& call) {
  return !graph.fixed_copies || same(ready.copy, *call.copy);
}
inline bool can_refresh(CallGraph const&, ReadyCall const&, fluxgen_scatter_call const&) {
  return true;
}
inline int refresh(CallGraph const& graph, ReadyCall& ready, fluxgen_gather_call const& call) {
  int status = refresh_kernel(ready.exec, graph.begin, ready.begin, *call.begin);
  if (status == FLUXGEN_OK && call.copy != nullptr) {
    status = refresh_copies(graph, ready, *call.copy);
  }
  return status == FLUXGEN_OK ? refresh_gemms(graph, ready, call.gemms) : status;
}
inline int refresh(CallGraph const& graph, ReadyCall& ready, fluxgen_scatter_call const& call) {
  int status = refresh_gemms(graph, ready, &call.gemm);
  if (status == FLUXGEN_OK && call.copy != nullptr) {
    status = refresh_copies(graph, ready, *call.copy);
  }
  if (status == FLUXGEN_OK) {
    status = refresh_kernel(ready.exec, graph.reduce, ready.reduce, *call.reduce);
  }
  return status == FLUXGEN_OK && graph.collect != nullptr
             ? refresh_kernel(ready.exec, graph.collect, ready.collect,
                              CollectArguments{*call.reduce})
             : status;
}

// What the nodes of a graph that was captured from a call have.
inline void describe(ReadyCall& ready, fluxgen_gather_call const& call) {
  ready.begin = *call.begin;
  for (int64_t i = 0; i < call.count; ++i) {
    ready.gemms.push_back(*call.gemms[i].args);
  }
  if (call.copy != nullptr) {
    ready.copy = *call.copy;
  }
}
inline void describe(ReadyCall& ready, fluxgen_scatter_call const& call) {
  ready.gemms.push_back(*call.gemm.args);
  ready.reduce = *call.reduce;
  ready.collect = {*call.reduce};
  if (call.copy != nullptr) {
    ready.copy = *call.copy;
  }
}

// Capture a call: nothing runs. On streams of its own: the caller's may be one that cannot capture,
// and the copies' may be in use elsewhere. Null if it cannot be captured.
template <class Call>
std::unique_ptr<CallGraph> capture(Call const& call) {
  auto graph = std::make_unique<CallGraph>();
  cudaStream_t stream = nullptr;
  CopyStreams side{};
  int lowest = 0, highest = 0;
  cudaDeviceGetStreamPriorityRange(&lowest, &highest);
  auto const make = [&](cudaStream_t* to, int priority) {
    return cudaStreamCreateWithPriority(to, cudaStreamNonBlocking, priority) == cudaSuccess;
  };
  bool made = make(&stream, lowest) && make(&side.copies, highest) && make(&side.flags, highest) &&
              make(&side.awaits, highest) &&
              cudaEventCreateWithFlags(&side.event, cudaEventDisableTiming) == cudaSuccess &&
              cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
  if (made) {
    int const status = queue(call, stream, side, graph.get(), nullptr, 0);
    cudaError_t const ended = cudaStreamEndCapture(stream, &graph->graph);
    made = status == FLUXGEN_OK && ended == cudaSuccess;
  }
  for (cudaStream_t each : {stream, side.awaits, side.copies, side.flags}) {
    if (each != nullptr) {
      cudaStreamDestroy(each);
    }
  }
  if (side.event != nullptr) {
    cudaEventDestroy(side.event);
  }
  if (!made) {
    graph.reset();
  }
  return graph;
}

// A ready graph with the arguments of a call, or null.
template <class Call>
std::unique_ptr<ReadyCall> make_ready(CallGraphs& graphs, Call const& call) {
  auto ready = std::make_unique<ReadyCall>();
  if (graphs.graph == nullptr) {
    graphs.graph = capture(call);
    if (graphs.graph == nullptr) {
      return nullptr;
    }
    describe(*ready, call);
  } else {
    ready->gemms.resize(graphs.graph->gemms.size());  // of no arguments that a call could have
    if (place_copies(*graphs.graph, *ready, call) != FLUXGEN_OK) {
      return nullptr;
    }
  }
  // Kernels of the copies' stream keep its priority: they come before the blocks of a GEMM.
  if (cudaGraphInstantiate(&ready->exec, graphs.graph->graph,
                           cudaGraphInstantiateFlagUseNodePriority) != cudaSuccess ||
      refresh(*graphs.graph, *ready, call) != FLUXGEN_OK) {
    return nullptr;
  }
  return ready;
}

// The ready graph for a call: the one with its operands; else, when they come back, one more; else
// the first that can be given them. Null: queue the call launch by launch, also after an
// error, since the peers do not know of it.
template <class Call>
ReadyCall* ready_for(CallGraphs& graphs, Call const& call) {
  if (!graphs.ran || graphs.failures >= kFailures) {
    graphs.ran = true;
    return nullptr;
  }
  uint64_t const where = operands(call);
  for (KeptCall& kept : graphs.ready) {
    if (kept.operands == where && serves(*kept.call, call)) {
      return kept.call.get();
    }
  }
  bool const returns = graphs.returns(where);
  KeptCall* kept = nullptr;
  for (KeptCall& each : graphs.ready) {
    if (can_refresh(*graphs.graph, *each.call, call)) {
      kept = &each;
      break;
    }
  }
  bool make = graphs.ready.empty() || (returns && !graphs.full());
  if (make && graphs.full()) {
    return nullptr;
  }
  if (!make) {
    bool const renew = returns && graphs.ready.size() > 1 && graphs.roll(kRenewed) == 0;
    if (renew) {
      kept = &graphs.ready[1 + graphs.roll(uint32_t(graphs.ready.size() - 1))];
    }
    if (kept == nullptr) {
      return nullptr;
    }
    if (!can_refresh(*graphs.graph, *kept->call, call)) {
      graphs.forget(kept->call.get());
      make = true;
    } else if (refresh(*graphs.graph, *kept->call, call) != FLUXGEN_OK) {
      graphs.forget(kept->call.get());
      kept = nullptr;
    }
  }
  if (make) {
    kept = nullptr;
    if (std::unique_ptr<ReadyCall> made = make_ready(graphs, call)) {
      graphs.ready.push_back({where, std::move(made)});
      --*graphs.left;
      kept = &graphs.ready.back();
    }
  }
  if (kept == nullptr) {
    cudaGetLastError();
    ++graphs.failures;
    return nullptr;
  }
  kept->operands = where;
  return kept->call.get();
}

}  // namespace fluxgen
#endif  // FLUXGEN_SUPPORT_GRAPHS_CUH_
