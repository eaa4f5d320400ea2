// SPDX-License-Identifier: Apache-2.0
/* The checkpoints that a run saves. */
#include <stdio.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/checkpoint/export.h"
#include "trainer/run/state.h"

static void add_config(void *context, const char *key, const char *value, bool job)
{
    nd_run *s = context;
    (void)nd_manifest_pairs_add(&s->settings, key, value);
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
    nd_progress_set_durable_step(&s->worker->progress, step);
}

nd_status nd_run_saving_open(nd_run *s)
{
    const nd_worker *worker = s->worker;
    const nd_config *config = worker->rank.config;
    if (config->checkpoint.interval == 0) {
        return ND_OK;
    }
    if (worker->identity.rank == 0) {
        /* What ndlaunch needs for the start after this one, if it makes one. */
        nd_progress *progress = &s->worker->progress;
        ND_TRY(nd_progress_set_run_folder(progress, s->place.path));
        nd_progress_set_first_step(progress, s->trainer->position.step);
        if (s->resume.found && s->resume.continues) {
            nd_progress_set_durable_step(progress, s->resume.step);
        }
        ND_TRY(nd_resume_identity(config, s->inputs, &s->identity));
        ND_TRY(nd_config_each(config, add_config, s));
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
        .identity = &s->identity,
        .config = &s->settings,
        .extra = config->checkpoint.export_model ? export_model : NULL,
        .bytes = nd_run_checkpoint_bytes(config, s->inputs),
        .committed = tell_durable_step,
        .extra_context = s,
        .gate = {before_commit, s},
    };
    ND_TRY(nd_saver_create(&options, &s->saver));
    nd_run_keep_best(s);
    return ND_OK;
}

/* What is wrong with the state does not pass, as a full disk may: the run ends while its newest
 * checkpoint is not much older. */
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
    if (!report->ended) {
        return ND_OK;
    }
    s->save_failed = !report->good;
    if (!report->good) {
        return report_failure(s, report);
    }
    s->wrong_saves = 0;
    s->good_step = report->step;
    nd_run_best_saved(&s->best, report->step);
    nd_run_keep_best(s);
    nd_checkpoint_name(report->step, name);
    int length = snprintf(s->good, sizeof s->good, "%s/%s", s->place.path, name);
    ND_ASSERT(length < (int)sizeof s->good);
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
    if (!s->saver || !nd_saver_is_busy(s->saver)) {
        return ND_OK;
    }
    ND_TRY(nd_saver_finish(s->saver, &report));
    return nd_run_saving_report(s, &report);
}

static nd_status begin(nd_run *s, const char *reason)
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

nd_status nd_run_saving_step(nd_run *s, const nd_step_result *result)
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
    return last || step % config->checkpoint.interval == 0 ? begin(s, last ? "end" : "interval")
                                                           : ND_OK;
}

nd_status nd_run_saving_finish(nd_run *s)
{
    if (!s->saver) {
        return ND_OK;
    }
    if ((s->stopped || s->over) && s->held_step != s->trainer->position.step) {
        ND_TRY(begin(s, s->stopped ? "signal" : "end"));
    }
    ND_TRY(nd_run_saving_wait(s));
    if (s->stopped && s->save_failed) {
        return nd_fail(ND_ERR_CANTCREATE,
                       "stopped by a signal after step %lld, whose checkpoint could not be saved",
                       (long long)s->trainer->position.step);
    }
    if (s->save_failed && s->dir && s->good_step == 0) {
        nd_log_warning("no step since this start has a checkpoint");
    } else if (s->save_failed && s->dir) {
        nd_log_warning("the state of the last step has no checkpoint; the newest one is that of "
                       "step %lld",
                       (long long)s->good_step);
    }
    return ND_OK;
}

void nd_run_saving_close(nd_run *s)
{
    if (!nd_saver_destroy(s->saver)) {
        nd_worker_end(s->worker, s->status);
    }
    nd_manifest_pairs_fini(&s->identity);
    nd_manifest_pairs_fini(&s->settings);
}
