// SPDX-License-Identifier: Apache-2.0
/*
 * nd_bench_fp8: what the linears of a block cost in FP8 (tensorwise, weights gathered as codes)
 * beside BF16 on this CPU. Inputs become codes, as blocks keep them; of gradients only the scale is
 * found where the products cast them.
 *   nd_bench_fp8 [--threads N (2)] [--repeats N (9)] [--cpu-time]
 * Per group of linears that share an input: ms of the BF16 products, of all that FP8 does in their
 * stead, and the ratio; then where FP8's time goes. BF16 and FP8 alternate and the least time of
 * each part counts, so that other load matters little; --cpu-time counts one thread's processor
 * time instead, for machines that are busy all the time. Shapes: a block of
 * configs/bench/llama-56m.json at 1,024 tokens. The last line is JSON.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/ops.h"
#include "runtime/base/rng.h"
#include "runtime/tensor/fp8.h"
#include "tests/support/forms.h"

enum { TOKENS = 1024, HIDDEN = 512, FFN = 1408, WIDEST = 2 * FFN, PARTS_MAX = 3, ALIGNMENT = 64 };

/* Linears with one input of `in` columns: one product in BF16, one for each part in FP8. */
typedef struct group {
    const char *name;
    int64_t in;
    int parts;
    int64_t out[PARTS_MAX];
} group;

static const group groups[] = {
    {"q k v", HIDDEN, 3, {512, 256, 256}},
    {"o", HIDDEN, 1, {HIDDEN}},
    {"gate up", HIDDEN, 2, {FFN, FFN}},
    {"down", FFN, 1, {HIDDEN}},
};

/* What is timed: three BF16 products, and the parts of the FP8 linears. */
typedef enum piece {
    BF16_Y,
    BF16_DX,
    BF16_DW,
    CAST_X,
    CAST_DY,
    CAST_W,
    FP8_Y,
    FP8_DX,
    FP8_DW,
    PIECES
} piece;

static const char *const piece_names[PIECES] = {"bf16 y", "bf16 dx", "bf16 dw", "cast x", "cast dy",
                                                "cast w", "fp8 y",   "fp8 dx",  "fp8 dw"};

typedef struct bench {
    const nd_ops *ops;
    nd_device *device;
    nd_stream stream;
    int threads, repeats;
    clockid_t clock;
    nd_bf16 *x, *dy, *w;    /* (TOKENS, in), (TOKENS, out), (out, in) */
    nd_bf16 *result;        /* y or dx */
    float *dw, *master;     /* (out, in) */
    uint8_t *x8, *dy8, *w8; /* codes */
    float scales[1 + 2 * PARTS_MAX],
        inverses[1 + 2 * PARTS_MAX]; /* x, then w and dy of the parts */
    void *scratch;
} bench;

/* Part `i` of a group: its columns of y, its rows of w. */
typedef struct part {
    nd_tensor x, dy, w, y, dx, dw, master;
    nd_matrix x8, dy8, w8;
} part;

static nd_matrix fp8_of(bench *b, int scale, uint8_t *codes, nd_dtype format, int64_t rows,
                        int64_t columns)
{
    return (nd_matrix){.stored = nd_tensor_2d(codes, format, rows, columns),
                       .format = format,
                       .scale = &b->scales[scale],
                       .inverse = &b->inverses[scale]};
}

/* Leaves the cast to products, if they do it. */
static void leave_to_products(const bench *b, nd_matrix *fp8, nd_tensor x)
{
    if (products_cast(b->ops, b->device)) {
        fp8->stored = x;
    }
}

static part part_of(bench *b, const group *g, int first, int count)
{
    int64_t before = 0, out = 0, all = 0;
    for (int i = 0; i < g->parts; i++) {
        before += i < first ? g->out[i] : 0;
        out += i >= first && i < first + count ? g->out[i] : 0;
        all += g->out[i];
    }
    nd_tensor dy = nd_tensor_2d(b->dy, ND_DTYPE_BF16, TOKENS, all);
    nd_tensor y = nd_tensor_2d(b->result, ND_DTYPE_BF16, TOKENS, all);
    part p = {
        .x = nd_tensor_2d(b->x, ND_DTYPE_BF16, TOKENS, g->in),
        .dy = nd_tensor_columns(dy, before, out),
        .y = nd_tensor_columns(y, before, out),
        .dx = nd_tensor_2d(b->result, ND_DTYPE_BF16, TOKENS, g->in),
        .w = nd_tensor_2d(b->w + before * g->in, ND_DTYPE_BF16, out, g->in),
        .dw = nd_tensor_2d(b->dw + before * g->in, ND_DTYPE_F32, out, g->in),
        .master = nd_tensor_1d(b->master + before * g->in, ND_DTYPE_F32, out * g->in),
        .x8 = fp8_of(b, 0, b->x8, ND_DTYPE_F8_E4M3, TOKENS, g->in),
        .w8 = fp8_of(b, 1 + first, b->w8 + before * g->in, ND_DTYPE_F8_E4M3, out, g->in),
        .dy8 = fp8_of(b, 1 + PARTS_MAX + first, b->dy8 + before * TOKENS, ND_DTYPE_F8_E5M2, TOKENS,
                      out),
    };
    leave_to_products(b, &p.dy8, p.dy);
    return p;
}

/* Finds the scale, and makes the codes unless products do. */
static nd_status cast(bench *b, nd_matrix out, nd_tensor x)
{
    float amax;
    ND_TRY(ND_CALL(b->ops, &b->stream, amax, .amax = &amax, .x = x, .granularity = ND_PER_TENSOR));
    ND_TRY(ND_CALL(b->ops, &b->stream, fp8_scale, .scale = out.scale, .inverse = out.inverse,
                   .amax = &amax, .count = 1, .format = out.format));
    if (!nd_dtype_is_fp8(out.stored.dtype)) {
        return ND_OK;
    }
    if (x.axes == 1) {
        out.stored = nd_tensor_1d(out.stored.data, out.format, x.shape[0]);
    }
    return ND_CALL(b->ops, &b->stream, make_form, .out = out, .x = x);
}

static nd_status run_part(bench *b, piece what, const part *p, float beta)
{
    const nd_ops *ops = b->ops;
    nd_stream *s = &b->stream;
    switch (what) {
    case BF16_Y:
        return ND_CALL(ops, s, product, .c = p->y, .a = nd_rows(p->x), .b = nd_rows(p->w),
                       .b_transposed = true);
    case BF16_DX:
        return ND_CALL(ops, s, product, .c = p->dx, .a = nd_rows(p->dy), .b = nd_rows(p->w));
    case BF16_DW:
        return ND_CALL(ops, s, product, .c = p->dw, .a = nd_rows(p->dy), .a_transposed = true,
                       .b = nd_rows(p->x), .beta = 1.0f);
    case CAST_X:
        return cast(b, p->x8, p->x);
    case CAST_DY:
        return cast(b, p->dy8, p->dy);
    case CAST_W:
        return cast(b, p->w8, p->master);
    case FP8_Y:
        return ND_CALL(ops, s, product, .c = p->y, .a = p->x8, .b = p->w8, .b_transposed = true,
                       .fast_accumulation = true, .scratch = b->scratch);
    case FP8_DX:
        return ND_CALL(ops, s, product, .c = p->dx, .a = p->dy8, .b = p->w8, .beta = beta,
                       .scratch = b->scratch);
    default:
        return ND_CALL(ops, s, product, .c = p->dw, .a = p->dy8, .a_transposed = true, .b = p->x8,
                       .beta = 1.0f, .scratch = b->scratch);
    }
}

/* BF16 takes the parts of a group at once; the input is cast once for all. FP8 takes them one by
 * one, also where a step joins them (linear_groups.c). */
static nd_status run_piece(bench *b, piece what, const group *g)
{
    bool whole = what <= BF16_DW;
    int count = whole || what == CAST_X ? 1 : g->parts;
    for (int i = 0; i < count; i++) {
        part p = part_of(b, g, i, whole ? g->parts : 1);
        ND_TRY(run_part(b, what, &p, i > 0 ? 1.0f : 0.0f));
    }
    return ND_OK;
}

static nd_status fill(nd_bf16 **out, int64_t count)
{
    ND_TRY(ND_ALLOC(count, out));
    for (int64_t i = 0; i < count; i++) {
        (*out)[i] = nd_bf16_from_f32(nd_rng_normal(1, 2, (uint64_t)(i & 0xffff)));
    }
    return ND_OK;
}

static double seconds_of(const bench *b)
{
    struct timespec t;
    clock_gettime(b->clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static nd_status measure(bench *b, const group *g, double best[PIECES])
{
    for (int p = 0; p < PIECES; p++) {
        best[p] = 1e9;
    }
    for (int repeat = 0; repeat <= b->repeats; repeat++) { /* the first creates primitives */
        for (int p = 0; p < PIECES; p++) {
            double begin = seconds_of(b);
            ND_TRY(run_piece(b, (piece)p, g));
            double seconds = seconds_of(b) - begin;
            best[p] = repeat > 0 && seconds < best[p] ? seconds : best[p];
        }
    }
    return ND_OK;
}

static double sum(const double *values, int first, int last)
{
    double total = 0.0;
    for (int i = first; i <= last; i++) {
        total += values[i];
    }
    return total;
}

static nd_status run(bench *b)
{
    double all[PIECES] = {0};
    printf("%-8s %9s %9s %6s", "linears", "bf16 ms", "fp8 ms", "ratio");
    for (int p = 0; p < PIECES; p++) {
        printf(" %8s", piece_names[p]);
    }
    printf("\n");
    for (size_t i = 0; i <= sizeof groups / sizeof *groups; i++) {
        double best[PIECES];
        bool last = i == sizeof groups / sizeof *groups;
        if (last) {
            memcpy(best, all, sizeof best);
        } else {
            ND_TRY(measure(b, &groups[i], best));
        }
        double bf16 = sum(best, BF16_Y, BF16_DW), fp8 = sum(best, CAST_X, FP8_DW);
        printf("%-8s %9.3f %9.3f %6.2f", last ? "all" : groups[i].name, bf16 * 1e3, fp8 * 1e3,
               fp8 / bf16);
        for (int p = 0; p < PIECES; p++) {
            printf(" %8.3f", best[p] * 1e3);
            all[p] += last ? 0.0 : best[p];
        }
        printf("\n");
    }
    double bf16 = sum(all, BF16_Y, BF16_DW), fp8 = sum(all, CAST_X, FP8_DW);
    printf("{\"bf16_seconds\": %.6f, \"fp8_seconds\": %.6f, \"ratio\": %.3f, \"threads\": %d, "
           "\"isa\": \"%s\", \"products\": \"%s\"}\n",
           bf16, fp8, fp8 / bf16, b->threads, nd_ops_machine(b->device),
           nd_ops_products(b->device));
    return ND_OK;
}

static nd_status prepare(bench *b)
{
    ND_TRY(nd_device_open_cpu(b->threads, &b->device));
    ND_TRY(nd_ops_cpu(b->device, &b->ops));
    ND_TRY(b->device->table->stream_init(b->device, &b->stream));
    ND_TRY(fill(&b->x, (int64_t)TOKENS * FFN));
    ND_TRY(fill(&b->dy, (int64_t)TOKENS * WIDEST));
    ND_TRY(fill(&b->w, (int64_t)WIDEST * FFN));
    ND_TRY(fill(&b->result, (int64_t)TOKENS * WIDEST));
    ND_TRY(ND_ALLOC((int64_t)TOKENS * FFN + ALIGNMENT, &b->x8));
    ND_TRY(ND_ALLOC((int64_t)TOKENS * WIDEST, &b->dy8));
    ND_TRY(ND_ALLOC((int64_t)WIDEST * FFN, &b->w8));
    ND_TRY(ND_ALLOC((int64_t)WIDEST * FFN, &b->dw));
    ND_TRY(ND_ALLOC((int64_t)WIDEST * FFN, &b->master));
    for (int64_t i = 0; i < (int64_t)WIDEST * FFN; i++) {
        b->master[i] = nd_bf16_to_f32(b->w[i]);
    }
    size_t bytes = b->ops->product_scratch(b->device, WIDEST, WIDEST, FFN, ND_DTYPE_BF16);
    return nd_device_alloc(b->device, bytes + 1, &b->scratch);
}

int main(int argc, char **argv)
{
    static bench b = {.threads = 2, .repeats = 9, .clock = CLOCK_MONOTONIC};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc && atoi(argv[i + 1]) > 0) {
            b.threads = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--repeats") == 0 && i + 1 < argc && atoi(argv[i + 1]) > 0) {
            b.repeats = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--cpu-time") == 0) {
            b.clock = CLOCK_THREAD_CPUTIME_ID;
            b.threads = 1;
        } else {
            fprintf(stderr, "usage: nd_bench_fp8 [--threads N] [--repeats N] [--cpu-time]\n");
            return ND_ERR_CONFIG;
        }
    }
    nd_status status = prepare(&b);
    status = status == ND_OK ? run(&b) : status;
    if (status != ND_OK) {
        fprintf(stderr, "nd_bench_fp8: %s\n", nd_error_last()->message);
    }
    return (int)status;
}
