// SPDX-License-Identifier: Apache-2.0
#ifndef ND_STEP_BUDGET_H
#define ND_STEP_BUDGET_H
/*
 * Memory of a rank beside its one planned allocation: of libraries, of the transport, of the
 * loader.
 *
 * On a GPU some of it is there when memory is planned, and is counted as it is. Kernels' code,
 * NCCL's buffers and CUDA graphs come with the first steps and can only be estimated: how much they
 * take depends on links and driver, and NCCL keeps nothing on the GPU where ranks meet through host
 * memory. So a plan that does not fit is an error, a plan that leaves too little for them a
 * warning; and if they do run out of memory, that error says what the plan holds.
 */
#include "runtime/device/graphs.h"
#include "runtime/device/memplan.h"
#include "trainer/rank.h"

/* `graphs`: what CUDA graphs will hold. Counted in the plan, not allocated:
 * what is on the device, so not the loader's memory where that is a GPU. */
void nd_beside_plan(const nd_rank *rank, const nd_graph_counts *graphs, nd_memplan *plan);
/* What kernels, NCCL and CUDA graphs take of a GPU after the plan; 0 on a CPU. */
size_t nd_beside_later(const nd_rank *rank, const nd_graph_counts *graphs);
/* nd_memplan_commit, with the warning. ND_ERR_RESOURCE says also what comes later. */
nd_status nd_beside_commit(const nd_rank *rank, const nd_graph_counts *graphs, nd_memplan *plan);
/* A step's status; ND_ERR_RESOURCE of a GPU says what the plan holds. */
nd_status nd_beside_explain(const nd_rank *rank, const nd_graph_counts *graphs,
                            const nd_memplan *plan, nd_status status);

#endif
