// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_UNIT_TRAINER_SHAPES_H
#define TESTS_UNIT_TRAINER_SHAPES_H
/* This file has sizes of models. */
#include "trainer/shape/shape.h"

/* For the initializer of an nd_shape: the vocabulary, sizes of the residual stream and of the MLP,
 * layers, heads, KV heads, and the size of a head. */
#define SIZES(v, c, f, l, h, k, d)                                                                 \
    .vocab = v, .hidden = c, .ffn = f, .layers = l, .heads = h, .kv_heads = k, .head_dim = d

/* Llama 3.1. */
static const nd_shape llama_8b = {SIZES(128256, 4096, 14336, 32, 32, 8, 128)};
static const nd_shape llama_70b = {SIZES(128256, 8192, 28672, 80, 64, 8, 128)};
static const nd_shape llama_405b = {SIZES(128256, 16384, 53248, 126, 128, 8, 128)};

#endif
