// SPDX-License-Identifier: Apache-2.0
/* Sums and maxima of NCCL's double. */
#include <math.h>

#include "runtime/tensor/dtype.h"
#include "tests/hostcuda/doubles/nccl_parts.h"

size_t nccl_width(ncclDataType_t type)
{
    return type == ncclFloat64 || type == ncclInt64   ? 8
           : type == ncclFloat32 || type == ncclInt32 ? 4
           : type == ncclBfloat16                     ? 2
                                                      : 1;
}

static double get(const char *p, ncclDataType_t type, size_t i)
{
    switch (type) {
    case ncclFloat32:
        return ((const float *)p)[i];
    case ncclFloat64:
        return ((const double *)p)[i];
    case ncclBfloat16:
        return nd_bf16_to_f32(((const nd_bf16 *)p)[i]);
    case ncclInt32:
        return ((const int32_t *)p)[i];
    default:
        return ((const uint8_t *)p)[i];
    }
}

static void put(char *p, ncclDataType_t type, size_t i, double value)
{
    switch (type) {
    case ncclFloat32:
        ((float *)p)[i] = (float)value;
        break;
    case ncclFloat64:
        ((double *)p)[i] = value;
        break;
    case ncclBfloat16:
        ((nd_bf16 *)p)[i] = nd_bf16_from_f32((float)value);
        break;
    case ncclInt32:
        ((int32_t *)p)[i] = (int32_t)value;
        break;
    default:
        ((uint8_t *)p)[i] = (uint8_t)value;
    }
}

/* In the order of a ring that ends at the first member, rounded at each hop to the type itself. */
void nccl_reduce(const call *c, size_t from, size_t count, char *out)
{
    for (size_t i = 0; i < count; i++) {
        if (c->type == ncclInt64) {
            int64_t sum = ((const int64_t *)nccl_buffer_of(c, 0))[from + i];
            for (int m = 1; m < c->comm->size; m++) {
                int64_t x = ((const int64_t *)nccl_buffer_of(c, m))[from + i];
                sum = c->op == ncclMax ? (x > sum ? x : sum) : sum + x;
            }
            ((int64_t *)out)[i] = sum;
            continue;
        }
        double sum = get(nccl_buffer_of(c, c->comm->size - 1), c->type, from + i);
        for (int m = c->comm->size - 2; m >= 0; m--) {
            double x = get(nccl_buffer_of(c, m), c->type, from + i);
            sum = c->op == ncclMax ? fmax(x, sum) : sum + x;
            put(out, c->type, i, sum);
            sum = get(out, c->type, i);
        }
        put(out, c->type, i, sum);
    }
}
