// The forms of CRC-32C that need instructions, each null where the build or the CPU has none; used by crc32c.cpp alone.
#pragma once

#include "crc32c.hpp"

namespace kbtp::crc {

constexpr u32 kPolynomial = 0x82F63B78;  // reflected 0x1EDC6F41

// The CRC instruction of x86-64 (SSE 4.2) or Arm, in three streams.
const Crc32c* instruction_form();
// Carry-less multiplication of 256 bits at a time (x86-64 with AVX2 and VPCLMULQDQ).
const Crc32c* folding_form();

}  // namespace kbtp::crc
