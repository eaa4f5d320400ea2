// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WEIGHTS_HF_FILES_H
#define ND_WEIGHTS_HF_FILES_H
/*
 * What belongs to a Hugging Face model beside config.json and weights, and stays as it is when it
 * is trained further: the tokenizer, the chat template, generation_config.json.
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"

/* Bytes of those files in the folder; `tokenizer` false leaves the tokenizer's out. Those that are
 * not there count 0. */
uint64_t nd_hf_side_files_bytes(const char *folder, bool tokenizer);

/* Copies them and fsyncs the copies. One that cannot be read is named in a warning, since the
 * weights matter more. */
nd_status nd_hf_side_files_copy(const char *from, const char *to, bool tokenizer);

#endif
