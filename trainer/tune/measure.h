// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TUNE_MEASURE_H
#define ND_TUNE_MEASURE_H
/*
 * The parts that the files of trainer/tune share: what runs calls, the decision from times, and
 * the record of a tuning as JSON (the value of "autotune" in run.json,
 * which other runs replay; docs/formats.md lists its keys).
 */
#include "trainer/dry/dry.h"
#include "trainer/tune/tune.h"

/* Times each call of a step, by the median of a few, on memory of its own that is used before the
 * run's is planned. A call that the deadline (nd_clock_seconds) leaves no time for has -1 seconds,
 * and sets *cut_short. */
nd_status nd_calls_time(nd_rank *rank, nd_calls *calls, double deadline, bool *cut_short);
/* Runs each form of product once, so that autotune meets it. */
nd_status nd_calls_run_products(nd_rank *rank, const nd_calls *calls);

/* True where BF16 takes clearly less time: times differ by 2 % between runs. Negative or NaN: not
 * known, and FP8 stays. */
bool nd_fp8_is_slower(double fp8_seconds, double bf16_seconds);

/* Seconds for timing. Meanwhile the other ranks wait in a collective, whose deadline must not pass:
 * timing takes a third of it. The rest is for what is not timed here, as the last call that the
 * budget lets begin, the choice of algorithms, and ranks that are slow to arrive. */
double nd_tuning_budget(int ranks, double timeout_seconds);

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
