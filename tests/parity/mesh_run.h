// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_PARITY_MESH_RUN_H
#define TESTS_PARITY_MESH_RUN_H
/*
 * Trains a tiny Llama for some steps on a mesh of ranks that are threads of this process, with the
 * product's own trainer, loader and ops, and collects what meshes are compared by: losses, norms,
 * step-1 gradients and final weights as whole tensors. Replicas that should hold the same bytes are
 * compared on the way.
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/comm/comm.h"
#include "runtime/config/config.h"
#include "trainer/layout/layout.h"
#include "trainer/step/step.h"

enum { MESH_RUN_MAX_STEPS = 32 };

typedef struct mesh_case {
    const char *name;
    int dp_replicate, dp_shard, cp, tp;
    int64_t micro_batch;
    bool zero2; /* reshard_after_forward false */
    bool ring;
    nd_recompute recompute;
    int ulysses; /* nd_mesh.ulysses */
    int mlp_pieces;
} mesh_case;

struct nd_trainer;

typedef struct mesh_job {
    nd_shape shape;
    const char *data_path;
    const char *second_path; /* NULL; else it is mixed in, with 0.4 of the samples */
    bool one_loss;           /* the losses of the two are not told apart */
    nd_data_format format;
    bool separate;       /* documents */
    int32_t end_of_text; /* an id that ends them; 0: none */
    bool running;        /* positions of them */
    const char *tokenizer;
    int64_t global_batch, sequence, steps;
    int64_t first_step; /* steps that were done before; `start` restores their state */
    nd_optimizer_kind optimizer;
    nd_precision precision;
    double lr, max_grad_norm, weight_decay;
    /* FP8, with precision ND_PRECISION_FP8 */
    nd_fp8_recipe recipe;
    nd_fp8_amax amax_compute;
    int64_t history_length;
    bool all_gather;
    const char *filter; /* NULL: accelerate */
    bool bf16_weights;  /* initial weights are rounded to BF16 */
    nd_nonfinite nonfinite;
    int64_t health_interval;
    int late_rank; /* its loader seems to have waited for late_seconds in every step */
    double late_seconds;
    bool autotune;
    const char *autotune_from;
    bool cuda_graphs;
    bool nccl_alone;
    int host_ranks; /* nd_rank.host_ranks */
    int threads;    /* of each rank's CPU ops; 0: one */
    bool reference; /* with the ops of kernels/ref */
    nd_internal_limits limits;
    size_t staging_bytes; /* nd_transport.staging_bytes */
    bool validates;       /* mesh_result.validation: the samples of the first step */
    nd_status (*schedule)(int micros, nd_schedule *out); /* of each step; NULL: sequential */
    /* NULL, or puts other tokens in place of those of a rank's batch, which has its positions. */
    void (*batch)(void *context, const nd_rank *rank, int64_t step, nd_step_batch *batch);
    /* Called on every rank, at the same time: after the weights were initialized and after the last
     * step; before and after every step (from 0), and after the
     * gradients of the first one. */
    nd_status (*start)(void *context, struct nd_trainer *trainer);
    nd_status (*end)(void *context, struct nd_trainer *trainer);
    nd_status (*before_step)(void *context, struct nd_trainer *trainer, int64_t step);
    nd_status (*after_step)(void *context, struct nd_trainer *trainer, int64_t step);
    nd_status (*observe)(void *context, struct nd_trainer *trainer);
    /* NULL, or called after `end`: restores an older state of this run. The steps from there are
     * done again and must give the same bits. */
    nd_status (*rewind)(void *context, struct nd_trainer *trainer);
    void *context;
} mesh_job;

typedef struct mesh_result {
    int64_t steps;
    double loss[MESH_RUN_MAX_STEPS], norm[MESH_RUN_MAX_STEPS];
    double source_sums[MESH_RUN_MAX_STEPS][4]; /* nd_step_result.source_sums */
    nd_work work[MESH_RUN_MAX_STEPS];
    double validation;
    int tensors;
    char (*names)[96];
    int64_t *sizes;
    float **gradients; /* of step 1, unclipped, [tensors][sizes] */
    float **weights;   /* after the last step */
    /* Rank 0's: calls of its groups' operations during the steps, and its planned bytes of
     * activations. */
    int64_t calls[ND_GROUP_COUNT][ND_COMM_OP_COUNT];
    size_t activation_bytes;
    char *autotune; /* the record of rank 0; "" without autotune */
} mesh_result;

/* Fails with a sentence that names the case; replicas that differ are a failure. What the result
 * points to stays until the process, which is one of a test, ends. */
nd_status mesh_run(const mesh_job *job, const mesh_case *mesh, mesh_result *out);
/* The data of a job at this path. JSON lines leave their cache in the same folder. */
nd_status mesh_open_data(const mesh_job *job, const char *path, nd_dataset **out);

/* ||a - b|| / ||b||, 0 when both are 0. */
double mesh_relative_l2(const float *a, const float *b, int64_t count);

#endif
