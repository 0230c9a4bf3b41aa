// CRC-32C (Castagnoli) as MPA uses it: RFC 5044 section 4.4, iwarp-reference section 1.5.
// The fastest form that the CPU has is chosen once, at load time.
#pragma once

#include <span>

#include "bytes.hpp"

namespace kbtp {

// Continue a CRC over `size` more octets. Start with 0; the result of one call is the start of the next
// (initial and final inversion happen inside, so that crc(ab) == extend(crc(a), b)).
u32 crc32c_extend(u32 crc, const void* data, std::size_t size);

// The same over memory that is probably in no cache; meanwhile the `size` octets at `next` (may be null) are fetched ahead.
u32 crc32c_extend_cold(u32 crc, const void* data, std::size_t size, const void* next);

// Copy and continue a CRC over what was copied, in one pass.
u32 crc32c_copy(u32 crc, void* to, const void* from, std::size_t size);
// Before anybody is told of what was copied.
void crc32c_copy_fence();

// The table-driven form, for CPUs without an instruction and to check the others against.
u32 crc32c_portable(u32 crc, const void* data, std::size_t size);

// One way to compute it: the three functions above.
struct Crc32c {
    const char* name;
    u32 (*extend)(u32 crc, const void* data, std::size_t size);
    u32 (*extend_cold)(u32 crc, const void* data, std::size_t size, const void* next);
    u32 (*copy)(u32 crc, void* to, const void* from, std::size_t size);
};

// Those that this CPU can run: "vpclmulqdq", "sse4.2" or "arm-crc" where it has them, and "portable". The first is the one in use.
std::span<const Crc32c> crc32c_implementations();

}  // namespace kbtp
