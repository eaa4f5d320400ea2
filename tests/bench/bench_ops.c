// SPDX-License-Identifier: Apache-2.0
/*
 * nd_bench_ops: how fast the CPU backend's products are on this machine.
 *   nd_bench_ops             GFLOP/s of each product of a training step, forward, input gradient,
 *                            weight gradient
 *   nd_bench_ops --ceiling   only the products of one step, the head as plain products; the last
 *                            line is JSON with tokens_per_second: what a step could reach if
 *                            everything else were free
 * Options: --threads N (2), --repeats N (5); the shapes are those of configs/bench/llama-56m.json
 * at 1,024 tokens.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/ops.h"
#include "runtime/base/clock.h"
#include "runtime/base/rng.h"

enum {
    TOKENS = 1024,
    HIDDEN = 512,
    FFN = 1408,
    LAYERS = 8,
    QKV = 1024,
    VOCAB = 32000,
    REPEATS_MAX = 101
};

/* One weight matrix (out, in) and how often a step uses it. */
typedef struct product {
    const char *name;
    int64_t out, in;
    int uses;
} product;

static const product products[] = {
    {"q k v", QKV, HIDDEN, LAYERS},       {"o", HIDDEN, HIDDEN, LAYERS},
    {"gate up", 2 * FFN, HIDDEN, LAYERS}, {"down", HIDDEN, FFN, LAYERS},
    {"head", VOCAB, HIDDEN, 1},
};

typedef struct bench {
    const nd_ops *ops;
    nd_stream stream;
    int repeats;
    nd_bf16 *x, *y, *w; /* (TOKENS, in), (TOKENS, out), (out, in) */
    float *dw;          /* (out, in) */
} bench;

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static nd_status fill(nd_bf16 **out, int64_t count)
{
    ND_TRY(ND_ALLOC(count, out));
    for (int64_t i = 0; i < count; i++) {
        (*out)[i] = nd_bf16_from_f32(
            (float)(nd_rng_u64(1, 2, (uint64_t)(i & 0xffff)) & 255) / 256.0f - 0.5f);
    }
    return ND_OK;
}

/* kind 0: y = x w^T; 1: dx = dy w; 2: dw += dy^T x. */
static nd_status run_once(const bench *b, const product *p, int kind)
{
    nd_stream *s = (nd_stream *)&b->stream;
    nd_tensor x = nd_tensor_2d(b->x, ND_DTYPE_BF16, TOKENS, p->in),
              y = nd_tensor_2d(b->y, ND_DTYPE_BF16, TOKENS, p->out);
    nd_tensor w = nd_tensor_2d(b->w, ND_DTYPE_BF16, p->out, p->in),
              dw = nd_tensor_2d(b->dw, ND_DTYPE_F32, p->out, p->in);
    switch (kind) {
    case 0:
        return ND_CALL(b->ops, s, matmul, .c = y, .a = x, .b = w, .b_transposed = true);
    case 1:
        return ND_CALL(b->ops, s, matmul, .c = x, .a = y, .b = w);
    default:
        return ND_CALL(b->ops, s, matmul, .c = dw, .a = y, .a_transposed = true, .b = x,
                       .beta = 1.0f);
    }
}

/* Median seconds of one product. */
static nd_status measure(const bench *b, const product *p, int kind, double *seconds)
{
    double times[REPEATS_MAX];
    ND_TRY(run_once(b, p, kind)); /* creates the primitive, touches the memory */
    for (int i = 0; i < b->repeats; i++) {
        double begin = nd_clock_seconds();
        ND_TRY(run_once(b, p, kind));
        times[i] = nd_clock_seconds() - begin;
    }
    qsort(times, (size_t)b->repeats, sizeof *times, compare);
    *seconds = times[b->repeats / 2];
    return ND_OK;
}

static nd_status run(const bench *b, bool ceiling)
{
    static const char *const kinds[] = {"forward", "input gradient", "weight gradient"};
    double step = 0.0, flops = 0.0;
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) {
        const product *p = &products[i];
        for (int kind = 0; kind < 3; kind++) {
            double seconds, work = 2.0 * TOKENS * (double)p->out * (double)p->in;
            ND_TRY(measure(b, p, kind, &seconds));
            step += seconds * p->uses;
            flops += work * p->uses;
            if (!ceiling) {
                printf("%-8s %-16s %6d x %6ld x %5ld  %8.3f ms  %8.1f GFLOP/s\n", p->name,
                       kinds[kind], TOKENS, (long)p->out, (long)p->in, seconds * 1e3,
                       work / seconds * 1e-9);
            }
        }
    }
    printf("{\"tokens_per_second\": %.1f, \"step_seconds\": %.5f, \"gflops\": %.1f, \"isa\": "
           "\"%s\", \"onednn\": \"%s\"}\n",
           TOKENS / step, step, flops / step * 1e-9, nd_ops_machine(b->stream.device),
           nd_ops_library_version());
    return ND_OK;
}

static nd_status prepare(bench *b, int threads, nd_device **device)
{
    ND_TRY(nd_device_open_cpu(threads, device));
    ND_TRY(nd_ops_cpu(*device, &b->ops));
    ND_TRY((*device)->table->stream_init(*device, &b->stream));
    ND_TRY(fill(&b->x, (int64_t)TOKENS * VOCAB));
    ND_TRY(fill(&b->y, (int64_t)TOKENS * VOCAB));
    ND_TRY(fill(&b->w, (int64_t)VOCAB * HIDDEN));
    return ND_ALLOC((int64_t)VOCAB * HIDDEN, &b->dw);
}

int main(int argc, char **argv)
{
    bench b = {.repeats = 5};
    bool ceiling = false;
    int threads = 2;
    nd_device *device = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--ceiling") == 0) {
            ceiling = true;
        } else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc && atoi(argv[i + 1]) > 0) {
            threads = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--repeats") == 0 && i + 1 < argc && atoi(argv[i + 1]) > 0) {
            b.repeats = atoi(argv[++i]) < REPEATS_MAX ? atoi(argv[i]) : REPEATS_MAX;
        } else {
            fprintf(stderr, "usage: nd_bench_ops [--ceiling] [--threads N] [--repeats N]\n");
            return ND_ERR_CONFIG;
        }
    }
    nd_status status = prepare(&b, threads, &device);
    status = status == ND_OK ? run(&b, ceiling) : status;
    if (status != ND_OK) {
        fprintf(stderr, "nd_bench_ops: %s\n", nd_error_last()->message);
    }
    nd_device_close(device);
    free(b.x);
    free(b.y);
    free(b.w);
    free(b.dw);
    return (int)status;
}
