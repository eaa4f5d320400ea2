// SPDX-License-Identifier: Apache-2.0
#include "trainer/dry/dry_prepare.h"

#include "trainer/dry/dry_ops.h"

/* The call on the device itself. */
#define PREPARE(op_, ...)                                                                          \
    const nd_dry_target *target = s->native;                                                       \
    nd_stream stream = {.device = target->device};                                                 \
    return target->prepare->op_(&stream, __VA_ARGS__)

static nd_status matmul(nd_stream *s, nd_tensor c, nd_tensor a, bool a_transposed, nd_tensor b,
                        bool b_transposed, float beta)
{
    PREPARE(matmul, c, a, a_transposed, b, b_transposed, beta);
}

static nd_status matmul_fp8(nd_stream *s, nd_tensor c, nd_fp8 a, bool a_transposed, nd_fp8 b,
                            bool b_transposed, float beta, bool fast_accumulation, void *scratch)
{
    PREPARE(matmul_fp8, c, a, a_transposed, b, b_transposed, beta, fast_accumulation, scratch);
}

static nd_status attention_fwd(nd_stream *s, const nd_attention *a, nd_tensor out, nd_tensor lse,
                               nd_tensor q, nd_tensor k, nd_tensor v, void *scratch)
{
    PREPARE(attention_fwd, a, out, lse, q, k, v, scratch);
}

static nd_status attention_bwd(nd_stream *s, const nd_attention *a, nd_tensor dq, nd_tensor dk,
                               nd_tensor dv, nd_tensor q, nd_tensor k, nd_tensor v, nd_tensor out,
                               nd_tensor dout, nd_tensor lse, nd_tensor delta, bool add_q,
                               bool add_kv, void *scratch)
{
    PREPARE(attention_bwd, a, dq, dk, dv, q, k, v, out, dout, lse, delta, add_q, add_kv, scratch);
}

static nd_status amax(nd_stream *s, float *out, nd_tensor x, nd_granularity granularity, bool merge)
{
    return ND_OK;
}

static nd_status fp8_scale(nd_stream *s, float *scale, float *inverse, const float *amax_,
                           int64_t count, nd_dtype format, bool power_of_two)
{
    return ND_OK;
}

static nd_status fp8_cast(nd_stream *s, nd_fp8 out, float *amax_, nd_tensor x)
{
    return ND_OK;
}

static nd_status fp8_transpose(nd_stream *s, nd_tensor out, nd_tensor codes)
{
    return ND_OK;
}

static nd_status cast(nd_stream *s, nd_tensor out, nd_tensor x)
{
    return ND_OK;
}

nd_ops nd_dry_prepare_ops(const nd_ops *real)
{
    nd_ops ops = nd_dry_ops(real); /* whose other ops do nothing at all */
    ops.matmul = matmul;
    ops.matmul_fp8 = matmul_fp8;
    ops.attention_fwd = attention_fwd;
    ops.attention_bwd = attention_bwd;
    ops.amax = amax;
    ops.fp8_scale = fp8_scale;
    ops.fp8_cast = fp8_cast;
    ops.fp8_transpose = fp8_transpose;
    ops.cast = cast;
    return ops;
}
