#include "crc32c.hpp"

#include <array>

#include "crc32c_forms.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kbtp {
namespace {

// Slicing by eight: table[k][b] is the CRC of octet b followed by k zero octets.
constexpr auto make_tables() {
    std::array<std::array<u32, 256>, 8> t{};
    for (u32 b = 0; b < 256; ++b) {
        u32 crc = b;
        for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ (crc::kPolynomial & (0u - (crc & 1)));
        t[0][b] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (u32 b = 0; b < 256; ++b) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 0xff];
    return t;
}
constexpr auto kTables = make_tables();

constexpr Crc32c kPortable{
    "portable",
    crc32c_portable,
    [](u32 crc, const void* data, std::size_t size, const void*) { return crc32c_portable(crc, data, size); },
    [](u32 crc, void* to, const void* from, std::size_t size) {
        std::memcpy(to, from, size);
        return crc32c_portable(crc, from, size);
    },
};

// Best first, by measurement (docs/bench.md).
struct Forms {
    std::array<Crc32c, 3> list{};
    std::size_t count = 0;
    Forms() {
        for (const Crc32c* form : {crc::folding_form(), crc::instruction_form(), &kPortable})
            if (form) list[count++] = *form;
    }
};
const Forms kForms;
const Crc32c kBest = kForms.list[0];

}  // namespace

u32 crc32c_portable(u32 crc, const void* data, std::size_t size) {
    const u8* p = static_cast<const u8*>(data);
    crc = ~crc;
    for (; size >= 8; size -= 8, p += 8) {
        // Octet by octet, so that it holds on either byte order.
        u32 low = crc ^ (u32{p[0]} | u32{p[1]} << 8 | u32{p[2]} << 16 | u32{p[3]} << 24);
        crc = kTables[7][low & 0xff] ^ kTables[6][low >> 8 & 0xff] ^ kTables[5][low >> 16 & 0xff] ^ kTables[4][low >> 24] ^
              kTables[3][p[4]] ^ kTables[2][p[5]] ^ kTables[1][p[6]] ^ kTables[0][p[7]];
    }
    for (; size > 0; --size, ++p) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xff];
    return ~crc;
}

u32 crc32c_extend(u32 crc, const void* data, std::size_t size) { return kBest.extend(crc, data, size); }

u32 crc32c_extend_cold(u32 crc, const void* data, std::size_t size, const void* next) { return kBest.extend_cold(crc, data, size, next); }

u32 crc32c_copy(u32 crc, void* to, const void* from, std::size_t size) { return kBest.copy(crc, to, from, size); }

void crc32c_copy_fence() {
#if defined(__x86_64__)
    _mm_sfence();  // stores around the caches are not in order with others
#endif
}

std::span<const Crc32c> crc32c_implementations() { return {kForms.list.data(), kForms.count}; }

}  // namespace kbtp
