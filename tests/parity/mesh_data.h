// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_PARITY_MESH_DATA_H
#define TESTS_PARITY_MESH_DATA_H
/* Small models and data for the tests that compare meshes (mesh_run.h). */
#include "tests/parity/mesh_run.h"
#include "tests/support/tempdir.h"

/* Hidden 64, ffn 128, two layers, 8 heads of 16 and 4 KV heads: 16 divides every matrix, also of
 * four tp ranks. */
nd_shape mesh_small_llama(int64_t vocab);

/*
 * A llm.c file of ids below `vocab` with some structure to learn, named `name` in `dir`. From token
 * `period` on they repeat; 0: they do not. The path lives until the next call.
 */
const char *mesh_token_file(tempdir *dir, const char *name, int tokens, int64_t vocab, int period);

/* AdamW on that file; the caller says the sizes and what else differs. */
mesh_job mesh_job_on_tokens(const char *path, nd_shape shape, nd_precision precision);
/* These steps of `batch` sequences, on a file tokens.bin of so many tokens without a period. */
mesh_job mesh_sized_job(tempdir *dir, int tokens, nd_shape shape, nd_precision precision, int batch,
                        int sequence, int steps);

/* One worker, whose micro-batches have one sample. */
static const mesh_case mesh_one = {"one worker", 1, 1, 1, 1, 1};

/* True where products on this CPU are our own, and not oneDNN's. */
bool mesh_own_products(void);

/* mesh_run, which succeeds, and one that ends with an error. */
mesh_result mesh_trained(const mesh_job *job, const mesh_case *mesh);
void mesh_expect_failure(const mesh_job *job, const mesh_case *mesh, nd_status expected);

/* The results of two runs that have the same bits, as flags. */
enum {
    MESH_LOSSES = 1,
    MESH_NORMS = 2,
    MESH_GRADIENTS = 4,
    MESH_WEIGHTS = 8,
    MESH_ALL = MESH_LOSSES | MESH_NORMS | MESH_GRADIENTS | MESH_WEIGHTS
};
void mesh_expect_same(const mesh_result *got, const mesh_result *want, int parts, const char *name);
/* Losses and weights have the same bits whatever is computed again. */
void mesh_expect_same_recomputed(const mesh_job *job, mesh_case mesh);

/* By how much two runs may differ, relative to the second: each loss, each norm, and in the L2 norm
 * each gradient and each weight; 0: any. */
typedef struct mesh_bounds {
    double loss, norm, gradient, weight;
} mesh_bounds;
void mesh_expect_near(const mesh_result *got, const mesh_result *want, mesh_bounds most,
                      const char *name);
/* The job learns on the mesh `one`, and each of the others gives what it gives there. */
void mesh_expect_all_near(const mesh_job *job, const mesh_case *one, const mesh_case *meshes,
                          size_t count, mesh_bounds most);

#endif
