// SPDX-License-Identifier: Apache-2.0
#ifndef ND_STEP_SCHEDULE_H
#define ND_STEP_SCHEDULE_H
/*
 * Learning rate of a step: a pure function of the configuration. Warm-up is linear, (step /
 * warmup_steps) lr for steps 1..warmup_steps. After it, with p in [0, 1) the fraction of the
 * remaining steps done before this one, so that the first has lr and no step is lost to a rate of
 * 0:
 *   constant  lr
 *   linear    lr + (min_lr - lr) p
 *   cosine    min_lr + (lr - min_lr) (1 + cos(pi p)) / 2
 *   wsd       lr, then linear to min_lr over the last decay_steps (Hu et al., MiniCPM, 2024)
 */
#include "runtime/config/config.h"

double nd_schedule_lr(const nd_config *config, int64_t step); /* step from 1 to train.steps */

#endif
