#include "crc32c.hpp"

#include <array>
#include <type_traits>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kbtp {
namespace {

constexpr std::size_t kAroundMinimum = 2048;  // shorter copies are better left in the caches
constexpr u32 kPolynomial = 0x82F63B78;       // reflected 0x1EDC6F41

// Slicing by eight: table[k][b] is the CRC of octet b followed by k zero octets.
constexpr auto make_tables() {
    std::array<std::array<u32, 256>, 8> t{};
    for (u32 b = 0; b < 256; ++b) {
        u32 crc = b;
        for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ (kPolynomial & (0u - (crc & 1)));
        t[0][b] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (u32 b = 0; b < 256; ++b) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 0xff];
    return t;
}
constexpr auto kTables = make_tables();

#if defined(__x86_64__) || (defined(__aarch64__) && defined(__linux__))

// The instruction has a latency of three cycles and a throughput of one, so three streams run side by side and are joined
// at the end of each stride. Joining needs "advance a CRC over n zero octets", a linear map: one table of 4 x 256 for each n.
// The middle stride is for pages of 4 KiB.
constexpr std::size_t kLong = 4096, kMiddle = 1344, kShort = 256, kLine = 64;

using ZeroMap = std::array<std::array<u32, 256>, 4>;

u32 advance_over_zeros(u32 crc, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) crc = (crc >> 8) ^ kTables[0][crc & 0xff];
    return crc;
}

ZeroMap make_zero_map(std::size_t n) {
    ZeroMap map{};
    std::array<u32, 32> image{};
    for (std::size_t bit = 0; bit < 32; ++bit) image[bit] = advance_over_zeros(u32{1} << bit, n);
    for (std::size_t octet = 0; octet < 4; ++octet)
        for (u32 value = 0; value < 256; ++value)
            for (std::size_t bit = 0; bit < 8; ++bit)
                if (value >> bit & 1) map[octet][value] ^= image[octet * 8 + bit];
    return map;
}

u32 apply(const ZeroMap& map, u32 crc) {
    return map[0][crc & 0xff] ^ map[1][crc >> 8 & 0xff] ^ map[2][crc >> 16 & 0xff] ^ map[3][crc >> 24];
}

#if defined(__x86_64__)
#define KBTP_CRC_TARGET __attribute__((target("sse4.2")))
KBTP_CRC_TARGET inline u64 step8(u64 crc, u64 word) { return _mm_crc32_u64(crc, word); }
KBTP_CRC_TARGET inline u32 step1(u32 crc, u8 octet) { return _mm_crc32_u8(crc, octet); }
#else
#define KBTP_CRC_TARGET __attribute__((target("+crc")))
KBTP_CRC_TARGET inline u64 step8(u64 crc, u64 word) { return __crc32cd(static_cast<u32>(crc), word); }
KBTP_CRC_TARGET inline u32 step1(u32 crc, u8 octet) { return __crc32cb(crc, octet); }
#endif

u64 load8(const u8* at) {
    u64 v;
    std::memcpy(&v, at, 8);
    return v;
}

// What is done with each line of memory besides, where it is at hand anyway. `last` says that no octets follow the three runs.
struct Nothing {
    void start(std::size_t, bool) {}
    void line(const u8*, std::size_t) const {}
};

// Ask for what comes next, so that it is there in time: memory that nobody has touched lately costs several times its checksum.
struct FetchAhead {
    const u8 *after, *next;  // behind these octets, and elsewhere once they end
    const u8* from = nullptr;
    void start(std::size_t size, bool last) {
        after += size;
        from = last ? next : after;
    }
    void line(const u8*, std::size_t at) const {
        if (from) __builtin_prefetch(from + at);
    }
};

// Copy to 16-aligned memory, around the caches: it is not read before it is written, and does not push out what is in use.
struct CopyAround {
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
};

// Three runs of `stride` octets at p, p + stride and p + 2 * stride, joined.
template <std::size_t stride, class Besides>
KBTP_CRC_TARGET u32 three_way(u32 crc, const u8* p, const ZeroMap& over_stride, const Besides& besides) {
    static_assert(stride % kLine == 0);
    u64 a = crc, b = 0, c = 0;
    for (std::size_t line = 0; line < stride; line += kLine) {
        for (std::size_t run = 0; run < 3 * stride; run += stride) besides.line(p + run + line, run + line);
        for (std::size_t i = line; i < line + kLine; i += 8) {
            a = step8(a, load8(p + i));
            b = step8(b, load8(p + stride + i));
            c = step8(c, load8(p + 2 * stride + i));
        }
    }
    u32 joined = apply(over_stride, static_cast<u32>(a)) ^ static_cast<u32>(b);
    return apply(over_stride, joined) ^ static_cast<u32>(c);
}

const ZeroMap kOverLong = make_zero_map(kLong), kOverMiddle = make_zero_map(kMiddle), kOverShort = make_zero_map(kShort);

// The CRC (inverted) of as much as three-way runs can take; moves `p` and `size` on.
template <std::size_t stride, class Besides>
KBTP_CRC_TARGET u32 runs(u32 crc, const u8*& p, std::size_t& size, const ZeroMap& over_stride, Besides& besides) {
    for (; size >= 3 * stride; size -= 3 * stride, p += 3 * stride) {
        besides.start(3 * stride, size < 3 * stride + 3 * kShort);
        crc = three_way<stride>(crc, p, over_stride, besides);
    }
    return crc;
}

template <class Besides>
KBTP_CRC_TARGET u32 crc32c_instruction(u32 crc, const u8* p, std::size_t size, Besides& besides) {
    crc = ~crc;
    crc = runs<kLong>(crc, p, size, kOverLong, besides);
    crc = runs<kMiddle>(crc, p, size, kOverMiddle, besides);
    crc = runs<kShort>(crc, p, size, kOverShort, besides);
    if constexpr (std::is_same_v<Besides, CopyAround>) std::memcpy(besides.to, p, size);
    u64 wide = crc;
    for (; size >= 8; size -= 8, p += 8) wide = step8(wide, load8(p));
    crc = static_cast<u32>(wide);
    for (; size > 0; --size, ++p) crc = step1(crc, *p);
    return ~crc;
}

bool cpu_has_instruction() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2");
#else
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

const bool kHasInstruction = cpu_has_instruction();

#endif

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

#if defined(__x86_64__) || (defined(__aarch64__) && defined(__linux__))

u32 crc32c_extend(u32 crc, const void* data, std::size_t size) {
    if (!kHasInstruction) return crc32c_portable(crc, data, size);
    Nothing nothing;
    return crc32c_instruction(crc, static_cast<const u8*>(data), size, nothing);
}

u32 crc32c_extend_cold(u32 crc, const void* data, std::size_t size, const void* next) {
    if (!kHasInstruction) return crc32c_portable(crc, data, size);
    FetchAhead ahead{static_cast<const u8*>(data), static_cast<const u8*>(next)};
    return crc32c_instruction(crc, static_cast<const u8*>(data), size, ahead);
}

u32 crc32c_copy(u32 crc, void* to, const void* from, std::size_t size) {
    if (!kHasInstruction || size < kAroundMinimum || reinterpret_cast<std::uintptr_t>(to) % 16 != 0) {
        std::memcpy(to, from, size);
        return crc32c_extend(crc, from, size);
    }
    CopyAround copy{static_cast<u8*>(to)};
    crc = crc32c_instruction(crc, static_cast<const u8*>(from), size, copy);
    return crc;
}

void crc32c_copy_fence() {
#if defined(__x86_64__)
    _mm_sfence();  // stores around the caches are not in order with others
#endif
}

const char* crc32c_implementation() {
    if (!kHasInstruction) return "portable";
#if defined(__x86_64__)
    return "sse4.2";
#else
    return "arm-crc";
#endif
}

#else

u32 crc32c_extend(u32 crc, const void* data, std::size_t size) { return crc32c_portable(crc, data, size); }
u32 crc32c_extend_cold(u32 crc, const void* data, std::size_t size, const void*) { return crc32c_portable(crc, data, size); }
u32 crc32c_copy(u32 crc, void* to, const void* from, std::size_t size) {
    std::memcpy(to, from, size);
    return crc32c_portable(crc, from, size);
}
void crc32c_copy_fence() {}
const char* crc32c_implementation() { return "portable"; }

#endif

}  // namespace kbtp
