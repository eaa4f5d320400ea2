// SPDX-License-Identifier: Apache-2.0
/* The checkpoints of a run: what it saves, and what it goes on from, at its start and after a
 * rewind. What is damaged is passed over. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/checkpoint/export.h"
#include "trainer/run/state.h"

/* Saving. */

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
        /* What ndlaunch needs for the start after this one, if it makes one. */
        nd_progress *progress = &s->worker->progress;
        ND_TRY(nd_progress_set_run_folder(progress, s->place.path));
        atomic_store(&progress->job->first_step, s->trainer->position.step);
        if (s->resume.found && s->resume.continues) {
            atomic_store(&progress->job->durable_step, s->resume.step);
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
        .context = s,
        .gate = before_commit,
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
    nd_run_keep_best(s);
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

static nd_status wait_for_save(nd_run *s)
{
    nd_save_report report;
    if (!s->saver) {
        return ND_OK;
    }
    ND_TRY(nd_saver_finish(s->saver, &report));
    return nd_run_saving_report(s, &report);
}

static nd_status begin(nd_run *s, const char *reason)
{
    ND_TRY(wait_for_save(s));
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
    return last || step % config->checkpoint.interval == 0 ? begin(s, last ? "end" : "interval")
                                                           : ND_OK;
}

/* Waits until the save in flight is durable. A run that was stopped, or is over early, saves its
 * state first. */
static nd_status finish_saving(nd_run *s)
{
    if (!s->saver) {
        return ND_OK;
    }
    if ((s->stopped || s->over) && s->held_step != s->trainer->position.step) {
        ND_TRY(begin(s, s->stopped ? "signal" : "end"));
    }
    ND_TRY(wait_for_save(s));
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
    nd_manifest_pairs_fini(&s->identity);
    nd_manifest_pairs_fini(&s->settings);
}

const nd_run_stage nd_run_saving = {
    .open = open_saver, .after_step = save_step, .finish = finish_saving, .close = close_saver};

/* What a run goes on from. */

/* Rank 0 searches, unless it has failed already, and looks whether the checkpoint fits the run. The
 * key is one for each search, alike on all ranks. `prepared`: rank 0's status so far, which its
 * thread has the error of; the search fails with it. */
static nd_status find(nd_run *s, const nd_resume_search *search, const char *key,
                      nd_status prepared)
{
    nd_status status = prepared;
    if (s->rank->rank == 0 && status == ND_OK) {
        const nd_resume before = s->resume;
        nd_manifest manifest = {0};
        status = nd_resume_find(search, &s->resume);
        if (status == ND_OK && search->below >= 0 && !s->resume.found) {
            status = nd_fail(ND_ERR_DATA,
                             "no checkpoint of %s can be used: %s is damaged, and there is none "
                             "before it",
                             before.run, before.source);
        }
        if (status == ND_OK && s->resume.found && strcmp(before.source, s->resume.source) != 0) {
            status = nd_manifest_read(s->resume.source, &manifest);
            status = status == ND_OK
                         ? nd_resume_check(s->config, s->inputs, s->resume.source, &manifest, true)
                         : status;
            nd_manifest_fini(&manifest);
        }
    }
    return nd_run_tell_all(s->worker, key, status, "found nothing to go on from", &s->resume,
                           sizeof s->resume);
}

/* Before the run folder is opened: it changes nothing. */
static nd_status find_source(nd_run *s)
{
    const nd_resume_search search = {
        .config = s->config, .run_folder = s->worker->identity.run_folder, .below = -1};
    return find(s, &search, "resume", ND_OK);
}

/* A checkpoint was found to be damaged while it was loaded: takes the one before it, of the same
 * run. */
static nd_status fall_back(nd_run *s)
{
    const nd_resume before = s->resume;
    const nd_resume_search search = {
        .config = s->config,
        .run_folder = before.continues ? before.run : s->worker->identity.run_folder,
        .below = before.step,
        .sets_aside = true};
    char key[64];
    const nd_status status =
        nd_run_set_damaged_aside(s, nd_resume_is_own(&before) ? before.run : NULL, before.step);
    snprintf(key, sizeof key, "resume below %lld, rewind %d", (long long)before.step, s->rewinds);
    return find(s, &search, key, status);
}

static void log_restored(const nd_run *s, const nd_restored *restored)
{
    const nd_config *config = s->config;
    if (s->rank->rank != 0) {
        return;
    }
    if (restored->scales_differ && restored->scales) {
        nd_log_info("the checkpoint has FP8 histories, which this run does not need");
    } else if (restored->scales_differ) {
        nd_log_warning("the checkpoint has FP8 histories of another recipe; those of this run "
                       "begin afresh");
    }
    if (restored->leaves) {
        nd_log_warning("%s has moments of AdamW, which are left out: optimizer.name is not adamw",
                       s->resume.source);
    }
    if (s->resume.found && !config->checkpoint.verify) {
        nd_log_warning("%s was loaded without comparing its checksums (checkpoint.verify is false)",
                       s->resume.source);
    }
    if (!restored->moments && config->optimizer.name == ND_OPTIMIZER_ADAMW) {
        nd_log_warning("%s has no moments of AdamW, so these begin at zero", s->resume.source);
    }
}

static nd_status load_checkpoint(nd_run *s, nd_restored *restored, nd_mesh *saved)
{
    const bool verify = s->config->checkpoint.verify;
    for (;;) {
        nd_manifest manifest = {0};
        nd_status status =
            nd_restore_checkpoint(s->trainer, s->resume.source, &manifest, verify, restored);
        if (status == ND_OK) {
            /* The data go on behind the samples that were seen, whatever number a step had; after a
             * rewind the caller knows better. */
            nd_run_position *position = &s->trainer->position;
            position->samples_ahead =
                manifest.samples_seen - position->step * nd_step_blocks(s->config);
            *saved = manifest.mesh;
        }
        nd_manifest_fini(&manifest);
        if (status != ND_ERR_DATA || !s->resume.searched) {
            return status;
        }
        ND_TRY(fall_back(s));
    }
}

/* With the run folder open and locked on rank 0. */
static nd_status load_source(nd_run *s)
{
    nd_restored restored = {.moments = true};
    nd_mesh saved = s->rank->mesh;
    double begin = nd_clock_seconds();
    /* The first search came before the lock of the run folder: what another process has saved,
     * renamed or deleted there meanwhile counts. A checkpoint that was named stays the one. */
    const nd_resume before = s->resume;
    const nd_resume_search again = {
        .config = s->config, .run_folder = before.run, .below = -1, .sets_aside = true};
    ND_TRY(before.continues && (before.searched || !before.found)
               ? find(s, &again, "resume under the lock", ND_OK)
               : ND_OK);
    const nd_resume *source = &s->resume;
    nd_fsdp *fsdp = &s->trainer->model->fsdp;
    ND_TRY(source->found ? load_checkpoint(s, &restored, &saved)
           : s->inputs->weights
               ? nd_weights_load(fsdp, s->inputs->weights)
               : nd_weights_init(fsdp, s->rank->shape.init_std, (uint64_t)s->config->model.seed));
    s->held_step = s->trainer->position.step;
    log_restored(s, &restored);
    if (source->found) {
        /* Rank 0 sets aside what is later than the checkpoint, and first the model, which may be
         * that of a later step: a start that is killed here leaves none without its checkpoint. */
        nd_status status = source->searched ? ND_OK : nd_run_set_aside(s, "model");
        status = status == ND_OK && s->dir ? nd_resume_set_later_aside(source) : status;
        ND_TRY(nd_run_tell_all(s->worker, "later checkpoints", status,
                               "could not set what is later aside", NULL, 0));
    }
    if (!source->found && !source->continues) {
        return ND_OK;
    }
    const nd_mesh *mesh = &s->rank->mesh;
    bool other_mesh = memcmp(saved.size, mesh->size, sizeof saved.size) != 0;
    const nd_run_event event = {
        .kind = ND_RUN_EVENT_RESUMED,
        .mesh = other_mesh ? mesh : NULL,
        .mesh_was = other_mesh ? &saved : NULL,
        .step = s->trainer->position.step,
        .path = source->found ? source->source : "the start",
        .seconds = nd_clock_seconds() - begin,
        .restart = s->worker->identity.restart_epoch,
    };
    ND_TRY(nd_sinks_event(&s->sinks, &event));
    return nd_run_best_find(s);
}

const nd_run_stage nd_run_source = {.open = find_source}, nd_run_load = {.open = load_source};

enum { REWINDS_MAX = 10 }; /* what diverges again and again needs a person */

nd_status nd_run_rewind(nd_run *s)
{
    const nd_error error = *nd_error_last();
    nd_run_position *position = &s->trainer->position;
    const int64_t samples = nd_step_blocks(s->config), failed = position->step + 1;
    const int64_t seen = failed * samples + position->samples_ahead;
    nd_restored restored;
    nd_mesh saved;
    ND_TRY(wait_for_save(s));
    s->rewinds++;
    if (!s->resume.found || s->rewinds > REWINDS_MAX) {
        return nd_fail(ND_ERR_NUMERIC, "%s; %s", error.message,
                       s->resume.found ? "the run has gone back ten times already"
                                       : "there is no checkpoint yet to go back to");
    }
    if (s->dir) {
        nd_log_warning("%s", error.message);
    }
    const double begin = nd_clock_seconds();
    ND_TRY(load_checkpoint(s, &restored, &saved));
    if (s->dir && nd_resume_is_own(&s->resume)) {
        atomic_store(&s->worker->progress.job->durable_step, s->resume.step);
    }
    position->samples_ahead = seen - position->step * samples;
    s->held_step = position->step;
    const nd_run_event event = {
        .kind = ND_RUN_EVENT_RESUMED,
        .step = position->step,
        .path = s->resume.source,
        .seconds = nd_clock_seconds() - begin,
        .restart = s->worker->identity.restart_epoch,
        .rewound_from = failed,
        .reason = error.message,
        .samples = (failed - position->step) * samples,
    };
    ND_TRY(nd_sinks_event(&s->sinks, &event));
    return nd_run_best_find(s);
}
