// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_GPU_PROBE_LT_H
#define ND_TESTS_GPU_PROBE_LT_H
/*
 * Asks cuBLASLt for every form of product that training Llama 3.1 8B and the small model of the
 * tests needs, and makes each once: a form that the library accepts and then refuses at the product
 * is found here, not in a run.
 */
#include "tests/gpu/plain_lt.h"

/* Prints a JSON object a form. toy: tiny widths, to test the probe itself. */
nd_status probe_lt(plain_lt *plain, nd_stream *stream, int capability, int64_t tokens, bool toy);

#endif
