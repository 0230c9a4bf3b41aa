// CRC-32C by carry-less multiplication, 256 bits at a time (AVX2 with VPCLMULQDQ).
//
// Octets are a polynomial over GF(2) and their CRC is its remainder modulo P. Folding replaces 128 bits by 128 others that are
// congruent to them times x^(8n), so that they can be added (xor) to what stands n octets further on:
//     (L x^64 + H) x^(8n)  =  L (x^(8n+64) mod P) + H (x^(8n) mod P)      (mod P)
// Four registers of 32 octets go over the memory side by side in steps of 128; in the end they are folded into one of 16 octets, and
// the CRC instruction takes those and what is left. In the reflected order of bits a product stands one bit too low, so the
// multipliers are x^(8n+63) and x^(8n-1), in the upper half of 64 bits. Works on any alignment.
#include "crc32c_besides.hpp"
#include "crc32c_forms.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kbtp::crc {

#if defined(__x86_64__)
namespace {

#define KBTP_FOLD_TARGET __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq")))

constexpr std::size_t kWide = 32, kRegisters = 4, kStep = kRegisters * kWide;
constexpr std::size_t kPiece = 4096;  // what is fetched ahead at a time: a page

// x^n mod P, reflected, in the upper half.
constexpr u64 power(std::size_t n) {
    u32 value = 0x80000000;  // x^0
    for (std::size_t i = 0; i < n; ++i) value = (value >> 1) ^ (kPolynomial & (0u - (value & 1)));
    return u64{value} << 32;
}

// The multipliers that move 128 bits over n octets.
template <std::size_t n>
struct Over {
    static constexpr u64 low = power(8 * n + 63), high = power(8 * n - 1);
};

template <std::size_t n>
KBTP_FOLD_TARGET inline __m256i fold_wide(__m256i value, __m256i next) {
    const __m256i by = _mm256_set_epi64x(static_cast<long long>(Over<n>::high), static_cast<long long>(Over<n>::low),
                                         static_cast<long long>(Over<n>::high), static_cast<long long>(Over<n>::low));
    const __m256i low = _mm256_clmulepi64_epi128(value, by, 0x00), high = _mm256_clmulepi64_epi128(value, by, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

KBTP_FOLD_TARGET inline __m128i fold(__m128i value, __m128i next) {
    const __m128i by = _mm_set_epi64x(static_cast<long long>(Over<16>::high), static_cast<long long>(Over<16>::low));
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(value, by, 0x00), _mm_clmulepi64_si128(value, by, 0x11)), next);
}

KBTP_FOLD_TARGET inline __m256i wide_at(const u8* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// The registers, and the memory that they go over.
template <class Besides>
struct Folding {
    __m256i r[kRegisters];

    KBTP_FOLD_TARGET void begin(u32 crc, const u8* p) {
        for (std::size_t i = 0; i < kRegisters; ++i) r[i] = wide_at(p + i * kWide);
        r[0] = _mm256_xor_si256(r[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(crc))));
    }

    // The octets [from, to) of the piece at `p`; both are multiples of the step.
    KBTP_FOLD_TARGET void over(const u8* p, std::size_t from, std::size_t to, const Besides& besides) {
        __m256i a = r[0], b = r[1], c = r[2], d = r[3];
        for (std::size_t at = from; at < to; at += kStep) {
            besides.line(p + at, at);
            besides.line(p + at + kLine, at + kLine);
            a = fold_wide<kStep>(a, wide_at(p + at));
            b = fold_wide<kStep>(b, wide_at(p + at + kWide));
            c = fold_wide<kStep>(c, wide_at(p + at + 2 * kWide));
            d = fold_wide<kStep>(d, wide_at(p + at + 3 * kWide));
        }
        r[0] = a, r[1] = b, r[2] = c, r[3] = d;
    }

    // Sixteen octets that are congruent to all so far and the whole sixteens of what is left; moves `p` and `size` on.
    KBTP_FOLD_TARGET __m128i end(const u8*& p, std::size_t& size) const {
        __m256i all = r[0];
        for (std::size_t i = 1; i < kRegisters; ++i) all = fold_wide<kWide>(all, r[i]);
        for (; size >= kWide; size -= kWide, p += kWide) all = fold_wide<kWide>(all, wide_at(p));
        __m128i last = fold(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
        if (size >= 16) {
            last = fold(last, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
            p += 16;
            size -= 16;
        }
        return last;
    }
};

struct Fold {
    template <class Besides>
    KBTP_FOLD_TARGET static u32 run(u32 crc, const u8* p, std::size_t size, Besides& besides) {
        crc = ~crc;
        if (size >= kStep) {
            Folding<Besides> folding;
            folding.begin(crc, p);
            for (bool is_first = true; size >= kStep; is_first = false) {
                const std::size_t piece = size < kPiece ? size / kStep * kStep : kPiece;
                besides.start(piece, size < piece + kStep);
                if (is_first) {
                    besides.line(p, 0);
                    besides.line(p + kLine, kLine);
                }
                folding.over(p, is_first ? kStep : 0, piece, besides);
                p += piece;
                size -= piece;
            }
            besides.rest(p, size);
            const __m128i last = folding.end(p, size);
            const u64 low = static_cast<u64>(_mm_extract_epi64(last, 0)), high = static_cast<u64>(_mm_extract_epi64(last, 1));
            crc = static_cast<u32>(_mm_crc32_u64(_mm_crc32_u64(0, low), high));
        } else {
            besides.rest(p, size);
        }
        u64 wide = crc;
        for (; size >= 8; size -= 8, p += 8) {
            u64 word;
            std::memcpy(&word, p, 8);
            wide = _mm_crc32_u64(wide, word);
        }
        crc = static_cast<u32>(wide);
        for (; size > 0; --size, ++p) crc = _mm_crc32_u8(crc, *p);
        return ~crc;
    }
};

}  // namespace

const Crc32c* folding_form() {
    using F = Functions<Fold>;
    static constexpr Crc32c kForm{"vpclmulqdq", F::extend, F::extend_cold, F::copy};
    const bool is_here = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul") &&
                         __builtin_cpu_supports("sse4.2");
    return is_here ? &kForm : nullptr;
}

#else

const Crc32c* folding_form() { return nullptr; }

#endif

}  // namespace kbtp::crc
