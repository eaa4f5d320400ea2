// SPDX-License-Identifier: Apache-2.0
#include "trainer/step/schedule.h"

#include <math.h>

static double wsd(const nd_config *config, int64_t done)
{
    int64_t steps = config->train.steps;
    int64_t decay =
        config->optimizer.decay_steps ? config->optimizer.decay_steps : (steps + 9) / 10;
    double lr = config->optimizer.lr;
    if (done <= steps - decay) {
        return lr;
    }
    return lr + (config->optimizer.min_lr - lr) * (double)(done - (steps - decay)) / (double)decay;
}

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
    return wsd(config, step - 1);
}
