// SPDX-License-Identifier: Apache-2.0
/* The ops of FP8. */
#include "tests/gpu/mirror_fp8.h"

static int64_t scales_of(nd_granularity g, int64_t rows, int64_t columns)
{
    return g == ND_PER_TENSOR ? 1 : g == ND_PER_ROW ? rows : columns;
}

nd_status mirror_amax(S s, float *out, T x, nd_granularity g, bool merge)
{
    int64_t n = x.axes == 1 ? 1 : scales_of(g, x.shape[0], x.shape[1]);
    SEE(x, mirror_floats(out, n))
    return RUN(mirrored.ops->amax(s, mirror_there(out), T1(x), g, merge));
}

nd_status mirror_fp8_scale(S s, float *scale, float *inverse, const float *from, int64_t count,
                           nd_dtype format, bool power_of_two)
{
    SEE(mirror_floats(scale, count), mirror_floats(inverse, count), mirror_floats(from, count))
    return RUN(mirrored.ops->fp8_scale(s, mirror_there(scale), mirror_there(inverse),
                                       mirror_there(from), count, format, power_of_two));
}

nd_status mirror_fp8_delayed(S s, const nd_fp8_history *h, nd_amax_algorithm algorithm)
{
    SEE(mirror_floats(h->amax, h->length * h->count), mirror_floats(h->limit, h->count),
        mirror_floats(h->scale, h->count), mirror_floats(h->inverse, h->count))
    if ((status = mirror_to_device(s)) != ND_OK) {
        return status;
    }
    nd_fp8_history moved = {h->length,
                            h->count,
                            mirror_there(h->amax),
                            mirror_there(h->limit),
                            mirror_there(h->scale),
                            mirror_there(h->inverse)};
    status = mirrored.ops->fp8_delayed(s, &moved, algorithm);
    return status == ND_OK ? mirror_from_device(s) : status;
}

static void see_fp8(const nd_fp8 *x, int64_t rows, int64_t columns)
{
    int64_t n = scales_of(x->granularity, rows, columns);
    if (x->codes.data) {
        mirror_see_tensor(x->codes);
    }
    if (x->transposed.data) {
        mirror_see_tensor(x->transposed);
    }
    mirror_see(x->scale, (size_t)n * 4);
    mirror_see(x->inverse, (size_t)n * 4);
}

static nd_fp8 there_fp8(nd_fp8 x)
{
    x.codes.data = mirror_there(x.codes.data);
    x.transposed.data = mirror_there(x.transposed.data);
    x.scale = mirror_there(x.scale);
    x.inverse = mirror_there(x.inverse);
    return x;
}

nd_status mirror_fp8_cast(S s, nd_fp8 out, float *largest, T x)
{
    SEE(x)
    see_fp8(&out, x.shape[0], x.axes == 1 ? 1 : x.shape[1]);
    mirror_see(largest, largest ? 4 : 0);
    return RUN(mirrored.ops->fp8_cast(s, there_fp8(out), mirror_there(largest), T1(x)));
}

nd_status mirror_fp8_transpose(S s, T out, T codes)
{
    SEE(out, codes)
    return RUN(mirrored.ops->fp8_transpose(s, T1(out), T1(codes)));
}

nd_status mirror_fp8_count(S s, int64_t counts[2], T x, nd_fp8 as)
{
    SEE(x)
    see_fp8(&as, x.shape[0], x.axes == 1 ? 1 : x.shape[1]);
    mirror_see(counts, 2 * sizeof *counts);
    return RUN(mirrored.ops->fp8_count(s, mirror_there(counts), T1(x), there_fp8(as)));
}

static void see_operand(const nd_fp8 *x)
{
    nd_tensor t = x->codes.data ? x->codes : x->transposed;
    bool stored = x->codes.data != NULL;
    see_fp8(x, t.shape[stored ? 0 : 1], t.shape[stored ? 1 : 0]);
}

nd_status mirror_matmul_fp8(S s, T c, nd_fp8 a, bool at, nd_fp8 b, bool bt, float beta, bool fast,
                            void *scratch)
{
    SEE(c)
    see_operand(&a);
    see_operand(&b);
    return RUN(mirrored.ops->matmul_fp8(s, T1(c), there_fp8(a), at, there_fp8(b), bt, beta, fast,
                                        mirrored.scratch));
}

size_t mirror_matmul_fp8_scratch(const nd_device *device, int64_t rows, int64_t n, int64_t k,
                                 nd_dtype act)
{
    size_t bytes = mirrored.ops->matmul_fp8_scratch(device, rows, n, k, act);
    ND_ASSERT(bytes <= MIRROR_SCRATCH);
    return bytes;
}
