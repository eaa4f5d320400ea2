// SPDX-License-Identifier: Apache-2.0
/* Validations, and which of the states that they were made of is the best. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/run/state.h"
#include "trainer/view/metrics.h"

/* Losses of two rules do not compare: the length of blocks with separate documents, 0 for joined
 * ones. */
static int64_t rule_of(const nd_config *config)
{
    return config->data.documents == ND_DOCUMENTS_SEPARATE ? config->train.sequence_length : 0;
}

/* The best validation. */

/* True: the last checkpoint is the best one from now on. */
static bool settle(nd_run_best *best)
{
    const bool known = best->pending_durable && !isnan(best->pending_loss);
    if (!known || (best->saved_step > 0 && best->pending_loss >= best->saved_loss)) {
        return false;
    }
    best->saved_step = best->pending_step;
    best->saved_loss = best->pending_loss;
    return true;
}

void nd_run_best_validated(nd_run_best *best, const nd_config *config, int64_t step, double loss)
{
    bool first = best->step == 0;
    bool lower = isfinite(loss) && (first || loss < best->loss);
    bool counts = lower && (first || best->loss - loss > config->train.early_stopping_threshold);
    best->stale = counts ? 0 : best->stale + 1;
    if (lower) {
        best->step = step;
        best->loss = loss;
    }
    if (isfinite(loss)) {
        best->newest_step = step;
        best->newest_loss = loss;
    }
    if (isfinite(loss) && step == best->pending_step) {
        best->pending_loss = loss;
        (void)settle(best);
    }
}

void nd_run_best_saving(nd_run_best *best, int64_t step)
{
    best->pending_step = step;
    best->pending_loss = step > 0 && best->newest_step == step ? best->newest_loss : (double)NAN;
    best->pending_durable = false;
}

bool nd_run_best_saved(nd_run_best *best, int64_t step)
{
    best->pending_durable = step > 0 && best->pending_step == step;
    return best->pending_durable && settle(best);
}

bool nd_run_best_is_over(const nd_run_best *best, const nd_config *config)
{
    int64_t patience = config->train.early_stopping_patience;
    return patience > 0 && best->stale >= patience;
}

/* The run has a durable checkpoint of this step, whose validation may come only now. */
static void take_up(nd_run_best *best, int64_t step)
{
    nd_run_best_saving(best, step);
    (void)nd_run_best_saved(best, step);
}

nd_status nd_run_best_replay(nd_run_best *best, const nd_config *config, const char *run,
                             int64_t step)
{
    nd_metrics metrics = {0};
    nd_run_best found = {0};
    nd_folder *saved = NULL;
    char path[ND_RUN_PATH_MAX + 32];
    int count = 0, others = 0;
    nd_status status = ND_OK;
    snprintf(path, sizeof path, "%s/metrics.jsonl", run);
    ND_TRY_OUT(nd_metrics_read(path, &metrics));
    ND_TRY_OUT(nd_folder_list(run, ND_FOLDER_WHOLE, &saved, &count));
    const nd_column *losses = nd_metrics_column(&metrics, "validation_loss");
    const nd_column *lengths = nd_metrics_column(&metrics, "separate_length");
    for (size_t i = 0; i < losses->count; i++) {
        const int64_t at = (int64_t)losses->points[i].step;
        const double length = nd_column_at(lengths, losses->points[i].step); /* NaN: joined */
        const bool same = (isnan(length) ? 0 : (int64_t)length) == rule_of(config);
        others += at <= step && !same;
        if (at > step || !same) {
            continue;
        }
        nd_run_best_validated(&found, config, at, losses->points[i].value);
        for (int k = 0; k < count; k++) {
            if (saved[k].step == at) {
                take_up(&found, at);
            }
        }
    }
    *best = found;
    if (others > 0) {
        nd_log_info(
            "%d validations of this run were made with other documents or of another length "
            "(data.documents, train.sequence_length): their losses do not compare with "
            "those to come, and none of them is the best one",
            others);
    }
out:
    nd_metrics_fini(&metrics);
    free(saved);
    return status;
}

void nd_run_best_keep(nd_run_best *best, const nd_run_best *known, int64_t step)
{
    if (known->saved_step == 0 || known->saved_step > step ||
        (best->saved_step > 0 && best->saved_loss <= known->saved_loss)) {
        return;
    }
    best->saved_step = known->saved_step;
    best->saved_loss = known->saved_loss;
    if (best->step == 0 || known->saved_loss < best->loss) {
        best->step = known->saved_step;
        best->loss = known->saved_loss;
    }
}

/* The best state of a run in its folder: found again by a later start, and loaded at the end. */

void nd_run_keep_best(const nd_run *s)
{
    if (s->saver && s->config->checkpoint.load_best) {
        nd_saver_keep_best(s->saver, s->best.saved_step);
    }
}

/* Rank 0, whose status so far is `prepared`, reads what the folder tells of the validations up to
 * this step; all ranks learn it. */
static nd_status replay(nd_run *s, int64_t step, const char *key, nd_status prepared)
{
    if (s->dir && prepared == ND_OK &&
        nd_run_best_replay(&s->best, s->config, s->dir, step) != ND_OK) {
        nd_log_warning("the validations before step %lld do not count for the best one: %s",
                       (long long)step, nd_error_last()->message);
        nd_error_clear();
        s->best = (nd_run_best){0};
    }
    return nd_run_tell_all(s->worker, key, prepared, "could not set a damaged checkpoint aside",
                           &s->best, sizeof s->best);
}

nd_status nd_run_best_find(nd_run *s)
{
    const nd_config *config = s->config;
    const int64_t step = s->trainer->position.step;
    const nd_run_best known = s->best;
    const bool asks = config->checkpoint.load_best || config->train.early_stopping_patience > 0;
    char key[64], path[ND_RUN_PATH_MAX + 32], name[ND_CHECKPOINT_NAME_MAX];
    if (!asks || (!s->resume.continues && s->rewinds == 0)) {
        return ND_OK;
    }
    snprintf(key, sizeof key, "best validation before rewind %d", s->rewinds);
    ND_TRY(replay(s, step, key, ND_OK));
    nd_run_best_keep(&s->best, &known, step);
    snprintf(path, sizeof path, "%s/%s", s->place.path, nd_checkpoint_name(step, name));
    if (strcmp(path, s->good) == 0) {
        take_up(&s->best, step);
    }
    nd_run_keep_best(s);
    s->over =
        s->rewinds == 0 && step < config->train.steps && nd_run_best_is_over(&s->best, config);
    if (s->over && s->dir) {
        nd_log_info("the run has ended early, after step %lld: %lld validations in a row were not "
                    "below the lowest loss; it goes on with a larger "
                    "train.early_stopping_patience (--early-stopping-patience), or 0",
                    (long long)step, (long long)s->best.stale);
    }
    return ND_OK;
}

/* The best checkpoint is damaged: looks for the best of the others, which the folder still has. The
 * thread's error says what is damaged; it stays where no other checkpoint was validated. */
static nd_status find_next_best(nd_run *s)
{
    const nd_error error = *nd_error_last();
    const int64_t damaged = s->best.saved_step;
    char key[64];
    const nd_status aside = nd_run_set_damaged_aside(s, s->place.path, damaged);
    snprintf(key, sizeof key, "best validation without checkpoint %lld", (long long)damaged);
    ND_TRY(replay(s, s->trainer->position.step, key, aside));
    nd_error_restore(&error);
    return s->best.saved_step > 0 ? ND_OK : ND_ERR_DATA;
}

/* A load that has failed may have written to the weights, so that those of the last step are to be
 * loaded too. */
nd_status nd_run_load_best(nd_run *s)
{
    const nd_run_position position = s->trainer->position;
    const nd_run_best *best = &s->best;
    bool whole = true;
    if (!s->config->checkpoint.load_best || best->saved_step == 0) {
        return ND_OK;
    }
    while (!whole || best->saved_step != position.step) {
        char path[ND_RUN_PATH_MAX + 32], name[ND_CHECKPOINT_NAME_MAX];
        nd_manifest manifest = {0};
        nd_restored restored;
        snprintf(path, sizeof path, "%s/%s", s->place.path,
                 nd_checkpoint_name(best->saved_step, name));
        nd_status status = nd_restore_checkpoint(s->trainer, path, &manifest,
                                                 s->config->checkpoint.verify, &restored);
        nd_manifest_fini(&manifest);
        s->trainer->position = position;
        if (status == ND_OK) {
            break;
        }
        whole = false;
        ND_TRY(status == ND_ERR_DATA ? find_next_best(s) : status);
    }
    if (s->dir && best->saved_step != position.step) {
        nd_log_info("the model is that of step %lld, whose validation loss %.6g was the lowest of "
                    "all checkpoints",
                    (long long)best->saved_step, best->saved_loss);
    }
    return ND_OK;
}

/* Validations. */

/* Between the batches of a validation: a signal that reached one rank stops all of them, and a save
 * in flight goes on. Nothing of the state that it copies changes in a validation. */
static nd_status stop_is_asked(void *context, bool *stop)
{
    nd_run *s = context;
    int64_t flags[] = {atomic_load(nd_train_stop_flag()), nd_trainer_reported_save(s->trainer)};
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
                                   .separate_length = rule_of(s->config)};
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
