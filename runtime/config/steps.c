// SPDX-License-Identifier: Apache-2.0
/* The number of steps, given or from epochs, and the keys that depend on it. */
#include <math.h>

#include "runtime/config/reader.h"

/* As transformers does: the product is rounded up. A configuration that was resolved before has
 * both keys, and they agree. */
nd_status nd_config_resolve_warmup(nd_config *c)
{
    int64_t steps = (int64_t)ceil((double)c->train.steps * c->optimizer.warmup_ratio);
    if (c->optimizer.warmup_ratio == 0 || c->train.steps == 0) { /* 0: not known yet */
        return ND_OK;
    }
    if (c->optimizer.warmup_steps != 0 && c->optimizer.warmup_steps != steps) {
        return nd_fail(
            ND_ERR_CONFIG,
            "optimizer.warmup_steps is %lld, but optimizer.warmup_ratio %g of %lld steps "
            "is %lld; give one of them",
            nd_ll(c->optimizer.warmup_steps), c->optimizer.warmup_ratio, nd_ll(c->train.steps),
            nd_ll(steps));
    }
    c->optimizer.warmup_steps = steps;
    return ND_OK;
}

nd_status nd_config_check_best(const nd_config *c)
{
    const int64_t every = c->train.validation_interval, saves = c->checkpoint.interval;
    return !c->checkpoint.load_best || every <= 0 || saves <= 0 || saves % every == 0
               ? ND_OK /* -1: not known yet */
               : nd_fail(ND_ERR_CONFIG,
                         "checkpoint.load_best is true, but checkpoint.interval %lld is not a "
                         "multiple of train.validation_interval %lld, so some states would be "
                         "saved without a validation; give --save-steps %lld",
                         nd_ll(saves), nd_ll(every), nd_ll((saves / every + 1) * every));
}

/* Steps of so many samples; one that is not full counts, unless the data end with it. */
static nd_status steps_of_epochs(const nd_config *c, const nd_epochs *e, int64_t *out)
{
    const double samples = c->train.epochs * (double)e->samples, steps = samples / (double)e->step;
    /* 0.1 x 30 is a little more than 3. */
    double whole = ceil(steps - 1e-9 * steps);
    if (whole * (double)e->step > (double)e->limit && floor(steps) >= 1) {
        whole = floor(steps);
    }
    whole = whole < 1 ? 1 : whole;
    if (whole > 1e9) {
        return nd_fail(
            ND_ERR_CONFIG,
            "train.epochs %g of %lld samples would be %.3g steps of %lld; at most 10^9 are "
            "supported",
            c->train.epochs, nd_ll(e->samples), whole, nd_ll(e->step));
    }
    *out = (int64_t)whole;
    return ND_OK;
}

nd_status nd_config_check_end(const nd_config *config, const nd_epochs *e, int64_t step,
                              int64_t seen)
{
    const int64_t left = seen < e->limit ? (e->limit - seen) / e->step : 0;
    if (config->train.steps - step <= left) {
        return ND_OK;
    }
    return config->train.epochs > 0
               ? nd_fail(ND_ERR_CONFIG,
                         "train.epochs is %g, which is %lld steps of %lld samples, but the epochs "
                         "in data.path are over after step %lld; give fewer epochs there, more in "
                         "data.path, or a source without a limit",
                         config->train.epochs, nd_ll(config->train.steps), nd_ll(e->step),
                         nd_ll(step + left))
               : nd_fail(ND_ERR_CONFIG,
                         "train.steps is %lld, and with %lld samples a step the epochs of "
                         "data.path are over after step %lld; give fewer steps, more epochs, or a "
                         "source without a limit",
                         nd_ll(config->train.steps), nd_ll(e->step), nd_ll(step + left));
}

nd_status nd_config_take_epochs(nd_config *config, const nd_epochs *e)
{
    const int64_t epoch = (e->samples - 1) / e->step + 1;
    int64_t steps = config->train.steps;
    ND_ASSERT(config->resolved && e->samples >= 1 && e->step >= 1);
    if (config->train.epochs > 0) {
        ND_TRY(steps_of_epochs(config, e, &steps));
    }
    if (config->train.steps != 0 && config->train.steps != steps) {
        return nd_fail(
            ND_ERR_CONFIG,
            "train.steps is %lld, but train.epochs %g of %lld samples is %lld steps of %lld; "
            "give one of them",
            nd_ll(config->train.steps), config->train.epochs, nd_ll(e->samples), nd_ll(steps),
            nd_ll(e->step));
    }
    config->train.steps = steps;
    ND_TRY(config->checkpoint.resume[0] ? ND_OK : nd_config_check_end(config, e, 0, 0));
    if (config->train.validation_interval < 0) {
        config->train.validation_interval = epoch;
    }
    if (config->checkpoint.interval < 0) {
        config->checkpoint.interval = epoch;
    }
    ND_TRY(nd_config_resolve_warmup(config));
    ND_TRY(nd_config_check_log(config));
    return nd_config_check_best(config);
}
