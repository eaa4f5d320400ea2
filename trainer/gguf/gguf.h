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
 *   format   how keys and weights are stored
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "runtime/base/status.h"
#include "trainer/weights/weights.h"

/* model */

/* Numbers of the format (ggml_type). */
typedef enum nd_gguf_type {
    ND_GGUF_F32 = 0,
    ND_GGUF_F16 = 1,
    ND_GGUF_Q8_0 = 8, /* blocks of 32: a scale in F16, 32 integers of 8 bits */
    ND_GGUF_BF16 = 30,
} nd_gguf_type;

/*
 * Writes the model of a Hugging Face folder, which was checked, and the folder's tokenizer as the
 * new file `path`; it appears when it is complete. Matrices have the type `type`, or F16 where that
 * is Q8_0 and their rows are no blocks of 32; vectors are F32. Memory holds the tokenizer and a
 * piece of the weights.
 * *bytes: the size of the file.
 *
 * ND_ERR_DATA: the model is of a type that is not written, or the folder has no tokenizer, or one
 * that is not; the sentence names it. ND_ERR_CANTCREATE: `path` exists, or cannot be written.
 */
nd_status nd_gguf_export(const nd_hf_reader *model, const char *folder, nd_gguf_type type,
                         const char *path, uint64_t *bytes);

/* format */

/* Bytes of `count` values of whole rows. For Q8_0, rows are multiples of 32. */
int64_t nd_gguf_bytes(nd_gguf_type type, int64_t count);
/* Stores values of whole rows. False: F16, or a scale in F16, cannot hold one of them. Q8_0: the
 * scale is the greatest magnitude / 127; quotients are rounded to the nearest, halves away from
 * zero. */
bool nd_gguf_store(nd_gguf_type type, const float *values, int64_t count, void *out);

/* A file that is being written. A failure shows in ferror(out). */
typedef struct nd_gguf {
    FILE *out;          /* borrowed, as is the family */
    const char *family; /* stands before keys that begin with a point */
    uint64_t keys;      /* written */
} nd_gguf;

/* Numbers of the format (gguf_type): kinds of values. */
typedef enum nd_gguf_kind {
    ND_GGUF_KIND_U32 = 4,
    ND_GGUF_KIND_I32 = 5,
    ND_GGUF_KIND_F32 = 6,
    ND_GGUF_KIND_FLAG = 7,
    ND_GGUF_KIND_TEXT = 8,
    ND_GGUF_KIND_ARRAY = 9,
} nd_gguf_kind;

/* The lowest `bytes` bytes of a number. */
void nd_gguf_put(nd_gguf *file, uint64_t number, size_t bytes);
void nd_gguf_put_text(nd_gguf *file, const char *text, size_t size);
/* A key with its value; behind an array's the caller puts `count` values of the kind. */
void nd_gguf_u32(nd_gguf *file, const char *key, uint32_t value);
void nd_gguf_f32(nd_gguf *file, const char *key, double value);
void nd_gguf_flag(nd_gguf *file, const char *key, bool value);
void nd_gguf_text(nd_gguf *file, const char *key, const char *text);
void nd_gguf_array(nd_gguf *file, const char *key, nd_gguf_kind kind, size_t count);

/* tokens */

/* Writes the keys of the tokenizer in the folder, for a model of this shape. */
nd_status nd_gguf_add_tokens(nd_gguf *file, const char *folder, const nd_shape *shape);

#endif
