// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/clock.h"
#include "trainer/tune/measure.h"

bool nd_fp8_is_slower(double fp8, double bf16)
{
    return bf16 >= 0.0 && bf16 < 0.98 * fp8; /* false for NaN */
}

typedef struct measurement {
    nd_rank *rank;
    double deadline;
    bool cut_short;
    unsigned asked[ND_INPUT_COUNT]; /* bit m: the filter asks for mask m in some layer */
    nd_calls bf16;                  /* calls of a step with all linears in BF16 */
    nd_calls steps[ND_INPUT_COUNT][ND_LINEAR_SETS]; /* the same with these of one input in FP8 */
    nd_calls all; /* all calls of all these steps, with their times */
} measurement;

static void close_measurement(measurement *m)
{
    nd_calls_free(&m->bf16);
    nd_calls_free(&m->all);
    for (int i = 0; i < ND_INPUT_COUNT * ND_LINEAR_SETS; i++) {
        nd_calls_free(&m->steps[i / ND_LINEAR_SETS][i % ND_LINEAR_SETS]);
    }
}

static nd_status find_asked(measurement *m)
{
    nd_filter filter;
    ND_TRY(nd_filter_init(&filter, m->rank->config, &m->rank->shape));
    for (int64_t i = 0; filter.reasons && i < filter.layers * ND_INPUT_COUNT; i++) {
        nd_input input = (nd_input)(i % ND_INPUT_COUNT);
        m->asked[input] |= 1u << nd_filter_mask(&filter, i / ND_INPUT_COUNT, input);
    }
    nd_filter_fini(&filter);
    return ND_OK;
}

/* Lists the calls of the steps whose times decide which linears run in FP8. */
static nd_status list_steps(measurement *m)
{
    nd_linear_choice choice = {.forced = true};
    ND_TRY(nd_dry_run(m->rank, &choice, &m->bf16));
    ND_TRY(nd_calls_add_all(&m->all, &m->bf16));
    for (nd_input input = 0; input < ND_INPUT_COUNT; input++) {
        for (int asked = 1; asked < ND_LINEAR_SETS; asked++) {
            if (m->asked[input] >> asked & 1) {
                choice.fp8[input][0] = (int8_t)asked;
                ND_TRY(nd_dry_run(m->rank, &choice, &m->steps[input][asked]));
                ND_TRY(nd_calls_add_all(&m->all, &m->steps[input][asked]));
            }
        }
        choice.fp8[input][0] = 0;
    }
    return ND_OK;
}

static nd_status time_all(measurement *m)
{
    nd_bench bench;
    nd_status status = ND_OK;
    ND_TRY(nd_bench_open(&bench, m->rank, &m->all));
    for (int i = 0; i < m->all.count && status == ND_OK; i++) {
        nd_call_entry *entry = &m->all.entries[i];
        entry->seconds = -1.0;
        if (entry->times > 0 && nd_clock_seconds() < m->deadline) {
            status = nd_bench_time(&bench, &entry->call, &entry->seconds);
        }
        m->cut_short |= entry->times > 0 && entry->seconds < 0.0;
    }
    nd_bench_close(&bench);
    return status;
}

/* The time of an input's linears in BF16 is that of the calls that FP8 replaces. The time in FP8
 * adds the difference between the two steps. */
static void decide_input(const measurement *m, nd_input input, int asked, nd_tuning *t)
{
    const nd_calls *step = &m->steps[input][asked];
    const double bf16 = nd_calls_difference(&m->all, &m->bf16, step, true);
    const double fp8 = bf16 + nd_calls_difference(&m->all, step, &m->bf16, false);
    const bool slower = nd_fp8_is_slower(fp8, bf16);
    t->linear_choice.fp8[input][asked] = (int8_t)(slower ? 0 : asked);
    t->linears[t->linear_count++] = (nd_tuned_linears){
        .input = input,
        .asked = asked,
        .fp8 = !slower,
        .fp8_seconds = fp8,
        .bf16_seconds = bf16,
    };
}

static nd_status decide(measurement *m, nd_tuning *t)
{
    memset(t->linear_choice.fp8, -1, sizeof t->linear_choice.fp8);
    if (m->rank->config->train.precision == ND_PRECISION_FP8) {
        ND_TRY(list_steps(m));
        ND_TRY(time_all(m));
    }
    for (nd_input input = 0; input < ND_INPUT_COUNT; input++) {
        t->linear_choice.fp8[input][0] = 0;
        for (int asked = 1; asked < ND_LINEAR_SETS; asked++) {
            if (m->asked[input] >> asked & 1) {
                decide_input(m, input, asked, t);
            }
        }
    }
    return ND_OK;
}

/* Runs each form of product of the decided step once, so that the library is tuned for it. */
static nd_status choose_algorithms(measurement *m, nd_tuning *t)
{
    nd_device *device = m->rank->device;
    nd_calls calls = {0};
    nd_bench bench = {0};
    nd_status status = ND_OK;
    nd_ops_cuda_tune(device, ND_LT_CANDIDATES, m->deadline - nd_clock_seconds());
    ND_TRY_OUT(nd_dry_run(m->rank, &t->linear_choice, &calls));
    ND_TRY_OUT(nd_bench_open(&bench, m->rank, &calls));
    for (int i = 0; i < calls.count; i++) {
        int32_t kind = calls.entries[i].call.kind;
        if (kind == ND_CALL_PRODUCT || kind == ND_CALL_PRODUCT_FP8) {
            ND_TRY_OUT(nd_bench_run(&bench, &calls.entries[i].call));
        }
    }
    ND_TRY_OUT(nd_stream_sync(&m->rank->stream));
    ND_TRY_OUT(ND_ALLOC(ND_LT_PLANS, &t->choices));
    t->choice_count = nd_ops_cuda_choices(device, t->choices);
    for (int i = 0; i < t->choice_count; i++) {
        m->cut_short |= t->choices[i].candidates == 0;
    }
out:
    nd_bench_close(&bench);
    nd_calls_free(&calls);
    return status;
}

nd_status nd_measure(nd_rank *rank, double budget, nd_tuning *t)
{
    double begin = nd_clock_seconds();
    measurement m = {.rank = rank, .deadline = begin + budget};
    nd_status status = ND_OK;
    nd_ops_cuda_tune(rank->device, ND_LT_CANDIDATES, budget);
    ND_TRY_OUT(find_asked(&m));
    ND_TRY_OUT(decide(&m, t));
    ND_TRY_OUT(choose_algorithms(&m, t));
    ND_TRY_OUT(nd_ops_cuda_install(rank->device, NULL, 0));
    t->cut_short = m.cut_short;
    t->seconds = nd_clock_seconds() - begin;
out:
    close_measurement(&m);
    return status;
}
