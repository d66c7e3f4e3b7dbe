// The instructions of AVX-512 and AMX that `kernels.cpp` uses, in plain C++, one by one, so that its functions for
// processors that have them run on all others. Include it before that file, and define WITH_AVX512_BF16 (and WITH_AMX).
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

template <class Number>
struct Lanes {
    static constexpr int COUNT = 64 / sizeof(Number);
    Number at[COUNT];
    template <class Vector>
    static Lanes of(const Vector &vector) {
        static_assert(sizeof(Vector) == 64, "a vector of 512 bits");
        Lanes lanes;
        memcpy(lanes.at, &vector, 64);
        return lanes;
    }
    template <class Vector>
    Vector as() const {
        Vector vector;
        memcpy(&vector, at, 64);
        return vector;
    }
};
typedef Lanes<float> Floats;
typedef Lanes<int32_t> Words;
typedef Lanes<uint16_t> Halves;
typedef Lanes<uint8_t> Bytes;

template <class Number, class Vector, class Function>
Vector each(const Function &function) {
    Lanes<Number> lanes;
    for (int i = 0; i < lanes.COUNT; i++) lanes.at[i] = function(i);
    return lanes.template as<Vector>();
}

template <class Vector>
Vector load(const void *data, bool aligned) {
    if (aligned && uintptr_t(data) % 64) abort();
    Vector vector;
    memcpy(&vector, data, 64);
    return vector;
}

inline float single(uint16_t bfloat16) {
    const uint32_t bits = uint32_t(bfloat16) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Numbers that are smaller than normal ones are 0.
inline float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? 0.0f : value; }

inline uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline __m512 setzero_ps() { return each<float, __m512>([](int) { return 0.0f; }); }
inline __m512i setzero_si512() { return each<int32_t, __m512i>([](int) { return 0; }); }
inline __m512 set1_ps(float value) { return each<float, __m512>([=](int) { return value; }); }
inline __m512i set1_epi32(int32_t value) { return each<int32_t, __m512i>([=](int) { return value; }); }
inline __m512i set1_epi8(char value) { return each<uint8_t, __m512i>([=](int) { return uint8_t(value); }); }
inline __m512 load_ps(const void *data) { return load<__m512>(data, true); }
inline __m512i load_si512(const void *data) { return load<__m512i>(data, true); }
inline __m512i loadu_si512(const void *data) { return load<__m512i>(data, false); }
inline void storeu_ps(void *data, const __m512 &a) { memcpy(data, &a, 64); }
inline void store_ps(void *data, const __m512 &a) { uintptr_t(data) % 64 ? abort() : storeu_ps(data, a); }
inline void store_si512(void *data, const __m512i &a) { uintptr_t(data) % 64 ? abort() : (void)memcpy(data, &a, 64); }
inline __m512 castsi512_ps(const __m512i &a) { return Words::of(a).as<__m512>(); }

inline __m512 add_ps(const __m512 &a, const __m512 &b) {
    const Floats x = Floats::of(a), y = Floats::of(b);
    return each<float, __m512>([&](int i) { return x.at[i] + y.at[i]; });
}
inline __m512 mul_ps(const __m512 &a, const __m512 &b) {
    const Floats x = Floats::of(a), y = Floats::of(b);
    return each<float, __m512>([&](int i) { return x.at[i] * y.at[i]; });
}
inline __m512 fmadd_ps(const __m512 &a, const __m512 &b, const __m512 &c) {
    const Floats x = Floats::of(a), y = Floats::of(b), z = Floats::of(c);
    return each<float, __m512>([&](int i) { return std::fma(x.at[i], y.at[i], z.at[i]); });
}
inline __m512 fnmadd_ps(const __m512 &a, const __m512 &b, const __m512 &c) {
    const Floats x = Floats::of(a), y = Floats::of(b), z = Floats::of(c);
    return each<float, __m512>([&](int i) { return std::fma(-x.at[i], y.at[i], z.at[i]); });
}
inline __m512 sub_ps(const __m512 &a, const __m512 &b) {
    const Floats x = Floats::of(a), y = Floats::of(b);
    return each<float, __m512>([&](int i) { return x.at[i] - y.at[i]; });
}
inline float reduce_add_ps(const __m512 &a) {
    Floats x = Floats::of(a);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x.at[i] += x.at[i + half];
    return x.at[0];
}
inline __m512i sub_epi32(const __m512i &a, const __m512i &b) {
    const Words x = Words::of(a), y = Words::of(b);
    return each<int32_t, __m512i>([&](int i) { return x.at[i] - y.at[i]; });
}
inline __m512i and_si512(const __m512i &a, const __m512i &b) {
    const Words x = Words::of(a), y = Words::of(b);
    return each<int32_t, __m512i>([&](int i) { return x.at[i] & y.at[i]; });
}
inline __m512i or_si512(const __m512i &a, const __m512i &b) {
    const Words x = Words::of(a), y = Words::of(b);
    return each<int32_t, __m512i>([&](int i) { return x.at[i] | y.at[i]; });
}
inline __m512i xor_si512(const __m512i &a, const __m512i &b) {
    const Words x = Words::of(a), y = Words::of(b);
    return each<int32_t, __m512i>([&](int i) { return x.at[i] ^ y.at[i]; });
}
inline __m512i shuffle_epi8(const __m512i &a, const __m512i &index) {
    const Bytes x = Bytes::of(a), at = Bytes::of(index);
    return each<uint8_t, __m512i>([&](int i) { return uint8_t(at.at[i] & 128 ? 0 : x.at[i / 16 * 16 + at.at[i] % 16]); });
}
inline __m512i slli_epi32(const __m512i &a, int count) {
    const Words x = Words::of(a);
    return each<int32_t, __m512i>([&](int i) { return int32_t(uint32_t(x.at[i]) << count); });
}
inline __m512i slli_epi16(const __m512i &a, int count) {
    const Halves x = Halves::of(a);
    return each<uint16_t, __m512i>([&](int i) { return uint16_t(x.at[i] << count); });
}
inline __m512i srli_epi16(const __m512i &a, int count) {
    const Halves x = Halves::of(a);
    return each<uint16_t, __m512i>([&](int i) { return uint16_t(x.at[i] >> count); });
}
inline __m512i ternarylogic_epi64(const __m512i &a, const __m512i &b, const __m512i &c, int table) {
    const Words x = Words::of(a), y = Words::of(b), z = Words::of(c);
    return each<int32_t, __m512i>([&](int i) {
        uint32_t result = 0;
        for (int bit = 0; bit < 32; bit++) {
            const int index = (x.at[i] >> bit & 1) << 2 | (y.at[i] >> bit & 1) << 1 | (z.at[i] >> bit & 1);
            result |= uint32_t(table >> index & 1) << bit;
        }
        return int32_t(result);
    });
}
inline __m512i permutexvar_epi8(const __m512i &index, const __m512i &a) {
    const Bytes at = Bytes::of(index), x = Bytes::of(a);
    return each<uint8_t, __m512i>([&](int i) { return x.at[at.at[i] & 63]; });
}
// Bytes of both vectors in turn: of each 16 bytes the first eight, or with `high` the last.
inline __m512i interleaved(const __m512i &a, const __m512i &b, int high) {
    const Bytes x = Bytes::of(a), y = Bytes::of(b);
    return each<uint8_t, __m512i>([&](int i) { return (i % 2 ? y : x).at[i / 16 * 16 + 8 * high + i % 16 / 2]; });
}
inline __m512i unpacklo_epi8(const __m512i &a, const __m512i &b) { return interleaved(a, b, 0); }
inline __m512i unpackhi_epi8(const __m512i &a, const __m512i &b) { return interleaved(a, b, 1); }
inline __m512i permutex2var_epi16(const __m512i &a, const __m512i &index, const __m512i &b) {
    const Halves x = Halves::of(a), at = Halves::of(index), y = Halves::of(b);
    return each<uint16_t, __m512i>([&](int i) { return (at.at[i] & 32 ? y : x).at[at.at[i] & 31]; });
}
inline __m512i cvtepi8_epi32(const __m128i &a) {
    int8_t x[16];
    memcpy(x, &a, 16);
    return each<int32_t, __m512i>([&](int i) { return int32_t(x[i]); });
}
inline __m512i cvtepu8_epi32(const __m128i &a) {
    uint8_t x[16];
    memcpy(x, &a, 16);
    return each<int32_t, __m512i>([&](int i) { return int32_t(x[i]); });
}
inline __m512 cvtepi32_ps(const __m512i &a) {
    const Words x = Words::of(a);
    return each<float, __m512>([&](int i) { return float(x.at[i]); });
}
inline __m512 cvtph_ps(const __m256i &a) {
    uint16_t bits[16];
    memcpy(bits, &a, 32);
    return each<float, __m512>([&](int i) {
        const float size = std::ldexp(float(bits[i] & 1023 | (bits[i] >> 10 & 31 ? 1024 : 0)), std::max(bits[i] >> 10 & 31, 1) - 25);
        return bits[i] >> 15 ? -size : size;
    });
}
inline __m512bh cvtne2ps_pbh(const __m512 &high, const __m512 &low) {
    const Floats x = Floats::of(low), y = Floats::of(high);
    return each<uint16_t, __m512bh>([&](int i) { return rounded(i < 16 ? x.at[i] : y.at[i - 16]); });
}
inline __m512i dpbusd_epi32(const __m512i &sum, const __m512i &a, const __m512i &b) {
    const Words z = Words::of(sum);
    const Bytes x = Bytes::of(a), y = Bytes::of(b);
    return each<int32_t, __m512i>([&](int i) {
        int32_t total = z.at[i];
        for (int k = 4 * i; k < 4 * i + 4; k++) total += int32_t(x.at[k]) * int8_t(y.at[k]);
        return total;
    });
}
inline __m512 dpbf16_ps(const __m512 &sum, const __m512bh &a, const __m512bh &b) {
    const Floats z = Floats::of(sum);
    const Halves x = Halves::of(a), y = Halves::of(b);
    return each<float, __m512>([&](int i) {
        const float one = std::fma(flushed(single(x.at[2 * i + 1])), flushed(single(y.at[2 * i + 1])), z.at[i]);
        return std::fma(flushed(single(x.at[2 * i])), flushed(single(y.at[2 * i])), one);
    });
}

// What a thread has in its tiles.
struct Tiles {
    bool ready = false;
    uint16_t bytes[16];
    uint8_t rows[16], data[8][16][64];
};
inline Tiles &tiles() {
    static thread_local Tiles kept;
    return kept;
}
inline void loadconfig(const void *config) {
    Tiles &all = tiles();
    memcpy(all.bytes, static_cast<const char *>(config) + 16, 32);
    memcpy(all.rows, static_cast<const char *>(config) + 48, 16);
    memset(all.data, 0, sizeof all.data);
    all.ready = *static_cast<const char *>(config) == 1;
}
inline Tiles &ready(int tile) {
    if (!tiles().ready || tiles().rows[tile] < 1 || tiles().rows[tile] > 16 || tiles().bytes[tile] > 64) abort();
    return tiles();
}
inline void release() { tiles().ready = false; }
inline void zero(int tile) { memset(ready(tile).data[tile], 0, sizeof tiles().data[tile]); }
inline void loadd(int tile, const void *data, int64_t stride) {
    zero(tile);
    for (int r = 0; r < tiles().rows[tile]; r++)
        memcpy(tiles().data[tile][r], static_cast<const char *>(data) + r * stride, tiles().bytes[tile]);
}
inline void stored(int tile, void *data, int64_t stride) {
    for (int r = 0; r < ready(tile).rows[tile]; r++)
        memcpy(static_cast<char *>(data) + r * stride, tiles().data[tile][r], tiles().bytes[tile]);
}
inline void dpbf16ps(int sum, int a, int b) {
    Tiles &all = ready(sum);
    if (ready(b).rows[b] != ready(a).bytes[a] / 4 || all.rows[a] != all.rows[sum] || all.bytes[b] != all.bytes[sum]) abort();
    for (int r = 0; r < all.rows[sum]; r++)
        for (int k = 0; k < all.rows[b]; k++)
            for (int c = 0; c < all.bytes[sum] / 4; c++) {
                float total;
                uint16_t x[2], y[2];
                memcpy(&total, all.data[sum][r] + 4 * c, 4);
                memcpy(x, all.data[a][r] + 4 * k, 4);
                memcpy(y, all.data[b][k] + 4 * c, 4);
                for (int i = 0; i < 2; i++) total = std::fma(flushed(single(x[i])), flushed(single(y[i])), total);
                memcpy(all.data[sum][r] + 4 * c, &total, 4);
            }
}

}  // namespace emulated

#define syscall(...) 0
#define _mm512_add_ps emulated::add_ps
#define _mm512_and_si512 emulated::and_si512
#define _mm512_castsi512_ps emulated::castsi512_ps
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_fnmadd_ps emulated::fnmadd_ps
#define _mm512_load_ps emulated::load_ps
#define _mm512_load_si512 emulated::load_si512
#define _mm512_loadu_si512 emulated::loadu_si512
#define _mm512_mul_ps emulated::mul_ps
#define _mm512_or_si512 emulated::or_si512
#define _mm512_permutex2var_epi16 emulated::permutex2var_epi16
#define _mm512_permutexvar_epi8 emulated::permutexvar_epi8
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#define _mm512_set1_epi8 emulated::set1_epi8
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_setzero_ps emulated::setzero_ps
#define _mm512_setzero_si512 emulated::setzero_si512
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#undef _mm512_slli_epi16
#define _mm512_slli_epi16 emulated::slli_epi16
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 emulated::slli_epi32
#undef _mm512_srli_epi16
#define _mm512_srli_epi16 emulated::srli_epi16
#define _mm512_store_ps emulated::store_ps
#define _mm512_store_si512 emulated::store_si512
#define _mm512_storeu_ps emulated::storeu_ps
#define _mm512_sub_epi32 emulated::sub_epi32
#define _mm512_sub_ps emulated::sub_ps
#undef _mm512_ternarylogic_epi64
#define _mm512_ternarylogic_epi64 emulated::ternarylogic_epi64
#define _mm512_unpackhi_epi8 emulated::unpackhi_epi8
#define _mm512_unpacklo_epi8 emulated::unpacklo_epi8
#define _mm512_xor_si512 emulated::xor_si512
#undef _tile_dpbf16ps
#define _tile_dpbf16ps emulated::dpbf16ps
#undef _tile_loadconfig
#define _tile_loadconfig emulated::loadconfig
#undef _tile_loadd
#define _tile_loadd emulated::loadd
#undef _tile_release
#define _tile_release emulated::release
#undef _tile_stored
#define _tile_stored emulated::stored
#undef _tile_zero
#define _tile_zero emulated::zero
