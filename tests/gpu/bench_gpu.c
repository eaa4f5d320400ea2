// SPDX-License-Identifier: Apache-2.0
/*
 * What a GPU does with the ops of an 8B Llama layer, against its own ceilings in the same call:
 * products beside a plain loop of cuBLASLt on the same form, memory-bound kernels beside a copy of
 * the same bytes. One JSON object a line on stdout.
 *
 *   nd_bench_gpu [tokens]        8192 unless told
 */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/context.h"
#include "kernels/cuda/cuda_ops.h"
#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"

enum { C = 4096, F = 14336, QKV = 6144, H = 32, K = 8, D = 128, V = 128256, REPEATS = 20 };

typedef struct bench {
    nd_device *device;
    const nd_ops *ops;
    nd_stream stream;
    cudaEvent_t begin, end;
    char *memory; /* BYTES */
    int64_t tokens;
} bench;

enum { GIB = 1 << 30, BYTES_GIB = 12 };

static nd_tensor at(const bench *b, double gib, nd_dtype dtype, int64_t rows, int64_t columns)
{
    return nd_tensor_2d(b->memory + (size_t)(gib * GIB), dtype, rows, columns);
}

typedef nd_status timed(bench *b);

static nd_status measure(bench *b, timed *call, double *seconds)
{
    float ms = 0.0f;
    ND_TRY(call(b));
    ND_CUDA(b->device, cudaEventRecord(b->begin, nd_cuda_stream(&b->stream)));
    for (int i = 0; i < REPEATS; i++) {
        ND_TRY(call(b));
    }
    ND_CUDA(b->device, cudaEventRecord(b->end, nd_cuda_stream(&b->stream)));
    ND_TRY(nd_stream_sync(&b->stream));
    ND_CUDA(b->device, cudaEventElapsedTime(&ms, b->begin, b->end));
    *seconds = (double)ms * 1e-3 / REPEATS;
    return ND_OK;
}

/* 2 GiB read, 2 GiB written. */
static nd_status copy(bench *b)
{
    return nd_copy(&b->stream, b->memory, b->memory + 4 * (size_t)GIB, 2 * (size_t)GIB);
}

static nd_status norm(bench *b)
{
    nd_tensor x = at(b, 0, ND_DTYPE_BF16, b->tokens, C), none = {0};
    nd_tensor weight = nd_tensor_1d(at(b, 8, ND_DTYPE_BF16, 1, C).data, ND_DTYPE_BF16, C);
    nd_tensor rstd = nd_tensor_1d(at(b, 9, ND_DTYPE_F32, 1, 1).data, ND_DTYPE_F32, b->tokens);
    return b->ops->rmsnorm_fwd(&b->stream, at(b, 2, ND_DTYPE_BF16, b->tokens, C), none, rstd, x,
                               none, weight, 1e-5f);
}

static nd_status swiglu(bench *b)
{
    nd_tensor gu = at(b, 0, ND_DTYPE_BF16, b->tokens, 2 * F);
    return b->ops->swiglu_fwd(&b->stream, at(b, 4, ND_DTYPE_BF16, b->tokens, F),
                              nd_tensor_columns(gu, 0, F), nd_tensor_columns(gu, F, F));
}

static nd_status swiglu_backward(bench *b)
{
    nd_tensor gu = at(b, 0, ND_DTYPE_BF16, b->tokens, 2 * F);
    nd_tensor gate = nd_tensor_columns(gu, 0, F), up = nd_tensor_columns(gu, F, F);
    return b->ops->swiglu_bwd(&b->stream, gate, up, at(b, 4, ND_DTYPE_BF16, b->tokens, F), gate,
                              up);
}

static nd_status cast(bench *b)
{
    return b->ops->cast(&b->stream, at(b, 0, ND_DTYPE_BF16, b->tokens, F),
                        at(b, 4, ND_DTYPE_F32, b->tokens, F));
}

static nd_status fp8_cast(bench *b)
{
    nd_fp8 out = {.codes = at(b, 0, ND_DTYPE_F8_E4M3, b->tokens, F),
                  .transposed = at(b, 2, ND_DTYPE_F8_E4M3, F, b->tokens),
                  .scale = at(b, 8, ND_DTYPE_F32, 1, 1).data,
                  .inverse = at(b, 8.5, ND_DTYPE_F32, 1, 1).data};
    return b->ops->fp8_cast(&b->stream, out, NULL, at(b, 4, ND_DTYPE_BF16, b->tokens, F));
}

static nd_status adamw(bench *b)
{
    const int64_t n = (int64_t)1 << 27;
    nd_adamw hyper = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 0.1f, 0.05f};
    nd_flat_range range = {0, n, true};
    return b->ops->adamw(&b->stream, &hyper, at(b, 0, ND_DTYPE_F32, 1, n).data,
                         at(b, 1, ND_DTYPE_F32, 1, n).data, at(b, 2, ND_DTYPE_F32, 1, n).data,
                         at(b, 3, ND_DTYPE_F32, 1, n).data, &range, 1);
}

static nd_status bench_memory(bench *b)
{
    const double act = (double)b->tokens * 2.0;
    const struct {
        const char *name;
        timed *call;
        double bytes;
    } kernels[] = {
        {"rmsnorm_fwd", norm, act * 2 * C},
        {"swiglu_fwd", swiglu, act * 3 * F},
        {"swiglu_bwd", swiglu_backward, act * 5 * F},
        {"cast", cast, act * 3 * F},
        {"fp8_cast_transpose", fp8_cast, act * 2 * F},
        {"adamw", adamw, 7.0 * 4.0 * (1 << 27)},
    };
    double seconds = 0.0;
    ND_TRY(measure(b, copy, &seconds));
    double ceiling = 4.0 * GIB / seconds;
    printf("{\"kernel\": \"copy\", \"gb_per_s\": %.1f}\n", ceiling * 1e-9);
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        ND_TRY(measure(b, kernels[i].call, &seconds));
        double rate = kernels[i].bytes / seconds;
        printf("{\"kernel\": \"%s\", \"us\": %.1f, \"gb_per_s\": %.1f, \"share_of_copy\": %.3f}\n",
               kernels[i].name, seconds * 1e6, rate * 1e-9, rate / ceiling);
    }
    return ND_OK;
}

/* A form through the op table, as a step calls it. */
static nd_lt_form now;

static nd_status product(bench *b)
{
    nd_tensor a =
        at(b, 0, now.a, now.a_transposed ? now.k : now.m, now.a_transposed ? now.m : now.k);
    nd_tensor w =
        at(b, 3, now.b, now.b_transposed ? now.n : now.k, now.b_transposed ? now.k : now.n);
    nd_tensor c = at(b, 6, now.c, now.m, now.n);
    if (nd_dtype_size(now.a) > 1) {
        return b->ops->matmul(&b->stream, c, a, now.a_transposed, w, now.b_transposed, now.beta);
    }
    float *scales = at(b, 11, ND_DTYPE_F32, 1, 4).data;
    nd_fp8 x = {.codes = at(b, 0, now.a, now.m, now.k), .scale = scales, .inverse = scales};
    nd_fp8 y = {.codes = at(b, 3, now.b, now.n, now.k), .scale = scales, .inverse = scales};
    return b->ops->matmul_fp8(&b->stream, c, x, false, y, true, now.beta, now.fast_accumulation,
                              NULL);
}

static nd_status bench_product(bench *b, const char *name, nd_lt_form form)
{
    nd_cuda_context *context = nd_cuda_context_of(b->device);
    double plain = 0.0, ours = 0.0, flops = 2.0 * (double)form.m * (double)form.n * (double)form.k;
    now = form;
    ND_TRY(nd_lt_time(context->lt, &b->stream, &form, REPEATS, &plain));
    ND_TRY(measure(b, product, &ours));
    printf("{\"product\": \"%s\", \"type\": \"%s\", \"m\": %lld, \"n\": %lld, \"k\": %lld, "
           "\"tflops\": %.1f, \"plain_tflops\": %.1f, \"share\": %.3f}\n",
           name, nd_dtype_name(form.a), (long long)form.m, (long long)form.n, (long long)form.k,
           flops / ours * 1e-12, flops / plain * 1e-12, plain / ours);
    return ND_OK;
}

static nd_status bench_products(bench *b, bool fp8)
{
    nd_dtype t = fp8 ? ND_DTYPE_F8_E4M3 : ND_DTYPE_BF16;
    int64_t n = b->tokens;
    const struct {
        const char *name;
        int64_t out, in;
    } linears[] = {{"qkv", QKV, C}, {"o", C, C}, {"gate_up", 2 * F, C}, {"down", C, F}};
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++) {
        int64_t out = linears[i].out, in = linears[i].in;
        char name[32];
        nd_lt_form y = {n, out, in, false, true, t, t, ND_DTYPE_BF16, 0.0f, true};
        nd_lt_form dx = {n, in, out, false, false, t, t, ND_DTYPE_BF16, 0.0f, false};
        nd_lt_form dw = {out, in, n, true, false, t, t, ND_DTYPE_F32, 1.0f, false};
        snprintf(name, sizeof name, "%s", linears[i].name);
        ND_TRY(bench_product(b, name, y));
        snprintf(name, sizeof name, "%s dx", linears[i].name);
        ND_TRY(bench_product(b, name, dx));
        snprintf(name, sizeof name, "%s dW", linears[i].name);
        ND_TRY(bench_product(b, name, dw));
    }
    nd_lt_form cube = {8192, 8192, 8192, false, true, t, t, ND_DTYPE_BF16, 0.0f, true};
    return bench_product(b, "8192 cubed", cube);
}

static nd_attention attention = {1, 0, 0, H, K, D, 0, 0.08838835f};

static nd_status attention_forward(bench *b)
{
    int64_t n = b->tokens;
    nd_tensor q = nd_tensor_4d(b->memory, ND_DTYPE_BF16, 1, n, H, D);
    nd_tensor k = nd_tensor_4d(b->memory + (size_t)GIB, ND_DTYPE_BF16, 1, n, K, D);
    nd_tensor out = nd_tensor_4d(b->memory + 2 * (size_t)GIB, ND_DTYPE_BF16, 1, n, H, D);
    nd_tensor lse = nd_tensor_3d(b->memory + 3 * (size_t)GIB, ND_DTYPE_F32, 1, H, n);
    return b->ops->attention_fwd(&b->stream, &attention, out, lse, q, k, k,
                                 b->memory + 8 * (size_t)GIB);
}

static nd_status attention_backward(bench *b)
{
    int64_t n = b->tokens;
    nd_tensor q = nd_tensor_4d(b->memory, ND_DTYPE_BF16, 1, n, H, D);
    nd_tensor k = nd_tensor_4d(b->memory + (size_t)GIB, ND_DTYPE_BF16, 1, n, K, D);
    nd_tensor out = nd_tensor_4d(b->memory + 2 * (size_t)GIB, ND_DTYPE_BF16, 1, n, H, D);
    nd_tensor lse = nd_tensor_3d(b->memory + 3 * (size_t)GIB, ND_DTYPE_F32, 1, H, n);
    nd_tensor dq = nd_tensor_4d(b->memory + 4 * (size_t)GIB, ND_DTYPE_BF16, 1, n, H, D);
    nd_tensor dk = nd_tensor_4d(b->memory + 5 * (size_t)GIB, ND_DTYPE_BF16, 1, n, K, D);
    nd_tensor dv = nd_tensor_4d(b->memory + 6 * (size_t)GIB, ND_DTYPE_BF16, 1, n, K, D);
    return b->ops->attention_bwd(&b->stream, &attention, dq, dk, dv, q, k, k, out, out, lse, lse,
                                 false, false, b->memory + 8 * (size_t)GIB);
}

static nd_status bench_attention(bench *b)
{
    double seconds = 0.0, flops = 2.0 * (double)b->tokens * (double)b->tokens * H * D;
    attention.sq = attention.sk = b->tokens;
    for (int backward = 0; backward < 2; backward++) {
        double work = backward ? 2.5 * flops : flops;
        b->ops->attention_scratch(b->device, &attention, ND_DTYPE_BF16, backward);
        ND_TRY(measure(b, backward ? attention_backward : attention_forward, &seconds));
        printf("{\"attention\": \"%s\", \"tokens\": %lld, \"ms\": %.3f, \"causal_tflops\": %.1f}\n",
               backward ? "backward" : "forward", (long long)b->tokens, seconds * 1e3,
               work / seconds * 1e-12);
    }
    return ND_OK;
}

static nd_status run(bench *b)
{
    nd_cuda_info info;
    nd_cuda_options options = {.local_workers = 1};
    ND_TRY(nd_device_open_cuda(&options, &b->device));
    ND_TRY(nd_cuda_info_of(b->device, &info));
    ND_TRY(nd_ops_cuda(b->device, false, &b->ops));
    ND_TRY(b->device->table->stream_init(b->device, &b->stream));
    ND_TRY(nd_device_alloc(b->device, BYTES_GIB * (size_t)GIB, (void **)&b->memory));
    ND_CUDA(b->device, cudaEventCreate(&b->begin));
    ND_CUDA(b->device, cudaEventCreate(&b->end));
    printf("{\"gpu\": \"%s\", \"capability\": \"%d.%d\", \"driver\": %d, \"runtime\": %d, "
           "\"memory_gib\": %.1f}\n",
           b->device->name, info.major, info.minor, info.driver, info.runtime,
           (double)info.total_bytes / GIB);
    ND_TRY(bench_memory(b));
    ND_TRY(bench_products(b, false));
    if (info.major * 10 + info.minor >= 89) {
        ND_TRY(bench_products(b, true));
    }
    return bench_attention(b);
}

int main(int argc, char **argv)
{
    bench b = {.tokens = argc > 1 ? strtol(argv[1], NULL, 10) : 8192};
    nd_status status = run(&b);
    if (status != ND_OK) {
        fprintf(stderr, "nd_bench_gpu: %s\n", nd_error_last()->message);
    }
    return (int)status;
}
