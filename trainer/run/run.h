// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_RUN_H
#define ND_RUN_RUN_H
/*
 * The run of one worker: its input files, the comparison of settings between ranks, and the loop
 * over steps with validation and the saved model.
 */
#include "runtime/config/config.h"
#include "trainer/data/data.h"
#include "trainer/layout/layout.h"
#include "trainer/report/report.h"
#include "trainer/step/step.h"
#include "trainer/weights/weights.h"
#include "trainer/worker/worker.h"

/* The files that a run reads, opened and checked. Used by the check before any worker starts, by
 * every worker, and by the plan. */
typedef struct nd_inputs {
    nd_shape shape;
    char *model_folder;    /* NULL for fresh weights */
    uint64_t side_bytes;   /* of the files beside its weights that a saved model gets */
    nd_hf_reader *weights; /* NULL for fresh weights */
    char *tokenizer;       /* the tokenizer.json that data.tokenizer names, or NULL */
    nd_dataset *data;
    nd_dataset *validation; /* NULL: none */
    const atomic_bool
        *stop;       /* set before opening: ends encoding of text early; NULL: nothing does */
    bool still_read; /* a thread that hangs in the file system reads the data: it stays open */
} nd_inputs;

/* Shape and weights only, with the checks of shape against mesh. */
nd_status nd_inputs_open_model(const nd_config *config, nd_inputs *inputs);
/* Like nd_inputs_open_model, with training and validation data, whose size settles train.epochs
 * (nd_config_take_epochs). Where the model's config.json has no eos_token_id and data.append_eod
 * ends documents, the shape has the tokenizer's end of text. data.documents becomes join, or
 * separate where some data are. */
nd_status nd_inputs_open(nd_config *config, nd_inputs *inputs);
/* Samples of the open data, and of a step of this configuration. */
nd_epochs nd_inputs_epochs(const nd_config *config, const nd_inputs *inputs);
/* model.verify: ND_ERR_DATA names a file of the model's folder that differs from its SHA256SUMS.
 * Reads all of them, so once per host is enough. "": there is no folder. */
nd_status nd_inputs_verify_folder(const nd_config *config, const char *folder);
void nd_inputs_close(nd_inputs *inputs);
/* Data for these inputs (their shape and tokenizer), by a path: a file, a folder or a pattern.
 * Owned by the caller. */
nd_status nd_inputs_open_data(const nd_config *config, const nd_inputs *inputs, const char *path,
                              nd_dataset **out);
/* Like nd_inputs_open_data, by a text as data.path has it, which may name several sources. */
nd_status nd_inputs_open_sources(const nd_config *config, const nd_inputs *inputs, const char *text,
                                 nd_dataset **out);
/* Warns of documents that are separate on a GPU where its plain attention kernels compute them.
 * device: NULL where it is not open, and as a Hopper one. */
void nd_banner_warn_of_documents(const nd_config *config, const nd_shape *shape, bool gpu,
                                 const nd_device *device);
/* Finds whether such a path is a file of token ids, or has token files (.bin). */
nd_status nd_inputs_hold_ids(const nd_config *config, const char *path, bool *ids);
/*
 * The tokenizer.json that data.tokenizer names; NULL for bytes and file. `model_folder` and
 * `model_config` are those of the run, NULL or "" where there is none. ND_ERR_CONFIG when it does
 * not exist. Owned by the caller.
 */
nd_status nd_inputs_find_tokenizer(const char *setting, const char *model_folder,
                                   const char *model_config, char **out);
/* Prints BEFORE, key, BETWEEN and 64 hexadecimal digits, a line for the model's config and each of
 * data.path and data.validation_path. */
nd_status nd_inputs_print_digests(const nd_inputs *inputs, const char *before, char between,
                                  FILE *out);

/*
 * Ranks that no ndlaunch started compare their configurations themselves: the keys of the job, and
 * digests of model and data in place of their paths, as ndlaunch does between nodes. All ranks call
 * it. ND_ERR_CONFIG on all of them when one differs from rank 0; the first that differs gives the
 * key and both values, the others only its number.
 */
nd_status nd_settings_compare(nd_worker *worker, const nd_config *config, const nd_inputs *inputs);
/* Like nd_settings_compare, for any text of lines, once in a job, whoever started it. */
nd_status nd_settings_compare_text(const nd_worker *worker, const char *text);

/* Warns of the steps from `begin` on (0: all) and of the validations that have no label which
 * counts in the loss, as far as a few million tokens tell. `samples_ahead`: nd_run_position's. */
nd_status nd_inputs_warn_of_labels(const nd_config *config, const nd_inputs *inputs, int64_t begin,
                                   int64_t samples_ahead);

/* Before any worker starts: whether the run folder could be made and used. Makes nothing.
 * `continued`: the folder of a run that goes on in it, or NULL. */
nd_status nd_run_folder_check(const nd_config *config, const nd_inputs *inputs,
                              const char *continued);

/* Before any worker starts: the source that checkpoint.resume names is there and fits the run, and
 * checkpoint.allow names only keys that are compared (else ND_ERR_CONFIG). */
nd_status nd_resume_preflight(const nd_config *config, const nd_inputs *inputs);

enum { ND_LIBRARY_COUNT = 5 };

typedef struct nd_run_text {
    const char *key, *value;
} nd_run_text;

/* Fills name and version of the libraries that a run's bits may depend on; returns their number.
 * Strings are static. `open`: also that of UCX where it is not in use, which is opened for it. */
int nd_library_versions(bool open, nd_run_text out[ND_LIBRARY_COUNT]);

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
typedef struct nd_run_samples nd_run_samples;
/* *out stays NULL where there are no prompts; to be closed after a failure too. `trainer` NULL:
 * only looks; else it has been committed. ND_ERR_CONFIG or ND_ERR_DATA: the prompts cannot be
 * encoded, or leave no room in train.sequence_length. */
nd_status nd_run_samples_open(const nd_config *config, const nd_inputs *inputs, nd_trainer *trainer,
                              nd_run_samples **out);
void nd_run_samples_close(nd_run_samples *s); /* NULL is legal, as above */

/* The worker is joined, and the inputs are open. The command line is for run.json. */
nd_status nd_train(nd_worker *worker, nd_inputs *inputs, int argc, char *const *argv);

/* Asks the run to end at the next step boundary, alike on all ranks (ND_ERR_PREEMPTED).
 * Async-signal-safe. */
void nd_train_request_stop(int signal_number);
/* Returns the flag that nd_train_request_stop sets. */
const atomic_bool *nd_train_stop_flag(void);

#endif
