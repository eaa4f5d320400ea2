// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sdpa.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/cuda/documents.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/sdpa_parts.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/device/cuda_check.h"

static bool has_form(const nd_cuda_context *context, const nd_attention *a, nd_dtype act,
                     bool backward)
{
    const int64_t ordered = backward && context->deterministic ? context->ordered_bytes : 0;
    return nd_cuda_sdpa_is_cudnn(a, act) && nd_sdpa_fits(a, ordered);
}

static bool cudnn_takes(const nd_sdpa_call *c)
{
    return has_form(c->context, &c->x.attention, c->x.q.dtype, c->backward) &&
           !c->x.first_key.data && nd_sdpa_is_aligned(c->x.q) && nd_sdpa_is_aligned(c->x.k) &&
           nd_sdpa_is_aligned(c->x.v) && nd_sdpa_is_aligned(c->x.out) &&
           (!c->backward || nd_sdpa_is_aligned(c->x.dout));
}

static void note_scratch(nd_cuda_context *context, size_t bytes)
{
    if (bytes > context->attention_scratch) {
        context->attention_scratch = bytes;
    }
}

/* The plain kernels compute a call, or those of its rows that have no owner in `owners`. */
static nd_status run_plain(nd_stream *stream, const nd_sdpa_call *c, const int32_t *owners)
{
    const nd_attention_bwd_args *x = &c->x;
    const nd_attention_fwd_args forward = {.attention = x->attention,
                                           .out = x->out,
                                           .lse = x->lse,
                                           .q = x->q,
                                           .k = x->k,
                                           .v = x->v,
                                           .first_key = x->first_key,
                                           .end_key = x->end_key};
    nd_cuda_queue queue = nd_cuda_stream(stream);
    int launched = c->backward ? nd_cuda_attention_plain_bwd(queue, x, owners)
                               : nd_cuda_attention_plain_fwd(queue, &forward, owners);
    return nd_cuda_op_done(stream, c->backward ? "attention_plain_bwd" : "attention_plain_fwd",
                           (cudaError_t)launched);
}

/* Assigns the scratch. */
static nd_status place(nd_sdpa_call *c)
{
    const nd_sdpa_layout *l = &c->layout;
    ND_TRY(nd_sdpa_check_scratch(c, l->end));
    c->scratch = c->x.scratch;
    if (c->through_q) {
        c->to_q.data = c->scratch + l->dq;
    }
    if (c->through_kv) {
        c->to_k.data = c->scratch + l->dk;
        c->to_v.data = c->scratch + l->dv;
    }
    c->sum_q.data = c->scratch + l->sum_q;
    c->sum_k.data = c->scratch + l->sum_k;
    c->sum_v.data = c->scratch + l->sum_v;
    return ND_OK;
}

/* Before cuDNN 9.26 the backward reads packed statistics only, and before 9.12 the forward writes
 * packed statistics only, even when the form has other strides. */
static bool are_stats_packed(const nd_sdpa_call *c, const nd_sdpa_piece *p)
{
    return p->rows == c->x.attention.sq && p->kvs == c->x.attention.kv_heads &&
           (uintptr_t)c->x.lse.data % 16 == 0;
}

/* The statistics of a piece as cuDNN has them: packed (B, H, Sq) at a multiple of 16 bytes. Those
 * of a whole block are lse itself; others lie in the scratch, into which move_stats copies lse
 * (backward), or out of which it copies into lse (forward). */
static float *stats_of(const nd_sdpa_call *c, const nd_sdpa_piece *p)
{
    return are_stats_packed(c, p) ? c->x.lse.data : (float *)(c->scratch + c->layout.stats);
}

static nd_status move_stats(nd_stream *stream, const nd_sdpa_call *c, const nd_sdpa_piece *p)
{
    int64_t group = c->x.attention.heads / c->x.attention.kv_heads;
    int64_t heads = p->kvs * group, head = p->kv * group;
    bool at_once = heads == c->x.attention.heads; /* lse is contiguous */
    int64_t parts = at_once ? 1 : c->x.attention.batch,
            rows = at_once ? c->x.attention.batch * heads : heads;
    if (are_stats_packed(c, p)) {
        return ND_OK;
    }
    for (int64_t b = 0; b < parts; b++) {
        int64_t first = (b * c->x.attention.heads + head) * c->x.attention.sq + p->row;
        nd_tensor packed =
            nd_tensor_2d(stats_of(c, p) + b * heads * p->rows, ND_DTYPE_F32, rows, p->rows);
        nd_tensor part = nd_tensor_2d((float *)c->x.lse.data + first, ND_DTYPE_F32, rows, p->rows);
        part.stride[0] = c->x.attention.sq;
        nd_cast_args copy = {.out = c->backward ? packed : part, .x = c->backward ? part : packed};
        int launched = nd_cuda_cast(nd_cuda_stream(stream), &copy, NULL);
        ND_TRY(nd_cuda_op_done(stream, "attention: statistics", (cudaError_t)launched));
    }
    return ND_OK;
}

/* dst (+)= src: (B, S, heads, D) views; matrix by matrix. */
static nd_status store(nd_stream *stream, nd_tensor dst, nd_tensor src, bool add)
{
    int64_t heads = dst.shape[2], D = dst.shape[3];
    bool whole_rows = dst.stride[2] == D && src.stride[2] == D;
    int64_t columns = whole_rows ? heads * D : D, views = whole_rows ? 1 : heads;
    for (int64_t b = 0; b < dst.shape[0]; b++) {
        for (int64_t h = 0; h < views; h++) {
            nd_tensor to =
                nd_tensor_2d(nd_sdpa_at(dst, 0, h).data, dst.dtype, dst.shape[1], columns);
            nd_tensor from =
                nd_tensor_2d(nd_sdpa_at(src, 0, h).data, src.dtype, dst.shape[1], columns);
            to.data = (char *)to.data + b * dst.stride[0] * (int64_t)nd_dtype_size(dst.dtype);
            from.data = (char *)from.data + b * src.stride[0] * (int64_t)nd_dtype_size(src.dtype);
            to.stride[0] = dst.stride[1];
            from.stride[0] = src.stride[1];
            nd_cuda_queue queue = nd_cuda_stream(stream);
            int launched =
                add ? nd_cuda_accumulate(queue, &(nd_accumulate_args){.acc = to, .x = from}, NULL)
                    : nd_cuda_cast(queue, &(nd_cast_args){.out = to, .x = from}, NULL);
            ND_TRY(nd_cuda_op_done(stream, "attention_bwd: store", (cudaError_t)launched));
        }
    }
    return ND_OK;
}

static nd_status forward_piece(nd_stream *stream, const nd_sdpa_call *c, const nd_sdpa_piece *p)
{
    nd_sdpa_form form = nd_sdpa_form_of(c, p);
    nd_sdpa_tensors t = {
        .q = nd_sdpa_at(c->x.q, p->row, 0).data,
        .k = c->x.k.data,
        .v = c->x.v.data,
        .out = nd_sdpa_at(c->x.out, p->row, 0).data,
        .stats = stats_of(c, p),
        .workspace = c->scratch,
    };
    ND_TRY(nd_cudnn_run(c->context->cudnn, stream, &form, &t));
    ND_TRY(nd_cuda_op_done(stream, "attention_fwd", cudaSuccess));
    return move_stats(stream, c, p);
}

static nd_status forward_pieces(nd_stream *stream, const nd_sdpa_call *c)
{
    nd_sdpa_walk walk = {0};
    nd_sdpa_piece p;
    while (nd_sdpa_next(&c->cut, &walk, &p)) {
        ND_TRY(forward_piece(stream, c, &p));
    }
    return ND_OK;
}

/* Adds up the gradient of some rows over their keys: the first piece of these rows begins the sum,
 * and the last one stores it. */
static nd_status store_queries(nd_stream *stream, const nd_sdpa_call *c, const nd_sdpa_piece *p,
                               nd_tensor part, nd_tensor result)
{
    nd_tensor sum = nd_sdpa_part(c->sum_q, 0, p->rows, 0, part.shape[2]);
    if (c->x.add_q || (p->first && p->last)) {
        return store(stream, result, part, c->x.add_q);
    }
    ND_TRY(store(stream, sum, part, !p->first));
    return p->last ? store(stream, result, sum, false) : ND_OK;
}

static nd_status store_keys(nd_stream *stream, const nd_sdpa_call *c, const nd_sdpa_piece *p,
                            nd_tensor dk, nd_tensor dv)
{
    bool sums = c->cut.adds_keys && !c->x.add_kv;
    nd_tensor k = sums ? c->sum_k : c->x.dk, v = sums ? c->sum_v : c->x.dv;
    bool add = sums || c->x.add_kv;
    ND_TRY(store(stream, nd_sdpa_part(k, p->key, p->keys, p->kv, p->kvs), dk, add));
    return store(stream, nd_sdpa_part(v, p->key, p->keys, p->kv, p->kvs), dv, add);
}

static nd_status backward_piece(nd_stream *stream, const nd_sdpa_call *c, const nd_sdpa_piece *p)
{
    int64_t group = c->x.attention.heads / c->x.attention.kv_heads, h = p->kv * group,
            heads = p->kvs * group;
    nd_tensor result = nd_sdpa_part(c->x.dq, p->row, p->rows, h, heads);
    nd_tensor dq = c->through_q ? nd_sdpa_part(c->to_q, 0, p->rows, 0, heads) : result;
    nd_tensor dk = c->through_kv ? nd_sdpa_part(c->to_k, 0, p->keys, 0, p->kvs)
                                 : nd_sdpa_part(c->x.dk, p->key, p->keys, p->kv, p->kvs);
    nd_tensor dv = c->through_kv ? nd_sdpa_part(c->to_v, 0, p->keys, 0, p->kvs)
                                 : nd_sdpa_part(c->x.dv, p->key, p->keys, p->kv, p->kvs);
    nd_sdpa_form form = nd_sdpa_form_of(c, p);
    nd_sdpa_tensors t = {
        .q = nd_sdpa_at(c->x.q, p->row, h).data,
        .k = nd_sdpa_at(c->x.k, p->key, p->kv).data,
        .v = nd_sdpa_at(c->x.v, p->key, p->kv).data,
        .out = nd_sdpa_at(c->x.out, p->row, h).data,
        .stats = stats_of(c, p),
        .dout = nd_sdpa_at(c->x.dout, p->row, h).data,
        .dq = dq.data,
        .dk = dk.data,
        .dv = dv.data,
        .workspace = c->scratch,
    };
    if (p->first) {
        ND_TRY(move_stats(stream, c, p));
    }
    ND_TRY(nd_cudnn_run(c->context->cudnn, stream, &form, &t));
    ND_TRY(nd_cuda_op_done(stream, "attention_bwd", cudaSuccess));
    if (c->through_q) {
        ND_TRY(store_queries(stream, c, p, dq, result));
    }
    return c->through_kv ? store_keys(stream, c, p, dk, dv) : ND_OK;
}

static nd_status backward_pieces(nd_stream *stream, const nd_sdpa_call *c)
{
    bool sums = c->cut.adds_keys && !c->x.add_kv;
    nd_sdpa_walk walk = {0};
    nd_sdpa_piece p;
    if (sums) {
        /* The table directly, since nd_zero would be an op of its own to a CUDA graph. */
        size_t bytes = c->layout.end - c->layout.sum_k;
        ND_TRY(stream->device->table->zero(stream, c->sum_k.data, bytes));
    }
    while (nd_sdpa_next(&c->cut, &walk, &p)) {
        ND_TRY(backward_piece(stream, c, &p));
    }
    if (sums) {
        ND_TRY(store(stream, c->x.dk, c->sum_k, false));
        ND_TRY(store(stream, c->x.dv, c->sum_v, false));
    }
    return ND_OK;
}

/*
 * Finds out before the first step whether this GPU's cuDNN computes separate documents as the plain
 * kernels do. It computes a few short ones, of two tiers and none. Where they are not whole, every
 * second tile of TILE tokens is this rank's, and the others are those whose keys visit. Versions of
 * cuDNN have made NaN or zeros of ragged tensors (NVIDIA/TransformerEngine issue 2186,
 * NVIDIA/cudnn-frontend issues 462 and 1083).
 */

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

static nd_tensor take_tensor(check *c, nd_tensor t)
{
    t.data = c->memory + c->used;
    c->used += nd_round_up_bytes(nd_tensor_bytes(t), 256);
    ND_ASSERT(c->used <= c->bytes);
    return t;
}

static nd_tensor of_heads(check *c, nd_dtype dtype, int64_t rows, int64_t heads)
{
    return take_tensor(c, nd_tensor_4d(NULL, dtype, 1, rows, heads, c->a.head_dim));
}

/* Returns how many keys are before a token. */
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
    c->delta = take_tensor(c, lse);
    for (int side = 0; side < 2; side++) {
        nd_tensor *r = c->results[side];
        r[0] = of_heads(c, ND_DTYPE_BF16, a->sq, a->heads);
        r[1] = take_tensor(c, lse);
        r[2] = of_heads(c, ND_DTYPE_BF16, a->sq, a->heads);
        for (int i = 3; i < RESULTS; i++) {
            r[i] = of_heads(c, ND_DTYPE_F32, a->sk, 1);
            ND_TRY(nd_zero(&c->stream, r[i].data, nd_tensor_bytes(r[i])));
        }
    }
    c->first_key = take_tensor(c, bounds);
    c->end_key = take_tensor(c, bounds);
    ND_TRY(nd_copy(&c->stream, c->first_key.data, starts, nd_tensor_bytes(bounds)));
    ND_TRY(nd_copy(&c->stream, c->end_key.data, ends, nd_tensor_bytes(bounds)));
    nd_cuda_queue queue = nd_cuda_stream(&c->stream);
    int launched = nd_cuda_random_normal(queue, &normal, NULL);
    launched = launched ? launched : nd_cuda_cast(queue, &cast, NULL);
    ND_TRY(nd_cuda_op_done(&c->stream, "attention: check", (cudaError_t)launched));
    return nd_stream_sync(&c->stream); /* the bounds are on the stack of this function */
}

/* Computes by cuDNN (side 0) or the plain kernels alone. *taken becomes false where cuDNN has no
 * plan. */
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
    for (int i = 0; i < 2 && *taken; i++) {
        const int32_t *owners = NULL;
        *taken = side == 1 || nd_documents_take(&calls[i]);
        if (*taken && side == 0) {
            ND_TRY(nd_documents_run(&c->stream, &calls[i], c->memory + c->used, &owners));
        }
        ND_TRY(run_plain(&c->stream, &calls[i], owners));
        if (i == 0) {
            int launched = nd_cuda_attention_delta(nd_cuda_stream(&c->stream), &delta, NULL);
            ND_TRY(nd_cuda_op_done(&c->stream, "attention: check", (cudaError_t)launched));
        }
    }
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

static nd_status run_check(check *c, size_t bytes, bool *right)
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

static bool documents_are_right(nd_cuda_context *context, const nd_attention *of)
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
    const size_t scratch =
        nd_cuda_sdpa_scratch_by_formula(&c.a, ND_DTYPE_BF16, true, 0) + (1 << 20);
    context->attention_scratch = scratch; /* of these calls */
    if (run_check(&c, c.bytes + scratch, &right) != ND_OK) {
        nd_log_warning("cuDNN's attention of separate documents could not be checked (%s), so the "
                       "plain kernels compute it",
                       nd_error_last()->message);
        nd_error_clear();
        right = false;
    }
    context->attention_scratch = planned;
    return right;
}

/* Plans a call that cuDNN takes. The plain kernels need nothing for the others. cuDNN takes calls
 * of separate documents only after it was found to compute such calls rightly. */
static nd_status prepare_call(nd_sdpa_call *c)
{
    nd_cuda_context *context = c->context;
    const nd_attention *a = &c->x.attention;
    const int bit = 1 << (2 * (int)a->documents + (a->window > 0));
    bool documents = nd_documents_take(c);
    if (documents && !(context->documents_checked & bit)) {
        context->documents_checked |= bit;
        context->no_documents |= !documents_are_right(context, a);
    }
    if (documents && !context->no_documents) {
        note_scratch(context, c->documents.end);
    } else if (cudnn_takes(c)) {
        ND_TRY(nd_sdpa_plan(c));
        note_scratch(context, c->layout.end);
    } else {
        context->facts.plain_documents |= c->x.first_key.data != NULL;
        nd_sdpa_call open = *c;
        open.x.attention.window = 0;
        context->facts.plain_windows |= a->window > 0 && cudnn_takes(&open);
        return ND_OK;
    }
    context->attention_prepared = true;
    return ND_OK;
}

/* Computes the rows that see no key, which cuDNN does not take. */
static nd_status run_blind(nd_stream *stream, const nd_sdpa_call *c)
{
    nd_sdpa_call blind = *c;
    blind.x.attention.sq = c->cut.blind;
    blind.x.dk = blind.x.delta = (nd_tensor){0};
    blind.x.lse.shape[2] = c->cut.blind;
    blind.x.add_kv = false;
    return c->cut.blind > 0 ? run_plain(stream, &blind, NULL) : ND_OK;
}

static nd_status run_or_prepare(nd_stream *stream, nd_sdpa_call *c, bool prepare)
{
    const int32_t *owners = NULL;
    if (prepare) {
        return prepare_call(c);
    }
    const bool documents = nd_documents_take(c);
    if (documents || !cudnn_takes(c)) {
        ND_TRY(documents ? nd_documents_run(stream, c, c->x.scratch, &owners) : ND_OK);
        return run_plain(stream, c, owners);
    }
    ND_TRY(nd_sdpa_plan(c));
    ND_TRY(place(c));
    ND_TRY(run_blind(stream, c));
    return c->backward ? backward_pieces(stream, c) : forward_pieces(stream, c);
}

nd_status nd_cuda_sdpa_fwd(nd_stream *stream, const nd_attention_fwd_args *args, bool prepare)
{
    nd_sdpa_call c = nd_sdpa_forward_call(nd_cuda_context_of(stream->device), args);
    return run_or_prepare(stream, &c, prepare);
}

nd_status nd_cuda_sdpa_bwd(nd_stream *stream, const nd_attention_bwd_args *args, bool prepare)
{
    nd_sdpa_call c = {.context = nd_cuda_context_of(stream->device), .backward = true, .x = *args};
    if (!c.x.delta.data && !cudnn_takes(&c)) {
        return nd_fail(ND_ERR_INTERNAL,
                       "attention's backward without delta needs tensors at multiples of 16 "
                       "bytes, with strides of multiples of 8 elements, and no first_key");
    }
    return run_or_prepare(stream, &c, prepare);
}

/* Scratch of a block of contiguous tensors, by its plans; 0 when they cannot be made: the call
 * itself then fails with the message of the plan. */
static size_t scratch_by_plans(nd_cuda_context *context, const nd_attention *a, bool backward)
{
    nd_tensor q = nd_tensor_4d(NULL, ND_DTYPE_BF16, a->batch, a->sq, a->heads, a->head_dim);
    nd_tensor k = nd_tensor_4d(NULL, ND_DTYPE_BF16, a->batch, a->sk, a->kv_heads, a->head_dim);
    nd_tensor lse = nd_tensor_3d(NULL, ND_DTYPE_F32, a->batch, a->heads, a->sq);
    nd_sdpa_call c = {.context = context,
                      .backward = backward,
                      .x = {.attention = *a, .q = q, .k = k, .v = k, .out = q, .lse = lse}};
    if (backward) {
        c.x.dout = c.x.dq = q;
        c.x.dk = c.x.dv = k;
    }
    if (nd_sdpa_plan(&c) != ND_OK) {
        nd_error_clear();
        return 0;
    }
    return c.layout.end;
}

size_t nd_cuda_sdpa_scratch(const nd_device *device, const nd_attention *a, nd_dtype act,
                            bool backward)
{
    nd_cuda_context *context = nd_cuda_context_of(device);
    if (device->kind != ND_DEVICE_CUDA) { /* a dry run, which has no memory */
        return nd_cuda_sdpa_scratch_by_formula(a, act, backward, 0);
    }
    int64_t ordered = context->deterministic ? context->ordered_bytes : 0;
    size_t bytes = nd_cuda_sdpa_scratch_by_formula(a, act, backward, ordered);
    const bool form = has_form(context, a, act, backward);
    if (form || (nd_cuda_sdpa_is_cudnn(a, act) && nd_documents_fit(a, context->deterministic))) {
        size_t asked = context->attention_prepared ? context->attention_scratch
                       : form                      ? scratch_by_plans(context, a, backward)
                                                   : 0;
        bytes = asked > bytes ? asked : bytes;
        note_scratch(context, bytes);
    }
    return bytes;
}
