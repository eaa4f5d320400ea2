// SPDX-License-Identifier: Apache-2.0
/*
 * A double of attention_cudnn.cc: attention in F32 over BF16 operands, for the forms that cuDNN's
 * plans take on Ampere and newer. A form that cuDNN has no plan for is refused; pointers that it
 * would misread abort with a sentence.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/attention_cudnn.h"
#include "runtime/tensor/dtype.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/doubles/machine.h"

struct nd_cudnn {
    int capability;
    nd_sdpa_form *plans;
    int64_t count, capacity;
};

nd_status nd_cudnn_create(nd_device *device, int capability, const char *description,
                          nd_cudnn **out)
{
    ND_TRY(ND_ALLOC(1, out));
    (*out)->capability = capability;
    return ND_OK;
}

bool nd_cudnn_is_built(void)
{
    return true;
}

void nd_cudnn_destroy(nd_cudnn *cudnn)
{
    if (cudnn) {
        free(cudnn->plans);
    }
    free(cudnn);
}

size_t nd_cudnn_version(const nd_cudnn *cudnn)
{
    return 91900;
}

static bool whole(const nd_sdpa_strides *s, int64_t head_dim)
{
    return s->batch % 8 == 0 && s->row % 8 == 0 && s->head % 8 == 0 && s->row >= head_dim;
}

static nd_status check_form(const nd_sdpa_form *f, int capability)
{
    const nd_sdpa_strides *all[] = {&f->q, &f->k, &f->v, &f->out, &f->dout, &f->dq, &f->dk, &f->dv};
    long refused = nd_double_machine_get()->refused_rows;
    bool ok = (refused == 0 || f->sq != refused) && f->head_dim % 8 == 0 && f->head_dim <= 128 &&
              f->heads % f->kv_heads == 0;
    ok = ok && f->sq >= 1 && f->sk >= 1 && f->batch >= 1;
    ok = ok && (f->mask != ND_SDPA_BOTTOM_RIGHT || f->tokens > 0 || f->sq <= f->sk);
    ok = ok && (f->window == 0 || (f->mask != ND_SDPA_ALL && (f->tokens > 0 || f->sq <= f->sk)));
    /* Ragged tensors; what real cuDNN has plans for besides is not needed here. */
    ok = ok &&
         (f->tokens == 0 || (capability >= 90 && f->sq <= f->tokens && f->sk <= f->key_tokens &&
                             f->head_dim % 16 == 0 && !f->deterministic));
    for (int i = 0; i < (f->backward ? 8 : 4); i++) {
        ok = ok && whole(all[i], f->head_dim);
    }
    return ok ? ND_OK
              : nd_fail(ND_ERR_INTERNAL, "cuDNN's double has no plan for this form of attention");
}

int64_t nd_cudnn_plan_count(const nd_cudnn *cudnn)
{
    return cudnn->count;
}

static nd_status find(nd_cudnn *cudnn, const nd_sdpa_form *form)
{
    for (int64_t i = 0; i < cudnn->count; i++) {
        if (memcmp(&cudnn->plans[i], form, sizeof *form) == 0) {
            return ND_OK;
        }
    }
    ND_TRY(check_form(form, cudnn->capability));
    if (cudnn->count == cudnn->capacity) {
        cudnn->capacity = 2 * cudnn->capacity + 16;
        cudnn->plans = realloc(cudnn->plans, (size_t)cudnn->capacity * sizeof *form);
    }
    cudnn->plans[cudnn->count++] = *form;
    return ND_OK;
}

nd_status nd_cudnn_workspace(nd_cudnn *cudnn, const nd_sdpa_form *f, size_t *out)
{
    ND_TRY(find(cudnn, f));
    int64_t rows = f->tokens > 0 ? 0 : f->batch * f->heads;
    int64_t bytes = 256 + (int64_t)nd_double_machine_get()->attention_extra;
    if (f->backward) {
        bytes += rows * (4 * f->sq * f->head_dim + 4 * f->sk * f->head_dim + 4 * f->sq);
        bytes += f->deterministic ? rows * f->sq * f->sk * 2 : 0;
    }
    if (f->tokens > 0) {
        bytes += f->batch * 256;
        bytes += f->backward ? f->tokens * f->heads * (4 * f->head_dim + 4) +
                                   f->key_tokens * f->heads * 8 * f->head_dim
                             : 0;
    }
    *out = (size_t)bytes;
    return ND_OK;
}

typedef struct attention_call {
    nd_sdpa_form f;
    nd_sdpa_tensors t;
} attention_call;

static int64_t at(const nd_sdpa_strides *s, int64_t b, int64_t i, int64_t h)
{
    return b * s->batch + i * s->row + h * s->head;
}

static float dot(const nd_bf16 *a, const nd_bf16 *b, int64_t n)
{
    float sum = 0.0f;
    for (int64_t d = 0; d < n; d++) {
        sum += nd_bf16_to_f32(a[d]) * nd_bf16_to_f32(b[d]);
    }
    return sum;
}

/* Returns the index of row i's statistic: in a document (rows, heads), in a batch (B, H, Sq). */
static int64_t statistic(const nd_sdpa_form *f, int64_t b, int64_t h, int64_t i)
{
    return f->tokens > 0 ? i * f->heads + h : (b * f->heads + h) * f->sq + i;
}

static int64_t visible(const nd_sdpa_form *f, int64_t i)
{
    int64_t n = f->mask == ND_SDPA_ALL        ? f->sk
                : f->mask == ND_SDPA_TOP_LEFT ? i + 1
                                              : i + 1 + f->sk - f->sq;
    return n < f->sk ? n : f->sk;
}

static int64_t first_visible(const nd_sdpa_form *f, int64_t i)
{
    const int64_t end = f->mask == ND_SDPA_TOP_LEFT ? i + 1 : i + 1 + f->sk - f->sq;
    return f->mask != ND_SDPA_ALL && f->window > 0 && end > f->window ? end - f->window : 0;
}

static void forward_row(const attention_call *c, int64_t b, int64_t h, int64_t i)
{
    const nd_sdpa_form *f = &c->f;
    int64_t n = visible(f, i), D = f->head_dim, kv = h / (f->heads / f->kv_heads);
    const int64_t first = first_visible(f, i);
    const nd_bf16 *q = (const nd_bf16 *)c->t.q + at(&f->q, b, i, h);
    float *p = malloc((size_t)n * sizeof *p), most = -INFINITY, total = 0.0f, sums[128] = {0};
    for (int64_t j = first; j < n; j++) {
        p[j] = f->scale * dot(q, (const nd_bf16 *)c->t.k + at(&f->k, b, j, kv), D);
        most = fmaxf(most, p[j]);
    }
    for (int64_t j = first; j < n; j++) {
        const nd_bf16 *v = (const nd_bf16 *)c->t.v + at(&f->v, b, j, kv);
        p[j] = expf(p[j] - most);
        total += p[j];
        for (int64_t d = 0; d < D; d++) {
            sums[d] += p[j] * nd_bf16_to_f32(v[d]);
        }
    }
    nd_bf16 *out = (nd_bf16 *)c->t.out + at(&f->out, b, i, h);
    for (int64_t d = 0; d < D; d++) {
        out[d] = nd_bf16_from_f32(sums[d] / total);
    }
    c->t.stats[statistic(f, b, h, i)] = most + logf(total);
    free(p);
}

static void run_batch_forward(void *closure)
{
    const attention_call *c = closure;
    for (int64_t b = 0; b < c->f.batch; b++) {
        for (int64_t h = 0; h < c->f.heads; h++) {
            for (int64_t i = 0; i < c->f.sq; i++) {
                forward_row(c, b, h, i);
            }
        }
    }
}

/* One query row: its dq, and what it adds to dk and dv of its KV head (F32, (sk, D) each). */
static void backward_row(const attention_call *c, int64_t b, int64_t h, int64_t i, float *dk,
                         float *dv)
{
    const nd_sdpa_form *f = &c->f;
    int64_t n = visible(f, i), D = f->head_dim, kv = h / (f->heads / f->kv_heads);
    const nd_bf16 *q = (const nd_bf16 *)c->t.q + at(&f->q, b, i, h);
    const nd_bf16 *dout = (const nd_bf16 *)c->t.dout + at(&f->dout, b, i, h);
    float delta = dot((const nd_bf16 *)c->t.out + at(&f->out, b, i, h), dout, D);
    float lse = c->t.stats[statistic(f, b, h, i)], dq[128] = {0};
    for (int64_t j = first_visible(f, i); j < n; j++) {
        const nd_bf16 *k = (const nd_bf16 *)c->t.k + at(&f->k, b, j, kv);
        const nd_bf16 *v = (const nd_bf16 *)c->t.v + at(&f->v, b, j, kv);
        float p = expf(f->scale * dot(q, k, D) - lse);
        float ds = p * (dot(dout, v, D) - delta) * f->scale;
        for (int64_t d = 0; d < D; d++) {
            dq[d] += ds * nd_bf16_to_f32(k[d]);
            dk[j * D + d] += ds * nd_bf16_to_f32(q[d]);
            dv[j * D + d] += p * nd_bf16_to_f32(dout[d]);
        }
    }
    nd_bf16 *to = (nd_bf16 *)c->t.dq + at(&f->dq, b, i, h);
    for (int64_t d = 0; d < D; d++) {
        to[d] = nd_bf16_from_f32(dq[d]);
    }
}

static void run_batch_backward(void *closure)
{
    const attention_call *c = closure;
    const nd_sdpa_form *f = &c->f;
    int64_t group = f->heads / f->kv_heads, D = f->head_dim;
    float *dk = malloc((size_t)(2 * f->sk * D) * sizeof *dk), *dv = dk + f->sk * D;
    for (int64_t b = 0; b < f->batch; b++) {
        for (int64_t kv = 0; kv < f->kv_heads; kv++) {
            memset(dk, 0, (size_t)(2 * f->sk * D) * sizeof *dk);
            for (int64_t r = 0; r < group * f->sq; r++) {
                backward_row(c, b, kv * group + r / f->sq, r % f->sq, dk, dv);
            }
            for (int64_t j = 0; j < f->sk; j++) {
                for (int64_t d = 0; d < D; d++) {
                    ((nd_bf16 *)c->t.dk)[at(&f->dk, b, j, kv) + d] =
                        nd_bf16_from_f32(dk[j * D + d]);
                    ((nd_bf16 *)c->t.dv)[at(&f->dv, b, j, kv) + d] =
                        nd_bf16_from_f32(dv[j * D + d]);
                }
            }
        }
    }
    free(dk);
}

/* Segments of documents, which lie where the call's numbers say when it runs. */

static bool is_of_keys(int kind)
{
    return kind == ND_RAGGED_KV || kind == ND_RAGGED_DKV;
}

/* The strides of a kind's tensors, and how many elements a token has: rows and heads. */
static nd_sdpa_strides ragged_strides(const nd_sdpa_form *f, int kind)
{
    const nd_sdpa_strides all[ND_RAGGED_KINDS] = {f->q,    f->k,  f->out, {0, f->heads, 1},
                                                  f->dout, f->dq, f->dk};
    return all[kind];
}

static void check_slot(const attention_call *c, int64_t n, int kind)
{
    const nd_sdpa_form *f = &c->f;
    const int64_t *starts = c->t.starts[kind], row = ragged_strides(f, kind).row;
    const int64_t length = is_of_keys(kind) ? c->t.keys[n] : c->t.rows[n];
    const int64_t end = starts[n] + length * row, most = is_of_keys(kind) ? f->sk : f->sq;
    const int64_t tokens = is_of_keys(kind) ? f->key_tokens : f->tokens;
    if (length < 0 || length > most || (c->t.rows[n] > 0) != (c->t.keys[n] > 0)) {
        nd_double_violation("cuDNN attention: segment %lld has %lld rows or keys, and the form "
                            "%lld, or only one of both",
                            (long long)n, (long long)length, (long long)most);
    }
    if (f->backward && c->t.rows[n] == 1) {
        nd_double_violation("cuDNN attention: NaN in dk and dv of a single row");
    }
    if (f->mask == ND_SDPA_BOTTOM_RIGHT && c->t.rows[n] > c->t.keys[n]) {
        nd_double_violation("cuDNN attention: segment %lld has rows without keys", (long long)n);
    }
    if (starts[n] < 0 || starts[n] % row != 0 || end > starts[n + 1]) {
        nd_double_violation("cuDNN attention: segment %lld of tensor %d lies at %lld to %lld, "
                            "before %lld",
                            (long long)n, kind, (long long)starts[n], (long long)end,
                            (long long)starts[n + 1]);
    }
    if (n + 1 == f->batch && starts[n + 1] != tokens * row) {
        nd_double_violation("cuDNN attention: tensor %d ends at %lld, not at %lld", kind,
                            (long long)starts[n + 1], (long long)(tokens * row));
    }
}

/* Fills a result with NaN, since cuDNN may write anything between segments. */
static void spoil(void *to, const nd_sdpa_strides *s, int64_t tokens, int64_t heads, int64_t D)
{
    for (int64_t i = 0; i < tokens * heads; i++) {
        nd_bf16 *row = (nd_bf16 *)to + at(s, 0, i / heads, i % heads);
        for (int64_t d = 0; d < D; d++) {
            row[d] = nd_bf16_from_f32(NAN);
        }
    }
}

static void spoil_results(const attention_call *c)
{
    const nd_sdpa_form *f = &c->f;
    if (f->backward) {
        spoil(c->t.dq, &f->dq, f->tokens, f->heads, f->head_dim);
        spoil(c->t.dk, &f->dk, f->key_tokens, f->kv_heads, f->head_dim);
        spoil(c->t.dv, &f->dv, f->key_tokens, f->kv_heads, f->head_dim);
        return;
    }
    spoil(c->t.out, &f->out, f->tokens, f->heads, f->head_dim);
    for (int64_t i = 0; i < f->tokens * f->heads; i++) {
        c->t.stats[i] = NAN;
    }
}

/* Segment n as a batch of one. */
static attention_call segment(const attention_call *c, int64_t n)
{
    attention_call one = *c;
    const int64_t *const *starts = c->t.starts;
    one.f.batch = 1;
    one.f.sq = c->t.rows[n];
    one.f.sk = c->t.keys[n];
    one.t.q = (const nd_bf16 *)c->t.q + starts[ND_RAGGED_Q][n];
    one.t.k = (const nd_bf16 *)c->t.k + starts[ND_RAGGED_KV][n];
    one.t.v = (const nd_bf16 *)c->t.v + starts[ND_RAGGED_KV][n];
    one.t.out = (nd_bf16 *)c->t.out + starts[ND_RAGGED_OUT][n];
    one.t.stats = c->t.stats + starts[ND_RAGGED_STATS][n];
    if (c->f.backward) {
        one.t.dout = (const nd_bf16 *)c->t.dout + starts[ND_RAGGED_DOUT][n];
        one.t.dq = (nd_bf16 *)c->t.dq + starts[ND_RAGGED_DQ][n];
        one.t.dk = (nd_bf16 *)c->t.dk + starts[ND_RAGGED_DKV][n];
        one.t.dv = (nd_bf16 *)c->t.dv + starts[ND_RAGGED_DKV][n];
    }
    return one;
}

static void run_documents(attention_call *c)
{
    const int kinds = c->f.backward ? ND_RAGGED_KINDS : ND_RAGGED_DOUT;
    for (int64_t n = 0; n < c->f.batch; n++) {
        for (int kind = 0; kind < kinds; kind++) {
            check_slot(c, n, kind);
        }
    }
    spoil_results(c);
    if (getenv("ND_DOUBLE_WRONG_DOCUMENTS")) {
        return;
    }
    for (int64_t n = 0; n < c->f.batch; n++) {
        attention_call one = segment(c, n);
        if (one.f.sq > 0) {
            (c->f.backward ? run_batch_backward : run_batch_forward)(&one);
        }
    }
}

static void run_attention(void *closure)
{
    attention_call *c = closure;
    if (c->f.tokens > 0) {
        run_documents(c);
    } else {
        (c->f.backward ? run_batch_backward : run_batch_forward)(c);
    }
}

/* Checks what cuDNN only assumes of every pointer: memory of the device, and alignment. */
static void need_bytes(const char *what, const void *p, size_t bytes)
{
    nd_double_need_device(what, p, bytes);
    if ((uintptr_t)p % 16 != 0) {
        nd_double_violation("cuDNN attention: %s is not aligned to 16 bytes", what);
    }
}

static void need(const char *what, const void *p, const nd_sdpa_form *f, const nd_sdpa_strides *s,
                 bool keys, int64_t heads)
{
    int64_t last = f->tokens > 0 ? at(s, 0, (keys ? f->key_tokens : f->tokens) - 1, heads - 1)
                                 : at(s, f->batch - 1, (keys ? f->sk : f->sq) - 1, heads - 1);
    last += f->head_dim;
    need_bytes(what, p, (size_t)last * sizeof(nd_bf16));
}

nd_status nd_cudnn_run(nd_cudnn *cudnn, nd_stream *stream, const nd_sdpa_form *f,
                       const nd_sdpa_tensors *t)
{
    size_t workspace = 0;
    attention_call call = {*f, *t};
    ND_TRY(nd_cudnn_workspace(cudnn, f, &workspace));
    need("q", t->q, f, &f->q, false, f->heads);
    need("k", t->k, f, &f->k, true, f->kv_heads);
    need("v", t->v, f, &f->v, true, f->kv_heads);
    need("out", t->out, f, &f->out, false, f->heads);
    need_bytes("stats", t->stats,
               (size_t)(f->heads * (f->tokens > 0 ? f->tokens : f->batch * f->sq)) * 4);
    if (f->tokens > 0) {
        nd_double_need_device("rows", t->rows, (size_t)f->batch * sizeof *t->rows);
        nd_double_need_device("keys", t->keys, (size_t)f->batch * sizeof *t->keys);
    }
    for (int i = 0; f->tokens > 0 && i < (f->backward ? ND_RAGGED_KINDS : ND_RAGGED_DOUT); i++) {
        nd_double_need_device("starts", t->starts[i], (size_t)(f->batch + 1) * sizeof(int64_t));
    }
    need_bytes("workspace", t->workspace, workspace);
    if (f->backward && !f->deterministic && getenv("ND_DOUBLE_ORDERED")) {
        return nd_fail(ND_ERR_INTERNAL, "a backward of attention that is not deterministic");
    }
    if (f->backward && f->sq == 1 && cudnn->capability / 10 == 9) {
        nd_double_violation("cuDNN attention: NaN in dk and dv of a single row");
    }
    /* Segments have a padding mask, which cudnn-frontend itself takes against this. */
    if (f->backward && f->tokens == 0 && f->mask == ND_SDPA_ALL && f->sk % 128 == 64 &&
        cudnn->capability / 10 == 9) {
        nd_double_violation("cuDNN attention: NaN in dq, %lld unmasked keys end inside of a tile",
                            (long long)f->sk);
    }
    if (f->backward) {
        need("dout", t->dout, f, &f->dout, false, f->heads);
        need("dq", t->dq, f, &f->dq, false, f->heads);
        need("dk", t->dk, f, &f->dk, true, f->kv_heads);
        need("dv", t->dv, f, &f->dv, true, f->kv_heads);
        nd_double_counts *counts = &machine_current()->counts;
        *(f->deterministic ? &counts->ordered_backwards : &counts->usual_backwards) += 1;
    }
    cudaError_t error = nd_double_load((cudaStream_t)stream->native, f, sizeof *f);
    if (error != cudaSuccess) {
        return nd_fail(ND_ERR_INTERNAL, "cuDNN: a plan is loaded while a graph is recorded");
    }
    error = nd_double_launch((cudaStream_t)stream->native, run_attention, &call, sizeof call);
    return error == cudaSuccess ? ND_OK
                                : nd_fail(ND_ERR_INTERNAL, "the device has failed (%d)", error);
}
