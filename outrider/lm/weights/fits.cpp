// What `fits.py` does in torch, for eight groups of weights at a time, operation by operation in the same order.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int GROUP = 32, LANES = 8, CANDIDATES = 21;
using Lanes = float[LANES];
#define EACH _Pragma("omp simd") for (int l = 0; l < LANES; l++)

// The nearest code; halves go to the even one.
inline float coded(float x, float inverse, float least) {
    const float magic = 12582912.f, code = ((x - least) * inverse + magic) - magic;
    return std::min(std::max(0.f, code), 15.f);
}

// The weighted squares of what codes are off by.
void add_up(const Lanes *x, const Lanes *weights, const Lanes *codes, const Lanes &scale, const Lanes &least, Lanes &error) {
    EACH error[l] = 0;
    for (int i = 0; i < GROUP; i++) EACH {
        const float off = (scale[l] * codes[i][l] + least[l]) - x[i][l];
        error[l] += weights[i][l] * (off * off);
    }
}

// Scales, offsets and codes of eight groups: x[i] are their weights number i.
void fit(const Lanes *x, Lanes &scale, Lanes &offset, Lanes *codes) {
    Lanes weights[GROUP], mean, lowest, highest, sum_w, sum_x;
    EACH mean[l] = 0;
    for (int i = 0; i < GROUP; i++) EACH mean[l] += x[i][l] * x[i][l];
    EACH mean[l] = std::sqrt(mean[l] / GROUP);
    for (int i = 0; i < GROUP; i++) EACH weights[i][l] = mean[l] + std::fabs(x[i][l]);
    EACH {
        lowest[l] = std::min(0.f, x[0][l]), highest[l] = x[0][l];
        sum_w[l] = weights[0][l], sum_x[l] = weights[0][l] * x[0][l];
    }
    for (int i = 1; i < GROUP; i++) EACH {
        lowest[l] = std::min(lowest[l], x[i][l]), highest[l] = std::max(highest[l], x[i][l]);
        sum_w[l] += weights[i][l], sum_x[l] += weights[i][l] * x[i][l];
    }
    Lanes inverse, least, best_inverse, best_least, error;
    EACH {
        inverse[l] = best_inverse[l] = 15 / (highest[l] - lowest[l]);
        least[l] = best_least[l] = lowest[l];
        scale[l] = 1 / inverse[l];
    }
    for (int i = 0; i < GROUP; i++) EACH codes[i][l] = coded(x[i][l], inverse[l], least[l]);
    add_up(x, weights, codes, scale, least, error);
    for (int candidate = 0; candidate < CANDIDATES; candidate++) {
        const float levels = (0.1f * candidate - 1) + 15;
        Lanes sum_l, sum_l2, sum_xl, new_scale, new_least, new_error, determinant;
        EACH {
            inverse[l] = levels / (highest[l] - least[l]);
            sum_l[l] = sum_l2[l] = sum_xl[l] = 0;
        }
        for (int i = 0; i < GROUP; i++) EACH {
            const float code = coded(x[i][l], inverse[l], least[l]), weighted = weights[i][l] * code;
            codes[i][l] = code;
            sum_l[l] += weighted, sum_l2[l] += weighted * code, sum_xl[l] += weighted * x[i][l];
        }
        EACH {
            determinant[l] = sum_w[l] * sum_l2[l] - sum_l[l] * sum_l[l];
            const float slope = (sum_w[l] * sum_xl[l] - sum_x[l] * sum_l[l]) / determinant[l];
            const float shift = (sum_l2[l] * sum_x[l] - sum_l[l] * sum_xl[l]) / determinant[l];
            const float through = sum_xl[l] / sum_l2[l];
            new_scale[l] = shift > 0 ? through : slope, new_least[l] = shift > 0 ? 0 : shift;
        }
        add_up(x, weights, codes, new_scale, new_least, new_error);
        EACH {
            const bool better = (determinant[l] > 0) & (new_error[l] < error[l]);
            best_inverse[l] = better ? inverse[l] : best_inverse[l], best_least[l] = better ? least[l] : best_least[l];
            scale[l] = better ? new_scale[l] : scale[l], least[l] = better ? new_least[l] : least[l];
            error[l] = better ? new_error[l] : error[l];
        }
    }
    for (int i = 0; i < GROUP; i++)
        EACH codes[i][l] = highest[l] == lowest[l] ? 0 : coded(x[i][l], best_inverse[l], best_least[l]);
    EACH {
        scale[l] = highest[l] == lowest[l] ? 0 : scale[l];
        offset[l] = 0 - least[l];
    }
}

}  // namespace

// The fits of `count` groups, which lie one behind another, and their codes likewise.
extern "C" void outrider_fits(const float *groups, int64_t count, float *scales, float *offsets, uint8_t *codes) {
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < count; first += LANES) {
        const int64_t filled = std::min<int64_t>(LANES, count - first);
        Lanes x[GROUP] = {}, fitted[GROUP], scale, offset;
        for (int64_t l = 0; l < filled; l++)
            for (int i = 0; i < GROUP; i++) x[i][l] = groups[(first + l) * GROUP + i];
        fit(x, scale, offset, fitted);
        for (int64_t l = 0; l < filled; l++) {
            scales[first + l] = scale[l], offsets[first + l] = offset[l];
            for (int i = 0; i < GROUP; i++) codes[(first + l) * GROUP + i] = uint8_t(fitted[i][l]);
        }
    }
}
