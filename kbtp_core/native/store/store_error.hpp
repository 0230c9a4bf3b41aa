#pragma once

#include <stdexcept>

namespace kbtp::store {

// A store that can't be opened; the text names it, what is wrong, and the way out.
struct StoreError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace kbtp::store
