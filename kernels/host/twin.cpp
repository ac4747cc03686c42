// SPDX-License-Identifier: Apache-2.0
// The Python module mokbench._twin; its types are described in mokbench/_twin.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "copy_rate.h"
#include "gemm_bindings.h"
#include "rank_bindings.h"
#include "shared_memory.h"
#include "workspace.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mokbench {

namespace {

u32 to_u32(const char* name, long long value) {
  if (value < 0 || value > 0xffffffffll) {
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                "; allowed are whole numbers from 0 to 2^32 - 1");
  }
  return static_cast<u32>(value);
}

void bind_config(nb::module_& m) {
  using Int = long long;
  nb::class_<Config>(m, "TwinConfig")
      .def(
          "__init__",
          [](Config* self, Int num_ranks, Int num_experts, Int top_k, Int max_tokens, Int hidden,
             Int intermediate, Int element_bytes, Int block_m, Int ring_tiles,
             Int hidden_ring_tiles, Int pull_workers) {
            const Config config{.num_ranks = to_u32("num_ranks", num_ranks),
                                .num_experts = to_u32("num_experts", num_experts),
                                .top_k = to_u32("top_k", top_k),
                                .max_tokens = to_u32("max_tokens", max_tokens),
                                .hidden = to_u32("hidden", hidden),
                                .intermediate = to_u32("intermediate", intermediate),
                                .element_bytes = to_u32("element_bytes", element_bytes),
                                .block_m = to_u32("block_m", block_m),
                                .ring_tiles = to_u32("ring_tiles", ring_tiles),
                                .hidden_ring_tiles = to_u32("hidden_ring_tiles", hidden_ring_tiles),
                                .pull_workers = to_u32("pull_workers", pull_workers)};
            check_config(config);
            new (self) Config(config);
          },
          nb::kw_only(), "num_ranks"_a, "num_experts"_a, "top_k"_a, "max_tokens"_a, "hidden"_a,
          "intermediate"_a, "element_bytes"_a, "block_m"_a = 64, "ring_tiles"_a = 4,
          "hidden_ring_tiles"_a = 2, "pull_workers"_a = 1)
      .def_ro("num_ranks", &Config::num_ranks)
      .def_ro("num_experts", &Config::num_experts)
      .def_ro("top_k", &Config::top_k)
      .def_ro("max_tokens", &Config::max_tokens)
      .def_ro("hidden", &Config::hidden)
      .def_ro("intermediate", &Config::intermediate)
      .def_ro("element_bytes", &Config::element_bytes)
      .def_ro("block_m", &Config::block_m)
      .def_ro("ring_tiles", &Config::ring_tiles)
      .def_ro("hidden_ring_tiles", &Config::hidden_ring_tiles)
      .def_ro("pull_workers", &Config::pull_workers);
}

template <class Visit>
u64 visit_layout(const std::string& protocol, const Config& config, Visit visit) {
  if (protocol == "mok") return mok_layout(config, visit).segment_bytes;
  if (protocol == "push") return push_layout(config, visit).segment_bytes;
  if (protocol == "signal") return signal_layout(config.num_ranks, visit).segment_bytes;
  throw std::invalid_argument("protocol is '" + protocol + "'; allowed are mok, push and signal");
}

void bind_layout(nb::module_& m) {
  m.def(
      "layout",
      [](const std::string& protocol, const Config& config) {
        nb::dict fields;
        visit_layout(protocol, config, [&](const char* name, Field field) {
          fields[name] = nb::make_tuple(field.offset, field.bytes);
        });
        return fields;
      },
      "protocol"_a, "config"_a);
  m.def(
      "segment_bytes",
      [](const std::string& protocol, const Config& config) {
        return visit_layout(protocol, config, NoVisitor{});
      },
      "protocol"_a, "config"_a);
}

void bind_memory(nb::module_& m) {
  using NoGil = nb::call_guard<nb::gil_scoped_release>;  // reserving pages takes a while
  nb::class_<SharedMemory>(m, "SharedMemory")
      .def(nb::init<const std::string&, u64, bool>(), "name"_a, "size"_a, "create"_a, NoGil())
      .def_prop_ro("size", &SharedMemory::size)
      .def("unlink", &SharedMemory::unlink)
      .def("close", &SharedMemory::close);
  m.def("copy_rate", &copy_rate, "kind"_a, "row_bytes"_a, "num_rows"_a, "repeats"_a, NoGil());
}

nb::dict record_of(const FaultRecord& fault) {
  nb::dict record;
  record["rank"] = fault.rank;
  record["role"] = kRoleNames[fault.role];
  record["site"] = kSiteNames[fault.site];
  record["slot"] = fault.slot;
  record["expected"] = fault.expected;
  record["observed"] = fault.observed;
  record["late_rank"] = fault.late_rank;
  record["epoch"] = fault.epoch;
  record["waited_s"] = static_cast<double>(fault.waited_ns) * 1e-9;
  return record;
}

void bind_errors(nb::module_& m) {
  const nb::object fault = nb::steal(PyErr_NewExceptionWithDoc(
      "mokbench._twin.Fault", "A bounded wait expired.", PyExc_RuntimeError, nullptr));
  m.attr("Fault") = fault;
  nb::register_exception_translator(
      [](const std::exception_ptr& error, void* fault_type) {
        try {
          std::rethrow_exception(error);
        } catch (const FaultError& e) {
          nb::object instance = nb::handle(static_cast<PyObject*>(fault_type))(e.what());
          instance.attr("record") = record_of(e.record);
          PyErr_SetObject(static_cast<PyObject*>(fault_type), instance.ptr());
        } catch (const SystemError& e) {
          PyErr_SetObject(PyExc_OSError, nb::make_tuple(e.error_number, e.what()).ptr());
        }
      },
      fault.ptr());
}

nb::tuple names(const char* const* first, size_t count) {
  nb::list list;
  for (size_t i = 0; i < count; ++i) list.append(first[i]);
  return nb::tuple(list);
}

}  // namespace

}  // namespace mokbench

NB_MODULE(_twin, m) {
  // Callbacks refer to the objects that own a rank; such a cycle is no leak worth a message.
  nb::set_leak_warnings(false);
  m.attr("__version__") = MOKBENCH_VERSION;
  m.attr("ROLES") = mokbench::names(mokbench::kRoleNames, std::size(mokbench::kRoleNames));
  m.attr("SITES") = mokbench::names(mokbench::kSiteNames, std::size(mokbench::kSiteNames));
  mokbench::bind_errors(m);
  mokbench::bind_config(m);
  mokbench::bind_layout(m);
  mokbench::bind_memory(m);
  mokbench::bind_ranks(m);
  mokbench::bind_gemm(m);
}
