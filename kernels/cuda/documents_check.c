// SPDX-License-Identifier: Apache-2.0
/*
 * Whether this GPU's cuDNN computes separate documents as the plain kernels do: a few short ones,
 * of two tiers and none, before the first step. Where they are not whole, every second tile of TILE
 * tokens is this rank's, and the others are those whose keys visit. Versions of cuDNN have made NaN
 * or zeros of ragged tensors (NVIDIA/TransformerEngine issue 2186, NVIDIA/cudnn-frontend issues 462
 * and 1083).
 */
#include <math.h>
#include <stdlib.h>

#include "kernels/cuda/sdpa_parts.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/device/cuda_check.h"

enum { TOKENS = 600, TILE = 100, RESULTS = 5, WINDOW = 70 };
static const int lengths[] = {350, 5, 60, 44, 70, 1, 30, 40}; /* of the documents */
static const char *const names[RESULTS] = {"out", "lse", "dq", "dk", "dv"};

typedef struct check {
    nd_cuda_context *context;
    nd_attention a;
    nd_stream stream;
    char *memory;
    size_t used, bytes;
    nd_tensor q, k, v, dout, first_key, end_key, delta;
    nd_tensor results[2][RESULTS]; /* of cuDNN, of the plain kernels */
} check;

static nd_tensor take(check *c, nd_tensor t)
{
    t.data = c->memory + c->used;
    c->used += nd_round_up_bytes(nd_tensor_bytes(t), 256);
    ND_ASSERT(c->used <= c->bytes);
    return t;
}

static nd_tensor of_heads(check *c, nd_dtype dtype, int64_t rows, int64_t heads)
{
    return take(c, nd_tensor_4d(NULL, dtype, 1, rows, heads, c->a.head_dim));
}

/* How many keys are before a token. */
static int32_t keys_before(const check *c, int token)
{
    const int tile = token / (2 * TILE) * TILE, in_tile = token % (2 * TILE);
    return c->a.documents == ND_SEGMENTS_FLAT ? tile + (in_tile < TILE ? in_tile : TILE) : token;
}

static void make_bounds(const check *c, int32_t *starts, int32_t *ends)
{
    int row = 0;
    for (int i = 0, n = -1, first = 0, end = 0; i < TOKENS; i++) {
        first = i == end ? i : first;
        end += i == end ? lengths[++n] : 0;
        if (c->a.documents == ND_SEGMENTS_WHOLE || i / TILE % 2 == 1) {
            starts[row] = keys_before(c, first);
            ends[row++] = keys_before(c, i + 1);
        }
    }
}

/* All BF16 operands are drawn at once: they are heads of one tensor. */
static nd_status make_operands(check *c)
{
    const nd_attention *a = &c->a;
    const nd_tensor lse = nd_tensor_3d(NULL, ND_DTYPE_F32, 1, a->heads, a->sq);
    const nd_tensor bounds = nd_tensor_2d(NULL, ND_DTYPE_I32, 1, a->sq);
    const nd_tensor drawn = of_heads(c, ND_DTYPE_BF16, TOKENS, 2 * a->heads + 2);
    const nd_tensor draws = of_heads(c, ND_DTYPE_F32, TOKENS, 2 * a->heads + 2);
    const nd_random_normal_args normal = {
        .out = draws.data, .count = nd_tensor_count(draws), .deviation = 1.0f, .seed = 1};
    const nd_cast_args cast = {.out = drawn, .x = draws};
    int32_t starts[TOKENS], ends[TOKENS];
    make_bounds(c, starts, ends);
    c->q = nd_sdpa_part(drawn, 0, a->sq, 0, a->heads);
    c->dout = nd_sdpa_part(drawn, 0, a->sq, a->heads, a->heads);
    c->k = nd_sdpa_part(drawn, 0, a->sk, 2 * a->heads, 1);
    c->v = nd_sdpa_part(drawn, 0, a->sk, 2 * a->heads + 1, 1);
    c->delta = take(c, lse);
    for (int side = 0; side < 2; side++) {
        nd_tensor *r = c->results[side];
        r[0] = of_heads(c, ND_DTYPE_BF16, a->sq, a->heads);
        r[1] = take(c, lse);
        r[2] = of_heads(c, ND_DTYPE_BF16, a->sq, a->heads);
        for (int i = 3; i < RESULTS; i++) {
            r[i] = of_heads(c, ND_DTYPE_F32, a->sk, 1);
            ND_TRY(nd_zero(&c->stream, r[i].data, nd_tensor_bytes(r[i])));
        }
    }
    c->first_key = take(c, bounds);
    c->end_key = take(c, bounds);
    ND_TRY(nd_copy(&c->stream, c->first_key.data, starts, nd_tensor_bytes(bounds)));
    ND_TRY(nd_copy(&c->stream, c->end_key.data, ends, nd_tensor_bytes(bounds)));
    nd_cuda_queue queue = nd_cuda_stream(&c->stream);
    int launched = nd_cuda_random_normal(queue, &normal, NULL);
    launched = launched ? launched : nd_cuda_cast(queue, &cast, NULL);
    ND_TRY(nd_cuda_op_done(&c->stream, "attention: check", (cudaError_t)launched));
    return nd_stream_sync(&c->stream); /* the bounds are on the stack of this function */
}

/* By cuDNN (side 0) or the plain kernels alone. False in *taken where cuDNN has no plan. */
static nd_status compute(check *c, int side, bool *taken)
{
    const nd_tensor *r = c->results[side];
    const nd_attention_fwd_args forward = {.attention = c->a,
                                           .out = r[0],
                                           .lse = r[1],
                                           .q = c->q,
                                           .k = c->k,
                                           .v = c->v,
                                           .first_key = c->first_key,
                                           .end_key = c->end_key};
    const nd_attention_delta_args delta = {
        .attention = c->a, .delta = c->delta, .out = r[0], .dout = c->dout};
    const nd_attention_bwd_args backward = {.attention = c->a,
                                            .dq = r[2],
                                            .dk = r[3],
                                            .dv = r[4],
                                            .q = c->q,
                                            .k = c->k,
                                            .v = c->v,
                                            .out = r[0],
                                            .dout = c->dout,
                                            .lse = r[1],
                                            .delta = c->delta,
                                            .first_key = c->first_key,
                                            .end_key = c->end_key,
                                            .add_kv = true};
    nd_sdpa_call calls[] = {nd_sdpa_forward_call(c->context, &forward),
                            {.context = c->context, .backward = true, .x = backward}};
    nd_cuda_queue queue = nd_cuda_stream(&c->stream);
    const int32_t *owners = NULL;
    int launched = 0;
    for (int i = 0; i < 2 && *taken && !launched; i++) {
        *taken = side == 1 || nd_documents_take(&calls[i]);
        if (*taken && side == 0) {
            ND_TRY(nd_documents_run(&c->stream, &calls[i], c->memory + c->used, &owners));
        }
        launched = i == 0 ? nd_cuda_attention_plain_fwd(queue, &forward, owners)
                          : nd_cuda_attention_plain_bwd(queue, &backward, owners);
        launched = launched || i == 1 ? launched : nd_cuda_attention_delta(queue, &delta, NULL);
    }
    ND_TRY(nd_cuda_op_done(&c->stream, "attention: check", (cudaError_t)launched));
    return nd_stream_sync(&c->stream);
}

static float value(const void *data, nd_dtype dtype, int64_t i)
{
    return dtype == ND_DTYPE_F32 ? ((const float *)data)[i]
                                 : nd_bf16_to_f32(((const nd_bf16 *)data)[i]);
}

/*
 * The root of the mean square of the differences is at most 2^-6 of that of the values. cuDNN
 * rounds probabilities and gradients of scores to BF16, and both sides their results, each with an
 * error whose root mean square is below 2^-9 of the value's.
 */
static nd_status compare(check *c, int which, bool *right)
{
    const nd_tensor t = c->results[0][which];
    const size_t bytes = nd_tensor_bytes(t);
    double error = 0.0, size = 0.0;
    nd_status status = ND_OK;
    char *host = NULL;
    ND_TRY(ND_ALLOC(2 * bytes, &host));
    ND_TRY_OUT(nd_copy(&c->stream, host, t.data, bytes));
    ND_TRY_OUT(nd_copy(&c->stream, host + bytes, c->results[1][which].data, bytes));
    ND_TRY_OUT(nd_stream_sync(&c->stream));
    for (int64_t i = 0; i < nd_tensor_count(t); i++) {
        const double x = value(host, t.dtype, i), y = value(host + bytes, t.dtype, i);
        const bool blind = isinf(y) && x == y; /* the LSE of a row without keys */
        error += blind ? 0.0 : (x - y) * (x - y);
        size += blind ? 0.0 : y * y;
    }
    if (!(sqrt(error) <= ldexp(sqrt(size), -6))) { /* NaN too */
        nd_log_warning("cuDNN %zu computes attention of separate documents wrongly on this GPU "
                       "(%s is off by %.2g of %.2g), so the plain kernels do; another cuDNN may be "
                       "right",
                       nd_cudnn_version(c->context->cudnn), names[which], sqrt(error), sqrt(size));
        *right = false;
    }
out:
    free(host);
    return status;
}

static nd_status run(check *c, size_t bytes, bool *right)
{
    nd_device *device = c->context->device;
    void *memory = NULL;
    nd_status status = ND_OK;
    *right = true;
    ND_TRY(device->table->stream_init(device, &c->stream));
    ND_TRY_OUT(nd_device_alloc(device, bytes, &memory));
    c->memory = memory;
    ND_TRY_OUT(make_operands(c));
    for (int side = 0; side < 2 && *right; side++) {
        ND_TRY_OUT(compute(c, side, right));
    }
    for (int i = 0; i < RESULTS && *right; i++) {
        ND_TRY_OUT(compare(c, i, right));
    }
out:
    if (memory) {
        nd_device_free(device, memory, bytes);
    }
    device->table->stream_fini(&c->stream);
    return status;
}

bool nd_documents_are_right(nd_cuda_context *context, const nd_attention *of)
{
    check c = {.context = context, .a = *of};
    const size_t planned = context->attention_scratch;
    bool right = false;
    c.a.batch = c.a.kv_heads = 1;
    c.a.sq = of->documents == ND_SEGMENTS_WHOLE ? TOKENS : TOKENS / 2;
    c.a.sk = of->documents == ND_SEGMENTS_FLAT ? TOKENS / 2 : TOKENS;
    c.a.heads = of->heads / of->kv_heads;
    c.a.window = of->window > 0 ? WINDOW : 0;
    c.a.rounds = of->documents == ND_SEGMENTS_WHOLE ? 1 : 2;
    c.bytes = (size_t)(TOKENS * (c.a.heads + 2) * (24 * c.a.head_dim + 32)) + (64 << 10);
    const size_t scratch = nd_documents_scratch_by_formula(&c.a, true) + (1 << 20);
    context->attention_scratch = scratch; /* of these calls */
    if (run(&c, c.bytes + scratch, &right) != ND_OK) {
        nd_log_warning("cuDNN's attention of separate documents could not be checked (%s), so the "
                       "plain kernels compute it",
                       nd_error_last()->message);
        nd_error_clear();
        right = false;
    }
    context->attention_scratch = planned;
    return right;
}
