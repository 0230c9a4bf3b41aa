// CRC-32C by the CPU's instruction for it. The instruction has a latency of three cycles and a throughput of one, so three streams run
// side by side and are joined at the end of each stride. Joining needs "advance a CRC over n zero octets", a linear map: one table of
// 4 x 256 for each n.
#include <array>

#include "crc32c_besides.hpp"
#include "crc32c_forms.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kbtp::crc {

#if defined(__x86_64__) || (defined(__aarch64__) && defined(__linux__))
namespace {

// The middle stride is for pages of 4 KiB.
constexpr std::size_t kLong = 4096, kMiddle = 1344, kShort = 256;

using ZeroMap = std::array<std::array<u32, 256>, 4>;

u32 advance_over_zeros(u32 crc, std::size_t n) {
    for (std::size_t i = 0; i < 8 * n; ++i) crc = (crc >> 1) ^ (kPolynomial & (0u - (crc & 1)));
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
constexpr const char* kName = "sse4.2";
bool is_here() { return __builtin_cpu_supports("sse4.2"); }
#else
#define KBTP_CRC_TARGET __attribute__((target("+crc")))
KBTP_CRC_TARGET inline u64 step8(u64 crc, u64 word) { return __crc32cd(static_cast<u32>(crc), word); }
KBTP_CRC_TARGET inline u32 step1(u32 crc, u8 octet) { return __crc32cb(crc, octet); }
constexpr const char* kName = "arm-crc";
bool is_here() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

u64 load8(const u8* at) {
    u64 v;
    std::memcpy(&v, at, 8);
    return v;
}

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

struct ThreeStreams {
    template <class Besides>
    KBTP_CRC_TARGET static u32 run(u32 crc, const u8* p, std::size_t size, Besides& besides) {
        crc = ~crc;
        if constexpr (!Besides::kStaysNear) crc = runs<kLong>(crc, p, size, kOverLong, besides);
        crc = runs<kMiddle>(crc, p, size, kOverMiddle, besides);
        crc = runs<kShort>(crc, p, size, kOverShort, besides);
        besides.rest(p, size);
        u64 wide = crc;
        for (; size >= 8; size -= 8, p += 8) wide = step8(wide, load8(p));
        crc = static_cast<u32>(wide);
        for (; size > 0; --size, ++p) crc = step1(crc, *p);
        return ~crc;
    }
};

}  // namespace

const Crc32c* instruction_form() {
    using F = Functions<ThreeStreams>;
    static constexpr Crc32c kForm{kName, F::extend, F::extend_cold, F::copy};
    return is_here() ? &kForm : nullptr;
}

#else

const Crc32c* instruction_form() { return nullptr; }

#endif

}  // namespace kbtp::crc
