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

#include "runtime/base/fs.h"
#include "trainer/layout/layout.h"
#include "trainer/text/parts.h"
#include "trainer/weights/safetensors.h"

/* Reading. */

typedef struct nd_gguf {
    char *path;
    nd_fs_map map;
    json_t *keys;             /* while the file is opened */
    nd_safetensors_list list; /* by Hugging Face's names; `number` is for nd_gguf_read */
    nd_shape shape;
    json_t *files; /* what the keys say, as the files beside the weights of a model folder */
} nd_gguf;

/*
 * Maps a file and reads its head, of version 2 or 3. Tensors are F32, F16, BF16, Q8_0, Q4_0, Q4_1,
 * Q4_K or Q6_K. ND_ERR_DATA says in one sentence what is wrong with the file (cut off, overlapping
 * tensors, counts and texts that cannot be) or what is not read of it (another type, family, RoPE
 * or tokenizer, a file in parts). Which tensors there must be, the reader of models checks.
 */
nd_status nd_gguf_open(const char *path, nd_gguf **out);
void nd_gguf_close(nd_gguf *gguf); /* NULL is legal */
/*
 * Writes config.json, tokenizer.json, tokenizer_config.json and generation_config.json into a
 * folder among those of token caches, whose name is their digest. Those that are there with the
 * same text stay. Frees gguf->files. *out: the folder; owned by the caller. ND_ERR_CANTCREATE: it
 * cannot be made.
 */
nd_status nd_gguf_make_folder(nd_gguf *gguf, char **out);
/* Elements [begin, begin + count) of a tensor in the order of its Hugging Face file: the F32 values
 * that the blocks stand for, with the bits of the Python package gguf. From any thread. */
nd_status nd_gguf_read(const nd_gguf *gguf, const nd_safetensors_tensor *tensor, int64_t begin,
                       int64_t count, float *out);

/* Writing. */

/* ggml_type of matrices. */
enum { ND_GGUF_FP32 = 0, ND_GGUF_FP16 = 1, ND_GGUF_Q8_0 = 8, ND_GGUF_BF16 = 30 };

typedef struct nd_gguf_writer nd_gguf_writer;

typedef struct nd_gguf_writer_options {
    const nd_shape *shape;
    int type;              /* F16 where it is Q8_0 and rows are no blocks of 32; vectors are F32 */
    const char *tokenizer; /* path of the tokenizer.json, which has tokenizer_config.json and chat
                              template beside it; NULL: ids are bytes. Borrowed */
    const char *name;      /* of the model, in the file and in messages; borrowed */
} nd_gguf_writer_options;

/*
 * Begins a new file, which appears when it is complete. The tokenizer is in it. ND_ERR_DATA: the
 * model is of a family that is not written, or the tokenizer of a form that is not; the sentence
 * names it. ND_ERR_CANTCREATE: `path` exists or cannot be written, or the disk has no room.
 */
nd_status nd_gguf_writer_open(const char *path, const nd_gguf_writer_options *options,
                              nd_gguf_writer **out);
/* Elements [begin, begin + count) of a parameter, by its number in the layout of one rank: whole
 * rows. Each row comes once, in any order. ND_ERR_DATA: F16 cannot hold a value. */
nd_status nd_gguf_writer_write(nd_gguf_writer *writer, int param, int64_t begin, int64_t count,
                               const float *values);
/* Makes it durable and gives it its name. Frees the writer, also on failure. */
nd_status nd_gguf_writer_commit(nd_gguf_writer *writer);
void nd_gguf_writer_abort(nd_gguf_writer *writer); /* NULL is legal */

/* Tables of both directions; only for gguf_*.c. */

/* Kinds of values (gguf_type), and of tokens (llama_token_type). */
enum { ND_GGUF_U32 = 4, ND_GGUF_I32, ND_GGUF_F32, ND_GGUF_FLAG, ND_GGUF_TEXT, ND_GGUF_ARRAY };
enum { ND_GGUF_NORMAL = 1, ND_GGUF_UNKNOWN, ND_GGUF_CONTROL, ND_GGUF_USER_DEFINED, ND_GGUF_UNUSED };
enum { ND_GGUF_ALIGNMENT = 32, ND_GGUF_BLOCK_MAX = 256, ND_GGUF_TYPES = 31 };

typedef struct nd_gguf_type {
    int block, bytes; /* values of a block, and what they take; 0: not read */
    void (*load)(const uint8_t *block, float *values);
    /* False: F16 cannot hold a value, or the scale. NULL: not written. */
    bool (*store)(const float *values, uint8_t *block);
    int file_type; /* llama_ftype */
} nd_gguf_type;

extern const nd_gguf_type nd_gguf_types[ND_GGUF_TYPES]; /* by ggml_type */
const char *nd_gguf_type_name(int64_t type);            /* also of those that are not read */

/* Numbers of the shape. A key that begins with a point stands behind the family's name. */
typedef struct nd_gguf_key {
    const char *key;
    int kind;
    size_t place;       /* in nd_shape: an int64_t, or a double where the kind is F32 */
    const char *config; /* in config.json; NULL: the number follows from others */
    bool needed;        /* files without it are refused */
} nd_gguf_key;

enum { ND_GGUF_KEYS = 14, ND_GGUF_SPLITTINGS = 4 };
extern const nd_gguf_key nd_gguf_keys[ND_GGUF_KEYS];

/* llama.cpp's names for the ways to cut a text into words (tokenizer.ggml.pre). */
typedef struct nd_gguf_splitting {
    const char *name;
    int count;
    nd_splitter splitters[2];
    bool ignores_merges;
} nd_gguf_splitting;

extern const nd_gguf_splitting nd_gguf_splittings[ND_GGUF_SPLITTINGS];

/* Whether llama.cpp computes models of a family as they are here; its name is the model_type. */
bool nd_gguf_has_family(nd_family family);
/* The name of a parameter's tensor. */
void nd_gguf_name(const nd_param *param, char name[ND_PARAM_NAME]);
/* The layout of a whole model, whose parameters know where their elements are in a GGUF file
 * (nd_param_in_file). */
nd_status nd_gguf_layout(const nd_shape *shape, nd_layout **out);

/* RoPE of the type llama3 is a tensor of factors, one for each pair of a head. */
#define ND_GGUF_FACTORS "rope_freqs.weight"
float nd_gguf_factor(const nd_rope_config *rope, int64_t head_dim, int64_t pair);

/* The value of a key, lent; NULL: there is none. */
json_t *nd_gguf_get(const nd_gguf *gguf, const char *key);
/* Sets gguf->files from the keys and the list. */
nd_status nd_gguf_make_files(nd_gguf *gguf);
/* ND_ERR_DATA with the path before the sentence. */
nd_status nd_gguf_refuse(const nd_gguf *gguf, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
