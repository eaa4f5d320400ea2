// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_TENSORS_H
#define ND_CHECKPOINT_TENSORS_H
/*
 * All tensors of one source or of two, from the first to the last element, in bounded memory: for
 * export and for comparisons.
 *
 * Elements are read in batches of 32 MiB from each source, whatever the size of the model. A row of
 * a matrix is never cut.
 */
#include "trainer/checkpoint/source.h"

enum { ND_TENSOR_SOURCES_MAX = 2 };

/* Adjacent elements of a state array of a tensor. */
typedef struct nd_tensor_part {
    const nd_param *param;
    nd_state_kind array;
    int64_t begin, count;                       /* in the flattened global tensor */
    const float *values[ND_TENSOR_SOURCES_MAX]; /* (count) of each source, during the call */
} nd_tensor_part;

typedef struct nd_tensors_walk {
    const nd_layout *layout; /* of a mesh of one rank */
    int arrays;              /* the first so many of each tensor */
    nd_source *sources[ND_TENSOR_SOURCES_MAX];
    int source_count;
    int64_t batch_elements; /* 0: those of 32 MiB */
    /* Tensors come in the order of the layout, their arrays one after the other, parts
     * ascending. */
    nd_status (*visit)(void *context, const nd_tensor_part *part);
    void *context;
} nd_tensors_walk;

nd_status nd_tensors_each(const nd_tensors_walk *walk);

#endif
