// SPDX-License-Identifier: Apache-2.0
/*
 * Times on a GPU of the products and the attention of an 8B Llama layer. Each product runs in turns
 * with a plain loop of cuBLASLt on the same form and operands (plain_lt.h). Prints one JSON object
 * a line. nd_bench_kernels has the memory-bound kernels.
 *
 * --tokens N (8192): rows of the activations, a multiple of 16. --toy: tiny widths, to test the
 * program itself. --probe: asks cuBLASLt for each form instead, and times nothing (probe_lt.h).
 * --documents: only attention, also of separate documents whose mean length is a 16th of the
 * tokens, by cuDNN and by the plain kernels, with and without a window, and what a rank of cp 4
 * does of them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/context.h"
#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/math.h"
#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"
#include "tests/gpu/plain_lt.h"
#include "tests/gpu/probe_lt.h"

enum { H = 32, K = 8, D = 128, REPEATS = 20, TURNS = 3 };

typedef struct bench {
    nd_device *device;
    const nd_ops *ops;
    nd_stream stream;
    cudaEvent_t begin, end;
    plain_lt plain;
    char *memory; /* ROOMS rooms of `room` bytes */
    size_t room;
    int64_t tokens, hidden, ffn, qkv, cube, heads, kv_heads;
    bool toy, probe, documents;
    int repeats;
    nd_tensor first_key, end_key; /* of what is timed now; absent: one document */
} bench;

/* Rooms: a and b of a product, its c, and scales; or q, k, out, lse, dq, dk, dv, scratch. */
enum { ROOMS = 11, SCRATCH_ROOM = 7, SCALES_ROOM = 10 };

static void *room(const bench *b, int index)
{
    return b->memory + (size_t)index * b->room;
}

static nd_tensor at(const bench *b, int index, nd_dtype dtype, int64_t rows, int64_t columns)
{
    return nd_tensor_2d(room(b, index), dtype, rows, columns);
}

static nd_attention attention = {.batch = 1, .head_dim = D, .scale = 0.08838835f};

/* The largest operand (gate and up, or the cube's), or a third of what attention's backward needs:
 * it has the rooms from SCRATCH_ROOM to SCALES_ROOM. */
static size_t room_bytes(const bench *b)
{
    int64_t rows = b->tokens > b->cube ? b->tokens : b->cube;
    int64_t wide = rows * 2 * b->ffn, weights = 2 * b->ffn * b->hidden;
    size_t most = (size_t)(wide > weights ? wide : weights) * 4;
    for (int backward = 0; backward < 2; backward++) {
        size_t scratch = b->ops->attention_scratch(b->device, &attention, ND_DTYPE_BF16, backward);
        size_t third = scratch / (SCALES_ROOM - SCRATCH_ROOM) + 1;
        most = third > most ? third : most;
    }
    return (most + 255) / 256 * 256;
}

typedef nd_status timed(bench *b);

static nd_status measure(bench *b, timed *call, double *seconds)
{
    float ms = 0.0f;
    ND_TRY(call(b));
    ND_CUDA(b->device, cudaEventRecord(b->begin, nd_cuda_stream(&b->stream)));
    for (int i = 0; i < b->repeats; i++) {
        ND_TRY(call(b));
    }
    ND_CUDA(b->device, cudaEventRecord(b->end, nd_cuda_stream(&b->stream)));
    ND_TRY(nd_stream_sync(&b->stream));
    ND_CUDA(b->device, cudaEventElapsedTime(&ms, b->begin, b->end));
    *seconds = (double)ms * 1e-3 / b->repeats;
    return ND_OK;
}

/* A form through the op table, as a step calls it. */
static plain_lt_form now;

static nd_status product(bench *b)
{
    nd_tensor c = at(b, 2, now.c, now.m, now.n);
    if (nd_dtype_size(now.a) > 1) {
        bool at_ = now.a_transposed, bt = now.b_transposed;
        nd_tensor a = at(b, 0, now.a, at_ ? now.k : now.m, at_ ? now.m : now.k);
        nd_tensor w = at(b, 1, now.b, bt ? now.n : now.k, bt ? now.k : now.n);
        return ND_CALL(b->ops, &b->stream, product, .c = c, .a = nd_rows(a), .a_transposed = at_,
                       .b = nd_rows(w), .b_transposed = bt, .beta = now.beta);
    }
    float *scales = room(b, SCALES_ROOM);
    nd_matrix x = {.stored = at(b, 0, now.a, now.m, now.k), .scale = scales, .inverse = scales};
    nd_matrix y = {.stored = at(b, 1, now.b, now.n, now.k), .scale = scales, .inverse = scales};
    return ND_CALL(b->ops, &b->stream, product, .c = c, .a = x, .b = y, .b_transposed = true,
                   .beta = now.beta, .fast_accumulation = now.fast_accumulation);
}

/* The shortest of several turns each, so that a disturbance of the GPU affects neither. */
static nd_status bench_product(bench *b, const char *name, plain_lt_form form)
{
    plain_lt_operands on = {room(b, 0), room(b, 1), room(b, 2), room(b, SCALES_ROOM)};
    double plain = 1e9, ours = 1e9, flops = 2.0 * (double)form.m * (double)form.n * (double)form.k;
    now = form;
    for (int turn = 0; turn < TURNS; turn++) {
        double seconds = 0.0;
        ND_TRY(plain_lt_time(&b->plain, &b->stream, &form, &on, REPEATS, &seconds));
        plain = seconds < plain ? seconds : plain;
        ND_TRY(measure(b, product, &seconds));
        ours = seconds < ours ? seconds : ours;
    }
    printf("{\"product\": \"%s\", \"type\": \"%s\", \"m\": %lld, \"n\": %lld, \"k\": %lld, "
           "\"us\": %.1f, \"tflops\": %.1f, \"plain_tflops\": %.1f, \"share\": %.3f}\n",
           name, nd_dtype_name(form.a), (long long)form.m, (long long)form.n, (long long)form.k,
           ours * 1e6, flops / ours * 1e-12, flops / plain * 1e-12, plain / ours);
    return ND_OK;
}

static nd_status bench_products(bench *b, bool fp8)
{
    nd_dtype t = fp8 ? ND_DTYPE_F8_E4M3 : ND_DTYPE_BF16;
    int64_t n = b->tokens;
    const struct {
        const char *name;
        int64_t out, in;
    } linears[] = {{"qkv", b->qkv, b->hidden},
                   {"o", b->hidden, b->hidden},
                   {"gate_up", 2 * b->ffn, b->hidden},
                   {"down", b->hidden, b->ffn}};
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++) {
        int64_t out = linears[i].out, in = linears[i].in;
        char name[32];
        plain_lt_form y = {n, out, in, false, true, t, t, ND_DTYPE_BF16, 0.0f, true};
        plain_lt_form dx = {n, in, out, false, false, t, t, ND_DTYPE_BF16, 0.0f, false};
        plain_lt_form dw = {out, in, n, true, false, t, t, ND_DTYPE_F32, 1.0f, false};
        dx.a = fp8 ? ND_DTYPE_F8_E5M2 : t; /* gradients */
        dw.a = dx.a;
        ND_TRY(bench_product(b, linears[i].name, y));
        snprintf(name, sizeof name, "%s dx", linears[i].name);
        ND_TRY(bench_product(b, name, dx));
        snprintf(name, sizeof name, "%s dW", linears[i].name);
        ND_TRY(bench_product(b, name, dw));
    }
    plain_lt_form cube = {b->cube, b->cube, b->cube, false, true, t, t, ND_DTYPE_BF16, 0.0f, true};
    return bench_product(b, "8192 cubed", cube);
}

static nd_tensor queries(const bench *b, int index)
{
    return nd_tensor_4d(room(b, index), ND_DTYPE_BF16, 1, attention.sq, b->heads, D);
}

static nd_tensor keys(const bench *b, int index, nd_dtype dtype)
{
    return nd_tensor_4d(room(b, index), dtype, 1, attention.sk, b->kv_heads, D);
}

static nd_tensor statistics(const bench *b)
{
    return nd_tensor_3d(room(b, 3), ND_DTYPE_F32, 1, b->heads, attention.sq);
}

static nd_status attention_forward(bench *b)
{
    nd_tensor k = keys(b, 1, ND_DTYPE_BF16);
    return ND_CALL(b->ops, &b->stream, attention_fwd, .attention = attention, .out = queries(b, 2),
                   .lse = statistics(b), .q = queries(b, 0), .k = k, .v = k,
                   .first_key = b->first_key, .end_key = b->end_key,
                   .scratch = room(b, SCRATCH_ROOM));
}

static nd_status attention_backward(bench *b)
{
    const bool adds = attention.sq < b->tokens; /* on a rank of cp */
    const nd_dtype of_sums = adds ? ND_DTYPE_F32 : ND_DTYPE_BF16;
    nd_tensor k = keys(b, 1, ND_DTYPE_BF16), out = queries(b, 2);
    return ND_CALL(b->ops, &b->stream, attention_bwd, .attention = attention, .dq = queries(b, 4),
                   .dk = keys(b, 5, of_sums), .dv = keys(b, 6, of_sums), .q = queries(b, 0), .k = k,
                   .v = k, .out = out, .dout = out, .lse = statistics(b), .delta = statistics(b),
                   .first_key = b->first_key, .end_key = b->end_key, .add_kv = adds,
                   .scratch = room(b, SCRATCH_ROOM));
}

static nd_status bench_attention(bench *b)
{
    double flops = 2.0 * (double)b->tokens * (double)b->tokens * (double)b->heads * D;
    for (int backward = 0; backward < 2; backward++) {
        double work = backward ? 2.5 * flops : flops, seconds = 0.0;
        ND_TRY(measure(b, backward ? attention_backward : attention_forward, &seconds));
        printf("{\"attention\": \"%s\", \"tokens\": %lld, \"ms\": %.3f, \"causal_tflops\": %.1f}\n",
               backward ? "backward" : "forward", (long long)b->tokens, seconds * 1e3,
               work / seconds * 1e-12);
    }
    return ND_OK;
}

/* Tiles of an eighth: rank 2 of cp 4 has numbers 2 and 5, and in a step of the ring it has visitors
 * of numbers 1 and 4. How many keys are before a token. */
static int64_t keys_before(int64_t S, nd_segments form, int64_t token)
{
    const int64_t tile = S / 8, first = nd_max(nd_min(token - tile, tile), 0);
    return form == ND_SEGMENTS_FLAT ? first + nd_max(nd_min(token - 4 * tile, tile), 0) : token;
}

/* Documents of 1 to 31 shares of a 256th, dealt by multiples of 7, so that long and short ones are
 * mixed; the mean is a 16th. */
static nd_status make_documents(bench *b, nd_segments form)
{
    const int64_t S = b->tokens;
    int64_t row = 0;
    nd_status status = ND_OK;
    int32_t *bounds = NULL;
    ND_TRY(ND_ALLOC(2 * S, &bounds));
    for (int64_t i = 0, first = 0, end = 0, n = 0; i < S; i++) {
        if (i == end) {
            first = i;
            end = i + nd_max(S * (1 + n++ * 7 % 31) / 256, 1);
        }
        if (form == ND_SEGMENTS_WHOLE || i / (S / 8) == 2 || i / (S / 8) == 5) {
            bounds[row] = (int32_t)keys_before(S, form, first);
            bounds[S + row++] = (int32_t)keys_before(S, form, i + 1);
        }
    }
    int32_t *to = room(b, SCALES_ROOM); /* no product is timed now */
    b->first_key = nd_tensor_2d(to, ND_DTYPE_I32, 1, row);
    b->end_key = nd_tensor_2d(to + S, ND_DTYPE_I32, 1, row);
    ND_TRY_OUT(nd_copy(&b->stream, to, bounds, (size_t)S * 2 * sizeof *bounds));
    ND_TRY_OUT(nd_stream_sync(&b->stream));
out:
    free(bounds);
    return status;
}

static nd_status bench_documents(bench *b)
{
    static const struct {
        const char *name;
        nd_segments form;
        bool window;
    } ways[] = {
        {"one document", ND_SEGMENTS_NONE, false},
        {"documents", ND_SEGMENTS_WHOLE, false},
        {"documents, window of a 32nd", ND_SEGMENTS_WHOLE, true},
        {"cp 4, gathered", ND_SEGMENTS_DIAGONAL, false},
        {"cp 4, a step of the ring", ND_SEGMENTS_FLAT, false},
    };
    double one = 0.0;
    for (int i = 0; i < 2 * (int)(sizeof ways / sizeof *ways); i++) {
        const nd_segments form = ways[i / 2].form;
        const bool plain = i % 2 != 0;
        double forward = 0.0, backward = 0.0;
        if (plain && !form) {
            continue;
        }
        attention.sq = form > ND_SEGMENTS_WHOLE ? b->tokens / 4 : b->tokens;
        attention.sk = form == ND_SEGMENTS_FLAT ? b->tokens / 4 : b->tokens;
        attention.window = ways[i / 2].window ? nd_max(b->tokens / 32, 1) : 0;
        attention.documents = plain ? ND_SEGMENTS_NONE : form;
        b->repeats = plain ? 1 : REPEATS; /* these take as long as a thousand others */
        ND_TRY(form ? make_documents(b, form) : ND_OK);
        ND_TRY(measure(b, attention_forward, &forward));
        ND_TRY(measure(b, attention_backward, &backward));
        one = form ? one : forward + backward;
        printf("{\"documents\": \"%s\", \"by\": \"%s\", \"tokens\": %lld, \"forward_ms\": %.3f, "
               "\"backward_ms\": %.3f, \"share_of_one\": %.3f}\n",
               ways[i / 2].name, plain ? "plain kernels" : "cuDNN", (long long)b->tokens,
               forward * 1e3, backward * 1e3, (forward + backward) / one);
    }
    return ND_OK;
}

/* Draws in the rooms that are read: a GPU is faster on zeros. Read as FP8, they are codes of all
 * kinds. */
static nd_status fill(bench *b)
{
    const int64_t count = (int64_t)(b->room / 4);
    float *draws = room(b, 4);
    for (int i = 0; i < 3; i++) {
        ND_TRY(ND_CALL(b->ops, &b->stream, random_normal, .out = draws, .count = count,
                       .deviation = 1.0f, .seed = 1, .random_stream = 0, .first = (uint64_t)i));
        ND_TRY(ND_CALL(b->ops, &b->stream, cast,
                       .out = nd_tensor_1d(room(b, i), ND_DTYPE_BF16, count),
                       .x = nd_tensor_1d(draws, ND_DTYPE_F32, count)));
    }
    static const float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    ND_TRY(nd_copy(&b->stream, room(b, SCALES_ROOM), ones, sizeof ones));
    return nd_stream_sync(&b->stream);
}

static nd_status run(bench *b)
{
    nd_cuda_info info;
    nd_cuda_options options = {.local_workers = 1};
    ND_TRY(nd_device_open_cuda(&options, &b->device));
    ND_TRY(nd_cuda_info_of(b->device, &info));
    ND_TRY(nd_ops_cuda(b->device, false, &b->ops));
    ND_TRY(b->device->table->stream_init(b->device, &b->stream));
    ND_TRY(plain_lt_init(&b->plain, b->device));
    if (b->probe) {
        return probe_lt(&b->plain, &b->stream, info.major * 10 + info.minor, b->tokens, b->toy);
    }
    attention.sq = attention.sk = b->tokens;
    attention.heads = b->heads;
    attention.kv_heads = b->kv_heads;
    attention.documents = b->documents ? ND_SEGMENTS_WHOLE : ND_SEGMENTS_NONE; /* most scratch */
    attention.rounds = 2;
    b->room = room_bytes(b);
    ND_TRY(nd_device_alloc(b->device, ROOMS * b->room, (void **)&b->memory));
    ND_CUDA(b->device, cudaEventCreate(&b->begin));
    ND_CUDA(b->device, cudaEventCreate(&b->end));
    printf("{\"device\": \"%s\", \"capability\": \"%d.%d\", \"driver\": %d, \"runtime\": %d, "
           "\"memory_gib\": %.1f, \"tokens\": %lld}\n",
           b->device->name, info.major, info.minor, info.driver, info.runtime,
           (double)info.total_bytes / (1 << 30), (long long)b->tokens);
    ND_TRY(fill(b));
    if (b->documents) {
        return bench_documents(b);
    }
    ND_TRY(bench_products(b, false));
    if (info.major * 10 + info.minor >= 89) {
        ND_TRY(bench_products(b, true));
    } else {
        printf("{\"products_left_out\": \"FP8 needs compute capability 8.9\"}\n");
    }
    ND_TRY(fill(b));
    return bench_attention(b);
}

int main(int argc, char **argv)
{
    bench b = {.tokens = 8192,
               .hidden = 4096,
               .ffn = 14336,
               .qkv = 6144,
               .cube = 8192,
               .heads = H,
               .kv_heads = K,
               .repeats = REPEATS};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--toy") == 0) {
            b = (bench){.toy = true,
                        .probe = b.probe,
                        .documents = b.documents,
                        .repeats = REPEATS,
                        .tokens = b.tokens,
                        .hidden = 64,
                        .ffn = 224,
                        .qkv = 96,
                        .cube = 128,
                        .heads = 2,
                        .kv_heads = 1};
        } else if (strcmp(argv[i], "--documents") == 0) {
            b.documents = true;
        } else if (strcmp(argv[i], "--probe") == 0) {
            b.probe = true;
        } else if (strcmp(argv[i], "--tokens") == 0 && i + 1 < argc) {
            b.tokens = strtol(argv[++i], NULL, 10);
        } else {
            b.tokens = 0;
        }
    }
    if (b.tokens < 16 || b.tokens % 16 != 0) {
        fprintf(
            stderr,
            "usage: nd_bench_gpu [--tokens N, a multiple of 16] [--toy] [--probe] [--documents]\n");
        return ND_ERR_CONFIG;
    }
    nd_status status = run(&b);
    if (status != ND_OK) {
        fprintf(stderr, "nd_bench_gpu: %s\n", nd_error_last()->message);
    }
    return (int)status;
}
