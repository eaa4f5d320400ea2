// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_DIFF_H
#define ND_CHECKPOINT_DIFF_H
/*
 * Compares the state of two checkpoints element by element, whatever meshes wrote them, or weights
 * with those of a Hugging Face folder; or two dumps of tensors (dump/dump.h).
 *
 * Values are compared as F32; a BF16 or F16 file is widened, which is exact. To find out whether a
 * model in BF16 is that of a checkpoint, both sides are rounded to BF16 first. Memory is bounded,
 * whatever the size of the model (export.h).
 */
#include "trainer/checkpoint/manifest.h"

typedef struct nd_diff_side {
    const char *folder;
    const nd_manifest *manifest; /* NULL: a Hugging Face folder, which has weights only */
    nd_shape shape;
} nd_diff_side;

typedef struct nd_diff_options {
    bool verify; /* false: compares what the files of a damaged checkpoint hold */
    bool bf16;   /* rounds both sides to BF16 first */
    /* The L2 norm of the difference over that of A up to which an array counts as equal; 0: bits
     * are compared. */
    double tolerance;
} nd_diff_options;

typedef enum nd_diff_presence {
    ND_DIFF_BOTH = 0,
    ND_DIFF_ONLY_A,
    ND_DIFF_ONLY_B,
    ND_DIFF_SIZES /* an entry of another number of elements */
} nd_diff_presence;

/* A state array of a tensor, or an entry alike on all ranks such as FP8 scales. */
typedef struct nd_diff_array {
    const char *name; /* as in the files: "model.norm.weight", "optimizer.state....exp_avg" */
    nd_diff_presence presence;
    int64_t count;     /* elements; 0 unless both have it */
    int64_t differing; /* elements that differ in some bit */
    double largest;    /* |a - b| of those; NaN when one of them is NaN */
    double relative;   /* L2 norm of a - b over that of a; infinite where a is 0 alone */
} nd_diff_array;

typedef struct nd_diff_totals {
    int64_t arrays, differing_arrays;
    int64_t elements, differing;
} nd_diff_totals;

/*
 * Visits every array, also those that are equal, in the order of the model; entries that all ranks
 * share come last. ND_ERR_DATA: the models have other tensors, or what is read is damaged.
 */
nd_status nd_checkpoint_diff(const nd_diff_side sides[2], const nd_diff_options *options,
                             nd_status (*visit)(void *context, const nd_diff_array *array),
                             void *context, nd_diff_totals *totals);
/*
 * The same of two folders of dumps, of what some rank of both has, in the order of the computation;
 * what only B has comes last. ND_ERR_DATA: one is no dump, or damaged.
 */
nd_status nd_dump_diff(const char *const folders[2], const nd_diff_options *options,
                       nd_status (*visit)(void *context, const nd_diff_array *array), void *context,
                       nd_diff_totals *totals);

#endif
