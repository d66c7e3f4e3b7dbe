// Attention over a slot cache; a query's result has the same bits whatever stands beside it. `attend.py` says what it is.
//
// Keys are read in blocks of BLOCK, counted from key 0. A block gives each query the largest of its scores, the sum of
// its weights and the weighted sum of its values; the blocks are joined in their order. Every product is a chain over
// its inner axis in the order of that axis, whatever tile computes it. So neither the number of queries, rows and threads
// nor the length of the view changes a bit: a key that is not seen has a score of minus infinity and a weight of zero,
// and a block without seen keys is passed over.
//
// A packed operand holds panels of lanes: for each unit of the inner axis one 32-bit number of each lane. A unit is one
// float, or two bfloat16 numbers where the machine multiplies those (`vdpbf16ps`).
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include <omp.h>
#if defined(__SSE__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, VECTORS = 4;
#else
constexpr int LANES = 4, VECTORS = 2;
#endif
#if defined(__AVX512F__) && defined(__AVX512BF16__)
constexpr int HALVES = 2;  // bfloat16 numbers of a unit
#else
constexpr int HALVES = 1;
#endif
constexpr int PANEL = LANES * VECTORS, TILE = 6, PART = 32 * HALVES, BLOCK = 256, COLUMNS = 16;
static_assert(PART % PANEL == 0 && BLOCK % PART == 0);
constexpr float LOG2E = 1.44269504088896340736f;
constexpr int64_t SMALL = 1 << 17;  // products of a call that one thread computes sooner than two

typedef float Lanes __attribute__((vector_size(4 * LANES), may_alias, aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), may_alias, aligned(4)));
typedef uint16_t Half;
typedef uint16_t HalfLanes __attribute__((vector_size(2 * LANES), may_alias, aligned(2)));

inline Lanes splat(float x) { return Lanes{} + x; }

// a * b + c, rounded once where the machine can, in every place alike.
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline float wide(Half x) {
    const uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
inline Half narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline float wide(float x) { return x; }
inline void put(float *to, float x) { *to = x; }
inline void put(Half *to, float x) { *to = narrow(x); }

// How numbers of a type are multiplied: PER of them are a unit, and WORD of them lie in 32 bits.
template <class T> struct Kind;

template <> struct Kind<float> {
    static constexpr int PER = 1, WORD = 1;
    static void interleave(const float *from, int64_t, bool, int count, float *to) { memcpy(to, from, 4 * count); }
    static Lanes mac(Lanes sum, float a, Lanes b) { return fma(splat(a), b, sum); }
};

#if defined(__AVX512F__) && defined(__AVX512BF16__)
inline Lanes dot(Lanes sum, float a, Lanes b) {
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)splat(a), (__m512bh)(__m512)b);
}
template <> struct Kind<Half> {
    static constexpr int PER = 2, WORD = 2;
    static void interleave(const Half *from, int64_t step, bool pair, int count, float *to) {
        static const Half zeros[LANES] = {};
        for (int i = 0; i < count; i += LANES) {
            const Half *first = from + i, *second = pair ? from + step + i : zeros;
            const Ints low = __builtin_convertvector(*(const HalfLanes *)first, Ints);
            const Ints high = __builtin_convertvector(*(const HalfLanes *)second, Ints);
            *(Ints *)(to + i) = low | (high << 16);
        }
    }
    static Lanes mac(Lanes sum, float a, Lanes b) { return dot(sum, a, b); }
};
#else
template <> struct Kind<Half> {
    static constexpr int PER = 1, WORD = 2;
    static void interleave(const Half *from, int64_t, bool, int count, float *to) {
        for (int i = 0; i < count; i += LANES)
            *(Ints *)(to + i) = __builtin_convertvector(*(const HalfLanes *)(from + i), Ints) << 16;
    }
    static Lanes mac(Lanes sum, float a, Lanes b) { return fma(splat(a), b, sum); }
};
#endif

// sums[R][N vectors] += a[R][units] times b[units][N vectors], each sum a chain in the order of the units.
template <class T, int R, int N>
inline void tile(float *sums, int64_t step, const float *a, int64_t a_step, const float *b, int64_t units, bool fresh) {
    Lanes sum[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sum[r][n] = fresh ? Lanes{} : *(const Lanes *)(sums + r * step + n * LANES);
    for (int64_t u = 0; u < units; u++) {
        Lanes lanes[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) lanes[n] = *(const Lanes *)(b + (u * N + n) * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sum[r][n] = Kind<T>::mac(sum[r][n], a[r * a_step + u], lanes[n]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) *(Lanes *)(sums + r * step + n * LANES) = sum[r][n];
}

template <class T, int N>
void product(float *sums, int64_t step, const float *a, int64_t a_step, const float *b, int64_t units, int rows, bool fresh) {
    while (rows > 0) {
        switch (rows) {
            case 1: tile<T, 1, N>(sums, step, a, a_step, b, units, fresh); break;
            case 2: tile<T, 2, N>(sums, step, a, a_step, b, units, fresh); break;
            case 3: tile<T, 3, N>(sums, step, a, a_step, b, units, fresh); break;
            case 4: tile<T, 4, N>(sums, step, a, a_step, b, units, fresh); break;
            case 5: tile<T, 5, N>(sums, step, a, a_step, b, units, fresh); break;
            default: tile<T, TILE, N>(sums, step, a, a_step, b, units, fresh);
        }
        rows -= TILE, sums += TILE * step, a += TILE * a_step;
    }
}

// LANES vectors become their transpose.
inline void transpose(Lanes *v) {
#if defined(__AVX512F__)
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps((__m512)v[i], (__m512)v[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps((__m512)v[i], (__m512)v[i + 1]);
    }
    __m512 q[16];  // 128 bits `l` of q[4 g + j] are column 4 l + j of the vectors from 4 g on
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m512d a = (__m512d)t[i + j], b = (__m512d)t[i + j + 2];
            q[i + 2 * j] = (__m512)_mm512_unpacklo_pd(a, b), q[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(a, b);
        }
    for (int j = 0; j < 4; j++) {
        const __m512 a = _mm512_shuffle_f32x4(q[j], q[4 + j], 0x88), b = _mm512_shuffle_f32x4(q[8 + j], q[12 + j], 0x88);
        const __m512 c = _mm512_shuffle_f32x4(q[j], q[4 + j], 0xdd), d = _mm512_shuffle_f32x4(q[8 + j], q[12 + j], 0xdd);
        v[j] = (Lanes)_mm512_shuffle_f32x4(a, b, 0x88), v[8 + j] = (Lanes)_mm512_shuffle_f32x4(a, b, 0xdd);
        v[4 + j] = (Lanes)_mm512_shuffle_f32x4(c, d, 0x88), v[12 + j] = (Lanes)_mm512_shuffle_f32x4(c, d, 0xdd);
    }
#elif defined(__AVX__)
    __m256 t[8], q[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m256d a = (__m256d)t[i + j], b = (__m256d)t[i + j + 2];
            q[i + 2 * j] = (__m256)_mm256_unpacklo_pd(a, b), q[i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd(a, b);
        }
    for (int j = 0; j < 4; j++) {
        v[j] = (Lanes)_mm256_permute2f128_ps(q[j], q[4 + j], 0x20);
        v[4 + j] = (Lanes)_mm256_permute2f128_ps(q[j], q[4 + j], 0x31);
    }
#else
    Lanes t[LANES];
    for (int i = 0; i < LANES; i++)
        for (int l = 0; l < LANES; l++) t[i][l] = v[l][i];
    memcpy(v, t, sizeof t);
#endif
}

// 2^x for x <= 0; exactly 1 for 0, and 0 below -125.
inline Lanes exp2(Lanes x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
    const Lanes y = x + shift, r = x - (y - shift);
    Lanes p = splat(1.5252734e-5f);
    p = fma(p, r, splat(1.5403530e-4f));
    p = fma(p, r, splat(1.3333558e-3f));
    p = fma(p, r, splat(9.6181291e-3f));
    p = fma(p, r, splat(5.5504109e-2f));
    p = fma(p, r, splat(2.4022651e-1f));
    p = fma(p, r, splat(6.9314718e-1f));
    p = fma(p, r, splat(1.0f));
    const Lanes power = (Lanes)((Ints)p + ((Ints)y << 23));
    const Lanes kept = x < -125.0f ? Lanes{} : power;
    return x == x ? kept : x;
}

struct Call {
    const void *queries, *keys, *values, *mask;
    void *output;
    int64_t rows, heads, shared, width, view, dim, value_dim;
    int64_t query_row, query_head, query_column, key_row, key_head, key_step, value_row, value_head, value_step;
    int64_t mask_row, mask_head, mask_column, mask_step;
    int64_t mask_kind;  // 0: none, and a column sees the keys up to its own; 1: bool; 2: float; 3: bfloat16
    int64_t halves;     // whether queries, keys, values and outputs are bfloat16, and not float
    float scale;

    int64_t groups() const { return heads / shared; }
    int64_t blocks() const { return (view + BLOCK - 1) / BLOCK; }
    int64_t padded_values() const { return (value_dim + LANES - 1) / LANES * LANES; }
};

// The queries of one row and key head, in some columns: query `r` is that of column `r / groups` and head `r % groups`.
struct Queries {
    int64_t row, head, first;
    int count;
};

// The state of `count` queries: their largest scores, sums of weights and weighted sums of values.
inline int64_t state_size(const Call &c, int64_t count) { return (count + LANES - 1) / LANES * LANES * 2 + count * c.padded_values(); }
inline int64_t sums_at(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

struct Memory {
    float *data = nullptr;
    int64_t size = 0;
    float *of(int64_t wanted) {
        if (wanted > size) {
            free(data);
            size = wanted + wanted / 2;
            data = (float *)aligned_alloc(64, (4 * size + 63) / 64 * 64);
            if (!data) size = 0, throw std::bad_alloc();
        }
        return data;
    }
    ~Memory() { free(data); }
};
thread_local Memory scratch, kept;

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

template <class T>
struct Worker {
    using K = Kind<T>;
    const Call &c;
    const int64_t key_units, value_width, most;
    float *query, *scores, *weights, *packed, *bias, *partial;
    T *tail;

    static int64_t units_of(const Call &c) { return round_up(c.dim, LANES * K::WORD) / K::PER; }
    static int64_t most_of(const Call &c) { return c.groups() * (c.width < COLUMNS ? c.width : COLUMNS); }

    explicit Worker(const Call &call)
        : c(call), key_units(units_of(call)), value_width(call.padded_values()), most(most_of(call)) {
        const int64_t packed_size = PART * (key_units > value_width ? key_units : value_width);
        const int64_t longest = round_up(c.dim > c.value_dim ? c.dim : c.value_dim, 64);
        const int64_t sizes[] = {most * key_units, most * BLOCK, most * BLOCK, packed_size, most * BLOCK,
                                 state_size(c, most), 2 * LANES * longest};
        float **parts[] = {&query, &scores, &weights, &packed, &bias, &partial, (float **)&tail};
        int64_t total = 0;
        for (int64_t size : sizes) total += round_up(size, 16);
        float *at = scratch.of(total);
        for (int i = 0; i < 7; i++) *parts[i] = at, at += round_up(sizes[i], 16);
    }

    int64_t count(const Queries &q) const { return q.count * c.groups(); }

    void read_queries(const Queries &q) {
        const int64_t groups = c.groups();
        for (int64_t r = 0; r < count(q); r++) {
            const T *from = (const T *)c.queries + q.row * c.query_row + (q.head * groups + r % groups) * c.query_head +
                            (q.first + r / groups) * c.query_column;
            float *to = query + r * key_units;
            if (K::PER == 1) {
                for (int64_t d = 0; d < c.dim; d++) to[d] = wide(from[d]);
                for (int64_t d = c.dim; d < key_units; d++) to[d] = 0;
            } else {
                memcpy(to, from, c.dim * sizeof(T));
                memset((char *)to + c.dim * sizeof(T), 0, key_units * 4 - c.dim * sizeof(T));
            }
        }
    }

    // What is added to the scores of a block, minus infinity where a key is not seen. Returns whether any key is seen
    // in each part of the block.
    bool read_mask(const Queries &q, int64_t begin, int64_t end, bool *seen) {
        const int64_t groups = c.groups(), per_head = c.mask_kind && c.mask_head, lines = per_head ? count(q) : q.count;
        for (int p = 0; p < BLOCK / PART; p++) seen[p] = false;
        for (int64_t line = 0; line < lines; line++) {
            float *to = bias + line * BLOCK;
            const int64_t column = q.first + (per_head ? line / groups : line);
            const int64_t head = per_head ? q.head * groups + line % groups : 0;
            const int64_t at = q.row * c.mask_row + head * c.mask_head + column * c.mask_column + begin * c.mask_step;
            for (int p = 0; p < BLOCK / PART; p++, to += PART) {
                const int64_t left = end - begin - p * PART, n = left < 0 ? 0 : left < PART ? left : PART;
                const int64_t from = at + p * PART * c.mask_step;
                float most_seen = -INFINITY;
                if (c.mask_kind == 0) {
                    const int64_t last = c.view - c.width + column - begin - p * PART;
                    for (int64_t i = 0; i < n; i++) to[i] = i <= last ? 0.0f : -INFINITY;
                } else if (c.mask_kind == 1) {
                    const uint8_t *mask = (const uint8_t *)c.mask + from;
                    if (c.mask_step == 1)
                        for (int64_t i = 0; i < n; i++) to[i] = mask[i] ? 0.0f : -INFINITY;
                    else
                        for (int64_t i = 0; i < n; i++) to[i] = mask[i * c.mask_step] ? 0.0f : -INFINITY;
                } else if (c.mask_kind == 2) {
                    for (int64_t i = 0; i < n; i++) to[i] = ((const float *)c.mask)[from + i * c.mask_step] * LOG2E;
                } else {
                    for (int64_t i = 0; i < n; i++) to[i] = wide(((const Half *)c.mask)[from + i * c.mask_step]) * LOG2E;
                }
                for (int64_t i = n; i < PART; i++) to[i] = -INFINITY;
                for (int64_t i = 0; i < PART; i++) most_seen = to[i] > most_seen ? to[i] : most_seen;
                seen[p] |= !(most_seen == -INFINITY);
            }
        }
        bool any = false;
        for (int p = 0; p < BLOCK / PART; p++) any |= seen[p];
        return any;
    }

    static void fetch(const T *from, int64_t bytes) {
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)from + b);
    }

    // `n` keys as lanes of panels: packed[key / PANEL][unit][key % PANEL].
    void pack_keys(const T *keys, int64_t n, int64_t ahead) {
        constexpr int STEP = LANES * K::WORD;
        for (int64_t k = 0; k < n; k += LANES) {
            float *to = packed + k / PANEL * key_units * PANEL + k % PANEL;
            const T *rows[LANES];
            for (int i = 0; i < LANES; i++) {
                rows[i] = keys + (k + i < n ? k + i : n - 1) * c.key_step;
                if (k + i < ahead) fetch(rows[i] + PART * c.key_step, c.dim * sizeof(T));
            }
            for (int64_t d = 0; d < c.dim; d += STEP) {
                Lanes v[LANES];
                if (d + STEP <= c.dim) {
#pragma GCC unroll 16
                    for (int i = 0; i < LANES; i++) v[i] = *(const Lanes *)(rows[i] + d);
                } else {
                    for (int i = 0; i < LANES; i++) {
                        v[i] = Lanes{};
                        memcpy(&v[i], rows[i] + d, (c.dim - d) * sizeof(T));
                    }
                }
                transpose(v);
                float *unit = to + d / K::PER * PANEL;
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) {
                    if (K::WORD == K::PER) {
                        *(Lanes *)(unit + i * PANEL) = v[i];
                    } else {
                        *(Ints *)(unit + 2 * i * PANEL) = (Ints)v[i] << 16;
                        *(Ints *)(unit + (2 * i + 1) * PANEL) = (Ints)v[i] & ~0xffff;
                    }
                }
            }
        }
    }

    // `n` values, lanes of panels along their numbers: whole panels, then single vectors.
    void pack_values(const T *values, int64_t n, int64_t ahead) {
        const int64_t units = (n + K::PER - 1) / K::PER, whole = c.value_dim / LANES * LANES;
        for (int64_t u = 0; u < units; u++) {
            const T *from = values + u * K::PER * c.value_step;
            const bool pair = u * K::PER + 1 < n;
            for (int64_t i = u * K::PER; i < (u + 1) * K::PER && i < ahead; i++)
                fetch(values + (i + PART) * c.value_step, c.value_dim * sizeof(T));
            for (int64_t d = 0; d < value_width;) {
                const int64_t lanes = panel_at(d);
                float *to = packed + d * units + u * lanes;
                const int64_t filled = whole - d < lanes ? whole - d : lanes;
                if (filled > 0) K::interleave(from + d, c.value_step, pair, filled, to);
                if (filled < lanes) {
                    const int64_t begin = filled > 0 ? d + filled : d;
                    memset(tail, 0, 2 * LANES * sizeof(T));
                    memcpy(tail, from + begin, (c.value_dim - begin) * sizeof(T));
                    if (pair) memcpy(tail + LANES, from + c.value_step + begin, (c.value_dim - begin) * sizeof(T));
                    K::interleave(tail, LANES, pair, LANES, to + (begin - d));
                }
                d += lanes;
            }
        }
    }
    int64_t panel_at(int64_t d) const { return value_width - d >= PANEL ? PANEL : LANES; }

    // Scores become weights, in place; the largest score and the sum of the weights go to the state.
    void weigh(const Queries &q, int64_t vectors, const bool *seen, float *largest, float *sums) {
        const int64_t groups = c.groups(), per_head = c.mask_kind && c.mask_head;
        const float scale = c.scale * LOG2E;
        for (int64_t r = 0; r < count(q); r++) {
            float *score = scores + r * BLOCK;
            const float *add = bias + (per_head ? r : r / groups) * BLOCK;
            Lanes top = splat(-INFINITY);
            for (int64_t v = 0; v < vectors; v++) {
                if (!seen[v * LANES / PART]) continue;
                const Lanes extra = *(const Lanes *)(add + v * LANES);
                const Lanes s = fma(*(const Lanes *)(score + v * LANES), splat(scale), extra);
                const Lanes visible = extra == -INFINITY ? extra : s;
                *(Lanes *)(score + v * LANES) = visible;
                top = visible > top ? visible : top;
            }
            float most_of_all = -INFINITY;
            for (int l = 0; l < LANES; l++) most_of_all = top[l] > most_of_all ? top[l] : most_of_all;
            largest[r] = most_of_all;
            Lanes sum = {};
            for (int64_t v = 0; v < vectors; v++) {
                if (!seen[v * LANES / PART]) continue;
                const Lanes s = *(const Lanes *)(score + v * LANES);
                Lanes w = exp2(s - most_of_all);
                w = s == -INFINITY ? Lanes{} : w;
                if (K::PER == 2) {
                    Ints bits = (Ints)w;
                    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
                    // The sum is that of the weights that multiply the values.
                    *(HalfLanes *)((Half *)weights + r * BLOCK + v * LANES) = __builtin_convertvector(bits, HalfLanes);
                    w = (Lanes)(bits << 16);
                } else {
                    *(Lanes *)(score + v * LANES) = w;
                }
                sum += w;
            }
            float total = 0;
            for (int l = 0; l < LANES; l++) total += sum[l];
            sums[r] = total;
        }
    }

    // The state of the queries after one block alone.
    void block(const Queries &q, int64_t number, float *state) {
        const int64_t begin = number * BLOCK, end = begin + BLOCK < c.view ? begin + BLOCK : c.view, n = count(q);
        float *largest = state, *sums = state + sums_at(n), *outputs = sums + sums_at(n);
        bool seen[BLOCK / PART];
        if (!read_mask(q, begin, end, seen)) {
            for (int64_t r = 0; r < n; r++) largest[r] = -INFINITY;
            return;
        }
        const T *keys = (const T *)c.keys + q.row * c.key_row + q.head * c.key_head + begin * c.key_step;
        const T *values = (const T *)c.values + q.row * c.value_row + q.head * c.value_head + begin * c.value_step;
        const int64_t all = end - begin;
        for (int64_t p = 0; p * PART < all; p++) {
            if (!seen[p]) continue;
            const int64_t first = p * PART, here = all - first < PART ? all - first : PART;
            pack_keys(keys + first * c.key_step, here, all - first - PART);
            for (int64_t k = 0; k < here; k += PANEL)
                product<T, VECTORS>(scores + first + k, BLOCK, query, key_units, packed + k * key_units, key_units, n, true);
        }
        weigh(q, (all + LANES - 1) / LANES, seen, largest, sums);
        const float *a = K::PER == 2 ? weights : scores;
        const int64_t a_step = BLOCK / K::PER;
        bool fresh = true;
        for (int64_t p = 0; p * PART < all; p++) {
            if (!seen[p]) continue;
            const int64_t first = p * PART, here = all - first < PART ? all - first : PART;
            const int64_t units = (here + K::PER - 1) / K::PER;
            pack_values(values + first * c.value_step, here, all - first - PART);
            for (int64_t d = 0; d < value_width;) {
                const int64_t lanes = panel_at(d);
                const float *b = packed + d * units, *from = a + first / K::PER;
                if (lanes == PANEL)
                    product<T, VECTORS>(outputs + d, value_width, from, a_step, b, units, n, fresh);
                else
                    product<T, 1>(outputs + d, value_width, from, a_step, b, units, n, fresh);
                d += lanes;
            }
            fresh = false;
        }
    }

    // The state after another block.
    void join(int64_t n, float *state, const float *other) {
        float *sums = state + sums_at(n), *outputs = sums + sums_at(n);
        const float *other_sums = other + sums_at(n), *other_outputs = other_sums + sums_at(n);
        for (int64_t r = 0; r < n; r++) {
            if (other[r] == -INFINITY) continue;
            float *to = outputs + r * value_width;
            const float *from = other_outputs + r * value_width;
            if (state[r] == -INFINITY) {
                state[r] = other[r], sums[r] = other_sums[r];
                memcpy(to, from, 4 * value_width);
                continue;
            }
            const float top = other[r] > state[r] ? other[r] : state[r];
            const Lanes here = exp2(splat(state[r] - top)), there = exp2(splat(other[r] - top));
            state[r] = top;
            sums[r] = fma(splat(sums[r]), here, splat(other_sums[r]) * there)[0];
            for (int64_t d = 0; d < value_width; d += LANES)
                *(Lanes *)(to + d) = fma(*(const Lanes *)(to + d), here, *(const Lanes *)(from + d) * there);
        }
    }

    void start(int64_t n, float *state) {
        for (int64_t r = 0; r < n; r++) state[r] = -INFINITY;
    }

    void finish(const Queries &q, const float *state) {
        const int64_t n = count(q), groups = c.groups();
        const float *sums = state + sums_at(n), *outputs = sums + sums_at(n);
        for (int64_t r = 0; r < n; r++) {
            T *to = (T *)c.output + ((q.row * c.width + q.first + r / groups) * c.heads + q.head * groups + r % groups) * c.value_dim;
            const bool none = state[r] == -INFINITY;
            // Adding 0 makes zeros positive.
            for (int64_t d = 0; d < c.value_dim; d++) put(to + d, none ? 0.0f : outputs[r * value_width + d] / sums[r] + 0.0f);
        }
    }
};

// Numbers too small for a full mantissa count as zero, as they do in `vdpbf16ps`.
struct NoSubnormals {
#if defined(__SSE__)
    unsigned before = _mm_getcsr();
    NoSubnormals() { _mm_setcsr(before | 0x8040); }
    ~NoSubnormals() { _mm_setcsr(before); }
#endif
};

template <class T>
void attend(const Call &c) {
    const int64_t blocks = c.blocks(), column_blocks = (c.width + COLUMNS - 1) / COLUMNS;
    const int64_t tasks = c.rows * c.shared * column_blocks;
    const auto queries = [&](int64_t task) {
        const int64_t first = task % column_blocks * COLUMNS, left = c.width - first;
        const int64_t head = task / column_blocks % c.shared;
        return Queries{task / column_blocks / c.shared, head, first, int(left < COLUMNS ? left : COLUMNS)};
    };
    const int64_t products = c.rows * c.heads * c.width * c.view * (c.dim + c.value_dim);
    const int threads = products < SMALL ? 1 : omp_get_max_threads();
    const bool split = threads > 1 && blocks > 1 && tasks < 4 * threads;
    const int64_t size = round_up(state_size(c, Worker<T>::most_of(c)), 16);
    const auto whole = [&](int64_t task) {
        Worker<T> worker(c);
        const Queries q = queries(task);
        worker.read_queries(q);
        float *state = kept.of(size);
        worker.start(worker.count(q), state);
        for (int64_t b = 0; b < blocks; b++) {
            worker.block(q, b, worker.partial);
            worker.join(worker.count(q), state, worker.partial);
        }
        worker.finish(q, state);
    };
    if (threads == 1) {
        const NoSubnormals flush;
        for (int64_t t = 0; t < tasks; t++) whole(t);
    } else if (!split) {
#pragma omp parallel num_threads(threads)
        {
            const NoSubnormals flush;
#pragma omp for schedule(dynamic, 1)
            for (int64_t t = 0; t < tasks; t++) whole(t);
        }
    } else {
        float *states = kept.of(tasks * blocks * size);
#pragma omp parallel num_threads(threads)
        {
            const NoSubnormals flush;
            Worker<T> worker(c);
            int64_t last = -1;
#pragma omp for schedule(static)
            for (int64_t each = 0; each < tasks * blocks; each++) {
                const Queries q = queries(each / blocks);
                if (each / blocks != last) worker.read_queries(q), last = each / blocks;
                worker.block(q, each % blocks, states + each * size);
            }
#pragma omp for schedule(static)
            for (int64_t t = 0; t < tasks; t++) {
                const Queries q = queries(t);
                float *state = states + t * blocks * size;
                for (int64_t b = 1; b < blocks; b++) worker.join(worker.count(q), state, state + b * size);
                worker.finish(q, state);
            }
        }
    }
}

}  // namespace

extern "C" void outrider_attend(const void *queries, const void *keys, const void *values, const void *mask, void *output,
                                const int64_t *numbers, double scale) {
    Call c;
    c.queries = queries, c.keys = keys, c.values = values, c.mask = mask, c.output = output, c.scale = float(scale);
    int64_t *const fields[] = {&c.rows, &c.heads, &c.shared, &c.width, &c.view, &c.dim, &c.value_dim,
                               &c.query_row, &c.query_head, &c.query_column, &c.key_row, &c.key_head, &c.key_step,
                               &c.value_row, &c.value_head, &c.value_step,
                               &c.mask_row, &c.mask_head, &c.mask_column, &c.mask_step, &c.mask_kind, &c.halves};
    for (int64_t *field : fields) *field = *numbers++;
    if (c.halves) attend<Half>(c);
    else attend<float>(c);
}
