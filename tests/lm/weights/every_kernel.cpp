// Runs every kernel on memory of exactly the size that it may touch. Built with sanitizers and `kernels.cpp` before it,
// beside `panels.cpp`, `fits.cpp` and `gated.cpp`.
#include <cstdio>
#include <cstdlib>

extern "C" int outrider_panels(const uint8_t *blocks, int64_t rows, int64_t num_blocks, const int64_t *order, int64_t kind, uint8_t *out);
extern "C" void outrider_fits(const float *groups, int64_t count, float *scales, float *offsets, uint8_t *codes);
extern "C" void outrider_gated(const void *joined, int64_t type, int64_t rows, int64_t width, int64_t gelu, void *out);

struct Exactly {
    unsigned char *data;
    explicit Exactly(size_t size) : data(static_cast<unsigned char *>(malloc(size ? size : 1))) {
        for (size_t i = 0; i < size; i++) data[i] = static_cast<unsigned char>(i * 37 + 11) & 0x3b;
    }
    ~Exactly() { free(data); }
};

int main() {
    // bytes: of a row of a block in a panel; in_file: in a file.
    const int64_t kinds[] = {2, 3, 6, 7, 8, 12, 13, 14, 30}, bytes[] = {18, 20, 22, 24, 34, 148, 180, 210, 64};
    const int64_t in_file[] = {18, 20, 22, 24, 34, 144, 176, 210, 64};
    int failed = 0;
    for (int i = 0; i < 9; i++) {
        const int64_t weights = kinds[i] >= 12 && kinds[i] <= 14 ? 256 : 32;
        for (int64_t rows : {1, 2, 5, 8, 17, 65})
            for (int64_t size : {1, 16, 37}) {
                const int64_t features = 3 * weights, panels = (size + 15) / 16;
                Exactly blocks(panels * 16 * 3 * bytes[i]), states(rows * features * 4), bias(2 * size * 4), out(rows * 2 * size * 4), ids(8 * 3), embedded(3 * features * 4);
                const void *both[] = {blocks.data, blocks.data};
                const int64_t same[] = {kinds[i], kinds[i]}, sizes[] = {size, size}, some[] = {0, size - 1, size / 2};
                for (int type : {0, 1}) {
                    failed |= outrider_block_linear(states.data, type, rows, features, features, 2, both, same, sizes, bias.data, 1, out.data, type);
                    failed |= outrider_block_linear(states.data, type, rows, features, features, 1, both, same, sizes, nullptr, 0, out.data, 0);
                    failed |= outrider_int8_linear(states.data, type, rows, features, features, 2, both, same, sizes, bias.data, 1, out.data, type);
                    failed |= outrider_int8_linear(states.data, type, rows, features, features, 1, both, same, sizes, nullptr, 0, out.data, 0);
                    failed |= outrider_block_rows(some, 3, blocks.data, kinds[i], size, features, embedded.data, type);
                }
            }
    }
    for (int i = 0; i < 9; i++)
        for (int64_t rows : {1, 16, 37}) {
            Exactly blocks(rows * 3 * in_file[i]), order(rows * 8), panels((rows + 15) / 16 * 16 * 3 * bytes[i]);
            for (int64_t row = 0; row < rows; row++) reinterpret_cast<int64_t *>(order.data)[row] = rows - 1 - row;
            failed |= outrider_panels(blocks.data, rows, 3, nullptr, kinds[i], panels.data);
            failed |= outrider_panels(blocks.data, rows, 3, reinterpret_cast<int64_t *>(order.data), kinds[i], panels.data);
        }
    for (int64_t count : {0, 1, 8, 13}) {
        Exactly groups(count * 32 * 4), scales(count * 4), offsets(count * 4), codes(count * 32);
        outrider_fits(reinterpret_cast<float *>(groups.data), count, reinterpret_cast<float *>(scales.data), reinterpret_cast<float *>(offsets.data), codes.data);
    }
    for (int64_t width : {1, 16, 37, 9000})
        for (int64_t rows : {1, 3})
            for (int type : {0, 1}) {
                Exactly joined(2 * rows * width * (type ? 2 : 4)), out(rows * width * (type ? 2 : 4));
                for (int gelu : {0, 1}) outrider_gated(joined.data, type, rows, width, gelu, out.data);
            }
    printf(failed ? "refused\n" : "all ran\n");
    return failed;
}
