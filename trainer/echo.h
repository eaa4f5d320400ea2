// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TRAINER_ECHO_H
#define ND_TRAINER_ECHO_H
/* What a run says of itself on the terminal before its first step. */
#include "trainer/train.h"
#include "trainer/trainer.h"

/* Rank 0, after its inputs are open and its memory is planned; `dir` is the run folder. */
void nd_echo_run(const nd_run_context *run, const nd_trainer *trainer, const char *dir);

#endif
