// SPDX-License-Identifier: Apache-2.0
#include "runtime/tensor/dtype.h"

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
