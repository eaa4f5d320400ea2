// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/best.h"

#include <math.h>
#include <stdlib.h>

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

static bool is_among(const int64_t *steps, int count, int64_t step)
{
    for (int i = 0; i < count; i++) {
        if (steps[i] == step) {
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
    int64_t *saved = NULL;
    char *path = NULL;
    int count = 0, others = 0;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&path, "%s/metrics.jsonl", run));
    ND_TRY_OUT(nd_metrics_read(path, &metrics));
    ND_TRY_OUT(nd_checkpoint_list(run, &saved, &count));
    const nd_metric_table *validations = &metrics.validations;
    const double *steps = nd_metrics_column(&metrics, validations, "step");
    const double *losses = nd_metrics_column(&metrics, validations, "validation_loss");
    const double *lengths = nd_metrics_column(&metrics, validations, "separate_length");
    for (size_t i = 0; i < validations->rows; i++) {
        const int64_t at = (int64_t)steps[i];
        const bool same = (isnan(lengths[i]) ? 0 : (int64_t)lengths[i]) == nd_run_best_rule(config);
        others += at <= step && !same;
        if (at <= step && same) {
            nd_run_best_validated(&found, config, at, losses[i]);
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
