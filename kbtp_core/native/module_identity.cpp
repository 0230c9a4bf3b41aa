// Names of values, many at once (store/identity.py has the rules and does the same one by one).
#include <nanobind/nanobind.h>

#include <cstring>

#include "module.hpp"
#include "sha256.hpp"

namespace nb = nanobind;

namespace kbtp {
namespace {

// The octets of a `bytes`, or of a `str` in UTF-8; valid while the object is.
std::span<const u8> octets_of(nb::handle key) {
    if (PyBytes_Check(key.ptr()))
        return {reinterpret_cast<const u8*>(PyBytes_AS_STRING(key.ptr())), static_cast<std::size_t>(PyBytes_GET_SIZE(key.ptr()))};
    Py_ssize_t size = 0;
    const char* text = PyUnicode_Check(key.ptr()) ? PyUnicode_AsUTF8AndSize(key.ptr(), &size) : nullptr;
    if (!text) {
        if (PyErr_Occurred()) throw nb::python_error();
        throw nb::type_error("a key is bytes or a str");
    }
    return {reinterpret_cast<const u8*>(text), static_cast<std::size_t>(size)};
}

// Octets of SHA-256(prefix || u64le(len key) || key) for each key, packed.
nb::bytes object_ids(const nb::bytes& prefix, const nb::handle& keys) {
    Sha256 begun;
    begun.update({static_cast<const u8*>(prefix.data()), prefix.size()});
    const nb::object sequence = nb::steal(PySequence_Fast(keys.ptr(), "keys is a sequence of bytes"));
    if (!sequence.is_valid()) throw nb::python_error();
    const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(sequence.ptr()));
    const nb::bytes out = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(16 * count)));
    auto* at = const_cast<u8*>(static_cast<const u8*>(out.data()));  // nobody has seen it yet
    for (std::size_t i = 0; i < count; ++i, at += 16) {
        const auto key = octets_of(PySequence_Fast_GET_ITEM(sequence.ptr(), static_cast<Py_ssize_t>(i)));
        if (key.empty()) throw std::invalid_argument("a value needs a key that is not empty");
        std::array<u8, 8> length;
        for (std::size_t j = 0; j < 8; ++j) length[j] = static_cast<u8>(u64{key.size()} >> 8 * j);
        Sha256 hash = begun;
        hash.update(length);
        hash.update(key);
        std::memcpy(at, hash.digest().data(), 16);
    }
    return out;
}

}  // namespace

void bind_identity(nb::module_& m) {
    m.def("object_ids", object_ids, nb::arg("prefix"), nb::arg("keys"), "16 octets of SHA-256(prefix, u64le(len key), key) for each key.");
    m.def("has_sha_instructions", has_sha_instructions);
    m.def("use_portable_sha256", use_portable_sha256, nb::arg("portable"));
}

}  // namespace kbtp
