// A link that is not there: the flags that peers and copies would raise, raised on schedule.
//
//      host thread    waits for a start word, then raises flag after flag at its due time
//      GPU            cuStreamWriteValue32 and cuStreamWaitValue32: the front end, no SM
//
//      ag_gemm   start: the begin kernel tells "peer" 1 that the stage is full; flags: gathered
//      gemm_rs   start: a word written in front of the GEMM; the flags that the GEMM raises on its
//                "peers" are watched, and answered by the flag of the peer that does the same for us
//
// Only flags move. For measurements, never for a real call.
#ifndef FLUXGEN_SUPPORT_EMULATED_LINK_CUH_
#define FLUXGEN_SUPPORT_EMULATED_LINK_CUH_

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "fluxgen/abi.h"
#include "fluxgen/protocol/flags.cuh"

extern "C" {

// A flag to be raised `due_us` after the start.
typedef struct fluxgen_arrival {
  void* flag;
  double due_us;
} fluxgen_arrival;

// A flag that the GEMM raises on a peer, and the one to be raised in turn. The link is a queue: a
// chunk has been sent `busy_us` after the one before, and not before `tail_us` after its last tile.
// They are watched for in that order, by one stream: streams of their own see flags that come
// together in any order, and then what has long been sent is charged after what comes last
// (measured: up to 58 us of a call).
typedef struct fluxgen_departure {
  void* watched;
  void* answered;
  double busy_us;
  double tail_us;
} fluxgen_departure;

typedef struct fluxgen_link_figures {
  double lag_us;     // from a write of the host to the host's view of its effect, the median
  double latest_us;  // how late the latest flag was issued, of all since the last look
  int64_t raised;    // flags since the last look
  int64_t late;      // of them, issued more than a microsecond late
} fluxgen_link_figures;
}

namespace fluxgen {

class EmulatedLink {
 public:
  static constexpr int kSlots = 4096;
  static constexpr int kFirstSlot = int(kDataOffset / 4) + 1;
  static constexpr int kWords = kFirstSlot + kSlots;

  // Null, and a message, where the driver lacks what is needed.
  static EmulatedLink* open(char* message, int64_t size) {
    auto* link = new EmulatedLink();
    char const* const failed = link->prepare();
    if (failed == nullptr) {
      return link;
    }
    std::snprintf(message, size_t(size), "emulated link: %s", failed);
    delete link;
    return nullptr;
  }

  ~EmulatedLink() {
    if (thread_.joinable()) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true);
      }
      wake_.notify_all();
      thread_.join();
    }
    for (cudaStream_t stream : {raises_, watches_}) {
      if (stream != nullptr) {
        cudaStreamDestroy(stream);
      }
    }
    cudaFreeHost(words_);
    cudaFree(probe_);
  }

  // Control block of a peer that does not exist, in host memory that the GPU can write.
  void* peer() { return words_; }
  // The word that a call's start is seen by: what rank 0 tells that peer.
  uint32_t* start() { return ready_flag(words_, 0); }

  // For a rank whose epochs begin anew. Nothing is queued.
  void reset() { std::fill(words_, words_ + kDataOffset / 4, 0u); }

  // Write the start word in stream order: for calls without a kernel that does.
  CUresult mark(CUstream stream, uint32_t epoch) {
    return write_(stream, CUdeviceptr(start()), epoch, 0);
  }

  // What is queued on `stream` from now on waits for a word on the device.
  CUresult gate(CUstream stream, void* word, uint32_t epoch) {
    return wait_(stream, CUdeviceptr(word), epoch, CU_STREAM_WAIT_VALUE_GEQ);
  }

  void gather(uint32_t epoch, double latency_us, fluxgen_arrival const* arrivals, int64_t count) {
    Job job;
    job.epoch = epoch;
    for (int64_t i = 0; i < count; ++i) {
      job.pending.push_back({latency_us + arrivals[i].due_us, arrivals[i].flag});
    }
    std::sort(job.pending.begin(), job.pending.end());
    add(std::move(job));
  }

  CUresult scatter(uint32_t epoch, double latency_us, fluxgen_departure const* departures,
                   int64_t count) {
    Job job;
    job.epoch = epoch;
    job.latency_us = latency_us;
    for (int64_t i = 0; i < count; ++i) {
      fluxgen_departure const& departure = departures[i];
      // A number of its own: epochs begin anew with every rank that uses this link, and a word that
      // was used before would say at once that the flag has been seen.
      uint32_t const ticket = ++next_ticket_;
      uint32_t* const seen = words_ + kFirstSlot + ticket % kSlots;
      CUresult status = gate(watches_, departure.watched, epoch);
      if (status == CUDA_SUCCESS) {
        status = write_(watches_, CUdeviceptr(seen), ticket, 0);
      }
      if (status != CUDA_SUCCESS) {
        return status;
      }
      job.watched.push_back({departure, seen, ticket});
    }
    add(std::move(job));
    return CUDA_SUCCESS;
  }

  // Wait for the end of all that was queued; false once `seconds` passed.
  bool drain(double seconds, fluxgen_link_figures* figures) {
    std::unique_lock<std::mutex> lock(mutex_);
    bool const done = idle_.wait_for(lock, std::chrono::duration<double>(seconds),
                                     [this] { return jobs_.empty(); });
    *figures = figures_;
    figures->lag_us = lag_us_;
    figures_ = {};
    return done;
  }

  // Forget what is queued: a call that failed never starts.
  void cancel() {
    cancel_.store(true);
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return jobs_.empty(); });
    cancel_.store(false);
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Pending {
    double due_us;
    void* flag;
    bool operator<(Pending const& other) const { return due_us < other.due_us; }
  };
  struct Watched {
    fluxgen_departure departure;
    uint32_t* seen;
    uint32_t ticket;
  };
  struct Job {
    uint32_t epoch = 0;
    double latency_us = 0;
    std::vector<Pending> pending;
    std::vector<Watched> watched;
  };

  template <class Function>
  static bool find(char const* name, Function* function) {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &result);
#else
    cudaError_t const error = cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &result);
#endif
    *function = reinterpret_cast<Function>(address);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess && address != nullptr;
  }

  char const* prepare() {
    if (!find("cuStreamWriteValue32", &write_) || !find("cuStreamWaitValue32", &wait_)) {
      return "expected a driver with cuStreamWriteValue32 and cuStreamWaitValue32";
    }
    cudaGetDevice(&device_);
    if (cudaHostAlloc(reinterpret_cast<void**>(&words_), kWords * 4, cudaHostAllocMapped) !=
            cudaSuccess ||
        cudaMalloc(reinterpret_cast<void**>(&probe_), 4) != cudaSuccess ||
        cudaMemset(probe_, 0, 4) != cudaSuccess) {
      return "cannot allocate its flags";
    }
    std::fill(words_, words_ + kWords, 0u);
    if (cudaStreamCreateWithFlags(&raises_, cudaStreamNonBlocking) != cudaSuccess ||
        cudaStreamCreateWithFlags(&watches_, cudaStreamNonBlocking) != cudaSuccess) {
      return "cannot create its streams";
    }
    if (cudaDeviceSynchronize() != cudaSuccess || !calibrate()) {
      return "a flag written in stream order was not seen";
    }
    thread_ = std::thread([this] { serve(); });
    return nullptr;
  }

  // From the host's write, by way of a wait on the GPU, back to the host.
  bool calibrate() {
    std::vector<double> lags;
    uint32_t volatile* const seen = words_ + kFirstSlot - 1;
    for (uint32_t value = 1; value <= 64; ++value) {
      if (gate(watches_, probe_, value) != CUDA_SUCCESS ||
          write_(watches_, CUdeviceptr(words_ + kFirstSlot - 1), value, 0) != CUDA_SUCCESS) {
        return false;
      }
      auto const began = Clock::now();
      if (write_(raises_, CUdeviceptr(probe_), value, 0) != CUDA_SUCCESS) {
        return false;
      }
      while (*seen < value) {
        if (since(began) > 1e6) {
          return false;
        }
      }
      lags.push_back(since(began));
    }
    std::sort(lags.begin(), lags.end());
    lag_us_ = lags[lags.size() / 2];
    return true;
  }

  static double since(Clock::time_point began) {
    return std::chrono::duration<double, std::micro>(Clock::now() - began).count();
  }

  void add(Job job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    wake_.notify_all();
  }

  void serve() {
    cudaSetDevice(device_);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_.load() || !jobs_.empty(); });
      if (stop_.load()) {
        return;
      }
      Job job = jobs_.front();
      lock.unlock();
      fluxgen_link_figures figures{};
      work(job, &figures);
      lock.lock();
      jobs_.pop_front();
      figures_.latest_us = std::max(figures_.latest_us, figures.latest_us);
      figures_.raised += figures.raised;
      figures_.late += figures.late;
      if (jobs_.empty()) {
        idle_.notify_all();
      }
    }
  }

  bool ended() const { return stop_.load() || cancel_.load(); }

  void work(Job& job, fluxgen_link_figures* figures) {
    uint32_t volatile* const start_word = start();
    while (!epoch_reached(*start_word, job.epoch)) {
      if (ended()) {
        return;
      }
    }
    auto const began = Clock::now();
    double sent_us = 0;  // the link is free from then on
    size_t next = 0, seen = 0;
    while (next < job.pending.size() || seen < job.watched.size()) {
      if (ended()) {
        return;
      }
      double const now = since(began);
      for (; seen < job.watched.size(); ++seen) {
        Watched const& watched = job.watched[seen];
        if (!epoch_reached(*const_cast<uint32_t volatile*>(watched.seen), watched.ticket)) {
          break;
        }
        sent_us = std::max(now + watched.departure.tail_us, sent_us + watched.departure.busy_us);
        job.pending.push_back({sent_us + job.latency_us, watched.departure.answered});
      }
      // What the flag's own way takes has passed already when it is due.
      while (next < job.pending.size() && since(began) >= job.pending[next].due_us - lag_us_) {
        double const late = since(began) - std::max(0.0, job.pending[next].due_us - lag_us_);
        write_(raises_, CUdeviceptr(job.pending[next].flag), job.epoch, 0);
        ++next;
        ++figures->raised;
        figures->late += late > 1.0;
        figures->latest_us = std::max(figures->latest_us, late);
      }
    }
  }

  int device_ = 0;
  uint32_t* words_ = nullptr;  // control block, one word of the calibration, departures
  uint32_t* probe_ = nullptr;
  cudaStream_t raises_ = nullptr, watches_ = nullptr;
  CUresult (*write_)(CUstream, CUdeviceptr, cuuint32_t, unsigned int) = nullptr;
  CUresult (*wait_)(CUstream, CUdeviceptr, cuuint32_t, unsigned int) = nullptr;
  double lag_us_ = 0;
  uint32_t next_ticket_ = 0;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<Job> jobs_;
  std::atomic<bool> stop_{false}, cancel_{false};
  fluxgen_link_figures figures_{};
};

inline int link_status(CUresult status, char const* what, char* message, int64_t size) {
  if (status == CUDA_SUCCESS) {
    return FLUXGEN_OK;
  }
  std::snprintf(message, size_t(size), "emulated link: %s: driver error %d", what, int(status));
  return FLUXGEN_CUDA_ERROR;
}

}  // namespace fluxgen

#define FLUXGEN_LINK_EXPORT extern "C" __attribute__((visibility("default")))
#define FLUXGEN_EXPORT_EMULATED_LINK()                                                             \
  FLUXGEN_LINK_EXPORT int fluxgen_abi_version(void) { return FLUXGEN_ABI_VERSION; }                \
  FLUXGEN_LINK_EXPORT void* fluxgen_link_open(char* message, int64_t size) {                       \
    return fluxgen::EmulatedLink::open(message, size);                                             \
  }                                                                                                \
  FLUXGEN_LINK_EXPORT void fluxgen_link_close(void* link) {                                        \
    delete static_cast<fluxgen::EmulatedLink*>(link);                                              \
  }                                                                                                \
  FLUXGEN_LINK_EXPORT void* fluxgen_link_peer(void* link) {                                        \
    return static_cast<fluxgen::EmulatedLink*>(link)->peer();                                      \
  }                                                                                                \
  FLUXGEN_LINK_EXPORT int fluxgen_link_mark(void* link, void* stream, uint32_t epoch,              \
                                            char* message, int64_t size) {                         \
    return fluxgen::link_status(                                                                   \
        static_cast<fluxgen::EmulatedLink*>(link)->mark(static_cast<CUstream>(stream), epoch),     \
        "mark", message, size);                                                                    \
  }                                                                                                \
  FLUXGEN_LINK_EXPORT int fluxgen_link_gate(void* link, void* stream, void* word, uint32_t epoch,  \
                                            char* message, int64_t size) {                         \
    return fluxgen::link_status(static_cast<fluxgen::EmulatedLink*>(link)->gate(                   \
                                    static_cast<CUstream>(stream), word, epoch),                   \
                                "gate", message, size);                                            \
  }                                                                                                \
  FLUXGEN_LINK_EXPORT int fluxgen_link_gather(void* link, uint32_t epoch, double latency_us,       \
                                              fluxgen_arrival const* arrivals, int64_t count,      \
                                              char*, int64_t) {                                    \
    static_cast<fluxgen::EmulatedLink*>(link)->gather(epoch, latency_us, arrivals, count);         \
    return FLUXGEN_OK;                                                                             \
  }                                                                                                \
  FLUXGEN_LINK_EXPORT int fluxgen_link_scatter(void* link, uint32_t epoch, double latency_us,      \
                                               fluxgen_departure const* departures, int64_t count, \
                                               char* message, int64_t size) {                      \
    return fluxgen::link_status(                                                                   \
        static_cast<fluxgen::EmulatedLink*>(link)->scatter(epoch, latency_us, departures, count),  \
        "watch", message, size);                                                                   \
  }                                                                                                \
  FLUXGEN_LINK_EXPORT int fluxgen_link_drain(void* link, double seconds,                           \
                                             fluxgen_link_figures* figures) {                      \
    return static_cast<fluxgen::EmulatedLink*>(link)->drain(seconds, figures) ? 0 : 1;             \
  }                                                                                                \
  FLUXGEN_LINK_EXPORT void fluxgen_link_reset(void* link) {                                        \
    static_cast<fluxgen::EmulatedLink*>(link)->reset();                                            \
  }                                                                                                \
  FLUXGEN_LINK_EXPORT void fluxgen_link_cancel(void* link) {                                       \
    static_cast<fluxgen::EmulatedLink*>(link)->cancel();                                           \
  }

#endif  // FLUXGEN_SUPPORT_EMULATED_LINK_CUH_
