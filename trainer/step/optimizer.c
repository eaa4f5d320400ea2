// SPDX-License-Identifier: Apache-2.0
#include "trainer/step/parts.h"

#include <math.h>
#include <stdlib.h>

#include "runtime/base/math.h"

double nd_schedule_lr(const nd_config *config, int64_t step)
{
    double lr = config->optimizer.lr, min_lr = config->optimizer.min_lr;
    int64_t warmup = config->optimizer.warmup_steps, left = config->train.steps - warmup;
    if (step <= warmup) {
        return lr * (double)step / (double)warmup;
    }
    double p = (double)(step - 1 - warmup) / (double)left;
    switch (config->optimizer.schedule) {
    case ND_SCHEDULE_CONSTANT:
        return lr;
    case ND_SCHEDULE_LINEAR:
        return lr + (min_lr - lr) * p;
    case ND_SCHEDULE_COSINE:
        return min_lr + (lr - min_lr) * 0.5 * (1.0 + cos(M_PI * p));
    case ND_SCHEDULE_WSD:
        break;
    }
    const int64_t steps = config->train.steps, given = config->optimizer.decay_steps;
    const int64_t decay = given ? given : (steps + 9) / 10;
    const double decayed = (double)nd_max(0, step - 1 - (steps - decay));
    return lr + (min_lr - lr) * decayed / (double)decay;
}

nd_status nd_optimizer_init(nd_optimizer *optimizer, nd_fsdp *fsdp)
{
    const nd_layout *layout = fsdp->layout;
    *optimizer = (nd_optimizer){.fsdp = fsdp};
    ND_TRY(ND_ALLOC(layout->param_count, &optimizer->ranges));
    for (int i = 0; i < layout->param_count; i++) {
        nd_flat_range range = nd_layout_shard_range(layout, &layout->params[i]);
        if (range.begin < range.end) {
            range.copy = nd_fsdp_resident(fsdp, range.begin);
            range.amax = nd_scales_updated_amax(fsdp->scales, range.begin);
            optimizer->ranges[optimizer->range_count++] = range;
        }
    }
    return ND_OK;
}

void nd_optimizer_fini(nd_optimizer *optimizer)
{
    free(optimizer->ranges);
    optimizer->ranges = NULL;
}

/* Ranges [first, last). */
static nd_status update_ranges(nd_optimizer *optimizer, nd_adamw hyper, int first, int last)
{
    nd_fsdp *fsdp = optimizer->fsdp;
    nd_rank *r = fsdp->rank;
    if (first == last) {
        return ND_OK;
    }
    if (r->config->optimizer.name == ND_OPTIMIZER_SGD) {
        ND_OP(r, ND_TRACE_OPTIMIZER, sgd, .hyper = hyper, .p = fsdp->master, .grad = fsdp->grad,
              .ranges = optimizer->ranges + first, .range_count = last - first);
    } else {
        ND_OP(r, ND_TRACE_OPTIMIZER, adamw, .hyper = hyper, .p = fsdp->master, .m = fsdp->moment1,
              .v = fsdp->moment2, .grad = fsdp->grad, .ranges = optimizer->ranges + first,
              .range_count = last - first);
    }
    return ND_OK;
}

nd_status nd_optimizer_step(nd_optimizer *optimizer, const nd_update_gate *gate, int64_t step,
                            double lr, double grad_norm)
{
    nd_fsdp *fsdp = optimizer->fsdp;
    const nd_config *config = fsdp->rank->config;
    const double max_norm = config->optimizer.max_grad_norm;
    nd_adamw hyper = {
        .lr = (float)lr,
        .beta1 = (float)config->optimizer.betas[0],
        .beta2 = (float)config->optimizer.betas[1],
        .eps = (float)config->optimizer.eps,
        .weight_decay = (float)config->optimizer.weight_decay,
        .grad_scale = max_norm > 0 ? (float)fmin(1, max_norm / (grad_norm + 1e-6)) : 1,
        .bias1 = (float)(1.0 - pow(config->optimizer.betas[0], (double)step)),
        .bias2 = (float)(1.0 - pow(config->optimizer.betas[1], (double)step)),
    };
    bool gated = gate && gate->wait;
    ND_TRY(nd_scales_begin_update(fsdp->scales));
    if (!gated) {
        ND_TRY(update_ranges(optimizer, hyper, 0, optimizer->range_count));
    }
    int first = 0;
    for (int u = 0, last = 0; gated && u < fsdp->layout->unit_count; u++, first = last) {
        const nd_unit *unit = &fsdp->layout->units[u];
        const int64_t end = unit->shard_offset + unit->shard_count;
        while (last < optimizer->range_count && optimizer->ranges[last].begin < end) {
            last++;
        }
        ND_TRY(gate->wait(gate->context, u));
        ND_TRY(update_ranges(optimizer, hyper, first, last));
    }
    ND_ASSERT(!gated || first == optimizer->range_count);
    nd_fsdp_weights_updated(fsdp);
    nd_scales_end_update(fsdp->scales, fsdp->version);
    return ND_OK;
}
