// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/bench_ops.h"

#include <cpuid.h>
#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "kernels/cpu/isa.h"
#include "kernels/ops.h"
#include "runtime/base/clock.h"
#include "tests/bench/peak_loops.h"

/* Does a thread's work `count` times; false: the result is wrong. */
typedef bool (*body)(void *arg, int thread, int64_t count);

typedef struct work {
    const char *name;
    body run;
    void *arg;
    bool shared; /* threads share what it needs: memory */
} work;

/* One thread's part of a repeat. */
typedef struct lap {
    double begin, end; /* of the clock */
    double cpu;        /* seconds that the thread had a CPU */
    double clock;      /* cycles a second, measured right after it */
    bool right;
} lap;

typedef struct team {
    int threads, cores; /* cores: how many the threads can use at once */
    int repeats;
    double seconds;
    lap *laps; /* (threads) */
} team;

/* Times a second over all threads. */
typedef struct rate {
    double best, median;
    double clock; /* cycles a second in the best repeat, mean over threads */
} rate;

/* clock */

enum { CHAIN = 1 << 17, CHAIN_STEP = 8, CHAIN_TRIES = 3 };

/* Cycles a second from additions that wait for each other, a cycle each. Both operands are
 * registers: some CPUs add constants without a cycle. */
static double measure_clock(void)
{
    double best = 0.0;
    for (int t = 0; t < CHAIN_TRIES; t++) {
        int64_t sum = 0, one = 1;
        const double begin = nd_clock_seconds();
        for (int i = 0; i < CHAIN; i += CHAIN_STEP) {
            __asm__ volatile("add %1, %0\n\tadd %1, %0\n\tadd %1, %0\n\tadd %1, %0\n\t"
                             "add %1, %0\n\tadd %1, %0\n\tadd %1, %0\n\tadd %1, %0"
                             : "+r"(sum)
                             : "r"(one)
                             : "cc");
        }
        const double clock = (double)sum / (nd_clock_seconds() - begin);
        best = clock > best ? clock : best;
    }
    return best;
}

/* The cores among the CPUs that the process may use: two threads of a core share its units. */
static int count_cores(void)
{
    cpu_set_t allowed, seen;
    int cores = 0;
    CPU_ZERO(&seen);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        return 1;
    }
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        char path[96];
        int first = cpu;
        if (!CPU_ISSET(cpu, &allowed)) {
            continue;
        }
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
                 cpu);
        FILE *file = fopen(path, "r");
        if (file) {
            first =
                fscanf(file, "%d", &first) == 1 && first >= 0 && first < CPU_SETSIZE ? first : cpu;
            fclose(file);
        }
        cores += !CPU_ISSET(first, &seen);
        CPU_SET(first, &seen);
    }
    return cores > 0 ? cores : 1;
}

/* time */

static nd_status run_once(const team *t, const work *w, int64_t count)
{
    bool right = true;
#pragma omp parallel num_threads(t->threads)
    {
        lap *own = &t->laps[omp_get_thread_num()];
#pragma omp barrier
        own->begin = nd_clock_seconds();
        const double cpu = nd_bench_cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
        own->right = w->run(w->arg, omp_get_thread_num(), count);
        own->cpu = nd_bench_cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - cpu;
        own->end = nd_clock_seconds();
        own->clock = measure_clock();
    }
    for (int i = 0; i < t->threads; i++) {
        right = right && t->laps[i].right;
    }
    return right
               ? ND_OK
               : nd_fail(ND_ERR_INTERNAL, "the loop of %s has a wrong result on this CPU", w->name);
}

/* Seconds from the start of the first thread to the end of the last one. */
static double seconds_of(const team *t)
{
    double begin = INFINITY, end = 0.0;
    for (int i = 0; i < t->threads; i++) {
        begin = t->laps[i].begin < begin ? t->laps[i].begin : begin;
        end = t->laps[i].end > end ? t->laps[i].end : end;
    }
    return end - begin;
}

/* Times a second, of all threads. Work that a thread does by itself is divided by the CPU time of
 * the thread, so that other programs do not count; work on what threads share, by the time that
 * passed. */
static double rate_of(const team *t, const work *w, int64_t count)
{
    double sum = 0.0;
    for (int i = 0; i < t->threads; i++) {
        sum += (double)count / t->laps[i].cpu;
    }
    return w->shared ? (double)count * t->threads / seconds_of(t) : sum;
}

static double mean_clock(const team *t)
{
    double sum = 0.0;
    for (int i = 0; i < t->threads; i++) {
        sum += t->laps[i].clock;
    }
    return sum / t->threads;
}

static nd_status measure(const team *t, const work *w, rate *out)
{
    double rates[ND_BENCH_REPEATS_MAX];
    int64_t count = 1;
    ND_TRY(run_once(t, w, count));
    while (seconds_of(t) < t->seconds / 4.0) {
        count *= 2;
        ND_TRY(run_once(t, w, count));
    }
    count = (int64_t)fmax(1.0, rate_of(t, w, count) / t->threads * t->seconds);
    *out = (rate){0};
    for (int i = 0; i < t->repeats; i++) {
        ND_TRY(run_once(t, w, count));
        rates[i] = rate_of(t, w, count);
        if (rates[i] > out->best) {
            out->best = rates[i];
            out->clock = mean_clock(t);
        }
    }
    out->median = nd_bench_median(rates, t->repeats);
    return ND_OK;
}

/* products */

typedef struct products {
    const char *operands; /* "bf16", "f32" */
    const nd_peak_products *loop;
    rate flops;     /* FLOP/s */
    double allowed; /* FLOP/s by the instruction tables at the clock of the best repeat; 0: they
                       say nothing of this loop */
} products;

enum { PRODUCTS_MAX = 3 };

static bool multiply(void *arg, int thread, int64_t count)
{
    const nd_peak_products *loop = arg;
    bool right = true;
    for (; count > 0; count -= ND_PEAK_STEPS_MOST) {
        right = loop->run(count < ND_PEAK_STEPS_MOST ? count : ND_PEAK_STEPS_MOST) && right;
    }
    return right;
}

/* The kinds of product that the CPU has, the fastest one for BF16 first. */
static int list_products(nd_cpu_isa isa, products list[PRODUCTS_MAX])
{
    static const nd_peak_products *const f32[] = {&nd_peak_f32_baseline, &nd_peak_f32_avx2,
                                                  &nd_peak_f32_avx512, &nd_peak_f32_avx512};
    const nd_cpu_isa vectors = nd_cpu_isa_of_vectors(isa);
    int count = 0;
    if (isa == ND_CPU_ISA_AMX) {
        list[count++] = (products){"bf16", &nd_peak_bf16_amx};
    } else if (isa == ND_CPU_ISA_AMX_EMULATED) {
        list[count++] = (products){"bf16", &nd_peak_bf16_amx_emulated};
    }
    if (vectors == ND_CPU_ISA_AVX512_BF16) {
        list[count++] = (products){"bf16", &nd_peak_bf16_avx512_bf16};
    }
    list[count++] = (products){"f32", f32[vectors]};
    return count;
}

/* Family 25 of AMD: Zen 4, or Zen 3, which has no vectors of 512 bits. */
static bool is_zen4(void)
{
    unsigned most, eax, ebx, ecx, edx;
    if (!__get_cpuid(0, &most, &ebx, &ecx, &edx) || ebx != signature_AMD_ebx ||
        !__get_cpuid(1, &eax, &ebx, &ecx, &edx)) {
        return false;
    }
    return (eax >> 8 & 15) + (eax >> 20 & 255) == 25;
}

static nd_status measure_products(const team *t, products *p)
{
    const nd_peak_products *loop = p->loop;
    const double cycle_flops = is_zen4() ? loop->cycle_flops_zen4 : loop->cycle_flops;
    const work w = {loop->instruction, multiply, (void *)loop};
    ND_TRY(measure(t, &w, &p->flops));
    p->flops.best *= loop->step_flops;
    p->flops.median *= loop->step_flops;
    p->allowed = cycle_flops * p->flops.clock * t->cores;
    return ND_OK;
}

/* memory */

typedef struct arrays {
    const nd_peak_passes *passes;
    float *a, *b, *c; /* (threads, n) each */
    int64_t n;        /* of one thread; a multiple of ND_PEAK_FLOATS */
    int64_t cached;   /* the first floats of a thread's b that its second cache holds */
    int64_t reads;    /* how many of them a pass that reads takes: n or cached */
} arrays;

static bool fill(void *arg, int thread, int64_t count)
{
    const arrays *m = arg;
    for (int64_t i = thread * m->n; i < (thread + 1) * m->n; i++) {
        m->a[i] = 0.0f;
        m->b[i] = m->c[i] = 1.0f;
    }
    return true;
}

static bool reading(void *arg, int thread, int64_t count)
{
    const arrays *m = arg;
    bool right = true;
    for (; count > 0; count--) {
        right = m->passes->read(m->b + thread * m->n, m->reads) == (double)m->reads && right;
    }
    return right;
}

static bool copy(void *arg, int thread, int64_t count)
{
    const arrays *m = arg;
    const int64_t at = thread * m->n;
    for (; count > 0; count--) {
        m->passes->copy(m->a + at, m->b + at, m->n);
    }
    return m->a[at] == 1.0f && m->a[at + m->n - 1] == 1.0f;
}

static bool triad(void *arg, int thread, int64_t count)
{
    const arrays *m = arg;
    const int64_t at = thread * m->n;
    for (; count > 0; count--) {
        m->passes->triad(m->a + at, m->b + at, m->c + at, -0.5f, m->n);
    }
    return m->a[at] == 0.5f && m->a[at + m->n - 1] == 0.5f;
}

/* A pass that moves `moved` arrays; its rate in bytes a second. */
typedef struct pass {
    const char *name;
    body run;
    int moved;
    bool cached;
    rate bytes;
} pass;

static nd_status measure_passes(const team *t, arrays *m, pass *list, int count)
{
    const work first = {"fill", fill, m};
    ND_TRY(run_once(t, &first, 1)); /* each page is touched by the thread that will use it */
    for (int i = 0; i < count; i++) {
        pass *p = &list[i];
        m->reads = p->cached ? m->cached : m->n;
        const double bytes = (double)(m->reads * p->moved) * sizeof(float);
        const work w = {p->name, p->run, m, .shared = !p->cached};
        ND_TRY(measure(t, &w, &p->bytes));
        p->bytes.best *= bytes;
        p->bytes.median *= bytes;
    }
    return ND_OK;
}

/* Floats of a multiple of ND_PEAK_FLOATS, at least one. */
static int64_t whole_floats(int64_t bytes)
{
    const int64_t pieces = bytes / (int64_t)(ND_PEAK_FLOATS * sizeof(float));
    return (pieces > 0 ? pieces : 1) * ND_PEAK_FLOATS;
}

/* Arrays of four times the last cache, so that next to nothing of them is in it; half of the second
 * cache, so that the rest of what a core does fits beside it. */
static void choose_sizes(arrays *m, int threads, int64_t mebibytes)
{
    const int64_t least = 64, most = 1024, second = 1 << 20; /* where the caches are not known */
    const int64_t l2 = sysconf(_SC_LEVEL2_CACHE_SIZE), l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (mebibytes < 0) {
        mebibytes = 4 * (l3 >> 20);
        mebibytes = mebibytes < least ? least : mebibytes > most ? most : mebibytes;
    }
    m->n = whole_floats((mebibytes << 20) / threads);
    m->cached = whole_floats((l2 > 0 ? l2 : second) / 2);
    m->cached = m->cached < m->n ? m->cached : m->n;
}

/* report */

/* Returns the share of the rate that instruction tables allow; 0 where they say nothing. */
static double share_of(const products *p)
{
    return p->allowed > 0.0 ? p->flops.best / p->allowed : 0.0;
}

static void print_tables(const team *t, const products *p, int products_count, const arrays *m,
                         const pass *passes, int pass_count)
{
    printf("%d threads on %d cores\n%-26s %12s %12s %8s %12s\n", t->threads, t->cores, "GFLOP/s",
           "best", "median", "GHz", "of allowed");
    for (int i = 0; i < products_count; i++) {
        char share[16] = "-";
        if (p[i].allowed > 0.0) {
            snprintf(share, sizeof share, "%.1f%%", 100.0 * share_of(&p[i]));
        }
        printf("%-4s %-21s %12.1f %12.1f %8.2f %12s\n", p[i].operands, p[i].loop->instruction,
               p[i].flops.best * 1e-9, p[i].flops.median * 1e-9, p[i].flops.clock * 1e-9, share);
    }
    printf(
        "of allowed: share of what instruction tables give at the clock in the column GHz, which a "
        "chain of additions shows\n");
    if (pass_count == 0) {
        return;
    }
    printf("%-26s %12s %12s\n", "GB/s", "best", "median");
    for (int i = 0; i < pass_count; i++) {
        printf("%-26s %12.1f %12.1f\n", passes[i].name, passes[i].bytes.best * 1e-9,
               passes[i].bytes.median * 1e-9);
    }
    printf("memory: arrays of %.0f MiB; second cache: %.0f KiB a thread\n",
           (double)m->n * t->threads * sizeof(float) / 0x1p20,
           (double)m->cached * sizeof(float) / 0x1p10);
}

static void print_json(const team *t, nd_cpu_isa isa, const products *p, int products_count,
                       const pass *passes, int pass_count)
{
    const products *best = &p[0], *f32 = &p[products_count - 1];
    for (int i = 1; i < products_count; i++) {
        best = p[i].flops.best > best->flops.best ? &p[i] : best;
    }
    printf("{\"peak\": %.4f, \"instruction\": \"%s\", \"f32\": %.4f, \"isa\": \"%s\", "
           "\"threads\": %d, \"cores\": %d, \"products\": [",
           best->flops.best * 1e-9, best->loop->instruction, f32->flops.best * 1e-9,
           nd_cpu_isa_name(isa), t->threads, t->cores);
    for (int i = 0; i < products_count; i++) {
        char allowed[32] = "null";
        if (p[i].allowed > 0.0) {
            snprintf(allowed, sizeof allowed, "%.4f", p[i].allowed * 1e-9);
        }
        printf("%s{\"operands\": \"%s\", \"instruction\": \"%s\", \"gflops\": %.4f, "
               "\"median_gflops\": %.4f, \"ghz\": %.4f, \"allowed_gflops\": %s, \"share\": %.6f}",
               i ? ", " : "", p[i].operands, p[i].loop->instruction, p[i].flops.best * 1e-9,
               p[i].flops.median * 1e-9, p[i].flops.clock * 1e-9, allowed, share_of(&p[i]));
    }
    printf("], \"gb_per_second\": {");
    for (int i = 0; i < pass_count; i++) {
        printf("%s\"%s\": {\"best\": %.4f, \"median\": %.4f}", i ? ", " : "", passes[i].name,
               passes[i].bytes.best * 1e-9, passes[i].bytes.median * 1e-9);
    }
    printf("}}\n");
}

/* Allocates the arrays, measures, frees them. */
static nd_status measure_memory(const team *t, nd_device *device, arrays *m, pass *list, int count)
{
    const size_t bytes = (size_t)m->n * (size_t)t->threads * sizeof(float);
    void *memory = NULL;
    if (nd_device_alloc(device, 3 * bytes, &memory) != ND_OK) {
        return nd_fail(ND_ERR_RESOURCE,
                       "three arrays of %.0f MiB have no room in this host's memory; give a "
                       "smaller --mebibytes",
                       (double)bytes / 0x1p20);
    }
    m->a = memory;
    m->b = m->a + m->n * t->threads;
    m->c = m->b + m->n * t->threads;
    nd_status status = measure_passes(t, m, list, count);
    nd_device_free(device, memory, 3 * bytes);
    return status;
}

static nd_status run(team *t, nd_device *device, int64_t mebibytes)
{
    static const nd_peak_passes *const kinds[] = {&nd_peak_passes_baseline, &nd_peak_passes_avx2,
                                                  &nd_peak_passes_avx512, &nd_peak_passes_avx512};
    pass passes[] = {{"memory read", reading, 1},
                     {"memory copy", copy, 2},
                     {"memory triad", triad, 3},
                     {"second cache read", reading, 1, .cached = true}};
    const int pass_count = mebibytes == 0 ? 0 : (int)(sizeof passes / sizeof *passes);
    nd_cpu_isa isa;
    products list[PRODUCTS_MAX];
    arrays m = {0};
    ND_TRY(nd_cpu_isa_choose(&isa));
    const int count = list_products(isa, list);
    for (int i = 0; i < count; i++) {
        ND_TRY(measure_products(t, &list[i]));
    }
    if (pass_count > 0) {
        m.passes = kinds[nd_cpu_isa_of_vectors(isa)];
        choose_sizes(&m, t->threads, mebibytes);
        ND_TRY(measure_memory(t, device, &m, passes, pass_count));
    }
    print_tables(t, list, count, &m, passes, pass_count);
    print_json(t, isa, list, count, passes, pass_count);
    return ND_OK;
}

nd_status nd_bench_peak(const nd_bench_options *options)
{
    cpu_set_t allowed;
    const int cpus = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
    const int cores = count_cores();
    team t = {.threads = options->threads ? (int)options->threads : cpus,
              .repeats = (int)options->repeats,
              .seconds = options->seconds};
    nd_device *device = NULL;
    nd_status status = ND_OK;
    if (t.threads > cpus) {
        return nd_fail(ND_ERR_CONFIG,
                       "--threads is %d, but this process may use %d CPUs, and the peak is the sum "
                       "of what each thread reaches with a CPU of its own; give --threads at most "
                       "%d",
                       t.threads, cpus, cpus);
    }
    t.cores = t.threads < cores ? t.threads : cores;
    ND_TRY_OUT(ND_ALLOC(t.threads, &t.laps));
    ND_TRY_OUT(nd_device_open_cpu(t.threads, &device));
    ND_TRY_OUT(nd_ops_cpu_start_threads(device, false));
    omp_set_dynamic(0); /* all of them, or laps would be missing */
    ND_TRY_OUT(run(&t, device, options->mebibytes));
out:
    nd_device_close(device);
    free(t.laps);
    return status;
}
