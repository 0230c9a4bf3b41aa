// Arrays and records of Python, seen from native code.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "keyed_session.hpp"
#include "requester.hpp"

namespace kbtp {

// A borrowed C-contiguous buffer.
class Buffer {
  public:
    Buffer(nanobind::handle object, bool writable) {
        if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) throw nanobind::python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    u8* data() const { return static_cast<u8*>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

    template <class T>
    std::span<T> as() const {
        if (size() % sizeof(T) != 0 || reinterpret_cast<std::uintptr_t>(data()) % alignof(T) != 0)
            throw std::invalid_argument("the array is not a whole, aligned number of records: pass the dtypes of fabric.api");
        return {reinterpret_cast<T*>(data()), size() / sizeof(T)};
    }

  private:
    Py_buffer view_{};
};

template <class T>
T* array_of(nanobind::handle array, std::size_t count, const char* what) {
    const Buffer buffer(array, true);  // the caller keeps the arrays alive
    const auto items = buffer.as<T>();
    if (items.size() != count) throw std::invalid_argument(std::string("the array of ") + what + " has another length than it must have");
    return items.data();
}

// n values of one kind: an array of exactly that type, or an int that stands for all.
template <class T>
class Column {
  public:
    // Throws TypeError if `values` is neither.
    explicit Column(nanobind::handle values) {
        if (PyLong_Check(values.ptr())) {
            const unsigned long long value = PyLong_AsUnsignedLongLong(values.ptr());
            if (PyErr_Occurred()) throw nanobind::python_error();
            if (value > std::numeric_limits<T>::max()) throw nanobind::type_error("a number that does not fit");
            all_ = static_cast<T>(value);
            return;
        }
        if (!PyObject_CheckBuffer(values.ptr()) || PyObject_GetBuffer(values.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
            PyErr_Clear();
            throw nanobind::type_error("neither a number nor a contiguous array");
        }
        const std::string_view format = view_.format ? view_.format : "";
        if (view_.ndim != 1 || view_.itemsize != sizeof(T) || format.size() != 1 ||
            std::string_view("HILQ").find(format[0]) == format.npos) {
            PyBuffer_Release(&view_);
            throw nanobind::type_error("an array of another type or shape");
        }
    }
    ~Column() {
        if (view_.obj) PyBuffer_Release(&view_);
    }
    Column(const Column&) = delete;
    Column& operator=(const Column&) = delete;

    bool is_array() const { return view_.obj != nullptr; }
    std::size_t size() const { return static_cast<std::size_t>(view_.len) / sizeof(T); }
    bool fits(std::size_t count) const { return !is_array() || size() == count; }
    T operator[](std::size_t i) const { return is_array() ? static_cast<const T*>(view_.buf)[i] : all_; }

  private:
    Py_buffer view_{};
    T all_ = 0;
};

// Throws TypeError where something is neither a number nor an array of its own type.
inline std::shared_ptr<LoadBatch> load_batch(u32 sequence, nanobind::handle handles, nanobind::handle generations, u32 stag,
                                             nanobind::handle offsets, nanobind::handle lengths, u16 flags) {
    const Column<u64> h(handles), o(offsets);
    const Column<u16> g(generations);
    const Column<u32> l(lengths);
    if (!h.is_array()) throw nanobind::type_error("handles are an array");
    if (h.size() == 0 || !g.fits(h.size()) || !o.fits(h.size()) || !l.fits(h.size()))
        throw std::invalid_argument("a batch of LOADs has as many handles as generations, offsets and lengths, and at least one");
    std::vector<LoadRequest> requests(h.size());
    for (std::size_t i = 0; i < h.size(); ++i) requests[i] = {h[i], o[i], l[i], g[i]};
    return std::make_shared<LoadBatch>(sequence, stag, flags, std::move(requests));
}

// `grant` is a fabric.api.StoreGrant or None.
inline std::optional<StoreGrant> store_grant(nanobind::handle grant) {
    if (grant.is_none()) return {};
    const auto number = [&](const char* name) { return nanobind::cast<u64>(grant.attr(name)); };
    return StoreGrant{number("owner"),
                      number("handle_base"),
                      number("handle_count"),
                      static_cast<u32>(number("inline_bytes")),
                      number("quota"),
                      array_of<u64>(grant.attr("usage"), 1, "usage"),
                      nanobind::cast<std::shared_ptr<KeyedSession>>(grant.attr("keyed"))};
}

}  // namespace kbtp
