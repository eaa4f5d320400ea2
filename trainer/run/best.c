// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/checkpoints.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/view/metrics.h"

int64_t nd_run_best_rule(const nd_config *config)
{
    return config->data.documents == ND_DOCUMENTS_SEPARATE ? config->train.sequence_length : 0;
}

/* True: the last checkpoint is the best one from now on. */
static bool settle(nd_run_best *best)
{
    bool known = best->pending_validated && best->pending_durable;
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
        best->pending_validated = true;
        best->pending_loss = loss;
        (void)settle(best);
    }
}

void nd_run_best_saving(nd_run_best *best, int64_t step)
{
    best->pending_step = step;
    best->pending_loss = best->newest_loss;
    best->pending_validated = step > 0 && best->newest_step == step;
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

static bool is_among(const nd_folder *list, int count, int64_t step)
{
    for (int i = 0; i < count; i++) {
        if (list[i].step == step) {
            return true;
        }
    }
    return false;
}

nd_status nd_run_best_replay(nd_run_best *best, const nd_config *config, const char *run,
                             int64_t step)
{
    nd_metrics metrics = {0};
    nd_run_best found = {0};
    nd_folder *saved = NULL;
    char *path = NULL;
    int count = 0, others = 0;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&path, "%s/metrics.jsonl", run));
    ND_TRY_OUT(nd_metrics_read(path, &metrics));
    ND_TRY_OUT(nd_folder_list(run, ND_FOLDER_WHOLE, &saved, &count));
    const nd_column *losses = nd_metrics_column(&metrics, "validation_loss");
    const nd_column *lengths = nd_metrics_column(&metrics, "separate_length");
    for (size_t i = 0; i < losses->count; i++) {
        const int64_t at = (int64_t)losses->points[i].step;
        const double length = nd_column_at(lengths, losses->points[i].step); /* NaN: joined */
        const bool same = (isnan(length) ? 0 : (int64_t)length) == nd_run_best_rule(config);
        others += at <= step && !same;
        if (at <= step && same) {
            nd_run_best_validated(&found, config, at, losses->points[i].value);
            if (is_among(saved, count, at)) {
                nd_run_best_saving(&found, at);
                nd_run_best_saved(&found, at);
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
    free(path);
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

static bool asks_best(const nd_config *config)
{
    return config->checkpoint.load_best || config->train.early_stopping_patience > 0;
}

/* Rank 0 reads what the folder tells of the validations up to this step; all ranks learn it. */
static nd_status replay(nd_run_checkpoints *c, int64_t step, const char *key)
{
    const nd_worker *worker = c->context->worker;
    if (worker->identity.rank == 0 &&
        nd_run_best_replay(&c->best, worker->rank.config, c->files->dir, step) != ND_OK) {
        nd_log_warning("the validations before step %lld do not count for the best one: %s",
                       (long long)step, nd_error_last()->message);
        nd_error_clear();
        c->best = (nd_run_best){0};
    }
    return nd_run_tell_all(worker, key, ND_OK, "", &c->best, sizeof c->best);
}

nd_status nd_run_best_find(nd_run_checkpoints *c)
{
    const nd_config *config = c->context->worker->rank.config;
    const int64_t step = c->trainer->position.step;
    char path[ND_RESUME_PATH_MAX + 32], name[ND_CHECKPOINT_NAME_MAX];
    if (!c->resume.continues || !asks_best(config)) {
        return ND_OK;
    }
    ND_TRY(replay(c, step, "best validation"));
    snprintf(path, sizeof path, "%s/%s", c->resume.run, nd_checkpoint_name(step, name));
    if (strcmp(path, c->resume.source) == 0) { /* its validation may have been cut off */
        nd_run_best_saving(&c->best, step);
        (void)nd_run_best_saved(&c->best, step);
    }
    c->over = step < config->train.steps && nd_run_best_is_over(&c->best, config);
    if (c->over && c->trainer->rank->rank == 0) {
        nd_log_info("the run has ended early, after step %lld: %lld validations in a row were not "
                    "below the lowest loss; it goes on with a larger "
                    "train.early_stopping_patience (--early-stopping-patience), or 0",
                    (long long)step, (long long)c->best.stale);
    }
    return ND_OK;
}

nd_status nd_run_best_rewound(nd_run_checkpoints *c)
{
    const int64_t step = c->trainer->position.step;
    char key[64];
    if (!asks_best(c->context->worker->rank.config)) {
        return ND_OK;
    }
    const nd_run_best known = c->best;
    snprintf(key, sizeof key, "best validation before rewind %d", c->rewinds);
    ND_TRY(replay(c, step, key));
    nd_run_best_keep(&c->best, &known, step);
    nd_run_best_saving(&c->best, step); /* whose validation may come only now */
    (void)nd_run_best_saved(&c->best, step);
    return ND_OK;
}

nd_status nd_run_set_damaged_aside(const char *run, int64_t step)
{
    char *aside = NULL;
    ND_TRY(nd_checkpoint_set_aside(run, step, "bad", &aside));
    nd_log_warning("the damaged checkpoint is now %s, and the one before it is looked for", aside);
    free(aside);
    return ND_OK;
}

/* The best checkpoint is damaged: looks for the best of the others, which the folder still has. The
 * thread's error says what is damaged; it stays where no other checkpoint was validated. */
static nd_status find_next_best(nd_run_checkpoints *c)
{
    const nd_error error = *nd_error_last();
    const int64_t damaged = c->best.saved_step;
    nd_status status = ND_OK;
    char key[64];
    if (error.cause == ND_CAUSE_OWN) {
        nd_log_warning("%s", error.message);
    }
    if (c->trainer->rank->rank == 0) {
        status = nd_run_set_damaged_aside(c->run, damaged);
    }
    snprintf(key, sizeof key, "best checkpoint %lld set aside", (long long)damaged);
    ND_TRY(nd_run_tell_all(c->context->worker, key, status,
                           "could not set a damaged checkpoint aside", NULL, 0));
    snprintf(key, sizeof key, "best validation without checkpoint %lld", (long long)damaged);
    ND_TRY(replay(c, c->trainer->position.step, key));
    if (c->best.saved_step > 0) {
        return ND_OK;
    }
    return error.cause == ND_CAUSE_OWN ? nd_fail(ND_ERR_DATA, "%s", error.message)
                                       : nd_fail_elsewhere(ND_ERR_DATA, "%s", error.message);
}

/* A load that has failed may have written to the weights, so that those of the last step are to be
 * loaded too. */
nd_status nd_run_checkpoints_load_best(nd_run_checkpoints *c)
{
    const nd_config *config = c->context->worker->rank.config;
    const nd_run_position position = c->trainer->position;
    const nd_run_best *best = &c->best;
    bool whole = true;
    if (!config->checkpoint.load_best || best->saved_step == 0) {
        return ND_OK;
    }
    while (!whole || best->saved_step != position.step) {
        char path[ND_RESUME_PATH_MAX + 32], name[ND_CHECKPOINT_NAME_MAX];
        nd_manifest manifest = {0};
        nd_restored restored;
        snprintf(path, sizeof path, "%s/%s", c->run, nd_checkpoint_name(best->saved_step, name));
        nd_status status = nd_restore_checkpoint(c->trainer, path, &manifest,
                                                 config->checkpoint.verify, &restored);
        nd_manifest_fini(&manifest);
        c->trainer->position = position;
        if (status == ND_OK) {
            break;
        }
        whole = false;
        ND_TRY(status == ND_ERR_DATA ? find_next_best(c) : status);
    }
    if (c->trainer->rank->rank == 0 && best->saved_step != position.step) {
        nd_log_info("the model is that of step %lld, whose validation loss %.6g was the lowest of "
                    "all checkpoints",
                    (long long)best->saved_step, best->saved_loss);
    }
    return ND_OK;
}
