// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_SAMPLES_H
#define ND_RUN_SAMPLES_H
/*
 * Sample texts (train.sample_prompt): at each validation the model in training continues prompts,
 * the likeliest token at a time (of equal ones the lowest id), on whatever mesh it is trained.
 *
 * There is no second copy of the weights and no cache of keys and values: each token is one
 * evaluation of a micro-batch whose first row is the text so far, with zeros behind it, which a
 * causal model does not see. There is one text at a time, and data-parallel ranks compute the same.
 * Memory is planned with the model's and allocated at the start; steps do not know of it, and have
 * the same bits as without.
 */
#include "trainer/generate/requests.h"
#include "trainer/report/report.h"
#include "trainer/run/run.h"
#include "trainer/step/step.h"

typedef struct nd_run_samples {
    nd_trainer *trainer; /* borrowed; NULL: there are no prompts, or they are only checked */
    nd_tokenizer *tokenizer;
    nd_decoder *decoder;
    nd_requests prompts;
    char *text;         /* train.sample_prompt; its lines end with NUL */
    const char **lines; /* [prompts.count] in text */
    nd_ids ends;        /* ids that end a text */
    int32_t *ids;       /* (B, s) of this rank, as are positions */
    int32_t *positions;
    float *logits; /* (vocab); pinned where the device is a GPU */
    nd_bytes out;
} nd_run_samples; /* all zero: none */

/* ND_ERR_CONFIG or ND_ERR_DATA: the prompts cannot be encoded, or leave no room in
 * train.sequence_length. `trainer` NULL: only looks; else it has been committed. */
nd_status nd_run_samples_open(nd_run_samples *s, const nd_config *config, const nd_inputs *inputs,
                              nd_trainer *trainer);
/* The same before any worker starts. */
nd_status nd_run_samples_check(const nd_config *config, const nd_inputs *inputs);
/* Continues all prompts, and gives them to the sinks of rank 0; other ranks have none. Collective.
 * *stopped: the check has ended it. */
nd_status nd_run_samples_write(nd_run_samples *s, const nd_stop_check *check, nd_sinks *sinks,
                               bool *stopped);
void nd_run_samples_close(nd_run_samples *s);

#endif
