// SPDX-License-Identifier: Apache-2.0
/* The jobs that tests of FP8 steps start from. */
#ifndef TESTS_PARITY_FP8_JOB_H
#define TESTS_PARITY_FP8_JOB_H
#include "tests/parity/mesh_data.h"
#include "tests/support/tempdir.h"

enum { FP8_SEQUENCE = 64, FP8_LAYERS = 4, FP8_VOCAB = 96 };

nd_shape fp8_shape(void);

/* Four layers on random tokens, one step. Its tokens lie in `dir`. */
mesh_job fp8_job(tempdir *dir, nd_fp8_recipe recipe, bool all_gather);

/*
 * The job that meshes are compared by: two layers, eight sequences a step. With `same` all of them
 * are equal. It lives until the next job.
 */
mesh_job fp8_mesh_job(tempdir *dir, int64_t steps, bool same, nd_fp8_recipe recipe,
                      bool all_gather);

#endif
