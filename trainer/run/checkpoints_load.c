// SPDX-License-Identifier: Apache-2.0
/* What a run goes on from: finds it, loads it, and passes over what is damaged. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"
#include "trainer/run/state.h"

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

nd_status nd_run_find_source(nd_run *s)
{
    const nd_resume_search search = {
        .config = s->config, .run_folder = s->worker->identity.run_folder, .below = -1};
    return find(s, &search, "resume", ND_OK);
}

/* A checkpoint was found to be damaged while it was loaded: takes the one before it, of the same
 * run. */
static nd_status fall_back(nd_run *s, const nd_error *error)
{
    const nd_resume before = s->resume;
    const nd_resume_search search = {
        .config = s->config,
        .run_folder = before.continues ? before.run : s->worker->identity.run_folder,
        .below = before.step,
        .sets_aside = true};
    char key[64];
    nd_status status = ND_OK;
    if (error->cause == ND_CAUSE_OWN) {
        nd_log_warning("%s", error->message);
    }
    if (s->dir && !nd_resume_is_own(&before)) {
        nd_log_warning("%s is damaged, and the one before it is looked for; it stays as it is, "
                       "since this run goes on in another folder",
                       before.source);
    } else if (s->dir) {
        status = nd_resume_set_damaged_aside(before.run, before.step);
    }
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
        const nd_error error = *nd_error_last();
        ND_TRY(fall_back(s, &error));
    }
}

static nd_status load_fresh(nd_run *s)
{
    nd_fsdp *fsdp = &s->trainer->model->fsdp;
    return s->inputs->weights
               ? nd_weights_load(fsdp, s->inputs->weights)
               : nd_weights_init(fsdp, s->rank->shape.init_std, (uint64_t)s->config->model.seed);
}

/* Rank 0 sets aside what is later than the checkpoint, and first the model, which may be that of a
 * later step: a start that is killed here leaves no model whose checkpoint is gone. */
static nd_status set_later_aside(nd_run *s)
{
    nd_status status = s->resume.searched ? ND_OK : nd_run_set_aside(s, "model");
    status = status == ND_OK && s->dir ? nd_resume_set_later_aside(&s->resume) : status;
    return nd_run_tell_all(s->worker, "later checkpoints", status,
                           "could not set what is later aside", NULL, 0);
}

nd_status nd_run_load_source(nd_run *s)
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
    ND_TRY(source->found ? load_checkpoint(s, &restored, &saved) : load_fresh(s));
    s->held_step = s->good_step = s->trainer->position.step;
    snprintf(s->good, sizeof s->good, "%s", source->source);
    log_restored(s, &restored);
    ND_TRY(source->found ? set_later_aside(s) : ND_OK);
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

/* State and position of the newest good checkpoint. */
static nd_status load_good(nd_run *s)
{
    nd_restored restored;
    nd_mesh saved;
    if (strcmp(s->good, s->resume.source) != 0) { /* saved by this start */
        s->resume =
            (nd_resume){.found = true, .continues = true, .searched = true, .step = s->good_step};
        snprintf(s->resume.run, sizeof s->resume.run, "%s", s->place.path);
        snprintf(s->resume.source, sizeof s->resume.source, "%s", s->good);
    }
    ND_TRY(load_checkpoint(s, &restored, &saved));
    s->good_step = s->resume.step;
    snprintf(s->good, sizeof s->good, "%s", s->resume.source);
    if (s->dir && nd_resume_is_own(&s->resume)) {
        nd_progress_set_durable_step(&s->worker->progress, s->good_step);
    }
    return ND_OK;
}

enum { REWINDS_MAX = 10 }; /* what diverges again and again needs a person */

/* The state of the checkpoint, in a trainer whose last step was the one before `failed`. */
static nd_status go_back(nd_run *s, int64_t failed, const char *why)
{
    nd_run_position *position = &s->trainer->position;
    int64_t samples = nd_step_blocks(s->config);
    int64_t seen = failed * samples + position->samples_ahead;
    double begin = nd_clock_seconds();
    ND_TRY(load_good(s));
    position->samples_ahead = seen - position->step * samples;
    s->held_step = position->step;
    const nd_run_event event = {
        .kind = ND_RUN_EVENT_RESUMED,
        .step = position->step,
        .path = s->good,
        .seconds = nd_clock_seconds() - begin,
        .restart = s->worker->identity.restart_epoch,
        .rewound_from = failed,
        .reason = why,
        .samples = (failed - position->step) * samples,
    };
    ND_TRY(nd_sinks_event(&s->sinks, &event));
    return nd_run_best_rewound(s);
}

nd_status nd_run_rewind(nd_run *s)
{
    const nd_error error = *nd_error_last();
    int64_t failed = s->trainer->position.step + 1;
    ND_TRY(nd_run_saving_wait(s));
    s->rewinds++;
    if (!s->good[0] || s->rewinds > REWINDS_MAX) {
        return nd_fail(ND_ERR_NUMERIC, "%s; %s", error.message,
                       s->good[0] ? "the run has gone back ten times already"
                                  : "there is no checkpoint yet to go back to");
    }
    if (s->rank->rank == 0) {
        nd_log_warning("%s", error.message);
    }
    return go_back(s, failed, error.message);
}
