// What a CRC does with each line of memory besides, where it has it at hand anyway: nothing, fetching what comes next, or copying.
//
// A CRC goes over memory in pieces. It says `start` at each piece and then `line` for each 64 octets of it, in any order; `last` says
// that what is left after the piece is less than another piece and comes without `start`; `kStaysNear` that lines of one piece should
// come from places near each other. No state is shared between threads.
#pragma once

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "bytes.hpp"

namespace kbtp::crc {

constexpr std::size_t kLine = 64;
constexpr std::size_t kAroundMinimum = 2048;  // shorter copies are better left in the caches

struct Nothing {
    static constexpr bool kStaysNear = false;
    void start(std::size_t, bool) {}
    void line(const u8*, std::size_t) const {}
    void rest(const u8*, std::size_t) const {}
};

// Ask for what comes next, so that it is there in time: memory that nobody has touched lately costs several times its checksum.
struct FetchAhead {
    static constexpr bool kStaysNear = false;
    const u8 *after, *next;  // behind these octets, and elsewhere once they end
    const u8* from = nullptr;
    void start(std::size_t size, bool last) {
        after += size;
        from = last ? next : after;
    }
    void line(const u8*, std::size_t at) const {
        if (from) __builtin_prefetch(from + at);
    }
    void rest(const u8*, std::size_t) const {}
};

// Copy to 16-aligned memory, around the caches: it is not read before it is written, and does not push out what is in use.
struct CopyAround {
    // Stores around the caches to lines that are a multiple of 4 KiB apart get into each other's way: 40 times slower on Zen 3.
    static constexpr bool kStaysNear = true;
    u8* to;
    u8* at_start = nullptr;
    void start(std::size_t size, bool) {
        at_start = to;
        to += size;
    }
    void line(const u8* from, std::size_t at) const {
#if defined(__x86_64__)
        for (std::size_t k = 0; k < kLine; k += 16)
            _mm_stream_si128(reinterpret_cast<__m128i*>(at_start + at + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k)));
#else
        std::memcpy(at_start + at, from, kLine);
#endif
    }
    // What no piece took.
    void rest(const u8* from, std::size_t size) const { std::memcpy(to, from, size); }
    static bool is_worth_it(const void* to, std::size_t size) {
        return size >= kAroundMinimum && reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
    }
};

// The three functions of `Crc32c` out of `over`, a struct whose static `run(crc, data, size, besides)` is the CRC.
template <class Over>
struct Functions {
    static u32 extend(u32 crc, const void* data, std::size_t size) {
        Nothing nothing;
        return Over::run(crc, static_cast<const u8*>(data), size, nothing);
    }
    static u32 extend_cold(u32 crc, const void* data, std::size_t size, const void* next) {
        FetchAhead ahead{static_cast<const u8*>(data), static_cast<const u8*>(next)};
        return Over::run(crc, static_cast<const u8*>(data), size, ahead);
    }
    static u32 copy(u32 crc, void* to, const void* from, std::size_t size) {
        if (!CopyAround::is_worth_it(to, size)) {
            std::memcpy(to, from, size);
            return extend(crc, from, size);
        }
        CopyAround copy{static_cast<u8*>(to)};
        return Over::run(crc, static_cast<const u8*>(from), size, copy);
    }
};

}  // namespace kbtp::crc
