// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMMANDS_GPU_ESTIMATE_H
#define ND_COMMANDS_GPU_ESTIMATE_H
/*
 * How long a step would take on GPUs that are not here: the ops of a dry run, each kind at a rate
 * that is printed with the result. For `ndtrain plan --explain`.
 */
#include <stdio.h>

#include "trainer/step/step.h"

/* A row for each kind of GPU, and what they assume. Runs a step without computing it. */
nd_status nd_gpu_estimates_print(FILE *out, const nd_trainer *trainer);

#endif
