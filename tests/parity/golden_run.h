// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_PARITY_GOLDEN_RUN_H
#define TESTS_PARITY_GOLDEN_RUN_H
/*
 * The model and the data of a whole-model golden, on one worker with the product's own trainer. The
 * device is that of rank_device.h: the CPU, a GPU, or a GPU's double.
 */
#include "tests/parity/golden_data.h"
#include "tests/parity/golden_reader.h"
#include "trainer/weights/weights.h"
#include "trainer/step/step.h"

/* The goldens of joined documents, in the order in which they were added. */
#define EACH_FAMILY_GOLDEN(X)                                                                      \
    X(llama2)                                                                                      \
    X(llama3)                                                                                      \
    X(tied)                                                                                        \
    X(llama_bias)                                                                                  \
    X(qwen2)                                                                                       \
    X(qwen3)                                                                                       \
    X(seed_oss)                                                                                    \
    X(mistral)                                                                                     \
    X(phi3)                                                                                        \
    X(qwen2_yarn)                                                                                  \
    X(mistral_yarn)                                                                                \
    X(ministral)                                                                                   \
    X(qwen3_window)                                                                                \
    X(granite)                                                                                     \
    X(smollm3)                                                                                     \
    X(phi3_longrope)                                                                               \
    X(ministral3)                                                                                  \
    X(olmo2)                                                                                       \
    X(olmo3)                                                                                       \
    X(exaone4)                                                                                     \
    X(glm4)                                                                                        \
    X(gemma3)

enum { GOLDEN_STEPS = 12 }; /* of goldens of whole models but for FP8 */

/* Distances in F32: of gradients of the first step, and of weights after the last one. */
#define GOLDEN_GRADIENT_BOUND 1e-4
#define GOLDEN_FINAL_BOUND    1.5e-3

typedef struct golden_run {
    nd_golden *golden;
    nd_hf_reader *weights;
    nd_config config;
    nd_progress progress;
    nd_rank rank;
    nd_transport *self;
    nd_trainer *trainer;
    tempdir dir;                    /* config.json and model.safetensors */
    int64_t steps, batch, sequence; /* of the data */
    int32_t *inputs, *labels, *places, *positions, *first_keys; /* of all steps; the last two NULL:
                                                                   documents are joined */
} golden_run;

/* How it trains; what is zero is the default. */
typedef struct golden_options {
    nd_precision precision;
    nd_fp8_recipe recipe;
    bool all_gather; /* weights become codes from their F32 values */
    int64_t margin;
    bool history_max;     /* delayed scales follow the largest amax of the history, not the last */
    int64_t accumulation; /* micro-batches of a step, each of one golden step's data; 0: one */
    bool separate;        /* the golden has positions, which begin at 0 in each document */
} golden_options;

/* `name`: a folder of tests/parity/goldens. Assertions of Criterion on failure. */
void golden_run_open(golden_run *run, const char *name, golden_options options);
void golden_run_close(golden_run *run);
/* The data of golden step `step`; with accumulation, of as many from there on. */
nd_step_batch golden_run_batch(const golden_run *run, int64_t step);
/* |got - want| / |want| of the tensor `kind`.NAME that the parameter is in, told from sketches;
 * values: of each parameter of the layout, in the order that it has here. */
double golden_run_distance(const golden_run *run, const char *kind, const nd_param *param,
                           const float *const *values);
/* Each tensor is near the golden's: the weights after the last step if `final`, else the gradients
 * of the first one. `name` says whose they are; values as above. */
void golden_run_expect_tensors(const golden_run *run, const char *name, bool final,
                               const float *const *values);
/* The shard `state` of the trainer (weights, gradients) on the host; the caller frees it. */
float *golden_run_state(golden_run *run, const float *state);

#endif
