// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_BANNER_H
#define ND_RUN_BANNER_H
/* What a run says of itself on the terminal before its first step. */
#include "trainer/run/run.h"
#include "trainer/step/trainer.h"

/* Rank 0, after its inputs are open and its memory is planned; `dir` is the run folder. */
void nd_echo_run(const nd_run_context *run, const nd_trainer *trainer, const char *dir);

#endif
