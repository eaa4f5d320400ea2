// SPDX-License-Identifier: Apache-2.0
/* Which of the validated states of a run is the best one. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/run/state.h"
#include "trainer/view/metrics.h"

int64_t nd_run_best_rule(const nd_config *config)
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
        const bool same = (isnan(length) ? 0 : (int64_t)length) == nd_run_best_rule(config);
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
    if (strcmp(path, s->resume.source) == 0) {
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
