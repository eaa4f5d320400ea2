// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/bench_ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/ops.h"
#include "runtime/base/clock.h"
#include "runtime/base/math.h"
#include "runtime/base/rng.h"

/* One head size: operands (1, S, H, D). */
typedef struct attention_bench {
    const nd_ops *ops;
    nd_stream stream;
    nd_attention a;
    nd_tensor q, k, v, out, dout, dq, dk, dv; /* (1, S, H, D) BF16 */
    nd_tensor lse, delta;                     /* (1, H, S) F32 */
    nd_tensor first_key;                      /* (1, S) I32, or absent */
    void *memory, *scratch_fwd, *scratch_bwd;
    size_t bytes, bytes_fwd, bytes_bwd;
} attention_bench;

/* Seconds and work of one direction. */
typedef struct direction {
    double flops, best, median;
} direction;

static void fill(nd_tensor t, uint64_t seed)
{
    nd_bf16 *x = t.data;
    for (int64_t i = 0; i < nd_tensor_count(t); i++) {
        x[i] = nd_bf16_from_f32((float)(nd_rng_u64(seed, 2, (uint64_t)i) & 255) / 256.0f - 0.5f);
    }
}

static nd_status allocate_scratch(attention_bench *b, bool backward, void **out, size_t *bytes)
{
    nd_device *device = b->stream.device;
    *bytes = b->ops->attention_scratch(device, &b->a, ND_DTYPE_BF16, backward);
    return *bytes ? nd_device_alloc(device, *bytes, out) : ND_OK;
}

/* Borders of documents whose lengths are log-normal with this mean and a spread of e. */
static nd_status draw_documents(attention_bench *b, int64_t s, int64_t mean)
{
    int32_t *first;
    int64_t begin = 0, end = 0;
    uint64_t drawn = 0;
    ND_TRY(ND_ALLOC(s, &first));
    b->first_key = nd_tensor_2d(first, ND_DTYPE_I32, 1, s);
    for (int64_t i = 0; i < s; i++) {
        if (i == end) {
            const double u = (double)(nd_rng_u64(1, 3, drawn++) >> 11) * 0x1p-53;
            const double v = (double)(nd_rng_u64(1, 3, drawn++) >> 11) * 0x1p-53;
            const double normal = sqrt(-2 * log(1 - u)) * cos(2 * M_PI * v);
            begin = i;
            end = i + nd_max(1, (int64_t)fmin((double)mean * exp(normal - 0.5), (double)s));
        }
        first[i] = (int32_t)begin;
    }
    return ND_OK;
}

static nd_status prepare(attention_bench *b, nd_device *device, const nd_bench_options *o,
                         int64_t d)
{
    const int64_t s = o->sequence, h = o->heads;
    nd_tensor *operands[] = {&b->q, &b->k, &b->v, &b->out, &b->dout, &b->dq, &b->dk, &b->dv};
    enum { OPERANDS = sizeof operands / sizeof *operands };
    const size_t one = nd_round_up_bytes((size_t)(s * h * d) * sizeof(nd_bf16), 64);
    const size_t rows = (size_t)(s * h) * sizeof(float);
    *b = (attention_bench){.bytes = OPERANDS * one + 2 * rows};
    b->a = (nd_attention){1, s, s, h, h, d, 0, 1.0f / sqrtf((float)d), o->window};
    ND_TRY(o->documents > 0 ? draw_documents(b, s, o->documents) : ND_OK);
    ND_TRY(device->table->stream_init(device, &b->stream));
    ND_TRY(nd_ops_cpu(device, &b->ops));
    if (o->stand_in) {
        ND_TRY(nd_bench_use_stand_in(device));
    }
    if (b->ops->limits.head_dim && d > b->ops->limits.head_dim) {
        return nd_fail(ND_ERR_CONFIG, "--head-dim %lld is too large; it may be at most %lld",
                       (long long)d, (long long)b->ops->limits.head_dim);
    }
    ND_TRY(nd_device_alloc(device, b->bytes, &b->memory));
    char *at = b->memory;
    for (int i = 0; i < OPERANDS; i++, at += one) {
        *operands[i] = nd_tensor_4d(at, ND_DTYPE_BF16, 1, s, h, d);
        fill(*operands[i], (uint64_t)i);
    }
    b->lse = nd_tensor_3d(at, ND_DTYPE_F32, 1, h, s);
    b->delta = nd_tensor_3d(at + rows, ND_DTYPE_F32, 1, h, s);
    ND_TRY(allocate_scratch(b, false, &b->scratch_fwd, &b->bytes_fwd));
    return allocate_scratch(b, true, &b->scratch_bwd, &b->bytes_bwd);
}

static void release(attention_bench *b, nd_device *device)
{
    free(b->first_key.data);
    if (b->memory) {
        nd_device_free(device, b->memory, b->bytes);
    }
    if (b->scratch_fwd) {
        nd_device_free(device, b->scratch_fwd, b->bytes_fwd);
    }
    if (b->scratch_bwd) {
        nd_device_free(device, b->scratch_bwd, b->bytes_bwd);
    }
}

static nd_status forward(attention_bench *b)
{
    return ND_CALL(b->ops, &b->stream, attention_fwd, .attention = b->a, .out = b->out,
                   .lse = b->lse, .q = b->q, .k = b->k, .v = b->v, .first_key = b->first_key,
                   .scratch = b->scratch_fwd);
}

static nd_status backward(attention_bench *b)
{
    if (b->first_key.data || b->ops->attention_uses_delta(b->stream.device, &b->a, ND_DTYPE_BF16)) {
        ND_TRY(ND_CALL(b->ops, &b->stream, attention_delta, .attention = b->a, .delta = b->delta,
                       .out = b->out, .dout = b->dout));
    }
    return ND_CALL(b->ops, &b->stream, attention_bwd, .attention = b->a, .dq = b->dq, .dk = b->dk,
                   .dv = b->dv, .q = b->q, .k = b->k, .v = b->v, .out = b->out, .dout = b->dout,
                   .lse = b->lse, .delta = b->delta, .first_key = b->first_key,
                   .scratch = b->scratch_bwd);
}

static nd_status measure(attention_bench *b, nd_status (*call)(attention_bench *), int repeats,
                         direction *out)
{
    double times[ND_BENCH_REPEATS_MAX];
    ND_TRY(call(b)); /* touches the memory */
    out->best = INFINITY;
    for (int i = 0; i < repeats; i++) {
        const double begin = nd_clock_seconds();
        ND_TRY(call(b));
        times[i] = nd_clock_seconds() - begin;
        out->best = times[i] < out->best ? times[i] : out->best;
    }
    out->median = nd_bench_median(times, repeats);
    return ND_OK;
}

/* A row sees the keys [this, row]. */
static int64_t first_seen(const attention_bench *b, int64_t row)
{
    const int64_t document = b->first_key.data ? ((const int32_t *)b->first_key.data)[row] : 0;
    return b->a.window > 0 ? nd_max(document, row - b->a.window + 1) : document;
}

static void print_direction(const char *name, int64_t head_dim, const direction *d)
{
    printf("%8lld  %-10s %12.2f %12.2f %12.1f\n", (long long)head_dim, name, d->best * 1e3,
           d->median * 1e3, d->flops / d->best * 1e-9);
}

static nd_status run_size(attention_bench *b, nd_device *device, const nd_bench_options *o,
                          int64_t head_dim, direction directions[2])
{
    double seen = 0;
    ND_TRY(prepare(b, device, o, head_dim));
    for (int64_t row = 0; row < o->sequence; row++) {
        seen += (double)((row - first_seen(b, row) + 1) * o->heads);
    }
    directions[0].flops = 2 * 2.0 * seen * (double)head_dim;
    directions[1].flops = 5 * 2.0 * seen * (double)head_dim;
    ND_TRY(measure(b, forward, (int)o->repeats, &directions[0]));
    ND_TRY(measure(b, backward, (int)o->repeats, &directions[1]));
    print_direction("forward", head_dim, &directions[0]);
    print_direction("backward", head_dim, &directions[1]);
    return ND_OK;
}

static void print_json(const nd_bench_options *o, nd_device *device, direction sizes[][2])
{
    static const char *const names[] = {"forward", "backward"};
    printf("{\"sequence\": %lld, \"window\": %lld, \"documents\": %lld, \"heads\": %lld, "
           "\"threads\": %d, \"isa\": \"%s\", \"attention\": [",
           (long long)o->sequence, (long long)o->window, (long long)o->documents,
           (long long)o->heads, device->threads, nd_bench_machine(device));
    for (int i = 0; i < o->head_dim_count; i++) {
        printf("%s{\"head_dim\": %lld", i ? ", " : "", (long long)o->head_dims[i]);
        for (int d = 0; d < 2; d++) {
            printf(", \"%s\": {\"flops\": %.0f, \"seconds\": %.9f, \"median_seconds\": %.9f}",
                   names[d], sizes[i][d].flops, sizes[i][d].best, sizes[i][d].median);
        }
        printf("}");
    }
    printf("]}\n");
}

nd_status nd_bench_attention(const nd_bench_options *o)
{
    direction sizes[ND_BENCH_HEAD_DIMS_MAX][2] = {{{0}}};
    attention_bench b = {0};
    nd_device *device = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_device_open_cpu(o->threads ? (int)o->threads : 2, &device));
    ND_TRY_OUT(nd_ops_cpu_start_threads(device, false));
    printf("causal attention, %lld tokens, %lld heads, %d threads\n%8s  %-10s %12s %12s %12s\n",
           (long long)o->sequence, (long long)o->heads, device->threads, "head", "", "best ms",
           "median ms", "GFLOP/s");
    for (int i = 0; i < o->head_dim_count; i++) {
        status = run_size(&b, device, o, o->head_dims[i], sizes[i]);
        release(&b, device);
        ND_TRY_OUT(status);
    }
    print_json(o, device, sizes);
out:
    nd_device_close(device);
    return status;
}
