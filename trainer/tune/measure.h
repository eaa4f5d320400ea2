// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TUNE_MEASURE_H
#define ND_TUNE_MEASURE_H
/*
 * The parts that the files of trainer/tune share: the bench that runs calls, the decision from
 * times, the measurement, and the record of a tuning as JSON (the value of "autotune" in run.json,
 * which other runs replay; docs/formats.md lists its keys).
 */
#include "trainer/dry/dry.h"
#include "trainer/tune/tune.h"

/* Runs calls of ops on the rank's device, on memory of its own, to time them and to let autotune
 * meet each form of product. Used before the run's memory is planned. */
typedef struct nd_bench {
    nd_rank *rank; /* borrowed */
    char *memory;
    size_t bytes;
    char *patterns; /* host: operands' values */
} nd_bench;

/* The memory for any one of these calls. */
size_t nd_bench_bytes(const nd_rank *rank, const nd_calls *calls);
/* Allocates it. */
nd_status nd_bench_open(nd_bench *bench, nd_rank *rank, const nd_calls *calls);
/* Enqueues the call once. */
nd_status nd_bench_run(nd_bench *bench, const nd_call *call);
/* nd_bench_run in two parts: the call may be enqueued any number of times on operands that are
 * filled once. */
nd_status nd_bench_fill(nd_bench *bench, const nd_call *call);
nd_status nd_bench_enqueue(nd_bench *bench, const nd_call *call);
/* The median time of a few calls. */
nd_status nd_bench_time(nd_bench *bench, const nd_call *call, double *seconds);
void nd_bench_close(nd_bench *bench); /* all zero is legal */

/*
 * The choice with the least time, seconds[choice]; negative or NaN: not known, and not taken. Times
 * differ by 2 % between runs, so `kept` stays unless another is faster by more than that, and where
 * its own time is not known. Of equal times the one nearest to `kept` is taken.
 */
int nd_decide(const double *seconds, int count, int kept);

/*
 * On one rank with a GPU: times for `budget` seconds at most and fills linears and choices; what
 * there was no time for stays as it was asked, or takes the library's first algorithm. Leaves the
 * device with its forms forgotten.
 */
nd_status nd_measure(nd_rank *rank, double budget, nd_tuning *tuning);

/*
 * The product that stands for those of a layer in one micro-batch, forward and backward: the form
 * with the greatest part of their arithmetic, as often as equals it all, with FP8 at twice the
 * rate of BF16. ND_ERR_INTERNAL: a layer has no products.
 */
nd_status nd_layer_product(const nd_rank *rank, nd_call *product, int64_t *times);

/*
 * Divides the GPU, on all ranks: over communicators of dp_shard_cp with 0, 4, 8, 16 and 32 blocks
 * it times a layer's all-gathers and reduce-scatter beside that product, which is laid out for
 * all multiprocessors but those, and for all. A pair's time is that of the slowest rank, by the
 * median of five, so all ranks choose alike. No pair is begun when `budget` seconds have passed on
 * some rank. Leaves communicators and products as they were, with the products' forms forgotten.
 */
nd_status nd_divide(nd_rank *rank, double budget, nd_tuned_division *out);
/* Lays out products as the division says, on this rank alone: before nd_ops_cuda_install. */
nd_status nd_divide_products(nd_rank *rank, const nd_tuned_division *division);
/* Makes the communicators that it says, on all ranks; nothing when they are there. */
nd_status nd_divide_collectives(nd_rank *rank, const nd_tuned_division *division);

/* Fills tuning->json. */
nd_status nd_record_write(nd_tuning *tuning, const nd_config *config, const nd_shape *shape);

/*
 * Reads {"autotune": {...}, ...}; other keys are ignored. `name` names the text in messages.
 * ND_ERR_DATA: not JSON, without a record, or damaged. ND_ERR_CONFIG, with the key and both values:
 * a record for another model, mesh or precision. The caller destroys *out.
 */
nd_status nd_record_read(const char *text, size_t bytes, const char *name, const nd_config *config,
                         const nd_shape *shape, nd_tuning **out);

#endif
