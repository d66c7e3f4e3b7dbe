// Blocks of a GGUF file as panels. `blocks.py` says how panels are laid out, and does the same in torch.
#include <omp.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int PANEL = 16, GROUP = 32;
enum Kind { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 };

// Bytes of a block in a file, its weights, scales of 16 bits, other scales, bits of a code.
struct Layout {
    int size, weights, halves, small, bits;
    int chunk() const { return PANEL * (2 * halves + small + weights * bits / 8); }
};

Layout layout_of(int64_t kind) {
    switch (kind) {
        case Q4_0: return {18, 32, 1, 0, 4};
        case Q4_1: return {20, 32, 2, 0, 4};
        case Q5_0: return {22, 32, 1, 0, 5};
        case Q5_1: return {24, 32, 2, 0, 5};
        case Q8_0: return {34, 32, 1, 0, 8};
        case Q4_K: return {144, 256, 2, 16, 4};
        case Q5_K: return {176, 256, 2, 16, 5};
        case Q6_K: return {210, 256, 1, 16, 6};
        case BF16: return {64, 32, 0, 0, 16};
        default: return {0, 0, 0, 0, 0};
    }
}

// A block of a row, taken apart.
struct Parts {
    uint8_t halves[4], small[16], codes[256];
};

void take_scales(const uint8_t *packed, uint8_t *small) {
    for (int j = 0; j < 4; j++) {
        const uint8_t scale = packed[j], offset = packed[4 + j], last = packed[8 + j];
        small[2 * j] = scale & 63;
        small[2 * j + 1] = offset & 63;
        small[2 * (j + 4)] = (last & 15) | ((scale >> 2) & 48);
        small[2 * (j + 4) + 1] = (last >> 4) | ((offset >> 2) & 48);
    }
}

void take(int64_t kind, const Layout &layout, const uint8_t *block, Parts &parts) {
    uint8_t *codes = parts.codes;
    const uint8_t *rest = block + 2 * layout.halves;
    if (kind != Q6_K) memcpy(parts.halves, block, 2 * layout.halves);
    switch (kind) {
        case Q4_0:
        case Q4_1:
            for (int i = 0; i < 16; i++) codes[i] = rest[i] & 15, codes[16 + i] = rest[i] >> 4;
            break;
        case Q5_0:
        case Q5_1: {
            uint32_t fifth;
            memcpy(&fifth, rest, 4);
            for (int i = 0; i < 16; i++) {
                codes[i] = (rest[4 + i] & 15) | ((fifth >> i) & 1) << 4;
                codes[16 + i] = (rest[4 + i] >> 4) | ((fifth >> (16 + i)) & 1) << 4;
            }
            break;
        }
        case Q4_K:
        case Q5_K: {
            take_scales(rest, parts.small);
            const uint8_t *high = rest + 12, *low = kind == Q5_K ? high + 32 : high;
            for (int pair = 0; pair < 4; pair++, low += 32, codes += 64)
                for (int i = 0; i < 32; i++) codes[i] = low[i] & 15, codes[32 + i] = low[i] >> 4;
            if (kind == Q5_K)
                for (int group = 0; group < 8; group++)
                    for (int i = 0; i < 32; i++) parts.codes[32 * group + i] |= ((high[i] >> group) & 1) << 4;
            break;
        }
        case Q6_K: {
            const uint8_t *low = block, *high = block + 128;
            memcpy(parts.small, block + 192, 16);
            memcpy(parts.halves, block + 208, 2);
            for (int half = 0; half < 2; half++, low += 64, high += 32, codes += 128)
                for (int i = 0; i < 32; i++) {
                    codes[i] = (low[i] & 15) | (high[i] & 3) << 4;
                    codes[32 + i] = (low[32 + i] & 15) | ((high[i] >> 2) & 3) << 4;
                    codes[64 + i] = (low[i] >> 4) | ((high[i] >> 4) & 3) << 4;
                    codes[96 + i] = (low[32 + i] >> 4) | (high[i] >> 6) << 4;
                }
            break;
        }
        default: memcpy(codes, rest, layout.weights * layout.bits / 8);
    }
}

// Eight codes: bits 0 to 3 of codes 0 to 3 in the first two bytes, of codes 4 to 7 in bytes 4 and 5.
uint64_t low_bits(uint64_t codes) {
    const uint64_t low = codes & 0x0f0f0f0f0f0f0f0fu;
    return low | low >> 12;
}

// Likewise the `width` bits above them.
uint64_t high_bits(uint64_t codes, int width) {
    const uint64_t high = codes >> 4 & 0x0303030303030303u;
    return high | high >> (16 - width);
}

// The bytes of a row in a vector of a panel.
void store(uint8_t *vector, int row, uint64_t bytes) {
    for (int half = 0; half < 2; half++) {
        const uint16_t two = uint16_t(bytes >> (32 * half));
        memcpy(vector + 16 * (row / 4) + 8 * half + 2 * (row % 4), &two, 2);
    }
}

// The codes of one group of a row, at their places in the group of the panel.
void place(const uint8_t *codes, int bits, int row, uint8_t *out) {
    uint64_t high[2] = {0, 0};
    for (int q = 0; q < 4; q++) {
        uint64_t eight;
        memcpy(&eight, codes + 8 * q, 8);
        store(out + 64 * q, row, low_bits(eight));
        if (bits == 5) high[0] |= high_bits(eight, 1) << (2 * q);
        if (bits == 6) high[q / 2] |= high_bits(eight, 2) << (4 * (q % 2));
    }
    if (bits > 4) store(out + 256, row, high[0]);
    if (bits > 5) store(out + 320, row, high[1]);
}

// Pairs of whole bytes of a row, at their places in the chunk of the panel.
template <int BYTES>
void place_pairs(const uint8_t *codes, int pairs, int row, uint8_t *out) {
    for (int i = 0; i < pairs; i++) memcpy(out + (i * PANEL + row) * BYTES, codes + i * BYTES, BYTES);
}

void panel_of(int64_t kind, const Layout &layout, const uint8_t *const *rows, int64_t num_blocks, uint8_t *out) {
    const int pairs = layout.weights / 2, group = PANEL * GROUP * layout.bits / 8;
    for (int64_t block = 0; block < num_blocks; block++, out += layout.chunk()) {
        uint8_t *small = out + 2 * layout.halves * PANEL, *codes = small + layout.small * PANEL;
        for (int row = 0; row < PANEL; row++) {
            Parts parts;
            take(kind, layout, rows[row] + block * layout.size, parts);
            for (int i = 0; i < layout.halves; i++) memcpy(out + 2 * (i * PANEL + row), parts.halves + 2 * i, 2);
            for (int i = 0; i < layout.small; i++) small[i * PANEL + row] = parts.small[i];
            if (layout.bits == 16)
                place_pairs<4>(parts.codes, pairs, row, codes);
            else if (layout.bits == 8)
                place_pairs<2>(parts.codes, pairs, row, codes);
            else
                for (int i = 0; i < layout.weights / GROUP; i++)
                    place(parts.codes + i * GROUP, layout.bits, row, codes + i * group);
        }
    }
}

}  // namespace

// The panels of `rows` rows of blocks of a file, the last one filled up with zeros. Row `i` is row `order[i]` of the
// file; where `order` is null, row `i`. Returns 0, or 1 if the kind is unknown.
extern "C" int outrider_panels(const uint8_t *blocks, int64_t rows, int64_t num_blocks, const int64_t *order,
                               int64_t kind, uint8_t *out) {
    const Layout layout = layout_of(kind);
    if (layout.size == 0) return 1;
    const int64_t row_bytes = num_blocks * layout.size, panel_bytes = num_blocks * layout.chunk();
    const int64_t panels = (rows + PANEL - 1) / PANEL;
    const std::vector<uint8_t> empty(row_bytes, 0);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++) {
        const uint8_t *sources[PANEL];
        for (int i = 0; i < PANEL; i++) {
            const int64_t row = panel * PANEL + i;
            sources[i] = row < rows ? blocks + (order == nullptr ? row : order[row]) * row_bytes : empty.data();
        }
        panel_of(kind, layout, sources, num_blocks, out + panel * panel_bytes);
    }
    return 0;
}
