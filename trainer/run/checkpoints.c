// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/checkpoints.h"

#include <stdio.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/checkpoint/export.h"
#include "trainer/checkpoint/folder.h"

static void add_config(void *context, const char *key, const char *value, bool job)
{
    nd_run_checkpoints *c = context;
    (void)nd_manifest_pairs_add(&c->config, key, value);
}

/* checkpoint.export_model, on the writer's thread. */
static nd_status export_model(void *context, const char *temporary, const nd_manifest *manifest)
{
    const nd_run_checkpoints *c = context;
    const nd_config *config = c->context->worker->rank.config;
    const nd_export_options options = {
        .dtype = config->output.dtype == ND_WEIGHTS_FP32 ? ND_DTYPE_F32 : ND_DTYPE_BF16,
        .byte_tokenizer =
            manifest->shape.vocab == 256 && strcmp(config->data.tokenizer, "bytes") == 0,
        .source = c->context->inputs->model_folder,
        .tokenizer = c->context->inputs->tokenizer,
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
    const nd_run_checkpoints *c = context;
    char path[ND_RESUME_PATH_MAX + 32];
    static const double patience_seconds = 10;
    snprintf(path, sizeof path, "%s/metrics.jsonl", c->run);
    ND_TRY(nd_fs_sync_file(path));
    if (nd_store_check(c->context->worker->store, patience_seconds) != ND_OK) {
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
    const nd_run_checkpoints *c = context;
    nd_progress_set_durable_step(&c->context->worker->progress, step);
}

static void keep_best(const nd_run_checkpoints *c)
{
    if (c->saver && c->context->worker->rank.config->checkpoint.load_best) {
        nd_saver_keep_best(c->saver, c->best.saved_step);
    }
}

nd_status nd_run_checkpoints_start(nd_run_checkpoints *c)
{
    const nd_worker *worker = c->context->worker;
    const nd_config *config = worker->rank.config;
    if (config->checkpoint.interval == 0) {
        return ND_OK;
    }
    if (worker->identity.rank == 0) {
        /* What ndlaunch needs for the start after this one, if it makes one. */
        nd_progress *progress = &c->context->worker->progress;
        ND_TRY(nd_progress_set_run_folder(progress, c->run));
        nd_progress_set_first_step(progress, c->trainer->position.step);
        if (c->resume.found && c->resume.continues) {
            nd_progress_set_durable_step(progress, c->resume.step);
        }
        ND_TRY(nd_resume_identity(config, c->context->inputs, &c->identity));
        ND_TRY(nd_config_each(config, add_config, c));
    }
    const nd_saver_options options = {
        .trainer = c->trainer,
        .run = c->run,
        .run_id = c->run_id,
        .host = worker->identity.host,
        .checksum =
            config->checkpoint.checksum == ND_CHOOSE_SHA256 ? ND_CHECKSUM_SHA256 : ND_CHECKSUM_XXH3,
        .waits = config->checkpoint.staging == ND_STAGING_WAIT,
        .keep_last = config->checkpoint.keep_last,
        .keep_every = config->checkpoint.keep_every,
        .restart_epoch = worker->identity.restart_epoch,
        .batch_samples = nd_step_blocks(config),
        .identity = &c->identity,
        .config = &c->config,
        .extra = config->checkpoint.export_model ? export_model : NULL,
        .bytes = nd_run_checkpoint_bytes(config, c->context->inputs),
        .committed = tell_durable_step,
        .extra_context = c,
        .gate = {before_commit, c},
    };
    ND_TRY(nd_saver_create(&options, &c->saver));
    keep_best(c);
    return ND_OK;
}

/* What is wrong with the state does not pass, as a full disk may: the run ends while its newest
 * checkpoint is not much older. */
enum { WRONG_MAX = 3 };

static nd_status report_failure(nd_run_checkpoints *c, const nd_save_report *report)
{
    bool stops = c->context->worker->rank.config->checkpoint.on_error == ND_ON_ERROR_STOP;
    bool last = c->trainer->position.step == c->context->worker->rank.config->train.steps;
    if (report->why[0] && !stops) {
        nd_log_error("the checkpoint of step %lld is not saved: %s; %sthe older checkpoints are as "
                     "they were",
                     (long long)report->step, report->why, last ? "" : "training goes on, and ");
    }
    const nd_run_event event = {.kind = ND_RUN_EVENT_CHECKPOINT_FAILED,
                                .step = report->step,
                                .reason = report->why[0] ? report->why : "another rank's failure"};
    ND_TRY(nd_sinks_event(&c->files->sinks, &event));
    /* The rank that has the reason ends the job, also with checkpoint.on_error continue. */
    c->wrong = report->is_wrong ? c->wrong + 1 : 0;
    if (c->wrong == WRONG_MAX) {
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

nd_status nd_run_checkpoints_report(nd_run_checkpoints *c, const nd_save_report *report)
{
    char path[ND_RESUME_PATH_MAX], name[ND_CHECKPOINT_NAME_MAX];
    if (!report->ended) {
        return ND_OK;
    }
    c->failed = !report->good;
    if (!report->good) {
        return report_failure(c, report);
    }
    c->wrong = 0;
    c->good_step = report->step;
    nd_run_best_saved(&c->best, report->step);
    keep_best(c);
    nd_checkpoint_name(report->step, name);
    int length = snprintf(c->good, sizeof c->good, "%s/%s", c->run, name);
    ND_ASSERT(length < (int)sizeof c->good);
    snprintf(path, sizeof path, "%s/%s", c->files->dir ? c->files->dir : "", name);
    const nd_run_event event = {.kind = ND_RUN_EVENT_CHECKPOINT_SAVED,
                                .step = report->step,
                                .path = path,
                                .reason = report->reason,
                                .seconds = report->seconds,
                                .blocked_seconds = report->blocked_seconds,
                                .bytes = report->bytes};
    return nd_sinks_event(&c->files->sinks, &event);
}

static nd_status wait_for_save(nd_run_checkpoints *c)
{
    nd_save_report report;
    ND_TRY(nd_saver_finish(c->saver, &report));
    return nd_run_checkpoints_report(c, &report);
}

static nd_status begin(nd_run_checkpoints *c, const char *reason)
{
    ND_TRY(nd_saver_is_busy(c->saver) ? wait_for_save(c) : ND_OK);
    c->held_step = c->trainer->position.step;
    nd_run_best_saving(&c->best, c->held_step);
    /* The lines of the steps that are saved are in the file before the checkpoint is. */
    ND_TRY(nd_sinks_flush(&c->files->sinks));
    return nd_saver_begin(c->saver, reason, nd_sinks_metrics_bytes(&c->files->sinks));
}

nd_status nd_run_checkpoints_advance(nd_run_checkpoints *c, int64_t flag)
{
    nd_save_report report;
    if (!c->saver) {
        return ND_OK;
    }
    ND_TRY(nd_saver_advance(c->saver, flag, &report));
    return nd_run_checkpoints_report(c, &report);
}

nd_status nd_run_checkpoints_step(nd_run_checkpoints *c, const nd_step_result *result)
{
    const nd_config *config = c->context->worker->rank.config;
    if (!c->saver) {
        return ND_OK;
    }
    if (c->files->dir) {
        nd_progress_set_stepped(&c->context->worker->progress);
    }
    ND_TRY(nd_run_checkpoints_advance(c, result->save));
    int64_t step = c->trainer->position.step;
    bool last = step == config->train.steps;
    return last || step % config->checkpoint.interval == 0 ? begin(c, last ? "end" : "interval")
                                                           : ND_OK;
}

nd_status nd_run_checkpoints_validated(nd_run_checkpoints *c, double loss)
{
    const nd_config *config = c->context->worker->rank.config;
    int64_t step = c->trainer->position.step;
    char why[160];
    nd_run_best_validated(&c->best, config, step, loss);
    keep_best(c);
    if (step == config->train.steps || !nd_run_best_is_over(&c->best, config)) {
        return ND_OK;
    }
    c->over = true;
    snprintf(why, sizeof why,
             "%lld validations in a row were not below the lowest loss, %.6g after step %lld",
             (long long)c->best.stale, c->best.loss, (long long)c->best.step);
    const nd_run_event event = {.kind = ND_RUN_EVENT_EARLY_STOPPED, .step = step, .reason = why};
    return nd_sinks_event(&c->files->sinks, &event);
}

nd_status nd_run_checkpoints_finish(nd_run_checkpoints *c, bool stopped)
{
    if (!c->saver) {
        return ND_OK;
    }
    if ((stopped || c->over) && c->held_step != c->trainer->position.step) {
        ND_TRY(begin(c, stopped ? "signal" : "end"));
    }
    ND_TRY(nd_saver_is_busy(c->saver) ? wait_for_save(c) : ND_OK);
    if (stopped && c->failed) {
        return nd_fail(ND_ERR_CANTCREATE,
                       "stopped by a signal after step %lld, whose checkpoint could not be saved",
                       (long long)c->trainer->position.step);
    }
    if (c->failed && c->files->dir && c->good_step == 0) {
        nd_log_warning("no step since this start has a checkpoint");
    } else if (c->failed && c->files->dir) {
        nd_log_warning("the state of the last step has no checkpoint; the newest one is that of "
                       "step %lld",
                       (long long)c->good_step);
    }
    return ND_OK;
}

enum { REWINDS_MAX = 10 }; /* what diverges again and again needs a person */

/* The state of the checkpoint, in a trainer whose last step was the one before `failed`. */
static nd_status go_back(nd_run_checkpoints *c, int64_t failed, const char *why)
{
    nd_run_position *position = &c->trainer->position;
    int64_t samples = nd_step_blocks(c->trainer->rank->config);
    int64_t seen = failed * samples + position->samples_ahead;
    double begin = nd_clock_seconds();
    ND_TRY(nd_run_checkpoints_load_good(c));
    position->samples_ahead = seen - position->step * samples;
    c->held_step = position->step;
    const nd_run_event event = {
        .kind = ND_RUN_EVENT_RESUMED,
        .step = position->step,
        .path = c->good,
        .seconds = nd_clock_seconds() - begin,
        .restart = c->context->worker->identity.restart_epoch,
        .rewound_from = failed,
        .reason = why,
        .samples = (failed - position->step) * samples,
    };
    ND_TRY(nd_sinks_event(&c->files->sinks, &event));
    ND_TRY(nd_run_best_rewound(c));
    keep_best(c);
    return ND_OK;
}

nd_status nd_run_checkpoints_rewind(nd_run_checkpoints *c)
{
    const nd_error error = *nd_error_last();
    int64_t failed = c->trainer->position.step + 1;
    ND_TRY(c->saver && nd_saver_is_busy(c->saver) ? wait_for_save(c) : ND_OK);
    c->rewinds++;
    if (!c->good[0] || c->rewinds > REWINDS_MAX) {
        return nd_fail(ND_ERR_NUMERIC, "%s; %s", error.message,
                       c->good[0] ? "the run has gone back ten times already"
                                  : "there is no checkpoint yet to go back to");
    }
    if (c->trainer->rank->rank == 0) {
        nd_log_warning("%s", error.message);
    }
    return go_back(c, failed, error.message);
}

bool nd_run_checkpoints_close(nd_run_checkpoints *c)
{
    if (!nd_saver_destroy(c->saver)) {
        return false;
    }
    c->saver = NULL;
    nd_manifest_pairs_fini(&c->identity);
    nd_manifest_pairs_fini(&c->config);
    return true;
}
