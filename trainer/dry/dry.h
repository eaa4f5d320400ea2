// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DRY_DRY_H
#define ND_DRY_DRY_H
/*
 * A step without computing it: the model's own forward and backward run over ops, communicators and
 * memory that do nothing, so it finds what a step calls, whatever the mesh, the recipe and the
 * recompute mode.
 *
 * Autotune times the calls of ops that a dry run lists: products, and what FP8 adds to them. A call
 * is its form alone, without memory: extents, strides, dtypes, and how addresses are aligned. Equal
 * calls of a step are one entry.
 */
#include "kernels/ops.h"
#include "runtime/device/graphs.h"
#include "trainer/model/model.h"

typedef enum nd_call_kind {
    ND_CALL_PRODUCT = 0,
    ND_CALL_PRODUCT_FP8,
    ND_CALL_AMAX,
    ND_CALL_FP8_SCALE,
    ND_CALL_FP8_CAST,
    ND_CALL_FP8_TRANSPOSE,
    ND_CALL_CAST
} nd_call_kind;

/* Calls are compared by their bytes, so all fields count and there is no padding. */
typedef struct nd_call_matrix {
    int64_t rows, columns, stride;
    int32_t axes, dtype;
    int32_t align; /* bytes, a power of two up to 256; 0: the matrix is absent */
    int32_t along; /* nd_granularity of its scales */
} nd_call_matrix;

/*
 *   product, product_fp8 c = op(a) op(b) + beta c; in FP8 a and b are what the product reads
 *   amax                 of a, along a.along
 *   fp8_scale            a.rows entries
 *   fp8_cast             a to c (codes) and b (transposed codes)
 *   fp8_transpose, cast  a to c
 */
typedef struct nd_call {
    int32_t kind; /* nd_call_kind */
    int32_t a_transposed, b_transposed;
    int32_t beta; /* 0 or 1 */
    int32_t fast;
    int32_t merges; /* amax: keeps the larger of the old and the new value; cast: also measures */
    nd_call_matrix c, a, b;
} nd_call;

typedef struct nd_call_entry {
    nd_call call;
    int64_t times;  /* in a step */
    double seconds; /* of one call; negative: not timed */
} nd_call_entry;

typedef struct nd_calls {
    nd_call_entry *entries; /* owned */
    int count;
    int64_t weight; /* what nd_calls_add adds to `times` */
} nd_calls;

nd_status nd_calls_add(nd_calls *calls, const nd_call *call);
void nd_calls_free(nd_calls *calls);
/* The entry of an equal call, or NULL. */
nd_call_entry *nd_calls_find(const nd_calls *calls, const nd_call *call);
/* Adds all calls of `from`, as often as they are there. */
nd_status nd_calls_add_all(nd_calls *calls, const nd_calls *from);
/*
 * The seconds that calls of `step` take longer than those of `other`, by the times in `timed`.
 * only_more: without the calls that `other` has more of. NaN when a call that counts was not timed.
 */
double nd_calls_difference(const nd_calls *timed, const nd_calls *step, const nd_calls *other,
                           bool only_more);

/*
 * Adds the calls of a training step of the rank's configuration, and the forms of a validation,
 * which count nothing. linears: which of them are in FP8; NULL: as the filter says.
 */
nd_status nd_dry_run(const nd_rank *rank, const nd_linear_choice *linears, nd_calls *calls);

/*
 * Makes what the backend keeps (plans of libraries) for the forms of a validation and, unless the
 * options say forward only, of a training step, so that no step makes any and what cannot be
 * planned is an error now. Does nothing where a backend keeps nothing.
 */
nd_status nd_dry_run_prepare(const nd_rank *rank, const nd_model_options *options);

/* Counts what the CUDA graphs of the rank's training steps will hold, by the steps' own code. */
nd_status nd_dry_run_graphs(const nd_rank *rank, const nd_model_options *options,
                            nd_graph_counts *out);

/* The amounts that a training step of one rank computes and moves, counted with the ops that it
 * runs. Gradients of replicas and the optimizer's update are not among them. */
typedef struct nd_step_work {
    double flops_bf16, flops_fp8, flops_f32; /* of products */
    double flops_attention;                  /* of pairs that are seen; backward's scores again */
    double moved_bytes;                      /* read and written by all other ops */
    double wire_bytes;                       /* that the rank sends in groups over several hosts */
    double host_bytes;                       /* that it sends in groups of one host */
    double exposed_bytes;                    /* of both: it waits for them at once */
    int host_ranks;                          /* of each host, which are adjacent */
    nd_calls calls;                          /* its weight: how often what runs is done in a step */
} nd_step_work;
nd_status nd_dry_run_work(const nd_rank *rank, int host_ranks, nd_step_work *out);

#endif
