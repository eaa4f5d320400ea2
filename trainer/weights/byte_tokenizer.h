// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WEIGHTS_BYTE_TOKENIZER_H
#define ND_WEIGHTS_BYTE_TOKENIZER_H
/*
 * tokenizer.json and tokenizer_config.json for models whose ids are bytes, as transformers'
 * AutoTokenizer reads them: byte-level BPE without merges, whose vocabulary maps the character that
 * stands for byte b to id b.
 */
#include "runtime/base/status.h"

/* Writes both files into the folder and fsyncs them. */
nd_status nd_byte_tokenizer_write(const char *folder);

#endif
