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
/* The median of times, which it sorts. */
double nd_bench_median(double *times, int count);
/* The median time of a few calls. */
nd_status nd_bench_time(nd_bench *bench, const nd_call *call, double *seconds);
void nd_bench_close(nd_bench *bench); /* all zero is legal */

/* True where BF16 takes clearly less time: times differ by 2 % between runs. Negative or NaN: not
 * known, and FP8 stays. */
bool nd_fp8_is_slower(double fp8_seconds, double bf16_seconds);

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
