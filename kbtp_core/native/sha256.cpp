#include "sha256.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kbtp {
namespace {

constexpr std::array<u32, 8> kInitial{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(16) constexpr std::array<u32, 64> kRound{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<u32, 8>;

void compress_portable(State& state, const u8* block) {
    std::array<u32, 64> w;
    for (std::size_t i = 0; i < 16; ++i) w[i] = load_be<u32>(block + 4 * i);
    for (std::size_t i = 16; i < 64; ++i) {
        const u32 s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
        const u32 s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (std::size_t i = 0; i < 64; ++i) {
        const u32 t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
        const u32 t2 = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g;
        g = f;
        f = e;
        e = d + t1;
        d = c;
        c = b;
        b = a;
        a = t1 + t2;
    }
    const State sum{a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state[i] += sum[i];
}

#if defined(__x86_64__)

// The instructions want the state as (A B E F) and (C D G H), highest word first, and four words of the schedule at a time.
__attribute__((target("sha,sse4.1"))) void compress_sha(State& state, const u8* block) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    const auto* in = reinterpret_cast<const __m128i*>(block);
    const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data()));
    const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data() + 4));
    const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
    const __m128i abef_before = _mm_alignr_epi8(cdab, efgh, 8), cdgh_before = _mm_blend_epi16(efgh, cdab, 0xf0);
    __m128i abef = abef_before, cdgh = cdgh_before;
    __m128i w[4];
    for (int i = 0; i < 4; ++i) w[i] = _mm_shuffle_epi8(_mm_loadu_si128(in + i), swap);
    for (int i = 0; i < 16; ++i) {
        if (i >= 4) {
            // w[t .. t+3] from the sixteen words before: sigma0 of the second to fifth, the tenth to thirteenth, sigma1 of the last two.
            const __m128i older = _mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]);
            const __m128i middle = _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4);
            w[i & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(older, middle), w[(i + 3) & 3]);
        }
        const __m128i sum = _mm_add_epi32(w[i & 3], _mm_load_si128(reinterpret_cast<const __m128i*>(kRound.data()) + i));
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data()), _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data() + 4), _mm_alignr_epi8(dchg, feba, 8));
}

#endif

using Compress = void (*)(State&, const u8*);

Compress fastest() {
#if defined(__x86_64__)
    if (has_sha_instructions()) return compress_sha;
#endif
    return compress_portable;
}

Compress compress = fastest();

}  // namespace

bool has_sha_instructions() {
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;  // not every compiler knows this feature by name
    return __builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
#else
    return false;
#endif
}

void use_portable_sha256(bool portable) { compress = portable ? compress_portable : fastest(); }

Sha256::Sha256() : state_(kInitial), block_{} {}

void Sha256::update(std::span<const u8> data) {
    std::size_t held = total_ % 64;
    total_ += data.size();
    while (!data.empty()) {
        const std::size_t n = std::min(data.size(), 64 - held);
        std::memcpy(block_.data() + held, data.data(), n);
        data = data.subspan(n);
        held = (held + n) % 64;
        if (held == 0) compress(state_, block_.data());
    }
}

std::array<u8, 32> Sha256::digest() const {
    Sha256 last = *this;
    std::array<u8, 72> padding{0x80};
    const std::size_t zeros = (119 - total_ % 64) % 64;
    store_be<u64>(padding.data() + 1 + zeros, total_ * 8);
    last.update({padding.data(), 9 + zeros});
    std::array<u8, 32> out;
    for (std::size_t i = 0; i < 8; ++i) store_be<u32>(out.data() + 4 * i, last.state_[i]);
    return out;
}

}  // namespace kbtp
