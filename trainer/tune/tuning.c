// SPDX-License-Identifier: Apache-2.0
/* Rank 0 makes the choices, and all ranks take the same ones. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/tune/measure.h"
#include "trainer/weights/weights.h"

bool nd_fp8_is_slower(double fp8, double bf16)
{
    return bf16 >= 0.0 && bf16 < 0.98 * fp8; /* false for NaN */
}

double nd_tuning_budget(int ranks, double timeout_seconds)
{
    const double most = 60.0;
    return ranks == 1 ? most : fmin(most, timeout_seconds / 3.0);
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
        ND_TRY(nd_calls_time(m->rank, &m->all, m->deadline, &m->cut_short));
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
    nd_status status = ND_OK;
    m->rank->ops->tuner->tune(device, ND_LT_CANDIDATES, m->deadline - nd_clock_seconds());
    ND_TRY_OUT(nd_dry_run(m->rank, &t->linear_choice, &calls));
    ND_TRY_OUT(nd_calls_run_products(m->rank, &calls));
    ND_TRY_OUT(ND_ALLOC(ND_LT_PLANS, &t->choices));
    t->choice_count = m->rank->ops->tuner->choices(device, t->choices);
    for (int i = 0; i < t->choice_count; i++) {
        m->cut_short |= t->choices[i].candidates == 0;
    }
out:
    nd_calls_free(&calls);
    return status;
}

/*
 * On one rank with a GPU: times for `budget` seconds at most and fills linears and choices; what
 * there was no time for stays as it was asked, or takes the library's first algorithm. Leaves the
 * device with its forms forgotten.
 */
static nd_status measure(nd_rank *rank, double budget, nd_tuning *t)
{
    double begin = nd_clock_seconds();
    measurement m = {.rank = rank, .deadline = begin + budget};
    nd_status status = ND_OK;
    rank->ops->tuner->tune(rank->device, ND_LT_CANDIDATES, budget);
    ND_TRY_OUT(find_asked(&m));
    ND_TRY_OUT(decide(&m, t));
    ND_TRY_OUT(choose_algorithms(&m, t));
    ND_TRY_OUT(rank->ops->tuner->install(rank->device, NULL, 0));
    t->cut_short = m.cut_short;
    t->seconds = nd_clock_seconds() - begin;
out:
    nd_calls_free(&m.bf16);
    nd_calls_free(&m.all);
    for (int i = 0; i < ND_INPUT_COUNT * ND_LINEAR_SETS; i++) {
        nd_calls_free(&m.steps[i / ND_LINEAR_SETS][i % ND_LINEAR_SETS]);
    }
    return status;
}

enum { RECORD_MAX_BYTES = 64 << 20 };

static const char *replayed(const nd_config *config)
{
    const char *from = config->kernels.autotune_from;
    return from && from[0] ? from : NULL;
}

static nd_status read_file(const nd_config *config, const nd_shape *shape, nd_tuning **out)
{
    const char *path = replayed(config);
    char *text = NULL, *from = strdup(path);
    size_t bytes = 0;
    nd_filter filter = {0};
    nd_tuning *t = NULL;
    nd_status status = from ? ND_OK : nd_fail_memory("kernels.autotune_from");
    ND_TRY_OUT(status);
    status = nd_fs_read(path, RECORD_MAX_BYTES, ND_ERR_DATA, &text, &bytes);
    if (status != ND_OK) {
        (void)nd_fail_context(status, "reading kernels.autotune_from");
        goto out;
    }
    ND_TRY_OUT(nd_record_read(text, bytes, path, config, shape, &t));
    ND_TRY_OUT(nd_filter_init(&filter, config, shape));
    ND_TRY_OUT(nd_filter_choose(&filter, &t->linear_choice));
    t->from = from;
    from = NULL;
    *out = t;
    t = NULL;
out:
    nd_tuning_destroy(t);
    nd_filter_fini(&filter);
    free(text);
    free(from);
    return status;
}

nd_status nd_tuning_check(const nd_config *config, const nd_shape *shape, bool gpu, nd_tuning **out)
{
    *out = NULL;
    if (!config->kernels.autotune && !replayed(config)) {
        return ND_OK;
    }
    if (!gpu) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s, but autotune chooses among algorithms of cuBLASLt, and this run "
                       "computes on CPUs, which have none; leave the key out, or use --device cuda",
                       replayed(config) ? "kernels.autotune_from is given"
                                        : "kernels.autotune is true");
    }
    return replayed(config) ? read_file(config, shape, out) : ND_OK;
}

/* Rank 0: makes {"autotune": {...}}, owned by the caller. */
static nd_status make_text(nd_rank *rank, char **out)
{
    nd_tuning *t = NULL;
    const nd_config *config = rank->config;
    nd_status status = ND_OK;
    ND_TRY(nd_tuning_check(config, &rank->shape, nd_rank_is_gpu(rank), &t));
    if (!t) {
        const double budget = nd_tuning_budget(rank->world_size, rank->transport->timeout_seconds);
        ND_TRY(ND_ALLOC(1, &t));
        snprintf(t->gpu, sizeof t->gpu, "%s", rank->device->name);
        t->capability = nd_ops_cuda_facts(rank->device)->capability;
        t->cublaslt = (int64_t)nd_ops_cuda_facts(rank->device)->cublaslt;
        ND_TRY_OUT(measure(rank, budget, t));
    }
    ND_TRY_OUT(nd_record_write(t, config, &rank->shape));
    status = nd_fs_format(out, "{\"autotune\": %s}", t->json);
out:
    nd_tuning_destroy(t);
    return status;
}

/* ND_ERR_CONFIG unless this rank's GPU and library are those that the choices were made for. */
static nd_status check_machine(const nd_rank *rank, const nd_tuning *t)
{
    const nd_cuda_facts *here = nd_ops_cuda_facts(rank->device);
    if (strcmp(t->gpu, rank->device->name) == 0 && t->capability == here->capability &&
        t->cublaslt == (int64_t)here->cublaslt) {
        return ND_OK;
    }
    return nd_fail(
        ND_ERR_CONFIG,
        "the choices of autotune of %.200s are for gpu \"%s\" of compute capability %lld "
        "with cublaslt %lld, and rank %d has \"%s\" of %d with %zu; %s",
        t->from ? t->from : "rank 0", t->gpu, (long long)t->capability, (long long)t->cublaslt,
        rank->rank, rank->device->name, here->capability, here->cublaslt,
        t->from ? "choose again with kernels.autotune, without kernels.autotune_from"
                : "use equal GPUs, or leave kernels.autotune out");
}

static nd_status install(nd_rank *rank, const char *text, nd_tuning **out)
{
    const char *path = replayed(rank->config);
    nd_tuning *t = NULL;
    nd_status status = ND_OK;
    ND_TRY(
        nd_record_read(text, strlen(text), "autotune of rank 0", rank->config, &rank->shape, &t));
    if (path) {
        ND_TRY_OUT(nd_fs_format(&t->from, "%s", path));
    }
    ND_TRY_OUT(check_machine(rank, t));
    ND_TRY_OUT(nd_record_write(t, rank->config, &rank->shape));
    ND_TRY_OUT(rank->ops->tuner->install(rank->device, t->choices, t->choice_count));
    *out = t;
    t = NULL;
out:
    nd_tuning_destroy(t);
    return status;
}

/* Either all ranks have the choices, or all fail; the first that failed gives the reason. */
static nd_status agree(nd_rank *rank, nd_status status)
{
    enum { STATUSES = 256 };
    const nd_error why = *nd_error_last();
    const int64_t own =
        status == ND_OK ? 0 : (int64_t)(rank->world_size - rank->rank) * STATUSES + status;
    int64_t first = own;
    ND_TRY(nd_all_reduce(rank, ND_GROUP_WORLD, &first, 1, ND_DTYPE_I64, ND_REDOP_MAX));
    if (first == own) {
        nd_error_restore(&why);
        return status;
    }
    const int first_rank = rank->world_size - (int)(first / STATUSES);
    return nd_fail_elsewhere((nd_status)(first % STATUSES),
                             "autotune failed on rank %d; see the message of rank %d", first_rank,
                             first_rank);
}

nd_status nd_tuning_make(nd_rank *rank, nd_tuning **out)
{
    char *text = NULL;
    nd_tuning *t = NULL;
    nd_status status = ND_OK;
    *out = NULL;
    if (!rank->config->kernels.autotune && !replayed(rank->config)) {
        return ND_OK;
    }
    ND_TRY_OUT(agree(rank, rank->rank == 0 ? make_text(rank, &text) : ND_OK));
    int64_t bytes = text ? (int64_t)strlen(text) + 1 : 0;
    ND_TRY_OUT(nd_all_reduce(rank, ND_GROUP_WORLD, &bytes, 1, ND_DTYPE_I64, ND_REDOP_MAX));
    ND_TRY_OUT(text ? ND_OK : ND_ALLOC(bytes, &text));
    ND_TRY_OUT(nd_shared_bytes(rank, ND_GROUP_WORLD, text, bytes, rank->rank == 0));
    ND_TRY_OUT(agree(rank, install(rank, text, &t)));
    *out = t;
    t = NULL;
out:
    nd_tuning_destroy(t);
    free(text);
    return status;
}

void nd_tuning_warn(const nd_rank *rank, const nd_tuning *tuning)
{
    int unchosen = tuning ? rank->ops->tuner->unchosen(rank->device) : 0;
    if (unchosen > 0 && rank->rank == 0) {
        nd_log_warning("autotune: %d forms of products were not among its choices; cuBLASLt's "
                       "first algorithm made them",
                       unchosen);
    }
}

/* The choices as lines of text. */

/* "q_proj k_proj" */
static void names(nd_input input, int mask, char *buffer, size_t size)
{
    int first, count = nd_input_linears(input, &first);
    size_t used = 0;
    for (int i = 0; i < count; i++) {
        const char *name = strrchr(nd_linears[first + i].module, '.') + 1;
        if (mask >> i & 1) {
            used += (size_t)snprintf(buffer + used, size - used, "%s%.20s", used ? " " : "", name);
        }
    }
}

void nd_tuning_each_line(const nd_tuning *t, void (*line)(void *context, const char *text),
                         void *context)
{
    char text[400];
    int other = 0;
    for (int i = 0; i < t->choice_count; i++) {
        other += t->choices[i].picked > 0;
    }
    int used =
        t->from
            ? snprintf(text, sizeof text,
                       "autotune: %d forms of products as %.200s has them, nothing timed",
                       t->choice_count, t->from)
            : snprintf(text, sizeof text, "autotune: %d forms of products, timed in %.1f s on %s",
                       t->choice_count, t->seconds, t->gpu);
    snprintf(text + used, sizeof text - (size_t)used,
             "; %d of them not by the first algorithm of cuBLASLt %lld%s", other,
             (long long)t->cublaslt, t->cut_short ? "; cut short" : "");
    line(context, text);
    for (int i = 0; i < t->linear_count; i++) {
        const nd_tuned_linears *l = &t->linears[i];
        char asked[96];
        names(l->input, l->asked, asked, sizeof asked);
        if (!(l->fp8_seconds >= 0.0)) {
            snprintf(text, sizeof text, "  %s: fp8 as asked, there was no time to time it", asked);
        } else {
            snprintf(text, sizeof text,
                     "  %s: %s; a step takes %.3f ms of them in fp8, in bf16 %.3f ms", asked,
                     l->fp8 ? "fp8" : "bf16", l->fp8_seconds * 1e3, l->bf16_seconds * 1e3);
        }
        line(context, text);
    }
}
