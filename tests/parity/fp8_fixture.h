// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_PARITY_FP8_FIXTURE_H
#define TESTS_PARITY_FP8_FIXTURE_H
/* The 4-layer Llama of the FP8 goldens and its data, on one worker with the product's own
 * trainer. */
#include "tests/parity/golden_reader.h"
#include "trainer/ckpt/hf_folder.h"
#include "trainer/trainer.h"

enum { FP8_FIXTURE_STEPS = 10 };

typedef struct fp8_fixture {
    nd_golden *golden;
    nd_hf_reader *weights;
    nd_config config;
    nd_progress progress;
    nd_rank rank;
    nd_trainer *trainer;
    int64_t batch, sequence;
    int32_t *positions;
} fp8_fixture;

/* Assertions of Criterion on failure. all_gather: weights become codes from their F32 values. */
void fp8_fixture_open(fp8_fixture *fixture, nd_precision precision, nd_fp8_recipe recipe,
                      bool all_gather);
void fp8_fixture_close(fp8_fixture *fixture);
nd_step_batch fp8_fixture_batch(const fp8_fixture *fixture, int64_t step);

#endif
