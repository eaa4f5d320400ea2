// SPDX-License-Identifier: Apache-2.0
#ifndef ND_GENERATE_MODEL_FILES_H
#define ND_GENERATE_MODEL_FILES_H
/*
 * A model by the name that a user gives, with its tokenizer: whatever holds weights.
 *
 *   a Hugging Face folder     config.json and safetensors
 *   a GGUF file               the same in one
 *   ORG/NAME                  such a folder in the local Hugging Face cache
 *   a checkpoint of ours      RUN/checkpoint-STEP: its F32 state, on whatever mesh it was saved
 *   a run folder              RUN/model, or else its newest checkpoint
 *
 * Weights are read by each rank: its own elements, straight into its shards.
 */
#include "trainer/checkpoint/source.h"
#include "trainer/text/tokenizer.h"
#include "trainer/weights/weights.h"

typedef enum nd_model_kind { ND_MODEL_FOLDER = 0, ND_MODEL_CHECKPOINT } nd_model_kind;

typedef struct nd_model_files {
    nd_model_kind kind;
    char *folder;      /* of the weights; owned */
    char *side;        /* folder with tokenizer and generation_config.json; NULL: none; owned */
    bool side_is_base; /* of a checkpoint: it is that of the model which the run began with */
    nd_shape shape;
    bool bytes;           /* ids are bytes, and `side` need not have a tokenizer */
    nd_hf_reader *reader; /* ND_MODEL_FOLDER */
    nd_manifest manifest; /* ND_MODEL_CHECKPOINT */
} nd_model_files;

/*
 * Finds the model and reads its shape; no weights yet. ND_ERR_DATA: there is nothing of that
 * name, or it is damaged, or no model.
 */
nd_status nd_model_files_open(const char *name, nd_model_files *out);
void nd_model_files_close(nd_model_files *files); /* an all-zero one is legal */

/*
 * Its tokenizer. `setting`: a tokenizer.json, its folder, "bytes", "file" (none: there are only
 * ids), or NULL, which is the model's own, or that of the run of a checkpoint. *out is NULL when
 * there is none. *path: where it is, for nd_corpus_eod; NULL for bytes; owned by the caller.
 * ND_ERR_CONFIG: it is not there; ND_ERR_DATA: it is damaged, or not the one that the run had.
 */
nd_status nd_model_files_tokenizer(const nd_model_files *files, const char *setting, char **path,
                                   nd_tokenizer **out);

/* train.sequence_length of the run that made the model: of the checkpoint, or of run.json in the
 * folder that the model is in. 0: unknown. */
nd_status nd_model_files_run_length(const nd_model_files *files, int64_t *length);

/* The weights into this rank's shards, after the memory was committed. Collective. */
nd_status nd_model_files_load(const nd_model_files *files, nd_fsdp *fsdp);

#endif
