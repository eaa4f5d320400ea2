// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_GOLDEN_READER_H
#define ND_TESTS_GOLDEN_READER_H
/*
 * Reads what scripts/golden.py wrote: a safetensors file of named tensors, and for whole models the
 * record beside it.
 *
 * A missing tensor, another dtype or another size ends the test with a sentence (the files are
 * committed: it is a mistake of the test). Pointers belong to the nd_golden and live until
 * nd_golden_close.
 */
#include <stdint.h>

#include "runtime/base/status.h"
#include "trainer/weights/safetensors.h"

typedef struct nd_golden nd_golden;

/* `path` below tests/parity/goldens: "ops/ops.safetensors". */
nd_status nd_golden_open(const char *path, nd_golden **out);
/* A whole-model folder, "llama3": golden.safetensors and golden.json. */
nd_status nd_golden_open_model(const char *name, nd_golden **out);
void nd_golden_close(nd_golden *golden); /* NULL is legal */

/* Absolute path of the folder `name` below tests/parity/goldens, for the trainer's own readers. */
const char *nd_golden_folder(const char *name, char *buffer, size_t size);

/* NULL when there is none. */
const nd_safetensors_tensor *nd_golden_find(const nd_golden *golden, const char *name);

/* Values of a tensor of `count` elements; count -1: whatever it has. */
const float *nd_golden_f32(const nd_golden *golden, const char *name, int64_t count);
const int8_t *nd_golden_i8(const nd_golden *golden, const char *name, int64_t count);
const int32_t *nd_golden_i32(const nd_golden *golden, const char *name, int64_t count);
const uint16_t *nd_golden_bf16(const nd_golden *golden, const char *name, int64_t count);
const uint8_t *nd_golden_u8(const nd_golden *golden, const char *name, int64_t count);

/* Numbers of golden.json by their keys, ended by NULL: (golden, "bf16", "gradient_relative_l2",
 * name, NULL). */
double nd_golden_number(const nd_golden *golden, const char *key, ...) __attribute__((sentinel));
/* An array of exactly `count` numbers: (golden, out, 10, "losses", NULL). */
void nd_golden_numbers(const nd_golden *golden, double *out, int64_t count, const char *key, ...)
    __attribute__((sentinel));

#endif
