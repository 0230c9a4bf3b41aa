// What a client of a store needs in bulk: remembered handles, and CRC-32Cs of values.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <span>

#include "crc32c.hpp"
#include "handle_cache.hpp"
#include "module.hpp"

namespace nb = nanobind;

namespace kbtp {
namespace {

template <class T>
class Column {
  public:
    Column(nb::handle array, std::size_t count, bool writable) {
        if (PyObject_GetBuffer(array.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) throw nb::python_error();
        const auto at = reinterpret_cast<std::uintptr_t>(view_.buf);
        if (static_cast<std::size_t>(view_.len) != count * sizeof(T) || at % alignof(T) != 0) {
            PyBuffer_Release(&view_);
            throw std::invalid_argument("the arrays of one call have as many items as each other, and the types that the stub names");
        }
    }
    ~Column() { PyBuffer_Release(&view_); }
    Column(const Column&) = delete;
    Column& operator=(const Column&) = delete;
    T* data() const { return static_cast<T*>(view_.buf); }
    T& operator[](std::size_t i) const { return data()[i]; }

  private:
    Py_buffer view_{};
};

std::size_t ids_in(nb::handle ids) {
    const Py_ssize_t length = PyObject_Size(ids.ptr());
    if (length < 0) throw nb::python_error();
    return static_cast<std::size_t>(length);
}

std::size_t find_all(HandleCache& cache, nb::handle ids, nb::handle handles, nb::handle generations, nb::handle is_known) {
    const std::size_t n = ids_in(ids);
    const Column<const u8> id(ids, 16 * n, false);
    const Column<u64> handle(handles, n, true);
    const Column<u16> generation(generations, n, true);
    const Column<u8> known(is_known, n, true);
    std::size_t count = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const auto found = cache.find(id.data() + 16 * i);
        known[i] = found.has_value();
        handle[i] = found ? found->handle : 0;
        generation[i] = found ? found->generation : 0;
        count += found.has_value();
    }
    return count;
}

void keep_all(HandleCache& cache, nb::handle ids, nb::handle handles, nb::handle generations) {
    const std::size_t n = ids_in(ids);
    const Column<const u8> id(ids, 16 * n, false);
    const Column<const u64> handle(handles, n, false);
    const Column<const u16> generation(generations, n, false);
    for (std::size_t i = 0; i < n; ++i) cache.keep(id.data() + 16 * i, {handle[i], generation[i]});
}

void forget_all(HandleCache& cache, nb::handle ids) {
    const std::size_t n = ids_in(ids);
    const Column<const u8> id(ids, 16 * n, false);
    for (std::size_t i = 0; i < n; ++i) cache.forget(id.data() + 16 * i);
}

// `pieces` ranges of memory make one value each; the caller keeps all of it alive.
void crc32c_each(nb::handle addresses, nb::handle lengths, std::size_t pieces, nb::handle out) {
    const std::size_t n = ids_in(out);
    const Column<const u64> address(addresses, n * pieces, false);
    const Column<const u32> length(lengths, n * pieces, false);
    const Column<u32> crc(out, n, true);
    nb::gil_scoped_release nogil;
    for (std::size_t i = 0; i < n; ++i) {
        crc[i] = 0;
        for (std::size_t at = i * pieces; at < (i + 1) * pieces; ++at)
            crc[i] = crc32c_extend(crc[i], reinterpret_cast<const void*>(address[at]), length[at]);
    }
}

}  // namespace

void bind_client(nb::module_& m) {
    nb::class_<HandleCache>(m, "HandleCache")
        .def(nb::init<u32>(), nb::arg("log2_sets"))
        .def("find", find_all, nb::arg("ids"), nb::arg("handles"), nb::arg("generations"), nb::arg("is_known"),
             "Fill in what is known of each id; returns how many are.")
        .def("keep", keep_all, nb::arg("ids"), nb::arg("handles"), nb::arg("generations"))
        .def("forget", forget_all, nb::arg("ids"))
        .def("clear", &HandleCache::clear);
    m.def("crc32c_each", crc32c_each, nb::arg("addresses"), nb::arg("lengths"), nb::arg("pieces"), nb::arg("out"),
          "CRC-32C of each value, of which every one is in `pieces` pieces of memory.");
}

}  // namespace kbtp
