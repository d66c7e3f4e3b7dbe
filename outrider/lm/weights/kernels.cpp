// Products of states with packed weights, and rows of packed weights. `blocks.py` says how panels are laid out.
//
// A thread computes panels of 16 outputs: its share, and then what others have left of theirs. It unpacks the codes of a
// group of 32 weights once and uses them for up to eight states. Each state has sums of its own, which are added in one
// fixed order, so its outputs do not depend on the other states, on the number of threads or on who computes what.
//
// Products of bfloat16 states:
// - with AVX-512 and its instructions for bfloat16: codes are exact in bfloat16, products are added in float32. With AMX
//   too, its tiles multiply up to 16 states at once;
// - with AVX2: the 32 states of a group are whole numbers times a power of two, and their products with codes are added
//   as whole numbers, exactly. The whole numbers have 23 bits (of codes of 8 bits: 30), so a state keeps all its bits
//   unless it is 2^15 (2^22) times smaller than the largest of its group, or smaller than 2^-80;
// - otherwise as float32.
// Float32 states are multiplied with codes in float32. In all of them, the sum over a group is multiplied with the
// scale of the group in float32.
//
// Or the 32 states of a group are rounded to whole numbers of 8 bits times their largest magnitude / 127. Their products
// with codes are added as whole numbers, exactly, and these sums in one order: every processor gets the same bits.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if !defined(WITH_AVX512_BF16) && !defined(WITH_AVX2)
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__F16C__)
#define WITH_AVX512_BF16
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define WITH_AMX
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WITH_AVX2
#endif
#endif
#if defined(WITH_AVX512_BF16) || defined(WITH_AVX2)
#include <immintrin.h>
#endif
#ifdef WITH_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

// The functions that others call. Types of numbers: 0 is float32, 1 is bfloat16. Kinds of blocks: as GGUF numbers them.
extern "C" {
// Products of states [rows, features] with `count` matrices one behind another, plus a bias (or null): out [rows, sum
// of the matrices' sizes]. `stride` is the distance of two states in numbers; the numbers of a state have none.
// Returns 0, or 1 if a type or a kind is unknown.
int outrider_block_linear(const void *states, int64_t states_type, int64_t rows, int64_t stride, int64_t features,
                          int64_t count, const void *const *blocks, const int64_t *kinds, const int64_t *sizes,
                          const void *bias, int64_t bias_type, void *out, int64_t out_type);
// The same with states that are rounded to 8 bits. Matrices of bfloat16 are multiplied as above.
int outrider_int8_linear(const void *states, int64_t states_type, int64_t rows, int64_t stride, int64_t features,
                         int64_t count, const void *const *blocks, const int64_t *kinds, const int64_t *sizes,
                         const void *bias, int64_t bias_type, void *out, int64_t out_type);
// Rows of a matrix: out [count, features]. Returns as above, and 2 if an id is not in 0 .. size - 1.
int outrider_block_rows(const int64_t *ids, int64_t count, const void *blocks, int64_t kind, int64_t size,
                        int64_t features, void *out, int64_t out_type);
}

namespace {

constexpr int PANEL = 16, GROUP = 32, MOST = 8;   // rows of a panel, weights of a group, states of one pass
constexpr int64_t CHUNK = 64, ALONE = 1 << 14;    // states between two passes over a panel; weights for one thread
constexpr int64_t MOST_SHARES = 64;               // threads that take each other's panels
constexpr int64_t OWN_BYTES = 1 << 14, OTHERS_BYTES = 1 << 13;  // of what a thread takes at least
enum Type { FLOAT32 = 0, BFLOAT16 = 1 };
enum Kind { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 };

// As `BlockKind` in blocks.py.
struct Layout {
    int weights, header, bits, zero;
    bool offsets;  // whether a weight is more than a scale times a code
    constexpr int codes() const { return PANEL * GROUP * bits / 8; }  // bytes of a group
    constexpr int chunk() const { return PANEL * header + weights / GROUP * codes(); }
    constexpr int64_t panel(int64_t features) const { return features / weights * chunk(); }  // bytes of a panel
};

constexpr Layout layout_of(int kind) {
    switch (kind) {
        case Q4_0: return {32, 2, 4, 8, false};
        case Q4_1: return {32, 4, 4, 0, true};
        case Q5_0: return {32, 2, 5, 16, false};
        case Q5_1: return {32, 4, 5, 0, true};
        case Q8_0: return {32, 2, 8, 0, false};
        case Q4_K: return {256, 20, 4, 0, true};
        case Q5_K: return {256, 20, 5, 0, true};
        case Q6_K: return {256, 18, 6, 32, false};
        case BF16: return {32, 0, 16, 0, false};
        default: return {0, 0, 0, 0, false};
    }
}

float from_bfloat16(uint16_t value) {
    const uint32_t bits = uint32_t(value) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_float16(uint16_t value) {
    // Shifted into a float32 whose exponent is 112 too small; infinities and numbers that are none are put right.
    uint32_t bits = uint32_t(value & 0x7fff) << 13;
    float result;
    if (bits >= 0x7c00u << 13) {
        bits += 0x70000000;
        memcpy(&result, &bits, 4);
    } else {
        memcpy(&result, &bits, 4);
        result *= 0x1p112f;
    }
    return value & 0x8000 ? -result : result;
}

// Scales and offsets of the 16 rows of a group, or of half a group.
struct Scales {
    alignas(64) float scale[PANEL], offset[PANEL];
};

// `block` is a block of a panel, `group` a group in it, `half` its first or second half.
template <int KIND>
inline void read_scales(const uint8_t *block, int group, int half, Scales &scales) {
    const uint8_t *small = block + 64 + group * 32, *sixth = block + 32 + group * 32 + half * 16;
    for (int c = 0; c < PANEL; c++) {
        uint16_t d = 0, m = 0;
        if (KIND != BF16) memcpy(&d, block + 2 * c, 2);
        if (layout_of(KIND).offsets) memcpy(&m, block + 32 + 2 * c, 2);
        scales.scale[c] = KIND == BF16 ? 1 : from_float16(d);
        scales.offset[c] = layout_of(KIND).offsets ? from_float16(m) : 0;
        if (KIND == Q4_K || KIND == Q5_K) scales.scale[c] *= small[c], scales.offset[c] *= -float(small[16 + c]);
        if (KIND == Q6_K) scales.scale[c] *= int8_t(sixth[c]);
    }
}

// The codes of a group as float32, those of zero already subtracted: [weight of the group, row of the panel].
template <int KIND>
inline void unpack(const uint8_t *codes, float (*tile)[PANEL]) {
    constexpr Layout layout = layout_of(KIND);
    if (layout.bits >= 8) {
        for (int k = 0; k < GROUP; k++)
            for (int c = 0; c < PANEL; c++) {
                const int index = k / 2 * 2 * PANEL + 2 * c + k % 2;
                uint16_t wide = 0;
                if (layout.bits == 16) memcpy(&wide, codes + 2 * index, 2);
                tile[k][c] = layout.bits == 16 ? from_bfloat16(wide) : float(int8_t(codes[index]));
            }
        return;
    }
    for (int q = 0; q < 4; q++) {
        uint16_t low[2][PANEL], high[2][PANEL];
        for (int half = 0; half < 2; half++)
            for (int c = 0; c < PANEL; c += 4) {
                memcpy(low[half] + c, codes + 64 * q + 4 * c + 8 * half, 8);
                if (layout.bits > 4) memcpy(high[half] + c, codes + (layout.bits == 5 ? 256 : 256 + 64 * (q / 2)) + 4 * c + 8 * half, 8);
            }
        for (int p = 0; p < 2; p++)
            for (int j = 0; j < 4; j++)
                for (int c = 0; c < PANEL; c++) {
                    int code = low[j / 2][c] >> (8 * p + 4 * (j % 2)) & 15;
                    if (layout.bits == 5) code |= (high[j / 2][c] >> (8 * p + 2 * q + j % 2) & 1) << 4;
                    if (layout.bits == 6) code |= (high[j / 2][c] >> (8 * p + 4 * (q % 2) + 2 * (j % 2)) & 3) << 4;
                    tile[8 * q + 2 * j + p][c] = float(code - layout.zero);
                }
    }
}

// What is done with the 16 outputs of a state and a panel.
struct Output {
    void *out;
    const void *bias;
    int64_t type, bias_type, width;  // width: numbers between two states

    void store(const float *values, int64_t state, int64_t first, int64_t count) const {
        if (count == PANEL) store<PANEL>(values, state, first);
        else
            for (int64_t c = 0; c < count; c++) store<1>(values + c, state, first + c);
    }

    // So many numbers, a constant, so that the compiler makes vectors of them.
    template <int N>
    void store(const float *values, int64_t state, int64_t first) const {
        float biased[N];
        if (bias == nullptr)
            for (int c = 0; c < N; c++) biased[c] = values[c];
        else if (bias_type == FLOAT32)
            for (int c = 0; c < N; c++) biased[c] = values[c] + static_cast<const float *>(bias)[first + c];
        else
            for (int c = 0; c < N; c++) biased[c] = values[c] + from_bfloat16(static_cast<const uint16_t *>(bias)[first + c]);
        if (type == FLOAT32)
            memcpy(static_cast<float *>(out) + state * width + first, biased, sizeof biased);
        else {
            uint32_t bits[N];
            memcpy(bits, biased, sizeof bits);
            uint16_t rounded[N];
            for (int c = 0; c < N; c++) {
                const uint32_t near = (bits[c] + 0x7fff + ((bits[c] >> 16) & 1)) >> 16;
                rounded[c] = uint16_t((bits[c] & 0x7fffffff) > 0x7f800000 ? 0x7fc0u : near);
            }
            memcpy(static_cast<uint16_t *>(out) + state * width + first, rounded, sizeof rounded);
        }
    }
};

// A matrix within a product.
struct Matrix {
    const uint8_t *data;
    int64_t kind, size, first;  // first: number of its first output
};

struct States {
    const void *data;
    int64_t type, rows, stride, features;
    int64_t groups() const { return features / GROUP; }
    const float *floats(int64_t row) const { return static_cast<const float *>(data) + row * stride; }
    const uint16_t *halves(int64_t row) const { return static_cast<const uint16_t *>(data) + row * stride; }
};

// A kernel whose functions multiply a panel with one to eight states. `first` is the first state, `local` its place among
// those for which there are groups.
template <class Kernel>
struct Few {
    static constexpr int PASS = MOST;
    static void finish() {}

    template <int KIND, class Group>
    static void pass(const uint8_t *data, const States &states, const Group *groups, int64_t first, int64_t local, int count, float (*outputs)[PANEL]) {
        static const decltype(&Kernel::template panel<KIND, 1>) of[] = {
            nullptr, Kernel::template panel<KIND, 1>, Kernel::template panel<KIND, 2>, Kernel::template panel<KIND, 3>,
            Kernel::template panel<KIND, 4>, Kernel::template panel<KIND, 5>, Kernel::template panel<KIND, 6>,
            Kernel::template panel<KIND, 7>, Kernel::template panel<KIND, 8>};
        of[count](data, states, groups, first, local, outputs);
    }
};

// ---- float32

typedef float Vector __attribute__((vector_size(64)));

struct Plain : Few<Plain> {
    struct Group {};
    static constexpr bool takes(int64_t) { return true; }
    static bool prepares(const std::vector<Matrix> &) { return false; }
    static void prepare(const States &, int64_t, int64_t, Group &) {}

    // Adds the products of one state with a part of a group. Four sums, whatever is beside it.
    static __attribute__((noinline)) void add(const float (*tile)[PANEL], const float *x, int begin, int end,
                                              const Scales &scales, Vector &total) {
        Vector sums[4] = {};
        float sum = 0;
        for (int k = begin; k < end; k += 4)
            for (int i = 0; i < 4; i++) {
                sums[i] += *reinterpret_cast<const Vector *>(tile[k + i]) * x[k + i];
                sum += x[k + i];
            }
        total += (sums[0] + sums[1] + (sums[2] + sums[3])) * *reinterpret_cast<const Vector *>(scales.scale);
        total += *reinterpret_cast<const Vector *>(scales.offset) * sum;
    }

    template <int KIND, int R>
    static void panel(const uint8_t *data, const States &states, const Group *, int64_t first, int64_t, float (*outputs)[PANEL]) {
        panel<KIND>(data, states, first, R, outputs);
    }

    template <int KIND>
    static void panel(const uint8_t *data, const States &states, int64_t first, int count, float (*outputs)[PANEL]) {
        constexpr Layout layout = layout_of(KIND);
        constexpr int PARTS = KIND == Q6_K ? 2 : 1;
        alignas(64) float tile[GROUP][PANEL];
        Vector totals[MOST] = {};
        for (int64_t k = 0; k < states.features; k += GROUP) {
            const uint8_t *block = data + k / layout.weights * layout.chunk();
            const int group = int(k % layout.weights / GROUP);
            unpack<KIND>(block + PANEL * layout.header + group * layout.codes(), tile);
            for (int part = 0; part < PARTS; part++) {
                Scales scales;
                read_scales<KIND>(block, group, part, scales);
                for (int r = 0; r < count; r++) {
                    float x[GROUP];
                    if (states.type == FLOAT32)
                        memcpy(x, states.floats(first + r) + k, sizeof x);
                    else
                        for (int i = 0; i < GROUP; i++) x[i] = from_bfloat16(states.halves(first + r)[k + i]);
                    add(tile, x, GROUP / PARTS * part, GROUP / PARTS * (part + 1), scales, totals[r]);
                }
            }
        }
        memcpy(outputs, totals, count * sizeof(Vector));
    }
};

#ifdef WITH_AVX512_BF16

// ---- AVX-512 with bfloat16: every kind

struct Products : Few<Products> {
    struct Group {
        float sum;  // of the states of a group
    };
    static constexpr bool takes(int64_t) { return true; }
    static bool prepares(const std::vector<Matrix> &matrices) {
        return std::any_of(matrices.begin(), matrices.end(), [](const Matrix &each) { return layout_of(int(each.kind)).offsets; });
    }

    static void prepare(const States &states, int64_t row, int64_t number, Group &group) {
        const __m512i x = _mm512_loadu_si512(states.halves(row) + number * GROUP);
        const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
        const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int32_t(0xffff0000))));
        group.sum = _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
    }

    // The two bytes of codes as bfloat16, those of zero subtracted. An index has six bits, whatever stands above a code.
    struct Table {
        alignas(64) uint8_t lower[64], upper[64];
        Table(int bits, int zero) {
            for (int i = 0; i < 64; i++) {
                const uint16_t code = to_bfloat16(float(i % (1 << bits) - zero));
                lower[i] = uint8_t(code), upper[i] = uint8_t(code >> 8);
            }
        }
    };

    // Weights with offsets need no table: a code of B bits behind the exponent of 2^B is the bfloat16 2^B + code. What the
    // states are multiplied with too much, their sum takes back (`Factors::of_sum`), which they need for offsets anyway.
    template <int KIND>
    static constexpr int surplus() { return layout_of(KIND).offsets ? 1 << layout_of(KIND).bits : 0; }

    template <int BY>
    static __m512i moved(__m512i words) {
        if (BY == 0) return words;
        return BY > 0 ? _mm512_slli_epi16(words, BY > 0 ? BY : 0) : _mm512_srli_epi16(words, BY < 0 ? -BY : 0);
    }

    // A code in each byte, from bit FROM on: four bits of it from the lower (J = 0) or upper half of `low`, the fifth, or
    // the fifth and the sixth, from `high`.
    template <int BITS, int FROM, int Q, int J>
    static __m512i codes_at(__m512i low, __m512i high) {
        constexpr int FIFTH = FROM + 4, AT = BITS == 5 ? 2 * Q + J : 4 * (Q % 2) + 2 * J;
        const __m512i four = moved<FROM - 4 * J>(low);
        if (BITS == 4) return four;
        return _mm512_ternarylogic_epi64(four, moved<FIFTH - AT>(high), _mm512_set1_epi8((1 << (FROM + BITS)) - (1 << FIFTH)), 0xd8);
    }

    // Operands of the weights 8 Q + 2 J and 8 Q + 2 J + 4, each with the one behind it.
    template <int KIND, int Q, int J>
    static void operands(__m512i low, __m512i high, __m512i lower_table, __m512i upper_table, __m512bh (&w)[2]) {
        constexpr int BITS = layout_of(KIND).bits, FROM = surplus<KIND>() ? 7 - BITS : 0;
        const __m512i code = codes_at<BITS, FROM, Q, J>(low, high);
        __m512i lower, upper;
        if (surplus<KIND>()) {
            // The mantissa of bfloat16 has seven bits; the last one of the exponent stands before it.
            lower = _mm512_ternarylogic_epi64(code, _mm512_set1_epi8((1 << 7) - (1 << FROM)), _mm512_set1_epi8(char((127 + BITS) << 7)), 0xea);
            upper = _mm512_set1_epi8((127 + BITS) >> 1);
        } else {
            lower = _mm512_permutexvar_epi8(code, lower_table);
            upper = _mm512_permutexvar_epi8(code, upper_table);
        }
        w[0] = (__m512bh)_mm512_unpacklo_epi8(lower, upper);
        w[1] = (__m512bh)_mm512_unpackhi_epi8(lower, upper);
    }

    static __m512bh pairs(const uint8_t *codes) {
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + 16))));
        return _mm512_cvtne2ps_pbh(high, low);
    }

    template <int KIND, int Q, int J>
    static void operands(const uint8_t *codes, __m512i high, __m512i lower, __m512i upper, __m512bh (&w)[2]) {
        constexpr int BITS = layout_of(KIND).bits;
        if constexpr (BITS == 16) {
            for (int i = 0; i < 2; i++) w[i] = (__m512bh)_mm512_loadu_si512(codes + 256 * Q + 64 * J + 128 * i);
        } else if constexpr (BITS == 8) {
            for (int i = 0; i < 2; i++) w[i] = pairs(codes + 128 * Q + 32 * J + 64 * i);
        } else {
            operands<KIND, Q, J>(_mm512_loadu_si512(codes + 64 * Q), high, lower, upper, w);
        }
    }

    // Scales and offsets of the sixteen rows of a block. What its groups share is computed once.
    template <int KIND>
    struct Factors {
        __m512 d, m;
        const uint8_t *block;

        explicit Factors(const uint8_t *block) : d(_mm512_set1_ps(1)), m(_mm512_setzero_ps()), block(block) {
            if (KIND != BF16) d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)block));
            if (layout_of(KIND).offsets) m = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(block + 32)));
            if (KIND == Q4_K || KIND == Q5_K) m = _mm512_sub_ps(_mm512_setzero_ps(), m);
        }

        // Of the first or the second half of a group.
        __m512 scales(int group, int half) const {
            const __m128i *small = (const __m128i *)(KIND == Q6_K ? block + 32 + group * 32 + 16 * half : block + 64 + group * 32);
            if (KIND == Q6_K) return _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(small))));
            if (KIND == Q4_K || KIND == Q5_K) return _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(small))));
            return d;
        }

        __m512 offsets(int group) const {
            if (KIND != Q4_K && KIND != Q5_K) return m;
            return _mm512_mul_ps(m, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(block + 64 + group * 32 + 16)))));
        }

        // What the sum of the states is multiplied with.
        __m512 of_sum(int group, __m512 scale) const { return _mm512_fnmadd_ps(scale, _mm512_set1_ps(surplus<KIND>()), offsets(group)); }
    };

    // Adds the products of two states, which are read as one number, for every output.
    typedef int32_t __attribute__((may_alias, aligned(2))) Pair;
    static void add(__m512 &sum, __m512bh w, const uint16_t *states) {
#ifdef __AVX512BF16__
        // Compilers load the pair into a register first: a tenth more time for eight states.
        __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const Pair *)states));
#else
        sum = _mm512_dpbf16_ps(sum, w, (__m512bh)_mm512_set1_epi32(*(const Pair *)states));
#endif
    }

    template <int KIND, int Q, int J, int R>
    static void add(const uint8_t *codes, __m512i high, __m512i lower, __m512i upper, const uint16_t *(&x)[R], __m512 (&sums)[R]) {
        __m512bh w[2];
        operands<KIND, Q, J>(codes, high, lower, upper, w);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) add(sums[r], w[i], x[r] + 8 * Q + 2 * J + 4 * i);
    }

    template <int KIND, int Q, int R>
    static void add(const uint8_t *codes, __m512i high, __m512i lower, __m512i upper, const uint16_t *(&x)[R],
                    __m512 (&even)[R], __m512 (&odd)[R]) {
        add<KIND, Q, 0, R>(codes, high, lower, upper, x, even);
        add<KIND, Q, 1, R>(codes, high, lower, upper, x, odd);
    }

    template <int KIND, int R>
    static void panel(const uint8_t *data, const States &states, const Group *groups, int64_t first, int64_t local, float (*outputs)[PANEL]) {
        constexpr Layout layout = layout_of(KIND);
        static const Table table(layout.bits, layout.zero);
        const __m512i lower = _mm512_load_si512(table.lower), upper = _mm512_load_si512(table.upper);
        __m512 total[R], even[R], odd[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) total[r] = even[r] = odd[r] = _mm512_setzero_ps();
        const int64_t num_groups = states.groups();
        const uint16_t *x[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) x[r] = states.halves(first + r);
        const uint8_t *block = data;
        for (int64_t number = 0; number < num_groups; block += layout.chunk()) {
            const Factors<KIND> factors(block);
            for (int group = 0; group < layout.weights / GROUP; group++, number++) {
                const uint8_t *codes = block + PANEL * layout.header + group * layout.codes();
                // Weights are read once, so what else is in the larger caches stays there.
                for (int i = 0; i < layout.codes(); i += 64) _mm_prefetch((const char *)codes + i + 4096, _MM_HINT_NTA);
                // Two sums for each state, whatever R is. They go on over the groups of weights without scales.
                if (KIND != BF16)
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) even[r] = odd[r] = _mm512_setzero_ps();
                __m512i high = _mm512_setzero_si512();
                if (layout.bits == 5 || layout.bits == 6) high = _mm512_loadu_si512(codes + 256);
                add<KIND, 0, R>(codes, high, lower, upper, x, even, odd);
                add<KIND, 1, R>(codes, high, lower, upper, x, even, odd);
                if (KIND == Q6_K) {
                    const __m512 scale = factors.scales(group, 0);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        total[r] = _mm512_fmadd_ps(_mm512_add_ps(even[r], odd[r]), scale, total[r]);
                        even[r] = odd[r] = _mm512_setzero_ps();
                    }
                    high = _mm512_loadu_si512(codes + 320);
                }
                add<KIND, 2, R>(codes, high, lower, upper, x, even, odd);
                add<KIND, 3, R>(codes, high, lower, upper, x, even, odd);
                const __m512 scale = factors.scales(group, 1), offset = factors.of_sum(group, scale);
                if (KIND != BF16)
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        total[r] = _mm512_fmadd_ps(_mm512_add_ps(even[r], odd[r]), scale, total[r]);
                        if (layout.offsets) {
                            const __m512 sum = _mm512_set1_ps(groups[(local + r) * num_groups + number].sum);
                            total[r] = _mm512_fmadd_ps(offset, sum, total[r]);
                        }
                    }
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    x[r] += GROUP;
                    // A register of its own: otherwise compilers keep the distances of all numbers in memory.
                    __asm__("" : "+r"(x[r]));
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            if (KIND == BF16) total[r] = _mm512_add_ps(even[r], odd[r]);
            _mm512_storeu_ps(outputs[r], total[r]);
        }
    }
};

#ifdef WITH_AMX

// ---- AMX: every kind, the codes unpacked as above

struct Tiles : Products {
    static constexpr int PASS = CHUNK;
    static constexpr int FEW = 16, LAG = 5, RING = 8;  // states of a product; see `blocks`

    // Whether the system lets this process use tiles. It is asked once.
    static bool permitted() {
        static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
        return granted;
    }

    // Tiles 0 and 1 hold products, 4 and 5 states, 6 and 7 weights. Setting them up takes as long as some products.
    static void configure(int rows, int depth) {
        static thread_local int current[2] = {0, 0};
        if (current[0] == rows && current[1] == depth) return;
        current[0] = rows, current[1] = depth;
        if (rows == 0) return _tile_release();
        struct alignas(64) {
            uint8_t palette = 1, first = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } layout;
        for (int i = 0; i < 8; i++) {
            layout.bytes[i] = i == 4 || i == 5 ? uint16_t(2 * depth) : 64;
            layout.rows[i] = i >= 6 ? uint8_t(depth / 2) : uint8_t(rows);
        }
        _tile_loadconfig(&layout);
    }

    static void finish() { configure(0, 0); }

    template <int KIND, int Q>
    static void unpack(const uint8_t *codes, __m512i high, __m512i lower, __m512i upper, uint8_t *weights) {
        __m512bh even[2], odd[2];
        operands<KIND, Q, 0>(codes, high, lower, upper, even);
        operands<KIND, Q, 1>(codes, high, lower, upper, odd);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            _mm512_store_si512(weights + 256 * Q + 128 * i, (__m512i)even[i]);
            _mm512_store_si512(weights + 256 * Q + 128 * i + 64, (__m512i)odd[i]);
        }
    }

    template <int KIND>
    static void unpack(const uint8_t *codes, __m512i lower, __m512i upper, uint8_t *weights) {
        __m512i high = _mm512_setzero_si512();
        if (layout_of(KIND).bits == 5 || layout_of(KIND).bits == 6) high = _mm512_loadu_si512(codes + 256);
        unpack<KIND, 0>(codes, high, lower, upper, weights);
        unpack<KIND, 1>(codes, high, lower, upper, weights);
        if (KIND == Q6_K) high = _mm512_loadu_si512(codes + 320);
        unpack<KIND, 2>(codes, high, lower, upper, weights);
        unpack<KIND, 3>(codes, high, lower, upper, weights);
    }

    // The products of some states with `DEPTH` weights. Those of even turns use other tiles than those of odd turns.
    template <int DEPTH>
    static void multiply(int turn, const uint16_t *x, int64_t stride, const uint8_t *weights, float (*sums)[PANEL]) {
// Compilers want the numbers of tiles written out.
#define MULTIPLY(SUMS, STATES, WEIGHTS) \
    _tile_zero(SUMS); \
    _tile_loadd(STATES, x, 2 * stride); \
    _tile_loadd(WEIGHTS, weights, 64); \
    _tile_dpbf16ps(SUMS, STATES, WEIGHTS); \
    _tile_stored(SUMS, sums, 64);
        if (turn % 2 == 0) {
            MULTIPLY(0, 4, 6)
        } else {
            MULTIPLY(1, 5, 7)
        }
#undef MULTIPLY
    }

    template <int KIND>
    static void pass(const uint8_t *data, const States &states, const Group *groups, int64_t first, int64_t local, int count, float (*outputs)[PANEL]) {
        if constexpr (KIND == BF16) return bfloat16(data, states, first, count, outputs);
        // As many whole tiles as there are, then the rest.
        const int whole = count / FEW * FEW;
        if (whole > 0) blocks<KIND>(data, states, groups, first, local, whole, outputs);
        if (whole < count) blocks<KIND>(data, states, groups, first + whole, local + whole, count - whole, outputs + whole);
    }

    // A group is unpacked, some groups later multiplied, and as many later added to the outputs, because a tile cannot
    // read what is still being written, and its products cannot be read before they are.
    template <int KIND>
    static void blocks(const uint8_t *data, const States &states, const Group *groups, int64_t first, int64_t local, int count, float (*outputs)[PANEL]) {
        constexpr Layout layout = layout_of(KIND);
        constexpr int PARTS = KIND == Q6_K ? 2 : 1, DEPTH = GROUP / PARTS, EACH = layout.weights / GROUP;
        static const Table table(layout.bits, layout.zero);
        const __m512i lower = _mm512_load_si512(table.lower), upper = _mm512_load_si512(table.upper);
        alignas(64) uint8_t weights[RING][PARTS][2 * DEPTH * PANEL];
        alignas(64) float sums[PASS / FEW][RING][PARTS][FEW][PANEL];
        const int64_t num_groups = states.groups();
        const int rows = std::min(FEW, count), tiles = count / rows;
        configure(rows, DEPTH);
        for (int r = 0; r < count; r++) _mm512_store_ps(outputs[r], _mm512_setzero_ps());
        for (int64_t step = 0; step < num_groups + 2 * LAG; step++) {
            if (step < num_groups) {
                const uint8_t *codes = data + step / EACH * layout.chunk() + PANEL * layout.header + step % EACH * layout.codes();
                for (int k = 0; k < layout.codes(); k += 64) _mm_prefetch((const char *)codes + k + 4096, _MM_HINT_T0);
                unpack<KIND>(codes, lower, upper, weights[step % RING][0]);
            }
            // Compilers do not know that tiles read and write memory.
            __asm__ volatile("" ::: "memory");
            const int64_t now = step - LAG, then = now - LAG;
            if (now >= 0 && now < num_groups)
                for (int tile = 0; tile < tiles; tile++) {
                    const uint16_t *x = states.halves(first + tile * FEW) + now * GROUP;
                    uint8_t(*w)[2 * DEPTH * PANEL] = weights[now % RING];
                    float(*out)[FEW][PANEL] = sums[tile][now % RING];
                    for (int part = 0; part < PARTS; part++)
                        multiply<DEPTH>(int(now + tile) * PARTS + part, x + part * DEPTH, states.stride, w[part], out[part]);
                }
            __asm__ volatile("" ::: "memory");
            if (then < 0) continue;
            const uint8_t *block = data + then / EACH * layout.chunk();
            const Factors<KIND> factors(block);
            const __m512 scale = factors.scales(int(then % EACH), 0), second = factors.scales(int(then % EACH), 1);
            const __m512 offset = factors.of_sum(int(then % EACH), scale);
            for (int r = 0; r < count; r++) {
                const float(*sum)[FEW][PANEL] = sums[r / FEW][then % RING];
                __m512 total = _mm512_fmadd_ps(_mm512_load_ps(sum[0][r % FEW]), scale, _mm512_load_ps(outputs[r]));
                if (PARTS == 2) total = _mm512_fmadd_ps(_mm512_load_ps(sum[PARTS - 1][r % FEW]), second, total);
                if (layout.offsets) total = _mm512_fmadd_ps(offset, _mm512_set1_ps(groups[(local + r) * num_groups + then].sum), total);
                _mm512_store_ps(outputs[r], total);
            }
        }
    }

    // Weights of bfloat16 lie as tiles want them, and have no scales: two sums for each state.
    static void bfloat16(const uint8_t *data, const States &states, int64_t first, int count, float (*outputs)[PANEL]) {
        const int64_t num_groups = states.groups();
        alignas(64) float odd[FEW][PANEL];
        for (int row = 0; row < count; row += FEW) {
            const int rows = std::min(FEW, count - row);
            configure(rows, GROUP);
            _tile_zero(0);
            _tile_zero(1);
            const uint16_t *x = states.halves(first + row);
            for (int64_t number = 0; number < num_groups; number += 2) {
                const uint8_t *weights = data + number * 1024;
                for (int k = 0; k < 2048; k += 64) _mm_prefetch((const char *)weights + k + 8192, _MM_HINT_T0);
                _tile_loadd(4, x + number * GROUP, 2 * states.stride);
                _tile_loadd(6, weights, 64);
                _tile_dpbf16ps(0, 4, 6);
                if (number + 1 == num_groups) break;
                _tile_loadd(5, x + (number + 1) * GROUP, 2 * states.stride);
                _tile_loadd(7, weights + 1024, 64);
                _tile_dpbf16ps(1, 5, 7);
            }
            _tile_stored(0, outputs[row], 64);
            _tile_stored(1, odd, 64);
            __asm__ volatile("" ::: "memory");
            for (int r = 0; r < rows; r++) _mm512_store_ps(outputs[row + r], _mm512_add_ps(_mm512_load_ps(outputs[row + r]), _mm512_load_ps(odd[r])));
        }
    }
};

#endif

#elif defined(WITH_AVX2)

// ---- AVX2: codes of 4 to 6 bits times three digits of the states

inline __m256 small_scales(const uint8_t *bytes, bool sign) {
    const __m128i eight = _mm_loadl_epi64((const __m128i *)bytes);
    return _mm256_cvtepi32_ps(sign ? _mm256_cvtepi8_epi32(eight) : _mm256_cvtepu8_epi32(eight));
}

inline __m256 halves(const uint8_t *bytes) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)bytes)); }

inline __m256i broadcast(const void *four) {
    int32_t bits;
    memcpy(&bits, four, 4);
    return _mm256_set1_epi32(bits);
}

// A power of two, of an exponent as float32 keeps it.
inline float power(int exponent) {
    const uint32_t bits = uint32_t(exponent) << 23;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

// The states of a group, eight in a vector, and an exponent: they are at most 254 / 256 of two to the next one. That
// is the largest exponent among them, or the next one, and at least 32.
inline int read_group(const States &states, int64_t row, int64_t number, __m256 (&x)[4]) {
    __m256i most = _mm256_setzero_si256();
    for (int q = 0; q < 4; q++) {
        const __m128i eight = _mm_loadu_si128((const __m128i *)(states.halves(row) + number * GROUP + 8 * q));
        const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
        x[q] = _mm256_castsi256_ps(bits);
        most = _mm256_max_epi32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    alignas(32) int32_t each[8];
    _mm256_store_si256((__m256i *)each, most);
    return std::max((*std::max_element(each, each + 8) + (1 << 16)) >> 23, 32);
}

inline int32_t sum_of(__m256i values) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

struct Digits : Few<Digits> {
    // The states of a group are whole numbers times `unit`, and those are 65536 a + 256 b + c with digits from -128 to
    // 127; a is at least -127.
    struct Group {
        int8_t digits[3][GROUP];  // of 8 q + 0, 4, 1, 5, 2, 6, 3, 7, as codes lie in their bytes
        int32_t high[2], low[2];  // sums of 256 a + b and of c, of both halves
        float unit, unit_high;    // unit_high: of 256 a + b
        float sum;                // of the states
        int32_t third;            // whether any c is not 0
    };
    static constexpr bool takes(int64_t kind) { return layout_of(int(kind)).bits <= 6; }
    static bool prepares(const std::vector<Matrix> &) { return true; }

    static void prepare(const States &states, int64_t row, int64_t number, Group &group) {
        __m256 x[4];
        const int exponent = read_group(states, row, number, x);
        const __m256 scale = _mm256_set1_ps(power(127 + 149 - exponent));
        const __m256i mask = _mm256_set1_epi32(255), half = _mm256_set1_epi32(128);
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const __m256i lowest = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
        __m256i high[2] = {}, low[2] = {}, third = _mm256_setzero_si256();
        for (int q = 0; q < 4; q++) {
            const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(x[q], scale));
            const __m256i c = _mm256_sub_epi32(_mm256_and_si256(_mm256_add_epi32(whole, half), mask), half);
            const __m256i rest = _mm256_srai_epi32(_mm256_sub_epi32(whole, c), 8);
            const __m256i b = _mm256_sub_epi32(_mm256_and_si256(_mm256_add_epi32(rest, half), mask), half);
            const __m256i a = _mm256_srai_epi32(_mm256_sub_epi32(rest, b), 8);
            high[q / 2] = _mm256_add_epi32(high[q / 2], rest), low[q / 2] = _mm256_add_epi32(low[q / 2], c);
            third = _mm256_or_si256(third, c);
            const __m256i digits[3] = {a, b, c};
            for (int d = 0; d < 3; d++) {
                const __m256i bytes = _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(digits[d], order), lowest);
                const int32_t both[2] = {_mm256_extract_epi32(bytes, 0), _mm256_extract_epi32(bytes, 4)};
                memcpy(group.digits[d] + 8 * q, both, 8);
            }
        }
        for (int i = 0; i < 2; i++) group.high[i] = sum_of(high[i]), group.low[i] = sum_of(low[i]);
        group.third = !_mm256_testz_si256(third, third);
        // Infinities and numbers that are none make every output one that is none.
        group.unit = exponent == 255 ? from_float16(0x7e00) : power(exponent - 22);
        group.unit_high = 256 * group.unit;
        group.sum = (float(group.high[0] + group.high[1]) * 256 + float(group.low[0] + group.low[1])) * group.unit;
    }

    // The four bytes of each of eight rows, one row behind another: those of even and of odd weights j // 2 in turn.
    static inline __m256i by_rows(const uint8_t *codes) {
        const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
        return _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)codes), order);
    }

    // Eight rows of a panel: in byte i of vector 2 q + h, the codes of 8 q + 2 h + 0, 4, 1, 5.
    template <int BITS>
    static inline void unpack_half(const uint8_t *codes, int half, __m256i (&w)[8]) {
        const __m256i mask = _mm256_set1_epi8(15), upper = _mm256_set1_epi8(BITS == 5 ? 0x10 : 0x30);
        __m256i high = mask;
        if (BITS == 5) high = by_rows(codes + 256 + 32 * half);
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
            const __m256i low = by_rows(codes + 64 * q + 32 * half);
            w[2 * q] = _mm256_and_si256(low, mask);
            w[2 * q + 1] = _mm256_and_si256(_mm256_srli_epi16(low, 4), mask);
            if (BITS == 4) continue;
            if (BITS == 6 && q % 2 == 0) high = by_rows(codes + 256 + 32 * q + 32 * half);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const int at = BITS == 5 ? 2 * q + h : 4 * (q % 2) + 2 * h;
                const __m256i moved = at < 4 ? _mm256_slli_epi16(high, 4 - at) : _mm256_srli_epi16(high, at - 4);
                w[2 * q + h] = _mm256_or_si256(w[2 * q + h], _mm256_and_si256(moved, upper));
            }
        }
    }

    // Codes from vector BEGIN to END times a digit, added as 16-bit numbers as long as these cannot overflow: STEP
    // vectors. The sums are multiplied with `weight` and added as 32-bit numbers.
    template <int BEGIN, int END, int STEP>
    static inline __m256i dot(const __m256i (&w)[8], const int8_t *digits, __m256i weight) {
        __m256i result = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int i = BEGIN; i < END; i += STEP) {
            __m256i sum = _mm256_maddubs_epi16(w[i], broadcast(digits + 4 * i));
#pragma GCC unroll 8
            for (int j = 1; j < STEP; j++) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[i + j], broadcast(digits + 4 * (i + j))));
            result = i == BEGIN ? _mm256_madd_epi16(sum, weight) : _mm256_add_epi32(result, _mm256_madd_epi16(sum, weight));
        }
        return result;
    }

    // The products of one state with a group or half of it.
    template <int KIND, int BEGIN, int END>
    static inline __m256 product(const __m256i (&w)[8], const Group &group) {
        constexpr int BITS = layout_of(KIND).bits, ZERO = layout_of(KIND).zero;
        constexpr int STEP = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;
        static_assert(STEP * 2 * 128 * ((1 << BITS) - 1) < 1 << 15, "a vector adds two products, and sums have 16 bits");
        const __m256i one = _mm256_set1_epi16(1);
        __m256i high = _mm256_add_epi32(dot<BEGIN, END, STEP>(w, group.digits[0], _mm256_set1_epi16(256)), dot<BEGIN, END, STEP>(w, group.digits[1], one));
        const int half = BEGIN / 4;
        if (ZERO) high = _mm256_sub_epi32(high, _mm256_set1_epi32(ZERO * (END - BEGIN == 8 ? group.high[0] + group.high[1] : group.high[half])));
        const __m256 sum = _mm256_mul_ps(_mm256_cvtepi32_ps(high), _mm256_set1_ps(group.unit_high));
        if (group.third) {
            __m256i low = dot<BEGIN, END, STEP>(w, group.digits[2], one);
            if (ZERO) low = _mm256_sub_epi32(low, _mm256_set1_epi32(ZERO * (END - BEGIN == 8 ? group.low[0] + group.low[1] : group.low[half])));
            return _mm256_fmadd_ps(_mm256_cvtepi32_ps(low), _mm256_set1_ps(group.unit), sum);
        }
        return sum;
    }

    // Vector 2 q + h of eight rows, as `unpack_half` has it.
    template <int BITS>
    static inline __m256i unpack_vector(const uint8_t *codes, int half, int vector) {
        const int q = vector / 2, h = vector % 2, at = BITS == 5 ? 2 * q + h : 4 * (q % 2) + 2 * h;
        const __m256i packed = by_rows(codes + 64 * q + 32 * half);
        const __m256i low = _mm256_and_si256(h ? _mm256_srli_epi16(packed, 4) : packed, _mm256_set1_epi8(15));
        if (BITS == 4) return low;
        const __m256i high = by_rows(codes + (BITS == 5 ? 256 : 256 + 64 * (q / 2)) + 32 * half);
        const __m256i moved = at < 4 ? _mm256_slli_epi16(high, 4 - at) : _mm256_srli_epi16(high, at - 4);
        return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(BITS == 5 ? 0x10 : 0x30)));
    }

    // The same numbers as `product`, of all sixteen rows at once: a digit is read once for them. This is faster for a
    // state that is alone, because no vector of codes is kept for the next one.
    template <int KIND, int D>
    static inline void products(const uint8_t *codes, const Group &x, int part, __m256 (&result)[2]) {
        constexpr Layout layout = layout_of(KIND);
        constexpr int STEP = layout.bits == 4 ? 8 : layout.bits == 5 ? 4 : 2, SPAN = KIND == Q6_K ? 4 : 8;
        const __m256i one = _mm256_set1_epi16(1), base = _mm256_set1_epi16(256);
        __m256i high[2], low[2];
#pragma GCC unroll 2
        for (int begin = SPAN * part; begin < SPAN * (part + 1); begin += STEP) {
            __m256i sums[D][2];
#pragma GCC unroll 8
            for (int i = 0; i < STEP; i++) {
                const __m256i w[2] = {unpack_vector<layout.bits>(codes, 0, begin + i), unpack_vector<layout.bits>(codes, 1, begin + i)};
#pragma GCC unroll 3
                for (int d = 0; d < D; d++) {
                    const __m256i digits = broadcast(x.digits[d] + 4 * (begin + i));
#pragma GCC unroll 2
                    for (int half = 0; half < 2; half++) {
                        const __m256i both = _mm256_maddubs_epi16(w[half], digits);
                        sums[d][half] = i == 0 ? both : _mm256_add_epi16(sums[d][half], both);
                    }
                }
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(sums[0][half], base), _mm256_madd_epi16(sums[1][half], one));
                high[half] = begin == SPAN * part ? both : _mm256_add_epi32(high[half], both);
                if (D < 3) continue;
                const __m256i third = _mm256_madd_epi16(sums[D - 1][half], one);
                low[half] = begin == SPAN * part ? third : _mm256_add_epi32(low[half], third);
            }
        }
        const int32_t all_high = SPAN == 4 ? x.high[part] : x.high[0] + x.high[1];
        const int32_t all_low = SPAN == 4 ? x.low[part] : x.low[0] + x.low[1];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            if (layout.zero) high[half] = _mm256_sub_epi32(high[half], _mm256_set1_epi32(layout.zero * all_high));
            result[half] = _mm256_mul_ps(_mm256_cvtepi32_ps(high[half]), _mm256_set1_ps(x.unit_high));
            if (D < 3) continue;
            if (layout.zero) low[half] = _mm256_sub_epi32(low[half], _mm256_set1_epi32(layout.zero * all_low));
            result[half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(low[half]), _mm256_set1_ps(x.unit), result[half]);
        }
    }

    template <int KIND>
    static void alone(const uint8_t *block, int64_t num_groups, const Group *x, float *output) {
        constexpr Layout layout = layout_of(KIND);
        constexpr int IN_BLOCK = layout.weights / GROUP, PARTS = KIND == Q6_K ? 2 : 1;
        const __m256 zeros = _mm256_setzero_ps();
        __m256 total[2] = {zeros, zeros};
        for (int64_t number = 0; number < num_groups; block += layout.chunk()) {
            const __m256 d[2] = {halves(block), halves(block + 16)};
            __m256 m[2] = {zeros, zeros};
            if (layout.offsets) m[0] = halves(block + 32), m[1] = halves(block + 48);
            if (IN_BLOCK > 1) m[0] = _mm256_sub_ps(zeros, m[0]), m[1] = _mm256_sub_ps(zeros, m[1]);
            for (int group = 0; group < IN_BLOCK; group++, number++, x++) {
                const uint8_t *codes = block + PANEL * layout.header + group * layout.codes();
                for (int i = 0; i < layout.codes(); i += 64) _mm_prefetch((const char *)codes + i + 2048, _MM_HINT_T0);
                const uint8_t *small = block + (KIND == Q6_K ? 32 : 64) + 32 * group;
#pragma GCC unroll 2
                for (int part = 0; part < PARTS; part++) {
                    __m256 sums[2];
                    if (x->third)
                        products<KIND, 3>(codes, *x, part, sums);
                    else
                        products<KIND, 2>(codes, *x, part, sums);
#pragma GCC unroll 2
                    for (int half = 0; half < 2; half++) {
                        __m256 scale = d[half], offset = m[half];
                        if (IN_BLOCK > 1) scale = _mm256_mul_ps(scale, small_scales(small + 16 * part + 8 * half, KIND == Q6_K));
                        total[half] = _mm256_fmadd_ps(sums[half], scale, total[half]);
                        if (!layout.offsets) continue;
                        if (IN_BLOCK > 1) offset = _mm256_mul_ps(offset, small_scales(small + 16 + 8 * half, false));
                        total[half] = _mm256_fmadd_ps(offset, _mm256_set1_ps(x->sum), total[half]);
                    }
                }
            }
        }
        _mm256_storeu_ps(output, total[0]), _mm256_storeu_ps(output + 8, total[1]);
    }

    template <int KIND, int R>
    static void panel(const uint8_t *data, const States &states, const Group *groups, int64_t, int64_t local, float (*outputs)[PANEL]) {
        constexpr Layout layout = layout_of(KIND);
        const int64_t num_groups = states.groups();
        if (R <= 2) {
            for (int r = 0; r < R; r++) alone<KIND>(data, num_groups, groups + (local + r) * num_groups, outputs[r]);
            return;
        }
        __m256 total[2][R];
        for (int r = 0; r < R; r++) total[0][r] = total[1][r] = _mm256_setzero_ps();
        const uint8_t *block = data;
        for (int64_t number = 0; number < num_groups; number++) {
            const int group = int(number % (layout.weights / GROUP));
            const uint8_t *codes = block + PANEL * layout.header + group * layout.codes();
            for (int i = 0; i < layout.codes(); i += 64) _mm_prefetch((const char *)codes + i + 2048, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                __m256i w[8];
                unpack_half<layout.bits>(codes, half, w);
                __m256 scale = halves(block + 16 * half), second = scale, offset = scale;
                if (layout.offsets) offset = halves(block + 32 + 16 * half);
                if (layout.offsets && layout.weights > GROUP) {
                    const uint8_t *small = block + 64 + group * 32 + 8 * half;
                    scale = _mm256_mul_ps(scale, small_scales(small, false));
                    offset = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(offset, small_scales(small + 16, false)));
                }
                if (KIND == Q6_K) {
                    const uint8_t *small = block + 32 + group * 32 + 8 * half;
                    second = _mm256_mul_ps(scale, small_scales(small + 16, true));
                    scale = _mm256_mul_ps(scale, small_scales(small, true));
                }
                for (int r = 0; r < R; r++) {
                    const Group &x = groups[(local + r) * num_groups + number];
                    __m256 sum = total[half][r];
                    if constexpr (KIND == Q6_K) {
                        sum = _mm256_fmadd_ps(product<KIND, 0, 4>(w, x), scale, sum);
                        sum = _mm256_fmadd_ps(product<KIND, 4, 8>(w, x), second, sum);
                    } else {
                        sum = _mm256_fmadd_ps(product<KIND, 0, 8>(w, x), scale, sum);
                    }
                    if (layout.offsets) sum = _mm256_fmadd_ps(offset, _mm256_set1_ps(x.sum), sum);
                    total[half][r] = sum;
                }
            }
            if (group == layout.weights / GROUP - 1) block += layout.chunk();
        }
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++) _mm256_storeu_ps(outputs[r] + 8 * half, total[half][r]);
    }
};

// ---- AVX2: codes of 8 bits times two numbers of 16 bits

struct Words : Few<Words> {
    // The states of a group are (32768 a + b) times `unit`.
    struct Group {
        int16_t words[2][GROUP];
        float unit;
        int32_t second;  // whether any b is not 0
    };
    static constexpr bool takes(int64_t kind) { return layout_of(int(kind)).bits == 8; }
    static bool prepares(const std::vector<Matrix> &) { return true; }

    static void prepare(const States &states, int64_t row, int64_t number, Group &group) {
        __m256 x[4];
        const int exponent = read_group(states, row, number, x);
        const __m256 scale = _mm256_set1_ps(power(127 + 141 - exponent)), base = _mm256_set1_ps(32768);
        __m256i second = _mm256_setzero_si256();
        for (int q = 0; q < 4; q++) {
            const __m256 scaled = _mm256_mul_ps(x[q], scale);
            const __m256i a = _mm256_cvtps_epi32(scaled);
            const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_sub_ps(scaled, _mm256_cvtepi32_ps(a)), base));
            second = _mm256_or_si256(second, b);
            const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
            _mm_storeu_si128((__m128i *)(group.words[0] + 8 * q), _mm256_castsi256_si128(words));
            _mm_storeu_si128((__m128i *)(group.words[1] + 8 * q), _mm256_extracti128_si256(words, 1));
        }
        group.second = !_mm256_testz_si256(second, second);
        group.unit = exponent == 255 ? from_float16(0x7e00) : power(exponent - 29);
    }

    static inline __m256 dot(const __m256i (&w)[8], const int16_t *words) {
        __m256i sum = _mm256_madd_epi16(w[0], broadcast(words));
#pragma GCC unroll 8
        for (int i = 1; i < 8; i++) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w[i], broadcast(words + 2 * i)));
        return _mm256_cvtepi32_ps(sum);
    }

    template <int KIND, int R>
    static void panel(const uint8_t *data, const States &states, const Group *groups, int64_t, int64_t local, float (*outputs)[PANEL]) {
        constexpr Layout layout = layout_of(KIND);
        const int64_t num_groups = states.groups();
        __m256 total[2][R];
        for (int r = 0; r < R; r++) total[0][r] = total[1][r] = _mm256_setzero_ps();
        for (int64_t number = 0; number < num_groups; number++) {
            const uint8_t *block = data + number * layout.chunk(), *codes = block + PANEL * layout.header;
            for (int i = 0; i < layout.codes(); i += 64) _mm_prefetch((const char *)codes + i + 2048, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const __m256 scale = halves(block + 16 * half);
#pragma GCC unroll 2
                for (int part = 0; part < 2; part++) {
                    __m256i w[8];
#pragma GCC unroll 8
                    for (int i = 0; i < 8; i++) w[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(codes + 256 * part + 32 * i + 16 * half)));
                    for (int r = 0; r < R; r++) {
                        const Group &x = groups[(local + r) * num_groups + number];
                        __m256 sum = _mm256_mul_ps(dot(w, x.words[0] + 16 * part), _mm256_set1_ps(32768));
                        if (x.second) sum = _mm256_add_ps(sum, dot(w, x.words[1] + 16 * part));
                        sum = _mm256_mul_ps(sum, _mm256_set1_ps(x.unit));
                        total[half][r] = _mm256_fmadd_ps(sum, scale, total[half][r]);
                    }
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++) _mm256_storeu_ps(outputs[r] + 8 * half, total[half][r]);
    }
};

// ---- AVX2: weights of bfloat16 times states as float32

struct Floats : Few<Floats> {
    struct Group {
        float x[GROUP];
    };
    static constexpr bool takes(int64_t kind) { return kind == BF16; }
    static bool prepares(const std::vector<Matrix> &) { return true; }

    static void prepare(const States &states, int64_t row, int64_t number, Group &group) {
        for (int i = 0; i < GROUP; i++) group.x[i] = from_bfloat16(states.halves(row)[number * GROUP + i]);
    }

    template <int R>
    static void some(const uint8_t *data, int64_t num_groups, const Group *groups, float (*outputs)[PANEL]) {
        __m256 total[R][2];
        for (int r = 0; r < R; r++) total[r][0] = total[r][1] = _mm256_setzero_ps();
        const __m256i mask = _mm256_set1_epi32(int32_t(0xffff0000));
        for (int64_t number = 0; number < num_groups; number++)
            for (int k = 0; k < GROUP; k += 2, data += 64) {
                _mm_prefetch((const char *)data + 2048, _MM_HINT_T0);
                __m256 w[2][2];
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const __m256i both = _mm256_loadu_si256((const __m256i *)(data + 32 * half));
                    w[half][0] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
                    w[half][1] = _mm256_castsi256_ps(_mm256_and_si256(both, mask));
                }
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                    for (int i = 0; i < 2; i++) {
                        const __m256 x = _mm256_broadcast_ss(&groups[r * num_groups + number].x[k + i]);
                        total[r][0] = _mm256_fmadd_ps(w[0][i], x, total[r][0]);
                        total[r][1] = _mm256_fmadd_ps(w[1][i], x, total[r][1]);
                    }
            }
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++) _mm256_storeu_ps(outputs[r] + 8 * half, total[r][half]);
    }

    template <int KIND, int R>
    static void panel(const uint8_t *data, const States &states, const Group *groups, int64_t, int64_t local, float (*outputs)[PANEL]) {
        // As many sums as there are registers.
        some<std::min(R, 4)>(data, states.groups(), groups + local * states.groups(), outputs);
        if constexpr (R > 4) some<R - 4>(data, states.groups(), groups + (local + 4) * states.groups(), outputs + 4);
    }
};

#endif

// ---- states rounded to 8 bits: every kind but bfloat16

struct Rounded {
    // The states of a group are whole numbers from -127 to 127 times `unit`.
    struct Group {
        int8_t numbers[GROUP];  // of 8 q + 0, 4, 1, 5, 2, 6, 3, 7, as codes lie in their bytes
        int32_t sums[3];        // of both halves, and of all
        float unit, sum;        // sum: of all states
    };
    static constexpr bool takes(int64_t kind) { return kind != BF16; }
    static bool prepares(const std::vector<Matrix> &) { return true; }

    static void prepare(const States &states, int64_t row, int64_t number, Group &group) {
        // Sums of one with numbers below 2^22 are whole, rounded to the nearest, and show them in their last bits.
        constexpr float WHOLE = 12582912;
        constexpr uint32_t WHOLE_BITS = 0x4b400000, NONE = 0x7f800000, LEAST = (127 - 100) << 23;
        float x[GROUP], most;
        uint32_t bits[GROUP], most_bits = 0;
        if (states.type == FLOAT32) {
            memcpy(bits, states.floats(row) + number * GROUP, sizeof bits);
        } else {
            const uint16_t *halves = states.halves(row) + number * GROUP;
            for (int i = 0; i < GROUP; i++) bits[i] = uint32_t(halves[i]) << 16;
        }
        memcpy(x, bits, sizeof x);
#pragma omp simd reduction(max : most_bits)
        for (int i = 0; i < GROUP; i++) most_bits = std::max(most_bits, bits[i] & 0x7fffffff);
        memcpy(&most, &most_bits, 4);
        // Groups below 2^-100 are zeros, so that the inverse is finite.
        const float inverse = most_bits < LEAST ? 0 : 127 / most;
        for (int i = 0; i < GROUP; i++) x[i] = x[i] * inverse + WHOLE;
        memcpy(bits, x, sizeof bits);
        for (int half = 0; half < 2; half++) {
            uint32_t sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < GROUP / 2; i++) sum += bits[GROUP / 2 * half + i] - WHOLE_BITS;
            group.sums[half] = int32_t(sum);
        }
        for (int q = 0; q < GROUP; q += 8)
            for (int i = 0; i < 8; i++) group.numbers[q + i] = int8_t(bits[q + i / 2 + 4 * (i % 2)] - WHOLE_BITS);
        group.sums[2] = group.sums[0] + group.sums[1];
        // Infinities and numbers that are none make every output one that is none.
        group.unit = most_bits >= NONE ? from_float16(0x7e00) : most_bits < LEAST ? 0 : most / 127;
        group.sum = float(group.sums[2]) * group.unit;
    }
};

#if defined(WITH_AVX512_BF16)

// Sums of four products of codes and states in each lane, by `vpdpbusd`.
struct Int8 : Few<Int8>, Rounded {
    using Rounded::prepare;

    // In the four bytes of each row: for vector 2 q + h, the codes of 8 q + 2 h + 0, 4, 1, 5. Codes of 8 bits plus 128.
    template <int BITS>
    static inline void unpack(const uint8_t *codes, __m512i (&w)[8]) {
        if (BITS == 8) {
            struct Places {
                alignas(64) uint16_t pairs[2][32];
                alignas(64) uint8_t bytes[64];
                Places() {
                    const int order[] = {0, 2, 1, 3};
                    for (int i = 0; i < 64; i++) bytes[i] = uint8_t(i / 4 * 4 % 16 + order[i % 4]);
                    for (int h = 0; h < 2; h++)
                        for (int i = 0; i < 32; i++) pairs[h][i] = uint16_t(i / 2 + PANEL * h + 2 * PANEL * (i % 2));
                }
            };
            static const Places places;
            const __m512i bytes = _mm512_load_si512(places.bytes), sign = _mm512_set1_epi32(int32_t(0x80808080));
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const __m512i first = _mm512_loadu_si512(codes + 64 * (i & ~1)), second = _mm512_loadu_si512(codes + 64 * (i | 1));
                const __m512i pairs = _mm512_permutex2var_epi16(first, _mm512_load_si512(places.pairs[i % 2]), second);
                w[i] = _mm512_xor_si512(_mm512_shuffle_epi8(pairs, bytes), sign);
            }
            return;
        }
        struct Rows {
            alignas(64) uint8_t order[64];
            Rows() {
                for (int i = 0; i < 64; i++) order[i] = uint8_t(8 * (i % 2) + i % 16 / 2);
            }
        };
        static const Rows rows;
        const __m512i order = _mm512_load_si512(rows.order);
        const __m512i mask = _mm512_set1_epi32(0x0f0f0f0f), upper = _mm512_set1_epi32(BITS == 5 ? 0x10101010 : 0x30303030);
        __m512i high = mask;
        if (BITS == 5) high = _mm512_shuffle_epi8(_mm512_loadu_si512(codes + 256), order);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const int q = i / 2, h = i % 2, at = BITS == 5 ? 2 * q + h : 4 * (q % 2) + 2 * h;
            const __m512i low = _mm512_shuffle_epi8(_mm512_loadu_si512(codes + 64 * q), order);
            w[i] = _mm512_and_si512(h ? _mm512_srli_epi16(low, 4) : low, mask);
            if (BITS == 4) continue;
            if (BITS == 6) high = _mm512_shuffle_epi8(_mm512_loadu_si512(codes + 256 + 64 * (q / 2)), order);
            const __m512i moved = at < 4 ? _mm512_slli_epi16(high, at < 4 ? 4 - at : 0) : _mm512_srli_epi16(high, at < 4 ? 0 : at - 4);
            w[i] = _mm512_or_si512(w[i], _mm512_and_si512(moved, upper));
        }
    }

    // The products of one state with a group (2) or its first or second half (0 or 1).
    template <int KIND, int PART>
    static inline __m512 product(const __m512i (&w)[8], const Group &x) {
        constexpr int ZERO = layout_of(KIND).bits == 8 ? 128 : layout_of(KIND).zero;
        constexpr int SHIFT = ZERO == 8 ? 3 : ZERO == 16 ? 4 : ZERO == 32 ? 5 : 7;
        __m512i sum = _mm512_setzero_si512();
        if (ZERO) sum = _mm512_sub_epi32(sum, _mm512_slli_epi32(_mm512_set1_epi32(x.sums[PART]), SHIFT));
#pragma GCC unroll 8
        for (int i = PART == 1 ? 4 : 0; i < (PART == 0 ? 4 : 8); i++) {
            int32_t four;
            memcpy(&four, x.numbers + 4 * i, 4);
            sum = _mm512_dpbusd_epi32(sum, w[i], _mm512_set1_epi32(four));
        }
        return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(x.unit));
    }

    template <int KIND, int R>
    static void panel(const uint8_t *data, const States &states, const Group *groups, int64_t, int64_t local, float (*outputs)[PANEL]) {
        constexpr Layout layout = layout_of(KIND);
        const int64_t num_groups = states.groups();
        __m512 total[R];
        for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
        const uint8_t *block = data;
        for (int64_t number = 0; number < num_groups; block += layout.chunk()) {
            const Products::Factors<KIND> factors(block);
            for (int group = 0; group < layout.weights / GROUP; group++, number++) {
                const uint8_t *codes = block + PANEL * layout.header + group * layout.codes();
                for (int i = 0; i < layout.codes(); i += 64) _mm_prefetch((const char *)codes + i + 2048, _MM_HINT_T0);
                __m512i w[8];
                unpack<layout.bits>(codes, w);
                const __m512 scale = factors.scales(group, 0), second = factors.scales(group, 1), offset = factors.offsets(group);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const Group &x = groups[(local + r) * num_groups + number];
                    if constexpr (KIND == Q6_K) {
                        total[r] = _mm512_fmadd_ps(product<KIND, 0>(w, x), scale, total[r]);
                        total[r] = _mm512_fmadd_ps(product<KIND, 1>(w, x), second, total[r]);
                    } else {
                        total[r] = _mm512_fmadd_ps(product<KIND, 2>(w, x), scale, total[r]);
                    }
                    if (layout.offsets) total[r] = _mm512_fmadd_ps(offset, _mm512_set1_ps(x.sum), total[r]);
                }
            }
        }
        for (int r = 0; r < R; r++) _mm512_storeu_ps(outputs[r], total[r]);
    }
};

#elif defined(WITH_AVX2)

// Sums of two products of codes and states in 16 bits, by `vpmaddubsw`. All sixteen rows share what is read of a state.
struct Int8 : Few<Int8>, Rounded {
    using Rounded::prepare;

    // Vector 2 q + h of eight rows: the codes of 8 q + 2 h + 0, 4, 1, 5.
    template <int BITS>
    static inline __m256i unpack_vector(const uint8_t *codes, int half, int vector) {
        if constexpr (BITS < 8) return Digits::unpack_vector<BITS>(codes, half, vector);
        const uint8_t *pairs = codes + 128 * (vector / 2) + 32 * (vector % 2) + 16 * half;
        const __m128i first = _mm_loadu_si128((const __m128i *)pairs), second = _mm_loadu_si128((const __m128i *)(pairs + 64));
        return _mm256_set_m128i(_mm_unpackhi_epi8(first, second), _mm_unpacklo_epi8(first, second));
    }

    // The products of half a group: of codes of 4 bits as 16-bit numbers, which cannot overflow in a whole group either.
    template <int BITS>
    static inline __m256i dot(const __m256i (&w)[4], const __m256i (&x)[4]) {
        const __m256i one = _mm256_set1_epi16(1);
        __m256i both[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            // Signed codes: their magnitudes times states with their signs. Sums of two are below 2^15.
            both[i] = BITS == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w[i]), _mm256_sign_epi8(x[i], w[i])) : _mm256_maddubs_epi16(w[i], x[i]);
        if (BITS == 8)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) both[i] = _mm256_madd_epi16(both[i], one);
        if (BITS == 8) return _mm256_add_epi32(_mm256_add_epi32(both[0], both[1]), _mm256_add_epi32(both[2], both[3]));
        const __m256i first = _mm256_add_epi16(both[0], both[1]), second = _mm256_add_epi16(both[2], both[3]);
        if (BITS == 6) return _mm256_add_epi32(_mm256_madd_epi16(first, one), _mm256_madd_epi16(second, one));
        const __m256i sum = _mm256_add_epi16(first, second);
        return BITS == 4 ? sum : _mm256_madd_epi16(sum, one);
    }

    // A whole number as float32, without what codes are too large by.
    template <int KIND>
    static inline __m256 product(__m256i sum, const int32_t *states, float unit) {
        constexpr int ZERO = layout_of(KIND).zero, SHIFT = ZERO == 8 ? 3 : ZERO == 16 ? 4 : 5;
        if (ZERO) sum = _mm256_sub_epi32(sum, _mm256_slli_epi32(broadcast(states), SHIFT));
        return _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(unit));
    }

    template <int KIND, int R>
    static void panel(const uint8_t *data, const States &states, const Group *groups, int64_t, int64_t local, float (*outputs)[PANEL]) {
        constexpr Layout layout = layout_of(KIND);
        constexpr int BITS = layout.bits;
        static_assert(BITS != 4 || 8 * 2 * 127 * 15 < 1 << 15, "16 products of a lane are added as 16-bit numbers");
        static_assert(BITS != 5 || 4 * 2 * 127 * 31 < 1 << 15, "8 products of a lane are");
        static_assert(BITS != 6 || 2 * 2 * 127 * 63 < 1 << 15, "4 products of a lane are");
        const int64_t num_groups = states.groups();
        __m256 total[2][R];
        __m256i partial[2][R];
        for (int r = 0; r < R; r++) total[0][r] = total[1][r] = _mm256_setzero_ps();
        const uint8_t *block = data;
        for (int64_t number = 0; number < num_groups; number++) {
            const int group = int(number % (layout.weights / GROUP));
            const uint8_t *codes = block + PANEL * layout.header + group * layout.codes();
            for (int i = 0; i < layout.codes(); i += 64) _mm_prefetch((const char *)codes + i + 2048, _MM_HINT_T0);
            const uint8_t *small = block + (KIND == Q6_K ? 32 : 64) + 32 * group;
            __m256 scale[2][2], offset[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                scale[half][0] = scale[half][1] = offset[half] = halves(block + 16 * half);
                if (layout.offsets) offset[half] = halves(block + 32 + 16 * half);
                if (layout.weights == GROUP) continue;
                for (int part = 0; part < 2; part++)
                    scale[half][part] = _mm256_mul_ps(scale[half][part], small_scales(small + 8 * half + (KIND == Q6_K ? 16 * part : 0), KIND == Q6_K));
                if (layout.offsets) offset[half] = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(offset[half], small_scales(small + 16 + 8 * half, false)));
            }
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                __m256i w[2][4];
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) w[half][i] = unpack_vector<BITS>(codes, half, 4 * part + i);
                for (int r = 0; r < R; r++) {
                    const Group &x = groups[(local + r) * num_groups + number];
                    __m256i four[4];
#pragma GCC unroll 4
                    for (int i = 0; i < 4; i++) four[i] = broadcast(x.numbers + 16 * part + 4 * i);
#pragma GCC unroll 2
                    for (int half = 0; half < 2; half++) {
                        __m256i sum = dot<BITS>(w[half], four);
                        if (KIND == Q6_K) {
                            total[half][r] = _mm256_fmadd_ps(product<KIND>(sum, &x.sums[part], x.unit), scale[half][part], total[half][r]);
                            continue;
                        }
                        if (part == 0) {
                            partial[half][r] = sum;
                            continue;
                        }
                        if (BITS == 4)
                            sum = _mm256_madd_epi16(_mm256_add_epi16(sum, partial[half][r]), _mm256_set1_epi16(1));
                        else
                            sum = _mm256_add_epi32(sum, partial[half][r]);
                        __m256 result = _mm256_fmadd_ps(product<KIND>(sum, &x.sums[2], x.unit), scale[half][0], total[half][r]);
                        if (layout.offsets) result = _mm256_fmadd_ps(offset[half], _mm256_set1_ps(x.sum), result);
                        total[half][r] = result;
                    }
                }
            }
            if (group == layout.weights / GROUP - 1) block += layout.chunk();
        }
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++) _mm256_storeu_ps(outputs[r] + 8 * half, total[half][r]);
    }
};

#else

// In float32, which has all whole numbers that occur.
struct Int8 : Few<Int8>, Rounded {
    using Rounded::prepare;

    template <int KIND, int R>
    static void panel(const uint8_t *data, const States &states, const Group *groups, int64_t, int64_t local, float (*outputs)[PANEL]) {
        panel<KIND>(data, states, groups + local * states.groups(), R, outputs);
    }

    template <int KIND>
    static void panel(const uint8_t *data, const States &states, const Group *groups, int count, float (*outputs)[PANEL]) {
        constexpr Layout layout = layout_of(KIND);
        constexpr int PARTS = KIND == Q6_K ? 2 : 1;
        alignas(64) float tile[GROUP][PANEL];
        memset(outputs, 0, count * sizeof *outputs);
        for (int64_t number = 0; number < states.groups(); number++) {
            const uint8_t *block = data + number * GROUP / layout.weights * layout.chunk();
            const int group = int(number % (layout.weights / GROUP));
            unpack<KIND>(block + PANEL * layout.header + group * layout.codes(), tile);
            for (int part = 0; part < PARTS; part++) {
                Scales scales;
                read_scales<KIND>(block, group, part, scales);
                for (int r = 0; r < count; r++) {
                    const Group &x = groups[r * states.groups() + number];
                    Vector sum = {};
                    for (int i = GROUP / PARTS * part; i < GROUP / PARTS * (part + 1); i++)
                        sum += *reinterpret_cast<const Vector *>(tile[i / 8 * 8 + i % 8 / 2 + 4 * (i % 2)]) * float(x.numbers[i]);
                    for (int c = 0; c < PANEL; c++) {
                        outputs[r][c] = std::fma(sum[c] * x.unit, scales.scale[c], outputs[r][c]);
                        if (layout.offsets) outputs[r][c] = std::fma(scales.offset[c], x.sum, outputs[r][c]);
                    }
                }
            }
        }
    }
};

#endif

// ---- the passes

// Multiplies some states with a panel.
template <class Kernel, int KIND>
void passes(const Matrix &matrix, int64_t number, const States &states, const typename Kernel::Group *groups,
            int64_t begin, int64_t end, const Output &output) {
    constexpr Layout layout = layout_of(KIND);
    const uint8_t *data = matrix.data + number * layout.panel(states.features);
    for (int64_t row = begin; row < end; row += Kernel::PASS) {
        alignas(64) float outputs[Kernel::PASS][PANEL];
        const int count = int(std::min<int64_t>(end - row, Kernel::PASS));
        Kernel::template pass<KIND>(data, states, groups, row, row - begin, count, outputs);
        for (int r = 0; r < count; r++)
            output.store(outputs[r], row + r, matrix.first + number * PANEL, std::min<int64_t>(matrix.size - number * PANEL, PANEL));
    }
}

template <class Kernel>
void run(const Matrix &matrix, int64_t number, const States &states, const typename Kernel::Group *groups, int64_t begin,
         int64_t end, const Output &output) {
#define CASE(KIND) \
    case KIND: \
        if constexpr (Kernel::takes(KIND)) passes<Kernel, KIND>(matrix, number, states, groups, begin, end, output); \
        break;
    switch (matrix.kind) { CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K) CASE(BF16) }
#undef CASE
}

// The panels of a thread that nobody has taken yet. It takes them from the first one on, others from the last one on.
class alignas(64) Share {
    std::atomic<uint64_t> range{0};  // the first one, and in the lower half the one behind the last

    static uint64_t both(int64_t first, int64_t end) { return uint64_t(first) << 32 | uint64_t(end); }

  public:
    void set(int64_t first, int64_t end) { range.store(both(first, end), std::memory_order_relaxed); }

    // Takes half of what is left from the front, or a quarter from the end, but `least` panels where so many are left: few
    // times, because all that the processor reads ahead waits for an atomic operation. Returns how many, and the first of
    // them in `from`.
    int64_t take(int64_t least, bool last, int64_t &from) {
        uint64_t now = range.load(std::memory_order_relaxed);
        while (true) {
            const int64_t first = int64_t(now >> 32), end = int64_t(uint32_t(now));
            const int64_t count = std::min(std::max(least, (end - first) / (last ? 4 : 2)), end - first);
            if (count <= 0) return 0;
            from = last ? end - count : first;
            const uint64_t rest = last ? both(first, from) : both(first + count, end);
            if (range.compare_exchange_weak(now, rest, std::memory_order_relaxed)) return count;
        }
    }
};

// Multiplies the states with those matrices that the kernel takes.
template <class Kernel>
void multiply(const std::vector<Matrix> &all, const States &states, const Output &output) {
    std::vector<Matrix> matrices;
    std::vector<int64_t> before{0};  // panels of the matrices before each one
    for (const Matrix &matrix : all)
        if (Kernel::takes(matrix.kind)) {
            matrices.push_back(matrix);
            before.push_back(before.back() + (matrix.size + PANEL - 1) / PANEL);
        }
    if (matrices.empty() || states.rows == 0) return;
    const bool prepares = Kernel::prepares(matrices);
    const int64_t num_panels = before.back(), num_groups = std::min(states.rows, CHUNK) * states.groups();
    static thread_local std::vector<typename Kernel::Group> kept;
    if (int64_t(kept.size()) < num_groups) kept.resize(num_groups);
    typename Kernel::Group *groups = kept.data();
    Share shares[MOST_SHARES];
    const int64_t num_shares = std::min<int64_t>(omp_get_max_threads(), MOST_SHARES);
    for (int64_t i = 0; i < num_shares; i++) shares[i].set(num_panels * i / num_shares, num_panels * (i + 1) / num_shares);
    const int64_t panel_bytes = std::max<int64_t>(1, layout_of(int(matrices[0].kind)).panel(states.features));
    const int64_t own = std::max<int64_t>(1, OWN_BYTES / panel_bytes), others = std::max<int64_t>(1, OTHERS_BYTES / panel_bytes);
#pragma omp parallel if (num_panels * PANEL * states.features * std::min(states.rows, CHUNK) > ALONE)
    for (int64_t begin = 0; begin < states.rows; begin += CHUNK) {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const int64_t end = std::min(begin + CHUNK, states.rows), parts = (end - begin) * states.groups();
        if (prepares) {
#pragma omp barrier
            for (int64_t i = parts * thread / threads; i < parts * (thread + 1) / threads; i++)
                Kernel::prepare(states, begin + i / states.groups(), i % states.groups(), groups[i]);
#pragma omp barrier
        }
        const auto matrix_of = [&](int64_t p) { return std::upper_bound(before.begin(), before.end(), p) - before.begin() - 1; };
        const auto compute = [&](int64_t from, int64_t count) {
            for (int64_t p = from; p < from + count; p++) {
                const int64_t i = matrix_of(p);
                run<Kernel>(matrices[i], p - before[i], states, groups, begin, end, output);
            }
        };
        // Kernels fetch what comes behind what they read, but not where they begin.
        const auto fetch = [&](int64_t p) {
            const int64_t i = matrix_of(p);
            const uint8_t *panel = matrices[i].data + (p - before[i]) * layout_of(int(matrices[i].kind)).panel(states.features);
            for (int k = 0; k < 2048; k += 64) __builtin_prefetch(panel + k);
        };
        if (states.rows > CHUNK || threads > num_shares) {
            const int64_t from = num_panels * thread / threads;
            compute(from, num_panels * (thread + 1) / threads - from);
        } else {
            int64_t from = 0, count;
            while ((count = shares[thread].take(own, false, from)) > 0) compute(from, count);
            for (int64_t i = 1; i < num_shares; i++)
                while ((count = shares[(thread + i) % num_shares].take(others, true, from)) > 0) fetch(from), compute(from, count);
        }
        if (end == states.rows) Kernel::finish();
    }
}

// `count` rows of one panel, the first of them row `id`: what a panel's rows share is unpacked once for them.
template <int KIND>
void rows_of_panel(const uint8_t *data, int64_t id, int64_t count, int64_t features, const Output &output, int64_t place) {
    constexpr Layout layout = layout_of(KIND);
    const int first = int(id % PANEL);
    for (int64_t k = 0; k < features; k += GROUP) {
        const uint8_t *block = data + (id / PANEL * (features / layout.weights) + k / layout.weights) * layout.chunk();
        const int group = int(k % layout.weights / GROUP);
        alignas(64) float tile[GROUP][PANEL];
        Scales scales[2];
        unpack<KIND>(block + PANEL * layout.header + group * layout.codes(), tile);
        for (int half = 0; half < 2; half++) read_scales<KIND>(block, group, half, scales[half]);
        for (int i = 0; i < count; i++) {
            const int column = first + i;
            float values[GROUP];
            // A product, then a sum, as gguf has it: no fused operation.
            for (int j = 0; j < GROUP; j++)
                values[j] = scales[j / 16].scale[column] * tile[j][column] + scales[j / 16].offset[column];
            output.store(values, place + i, k, GROUP);
        }
    }
}

bool known(int64_t type) { return type == FLOAT32 || type == BFLOAT16; }

// Multiplies the states with all matrices by the best kernel of this processor.
void multiply_unrounded(const std::vector<Matrix> &matrices, const States &states, const Output &output) {
#ifdef WITH_AMX
    if (states.type == BFLOAT16 && Tiles::permitted()) return multiply<Tiles>(matrices, states, output);
#endif
#if defined(WITH_AVX512_BF16)
    if (states.type == BFLOAT16) return multiply<Products>(matrices, states, output);
#elif defined(WITH_AVX2)
    if (states.type == BFLOAT16) {
        multiply<Digits>(matrices, states, output);
        multiply<Words>(matrices, states, output);
        multiply<Floats>(matrices, states, output);
        return;
    }
#endif
    multiply<Plain>(matrices, states, output);
}

// Products of states, of which those with `rounded` kinds of matrices are rounded to 8 bits.
int linear(bool (*rounded)(int64_t kind), const States &states, int64_t count, const void *const *blocks, const int64_t *kinds,
           const int64_t *sizes, Output output) {
    if (!known(states.type) || !known(output.type) || (output.bias != nullptr && !known(output.bias_type))) return 1;
    std::vector<Matrix> matrices[2];
    for (int64_t i = 0; i < count; i++) {
        const Layout layout = layout_of(int(kinds[i]));
        if (layout.weights == 0 || states.features % layout.weights != 0) return 1;
        matrices[rounded(kinds[i])].push_back({static_cast<const uint8_t *>(blocks[i]), kinds[i], sizes[i], output.width});
        output.width += sizes[i];
    }
    multiply_unrounded(matrices[0], states, output);
    multiply<Int8>(matrices[1], states, output);
    return 0;
}

}  // namespace

int outrider_block_linear(const void *states, int64_t states_type, int64_t rows, int64_t stride, int64_t features,
                          int64_t count, const void *const *blocks, const int64_t *kinds, const int64_t *sizes,
                          const void *bias, int64_t bias_type, void *out, int64_t out_type) {
    const States given{states, states_type, rows, stride, features};
    return linear([](int64_t) { return false; }, given, count, blocks, kinds, sizes, {out, bias, out_type, bias_type, 0});
}

int outrider_int8_linear(const void *states, int64_t states_type, int64_t rows, int64_t stride, int64_t features,
                         int64_t count, const void *const *blocks, const int64_t *kinds, const int64_t *sizes,
                         const void *bias, int64_t bias_type, void *out, int64_t out_type) {
    const States given{states, states_type, rows, stride, features};
    return linear(Int8::takes, given, count, blocks, kinds, sizes, {out, bias, out_type, bias_type, 0});
}

int outrider_block_rows(const int64_t *ids, int64_t count, const void *blocks, int64_t kind, int64_t size,
                        int64_t features, void *out, int64_t out_type) {
    if (!known(out_type) || layout_of(int(kind)).weights == 0) return 1;
    const Output output{out, nullptr, out_type, FLOAT32, features};
    const uint8_t *data = static_cast<const uint8_t *>(blocks);
    if (std::any_of(ids, ids + count, [&](int64_t id) { return id < 0 || id >= size; })) return 2;
    // Where the runs begin: ids of one panel, each the next one of the one before.
    std::vector<int64_t> runs;
    for (int64_t i = 0; i < count; i++)
        if (i == 0 || ids[i] != ids[i - 1] + 1 || ids[i] % PANEL == 0) runs.push_back(i);
    runs.push_back(count);
#pragma omp parallel for if (count * features > ALONE)
    for (int64_t run = 0; run < int64_t(runs.size()) - 1; run++) {
        const int64_t i = runs[run], length = runs[run + 1] - i;
        switch (kind) {
            case Q4_0: rows_of_panel<Q4_0>(data, ids[i], length, features, output, i); break;
            case Q4_1: rows_of_panel<Q4_1>(data, ids[i], length, features, output, i); break;
            case Q5_0: rows_of_panel<Q5_0>(data, ids[i], length, features, output, i); break;
            case Q5_1: rows_of_panel<Q5_1>(data, ids[i], length, features, output, i); break;
            case Q8_0: rows_of_panel<Q8_0>(data, ids[i], length, features, output, i); break;
            case Q4_K: rows_of_panel<Q4_K>(data, ids[i], length, features, output, i); break;
            case Q5_K: rows_of_panel<Q5_K>(data, ids[i], length, features, output, i); break;
            case Q6_K: rows_of_panel<Q6_K>(data, ids[i], length, features, output, i); break;
            case BF16: rows_of_panel<BF16>(data, ids[i], length, features, output, i); break;
        }
    }
    return 0;
}
