// The parts of the module `_native`: each binds what one file is about.
#pragma once

#include <nanobind/nanobind.h>

namespace kbtp {

void bind_calls(nanobind::module_& m);
void bind_client(nanobind::module_& m);
void bind_identity(nanobind::module_& m);
void bind_keyed(nanobind::module_& m);
void bind_slab(nanobind::module_& m);  // store/module_slab.cpp
void bind_messages(nanobind::module_& m);

}  // namespace kbtp
