// CRC-32C (Castagnoli) as MPA uses it: RFC 5044 section 4.4, iwarp-reference section 1.5.
// The fastest form that the CPU has is chosen once, at load time.
#pragma once

#include "bytes.hpp"

namespace kbtp {

// Continue a CRC over `size` more octets. Start with 0; the result of one call is the start of the next
// (initial and final inversion happen inside, so that crc(ab) == extend(crc(a), b)).
u32 crc32c_extend(u32 crc, const void* data, std::size_t size);

// The table-driven form, for CPUs without an instruction and to check the other against.
u32 crc32c_portable(u32 crc, const void* data, std::size_t size);

// "sse4.2", "arm-crc" or "portable".
const char* crc32c_implementation();

}  // namespace kbtp
