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
#include <vector>

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
constexpr int PANEL = LANES * VECTORS, TILE = 6, BLOCK = 256, COLUMNS = 16;
constexpr int PART = PANEL > 32 * HALVES ? PANEL : 32 * HALVES;  // keys that are packed at once
static_assert(PART % PANEL == 0 && BLOCK % PART == 0);
constexpr float LOG2E = 1.44269504088896340736f;
constexpr float HIDDEN = -1e30f;  // a mask adds less where a key is not seen
constexpr int64_t SMALL = 1 << 17;  // products of a call that one thread computes sooner than two

typedef float Lanes __attribute__((vector_size(4 * LANES), may_alias, aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), may_alias, aligned(4)));
typedef uint16_t Half;
typedef uint16_t HalfLanes __attribute__((vector_size(2 * LANES), may_alias, aligned(2)));

inline Lanes splat(float x) { return Lanes{} + x; }

// A unit in all lanes, whose bits need not be those of a number.
inline Lanes all_lanes(const float *unit) {
    int32_t bits;
    memcpy(&bits, unit, 4);
    return (Lanes)(Ints{} + bits);
}

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
    static void interleave(const float *first, const float *, int64_t count, float *to) { memcpy(to, first, 4 * count); }
    static Lanes mac(Lanes sum, Lanes a, Lanes b) { return fma(a, b, sum); }
};

#if defined(__AVX512F__) && defined(__AVX512BF16__)
template <> struct Kind<Half> {
    static constexpr int PER = 2, WORD = 2;
    static void interleave(const Half *first, const Half *second, int64_t count, float *to) {
        const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                               39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i upper = _mm512_add_epi16(order, _mm512_set1_epi16(16));
        int64_t i = 0;
        for (; i + 2 * LANES <= count; i += 2 * LANES) {
            const __m512i a = _mm512_loadu_si512(first + i), b = second ? _mm512_loadu_si512(second + i) : __m512i{};
            _mm512_storeu_si512(to + i, _mm512_permutex2var_epi16(a, order, b));
            _mm512_storeu_si512(to + i + LANES, _mm512_permutex2var_epi16(a, upper, b));
        }
        if (i < count) {
            const __m256i a = _mm256_loadu_si256((const __m256i *)(first + i));
            const __m256i b = second ? _mm256_loadu_si256((const __m256i *)(second + i)) : __m256i{};
            const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
            _mm512_storeu_si512(to + i, _mm512_or_si512(_mm512_cvtepu16_epi32(a), high));
        }
    }
    static Lanes mac(Lanes sum, Lanes a, Lanes b) {
        return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)a, (__m512bh)(__m512)b);
    }
};
#else
template <> struct Kind<Half> {
    static constexpr int PER = 1, WORD = 2;
    static void interleave(const Half *first, const Half *, int64_t count, float *to) {
        for (int64_t i = 0; i < count; i += LANES)
            *(Ints *)(to + i) = __builtin_convertvector(*(const HalfLanes *)(first + i), Ints) << 16;
    }
    static Lanes mac(Lanes sum, Lanes a, Lanes b) { return fma(a, b, sum); }
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
            for (int n = 0; n < N; n++) sum[r][n] = Kind<T>::mac(sum[r][n], all_lanes(a + r * a_step + u), lanes[n]);
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

// LANES vectors become their transpose. All loops are unrolled, so that the vectors stay in registers.
__attribute__((always_inline)) inline void transpose(Lanes *v) {
#if defined(__AVX512F__)
    __m512 q[16];  // 128 bits `l` of q[4 g + j] are column 4 l + j of the vectors from 4 g on
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        const __m512 a = (__m512)v[i], b = (__m512)v[i + 1], c = (__m512)v[i + 2], d = (__m512)v[i + 3];
        const __m512d low = (__m512d)_mm512_unpacklo_ps(a, b), high = (__m512d)_mm512_unpackhi_ps(a, b);
        const __m512d next_low = (__m512d)_mm512_unpacklo_ps(c, d), next_high = (__m512d)_mm512_unpackhi_ps(c, d);
        q[i] = (__m512)_mm512_unpacklo_pd(low, next_low), q[i + 1] = (__m512)_mm512_unpackhi_pd(low, next_low);
        q[i + 2] = (__m512)_mm512_unpacklo_pd(high, next_high), q[i + 3] = (__m512)_mm512_unpackhi_pd(high, next_high);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512 a = _mm512_shuffle_f32x4(q[j], q[4 + j], 0x88), b = _mm512_shuffle_f32x4(q[8 + j], q[12 + j], 0x88);
        const __m512 c = _mm512_shuffle_f32x4(q[j], q[4 + j], 0xdd), d = _mm512_shuffle_f32x4(q[8 + j], q[12 + j], 0xdd);
        v[j] = (Lanes)_mm512_shuffle_f32x4(a, b, 0x88), v[8 + j] = (Lanes)_mm512_shuffle_f32x4(a, b, 0xdd);
        v[4 + j] = (Lanes)_mm512_shuffle_f32x4(c, d, 0x88), v[12 + j] = (Lanes)_mm512_shuffle_f32x4(c, d, 0xdd);
    }
#elif defined(__AVX__)
    __m256 t[8], q[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const __m256d a = (__m256d)t[i + j], b = (__m256d)t[i + j + 2];
            q[i + 2 * j] = (__m256)_mm256_unpacklo_pd(a, b), q[i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd(a, b);
        }
#pragma GCC unroll 4
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
};

// The queries of one row and key head, in some columns: query `r` is that of column `first + r / groups` and head
// `head * groups + r % groups`.
struct Queries {
    int64_t row, head, first, count;
};

// The keys that a column sees, in their order. They have consecutive positions in its text. Up to `hole` a key's
// position is its place in the view; the key at position `hole + i` is at `behind[i]`. So a node of a tree reads its
// ancestors as it would in a chain.
struct Line {
    int64_t hole;
    std::vector<int64_t> behind;

    int64_t end(int64_t view) const { return behind.empty() ? view : hole + int64_t(behind.size()); }
    int64_t place(int64_t position) const { return position < hole ? position : behind[position - hole]; }
};

// What the mask adds to a score.
inline float added(const Call &c, int64_t at) {
    if (c.mask_kind == 1) return ((const uint8_t *)c.mask)[at] ? 0.0f : -INFINITY;
    const float x = c.mask_kind == 2 ? ((const float *)c.mask)[at] : wide(((const Half *)c.mask)[at]);
    return x < HIDDEN ? -INFINITY : x * LOG2E;
}

// By the part of a mask that begins at `at`.
Line line_at(const Call &c, int64_t at) {
    Line line{c.view, {}};
    const auto next = [&](int64_t from, bool seen) {
        if (c.mask_kind == 1 && c.mask_step == 1 && from < c.view) {
            const uint8_t *mask = (const uint8_t *)c.mask + at;
            const void *found = memchr(mask + from, seen, c.view - from);
            return found ? (const uint8_t *)found - mask : c.view;
        }
        while (from < c.view && (added(c, at + from * c.mask_step) != -INFINITY) != seen) from++;
        return from;
    };
    const int64_t hole = next(next(0, true), false);
    for (int64_t k = next(hole, true); k < c.view; k = next(k + 1, true)) line.behind.push_back(k);
    if (!line.behind.empty()) line.hole = hole;
    return line;
}

// By all heads; where they see other keys, each key's position counts as its place.
Line line_of(const Call &c, int64_t row, int64_t column) {
    if (!c.mask_kind) return {c.view, {}};
    const int64_t at = row * c.mask_row + column * c.mask_column;
    Line line = line_at(c, at);
    for (int64_t h = 1; c.mask_head && h < c.heads; h++) {
        const Line other = line_at(c, at + h * c.mask_head);
        if (other.hole != line.hole || other.behind != line.behind) return {c.view, {}};
    }
    return line;
}

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// The largest scores of some queries, the sums of their weights and the weighted sums of their values.
struct State {
    float *largest, *sums, *outputs;

    State(float *at, int64_t count) : largest(at), sums(at + round_up(count, LANES)), outputs(sums + round_up(count, LANES)) {}
    static int64_t size(int64_t count, int64_t width) { return round_up(2 * round_up(count, LANES) + count * width, LANES); }
};

// Memory that a thread keeps between calls.
struct Memory {
    float *data = nullptr;
    int64_t size = 0;
    float *of(int64_t wanted) {
        if (wanted > size) {
            free(data);
            size = round_up(wanted + wanted / 2, 16);
            data = (float *)aligned_alloc(64, 4 * size);
            if (!data) throw std::bad_alloc();
        }
        return data;
    }
    ~Memory() { free(data); }
};
thread_local Memory scratch, kept;

template <class T>
struct Worker {
    using K = Kind<T>;
    const Call &c;
    const std::vector<Line> &lines;
    const int64_t groups, key_units, value_width;
    float *query, *scores, *weights, *packed, *bias, *partial;
    T *filled;

    static int64_t most_of(const Call &c) { return c.groups() * (c.width < COLUMNS ? c.width : COLUMNS); }

    Worker(const Call &call, const std::vector<Line> &lines)
        : c(call), lines(lines), groups(call.groups()), key_units(round_up(c.dim, LANES * K::WORD) / K::PER),
          value_width(round_up(c.value_dim, LANES)) {
        const int64_t most = most_of(c), longest = key_units > value_width ? key_units : value_width;
        const int64_t sizes[] = {most * key_units, most * BLOCK, most * BLOCK, PART * longest, most * BLOCK,
                                 State::size(most, value_width), 2 * LANES};
        float **const parts[] = {&query, &scores, &weights, &packed, &bias, &partial, (float **)&filled};
        int64_t total = 0;
        for (int64_t size : sizes) total += round_up(size, 16);
        float *at = scratch.of(total);
        for (int i = 0; i < 7; i++) *parts[i] = at, at += round_up(sizes[i], 16);
    }

    int64_t count(const Queries &q) const { return q.count * groups; }
    const Line &line(const Queries &q, int64_t column) const { return lines[q.row * c.width + column]; }

    void read_queries(const Queries &q) {
        for (int64_t r = 0; r < count(q); r++) {
            const T *from = (const T *)c.queries + q.row * c.query_row + (q.head * groups + r % groups) * c.query_head +
                            (q.first + r / groups) * c.query_column;
            float *to = query + r * key_units;
            memset(to, 0, 4 * key_units);
            if (K::PER == 1)
                for (int64_t d = 0; d < c.dim; d++) to[d] = wide(from[d]);
            else
                memcpy(to, from, c.dim * sizeof(T));
        }
    }

    // What is added to the scores of positions, minus infinity where a key is not seen: one row of a block for each
    // column, or for each query where heads differ. Says in which parts of the block any key is seen.
    bool read_mask(const Queries &q, const Line *behind, int64_t begin, int64_t end, bool *seen) {
        const bool by_head = c.mask_kind && c.mask_head;
        bool any = false;
        for (int p = 0; p < BLOCK / PART; p++) seen[p] = false;
        for (int64_t i = 0; i < (by_head ? count(q) : q.count); i++) {
            const int64_t column = q.first + (by_head ? i / groups : i), head = by_head ? q.head * groups + i % groups : 0;
            const int64_t at = q.row * c.mask_row + head * c.mask_head + column * c.mask_column;
            for (int p = 0; p < BLOCK / PART; p++) {
                const int64_t from = begin + p * PART, left = end - from, n = left < 0 ? 0 : left < PART ? left : PART;
                float *to = bias + i * BLOCK + p * PART, most = -INFINITY;
                if (c.mask_kind == 0) {
                    const int64_t last = c.view - c.width + column - from;
                    for (int64_t k = 0; k < n; k++) to[k] = k <= last ? 0.0f : -INFINITY;
                } else if (c.mask_kind == 1 && c.mask_step == 1 && !behind) {
                    const uint8_t *mask = (const uint8_t *)c.mask + at + from;
                    for (int64_t k = 0; k < n; k++) to[k] = mask[k] ? 0.0f : -INFINITY;
                } else {
                    for (int64_t k = 0; k < n; k++) to[k] = added(c, at + (behind ? behind->place(from + k) : from + k) * c.mask_step);
                }
                for (int64_t k = n; k < PART; k++) to[k] = -INFINITY;
                for (int64_t k = 0; k < PART; k++) most = to[k] > most ? to[k] : most;
                seen[p] |= most > -INFINITY;
                any |= seen[p];
            }
        }
        return any;
    }

    static void fetch(const T *from, int64_t count) {
        for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(from + i, 0, 2);
    }

    // Keys from a position on as lanes of panels: packed[key / PANEL][unit][key % PANEL].
    void pack_keys(const T *keys, const Line *behind, int64_t begin, int64_t end) {
        constexpr int STEP = LANES * K::WORD;
        const int64_t here = end - begin < PART ? end - begin : PART;
        for (int64_t k = 0; k < here; k += LANES) {
            float *to = packed + k / PANEL * key_units * PANEL + k % PANEL;
            const T *rows[LANES];
            T ends[LANES][STEP];  // of keys whose numbers fill no whole vector
            for (int i = 0; i < LANES; i++) {
                const int64_t position = begin + (k + i < here ? k + i : here - 1);
                rows[i] = keys + (behind ? behind->place(position) : position) * c.key_step;
            }
            for (int64_t d = 0; d < c.dim; d += STEP) {
                if (d + STEP > c.dim) {
                    memset(ends, 0, sizeof ends);
                    for (int i = 0; i < LANES; i++) memcpy(ends[i], rows[i] + d, (c.dim - d) * sizeof(T));
                    for (int i = 0; i < LANES; i++) rows[i] = ends[i] - d;
                } else if (!behind && begin + k + PART + LANES <= c.view) {
                    for (int i = 0; i < LANES; i++) __builtin_prefetch(rows[i] + PART * c.key_step + d, 0, 2);
                }
                Lanes v[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) v[i] = *(const Lanes *)(rows[i] + d);
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

    // Values from a position on, whose numbers are lanes: whole panels, then single vectors. Returns their units.
    int64_t pack_values(const T *values, const Line *behind, int64_t begin, int64_t end) {
        const int64_t here = end - begin < PART ? end - begin : PART, units = (here + K::PER - 1) / K::PER;
        const int64_t whole = c.value_dim / LANES * LANES;
        for (int64_t u = 0; u < units; u++) {
            const T *from[2] = {};
            for (int64_t i = 0; i < K::PER && u * K::PER + i < here; i++) {
                const int64_t position = begin + u * K::PER + i;
                from[i] = values + (behind ? behind->place(position) : position) * c.value_step;
                if (!behind && position + PART < c.view) fetch(from[i] + PART * c.value_step, c.value_dim);
            }
            for (int64_t d = 0; d < value_width; d += panel_at(d)) {
                const int64_t lanes = panel_at(d), full = whole - d < lanes ? (whole > d ? whole - d : 0) : lanes;
                float *to = packed + d * units + u * lanes;
                K::interleave(from[0] + d, from[1] ? from[1] + d : nullptr, full, to);
                if (full == lanes) continue;
                memset(filled, 0, 2 * LANES * sizeof(T));
                for (int i = 0; i < 2; i++)
                    if (from[i]) memcpy(filled + i * LANES, from[i] + whole, (c.value_dim - whole) * sizeof(T));
                K::interleave(filled, filled + LANES, LANES, to + full);
            }
        }
        return units;
    }
    int64_t panel_at(int64_t d) const { return value_width - d >= PANEL ? PANEL : LANES; }

    // Scores of the block become weights.
    void weigh(const Queries &q, int64_t first, int64_t vectors, const bool *seen, const State &state) {
        const bool by_head = c.mask_kind && c.mask_head;
        const float scale = c.scale * LOG2E;
        for (int64_t r = 0; r < count(q); r++) {
            float *score = scores + (first + r) * BLOCK;
            Half *half = (Half *)weights + (first + r) * BLOCK;
            const float *add = bias + (by_head ? r : r / groups) * BLOCK;
            Lanes top = splat(-INFINITY), sum = {};
            for (int64_t v = 0; v < vectors; v++) {
                if (!seen[v * LANES / PART]) continue;
                const Lanes extra = *(const Lanes *)(add + v * LANES);
                Lanes s = fma(*(const Lanes *)(score + v * LANES), splat(scale), extra);
                s = extra == -INFINITY ? extra : s;
                *(Lanes *)(score + v * LANES) = s;
                top = s > top ? s : top;
            }
            float largest = -INFINITY, total = 0;
            for (int l = 0; l < LANES; l++) largest = top[l] > largest ? top[l] : largest;
            for (int64_t v = 0; v < vectors; v++) {
                if (!seen[v * LANES / PART]) continue;
                const Lanes s = *(const Lanes *)(score + v * LANES);
                Lanes w = exp2(s - largest);
                w = s == -INFINITY ? Lanes{} : w;
                if (K::PER == 2) {
                    Ints bits = (Ints)w;
                    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
                    *(HalfLanes *)(half + v * LANES) = __builtin_convertvector(bits, HalfLanes);
                    // The sum is that of the weights that multiply the values.
                    w = (Lanes)(bits << 16);
                } else {
                    *(Lanes *)(score + v * LANES) = w;
                }
                sum += w;
            }
            for (int l = 0; l < LANES; l++) total += sum[l];
            state.largest[first + r] = largest, state.sums[first + r] = total;
        }
    }

    // What the queries read in one block alone. They are those from `first` on of the worker's and of the state's.
    void read(const Queries &q, int64_t first, const Line *behind, int64_t number, const State &state) {
        const int64_t n = count(q), begin = number * BLOCK, last = behind ? behind->end(c.view) : c.view;
        const int64_t end = begin + BLOCK < last ? begin + BLOCK : last;
        bool seen[BLOCK / PART];
        if (!read_mask(q, behind, begin, end, seen)) {
            for (int64_t r = first; r < first + n; r++) state.largest[r] = -INFINITY;
            return;
        }
        const T *keys = (const T *)c.keys + q.row * c.key_row + q.head * c.key_head;
        const T *values = (const T *)c.values + q.row * c.value_row + q.head * c.value_head;
        for (int64_t from = begin; from < end; from += PART) {
            if (!seen[(from - begin) / PART]) continue;
            pack_keys(keys, behind, from, end);
            for (int64_t k = 0; k < PART && from + k < end; k += PANEL)
                product<T, VECTORS>(scores + first * BLOCK + from - begin + k, BLOCK, query + first * key_units, key_units,
                                    packed + k * key_units, key_units, n, true);
        }
        weigh(q, first, (end - begin + LANES - 1) / LANES, seen, state);
        const float *all_weights = (K::PER == 2 ? weights : scores) + first * BLOCK / K::PER;
        bool fresh = true;
        for (int64_t from = begin; from < end; from += PART) {
            if (!seen[(from - begin) / PART]) continue;
            const int64_t units = pack_values(values, behind, from, end);
            for (int64_t d = 0; d < value_width; d += panel_at(d)) {
                const auto multiply = panel_at(d) == PANEL ? product<T, VECTORS> : product<T, 1>;
                multiply(state.outputs + first * value_width + d, value_width, all_weights + (from - begin) / K::PER,
                         BLOCK / K::PER, packed + d * units, units, n, fresh);
            }
            fresh = false;
        }
    }

    // The same, each column by itself where a tree scatters the keys that it sees.
    void block(const Queries &q, int64_t number, const State &state) {
        int64_t hole = c.view;
        for (int64_t i = q.first; i < q.first + q.count; i++)
            if (line(q, i).hole < hole) hole = line(q, i).hole;
        if ((number + 1) * BLOCK <= hole || hole == c.view) return read(q, 0, nullptr, number, state);
        for (int64_t i = 0; i < q.count; i++) {
            const Line &own = line(q, q.first + i);
            read({q.row, q.head, q.first + i, 1}, i * groups, own.behind.empty() ? nullptr : &own, number, state);
        }
    }

    // Adds another block to the state.
    void join(int64_t n, const State &state, const State &other) {
        for (int64_t r = 0; r < n; r++) {
            if (other.largest[r] == -INFINITY) continue;
            float *to = state.outputs + r * value_width;
            const float *from = other.outputs + r * value_width;
            if (state.largest[r] == -INFINITY) {
                state.largest[r] = other.largest[r], state.sums[r] = other.sums[r];
                memcpy(to, from, 4 * value_width);
                continue;
            }
            const float top = other.largest[r] > state.largest[r] ? other.largest[r] : state.largest[r];
            const Lanes here = exp2(splat(state.largest[r] - top)), there = exp2(splat(other.largest[r] - top));
            state.largest[r] = top;
            state.sums[r] = fma(splat(state.sums[r]), here, splat(other.sums[r]) * there)[0];
            for (int64_t d = 0; d < value_width; d += LANES)
                *(Lanes *)(to + d) = fma(*(const Lanes *)(to + d), here, *(const Lanes *)(from + d) * there);
        }
    }

    void finish(const Queries &q, const State &state) {
        for (int64_t r = 0; r < count(q); r++) {
            const int64_t column = q.first + r / groups, head = q.head * groups + r % groups;
            T *to = (T *)c.output + ((q.row * c.width + column) * c.heads + head) * c.value_dim;
            const float *from = state.outputs + r * value_width;
            const bool none = state.largest[r] == -INFINITY;
            // Adding 0 makes zeros positive.
            for (int64_t d = 0; d < c.value_dim; d++) put(to + d, none ? 0.0f : from[d] / state.sums[r] + 0.0f);
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
    const int64_t blocks = (c.view + BLOCK - 1) / BLOCK, column_blocks = (c.width + COLUMNS - 1) / COLUMNS;
    const int64_t tasks = c.rows * c.shared * column_blocks;
    const auto queries = [&](int64_t task) {
        const int64_t first = task % column_blocks * COLUMNS, left = c.width - first;
        return Queries{task / column_blocks / c.shared, task / column_blocks % c.shared, first, left < COLUMNS ? left : COLUMNS};
    };
    std::vector<Line> lines(c.rows * c.width);
    for (size_t i = 0; i < lines.size(); i++) lines[i] = line_of(c, i / c.width, i % c.width);
    const int64_t products = c.rows * c.heads * c.width * c.view * (c.dim + c.value_dim);
    const int threads = products < SMALL ? 1 : omp_get_max_threads();
    const int64_t most = Worker<T>::most_of(c), size = State::size(most, round_up(c.value_dim, LANES));
    const auto whole = [&](int64_t task) {
        const Queries q = queries(task);
        Worker<T> worker(c, lines);
        const int64_t n = worker.count(q);
        const State state(kept.of(size), n), partial(worker.partial, n);
        worker.read_queries(q);
        for (int64_t r = 0; r < n; r++) state.largest[r] = -INFINITY;
        for (int64_t b = 0; b < blocks; b++) {
            worker.block(q, b, partial);
            worker.join(n, state, partial);
        }
        worker.finish(q, state);
    };
    if (threads == 1) {
        const NoSubnormals flush;
        for (int64_t t = 0; t < tasks; t++) whole(t);
    } else if (blocks == 1 || tasks >= 4 * threads) {
#pragma omp parallel num_threads(threads)
        {
            const NoSubnormals flush;
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t t = 0; t < tasks; t++) whole(t);
        }
    } else {
        float *states = kept.of(tasks * blocks * size);
#pragma omp parallel num_threads(threads)
        {
            const NoSubnormals flush;
            Worker<T> worker(c, lines);
            int64_t before = -1;
            // The heads of a block follow one another: their keys lie side by side in the cache.
#pragma omp for schedule(static)
            for (int64_t each = 0; each < tasks * blocks; each++) {
                const int64_t number = each / tasks, task = each % tasks;
                const Queries q = queries(task);
                if (task != before) worker.read_queries(q), before = task;
                worker.block(q, number, State(states + (task * blocks + number) * size, worker.count(q)));
            }
#pragma omp for schedule(static) nowait
            for (int64_t t = 0; t < tasks; t++) {
                const Queries q = queries(t);
                const int64_t n = worker.count(q);
                const State state(states + t * blocks * size, n);
                for (int64_t b = 1; b < blocks; b++) worker.join(n, state, State(states + (t * blocks + b) * size, n));
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
