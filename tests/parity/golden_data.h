// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_PARITY_GOLDEN_DATA_H
#define TESTS_PARITY_GOLDEN_DATA_H
/* Data that a golden of a whole model does not store, computed as scripts/goldens/draw.py does, to
 * the same bits: its weights, and sketches of its gradients. */
#include "tests/support/tempdir.h"
#include "trainer/layout/layout.h"

/* Sums of a sketch. Each element of a tensor is added to one of them with a sign, both drawn by its
 * index (a count sketch). The square norm of a difference's sketch is that of the difference, with
 * a deviation of sqrt(2 / 128) = 1/8 of it, so the norm one of 1/16, wherever the difference is; a
 * single element keeps its size, and of two of one size one pair in 256 hides. So what is a fifth
 * above a bound is noticed, as it would be among all elements. */
enum { GOLDEN_SKETCH = 128 };

/* Makes config.json and model.safetensors of a golden in an empty folder. Assertions of Criterion
 * on failure. */
void golden_data_model(const char *name, tempdir *dir);
/* Adds a parameter's values, in the order that it has here, to the sketch of its file's tensor. */
void golden_data_sketch(double sums[GOLDEN_SKETCH], const nd_param *param, const float *values);

#endif
