// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SUPPORT_INPUTS_H
#define ND_TESTS_SUPPORT_INPUTS_H
/* The inputs of a small run, in a test's folder: text.txt and model.json. */
#include <string.h>

#include "tests/support/tempdir.h"

enum { INPUTS_TEXT_MAX = 20000 };

/* Lower-case letters with some structure to learn; `size` of them go to text.txt. Returns all. */
static inline const char *inputs_write_text(tempdir *dir, size_t size)
{
    static char text[INPUTS_TEXT_MAX];
    for (size_t i = 0; i < sizeof text; i++) {
        text[i] = (char)('a' + (i * i / 3 + i / 7) % 26);
    }
    cr_assert_leq(size, sizeof text);
    tempdir_write(dir, "text.txt", text, size);
    return text;
}

/* Bytes, four heads on two KV heads, 128 positions. */
static inline void inputs_write_model(tempdir *dir, int hidden, int ffn, int layers)
{
    char model[512];
    int n = snprintf(model, sizeof model,
                     "{\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": %d, "
                     "\"intermediate_size\": %d, \"num_hidden_layers\": %d, "
                     "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
                     "\"max_position_embeddings\": 128}",
                     hidden, ffn, layers);
    tempdir_write(dir, "model.json", model, (size_t)n);
}

#endif
