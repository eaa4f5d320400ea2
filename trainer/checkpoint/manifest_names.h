// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_MANIFEST_NAMES_H
#define ND_CHECKPOINT_MANIFEST_NAMES_H
/* Words of manifest.json that its writer and its reader share. */
#include <jansson.h>
#include <stddef.h>

#include "trainer/layout/layout.h"

#define ND_MANIFEST_FORMAT      "ndtrain checkpoint"
#define ND_MANIFEST_DIGEST_HEAD ",\n \"digest\": \""
#define ND_MANIFEST_DIGEST_TAIL "\"\n}\n"

/* A number of the model's shape; the names are those of config.json. */
typedef struct nd_shape_number {
    const char *name;
    size_t offset; /* in nd_shape */
    bool is_real;  /* double, else int64_t */
    bool may_lack; /* absent where it is 0 */
    bool is_idle;  /* changes no result: not compared */
    int64_t least, most;
} nd_shape_number;

/* A set of layers; the list is absent where it is empty. */
typedef struct nd_shape_layers {
    const char *name;
    size_t offset; /* in nd_shape */
} nd_shape_layers;

enum { ND_SHAPE_NUMBERS = 34, ND_SHAPE_LAYER_SETS = 2 };

extern const nd_shape_number nd_shape_numbers[ND_SHAPE_NUMBERS];
extern const nd_shape_layers nd_shape_layer_sets[ND_SHAPE_LAYER_SETS];
extern const char *const nd_segment_names[ND_SEGMENT_COUNT];

/* The member "tensors"; NULL when memory runs out. */
json_t *nd_manifest_tensors_json(const nd_layout *layout);

static inline nd_layer_set *nd_shape_layers_of(const nd_shape *shape, int set)
{
    return (nd_layer_set *)(void *)((char *)shape + nd_shape_layer_sets[set].offset);
}

#endif
