// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/probe_lt.h"

#include <stdio.h>

typedef struct linear {
    const char *model, *name;
    int64_t out, in;
    bool head; /* BF16 only, in chunks of rows */
} linear;

static const linear linears[] = {
    {"8b", "qkv", 6144, 4096, false},       {"8b", "q, o", 4096, 4096, false},
    {"8b", "k, v", 1024, 4096, false},      {"8b", "gate, up", 14336, 4096, false},
    {"8b", "gate_up", 28672, 4096, false},  {"8b", "down", 4096, 14336, false},
    {"8b", "head", 128256, 4096, true},     {"small", "qkv", 512, 256, false},
    {"small", "q, o", 256, 256, false},     {"small", "k, v", 128, 256, false},
    {"small", "gate, up", 704, 256, false}, {"small", "gate_up", 1408, 256, false},
    {"small", "down", 256, 704, false},     {"small", "head", 256, 256, true},
};
static const linear toys[] = {{"toy", "qkv", 96, 64, false}, {"toy", "head", 256, 64, true}};
enum { HEAD_ROWS = 2048 };

typedef enum scaling { BF16, FP8_SCALARS, FP8_VECTORS, FP8_UNALIGNED } scaling;
static const char *const kinds[] = {"bf16", "fp8 scalars", "fp8 vectors", "fp8 unaligned scalars"};

typedef struct probe {
    plain_lt *plain;
    nd_stream *stream;
    plain_lt_operands on;
} probe;

static nd_status ask(const probe *p, const linear *l, const char *product, scaling kind,
                     plain_lt_form form)
{
    plain_lt_answer answer;
    for (int beta = 0; beta < 2; beta++) {
        form.beta = (float)beta;
        ND_TRY(plain_lt_probe(p->plain, p->stream, &form, &p->on, &answer));
        printf("{\"probe\": \"%s %s %s\", \"type\": \"%s\", \"m\": %lld, \"n\": %lld, \"k\": %lld, "
               "\"d\": \"%s\", \"beta\": %d, \"heuristic\": %d, \"matmul\": %d, \"cuda\": %d, "
               "\"us\": %.1f}\n",
               l->model, l->name, product, kinds[kind], (long long)form.m, (long long)form.n,
               (long long)form.k, nd_dtype_name(form.c), beta, answer.heuristic, answer.product,
               answer.gpu, answer.seconds * 1e6);
    }
    return ND_OK;
}

/* y and dx have BF16 results, dW F32 ones; vectors of scales are asked for both. Scalars are also
 * asked for where 16 does not divide their address, which the library may refuse. */
static nd_status ask_linear(const probe *p, const linear *l, scaling kind, int64_t tokens)
{
    int64_t n = l->head && tokens > HEAD_ROWS ? HEAD_ROWS : tokens;
    nd_dtype bf16 = ND_DTYPE_BF16, w = kind == BF16 ? bf16 : ND_DTYPE_F8_E4M3;
    nd_dtype dy = kind == BF16 ? bf16 : ND_DTYPE_F8_E5M2;
    bool vectors = kind == FP8_VECTORS;
    plain_lt_form y = {n, l->out, l->in, false, true, w, w, bf16, 0.0f, true, vectors};
    plain_lt_form dx = {n, l->in, l->out, false, false, dy, w, bf16, 0.0f, false, vectors};
    plain_lt_form dw = {l->out, l->in, n, true, false, dy, w, ND_DTYPE_F32, 0.0f, false, vectors};
    for (int turn = 0; turn < (vectors ? 2 : 1); turn++) {
        ND_TRY(ask(p, l, "y", kind, y));
        ND_TRY(ask(p, l, "dx", kind, dx));
        ND_TRY(ask(p, l, "dW", kind, dw));
        y.c = dx.c = ND_DTYPE_F32;
        dw.c = bf16;
    }
    return ND_OK;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* One piece of memory for the operands, as large as the largest of any form. */
static nd_status allocate(probe *p, const linear *all, int count, int64_t tokens, char **memory,
                          size_t *bytes)
{
    int64_t operand = 0, result = 0, vector = tokens + 1;
    for (int i = 0; i < count; i++) {
        int64_t rows = all[i].head && tokens > HEAD_ROWS ? HEAD_ROWS : tokens;
        int64_t wide = larger(all[i].out, all[i].in), weights = all[i].out * all[i].in;
        operand = larger(operand, larger(rows * wide, weights));
        result = larger(result, larger(rows * wide, weights));
        vector = larger(vector, wide);
    }
    int64_t sizes[] = {2 * operand, 2 * operand, 4 * result, 4 * vector};
    int64_t offsets[4], total = 0;
    for (int i = 0; i < 4; i++) {
        offsets[i] = total;
        total += (sizes[i] + 255) / 256 * 256;
    }
    *bytes = (size_t)total;
    ND_TRY(nd_device_alloc(p->plain->device, *bytes, (void **)memory));
    p->on = (plain_lt_operands){*memory + offsets[0], *memory + offsets[1], *memory + offsets[2],
                                (float *)(void *)(*memory + offsets[3])};
    return nd_zero(p->stream, *memory, *bytes);
}

nd_status probe_lt(plain_lt *plain, nd_stream *stream, int capability, int64_t tokens, bool toy)
{
    const linear *all = toy ? toys : linears;
    int count = (int)(toy ? sizeof toys / sizeof *toys : sizeof linears / sizeof *linears);
    probe p = {.plain = plain, .stream = stream};
    char *memory = NULL;
    size_t bytes = 0;
    ND_TRY(allocate(&p, all, count, tokens, &memory, &bytes));
    const float *scales = p.on.scale;
    nd_status status = ND_OK;
    for (int i = 0; i < count && status == ND_OK; i++) {
        int kinds_of = all[i].head || capability < 89 ? 1 : 4;
        for (int kind = 0; kind < kinds_of && status == ND_OK; kind++) {
            p.on.scale = scales + (kind == FP8_UNALIGNED);
            status = ask_linear(&p, &all[i], (scaling)kind, tokens);
        }
    }
    nd_device_free(plain->device, memory, bytes);
    return status;
}
