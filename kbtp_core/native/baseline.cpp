#include <nanobind/nanobind.h>

NB_MODULE(_baseline, m) { m.doc() = "Plain loops that `kbtp bench` compares against."; }
