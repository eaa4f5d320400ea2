// SPDX-License-Identifier: Apache-2.0
/* The checkpoints that a run saves, and which of them has the best of its validated states. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "trainer/checkpoint/export.h"
#include "trainer/run/state.h"
#include "trainer/view/metrics.h"

/* The best state. */

/* Losses of two rules do not compare: the length of blocks with separate documents, 0 for joined
 * ones. */
static int64_t loss_rule(const nd_config *config)
{
    return config->data.documents == ND_DOCUMENTS_SEPARATE ? config->train.sequence_length : 0;
}

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
        const bool same = (isnan(length) ? 0 : (int64_t)length) == loss_rule(config);
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

/* The saver deletes no checkpoint that is the best one by now. */
static void keep_best(const nd_run *s)
{
    if (s->saver && s->config->checkpoint.load_best) {
        nd_saver_keep_best(s->saver, s->best.saved_step);
    }
}

nd_status nd_run_record_validation(nd_run *s, nd_validation_record *record)
{
    const int64_t step = record->step;
    char why[160];
    record->separate_length = loss_rule(s->config);
    ND_TRY(nd_sinks_put(&s->sinks, step, (nd_record){.validation = record}));
    nd_run_best_validated(&s->best, s->config, step, record->loss);
    keep_best(s);
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

/* Saving. */

static void add_config(void *context, const char *key, const char *value, bool job)
{
    nd_run *s = context;
    nd_json_set(&s->settings, key, nd_json_string(value));
}

/* checkpoint.export_model, on the writer's thread. */
static nd_status export_model(void *context, const char *temporary, const nd_manifest *manifest)
{
    const nd_run *s = context;
    const nd_config *config = s->config;
    const nd_export_options options = {
        .dtype = config->output.dtype == ND_WEIGHTS_FP32 ? ND_DTYPE_F32 : ND_DTYPE_BF16,
        .byte_tokenizer =
            manifest->shape.vocab == 256 && strcmp(config->data.tokenizer, "bytes") == 0,
        .source = s->inputs->model_folder,
        .tokenizer = s->inputs->tokenizer,
    };
    return nd_checkpoint_export(temporary, manifest, &options);
}

/*
 * Right before a checkpoint becomes good, on the writer's thread of rank 0. The lines of the saved
 * steps are made durable, so that a power failure leaves no checkpoint without them. A process of a
 * start that has ended, which woke up late, must not commit.
 */
static nd_status before_commit(void *context)
{
    const nd_run *s = context;
    char path[ND_RUN_PATH_MAX + 32];
    static const double patience_seconds = 10;
    snprintf(path, sizeof path, "%s/metrics.jsonl", s->place.path);
    ND_TRY(nd_fs_sync_file(path));
    if (nd_store_check(s->worker->store, patience_seconds) != ND_OK) {
        return nd_fail(ND_ERR_IO,
                       "the job's store does not answer, so that this start may be one that has "
                       "ended: %.300s",
                       nd_error_last()->message);
    }
    return ND_OK;
}

/* ndlaunch learns at once what a restart would go on from; on the writer's thread. */
static void tell_durable_step(void *context, int64_t step)
{
    const nd_run *s = context;
    atomic_store(&s->worker->progress.job->durable_step, step);
}

static nd_status open_saver(nd_run *s)
{
    const nd_worker *worker = s->worker;
    const nd_config *config = worker->rank.config;
    if (config->checkpoint.interval == 0) {
        return ND_OK;
    }
    if (worker->identity.rank == 0) {
        /* ndlaunch needs these for the start after this one, if it makes one. */
        nd_progress *progress = &s->worker->progress;
        ND_TRY(nd_progress_set_run_folder(progress, s->place.path));
        atomic_store(&progress->job->first_step, s->trainer->position.step);
        if (s->resume.found && s->resume.continues) {
            atomic_store(&progress->job->durable_step, s->resume.step);
        }
        ND_TRY(nd_resume_identity(config, s->inputs, &s->identity));
        s->settings = json_object();
        ND_TRY(nd_config_each(config, add_config, s));
        ND_TRY(s->settings ? ND_OK : nd_fail_memory("a manifest"));
    }
    const nd_saver_options options = {
        .trainer = s->trainer,
        .run = s->place.path,
        .run_id = s->place.id,
        .host = worker->identity.host,
        .checksum =
            config->checkpoint.checksum == ND_CHOOSE_SHA256 ? ND_CHECKSUM_SHA256 : ND_CHECKSUM_XXH3,
        .waits = config->checkpoint.staging == ND_STAGING_WAIT,
        .keep_last = config->checkpoint.keep_last,
        .keep_every = config->checkpoint.keep_every,
        .restart_epoch = worker->identity.restart_epoch,
        .batch_samples = nd_step_blocks(config),
        .identity = s->identity,
        .config = s->settings,
        .extra = config->checkpoint.export_model ? export_model : NULL,
        .bytes = s->checkpoint_bytes,
        .committed = tell_durable_step,
        .context = s,
        .gate = before_commit,
    };
    ND_TRY(nd_saver_create(&options, &s->saver));
    keep_best(s);
    return ND_OK;
}

/* After so many saves in a row that find the state wrong, the run ends while its newest checkpoint
 * is not much older: such a fault does not go away, as that of a full disk may. */
enum { WRONG_MAX = 3 };

static nd_status report_failure(nd_run *s, const nd_save_report *report)
{
    bool stops = s->config->checkpoint.on_error == ND_ON_ERROR_STOP;
    bool last = s->trainer->position.step == s->config->train.steps;
    if (report->why[0] && !stops) {
        nd_log_error("the checkpoint of step %lld is not saved: %s; %sthe older checkpoints are as "
                     "they were",
                     (long long)report->step, report->why, last ? "" : "training goes on, and ");
    }
    const nd_run_event event = {.kind = ND_RUN_EVENT_CHECKPOINT_FAILED,
                                .step = report->step,
                                .reason = report->why[0] ? report->why : "another rank's failure"};
    ND_TRY(nd_sinks_event(&s->sinks, &event));
    /* The rank that has the reason ends the job, also with checkpoint.on_error continue. */
    s->wrong_saves = report->is_wrong ? s->wrong_saves + 1 : 0;
    if (s->wrong_saves == WRONG_MAX) {
        return nd_fail(ND_ERR_IO,
                       "the checkpoint of step %lld, the third in a row, is not saved: %s",
                       (long long)report->step, report->why);
    }
    if (!stops) {
        return ND_OK;
    }
    return report->why[0]
               ? nd_fail(ND_ERR_CANTCREATE, "the checkpoint of step %lld is not saved: %s",
                         (long long)report->step, report->why)
               : nd_fail_elsewhere(ND_ERR_CANTCREATE,
                                   "another rank could not write the checkpoint of step %lld",
                                   (long long)report->step);
}

nd_status nd_run_saving_report(nd_run *s, const nd_save_report *report)
{
    char path[ND_RUN_PATH_MAX], name[ND_CHECKPOINT_NAME_MAX];
    nd_resume *resume = &s->resume;
    if (!report->ended) {
        return ND_OK;
    }
    s->save_failed = !report->good;
    if (!report->good) {
        return report_failure(s, report);
    }
    s->wrong_saves = 0;
    *resume = (nd_resume){.found = true, .continues = true, .searched = true, .step = report->step};
    nd_run_best_saved(&s->best, report->step);
    keep_best(s);
    nd_checkpoint_name(report->step, name);
    snprintf(resume->run, sizeof resume->run, "%s", s->place.path);
    int length = snprintf(resume->source, sizeof resume->source, "%s/%s", s->place.path, name);
    ND_ASSERT(length < (int)sizeof resume->source);
    snprintf(path, sizeof path, "%s/%s", s->dir ? s->dir : "", name);
    const nd_run_event event = {.kind = ND_RUN_EVENT_CHECKPOINT_SAVED,
                                .step = report->step,
                                .path = path,
                                .reason = report->reason,
                                .seconds = report->seconds,
                                .blocked_seconds = report->blocked_seconds,
                                .bytes = report->bytes};
    return nd_sinks_event(&s->sinks, &event);
}

nd_status nd_run_saving_wait(nd_run *s)
{
    nd_save_report report;
    if (!s->saver) {
        return ND_OK;
    }
    ND_TRY(nd_saver_finish(s->saver, &report));
    return nd_run_saving_report(s, &report);
}

static nd_status begin_save(nd_run *s, const char *reason)
{
    ND_TRY(nd_run_saving_wait(s));
    s->held_step = s->trainer->position.step;
    nd_run_best_saving(&s->best, s->held_step);
    /* The lines of the steps that are saved are in the file before the checkpoint is. */
    ND_TRY(nd_sinks_flush(&s->sinks));
    return nd_saver_begin(s->saver, reason, nd_sinks_metrics_bytes(&s->sinks));
}

nd_status nd_run_saving_advance(nd_run *s, int64_t flag)
{
    nd_save_report report;
    if (!s->saver) {
        return ND_OK;
    }
    ND_TRY(nd_saver_advance(s->saver, flag, &report));
    return nd_run_saving_report(s, &report);
}

/* Goes on with the save in flight and begins one that is due. */
static nd_status save_step(nd_run *s, const nd_step_result *result)
{
    const nd_config *config = s->config;
    if (!s->saver) {
        return ND_OK;
    }
    if (s->dir) {
        nd_progress_set_stepped(&s->worker->progress);
    }
    ND_TRY(nd_run_saving_advance(s, result->save));
    int64_t step = s->trainer->position.step;
    bool last = step == config->train.steps;
    return last || step % config->checkpoint.interval == 0
               ? begin_save(s, last ? "end" : "interval")
               : ND_OK;
}

/* Waits until the save in flight is durable. A run that was stopped or ended early saves first. */
static nd_status finish_saving(nd_run *s)
{
    if (!s->saver) {
        return ND_OK;
    }
    if ((s->stopped || s->over) && s->held_step != s->trainer->position.step) {
        ND_TRY(begin_save(s, s->stopped ? "signal" : "end"));
    }
    ND_TRY(nd_run_saving_wait(s));
    if (s->stopped && s->save_failed) {
        return nd_fail(ND_ERR_CANTCREATE,
                       "stopped by a signal after step %lld, whose checkpoint could not be saved",
                       (long long)s->trainer->position.step);
    }
    if (s->save_failed && s->dir && !s->resume.found) {
        nd_log_warning("no step since this start has a checkpoint");
    } else if (s->save_failed && s->dir) {
        nd_log_warning("the state of the last step has no checkpoint; the newest one is that of "
                       "step %lld",
                       (long long)s->resume.step);
    }
    return ND_OK;
}

/* Ends the process where a thread of the saver still runs, which uses what the run has. */
static void close_saver(nd_run *s)
{
    if (!nd_saver_destroy(s->saver)) {
        nd_worker_end(s->worker, s->status);
    }
    json_decref(s->identity);
    json_decref(s->settings);
}

const nd_run_stage nd_run_saving = {
    .open = open_saver, .after_step = save_step, .finish = finish_saving, .close = close_saver};

/* The best state of a run in its folder: found again by a later start, and loaded at the end. */

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
    if (strcmp(path, s->resume.source) == 0) {
        take_up(&s->best, step);
    }
    keep_best(s);
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

nd_status nd_run_set_damaged_aside(const nd_run *s, const char *folder, int64_t step)
{
    const nd_error *error = nd_error_last();
    char *aside = NULL;
    if (error->cause == ND_CAUSE_OWN) {
        nd_log_warning("%s", error->message);
    }
    if (s->dir && folder) {
        ND_TRY(nd_checkpoint_set_aside(folder, step, "bad", &aside));
        nd_log_warning("the damaged checkpoint is now %s, and the one before it is looked for",
                       aside);
    } else if (s->dir) {
        nd_log_warning("%s is damaged, and the one before it is looked for; it stays as it is, "
                       "since this run goes on in another folder",
                       s->resume.source);
    }
    free(aside);
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
