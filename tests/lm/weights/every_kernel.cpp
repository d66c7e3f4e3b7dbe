// Runs every kernel on memory of exactly the size that it may touch. Built with sanitizers and `kernels.cpp` before it.
#include <cstdio>
#include <cstdlib>

struct Exactly {
    unsigned char *data;
    explicit Exactly(size_t size) : data(static_cast<unsigned char *>(malloc(size ? size : 1))) {
        for (size_t i = 0; i < size; i++) data[i] = static_cast<unsigned char>(i * 37 + 11) & 0x3b;
    }
    ~Exactly() { free(data); }
};

int main() {
    const int64_t kinds[] = {2, 3, 6, 7, 8, 12, 13, 14, 30}, bytes[] = {18, 20, 22, 24, 34, 148, 180, 210, 64};
    int failed = 0;  // bytes: of a row of a block in a panel
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
    printf(failed ? "refused\n" : "all ran\n");
    return failed;
}
