// SPDX-License-Identifier: Apache-2.0
/* What a run goes on from: finds it, loads it, and passes over what is damaged. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/run/checkpoints.h"
#include "trainer/view/metrics.h"
#include "trainer/weights/weights.h"

/* The source. */

/* Rank 0: the checkpoint fits the run. */
static nd_status check_source(const nd_run_checkpoints *c)
{
    const nd_config *config = c->context->worker->rank.config;
    nd_manifest manifest = {0};
    if (!c->resume.found) {
        return ND_OK;
    }
    ND_TRY(nd_manifest_read(c->resume.source, &manifest));
    nd_status status =
        nd_resume_check(config, c->context->inputs, c->resume.source, &manifest, true);
    nd_manifest_fini(&manifest);
    return status;
}

/* The key is one for each search, alike on all ranks. `prepared`: rank 0's status so far, which its
 * thread has the error of; the search fails with it. */
static nd_status find(nd_run_checkpoints *c, const nd_resume_search *search, const char *key,
                      nd_status prepared)
{
    const nd_worker *worker = c->context->worker;
    nd_status status = prepared;
    if (worker->identity.rank == 0 && status == ND_OK) {
        const nd_resume before = c->resume;
        status = nd_resume_find(search, &c->resume);
        bool same = strcmp(before.source, c->resume.source) == 0;
        if (status == ND_OK && search->below >= 0 && !c->resume.found) {
            status = nd_fail(ND_ERR_DATA,
                             "no checkpoint of %s can be used: %s is damaged, and there is none "
                             "before it",
                             before.run, before.source);
        }
        status = status == ND_OK && !same ? check_source(c) : status;
    }
    return nd_run_tell_all(worker, key, status, "found nothing to go on from", &c->resume,
                           sizeof c->resume);
}

nd_status nd_run_checkpoints_find(nd_run_checkpoints *c, const nd_run_context *context)
{
    const nd_resume_search search = {.config = context->worker->rank.config,
                                     .run_folder = context->worker->identity.run_folder,
                                     .below = -1};
    c->context = context;
    return find(c, &search, "resume", ND_OK);
}

/* The first search came before the lock of the run folder: what another process has saved, renamed
 * or deleted there meanwhile counts. A checkpoint that was named stays the one. */
static nd_status find_again(nd_run_checkpoints *c)
{
    const nd_resume before = c->resume;
    const nd_resume_search search = {.config = c->context->worker->rank.config,
                                     .run_folder = before.run,
                                     .below = -1,
                                     .sets_aside = true};
    bool named = before.found && !before.searched;
    return before.continues && !named ? find(c, &search, "resume under the lock", ND_OK) : ND_OK;
}

/* A checkpoint was found to be damaged while it was loaded: takes the one before it, of the same
 * run. */
static nd_status fall_back(nd_run_checkpoints *c, const nd_error *error)
{
    const nd_worker *worker = c->context->worker;
    const nd_resume before = c->resume;
    const nd_resume_search search = {.config = worker->rank.config,
                                     .run_folder = before.continues ? before.run
                                                                    : worker->identity.run_folder,
                                     .below = before.step,
                                     .sets_aside = true};
    char key[64];
    nd_status status = ND_OK;
    if (error->cause == ND_CAUSE_OWN) {
        nd_log_warning("%s", error->message);
    }
    if (worker->identity.rank == 0 && !nd_resume_is_own(&c->resume)) {
        nd_log_warning("%s is damaged, and the one before it is looked for; it stays as it is, "
                       "since this run goes on in another folder",
                       c->resume.source);
    } else if (worker->identity.rank == 0) {
        status = nd_run_set_damaged_aside(c->resume.run, c->resume.step);
    }
    snprintf(key, sizeof key, "resume below %lld, rewind %d", (long long)before.step, c->rewinds);
    return find(c, &search, key, status);
}

static void log_restored(const nd_run_checkpoints *c, const nd_restored *restored)
{
    const nd_config *config = c->trainer->rank->config;
    if (c->trainer->rank->rank != 0) {
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
                       c->resume.source);
    }
    if (c->resume.found && !config->checkpoint.verify) {
        nd_log_warning("%s was loaded without comparing its checksums (checkpoint.verify is false)",
                       c->resume.source);
    }
    if (!restored->moments && config->optimizer.name == ND_OPTIMIZER_ADAMW) {
        nd_log_warning("%s has no moments of AdamW, so these begin at zero", c->resume.source);
    }
}

static nd_status load_checkpoint(nd_run_checkpoints *c, nd_restored *restored, nd_mesh *saved)
{
    const bool verify = c->trainer->rank->config->checkpoint.verify;
    for (;;) {
        nd_manifest manifest = {0};
        nd_status status =
            nd_restore_checkpoint(c->trainer, c->resume.source, &manifest, verify, restored);
        if (status == ND_OK) {
            /* The data go on behind the samples that were seen, whatever number a step had; after a
             * rewind the caller knows better. */
            nd_run_position *position = &c->trainer->position;
            position->samples_ahead =
                manifest.samples_seen - position->step * nd_step_blocks(c->trainer->rank->config);
            *saved = manifest.mesh;
        }
        nd_manifest_fini(&manifest);
        if (status != ND_ERR_DATA || !c->resume.searched) {
            return status;
        }
        const nd_error error = *nd_error_last();
        ND_TRY(fall_back(c, &error));
    }
}

static nd_status load_fresh(nd_run_checkpoints *c)
{
    nd_fsdp *fsdp = &c->trainer->model->fsdp;
    const nd_rank *r = c->trainer->rank;
    if (c->context->inputs->weights) {
        return nd_weights_load(fsdp, c->context->inputs->weights);
    }
    return nd_weights_init(fsdp, r->shape.init_std, (uint64_t)r->config->model.seed);
}

nd_status nd_run_checkpoints_load(nd_run_checkpoints *c, nd_trainer *trainer, nd_run_files *files,
                                  nd_status opened)
{
    nd_restored restored = {.moments = true};
    nd_mesh saved = trainer->rank->mesh;
    double begin = nd_clock_seconds();
    c->trainer = trainer;
    c->files = files;
    ND_TRY(nd_run_folder_share(c, opened));
    ND_TRY(find_again(c));
    ND_TRY(c->resume.found ? load_checkpoint(c, &restored, &saved) : load_fresh(c));
    c->held_step = c->good_step = trainer->position.step;
    if (c->resume.found) {
        snprintf(c->good, sizeof c->good, "%s", c->resume.source);
    }
    log_restored(c, &restored);
    if (c->resume.found) { /* by rank 0 alone; all ranks learn how it ended */
        /* First the model, which may be that of a later step: a start that is killed here leaves no
         * model whose checkpoint is gone. */
        nd_status aside = c->resume.searched ? ND_OK : nd_run_files_set_aside(files, "model");
        aside = aside == ND_OK && trainer->rank->rank == 0 ? nd_resume_set_later_aside(&c->resume)
                                                           : aside;
        ND_TRY(nd_run_tell_all(c->context->worker, "later checkpoints", aside,
                               "could not set what is later aside", NULL, 0));
    }
    if (!c->resume.found && !c->resume.continues) {
        return ND_OK;
    }
    const nd_mesh *mesh = &trainer->rank->mesh;
    bool other_mesh = memcmp(saved.size, mesh->size, sizeof saved.size) != 0;
    const nd_run_event event = {
        .kind = ND_RUN_EVENT_RESUMED,
        .mesh = other_mesh ? mesh : NULL,
        .mesh_was = other_mesh ? &saved : NULL,
        .step = trainer->position.step,
        .path = c->resume.found ? c->resume.source : "the start",
        .seconds = nd_clock_seconds() - begin,
        .restart = c->context->worker->identity.restart_epoch,
    };
    ND_TRY(nd_sinks_event(&files->sinks, &event));
    return nd_run_best_find(c);
}

/* *out is true when the metrics.jsonl of the run has no validation of this step. A file that is
 * missing or damaged has none, so that it is made again. */
static nd_status lacks_validation(const char *run, int64_t step, bool *out)
{
    char path[ND_RESUME_PATH_MAX + 32];
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

nd_status nd_run_checkpoints_owes_validation(const nd_run_checkpoints *c, bool *out)
{
    const nd_worker *worker = c->context->worker;
    nd_status status = ND_OK;
    bool lacks = false;
    *out = false;
    if (!c->resume.found || !c->resume.continues) {
        return ND_OK;
    }
    if (worker->identity.rank == 0) {
        status = lacks_validation(c->resume.run, c->trainer->position.step, &lacks);
    }
    ND_TRY(nd_run_tell_all(worker, "validation owed", status, "cannot read metrics.jsonl", &lacks,
                           sizeof lacks));
    *out = lacks;
    return ND_OK;
}

nd_status nd_run_checkpoints_load_good(nd_run_checkpoints *c)
{
    nd_restored restored;
    nd_mesh saved;
    if (strcmp(c->good, c->resume.source) != 0) { /* saved by this start */
        c->resume =
            (nd_resume){.found = true, .continues = true, .searched = true, .step = c->good_step};
        snprintf(c->resume.run, sizeof c->resume.run, "%s", c->run);
        snprintf(c->resume.source, sizeof c->resume.source, "%s", c->good);
    }
    ND_TRY(load_checkpoint(c, &restored, &saved));
    c->good_step = c->resume.step;
    snprintf(c->good, sizeof c->good, "%s", c->resume.source);
    if (c->trainer->rank->rank == 0 && nd_resume_is_own(&c->resume)) {
        nd_progress_set_durable_step(&c->context->worker->progress, c->good_step);
    }
    return ND_OK;
}
