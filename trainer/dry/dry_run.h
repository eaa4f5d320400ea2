// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DRY_DRY_RUN_H
#define ND_DRY_DRY_RUN_H
/*
 * The calls of a step, without a step: the model's own forward and backward run over ops,
 * communicators and memory that do nothing (dry_ops.h), so what is timed is what a step calls,
 * whatever the mesh, the recipe and the recompute mode.
 */
#include "runtime/device/graphs.h"
#include "trainer/precision/filter.h"
#include "trainer/rank.h"
#include "trainer/dry/calls.h"

/*
 * Adds a training step of the rank's configuration, and the forms of a validation, which count
 * nothing. linears: which are in FP8; NULL as the filter says.
 */
nd_status nd_dry_run(const nd_rank *rank, const nd_linear_choice *linears, nd_calls *calls);

/*
 * Makes what the backend keeps for the forms of a training step and of a validation (plans of
 * libraries), so that no step makes any and what cannot be planned is an error now. Nothing where a
 * backend keeps none.
 */
nd_status nd_dry_run_prepare(const nd_rank *rank);

/* What the CUDA graphs of the rank's training steps will hold: the same code records it. */
nd_status nd_dry_run_graphs(const nd_rank *rank, nd_graph_counts *out);

#endif
