// SPDX-License-Identifier: Apache-2.0
#ifndef ND_STEP_OPTIMIZER_H
#define ND_STEP_OPTIMIZER_H
/* The update of this rank's shards: clip factor, AdamW or SGD, weight decay on matrices only. */
#include "trainer/parallel/fsdp.h"

typedef struct nd_optimizer {
    nd_fsdp *fsdp;
    nd_flat_range *ranges;
    int range_count;
} nd_optimizer;

nd_status nd_optimizer_init(nd_optimizer *optimizer, nd_fsdp *fsdp);
/* After nd_fsdp_bind: where the plan keeps weights in BF16, the update writes them too. */
void nd_optimizer_bind(nd_optimizer *optimizer);
void nd_optimizer_fini(nd_optimizer *optimizer);

/*
 * One update with the learning rate of `step` (from 1). grad_norm: global; gradients are scaled by
 * min(1, max_grad_norm / (grad_norm + 1e-6)) as torch.nn.utils.clip_grad_norm_ does, unless
 * max_grad_norm is 0.
 */
nd_status nd_optimizer_step(nd_optimizer *optimizer, int64_t step, double lr, double grad_norm);

#endif
