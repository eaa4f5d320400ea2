// SPDX-License-Identifier: Apache-2.0
#include "runtime/tensor/tensor.h"

static const struct {
    size_t size;
    const char *name;
} dtypes[ND_DTYPE_COUNT] = {
    [ND_DTYPE_F32] = {4, "f32"},         [ND_DTYPE_BF16] = {2, "bf16"},
    [ND_DTYPE_F64] = {8, "f64"},         [ND_DTYPE_I64] = {8, "i64"},
    [ND_DTYPE_I32] = {4, "i32"},         [ND_DTYPE_U8] = {1, "u8"},
    [ND_DTYPE_F8_E4M3] = {1, "f8_e4m3"}, [ND_DTYPE_F8_E5M2] = {1, "f8_e5m2"},
};

size_t nd_dtype_size(nd_dtype dtype)
{
    return dtypes[dtype].size;
}

const char *nd_dtype_name(nd_dtype dtype)
{
    return dtypes[dtype].name;
}

static nd_tensor make_contiguous(void *data, nd_dtype dtype, int axes, const int64_t *shape)
{
    nd_tensor t = {.data = data, .dtype = dtype, .axes = axes};
    int64_t stride = 1;
    for (int a = axes - 1; a >= 0; a--) {
        t.shape[a] = shape[a];
        t.stride[a] = stride;
        stride *= shape[a];
    }
    return t;
}

nd_tensor nd_tensor_1d(void *data, nd_dtype dtype, int64_t n0)
{
    return make_contiguous(data, dtype, 1, (int64_t[]){n0});
}

nd_tensor nd_tensor_2d(void *data, nd_dtype dtype, int64_t n0, int64_t n1)
{
    return make_contiguous(data, dtype, 2, (int64_t[]){n0, n1});
}

nd_tensor nd_tensor_3d(void *data, nd_dtype dtype, int64_t n0, int64_t n1, int64_t n2)
{
    return make_contiguous(data, dtype, 3, (int64_t[]){n0, n1, n2});
}

nd_tensor nd_tensor_4d(void *data, nd_dtype dtype, int64_t n0, int64_t n1, int64_t n2, int64_t n3)
{
    return make_contiguous(data, dtype, 4, (int64_t[]){n0, n1, n2, n3});
}

int64_t nd_tensor_count(nd_tensor t)
{
    int64_t n = 1;
    for (int a = 0; a < t.axes; a++) {
        n *= t.shape[a];
    }
    return n;
}

size_t nd_tensor_bytes(nd_tensor t)
{
    return (size_t)nd_tensor_count(t) * nd_dtype_size(t.dtype);
}

bool nd_tensor_is_contiguous(nd_tensor t)
{
    int64_t stride = 1;
    for (int a = t.axes - 1; a >= 0; a--) {
        if (t.shape[a] != 1 && t.stride[a] != stride) {
            return false;
        }
        stride *= t.shape[a];
    }
    return true;
}

static void *offset(nd_tensor t, int64_t elements)
{
    return t.data ? (char *)t.data + (size_t)elements * nd_dtype_size(t.dtype) : NULL;
}

nd_tensor nd_tensor_rows(nd_tensor t, int64_t begin, int64_t count)
{
    ND_ASSERT(begin >= 0 && count >= 0 && begin + count <= t.shape[0]);
    t.data = offset(t, begin * t.stride[0]);
    t.shape[0] = count;
    return t;
}

nd_tensor nd_tensor_columns(nd_tensor t, int64_t begin, int64_t count)
{
    int last = t.axes - 1;
    ND_ASSERT(begin >= 0 && count >= 0 && begin + count <= t.shape[last]);
    t.data = offset(t, begin);
    t.shape[last] = count;
    return t;
}
