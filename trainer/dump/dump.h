// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DUMP_DUMP_H
#define ND_DUMP_DUMP_H
/*
 * log.dump_tensors: named tensors of some steps, as DUMPS/step-N/rank-R.safetensors.
 *
 * Each rank writes what it computes: its part of activations and of their gradients, from each
 * micro-batch (points.def), and its shards of the weights before the update and of their gradients,
 * both in F32. Of ranks that hold the same part only the first one writes it. The metadata of a
 * file say under each tensor's name where it belongs (docs/formats.md).
 *
 * The model shows its tensors while it computes, and they are copied at once, so that no buffer has
 * to live longer. A file has its final name only when it is complete. Nothing here changes what is
 * computed; one thread, which waits for the device.
 */
#include "trainer/layout/layout.h"
#include "trainer/rank.h"

typedef enum nd_dump_point {
#define ND_POINT(id, ...) ND_DUMP_##id,
#include "trainer/dump/points.def"
#undef ND_POINT
    ND_DUMP_POINTS
} nd_dump_point;

typedef struct nd_dump nd_dump;

/* Before any worker starts: ND_ERR_CONFIG where a name of log.dump_tensors is of no tensor of the
 * model; names the nearest one, and those that there are. */
nd_status nd_dump_check(const nd_config *config, const nd_shape *shape);

/* folder: DUMPS, which exists; copied. The layout and the rank are borrowed. */
nd_status nd_dump_create(nd_rank *rank, const nd_layout *layout, const nd_dims *dims,
                         const char *folder, nd_dump **out);
/* A file that is not complete is removed. NULL is legal. */
void nd_dump_destroy(nd_dump *dump);
/* Returns whether the step is of log.dump_steps and computed for the first time; false for NULL. */
bool nd_dump_wants(const nd_dump *dump, int64_t step);

/* Creates the file of a step. places (micro-batches, B, S) as in nd_step_batch, or NULL.
 * ND_ERR_CANTCREATE: it cannot be written. */
nd_status nd_dump_begin(nd_dump *dump, int64_t step, const int32_t *places);

/* The place of a tensor that is shown: row and column say where it begins in the rank's part. */
typedef struct nd_dump_place {
    nd_dump_point point;
    int points;    /* adjacent groups of columns of what is shown, each a point; 1: all are one */
    int64_t layer; /* -1: the head's */
    int micro;
    bool backward; /* a point of the other pass is passed over: its ops run again in a recompute */
    int64_t row, column;
} nd_dump_place;

/* Copies what is asked for of x (rows, columns), whose work is enqueued on the rank's stream. */
nd_status nd_dump_show(nd_dump *dump, const nd_dump_place *place, nd_tensor x);
/* Writes what is asked for of the weights, or of their gradients, from a flat state array. */
nd_status nd_dump_show_state(nd_dump *dump, bool gradients, float *state);
/* Completes the file. ND_ERR_INTERNAL where a tensor that is asked for was not shown. */
nd_status nd_dump_end(nd_dump *dump);

/* Reading (read.c). */

/* Finds whether the folder holds the files of a step. ND_ERR_DATA: it holds folders of steps. */
nd_status nd_dump_is(const char *folder, bool *out);

/* A tensor of two dumps, of which some rank has a part. */
typedef struct nd_dump_pair {
    const char *name;
    bool in[2];       /* the dump has it */
    bool alike;       /* both have it, in one shape, and the same elements of it */
    int64_t count;    /* elements that both have; 0 where the shapes differ */
    float *values[2]; /* (count) of each, as F32 */
} nd_dump_pair;
/* Visits the tensors of two folders of dumps in the order of the computation; what only the second
 * one has comes last. ND_ERR_DATA: one is no dump, or damaged. */
nd_status nd_dump_each_pair(const char *const folders[2],
                            nd_status (*visit)(void *context, const nd_dump_pair *pair),
                            void *context);

#endif
