// What a gated layer makes of one product: f(a) b for the first and the second half of each row.
//
// f(x) = x / (1 + exp(-t)), with t = x for silu and t = 2 sqrt(2 / pi) (x + 0.044715 x^3) for gelu by tanh. All is
// computed in float32 and rounded once, each number by itself, so the bits depend on nothing but the two numbers.
#include <algorithm>
#include <cstdint>
#include <cstring>

// Types of numbers: 0 is float32, 1 is bfloat16.
extern "C" void outrider_gated(const void *joined, int64_t type, int64_t rows, int64_t width, int64_t gelu, void *out);

namespace {

constexpr int LANES = 16;
constexpr int64_t PART = 512, ALONE = 1 << 13;  // numbers that a thread takes, and those for one thread

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

template <class To, class From>
To as(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

Floats all(float number) { return Floats{} + number; }

// exp(x), to within two units of the last bit; x is cut at +-87.
Floats exponential(Floats x) {
    x = x > all(87) ? all(87) : x;
    x = x < all(-87) ? all(-87) : x;
    // Added to so large a number, the power of two is rounded to a whole one.
    const Floats power = x * 1.44269504f + 12582912.0f - 12582912.0f;
    const Floats r = x - power * 0.693359375f - power * -2.12194440e-4f;
    const Floats series = 1 + r * (1 + r * (1 / 2.0f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f + r * (1 / 720.0f))))));
    return series * as<Floats>((__builtin_convertvector(power, Ints) + 127) << 23);
}

template <bool GELU>
Floats gated(Floats x, Floats y) {
    const Floats t = GELU ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
    return x / (1 + exponential(-t)) * y;
}

template <bool BFLOAT16>
Floats read(const void *from, int64_t place, int count) {
    if (BFLOAT16) {
        Halves halves{};
        memcpy(&halves, static_cast<const uint16_t *>(from) + place, 2 * count);
        return as<Floats>(__builtin_convertvector(halves, Words) << 16);
    }
    Floats floats{};
    memcpy(&floats, static_cast<const float *>(from) + place, 4 * count);
    return floats;
}

template <bool BFLOAT16>
void write(Floats numbers, void *to, int64_t place, int count) {
    if (!BFLOAT16) {
        memcpy(static_cast<float *>(to) + place, &numbers, 4 * count);
        return;
    }
    const Words bits = as<Words>(numbers), nan = Words{} + 0x7fc0u;
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Halves halves = __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded, Halves);
    memcpy(static_cast<uint16_t *>(to) + place, &halves, 2 * count);
}

template <bool BFLOAT16, bool GELU>
void all_rows(const void *joined, int64_t rows, int64_t width, void *out) {
    const int64_t parts = (width + PART - 1) / PART;
#pragma omp parallel for if (rows * width > ALONE)
    for (int64_t i = 0; i < rows * parts; i++) {
        const int64_t row = i / parts, begin = i % parts * PART, end = std::min(width, begin + PART);
        const auto vector = [&](int64_t first, int count) {
            const int64_t place = 2 * row * width + first;
            const Floats x = read<BFLOAT16>(joined, place, count), y = read<BFLOAT16>(joined, place + width, count);
            write<BFLOAT16>(gated<GELU>(x, y), out, row * width + first, count);
        };
        // A constant, so that a whole vector is read at once.
        int64_t first = begin;
        for (; first + LANES <= end; first += LANES) vector(first, LANES);
        if (first < end) vector(first, int(end - first));
    }
}

}  // namespace

void outrider_gated(const void *joined, int64_t type, int64_t rows, int64_t width, int64_t gelu, void *out) {
    if (type == 1) return gelu ? all_rows<true, true>(joined, rows, width, out) : all_rows<true, false>(joined, rows, width, out);
    return gelu ? all_rows<false, true>(joined, rows, width, out) : all_rows<false, false>(joined, rows, width, out);
}
