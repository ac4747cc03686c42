// SPDX-License-Identifier: Apache-2.0
// Python faces of the ranks: they check arrays, keep them alive and let go of the GIL.
#include "rank_bindings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <set>
#include <utility>

#include "array_checks.h"
#include "mok_rank.h"
#include "push_rank.h"
#include "shared_memory.h"
#include "signal_rank.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mokbench {

namespace {

// Keeps a role thread's Python state from its first callback to its end: making one takes 30 us,
// more than many a callback. Threads that Python made have one already.
class PythonThread {
 public:
  PythonThread() {
    if (PyGILState_GetThisThreadState() != nullptr) return;
    gil_ = PyGILState_Ensure();
    state_ = PyEval_SaveThread();
  }
  ~PythonThread() {
    if (state_ == nullptr) return;
    PyEval_RestoreThread(state_);
    PyGILState_Release(gil_);
  }
  PythonThread(const PythonThread&) = delete;

 private:
  PyThreadState* state_ = nullptr;
  PyGILState_STATE gil_{};
};

// A GEMM that Python supplies; called by threads that do not hold the GIL.
struct PythonGemm {
  nb::callable call;
  void operator()(u32 expert, u32 in_row, u32 out_row, u32 rows) const {
    static thread_local const PythonThread thread;
    (void)thread;
    const nb::gil_scoped_acquire gil;
    call(expert, in_row, out_row, rows);
  }
};

// One method at a time: a second thread is told so, and close() cannot pull a rank from under it.
template <class Rank>
class Exclusive {
 public:
  template <class... Args>
  explicit Exclusive(Args&&... args) : rank_(std::make_unique<Rank>(std::forward<Args>(args)...)) {}
  Exclusive(const Exclusive&) = delete;
  Exclusive(Exclusive&&) = delete;

  // Calls body(rank) without the GIL.
  template <class Body>
  auto use(Body body) {
    const Turn turn(busy_);
    if (!rank_) throw std::runtime_error("this rank is closed");
    const nb::gil_scoped_release release;
    return body(*rank_);
  }
  // Role threads end without the GIL, for they take it; the GEMMs they called go with it.
  void close() {
    const Turn turn(busy_);
    if constexpr (requires(Rank& rank) { rank.stop(); }) {
      const nb::gil_scoped_release release;
      if (rank_) rank_->stop();
    }
    rank_.reset();
  }

 private:
  struct Turn {
    std::atomic<bool>& busy;
    explicit Turn(std::atomic<bool>& flag) : busy(flag) {
      if (busy.exchange(true)) {
        throw std::runtime_error("this rank is in use by another thread");
      }
    }
    ~Turn() { busy = false; }
  };

  std::atomic<bool> busy_ = false;
  std::unique_ptr<Rank> rank_;
};

struct PyMokRank;

// All that were not closed; guarded by the GIL. At exit their threads must end before Python does.
std::set<PyMokRank*>& open_mok_ranks() {
  static std::set<PyMokRank*> ranks;
  return ranks;
}

struct PyMokRank {
  Config config;
  OutputArray x_ring, hidden_ring, y_tile;  // kept alive for the role threads
  Exclusive<MokRank> rank;

  PyMokRank(const SharedMemory& memory, const Config& c, u32 rank_idx, nb::callable gemm1,
            nb::callable gemm2, OutputArray x, OutputArray hidden, OutputArray y,
            const RankOptions& options)
      : config(c),
        x_ring(std::move(x)),
        hidden_ring(std::move(hidden)),
        y_tile(std::move(y)),
        rank(memory.mapping(), config, rank_idx, checked_buffers(), PythonGemm{std::move(gemm1)},
             PythonGemm{std::move(gemm2)}, options) {
    open_mok_ranks().insert(this);
  }
  ~PyMokRank() { close(); }

  void close() {
    rank.close();
    open_mok_ranks().erase(this);
  }

  MokRank::Buffers checked_buffers() const {
    checked_rows("hidden_ring", hidden_ring, u64{config.hidden_ring_tiles} * config.block_m,
                 config.intermediate, config.element_bytes);
    return {checked_rows("x_ring", x_ring, u64{config.ring_tiles} * config.block_m, config.hidden,
                         config.element_bytes),
            checked_rows("y_tile", y_tile, config.block_m, config.hidden, config.element_bytes)};
  }
};

struct PyPushRank {
  Config config;
  OutputArray x_rows, hidden_tile, y_rows;
  Exclusive<PushRank> rank;

  PyPushRank(const SharedMemory& memory, const Config& c, u32 rank_idx, nb::callable gemm1,
             nb::callable gemm2, OutputArray x, OutputArray hidden, OutputArray y,
             const RankOptions& options)
      : config(c),
        x_rows(std::move(x)),
        hidden_tile(std::move(hidden)),
        y_rows(std::move(y)),
        rank(memory.mapping(), config, rank_idx, checked_buffers(), PythonGemm{std::move(gemm1)},
             PythonGemm{std::move(gemm2)}, options) {}

  PushRank::Buffers checked_buffers() const {
    checked_rows("hidden_tile", hidden_tile, config.block_m, config.intermediate,
                 config.element_bytes);
    const u64 rows = push_capacity_rows(config);
    return {checked_rows("x_rows", x_rows, rows, config.hidden, config.element_bytes),
            checked_rows("y_rows", y_rows, rows, config.hidden, config.element_bytes)};
  }

  char* checked_y(const OutputArray& y, u64 tokens) const {
    return checked_rows("y", y, tokens, config.hidden, config.element_bytes);
  }
};

template <class PyRank>
void construct(PyRank* self, const SharedMemory& memory, const Config& config, u32 rank,
               nb::callable gemm1, nb::callable gemm2, OutputArray x, OutputArray hidden,
               OutputArray y, double wait_bound_s, u32 initial_epoch, double max_delay_us,
               u64 delay_seed) {
  new (self) PyRank(memory, config, rank, std::move(gemm1), std::move(gemm2), std::move(x),
                    std::move(hidden), std::move(y),
                    RankOptions{wait_bound_s, initial_epoch, max_delay_us, delay_seed});
}

void add_stats(nb::dict& into, const std::string& name, const CopyStats& stats) {
  into[nb::str((name + "_bytes").c_str())] = static_cast<double>(stats.bytes);
  into[nb::str((name + "_copy_s").c_str())] = static_cast<double>(stats.ns) * 1e-9;
}

void bind_mok(nb::module_& m) {
  nb::class_<PyMokRank>(m, "MokRank")
      .def("__init__", &construct<PyMokRank>, "memory"_a, "config"_a, "rank"_a, "gemm1"_a,
           "gemm2"_a, "x_ring"_a.noconvert(), "hidden_ring"_a.noconvert(), "y_tile"_a.noconvert(),
           "wait_bound_s"_a, "initial_epoch"_a = 0, "max_delay_us"_a = 0.0, "delay_seed"_a = 0)
      .def(
          "run",
          [](PyMokRank& self, const InputArray& x, const InputArray& topk_idx,
             const InputArray& topk_weights, const OutputArray& y) {
            const TokenBatch batch = checked_batch(self.config, x, topk_idx, topk_weights);
            char* out = checked_rows("y", y, batch.num_tokens, self.config.hidden,
                                     self.config.element_bytes);
            self.rank.use([&](MokRank& rank) { rank.run(batch, out); });
          },
          "x"_a.noconvert(), "topk_idx"_a.noconvert(), "topk_weights"_a.noconvert(),
          "y"_a.noconvert())
      .def("stats",
           [](PyMokRank& self) {
             const auto stats = self.rank.use([](MokRank& rank) { return rank.take_stats(); });
             nb::dict result;
             add_stats(result, "pull", stats.pull);
             add_stats(result, "push", stats.push);
             return result;
           })
      .def("reset", [](PyMokRank& self) { self.rank.use([](MokRank& rank) { rank.reset(); }); })
      .def("close", &PyMokRank::close);
  const auto close_all = [] {
    const auto ranks = open_mok_ranks();
    for (PyMokRank* rank : ranks) {
      try {
        rank->close();
      } catch (const std::runtime_error&) {  // a daemon thread is still in its run()
      }
    }
  };
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(close_all));
}

void bind_push(nb::module_& m) {
  const auto dispatch = [](PyPushRank& self, const InputArray& x, const InputArray& topk_idx,
                           const InputArray& topk_weights) {
    const TokenBatch batch = checked_batch(self.config, x, topk_idx, topk_weights);
    self.rank.use([&](PushRank& rank) { rank.dispatch(batch); });
  };
  const auto run = [](PyPushRank& self, const InputArray& x, const InputArray& topk_idx,
                      const InputArray& topk_weights, const OutputArray& y) {
    const TokenBatch batch = checked_batch(self.config, x, topk_idx, topk_weights);
    char* out = self.checked_y(y, batch.num_tokens);
    self.rank.use([&](PushRank& rank) {
      rank.dispatch(batch);
      rank.compute();
      rank.combine(out, batch.num_tokens);
    });
  };
  nb::class_<PyPushRank>(m, "PushRank")
      .def("__init__", &construct<PyPushRank>, "memory"_a, "config"_a, "rank"_a, "gemm1"_a,
           "gemm2"_a, "x_rows"_a.noconvert(), "hidden_tile"_a.noconvert(), "y_rows"_a.noconvert(),
           "wait_bound_s"_a, "initial_epoch"_a = 0, "max_delay_us"_a = 0.0, "delay_seed"_a = 0)
      .def_static("capacity_rows", &push_capacity_rows, "config"_a)
      .def("dispatch", dispatch, "x"_a.noconvert(), "topk_idx"_a.noconvert(),
           "topk_weights"_a.noconvert())
      .def("compute", [](PyPushRank& self) { self.rank.use([](PushRank& r) { r.compute(); }); })
      .def(
          "combine",
          [](PyPushRank& self, const OutputArray& y) {
            const u64 num_rows = y.ndim() == 0 ? 0 : y.shape(0);
            char* out = self.checked_y(y, num_rows);
            self.rank.use([&](PushRank& rank) { rank.combine(out, num_rows); });
          },
          "y"_a.noconvert())
      .def("run", run, "x"_a.noconvert(), "topk_idx"_a.noconvert(), "topk_weights"_a.noconvert(),
           "y"_a.noconvert())
      .def("stats",
           [](PyPushRank& self) {
             const auto stats = self.rank.use([](PushRank& rank) { return rank.take_stats(); });
             nb::dict result;
             add_stats(result, "pull", CopyStats{});
             add_stats(result, "push", stats.push);
             add_stats(result, "sort", stats.sort);
             return result;
           })
      .def("reset", [](PyPushRank& self) { self.rank.use([](PushRank& r) { r.reset(); }); })
      .def("close", [](PyPushRank& self) { self.rank.close(); });
}

using PySignalRank = Exclusive<SignalRank>;

Dispatch dispatch_of(const std::string& protocol) {
  if (protocol == "pull") return Dispatch::kPull;
  if (protocol == "push") return Dispatch::kPush;
  throw std::invalid_argument("protocol is '" + protocol + "'; allowed are pull and push");
}

void bind_signal(nb::module_& m) {
  nb::class_<PySignalRank>(m, "SignalRank")
      .def(
          "__init__",
          [](PySignalRank* self, const SharedMemory& memory, u32 num_ranks, u32 rank,
             double wait_bound_s, u32 initial_epoch, double max_delay_us, u64 delay_seed) {
            new (self)
                PySignalRank(memory.mapping(), num_ranks, rank,
                             RankOptions{wait_bound_s, initial_epoch, max_delay_us, delay_seed});
          },
          "memory"_a, "num_ranks"_a, "rank"_a, "wait_bound_s"_a, "initial_epoch"_a = 0,
          "max_delay_us"_a = 0.0, "delay_seed"_a = 0)
      .def("align", [](PySignalRank& self) { self.use([](SignalRank& rank) { rank.align(); }); })
      .def(
          "hop",
          [](PySignalRank& self, u32 rounds) {
            return self.use([=](SignalRank& rank) { return rank.hop(rounds); });
          },
          "rounds"_a)
      .def(
          "local_hop",
          [](PySignalRank& self, u32 rounds) {
            return self.use([=](SignalRank& rank) { return rank.local_hop(rounds); });
          },
          "rounds"_a)
      .def(
          "entry",
          [](PySignalRank& self, u32 rounds, u32 ranks) {
            return self.use([=](SignalRank& rank) { return rank.entry(rounds, ranks); });
          },
          "rounds"_a, "ranks"_a)
      .def(
          "ready",
          [](PySignalRank& self, const std::string& protocol, u32 rounds, u32 ranks) {
            const Dispatch dispatch = dispatch_of(protocol);
            auto result =
                self.use([=](SignalRank& rank) { return rank.ready(dispatch, rounds, ranks); });
            return std::make_pair(std::move(result.ready_us), std::move(result.after_arrival_us));
          },
          "protocol"_a, "rounds"_a, "ranks"_a)
      .def("reset", [](PySignalRank& self) { self.use([](SignalRank& rank) { rank.reset(); }); })
      .def("close", [](PySignalRank& self) { self.close(); });
}

}  // namespace

void bind_ranks(nb::module_& m) {
  bind_mok(m);
  bind_push(m);
  bind_signal(m);
}

}  // namespace mokbench
