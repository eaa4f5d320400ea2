// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/bench_ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/team.h"
#include "kernels/ops.h"
#include "runtime/base/clock.h"
#include "runtime/base/math.h"
#include "tests/bench/peak_loops.h"

/* Bytes that go to and from memory for each parameter: AdamW reads and writes the master weight and
 * both moments, reads the gradient and writes the weight in BF16; a triad reads two floats and
 * writes one. */
enum { ADAMW_BYTES = 3 * 2 * 4 + 4 + 2, TRIAD_BYTES = 3 * 4 };

typedef struct optimizer_bench {
    const nd_ops *ops;
    nd_stream stream;
    const nd_peak_passes *passes;
    nd_team *team;                /* of the triad: as many threads as the device has */
    float *master, *m, *v, *grad; /* (count) */
    nd_bf16 *weights;             /* (count) */
    int64_t count;
} optimizer_bench;

/* GB/s. */
typedef struct speed {
    double best, median;
} speed;

static nd_status adamw(optimizer_bench *b)
{
    const nd_flat_range range = {.end = b->count, .decay = true, .copy = b->weights};
    return ND_CALL(b->ops, &b->stream, adamw,
                   .hyper = {.lr = 1e-3f,
                             .beta1 = 0.9f,
                             .beta2 = 0.95f,
                             .eps = 1e-8f,
                             .weight_decay = 0.1f,
                             .bias1 = 0.1f,
                             .bias2 = 0.05f,
                             .grad_scale = 1.0f},
                   .p = b->master, .m = b->m, .v = b->v, .grad = b->grad, .ranges = &range,
                   .range_count = 1);
}

static void triad_part(void *arg, int64_t part)
{
    const optimizer_bench *b = arg;
    const int64_t n = b->count / nd_team_threads(b->team), at = part * n;
    b->passes->triad(b->m + at, b->v + at, b->grad + at, -0.5f, n);
}

static nd_status triad(optimizer_bench *b)
{
    nd_team_run(b->team, nd_team_threads(b->team), triad_part, b);
    return ND_OK;
}

static nd_status time_of(optimizer_bench *b, nd_status (*call)(optimizer_bench *), double *seconds)
{
    const double begin = nd_clock_seconds();
    ND_TRY(call(b));
    *seconds = nd_clock_seconds() - begin;
    return ND_OK;
}

static speed speed_of(double *seconds, int repeats, double bytes)
{
    const double median = nd_bench_median(seconds, repeats); /* sorts them */
    return (speed){bytes / seconds[0] * 1e-9, bytes / median * 1e-9};
}

/* Both in turns, so that they see the same machine. */
static nd_status measure(optimizer_bench *b, int repeats, speed *optimizer, speed *plain)
{
    double adamw_seconds[ND_BENCH_REPEATS_MAX], triad_seconds[ND_BENCH_REPEATS_MAX];
    ND_TRY(adamw(b)); /* touches the memory */
    for (int i = 0; i < repeats; i++) {
        ND_TRY(time_of(b, adamw, &adamw_seconds[i]));
        ND_TRY(time_of(b, triad, &triad_seconds[i]));
    }
    *optimizer = speed_of(adamw_seconds, repeats, (double)b->count * ADAMW_BYTES);
    *plain = speed_of(triad_seconds, repeats, (double)b->count * TRIAD_BYTES);
    return ND_OK;
}

static void fill(optimizer_bench *b)
{
    for (int64_t i = 0; i < b->count; i++) {
        b->master[i] = b->grad[i] = (float)(i % 255 - 127) / 256.0f;
        b->m[i] = b->v[i] = 0.0f;
    }
}

static nd_status allocate(optimizer_bench *b, const nd_bench_options *o)
{
    static const nd_peak_passes *const kinds[] = {&nd_peak_passes_baseline, &nd_peak_passes_avx2,
                                                  &nd_peak_passes_avx512, &nd_peak_passes_avx512};
    const int threads = b->stream.device->threads;
    const int64_t mebibytes = o->mebibytes >= 0 ? o->mebibytes : 128;
    const int64_t unit = (int64_t)threads * ND_PEAK_FLOATS;
    nd_cpu_isa isa;
    b->count = nd_max(unit, (mebibytes << 18) / unit * unit);
    ND_TRY(nd_cpu_isa_choose(&isa));
    b->passes = kinds[nd_cpu_isa_of_vectors(isa)];
    ND_TRY(nd_team_create(threads, &b->team));
    float **arrays[] = {&b->master, &b->m, &b->v, &b->grad};
    for (int i = 0; i < 4; i++) {
        *arrays[i] = aligned_alloc(64, (size_t)b->count * sizeof(float));
        if (!*arrays[i]) {
            return nd_fail_memory("the optimizer's arrays; give a smaller --mebibytes");
        }
    }
    ND_TRY(ND_ALLOC(b->count, &b->weights));
    fill(b);
    return ND_OK;
}

nd_status nd_bench_optimizer(const nd_bench_options *o)
{
    optimizer_bench b = {0};
    speed optimizer, plain;
    nd_device *device = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_device_open_cpu(o->threads ? o->threads : 2, &device));
    ND_TRY_OUT(nd_ops_cpu_start_threads(device, false));
    ND_TRY_OUT(nd_ops_cpu(device, &b.ops));
    ND_TRY_OUT(device->table->stream_init(device, &b.stream));
    ND_TRY_OUT(allocate(&b, o));
    ND_TRY_OUT(measure(&b, o->repeats, &optimizer, &plain));
    printf("%lld parameters, %d threads\n%-8s %12s %12s GB/s\n%-8s %12.1f %12.1f\n%-8s %12.1f "
           "%12.1f\n",
           (long long)b.count, device->threads, "", "best", "median", "adamw", optimizer.best,
           optimizer.median, "triad", plain.best, plain.median);
    printf("{\"parameters\": %lld, \"threads\": %d, \"isa\": \"%s\", \"adamw_gb_per_second\": "
           "%.4f, \"triad_gb_per_second\": %.4f, \"ratio\": %.4f}\n",
           (long long)b.count, device->threads, nd_ops_machine(device), optimizer.median,
           plain.median, optimizer.median / plain.median);
out:
    nd_team_destroy(b.team);
    nd_device_close(device);
    free(b.master);
    free(b.m);
    free(b.v);
    free(b.grad);
    free(b.weights);
    return status;
}
