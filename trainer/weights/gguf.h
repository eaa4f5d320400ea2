// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WEIGHTS_GGUF_H
#define ND_WEIGHTS_GGUF_H
/*
 * GGUF: one file with a model, as llama.cpp and the programs built on it use it. It holds keys with
 * values (the shape, the tokenizer, the chat template), a list of tensors, and their values in
 * blocks of a type, each tensor at a multiple of 32 bytes. Numbers are little-endian.
 *
 * Models of the types llama, qwen2 and qwen3 are read and written. In its Llamas llama.cpp turns
 * adjacent dimensions of a head where Hugging Face's files turn the two halves, so the rows of q
 * and k change places; callers see the order of Hugging Face.
 */
#include <jansson.h>
#include <stdio.h>

#include "runtime/base/fs.h"
#include "trainer/layout/layout.h"
#include "trainer/weights/safetensors.h"

/* Reading. */

/*
 * Reads the head of a file, of version 2 or 3. Tensors, F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K or
 * Q6_K, are listed by Hugging Face's names; their `number` is for nd_gguf_read. What the keys say
 * becomes config.json, tokenizer.json, tokenizer_config.json and generation_config.json in a folder
 * among those of token caches, whose name is their digest; those that are there with the same text
 * stay. List and folder are owned by the caller; a folder of NULL is not made. ND_ERR_DATA says in
 * one sentence what is wrong with the file (cut off, overlapping tensors, counts and texts that
 * cannot be) or what is not read of it (another type, family, RoPE or tokenizer, a file in parts).
 * ND_ERR_CANTCREATE: the folder cannot be made. The reader of models checks which tensors there
 * must be.
 */
nd_status nd_gguf_open(const char *path, nd_safetensors_list *list, nd_shape *shape, char **folder);
/* Elements [begin, begin + count) of a tensor in the order of its Hugging Face file: the F32 values
 * that the blocks stand for, with the bits of the Python package gguf. */
nd_status nd_gguf_read(int fd, const char *path, const nd_safetensors_tensor *tensor,
                       int64_t head_dim, int64_t begin, int64_t count, float *out);

/* Writing. */

/* ggml_type of matrices. */
enum { ND_GGUF_FP32 = 0, ND_GGUF_FP16 = 1, ND_GGUF_Q8_0 = 8, ND_GGUF_BF16 = 30 };

typedef struct nd_gguf_writer nd_gguf_writer;

typedef struct nd_gguf_options {
    const nd_shape *shape;
    int type;              /* F16 where it is Q8_0 and rows are no blocks of 32; vectors are F32 */
    const char *tokenizer; /* path of the tokenizer.json, which has tokenizer_config.json and chat
                              template beside it; NULL: ids are bytes. Borrowed */
    const char *name;      /* of the model, in the file and in messages; borrowed */
} nd_gguf_options;

/*
 * Makes a new file, which appears when it is complete and durable. `fill` gives the values by
 * nd_gguf_write_rows. ND_ERR_DATA: the model is of a family that is not written, or the tokenizer
 * of a form that is not; the sentence names it. ND_ERR_CANTCREATE: `path` exists or cannot be
 * written, or the disk has no room.
 */
nd_status nd_gguf_write(const char *path, const nd_gguf_options *options,
                        nd_status (*fill)(void *context, nd_gguf_writer *writer), void *context);
/* Elements [begin, begin + count) of a parameter by its name: whole rows. Each row comes once, in
 * any order. ND_ERR_DATA: F16 cannot hold a value. */
nd_status nd_gguf_write_rows(nd_gguf_writer *writer, const char *name, int64_t begin, int64_t count,
                             const float *values);

/* Types of values. */

enum { ND_GGUF_BLOCK_MAX = 256, ND_GGUF_TYPES = 31 };
/* In the `number` of a tensor whose rows change places this is added to its type. */
enum { ND_GGUF_TURNED = 64 };

typedef struct nd_gguf_type {
    int block, bytes; /* values of a block, and what they take; 0: not read */
    void (*load)(const uint8_t *block, float *values);
    /* False: F16 cannot hold a value, or the scale. NULL: not written. */
    bool (*store)(const float *values, uint8_t *block);
    int file_type; /* llama_ftype */
} nd_gguf_type;

extern const nd_gguf_type nd_gguf_types[ND_GGUF_TYPES]; /* by ggml_type */

/* A file's description of its model; only for gguf_*.c. */

typedef struct nd_gguf_head {
    const char *path;
    nd_fs_map map;
    size_t at;      /* its head is read up to here */
    bool cut;       /* the file ended before what was to be read */
    int64_t values; /* of all keys so far */
    json_t *keys;
    nd_safetensors_list list;
    json_t *files; /* of a model folder, by their names */
} nd_gguf_head;

/* Under nd_fs_map_guard: sets keys and list, by llama.cpp's names. */
nd_status nd_gguf_take_head(nd_gguf_head *head);
/* And back, from the beginning of the file; sets where each tensor begins, and where the next one
 * does as its end. Integers stand for U32, reals for F32. A failure shows in ferror. */
void nd_gguf_put_head(FILE *out, json_t *keys, nd_safetensors_list *list);
/* ND_ERR_DATA with the path before the sentence. */
nd_status nd_gguf_refuse(const nd_gguf_head *head, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The value of a key, lent; NULL: there is none. One that begins with a point stands behind the
 * family's name. */
json_t *nd_gguf_get(const nd_gguf_head *head, const char *key);
const char *nd_gguf_text(const nd_gguf_head *head, const char *key);

/* Adds the tokenizer's files to head->files, which becomes NULL where memory runs out. */
nd_status nd_gguf_read_tokenizer(nd_gguf_head *head);
/* And back: the keys before those of the shape, which gets the ids of the tokenizer, and those
 * behind. One is NULL where memory runs out. */
nd_status nd_gguf_make_keys(const nd_gguf_options *options, nd_shape *shape, json_t *keys[2]);
/* RoPE of the type llama3 is a tensor of factors, one for each pair of a head. */
float nd_gguf_factor(const nd_rope_config *rope, int64_t head_dim, int64_t pair);

#endif
