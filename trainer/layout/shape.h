// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAYOUT_SHAPE_H
#define ND_LAYOUT_SHAPE_H
/* The numbers of a Llama: what a Hugging Face config.json says (formats.md 2), and which meshes can
 * hold it. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/rope.h"
#include "runtime/base/status.h"
#include "runtime/mesh/mesh.h"

typedef struct nd_llama_shape {
    int64_t vocab;    /* V */
    int64_t hidden;   /* C */
    int64_t ffn;      /* F */
    int64_t layers;   /* L */
    int64_t heads;    /* H */
    int64_t kv_heads; /* K */
    int64_t head_dim; /* D */
    int64_t max_positions;
    double rms_eps;
    double init_std; /* initializer_range */
    bool tied;       /* tie_word_embeddings */
    nd_rope_config rope;
    int64_t bos_id, eos_id; /* -1: none; eos: the first when it is a list */
} nd_llama_shape;

/* Reads a config.json. ND_ERR_DATA names file, key, value and what is supported. Both RoPE
 * spellings are read. */
nd_status nd_llama_shape_read(const char *path, nd_llama_shape *out);
/* The same from memory; `name` stands for the text in messages. */
nd_status nd_llama_shape_parse(const char *text, size_t bytes, const char *name,
                               nd_llama_shape *out);
/* Writes a config.json that transformers opens (old RoPE spelling and torch_dtype = dtype_name). */
nd_status nd_llama_shape_write(const nd_llama_shape *shape, const char *dtype_name,
                               const char *path);

/*
 * ND_ERR_CONFIG with all numbers when an axis does not divide what it splits: heads, KV heads and
 * ffn by tp; the sequence by 2 cp (by cp when cp is 1); local tokens micro_batch x sequence / cp by
 * tp; head_dim even.
 */
nd_status nd_llama_shape_check_mesh(const nd_llama_shape *shape, const nd_mesh *mesh,
                                    int64_t micro_batch, int64_t sequence);

/* Parameters: all of them (a tied head counted once). */
int64_t nd_llama_shape_parameters(const nd_llama_shape *shape);

#endif
