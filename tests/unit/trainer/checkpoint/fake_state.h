// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_CHECKPOINT_FAKE_STATE_H
#define ND_TESTS_CHECKPOINT_FAKE_STATE_H
/* A rank's state without a rank: layouts of any mesh, and arrays whose every value tells the
 * tensor, the state array and the global element that it belongs to. */
#include "trainer/checkpoint/shard.h"

/* 97 words of 20: the vocabulary is odd; 3 layers. */
nd_shape fake_shape(bool tied);

/* The layout that `rank` has. Linears of odd layers are in the FP8 segment when `converts`. */
nd_layout *fake_layout(const nd_shape *shape, const nd_mesh *mesh, int rank, bool converts);

/* Exact in F32; every (array, tensor, element) of a small model has another one. */
float fake_value(nd_state_kind array, const char *param, int64_t element);

/* All that the rank of the layout holds of the model. */
nd_status fake_each_span(const nd_layout *layout, nd_span_visit *each, void *context);

/* The flat state arrays of a rank, shard_total each; padding is -1. Freed by fake_free. */
typedef struct fake_state {
    float *arrays[ND_STATE_KINDS];
} fake_state;
fake_state fake_make(const nd_layout *layout);
/* All -2: nothing loaded. */
fake_state fake_empty(const nd_layout *layout);
void fake_free(fake_state *state);

/* Aborts the test with tensor and element when a value is not the expected one. */
void fake_check(const nd_layout *layout, const fake_state *state, int arrays);

#endif
