// What a client's caller gives: keys, and where values are.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "bytes.hpp"
#include "sha256.hpp"

namespace kbtp {

// The octets of a `bytes`, or of a `str` in UTF-8; valid while the object is.
inline std::span<const u8> octets_of(nanobind::handle key) {
    if (PyBytes_Check(key.ptr()))
        return {reinterpret_cast<const u8*>(PyBytes_AS_STRING(key.ptr())), static_cast<std::size_t>(PyBytes_GET_SIZE(key.ptr()))};
    Py_ssize_t size = 0;
    const char* text = PyUnicode_Check(key.ptr()) ? PyUnicode_AsUTF8AndSize(key.ptr(), &size) : nullptr;
    if (!text) {
        if (PyErr_Occurred()) throw nanobind::python_error();
        throw nanobind::type_error("a key is bytes or a str");
    }
    return {reinterpret_cast<const u8*>(text), static_cast<std::size_t>(size)};
}

inline Sha256 hash_of(const nanobind::bytes& prefix) {
    Sha256 hash;
    hash.update({static_cast<const u8*>(prefix.data()), prefix.size()});
    return hash;
}

// The first 16 octets of SHA-256(prefix || u64le(len key) || key) for each key, packed; `begun` has taken the prefix.
inline std::vector<u8> ids_of(const Sha256& begun, nanobind::handle keys) {
    const auto sequence = nanobind::steal(PySequence_Fast(keys.ptr(), "keys is a sequence of bytes"));
    if (!sequence.is_valid()) throw nanobind::python_error();
    const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(sequence.ptr()));
    std::vector<u8> ids(16 * count);
    for (std::size_t i = 0; i < count; ++i) {
        const auto key = octets_of(PySequence_Fast_GET_ITEM(sequence.ptr(), static_cast<Py_ssize_t>(i)));
        if (key.empty()) throw std::invalid_argument("a value needs a key that is not empty");
        std::array<u8, 8> length;
        for (std::size_t j = 0; j < 8; ++j) length[j] = static_cast<u8>(u64{key.size()} >> 8 * j);
        Sha256 hash = begun;
        hash.update(length);
        hash.update(key);
        std::memcpy(&ids[16 * i], hash.digest().data(), 16);
    }
    return ids;
}

struct Place {
    u64 address;
    u32 length;
};

// Where the memory of an object is; nothing if it is not contiguous, not writable though it must be, or has 4 GiB or more.
inline std::optional<Place> place_of(nanobind::handle array, bool writable) {
    Py_buffer view;
    if (PyObject_GetBuffer(array.ptr(), &view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
        PyErr_Clear();
        return {};
    }
    const auto size = static_cast<u64>(view.len);
    const Place place{size ? reinterpret_cast<u64>(view.buf) : 0, static_cast<u32>(size)};
    PyBuffer_Release(&view);
    if (size >> 32) return {};
    return place;
}

}  // namespace kbtp
