// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BENCH_OPS_H
#define ND_BENCH_OPS_H
/* The parts of nd_bench_ops (bench_ops.c has main and the products). Each prints a table for people
 * and, as its last line, the same as JSON. */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/device/device.h"
#include "tests/bench/measure.h"

enum { ND_BENCH_REPEATS_MAX = 101, ND_BENCH_HEAD_DIMS_MAX = 8 };

typedef struct nd_bench_options {
    double seconds;    /* of one repeat of a loop of --peak */
    int64_t threads;   /* 0: the part's own number */
    int64_t repeats;   /* at most ND_BENCH_REPEATS_MAX */
    int64_t mebibytes; /* of an array of --peak in all threads; 0: none, -1: by the last cache */
    int64_t sequence;  /* of --attention */
    int64_t window;    /* the same, the keys that a query sees; 0: all before it */
    int64_t documents; /* the same, the mean length of separate documents; 0: there is one */
    int64_t heads;     /* the same, of queries and of keys */
    int64_t head_dims[ND_BENCH_HEAD_DIMS_MAX];
    int head_dim_count;
    bool stand_in; /* instructions of AVX-512 in place of AMX's tiles */
} nd_bench_options;

/*
 * Measures the most that this CPU can do, on all threads at once: products of registers with
 * registers for each kind of product that the CPU has, up to what ND_CPU_ISA allows, and bytes a
 * second from memory and from the second cache. With `threads` 0 it uses all CPUs that the process
 * may use. Rates of products and of the second cache are per CPU time of the threads, so that other
 * programs do not count; those of memory are per time that passed.
 * ND_ERR_INTERNAL: a loop's result is wrong.
 */
nd_status nd_bench_peak(const nd_bench_options *options);

/*
 * Causal attention of one sequence in BF16, forward and backward, for each head size. Its work is
 * counted as is usual: two products of all scores that are seen forward, five backward.
 */
nd_status nd_bench_attention(const nd_bench_options *options);

/* The device's products and attention take as long as on tiles of AMX, as far as a CPU without them
 * can show it, and compute nothing (stand_in_loops.h). The device was opened with
 * ND_CPU_ISA=amx_emulated and has its CPU ops. ND_ERR_CONFIG: the CPU lacks AVX-512. */
nd_status nd_bench_use_stand_in(nd_device *device);

/* nd_ops_machine, or "amx_stand_in" after nd_bench_use_stand_in. */
const char *nd_bench_machine(const nd_device *device);
/* nd_ops_products, or after nd_bench_use_stand_in a text that says that nothing is computed. */
const char *nd_bench_products(const nd_device *device);

#endif
