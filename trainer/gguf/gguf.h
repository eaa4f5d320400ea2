// SPDX-License-Identifier: Apache-2.0
#ifndef ND_GGUF_GGUF_H
#define ND_GGUF_GGUF_H
/*
 * GGUF, version 3: the format of one file that llama.cpp and the programs built on it read. The
 * file holds keys with values (the shape of the model, its tokenizer and chat template), a list of
 * tensors, and their values, each tensor at a multiple of 32 bytes. Numbers are little-endian.
 *
 *   model    names and order of the tensors, and the whole file
 *   tokens   the keys of the tokenizer
 *   values   how weights are stored
 *   head     the layout of keys and list
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "runtime/base/status.h"
#include "trainer/layout/layout.h"

/* model */

/* Numbers of the format (ggml_type). */
typedef enum nd_gguf_type {
    ND_GGUF_F32 = 0,
    ND_GGUF_F16 = 1,
    ND_GGUF_Q8_0 = 8, /* blocks of 32: a scale in F16, 32 integers of 8 bits */
    ND_GGUF_BF16 = 30,
} nd_gguf_type;

/*
 * Writes the model of a Hugging Face folder, tokenizer included, as the new file `path`; it appears
 * when it is complete. Matrices have the type `type`; vectors are F32, and so is a matrix whose
 * rows are no blocks of 32 when the type is Q8_0 (then F16). Memory holds the tokenizer and a piece
 * of the weights.
 * *bytes: the size of the file.
 *
 * ND_ERR_DATA: the folder is no complete model, or has no tokenizer, or one that llama.cpp does not
 * know; the sentence names it. ND_ERR_CANTCREATE: `path` exists, or cannot be written.
 */
nd_status nd_gguf_export(const char *folder, nd_gguf_type type, const char *path, uint64_t *bytes);

/* values */

/* Bytes of `count` values of a row. For Q8_0, count is a multiple of 32. */
int64_t nd_gguf_bytes(nd_gguf_type type, int64_t count);
/* Stores values of whole rows. False: F16, or a scale in F16, cannot hold one of them. Q8_0: the
 * scale is the greatest magnitude / 127; quotients are rounded to the nearest, halves away from
 * zero. */
bool nd_gguf_store(nd_gguf_type type, const float *values, int64_t count, void *out);

/* head */

/* Keys and list, each written into memory by the functions below. A failure for want of memory
 * shows in nd_gguf_head_write. */
typedef struct nd_gguf_head {
    const char *family; /* stands before keys that begin with a point; borrowed */
    FILE *keys, *list;  /* memory streams */
    char *keys_text, *list_text;
    size_t keys_bytes, list_bytes;
    uint64_t key_count, tensor_count;
    uint64_t data_bytes; /* of all tensors, with padding */
} nd_gguf_head;

nd_status nd_gguf_head_init(nd_gguf_head *head, const char *family);
void nd_gguf_head_fini(nd_gguf_head *head); /* an all-zero one is legal */
void nd_gguf_u32(nd_gguf_head *head, const char *key, uint32_t value);
void nd_gguf_f32(nd_gguf_head *head, const char *key, double value);
void nd_gguf_flag(nd_gguf_head *head, const char *key, bool value);
void nd_gguf_text(nd_gguf_head *head, const char *key, const char *text, size_t size);
/* An array; the caller then adds `count` texts, or numbers of 32 bits. */
typedef enum nd_gguf_elements {
    ND_GGUF_I32S = 5,
    ND_GGUF_F32S = 6,
    ND_GGUF_TEXTS = 8,
} nd_gguf_elements;
void nd_gguf_array(nd_gguf_head *head, const char *key, nd_gguf_elements type, uint64_t count);
void nd_gguf_add_text(nd_gguf_head *head, const char *text, size_t size);
void nd_gguf_add_number(nd_gguf_head *head, const void *number);
/* Lists a tensor of rows x cols (1 row: a vector); *offset: where its values lie, from the first
 * tensor on. */
void nd_gguf_tensor(nd_gguf_head *head, const char *name, nd_gguf_type type, int64_t rows,
                    int64_t cols, uint64_t *offset);
/* The head of the file, padded to the first tensor; owned by the caller. */
nd_status nd_gguf_head_write(nd_gguf_head *head, char **out, size_t *size);

/* tokens */

/* Adds the keys of the tokenizer in the folder, for a model of this shape. */
nd_status nd_gguf_add_tokens(nd_gguf_head *head, const char *folder, const nd_shape *shape);

#endif
