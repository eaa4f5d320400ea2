// SPDX-License-Identifier: Apache-2.0
/*
 * nd_bench_kernels: the bandwidth of each CUDA kernel beside that of a copy in the same call, at
 * the shapes of Llama-3.1-8B.
 *   --tokens N (8192)   rows of the activations; a quarter of them is the chunk of logits
 *   --repeats N (20)    timed launches of each, of which the median counts
 * Bytes are those that a kernel must move at least: each operand once. Before each timed launch
 * other memory is read through the L2 cache; had it been written, its way out would be timed too.
 * The last line is JSON: copy_gbps, and for each kernel its microseconds, GB/s, share of the copy,
 * and share of a copy that moves as many bytes: what a launch takes besides weighs more on few.
 */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/kernels.h"
#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"
#include "tests/bench/measure.h"

enum { C = 4096, F = 14336, H = 32, D = 128, V = 128256, REPEATS_MAX = 201 };
enum { FLUSH_OF_TOKEN = 32 << 10 }; /* bytes that are read: 256 MiB at 8,192 tokens */

typedef struct bench {
    nd_device *device;
    nd_stream stream;
    cudaStream_t queue;
    cudaEvent_t begin, end;
    int64_t n, chunk; /* tokens, rows of logits */
    int repeats;
    char *arena;
    float *flush; /* (flushed), zeros */
    int64_t flushed;
    size_t bytes, used, copied;                  /* copied: bytes of `copy` */
    nd_tensor x, y, z, w, weight, rstd, dweight; /* (n, C) x 4, (C), (n), (C) */
    nd_tensor gate, up, out;                     /* (n, F) */
    nd_tensor logits, stat[3], labels, ids,
        table;                            /* (chunk, V), (chunk) x 3, (chunk), (n), (V, C) */
    nd_tensor positions;                  /* (n) */
    nd_tensor wide, delta, dtable;        /* F32 (n, C), (n H), (V, C) */
    nd_tensor codes, transposed, codes_f; /* (n, C), (C, n), (n, F) */
    float *state[4], *amax, *scale, *per_row, *cosines, *sines;
    double *sum;
    int64_t *counted;
    void *scratch;
    int64_t parameters; /* of the optimizer's shard */
    int64_t distinct;   /* ids */
    nd_attention attention;
} bench;

#define LAUNCH(op_, ...) nd_cuda_##op_(b->queue, &(nd_##op_##_args){__VA_ARGS__}, b->scratch)

typedef struct kernel_case {
    const char *name;
    double bytes;
    int (*run)(bench *b);
} kernel_case;

/* memory */

static void *take(bench *b, int64_t bytes)
{
    void *p = b->arena ? b->arena + b->used : NULL;
    b->used += ((size_t)bytes + 255) / 256 * 256;
    return p;
}

static nd_tensor take_2d(bench *b, nd_dtype dtype, int64_t n0, int64_t n1)
{
    return nd_tensor_2d(take(b, n0 * n1 * (int64_t)nd_dtype_size(dtype)), dtype, n0, n1);
}

static nd_tensor take_1d(bench *b, nd_dtype dtype, int64_t n0)
{
    return nd_tensor_1d(take(b, n0 * (int64_t)nd_dtype_size(dtype)), dtype, n0);
}

/* Once without an arena for its size, once with it. */
static void lay_out(bench *b)
{
    const nd_dtype act = ND_DTYPE_BF16, f32 = ND_DTYPE_F32;
    nd_tensor *const hidden[] = {&b->x, &b->y, &b->z, &b->w}, *const ffn[] = {&b->gate, &b->up,
                                                                              &b->out};
    b->used = 0;
    for (int i = 0; i < 4; i++) {
        *hidden[i] = take_2d(b, act, b->n, C);
        b->state[i] = take(b, b->parameters * 4);
    }
    for (int i = 0; i < 3; i++) {
        *ffn[i] = take_2d(b, act, b->n, F);
        b->stat[i] = take_1d(b, f32, b->chunk);
    }
    b->weight = take_1d(b, act, C);
    b->rstd = take_1d(b, f32, b->n);
    b->dweight = take_1d(b, f32, C);
    b->logits = take_2d(b, act, b->chunk, V);
    b->labels = take_1d(b, ND_DTYPE_I32, b->chunk);
    b->ids = take_1d(b, ND_DTYPE_I32, b->n);
    b->positions = take_1d(b, ND_DTYPE_I32, b->n);
    b->table = take_2d(b, act, V, C);
    b->wide = take_2d(b, f32, b->n, C);
    b->delta = take_1d(b, f32, b->n * H);
    b->dtable = take_2d(b, f32, V, C);
    b->codes = take_2d(b, ND_DTYPE_F8_E4M3, b->n, C);
    b->transposed = take_2d(b, ND_DTYPE_F8_E4M3, C, b->n);
    b->codes_f = take_2d(b, ND_DTYPE_F8_E4M3, b->n, F);
    b->amax = take(b, 4);
    b->scale = take(b, 8);
    b->per_row = take(b, (b->n > C ? b->n : C) * 4);
    b->cosines = take(b, b->n * D * 2);
    b->sines = take(b, b->n * D * 2);
    b->sum = take(b, 8);
    b->counted = take(b, 8);
    b->scratch = take(b, ND_CUDA_SCRATCH);
    b->flush = take(b, b->flushed * 4);
}

/* Draws of deviation 1 in the BF16 tensor t. */
static int randomize(bench *b, nd_tensor t, uint64_t seed)
{
    int64_t count = nd_tensor_count(t), part = nd_tensor_count(b->wide);
    for (int64_t at = 0; at < count; at += part) {
        int64_t now = count - at < part ? count - at : part;
        nd_tensor to = nd_tensor_1d((nd_bf16 *)t.data + at, t.dtype, now);
        nd_tensor from = nd_tensor_1d(b->wide.data, ND_DTYPE_F32, now);
        int error = LAUNCH(random_normal, .out = b->wide.data, .count = now, .deviation = 1.0f,
                           .seed = seed, .random_stream = 0, .first = (uint64_t)at);
        error = error ? error : LAUNCH(cast, .out = to, .x = from);
        if (error) {
            return error;
        }
    }
    return 0;
}

static nd_status fill(bench *b)
{
    nd_tensor *const all[] = {&b->x,    &b->y,  &b->z,   &b->w,     &b->weight,
                              &b->gate, &b->up, &b->out, &b->logits};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        ND_CUDA(b->device, (cudaError_t)randomize(b, *all[i], i));
    }
    float one[2] = {1.0f, 1.0f};
    int64_t counted = b->chunk;
    int32_t *ids = NULL;
    ND_TRY(ND_ALLOC(b->n, &ids));
    for (int64_t i = 0; i < b->n; i++) { /* a power law, as words have */
        int64_t rank = i * 7919 % b->n;  /* each number below n once, 7919 being odd and prime */
        ids[i] = (int32_t)(V / (1 + rank) % V);
        b->distinct += rank == 0 || V / (1 + rank) != V / rank;
    }
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_copy(&b->stream, b->ids.data, ids, (size_t)b->n * 4));
    ND_TRY_OUT(nd_copy(&b->stream, b->labels.data, ids, (size_t)b->chunk * 4));
    ND_TRY_OUT(nd_copy(&b->stream, b->scale, one, sizeof one));
    ND_TRY_OUT(nd_copy(&b->stream, b->counted, &counted, sizeof counted));
    ND_TRY_OUT(nd_stream_sync(&b->stream));
out:
    free(ids);
    return status;
}

/* cases */

#define KERNEL(name, op, ...)                                                                      \
    static int name(bench *b)                                                                      \
    {                                                                                              \
        return LAUNCH(op, __VA_ARGS__);                                                            \
    }

/* (n, C) as (1, n, H, D) */
#define HEADS(x, dtype) nd_tensor_4d((x).data, dtype, 1, b->n, H, D)
/* Codes of (n, C) with one scale. */
#define CODES                                                                                      \
    {                                                                                              \
        .stored = b->codes, .scale = b->scale, .inverse = b->scale + 1                             \
    }

static int copy(bench *b)
{
    return (int)cudaMemcpyAsync(b->state[1], b->state[0], b->copied, cudaMemcpyDefault, b->queue);
}

KERNEL(norm_forward, rmsnorm_fwd, .y = b->y, .sum = b->z, .rstd = b->rstd, .x = b->x, .delta = b->w,
       .weight = b->weight, .eps = 1e-5f)

KERNEL(norm_forward_fused, rmsnorm_fwd, .sum = b->z, .rstd = b->rstd, .x = b->x, .delta = b->w,
       .weight = b->weight, .eps = 1e-5f,
       .fuse = {.amax = b->amax, .codes = b->codes, .scale = b->scale})
KERNEL(norm_backward, rmsnorm_bwd, .dx = b->y, .dweight = b->dweight, .dy = b->w, .dres = b->z,
       .x = b->x, .weight = b->weight, .rstd = b->rstd)

KERNEL(rope, rope, .out = nd_tensor_3d(b->x.data, ND_DTYPE_BF16, b->n, H, D),
       .x = nd_tensor_3d(b->x.data, ND_DTYPE_BF16, b->n, H, D), .positions = b->positions,
       .table = {b->cosines, b->sines, b->n})
KERNEL(swiglu_forward, swiglu_fwd, .out = b->out, .gate = b->gate, .up = b->up)

KERNEL(swiglu_forward_fused, swiglu_fwd, .gate = b->gate, .up = b->up,
       .fuse = {.amax = b->amax, .codes = b->codes_f, .scale = b->scale})
KERNEL(swiglu_backward, swiglu_bwd, .dgate = b->gate, .dup = b->up, .dout = b->out, .gate = b->gate,
       .up = b->up)
KERNEL(ce_stats, ce_stats, .row_max = b->stat[0], .row_sum = b->stat[1], .target = b->stat[2],
       .logits = b->logits, .labels = b->labels, .first = 0, .valid = V)
KERNEL(ce_backward, ce_bwd, .logits = b->logits, .max = b->stat[0], .sum = b->stat[1],
       .labels = b->labels, .first = 0, .valid = V, .count = b->counted)
KERNEL(accumulate, accumulate, .acc = b->wide, .x = b->x)
KERNEL(cast, cast, .out = b->y, .x = b->wide)
KERNEL(sum_squares, sum_squares, .out = b->sum, .x = b->state[0], .count = b->parameters)
KERNEL(digest, digest, .out = (uint64_t *)b->sum, .x = b->state[0], .count = b->parameters)

KERNEL(adamw, adamw, .hyper = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 0.1f, 0.05f},
       .p = b->state[0], .m = b->state[1], .v = b->state[2], .grad = b->state[3],
       .ranges = &(nd_flat_range){0, b->parameters, true}, .range_count = 1)
KERNEL(amax, amax, .amax = b->amax, .x = b->x, .granularity = ND_PER_TENSOR, .merge = true)
KERNEL(amax_rows, amax, .amax = b->per_row, .x = b->x, .granularity = ND_PER_ROW, .merge = true)
KERNEL(amax_columns, amax, .amax = b->per_row, .x = b->x, .granularity = ND_PER_COLUMN,
       .merge = true)

KERNEL(fp8_cast, make_form, .out = CODES, .x = b->x)
KERNEL(fp8_cast_both, make_form, .out = CODES, .transposed = b->transposed, .amax = b->amax,
       .x = b->x)
KERNEL(fp8_transpose, make_form, .transposed = b->transposed, .x = b->codes)
KERNEL(embedding_forward, embedding_fwd, .out = b->y, .ids = b->ids, .table = b->table, .first = 0)
KERNEL(embedding_backward, embedding_bwd, .dtable = b->dtable, .ids = b->ids, .dout = b->x,
       .first = 0)

KERNEL(lse_merge, lse_merge, .attention = b->attention, .acc = HEADS(b->wide, ND_DTYPE_F32),
       .acc_lse = b->delta, .out = HEADS(b->x, ND_DTYPE_BF16), .lse = b->delta)
KERNEL(attention_delta, attention_delta, .attention = b->attention, .delta = b->delta,
       .out = HEADS(b->x, ND_DTYPE_BF16), .dout = HEADS(b->y, ND_DTYPE_BF16))

/* measuring */

/* Median microseconds of one launch. */
static nd_status measure(bench *b, int (*launch)(bench *b), double *us)
{
    double times[REPEATS_MAX];
    for (int i = -2; i < b->repeats; i++) { /* the first two warm up */
        float ms = 0.0f;
        ND_CUDA(b->device, (cudaError_t)LAUNCH(sum_squares, .out = b->sum, .x = b->flush,
                                               .count = b->flushed));
        ND_CUDA(b->device, cudaEventRecord(b->begin, b->queue));
        ND_CUDA(b->device, (cudaError_t)launch(b));
        ND_CUDA(b->device, cudaEventRecord(b->end, b->queue));
        ND_CUDA(b->device, cudaEventSynchronize(b->end));
        ND_CUDA(b->device, cudaEventElapsedTime(&ms, b->begin, b->end));
        times[i < 0 ? 0 : i] = (double)ms * 1e3;
    }
    *us = nd_bench_median(times, b->repeats);
    return ND_OK;
}

static nd_status run(bench *b)
{
    const double c = (double)b->n * C, f = (double)b->n * F, v = (double)b->chunk * V;
    const double p = (double)b->parameters, rows = (double)b->distinct * C;
    const kernel_case cases[] = {
        {"copy", 8 * p, copy},
        {"rmsnorm_fwd", 8 * c, norm_forward},
        {"rmsnorm_fwd, FP8", 7 * c, norm_forward_fused},
        {"rmsnorm_bwd", 8 * c, norm_backward},
        {"rope", 4 * c, rope},
        {"swiglu_fwd", 6 * f, swiglu_forward},
        {"swiglu_fwd, FP8", 5 * f, swiglu_forward_fused},
        {"swiglu_bwd", 10 * f, swiglu_backward},
        {"ce_stats", 2 * v, ce_stats},
        {"ce_bwd", 4 * v, ce_backward},
        {"accumulate", 10 * c, accumulate},
        {"cast to bf16", 6 * c, cast},
        {"sum_squares", 4 * p, sum_squares},
        {"digest", 4 * p, digest},
        {"adamw", 28 * p, adamw},
        {"amax", 2 * c, amax},
        {"amax of rows", 2 * c, amax_rows},
        {"amax of columns", 2 * c, amax_columns},
        {"fp8_cast", 3 * c, fp8_cast},
        {"fp8_cast, both, amax", 4 * c, fp8_cast_both},
        {"fp8_transpose", 2 * c, fp8_transpose},
        {"embedding_fwd", 2 * c + 2 * rows, embedding_forward},
        {"embedding_bwd", 2 * c + 8 * rows, embedding_backward},
        {"lse_merge", 10 * c, lse_merge},
        {"attention_delta", 4 * c, attention_delta},
    };
    double copy_gbps = 0.0, us[sizeof cases / sizeof *cases], equal[sizeof cases / sizeof *cases];
    const size_t most = (size_t)b->parameters * 4;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t half = (size_t)(cases[i].bytes * 0.5) / 16 * 16;
        b->copied = half < most ? half : most;
        ND_TRY(measure(b, cases[i].run, &us[i]));
        double gbps = cases[i].bytes / us[i] * 1e-3, copied_us = us[i];
        if (i > 0) {
            ND_TRY(measure(b, copy, &copied_us));
        }
        copy_gbps = i == 0 ? gbps : copy_gbps;
        equal[i] = gbps / (2.0 * (double)b->copied / copied_us * 1e-3);
        printf("%-22s %9.1f MB %9.1f us %8.1f GB/s %6.1f %% of copy, %.1f %% of one of its size\n",
               cases[i].name, cases[i].bytes * 1e-6, us[i], gbps, 100.0 * gbps / copy_gbps,
               100.0 * equal[i]);
    }
    printf("{\"device\": \"%s\", \"tokens\": %lld, \"copy_gbps\": %.1f, \"kernels\": {",
           b->device->name, (long long)b->n, copy_gbps);
    for (size_t i = 1; i < sizeof cases / sizeof *cases; i++) {
        double gbps = cases[i].bytes / us[i] * 1e-3;
        printf(
            "%s\"%s\": {\"us\": %.1f, \"gbps\": %.1f, \"share\": %.3f, \"share_of_equal\": %.3f}",
            i > 1 ? ", " : "", cases[i].name, us[i], gbps, gbps / copy_gbps, equal[i]);
    }
    printf("}}\n");
    return ND_OK;
}

static nd_status open_and_run(bench *b)
{
    nd_cuda_options options = {.local_workers = 1};
    ND_TRY(nd_device_open_cuda(&options, &b->device));
    ND_TRY(b->device->table->stream_init(b->device, &b->stream));
    b->queue = nd_cuda_stream(&b->stream);
    ND_CUDA(b->device, cudaEventCreate(&b->begin));
    ND_CUDA(b->device, cudaEventCreate(&b->end));
    lay_out(b);
    b->bytes = b->used;
    void *arena = NULL;
    ND_TRY(nd_device_alloc(b->device, b->bytes, &arena));
    b->arena = arena;
    lay_out(b);
    nd_status status = fill(b);
    if (status == ND_OK) {
        status = run(b);
    }
    nd_device_free(b->device, b->arena, b->bytes);
    cudaEventDestroy(b->begin);
    cudaEventDestroy(b->end);
    b->device->table->stream_fini(&b->stream);
    nd_device_close(b->device);
    return status;
}

int main(int argc, char **argv)
{
    static bench b = {.n = 8192, .repeats = 20};
    for (int i = 1; i < argc; i++) {
        bool tokens = strcmp(argv[i], "--tokens") == 0, repeats = strcmp(argv[i], "--repeats") == 0;
        long value = i + 1 < argc ? strtol(argv[i + 1], NULL, 10) : 0;
        if (tokens && value >= 16 && value % 16 == 0) {
            b.n = value;
        } else if (repeats && value >= 1 && value < REPEATS_MAX) {
            b.repeats = (int)value;
        } else {
            fprintf(stderr,
                    "usage: nd_bench_kernels [--tokens N, a multiple of 16] [--repeats 1..%d]\n",
                    REPEATS_MAX - 1);
            return ND_ERR_CONFIG;
        }
        i++;
    }
    b.chunk = b.n / 4;
    b.flushed = b.n * FLUSH_OF_TOKEN / 4;
    b.parameters = b.n * F; /* 117 M at 8,192 tokens: half a decoder layer */
    b.attention = (nd_attention){1, b.n, b.n, H, H, D, 0, 1.0f};
    nd_status status = open_and_run(&b);
    if (status != ND_OK) {
        fprintf(stderr, "nd_bench_kernels: %s\n", nd_error_last()->message);
    }
    return status;
}
