// Big-endian loads and stores, and the small integer names used everywhere in the native code.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kbtp {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

inline u16 swap_to_host(u16 v) { return std::endian::native == std::endian::big ? v : __builtin_bswap16(v); }
inline u32 swap_to_host(u32 v) { return std::endian::native == std::endian::big ? v : __builtin_bswap32(v); }
inline u64 swap_to_host(u64 v) { return std::endian::native == std::endian::big ? v : __builtin_bswap64(v); }

// Read or write one big-endian integer at any alignment.
template <class T>
inline T load_be(const u8* at) {
    T v;
    std::memcpy(&v, at, sizeof v);
    return swap_to_host(v);
}
template <class T>
inline void store_be(u8* at, T v) {
    v = swap_to_host(v);
    std::memcpy(at, &v, sizeof v);
}

}  // namespace kbtp
