// The device headers compiled for the host, driven by the tests through a C interface.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "fluxgen/abi.h"
#include "fluxgen/calls.h"
#include "fluxgen/order/flat_tiles.cuh"
#include "fluxgen/order/chunks.cuh"
#include "fluxgen/protocol/flags.cuh"
#include "fluxgen/protocol/packets.cuh"
#include "fluxgen/order/tile_order.cuh"

namespace fluxgen {
uint64_t clock_ns() {
  return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
}
void pause() { std::this_thread::yield(); }
}  // namespace fluxgen

using namespace fluxgen;

extern "C" {

// Walk the whole order, every block of every cluster. Returns the clusters visited, or a negative
// code for the first fault. Padding (m == tiles_m) is written as it comes.
int64_t walk(int op, int world, int rank, int64_t tiles_m, int64_t tiles_n, int cluster_m,
             int panel, int32_t const* groups, int group_count, int32_t* out) {
  TileOrder order;
  if (!make_tile_order(&order, op, world, rank, tiles_m, tiles_n, cluster_m, panel, groups,
                       group_count)) {
    return -1;
  }
  for (uint32_t i = 0; out != nullptr && i < order.total; ++i) {
    for (int block = 0; block < cluster_m; ++block) {
      TileCoord const c = tile_at(order, i, block);
      if (c.m < 0 || c.m > tiles_m || c.n < 0 || c.n >= tiles_n || c.l < 0 || c.l >= world) {
        return -2;
      }
      *out++ = c.m;
      *out++ = c.n;
      *out++ = c.l;
    }
  }
  return order.total;
}

// A flat walk: of every tile (m, n, tokens, first rank, rank behind the last); then of every rank the
// tiles that hold its rows. Returns the tiles.
int64_t walk_flat(int world, int64_t rows, int64_t n, int tile_m, int tile_n, int one_shot,
                  int32_t* out, uint32_t* counts) {
  fluxgen_gemm_args args{};
  args.group.world = world;
  args.rows = rows;
  args.n = n;
  args.sends = one_shot ? FLUXGEN_TO_ALL : FLUXGEN_TO_OWNERS;
  FlatTiles const tiles = make_flat_tiles(args, tile_m, tile_n);
  int32_t const total = tiles.tiles_m * tiles.tiles_n;
  for (int32_t i = 0; out != nullptr && i < total; ++i) {
    flat_tile_at(tiles, i, out, out + 1);
    Ranks const ranks = ranks_of(tiles, out[0]);
    out[2] = flat_tile_tokens(tiles, out[0]);
    out[3] = ranks.first;
    out[4] = ranks.end;
    out += 5;
  }
  for (int rank = 0; counts != nullptr && rank < world; ++rank) {
    counts[rank] = tiles_of(tiles, rank);
  }
  return total;
}

int32_t split_at(int32_t steps, int32_t part, int32_t parts) {
  return split_begin(steps, part, parts);
}

int reached(uint32_t seen, uint32_t expected) { return epoch_reached(seen, expected); }

// Where the chunks of K end; returns how many there are.
int k_chunks(int64_t unit, int64_t extent, int64_t* begins, int64_t* ends) {
  int const count = k_chunk_count(unit, extent);
  for (int chunk = 0; chunk < count && chunk < FLUXGEN_MAX_CHUNKS; ++chunk) {
    begins[chunk] = k_chunk_begin(unit, chunk);
    ends[chunk] = k_chunk_end(unit, chunk, extent);
  }
  return count;
}

int64_t layout(char const* name) {
  static char base[1];
  auto at = [](void* p) { return int64_t(static_cast<char*>(p) - base); };
  if (!std::strcmp(name, "ready")) return at(ready_flag(base, 0));
  if (!std::strcmp(name, "arrived_1_2")) return at(arrived_flag(base, 1, 2));
  if (!std::strcmp(name, "gathered_1_2")) return at(gathered_flag(base, 1, 2));
  if (!std::strcmp(name, "counters")) return at(chunk_counter(base, 0, 0));
  if (!std::strcmp(name, "pulled_1")) return at(pulled_flag(base, 1));
  if (!std::strcmp(name, "filled_1_2")) return at(filled_flag(base, 1, 2));
  if (!std::strcmp(name, "consumed_1")) return at(consumed_flag(base, 1));
  if (!std::strcmp(name, "reduced_1")) return at(reduced_flag(base, 1));
  fluxgen_group group{};
  group.world = 4;
  group.stage_bytes = 3072;
  group.half_bytes = 2048;
  group.gathered_bytes = 1024;
  group.drained_bytes = 4096;
  group.result_bytes = 512;
  group.packet_bytes = 1024;
  group.rank = 3;
  group.peers[3] = base;
  if (!std::strcmp(name, "stage")) return at(stage(group, 3));
  if (!std::strcmp(name, "matrix")) return at(pushed_matrix(group, 3));
  if (!std::strcmp(name, "inbox_epoch1_source2")) return at(inbox_slab(group, 3, 1, 2, 256));
  if (!std::strcmp(name, "drained_source2")) return at(drained_slab(group, 3, 2, 256));
  if (!std::strcmp(name, "outbox_owner1")) return at(outbox_slab(group, 1, 256));
  if (!std::strcmp(name, "result_source2")) return at(result_slab(group, 3, 2, 256));
  if (!std::strcmp(name, "packets_epoch1_source2")) return at(packet_slab(group, 3, 1, 2, 256));
  return -1;
}

// W ranks as threads run `calls` reduce-scatter calls through the real functions: tiles counted by
// two workers a rank, chunks signalled, flags awaited, the inbox read and checked. Starts just
// below the wrap of the epoch. Returns 0, or the number of wrong values read, or -1 on a timeout.
int64_t run_ranks(int world, int calls, int chunks, int tiles, int late_rank, uint32_t first) {
  int64_t const slab = int64_t(chunks) * tiles;  // one word a tile
  int64_t const half = (world * slab * 4 + 1023) / 1024 * 1024;
  std::vector<std::vector<uint32_t>> memory(world);
  for (auto& m : memory) {
    m.assign(size_t(kDataOffset + 2 * half) / 4, 0u);
    for (int64_t i = kReadyOffset / 4; i < kCountersOffset / 4; ++i) m[size_t(i)] = first;
  }
  std::vector<fluxgen_report> reports(world);
  std::atomic<int64_t> wrong{0};
  std::atomic<bool> expired{false};
  auto rank_main = [&](int rank) {
    fluxgen_group group{};
    group.world = world;
    group.rank = rank;
    group.half_bytes = half;
    group.timeout_ns = 20'000'000'000ull;
    group.report = &reports[rank];
    for (int p = 0; p < world; ++p) group.peers[p] = memory[p].data();
    void* mine = memory[rank].data();
    *workspace_word(mine, kEpochOffset) = first;
    std::mt19937 rng(rank * 7919 + 1);
    for (int call = 0; call < calls && !expired; ++call) {
      if (rank == late_rank && call % 16 == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      uint32_t const epoch = current_epoch(mine, 1);
      auto worker = [&](int part) {
        for (int owner = 0; owner < world; ++owner) {
          for (int i = part; i < slab; i += 2) {
            auto* words =
                reinterpret_cast<uint32_t*>(inbox_slab(group, owner, epoch, rank, slab * 4));
            __atomic_store_n(&words[i], epoch * 1000003u + uint32_t(rank * slab + i),
                             __ATOMIC_RELAXED);
            fence_device();
            signal_tile(group, owner, i / tiles, uint32_t(tiles), epoch, false);
          }
        }
      };
      std::thread second(worker, 1);
      worker(0);
      second.join();
      for (int source = 0; source < world; ++source) {
        for (int chunk = 0; chunk < chunks; ++chunk) {
          if (!wait_epoch(arrived_flag(mine, source, chunk), epoch, group, 1, source, chunk)) {
            expired = true;
            return;
          }
          for (int i = chunk * tiles; i < (chunk + 1) * tiles; ++i) {
            auto* words =
                reinterpret_cast<uint32_t*>(inbox_slab(group, rank, epoch, source, slab * 4));
            uint32_t const value = __atomic_load_n(&words[i], __ATOMIC_RELAXED);
            wrong += value != epoch * 1000003u + uint32_t(source * slab + i);
          }
        }
      }
      for (int i = 0; i < world * chunks; ++i) {
        wrong += *chunk_counter(mine, i / chunks, i % chunks) != 0;
      }
      store_relaxed(workspace_word(mine, kEpochOffset), epoch);
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) threads.emplace_back(rank_main, r);
  for (auto& t : threads) t.join();
  return expired ? -1 : wrong.load();
}

// What `source` sends as word `word` of a call: random bits, or bits that look like a mark, or a NaN.
static uint32_t any_bits(uint32_t epoch, int source, int word) {
  switch ((epoch + uint32_t(word)) % 6) {
    case 0:
      return packet_mark(epoch);
    case 1:
      return packet_mark(epoch + 1u);
    case 2:
      return packet_mark(epoch - 2u);
    case 3:
      return 0u;
    case 4:
      return 0x7fc0ffffu + uint32_t(source);
    default:
      return epoch * 2654435761u + uint32_t(source * 1009 + word);
  }
}

// W ranks as threads send each other `eights` times eight elements in packets, in every call another shape: two
// workers a rank write, two take. Every third call is one of flags. Returns the number of wrong words, or -1
// on a timeout.
int64_t run_packets(int world, int calls, int eights, int late_rank, uint32_t first) {
  int64_t const half = (int64_t(world) * eights * 32 + 1023) / 1024 * 1024;
  std::vector<std::vector<uint64_t>> memory(world);
  for (auto& m : memory) {
    m.assign(size_t(kDataOffset + 2 * half) / 8, 0u);
    for (int s = 0; s < world; ++s) *arrived_flag(m.data(), s, 0) = first;
  }
  std::vector<fluxgen_report> reports(world);
  std::atomic<int64_t> wrong{0};
  std::atomic<bool> expired{false};
  auto rank_main = [&](int rank) {
    fluxgen_group group{};
    group.world = world;
    group.rank = rank;
    group.packet_bytes = half;
    group.timeout_ns = 20'000'000'000ull;
    group.report = &reports[rank];
    for (int p = 0; p < world; ++p) group.peers[p] = memory[p].data();
    void* mine = memory[rank].data();
    *workspace_word(mine, kEpochOffset) = first;
    for (int call = 0; call < calls && !expired; ++call) {
      if (rank == late_rank && call % 16 == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      uint32_t const epoch = current_epoch(mine, 1);
      if (call % 3 == 2) {
        for (int p = 0; p < world; ++p)
          store_release_system(arrived_flag(group.peers[p], rank, 0), epoch);
        for (int s = 0; s < world; ++s) {
          expired = expired || !wait_epoch(arrived_flag(mine, s, 0), epoch, group, 1, s, 0);
        }
        store_relaxed(workspace_word(mine, kEpochOffset), epoch);
        continue;
      }
      int const count = 1 + (call * 7) % eights;  // slabs of other calls begin elsewhere
      int64_t const slab = int64_t(count) * 32;
      auto send = [&](int part) {
        for (int i = part; i < count; i += 2) {
          for (int p = 0; p < world; ++p) {
            auto* at =
                reinterpret_cast<uint64_t*>(packet_slab(group, p, epoch, rank, slab) + i * 32);
            for (int two = 0; two < 4; two += 2) {
              store_packets(
                  at + two, make_packet(any_bits(epoch, rank, i * 4 + two), packet_mark(epoch)),
                  make_packet(any_bits(epoch, rank, i * 4 + two + 1), packet_mark(epoch)));
            }
          }
        }
      };
      auto take = [&](int part) {
        for (int i = part; i < count; i += 2) {
          char* at = packet_slab(group, rank, epoch, 0, slab) + i * 32;
          auto* own = reinterpret_cast<uint64_t const*>(at + rank * slab);
          if (!wait_packet(own, epoch, group, 2, rank)) expired = true;
          for (int from = 0; from < world && !expired; from += 3) {
            uint32_t words[3][4];
            int const some = world - from < 3 ? world - from : 3;
            if (!take_packets(at, slab, from, some, epoch, group, 2, words)) expired = true;
            for (int s = 0; s < some; ++s) {
              for (int w = 0; w < 4; ++w)
                wrong += words[s][w] != any_bits(epoch, from + s, i * 4 + w);
            }
          }
        }
      };
      std::thread taker(take, 0), sender(send, 1);
      send(0);
      take(1);
      taker.join();
      sender.join();
      auto const* packets =
          reinterpret_cast<uint64_t const*>(packet_slab(group, rank, epoch, 0, 0));
      for (int64_t i = 0; i < half / 8; ++i)
        wrong += __atomic_load_n(&packets[i], __ATOMIC_RELAXED) != 0u;
      store_relaxed(workspace_word(mine, kEpochOffset), epoch);
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) threads.emplace_back(rank_main, r);
  for (auto& t : threads) t.join();
  return expired ? -1 : wrong.load();
}

// Of three sources' packets one is of an earlier call. Returns whether they were taken all the same.
int64_t expire_packets(uint64_t timeout_ns, fluxgen_report* report) {
  std::vector<std::vector<uint64_t>> memory(3,
                                            std::vector<uint64_t>(size_t(kDataOffset + 2048) / 8));
  fluxgen_group group{};
  group.world = 3;
  group.packet_bytes = 1024;
  group.timeout_ns = timeout_ns;
  group.report = report;
  for (int p = 0; p < 3; ++p) group.peers[p] = memory[p].data();
  char* at = packet_slab(group, 0, 7, 0, 0);
  for (int s = 0; s < 3; ++s) {
    auto* to = reinterpret_cast<uint64_t*>(at + s * 32);
    store_packets(to, make_packet(1, 7), make_packet(7, 7));
    store_packets(to + 2, make_packet(7, 7), make_packet(7, s == 2 ? 5 : 7));
  }
  uint32_t words[3][4];
  return take_packets(at, 32, 0, 3, 7, group, 2, words);
}

// One rank's ag_gemm calls: a thread begins each late, the blocks of its GEMMs take the epoch beside
// it, and end the call. Starts below the wrap. Returns the number of wrong epochs, or -1 on a timeout.
int64_t run_gathers(int calls, int blocks, int gemms, uint32_t first) {
  std::vector<uint32_t> memory(size_t(kDataOffset) / 4, 0u);
  fluxgen_group group{};
  group.world = 1;
  group.timeout_ns = 20'000'000'000ull;
  fluxgen_report report{};
  group.report = &report;
  group.peers[0] = memory.data();
  *workspace_word(memory.data(), kBegunOffset) = first;
  *workspace_word(memory.data(), kMultipliedOffset) = first;
  std::atomic<int64_t> wrong{0};
  for (int call = 1; call <= calls; ++call) {
    uint32_t const epoch = first + uint32_t(call);
    std::thread begin([&] {
      if (call % 3) std::this_thread::sleep_for(std::chrono::microseconds(200));
      store_release_system(workspace_word(memory.data(), kBegunOffset), epoch);
    });
    for (int gemm = 0; gemm < gemms; ++gemm) {
      std::vector<std::thread> threads;
      for (int b = 0; b < blocks; ++b) {
        threads.emplace_back([&] {
          uint32_t const found = gather_epoch(group);
          wrong += found != epoch;
          if (gemm == gemms - 1) end_gather(group, found, uint32_t(blocks));
        });
      }
      for (auto& t : threads) t.join();
    }
    begin.join();
    wrong += *workspace_word(memory.data(), kMultipliedOffset) != epoch;
    wrong += *workspace_word(memory.data(), kGemmTicketOffset) != 0;
  }
  return report.code ? -1 : wrong.load();
}

// A flag that never comes: fills the report, a second wait of the same group returns at once, the
// peers are marked, and whoever looks at the mark is told by whom. Returns the waits satisfied.
int64_t expire(uint64_t timeout_ns, fluxgen_report* report, fluxgen_report* told,
               double* second_wait_seconds, uint32_t* arrived_after) {
  std::vector<std::vector<uint32_t>> memory(4, std::vector<uint32_t>(size_t(kDataOffset) / 4, 0u));
  fluxgen_group group{};
  group.world = 4;
  group.rank = 2;
  group.timeout_ns = timeout_ns;
  group.report = report;
  for (int p = 0; p < 4; ++p) group.peers[p] = memory[p].data();
  *arrived_flag(group.peers[2], 3, 5) = 6;
  // Many threads wait; one of them reports.
  std::vector<std::thread> threads;
  std::atomic<int64_t> satisfied{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back(
        [&] { satisfied += wait_epoch(arrived_flag(group.peers[2], 3, 5), 7, group, 1, 3, 5); });
  }
  for (auto& t : threads) t.join();
  uint64_t const begin = clock_ns();
  satisfied += wait_epoch(arrived_flag(group.peers[2], 1, 0), 7, group, 1, 1, 0);
  *second_wait_seconds = double(clock_ns() - begin) / 1e9;
  report_abort(group, 2, 9);  // must not replace this rank's own report
  signal_tile(group, 3, 0, 1, 7, false);
  *arrived_after = *arrived_flag(group.peers[3], 2, 0);
  fluxgen_group other = group;
  other.rank = 3;
  other.report = told;
  report_abort(other, 2, 9);
  return satisfied;
}

}  // extern "C"
