// Names of values, many at once (store/identity.py has the rules and does the same one by one).
#include <nanobind/nanobind.h>

#include "module.hpp"
#include "python_values.hpp"
#include "sha256.hpp"

namespace nb = nanobind;

namespace kbtp {
namespace {

nb::bytes object_ids(const nb::bytes& prefix, const nb::handle& keys) {
    const auto ids = ids_of(hash_of(prefix), keys);
    return nb::bytes(ids.data(), ids.size());
}

}  // namespace

void bind_identity(nb::module_& m) {
    m.def("object_ids", object_ids, nb::arg("prefix"), nb::arg("keys"), "16 octets of SHA-256(prefix, u64le(len key), key) for each key.");
    m.def("has_sha_instructions", has_sha_instructions);
    m.def("use_portable_sha256", use_portable_sha256, nb::arg("portable"));
}

}  // namespace kbtp
