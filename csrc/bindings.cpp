// The Python face of PageTable: module wim_ext._C.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "page_table.h"

namespace py = pybind11;

namespace wim {
namespace {

using Work = std::vector<std::pair<SequenceHandle, std::int64_t>>;

std::vector<Append> to_appends(const Work& work) {
  std::vector<Append> appends;
  appends.reserve(work.size());
  for (const auto& [sequence, count] : work) appends.push_back({sequence, count});
  return appends;
}

// A NumPy view of a vector of the reservation, which the array keeps alive.
template <typename T>
py::array_t<T> view(py::handle owner, const std::vector<T>& data, std::vector<py::ssize_t> shape) {
  return py::array_t<T>(std::move(shape), data.data(), owner);
}

template <typename T>
void def_array(py::class_<Reservation>& cls, const char* name,
               std::vector<T> Reservation::* member) {
  cls.def_property_readonly(name, [member](py::object self) {
    const std::vector<T>& data = self.cast<Reservation&>().*member;
    return view(self, data, {static_cast<py::ssize_t>(data.size())});
  });
}

py::array_t<std::int32_t> block_table(py::object self) {
  const auto& reservation = self.cast<Reservation&>();
  return view(self, reservation.block_table,
              {static_cast<py::ssize_t>(reservation.work.size()),
               static_cast<py::ssize_t>(reservation.max_pages)});
}

// C++ exceptions become the package's own; std::invalid_argument is ValueError by itself.
void translate(std::exception_ptr pointer) {
  const auto raise = [](const char* name, auto&&... arguments) {
    const py::object type = py::module_::import("wim_ext.errors").attr(name);
    PyErr_SetObject(type.ptr(), type(arguments...).ptr());
  };
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const CacheFull& error) {
    raise("CacheFull", error.needed, error.free, error.total, error.can_ever_fit);
  } catch (const StaleSequence& error) {
    raise("StaleSequenceError", error.what());
  }
}

void bind_reservation(py::module_& module) {
  py::class_<Reservation> cls(module, "Reservation", py::module_local());
  def_array(cls, "copy_src", &Reservation::copy_src);
  def_array(cls, "copy_dst", &Reservation::copy_dst);
  def_array(cls, "slot_mapping", &Reservation::slot_mapping);
  def_array(cls, "position_ids", &Reservation::position_ids);
  def_array(cls, "cu_seqlens_q", &Reservation::cu_seqlens_q);
  def_array(cls, "seqused_k", &Reservation::seqused_k);
  cls.def_property_readonly("block_table", &block_table);
  cls.def_property_readonly("applied", [](const Reservation& reservation) {
    return reservation.state == Reservation::State::kApplied;
  });
}

void bind_stats(py::module_& module) {
  py::class_<PageTableStats>(module, "PageTableStats", py::module_local())
      .def_readonly("num_pages", &PageTableStats::num_pages)
      .def_readonly("free_pages", &PageTableStats::free_pages)
      .def_readonly("used_pages", &PageTableStats::used_pages)
      .def_readonly("shared_pages", &PageTableStats::shared_pages)
      .def_readonly("high_water_pages", &PageTableStats::high_water_pages)
      .def_readonly("page_copies", &PageTableStats::page_copies)
      .def_readonly("sequences", &PageTableStats::sequences);
}

void bind_page_table(py::module_& module) {
  // The GIL stays held: every operation takes microseconds.
  py::class_<PageTable>(module, "PageTable", py::module_local())
      .def(py::init<std::int64_t, std::int64_t>(), py::arg("num_pages"), py::arg("page_size"))
      .def("create", &PageTable::create)
      .def("fork", &PageTable::fork, py::arg("sequence"), py::arg("length") = py::none())
      .def("rollback", &PageTable::rollback, py::arg("sequence"), py::arg("length"))
      .def("release", &PageTable::release, py::arg("sequence"))
      .def("commit", &PageTable::commit, py::arg("trunk"), py::arg("branch"))
      .def(
          "pages_needed",
          [](PageTable& self, const Work& work) { return self.pages_needed(to_appends(work)); },
          py::arg("work"))
      .def(
          "prepare",
          [](PageTable& self, const Work& work) { return self.prepare(to_appends(work)); },
          py::arg("work"))
      .def("apply", &PageTable::apply, py::arg("reservation"))
      .def("cancel", &PageTable::cancel, py::arg("reservation"))
      .def("alive", &PageTable::alive, py::arg("sequence"))
      .def("length", &PageTable::length, py::arg("sequence"))
      .def("pages", &PageTable::pages, py::arg("sequence"))
      .def("holders", &PageTable::holders, py::arg("page"))
      .def("stats", &PageTable::stats)
      .def("check_integrity", &PageTable::check_integrity)
      .def_property_readonly("newest", &PageTable::newest)
      .def_property_readonly("page_size", &PageTable::page_size);
}

}  // namespace
}  // namespace wim

PYBIND11_MODULE(_C, module) {
  py::register_local_exception_translator(&wim::translate);
  wim::bind_reservation(module);
  wim::bind_stats(module);
  wim::bind_page_table(module);
  module.attr("version") = WIM_VERSION;
  module.attr("source_digest") = WIM_SOURCE_DIGEST;
}
