// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_AGREEMENT_H
#define ND_RUN_AGREEMENT_H
/*
 * Ranks that no ndlaunch started compare their configurations themselves: the keys of the job, and
 * digests of model and data in place of their paths, as ndlaunch does between nodes.
 */
#include "trainer/run/inputs.h"
#include "trainer/worker/worker.h"

/* Calls visit("model.config", 64 hexadecimal digits), then data.path and data.validation_path. */
nd_status nd_inputs_each_digest(const nd_inputs *inputs,
                                void (*visit)(void *context, const char *key, const char *hex),
                                void *context);

/*
 * All ranks call it. ND_ERR_CONFIG on all of them when one differs from rank 0; the first that does
 * gives the key and both values, the others only its number. Sets the worker's voice.
 */
nd_status nd_agree(nd_worker *worker, const nd_config *config, const nd_inputs *inputs);

#endif
