// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_UNIT_TRAINER_LLAMAS_H
#define TESTS_UNIT_TRAINER_LLAMAS_H
/* The sizes of the models of Llama 3.1. */
#include "trainer/shape/shape.h"

#define LLAMA(width, mlp, blocks, queries)                                                         \
    {                                                                                              \
        .vocab = 128256, .hidden = width, .ffn = mlp, .layers = blocks, .heads = queries,          \
        .kv_heads = 8, .head_dim = 128                                                             \
    }

static const nd_shape llama_8b = LLAMA(4096, 14336, 32, 32);
static const nd_shape llama_70b = LLAMA(8192, 28672, 80, 64);
static const nd_shape llama_405b = LLAMA(16384, 53248, 126, 128);

#endif
