// SPDX-License-Identifier: Apache-2.0
#ifndef ND_GGUF_GGUF_H
#define ND_GGUF_GGUF_H
/*
 * GGUF, version 3: the format of one file that llama.cpp and the programs built on it read. The
 * file holds keys with values (the shape of the model, its tokenizer and chat template), a list of
 * tensors, and their values, each tensor at a multiple of 32 bytes. Numbers are little-endian.
 */
#include <stdint.h>

#include "trainer/weights/weights.h"

/* In the order of --type. Q8_0: blocks of 32 have a scale in F16, and 32 integers of 8 bits. */
typedef enum nd_gguf_type { ND_GGUF_BF16, ND_GGUF_F16, ND_GGUF_F32, ND_GGUF_Q8_0 } nd_gguf_type;

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

#endif
