// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_UNIT_TRAINER_MESH_RANKS_H
#define TESTS_UNIT_TRAINER_MESH_RANKS_H
/*
 * Ranks of a mesh as threads of this process, each with a device, the reference ops and the groups
 * of its mesh: for tests of one part of the trainer, without files and without a run.
 *
 * The reference ops sum in F64 and round once, so a result differs between meshes only where the
 * ranks themselves add or round.
 */
#include "tests/support/ranks.h"
#include "trainer/generate/generate.h"
#include "trainer/model/model.h"
#include "trainer/parallel/fsdp.h"
#include "trainer/rank.h"

typedef struct mesh_ranks {
    nd_mesh mesh;
    nd_shape shape;
    nd_config config; /* mesh_config_of, then the test's own settings */
    nd_status (*body)(nd_rank *rank, void *context);
    void *context; /* shared by all ranks */
} mesh_ranks;

/* One micro-batch of one sequence of 32 tokens, FP32, AdamW, ZeRO-3, no recompute. */
nd_config mesh_config_of(void);
/* A job of mesh_config_of and mesh_shape_of. */
mesh_ranks mesh_ranks_of(nd_mesh mesh, int64_t layers, bool tied,
                         nd_status (*body)(nd_rank *rank, void *context), const void *context);
/* ND_OK when `body` was on every rank; else the first failure. */
nd_status mesh_ranks_run(const mesh_ranks *job);
/* For Criterion: it is ND_OK, or the words are said with the failure. */
#define expect_ranks(job, words, ...)                                                              \
    cr_expect_eq(mesh_ranks_run(job), ND_OK, words ": %s", ##__VA_ARGS__, nd_error_last()->message)

/* Sizes that no number of shards divides evenly, and whose parts on up to four tp ranks the FP8
 * products take; the vocabulary is odd. */
nd_shape mesh_shape_of(int64_t layers, bool tied);

/* Collectives of a group that this rank has begun. */
int64_t mesh_calls(const nd_rank *rank, nd_group_kind group, nd_comm_op op);

/* One of the 17 multiples of 1/8 in [-1, 1]. BF16 holds them and simple fractions of them, and F32
 * holds sums of many products of two of them: a test that adds such values expects the exact sum,
 * in any order. */
float mesh_value(uint64_t seed, int64_t index);
/* An element of a tensor in F32 or BF16. */
float mesh_get(nd_tensor t, int64_t row, int64_t column);
void mesh_put(nd_tensor t, int64_t row, int64_t column, float value);
/* The value of an element of a parameter, by its number in the flattened global tensor. Each
 * quarter of the rows and of the columns has another largest value, so that the largest value of a
 * shard or of a tp rank's part is not that of the whole. */
float mesh_param_value(uint64_t seed, const nd_param *param, int64_t element);
/* Writes them to all elements of parameters in this rank's part of a flat state array. */
nd_status mesh_fill(const nd_layout *layout, uint64_t seed, float *state);
/* Like mesh_fill, but for the weights of a model, which may have no master weights. Collective. */
nd_status mesh_load(nd_fsdp *fsdp, uint64_t seed);
/* Visits all spans of this rank's shards. */
nd_status mesh_each_span(const nd_layout *layout, nd_span_visit *visit, void *context);

/* Layout, scales, FSDP and gradient synchronisation of one rank, with their memory, until its body
 * returns. shares: nd_fsdp_plan_weights. */
typedef struct mesh_shards {
    nd_rank *rank;
    nd_layout *layout;
    nd_scales scales;
    nd_fsdp fsdp;
    nd_memplan *plan;
} mesh_shards;

nd_status mesh_shards_open(nd_rank *rank, bool shares, mesh_shards **out);

/* A model of one rank, with its memory and mesh_fill's weights, until the rank's body returns.
 * options NULL: to train. */
nd_status mesh_model_open(nd_rank *rank, const nd_model_options *options, uint64_t seed,
                          nd_model **out);
/* The packed weights that a model keeps. mesh_model_open keeps both kinds, and
 * mesh_model_open_packed those of the blocks, of the head, of both or of none. */
typedef struct mesh_packed {
    bool blocks, head;
} mesh_packed;
nd_status mesh_model_open_packed(nd_rank *rank, const nd_model_options *options, mesh_packed packed,
                                 uint64_t seed, nd_model **out);
/* A generator with such weights, likewise. */
nd_status mesh_generator_open(nd_rank *rank, const nd_generate_options *options, uint64_t seed,
                              nd_generator **out);
/* That its plan has. */
size_t mesh_model_bytes(const nd_model *model);
/* Takes a set for one sequence of mesh_config_of's 32 tokens. */
nd_status mesh_load_ids(nd_model *model, const int32_t *ids, const int32_t *labels,
                        nd_activation_set **set);
/* Takes a set whose ids depend on `micro`. The model has a vocabulary of 97 or more. */
nd_status mesh_load_batch(nd_model *model, int micro, nd_activation_set **set);
/* Its forward and, to train, its backward. */
nd_status mesh_micro_batch(nd_model *model, int micro, nd_pass pass);

#endif
