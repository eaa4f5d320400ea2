// SPDX-License-Identifier: Apache-2.0
#ifndef ND_STEP_PARTS_H
#define ND_STEP_PARTS_H
/*
 * Parts of a step that are private to trainer/step: the learning rate, and memory that a rank uses
 * outside the planned allocation (the budget).
 *
 * The budget counts libraries, transport and data loader. On a GPU some of that memory is in use
 * when memory is planned, and is counted as it is. Kernels' code, NCCL's buffers and CUDA graphs
 * come with the first steps and can only be estimated: how much they take depends on links and
 * driver, and NCCL keeps nothing on the GPU where ranks meet through host memory. So a plan that
 * does not fit is an error, and a plan that leaves too little for them a warning; if they do run
 * out of memory, that error says what the plan holds.
 */
#include "runtime/base/process.h"
#include "runtime/device/graphs.h"
#include "runtime/device/host_memory.h"
#include "runtime/device/memplan.h"
#include "trainer/step/step.h"

/*
 * Learning rate of a step, a pure function of the configuration; step from 1 to train.steps.
 * Warm-up is linear, (step / warmup_steps) lr for steps 1..warmup_steps. After it, with p in [0, 1)
 * the fraction of the remaining steps done before this one, so that the first has lr and no step is
 * lost to a rate of 0:
 *   constant  lr
 *   linear    lr + (min_lr - lr) p
 *   cosine    min_lr + (lr - min_lr) (1 + cos(pi p)) / 2
 *   wsd       lr, then linear to min_lr over the last decay_steps (Hu et al., MiniCPM, 2024)
 */
double nd_schedule_lr(const nd_config *config, int64_t step);

/* This comes after the memory plan was committed. Where weights are kept in BF16, the update writes
 * them too. */
nd_status nd_optimizer_init(nd_optimizer *optimizer, nd_fsdp *fsdp);
void nd_optimizer_fini(nd_optimizer *optimizer);
/*
 * One update with the learning rate of `step` (from 1). grad_norm: global; gradients are scaled by
 * min(1, max_grad_norm / (grad_norm + 1e-6)) as torch.nn.utils.clip_grad_norm_ does, unless
 * max_grad_norm is 0. With a gate (NULL: none) the units are updated one after the other, each
 * after its wait; the result has the same bits.
 */
nd_status nd_optimizer_step(nd_optimizer *optimizer, const nd_update_gate *gate, int64_t step,
                            double lr, double grad_norm);

/*
 * The work of a rank as a number, such that the largest of all ranks' nd_work_most is that of the
 * slowest rank, and the largest of their nd_work_least that of the fastest. Microseconds, at most
 * 2^38 of them (three days); ranks below 2^24. Both are 0 where the work is not known.
 */
int64_t nd_work_most(double seconds, int rank);
int64_t nd_work_least(double seconds);
nd_work nd_work_of(int64_t most, int64_t least);

/*
 * True if a finite loss is a spike: more than `factor` times the median of the last losses, of
 * which there must be some. The losses are equal on every rank, and so is the answer. factor 0:
 * never.
 */
bool nd_spike_is(const nd_recent_losses *recent, double factor, double loss, double *median);
/* The loss of a step counts for those after it; factor 0: nothing is kept. */
void nd_spike_note(nd_recent_losses *recent, double factor, double loss);

/* True if `workers` workers of a host, each with a plan of `bytes`, take more than three quarters
 * of its memory or more than is free, or if one plan takes more than three quarters of what the
 * worker's own limit leaves. */
bool nd_budget_exceeds(size_t bytes, int workers, const nd_host_memory *host,
                       const nd_memory_limit *limit);
/* Returns a step's status; to ND_ERR_RESOURCE of a GPU it adds what the plan holds. */
nd_status nd_budget_explain(const nd_trainer *trainer, nd_status status);

#endif
