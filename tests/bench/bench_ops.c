// SPDX-License-Identifier: Apache-2.0
/* nd_bench_ops: see `usage`. Its parts are in bench_ops.h. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/ops.h"
#include "runtime/base/clock.h"
#include "runtime/base/rng.h"
#include "tests/bench/bench_ops.h"
#include "trainer/worker/worker.h"

static const char usage[] =
    "How fast the CPU backend is on this machine, and what the machine can do at most. One of:\n"
    "  nd_bench_ops              GFLOP/s of each product of a training step: forward, input\n"
    "                            gradient, weight gradient\n"
    "  nd_bench_ops --ceiling    only the products of one step, the head as plain products; the\n"
    "                            last line is JSON with tokens_per_second: what a step could\n"
    "                            reach if everything else were free\n"
    "  nd_bench_ops --peak       what the CPU allows: GFLOP/s of loops in registers, GB/s of\n"
    "                            memory\n"
    "  nd_bench_ops --attention  milliseconds and GFLOP/s of causal attention\n"
    "All: --threads N (2; --peak: all CPUs, and no more), --repeats N (5).\n"
    "The first two give the median of the repeats, the others the best and the median. The\n"
    "peak is the best, and attention's GFLOP/s are those of its best time.\n"
    "The products are those of configs/bench/llama-56m.json at 1,024 tokens. The size in a row\n"
    "is tokens x outputs x inputs of the weight, in all three directions.\n"
    "--peak: --seconds X (0.2) of one repeat of a loop, --mebibytes N of an array in memory\n"
    "(four times the last cache, 64 to 1,024; 0 leaves memory out). Its loops in registers and\n"
    "its reads of the second cache count the CPU time of their threads; its passes over memory\n"
    "and all other measurements count the clock. On a busy machine shares of the peak are\n"
    "therefore too small.\n"
    "--attention: --sequence N (8192), --heads N (2), --head-dim N, which may be given several\n"
    "times (64 and 128), --window N, the keys that a query sees (all before it), --documents N,\n"
    "separate documents of log-normal lengths with this mean (one document). Its FLOPs are those\n"
    "of the scores that are seen, two products forward and five backward.\n"
    "--stand-in: the first two and --attention as for AMX, with AVX-512 instructions in place\n"
    "of the tile instructions: nothing is computed, and the figures are no speeds of this CPU.\n"
    "They show what packing, softmax and results cost beside products on tiles, of which a core\n"
    "makes at most 1,024 FLOP a cycle. The option sets ND_CPU_ISA=amx_emulated in place of any\n"
    "other.\n"
    "GOMP_SPINCOUNT is 2000, as in a worker, unless it or OMP_WAIT_POLICY is set;\n"
    "OMP_PROC_BIND, OMP_PLACES and GOMP_CPU_AFFINITY have no effect.\n";

enum {
    TOKENS = 1024,
    HIDDEN = 512,
    FFN = 1408,
    LAYERS = 8,
    QKV = 1024,
    VOCAB = 32000,
    HEAD_TILE = 1024
};

/* One weight matrix (out, in) and how often a step uses it. The tile is that by which the head goes
 * through the vocabulary (trainer/layout/dims.c). */
typedef struct product {
    const char *name;
    int64_t out, in;
    int uses;
} product;

static const product products[] = {
    {"q k v", QKV, HIDDEN, LAYERS},       {"o", HIDDEN, HIDDEN, LAYERS},
    {"gate up", 2 * FFN, HIDDEN, LAYERS}, {"down", HIDDEN, FFN, LAYERS},
    {"head", VOCAB, HIDDEN, 1},           {"head tile", HEAD_TILE, HIDDEN, 0},
};

typedef struct bench {
    const nd_ops *ops;
    nd_stream stream;
    int repeats;
    nd_bf16 *x, *y, *w; /* (TOKENS, in), (TOKENS, out), (out, in) */
    float *dw;          /* (out, in) */
} bench;

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
        return ND_CALL(b->ops, s, product, .c = y, .a = nd_rows(x), .b = nd_rows(w),
                       .b_transposed = true);
    case 1:
        return ND_CALL(b->ops, s, product, .c = x, .a = nd_rows(y), .b = nd_rows(w));
    default:
        return ND_CALL(b->ops, s, product, .c = dw, .a = nd_rows(y), .a_transposed = true,
                       .b = nd_rows(x), .beta = 1.0f);
    }
}

/* Median seconds of one product. */
static nd_status measure(const bench *b, const product *p, int kind, double *seconds)
{
    double times[ND_BENCH_REPEATS_MAX];
    ND_TRY(run_once(b, p, kind)); /* creates the primitive, touches the memory */
    for (int i = 0; i < b->repeats; i++) {
        double begin = nd_clock_seconds();
        ND_TRY(run_once(b, p, kind));
        times[i] = nd_clock_seconds() - begin;
    }
    *seconds = nd_bench_median(times, b->repeats);
    return ND_OK;
}

static nd_status run(const bench *b, bool ceiling)
{
    static const char *const kinds[] = {"forward", "input gradient", "weight gradient"};
    double step = 0.0, flops = 0.0;
    printf("%d threads\n", b->stream.device->threads);
    if (!ceiling) {
        printf("%-9s %-16s tokens x outputs x inputs\n", "weight", "product");
    }
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) {
        const product *p = &products[i];
        for (int kind = 0; kind < 3; kind++) {
            double seconds, work = 2.0 * TOKENS * (double)p->out * (double)p->in;
            ND_TRY(measure(b, p, kind, &seconds));
            step += seconds * p->uses;
            flops += work * p->uses;
            if (!ceiling) {
                printf("%-9s %-16s %6d x %7ld x %6ld  %8.3f ms  %8.1f GFLOP/s\n", p->name,
                       kinds[kind], TOKENS, (long)p->out, (long)p->in, seconds * 1e3,
                       work / seconds * 1e-9);
            }
        }
    }
    printf("{\"tokens_per_second\": %.1f, \"step_seconds\": %.5f, \"gflops\": %.1f, \"isa\": "
           "\"%s\", \"products\": \"%s\"}\n",
           TOKENS / step, step, flops / step * 1e-9, nd_bench_machine(b->stream.device),
           nd_bench_products(b->stream.device));
    return ND_OK;
}

static nd_status prepare(bench *b, const nd_bench_options *o, nd_device **device)
{
    ND_TRY(nd_device_open_cpu(o->threads ? (int)o->threads : 2, device));
    ND_TRY(nd_ops_cpu_start_threads(*device, false));
    ND_TRY(nd_ops_cpu(*device, &b->ops));
    if (o->stand_in) {
        ND_TRY(nd_bench_use_stand_in(*device));
    }
    ND_TRY((*device)->table->stream_init(*device, &b->stream));
    ND_TRY(fill(&b->x, (int64_t)TOKENS * VOCAB));
    ND_TRY(fill(&b->y, (int64_t)TOKENS * VOCAB));
    ND_TRY(fill(&b->w, (int64_t)VOCAB * HIDDEN));
    return ND_ALLOC((int64_t)VOCAB * HIDDEN, &b->dw);
}

typedef enum part { PART_PRODUCTS, PART_CEILING, PART_PEAK, PART_ATTENTION, PARTS, PART_HELP } part;

static nd_status run_products(const nd_bench_options *options, part chosen)
{
    bench b = {.repeats = (int)options->repeats};
    nd_device *device = NULL;
    nd_status status = prepare(&b, options, &device);
    status = status == ND_OK ? run(&b, chosen == PART_CEILING) : status;
    nd_device_close(device);
    free(b.x);
    free(b.y);
    free(b.w);
    free(b.dw);
    return status;
}

static const char *const part_names[PARTS] = {[PART_PRODUCTS] = "products",
                                              [PART_CEILING] = "--ceiling",
                                              [PART_PEAK] = "--peak",
                                              [PART_ATTENTION] = "--attention"};

/* The options that only some parts have: a bit for each part. */
static const struct limited {
    const char *option, *words;
    unsigned parts;
} limited[] = {
    {"--stand-in", "products, --ceiling and --attention",
     1u << PART_PRODUCTS | 1u << PART_CEILING | 1u << PART_ATTENTION},
    {"--seconds", "--peak", 1u << PART_PEAK},
    {"--mebibytes", "--peak", 1u << PART_PEAK},
    {"--sequence", "--attention", 1u << PART_ATTENTION},
    {"--heads", "--attention", 1u << PART_ATTENTION},
    {"--head-dim", "--attention", 1u << PART_ATTENTION},
    {"--window", "--attention", 1u << PART_ATTENTION},
    {"--documents", "--attention", 1u << PART_ATTENTION},
};

/* An argument that is none of these options is let through. */
static nd_status check_option(const char *argument, part chosen)
{
    for (size_t i = 0; i < sizeof limited / sizeof *limited; i++) {
        const struct limited *l = &limited[i];
        if (strcmp(argument, l->option) == 0 && !(l->parts >> chosen & 1)) {
            return nd_fail(ND_ERR_CONFIG,
                           "%s goes with %s, not with %s; leave it out or choose another "
                           "measurement",
                           l->option, l->words, part_names[chosen]);
        }
    }
    return ND_OK;
}

/* A whole number. */
static nd_status read_count(const char *option, const char *text, int64_t least, int64_t most,
                            int64_t *out)
{
    char *end = NULL;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < least || value > most) {
        return nd_fail(ND_ERR_CONFIG, "%s is \"%s\"; give it a whole number from %lld to %lld",
                       option, text, (long long)least, (long long)most);
    }
    *out = value;
    return ND_OK;
}

static nd_status read_seconds(const char *text, double *out)
{
    char *end = NULL;
    const double value = strtod(text, &end);
    if (end == text || *end != '\0' || !(value > 0.0 && value <= 60.0)) {
        return nd_fail(ND_ERR_CONFIG, "--seconds is \"%s\"; give it a number above 0 and up to 60",
                       text);
    }
    *out = value;
    return ND_OK;
}

/* An option with its value. */
static nd_status read_option(const char *option, const char *text, nd_bench_options *o)
{
    const struct {
        const char *option;
        int64_t least, most, *count;
    } counts[] = {
        {"--threads", 1, 4096, &o->threads},
        {"--repeats", 1, ND_BENCH_REPEATS_MAX, &o->repeats},
        {"--mebibytes", 0, 1 << 20, &o->mebibytes},
        {"--sequence", 1, 1 << 20, &o->sequence},
        {"--heads", 1, 1024, &o->heads},
        {"--window", 1, 1 << 20, &o->window},
        {"--documents", 1, 1 << 20, &o->documents},
    };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        if (strcmp(option, counts[i].option) == 0) {
            return read_count(option, text, counts[i].least, counts[i].most, counts[i].count);
        }
    }
    if (strcmp(option, "--seconds") == 0) {
        return read_seconds(text, &o->seconds);
    }
    if (strcmp(option, "--head-dim") != 0) {
        return nd_fail(
            ND_ERR_CONFIG,
            "there is no option %s; there are --ceiling, --peak, --attention, --stand-in, "
            "--threads, --repeats, --seconds, --mebibytes, --sequence, --heads, --head-dim, "
            "--window, --documents and --help",
            option);
    }
    if (o->head_dim_count == ND_BENCH_HEAD_DIMS_MAX) {
        return nd_fail(ND_ERR_CONFIG, "--head-dim is given more than %d times; give fewer",
                       ND_BENCH_HEAD_DIMS_MAX);
    }
    return read_count(option, text, 1, 4096, &o->head_dims[o->head_dim_count++]);
}

static nd_status read_arguments(int argc, char **argv, nd_bench_options *o, part *chosen)
{
    for (int i = 1; i < argc; i++) {
        int p = PART_PRODUCTS + 1;
        while (p < PARTS && strcmp(argv[i], part_names[p]) != 0) {
            p++;
        }
        if (p < PARTS && *chosen != PART_PRODUCTS && *chosen != (part)p) {
            return nd_fail(ND_ERR_CONFIG, "%s and %s are two measurements; give one of them",
                           part_names[*chosen], part_names[p]);
        }
        if (p < PARTS) {
            *chosen = (part)p;
            continue;
        }
        if (strcmp(argv[i], "--help") == 0) {
            *chosen = PART_HELP;
            return ND_OK;
        }
        if (strcmp(argv[i], "--stand-in") == 0) {
            setenv("ND_CPU_ISA", "amx_emulated", 1);
            o->stand_in = true;
            continue;
        }
        ND_TRY(read_option(argv[i], i + 1 < argc ? argv[i + 1] : "", o));
        i++;
    }
    for (int i = 1; i < argc; i++) {
        ND_TRY(check_option(argv[i], *chosen));
    }
    if (o->head_dim_count == 0) {
        o->head_dims[o->head_dim_count++] = 64;
        o->head_dims[o->head_dim_count++] = 128;
    }
    return ND_OK;
}

static nd_status run_part(const nd_bench_options *o, part p)
{
    if (o->stand_in) {
        printf("stand-in for AMX: nothing is computed; these are no speeds of this CPU\n");
    }
    switch (p) {
    case PART_HELP:
        fputs(usage, stdout);
        return ND_OK;
    case PART_PEAK:
        return nd_bench_peak(o);
    case PART_ATTENTION:
        return nd_bench_attention(o);
    default:
        return run_products(o, p);
    }
}

int main(int argc, char **argv)
{
    nd_bench_options options = {
        .repeats = 5, .seconds = 0.2, .mebibytes = -1, .sequence = 8192, .heads = 2};
    part p = PART_PRODUCTS;
    nd_process_shorten_spin(argv, false); /* as in the workers whose speed this is */
    nd_status status = read_arguments(argc, argv, &options, &p);
    status = status == ND_OK ? run_part(&options, p) : status;
    if (status != ND_OK) {
        fprintf(stderr, "nd_bench_ops: %s\n", nd_error_last()->message);
    }
    return (int)status;
}
