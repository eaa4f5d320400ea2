// SPDX-License-Identifier: Apache-2.0
/* Validations. */
#include <math.h>

#include "runtime/base/log.h"
#include "trainer/run/state.h"
#include "trainer/view/metrics.h"

/* Between the batches of a validation: a signal that reached one rank stops all of them, and a save
 * in flight goes on. Nothing of the state that it copies changes in a validation. */
static nd_status stop_is_asked(void *context, bool *stop)
{
    nd_run *s = context;
    int64_t flags[] = {atomic_load(s->inputs->stop), nd_trainer_reported_save(s->trainer)};
    ND_TRY(nd_all_reduce(s->rank, ND_GROUP_WORLD, flags, 2, ND_DTYPE_I64, ND_REDOP_MAX));
    *stop = s->stopped = flags[0] != 0;
    return nd_run_saving_advance(s, flags[1]);
}

/* The loss of a validation is the mean over the labels of all its sets. */
static nd_status run_sets(nd_run *s, nd_validation_record *record)
{
    const nd_stop_check check = {stop_is_asked, s};
    const nd_loader_options options = nd_loader_options_of(s->rank, true);
    const int64_t wanted = s->config->train.validation_batches;
    double sum = 0;
    for (int i = 0; i < s->set_count && !s->stopped; i++) {
        const nd_dataset *data = nd_dataset_source(s->inputs->validation, i);
        const int64_t all = nd_loader_validation_steps(data, &options);
        nd_source_loss *set = &s->sets[i];
        if (s->set_count > 1) {
            nd_loader_rewind(s->validation_loader, data);
        }
        const nd_status status = nd_trainer_evaluate(s->trainer, s->validation_loader,
                                                     wanted > 0 && wanted < all ? wanted : all,
                                                     &check, &set->loss, &set->tokens);
        const nd_error error = *nd_error_last();
        if (status == ND_ERR_DATA && s->set_count > 1 && error.cause == ND_CAUSE_OWN) {
            return nd_fail(status, "\"%s\" in data.validation_path: %s", set->name, error.message);
        }
        ND_TRY(status);
        sum += set->tokens > 0 ? set->loss * (double)set->tokens : 0.0;
        record->tokens += set->tokens;
    }
    record->loss = s->set_count == 1 ? s->sets[0].loss : sum / (double)record->tokens;
    record->sets = s->set_count > 1 ? s->sets : NULL;
    record->set_count = s->set_count > 1 ? s->set_count : 0;
    return ND_OK;
}

/* The loss of the state after the step done is known: the run may be over. */
static nd_status judge_loss(nd_run *s, double loss)
{
    const int64_t step = s->trainer->position.step;
    char why[160];
    nd_run_best_validated(&s->best, s->config, step, loss);
    nd_run_keep_best(s);
    if (step == s->config->train.steps || !nd_run_best_is_over(&s->best, s->config)) {
        return ND_OK;
    }
    s->over = true;
    snprintf(why, sizeof why,
             "%lld validations in a row were not below the lowest loss, %.6g after step %lld",
             (long long)s->best.stale, s->best.loss, (long long)s->best.step);
    const nd_run_event event = {.kind = ND_RUN_EVENT_EARLY_STOPPED, .step = step, .reason = why};
    return nd_sinks_event(&s->sinks, &event);
}

/* The trace is of steps alone. */
static nd_status validate(nd_run *s)
{
    nd_validation_record record = {.step = s->trainer->position.step,
                                   .separate_length = nd_run_best_rule(s->config)};
    const nd_trace steps = s->rank->trace;
    const nd_stop_check check = {stop_is_asked, s};
    double begin = nd_clock_seconds();
    ND_TRY(run_sets(s, &record));
    record.seconds = nd_clock_seconds() - begin;
    ND_TRY(nd_run_samples_write(s->samples, &check, &s->sinks, &s->stopped));
    s->validation_seconds += nd_clock_seconds() - begin;
    s->rank->trace = steps;
    if (s->stopped) {
        return ND_OK;
    }
    if (record.tokens == 0) { /* no reason to lose what was trained */
        nd_log_warning("the validation after step %lld has no label that counts; check "
                       "data.validation_path, or raise train.validation_batches",
                       (long long)record.step);
        return ND_OK;
    }
    ND_TRY(nd_sinks_validation(&s->sinks, &record));
    return judge_loss(s, record.loss);
}

static bool is_at_interval(const nd_run *s)
{
    const int64_t interval = s->config->train.validation_interval;
    return interval > 0 && s->trainer->position.step % interval == 0;
}

static bool is_due(const nd_run *s)
{
    const bool last = s->trainer->position.step == s->last_step;
    /* After a stop signal, skip validation: the grace period is needed to save the model. */
    return s->validation_loader && !s->stopped && (last || is_at_interval(s));
}

nd_status nd_run_validate(nd_run *s, bool at_end)
{
    return is_due(s) && !(at_end && is_at_interval(s)) ? validate(s) : ND_OK;
}

/* *out is true when the metrics.jsonl of the run has no validation of this step. A file that is
 * missing or damaged has none, so that it is made again. */
static nd_status lacks_validation(const char *run, int64_t step, bool *out)
{
    char path[ND_RUN_PATH_MAX + 32];
    nd_metrics metrics = {0};
    snprintf(path, sizeof path, "%s/metrics.jsonl", run);
    nd_status status = nd_metrics_read(path, &metrics);
    const nd_column *losses = nd_metrics_column(&metrics, "validation_loss");
    *out = true;
    for (size_t i = 0; i < losses->count; i++) {
        *out &= losses->points[i].step != (double)step;
    }
    nd_metrics_fini(&metrics);
    if (status == ND_ERR_DATA) {
        nd_error_clear();
        return ND_OK;
    }
    return status;
}

nd_status nd_run_make_up_validation(nd_run *s)
{
    const int64_t step = s->trainer->position.step;
    bool lacks = false;
    if (step == 0 || !is_due(s) || !s->resume.found || !s->resume.continues) {
        return ND_OK;
    }
    const nd_status status = s->dir ? lacks_validation(s->resume.run, step, &lacks) : ND_OK;
    ND_TRY(nd_run_tell_all(s->worker, "validation owed", status, "cannot read metrics.jsonl",
                           &lacks, sizeof lacks));
    return lacks ? validate(s) : ND_OK;
}
