// SHA-256 (FIPS 180-4) for names of values: many short inputs that begin alike (store/identity.py).
// Uses the x86 SHA instructions where the CPU has them.
#pragma once

#include <array>
#include <span>

#include "bytes.hpp"

namespace kbtp {

class Sha256 {
  public:
    Sha256();
    void update(std::span<const u8> data);
    std::array<u8, 32> digest() const;  // of what was given so far; more may follow

  private:
    std::array<u32, 8> state_;
    std::array<u8, 64> block_;
    u64 total_ = 0;
};

// Whether this CPU has the instructions for it.
bool has_sha_instructions();
// Leave them alone from now on, to check the portable form; tests only.
void use_portable_sha256(bool portable);

}  // namespace kbtp
