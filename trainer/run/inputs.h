// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_INPUTS_H
#define ND_RUN_INPUTS_H
/*
 * The files that a run reads, opened and checked: model shape (and weights), training and
 * validation data. Used by the check before any worker starts, by every worker, and by the plan.
 */
#include "runtime/config/config.h"
#include "trainer/layout/shape.h"
#include "trainer/weights/hf_folder.h"
#include "trainer/data/dataset.h"

typedef struct nd_inputs {
    nd_llama_shape shape;
    char *model_folder;    /* NULL for fresh weights */
    nd_hf_reader *weights; /* NULL for fresh weights */
    nd_dataset *data;
    nd_dataset *validation; /* NULL: none */
    bool still_read; /* a thread that hangs in the file system reads the data: it is left open */
} nd_inputs;

/* Shape and weights only, with the checks of shape against mesh. */
nd_status nd_inputs_open_model(const nd_config *config, nd_inputs *inputs);
/* Data too. */
nd_status nd_inputs_open(const nd_config *config, nd_inputs *inputs);
void nd_inputs_close(nd_inputs *inputs);

#endif
