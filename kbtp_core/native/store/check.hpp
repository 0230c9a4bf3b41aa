// Invariants that hold in every build: where one does not, the process ends before it can serve wrong octets.
#pragma once

#include <cstdio>
#include <cstdlib>

#define KBTP_CHECK(condition)                                                                        \
    do {                                                                                             \
        if (!(condition)) [[unlikely]] {                                                             \
            std::fprintf(stderr, "%s:%d: this does not hold: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                                            \
        }                                                                                            \
    } while (false)
