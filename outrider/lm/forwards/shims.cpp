// Our operators as C functions for compiled libraries: they read tensors by torch's C interface, allocate the output and
// call the function that computes it. `shims.py` says which operators there are.
#include <cstdint>
#include <initializer_list>

extern "C" {

// Of torch, `aoti_torch/c/shim.h`. Every function returns 0, or another number where it failed.
struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque *;
using AOTITorchError = int32_t;
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle, void **);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle, int64_t **);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle, int64_t **);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle, int64_t *);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle, int32_t *);
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle, bool *);
AOTITorchError aoti_torch_empty_strided(
    int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device, int32_t index, AtenTensorHandle *);
AOTITorchError aoti_torch_clone(AtenTensorHandle, AtenTensorHandle *);
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_bool();

// Of `kernels.cpp`. They know float32 as 0 and bfloat16 as 1, and return 0, or another number where they failed.
int outrider_block_linear(const void *states, int64_t states_type, int64_t rows, int64_t stride, int64_t features,
                          int64_t count, const void *const *blocks, const int64_t *kinds, const int64_t *sizes,
                          const void *bias, int64_t bias_type, void *out, int64_t out_type);
int outrider_int8_linear(const void *states, int64_t states_type, int64_t rows, int64_t stride, int64_t features,
                         int64_t count, const void *const *blocks, const int64_t *kinds, const int64_t *sizes,
                         const void *bias, int64_t bias_type, void *out, int64_t out_type);
int outrider_block_rows(const int64_t *ids, int64_t count, const void *blocks, int64_t kind, int64_t size,
                        int64_t features, void *out, int64_t out_type);

// Of `gated.cpp`.
void outrider_gated(const void *joined, int64_t type, int64_t rows, int64_t width, int64_t gelu, void *out);

// Of `attend.cpp`, whose caller says what the numbers are.
void outrider_attend(const void *queries, const void *keys, const void *values, const void *mask, void *output,
                     const int64_t *numbers, double scale);
}

namespace {

constexpr int64_t MOST_DIMENSIONS = 8, MOST_WEIGHTS = 16;

struct Tensor {
    void *data = nullptr;
    int64_t *sizes = nullptr, *strides = nullptr, dim = 0;
    int32_t dtype = 0;

    // Whether it could be read.
    bool open(AtenTensorHandle tensor) {
        return !(
            aoti_torch_get_data_ptr(tensor, &data) || aoti_torch_get_sizes(tensor, &sizes) ||
            aoti_torch_get_strides(tensor, &strides) || aoti_torch_get_dim(tensor, &dim) ||
            aoti_torch_get_dtype(tensor, &dtype)) && dim < MOST_DIMENSIONS;
    }

    // Whether it could be read, and lies without gaps.
    bool read(AtenTensorHandle tensor) {
        bool contiguous = false;
        return open(tensor) && !aoti_torch_is_contiguous(tensor, &contiguous) && contiguous;
    }

    // Whether it could be read, and has four dimensions, in the last of which numbers lie side by side.
    bool open_rows(AtenTensorHandle tensor) { return open(tensor) && dim == 4 && strides[3] == 1; }

    // The product of the first sizes.
    int64_t count(int64_t dimensions) const {
        int64_t numbers = 1;
        for (int64_t i = 0; i < dimensions; i++) numbers *= sizes[i];
        return numbers;
    }
};

// The number by which the kernels know a type; -1 for others.
int64_t type_of(int32_t dtype) {
    return dtype == aoti_torch_dtype_float32() ? 0 : dtype == aoti_torch_dtype_bfloat16() ? 1 : -1;
}

// A tensor of these sizes and one more.
AOTITorchError allocate(const int64_t *sizes, int64_t dim, int64_t last, int32_t dtype, AtenTensorHandle *output, void **data) {
    int64_t all[MOST_DIMENSIONS + 1], strides[MOST_DIMENSIONS + 1], stride = 1;
    for (int64_t i = 0; i < dim; i++) all[i] = sizes[i];
    all[dim] = last;
    for (int64_t i = dim; i >= 0; i--) strides[i] = stride, stride *= all[i];
    return aoti_torch_empty_strided(dim + 1, all, strides, dtype, aoti_torch_device_type_cpu(), 0, output) ||
        aoti_torch_get_data_ptr(*output, data);
}

// Products with packed weights, by one of the kernels' functions.
AOTITorchError linear(
    decltype(outrider_block_linear) *multiply, AtenTensorHandle states_handle, const AtenTensorHandle *block_handles, int64_t count,
    const int64_t *kinds, const int64_t *sizes, AtenTensorHandle *bias_handle, AtenTensorHandle *output) {
    Tensor states, bias;
    const void *blocks[MOST_WEIGHTS];
    if (!states.read(states_handle) || states.dim < 1 || count > MOST_WEIGHTS) return 1;
    if (bias_handle && !bias.read(*bias_handle)) return 1;
    int64_t features = 0;
    for (int64_t i = 0; i < count; i++) {
        Tensor weight;
        if (!weight.read(block_handles[i])) return 1;
        blocks[i] = weight.data;
        features += sizes[i];
    }
    void *data;
    const int64_t dim = states.dim - 1;
    if (allocate(states.sizes, dim, features, states.dtype, output, &data)) return 1;
    const int64_t type = type_of(states.dtype), width = states.sizes[dim];
    return multiply(
        states.data, type, states.count(dim), width, width, count, blocks, kinds, sizes, bias.data, type_of(bias.dtype), data,
        type);
}

}  // namespace

extern "C" {

AOTITorchError aoti_torch_cpu_block_linear(
    AtenTensorHandle states, const AtenTensorHandle *blocks, int64_t count, const int64_t *kinds, int64_t, const int64_t *sizes,
    int64_t, AtenTensorHandle *bias, AtenTensorHandle *output) {
    return linear(outrider_block_linear, states, blocks, count, kinds, sizes, bias, output);
}

AOTITorchError aoti_torch_cpu_int8_linear(
    AtenTensorHandle states, const AtenTensorHandle *blocks, int64_t count, const int64_t *kinds, int64_t, const int64_t *sizes,
    int64_t, AtenTensorHandle *bias, AtenTensorHandle *output) {
    return linear(outrider_int8_linear, states, blocks, count, kinds, sizes, bias, output);
}

AOTITorchError aoti_torch_cpu_block_rows(
    AtenTensorHandle ids_handle, AtenTensorHandle block_handle, int64_t kind, int64_t size, int64_t features,
    int32_t dtype, AtenTensorHandle *output) {
    Tensor ids, blocks;
    void *data;
    if (!ids.read(ids_handle) || !blocks.read(block_handle)) return 1;
    if (allocate(ids.sizes, ids.dim, features, dtype, output, &data)) return 1;
    return outrider_block_rows(
        static_cast<const int64_t *>(ids.data), ids.count(ids.dim), blocks.data, kind, size, features, data, type_of(dtype));
}

AOTITorchError aoti_torch_cpu_gated(AtenTensorHandle joined_handle, int32_t gelu, AtenTensorHandle *output) {
    Tensor joined;
    void *data;
    if (!joined.read(joined_handle) || joined.dim < 1 || type_of(joined.dtype) < 0) return 1;
    const int64_t dim = joined.dim - 1, width = joined.sizes[dim] / 2;
    if (allocate(joined.sizes, dim, width, joined.dtype, output, &data)) return 1;
    outrider_gated(joined.data, type_of(joined.dtype), joined.count(dim), width, gelu, data);
    return 0;
}

AOTITorchError aoti_torch_cpu_kept(AtenTensorHandle states, AtenTensorHandle *output) { return aoti_torch_clone(states, output); }

AOTITorchError aoti_torch_cpu_attend(
    AtenTensorHandle query_handle, AtenTensorHandle key_handle, AtenTensorHandle value_handle,
    AtenTensorHandle *mask_handle, double scale, AtenTensorHandle *output) {
    Tensor queries, keys, values, mask;
    if (!queries.open_rows(query_handle) || !keys.open_rows(key_handle) || !values.open_rows(value_handle)) return 1;
    if (mask_handle && (!mask.open(*mask_handle) || mask.dim != 4)) return 1;
    const int64_t type = type_of(queries.dtype), mask_type = type_of(mask.dtype);
    const bool is_bool = mask_handle && mask.dtype == aoti_torch_dtype_bool();
    if (type < 0 || keys.dtype != queries.dtype || values.dtype != queries.dtype) return 1;
    if (mask_handle && !is_bool && mask_type < 0) return 1;
    const int64_t *q = queries.sizes, *v = values.sizes;
    int64_t numbers[22] = {q[0], q[1], v[1], q[2], v[2], q[3], v[3]}, *next = numbers + 7;
    for (const Tensor *each : {&queries, &keys, &values})
        for (int i = 0; i < 3; i++) *next++ = each->strides[i];
    for (int i = 0; i < 4; i++)
        *next++ = !mask_handle || (mask.sizes[i] == 1 && i < 3) ? 0 : mask.strides[i];
    *next++ = !mask_handle ? 0 : is_bool ? 1 : 2 + mask_type;
    *next++ = type;
    void *data;
    const int64_t sizes[] = {q[0], q[2], q[1]};
    if (allocate(sizes, 3, v[3], queries.dtype, output, &data)) return 1;
    outrider_attend(queries.data, keys.data, values.data, mask.data, data, numbers, scale);
    return 0;
}
}
