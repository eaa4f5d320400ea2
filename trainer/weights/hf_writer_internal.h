// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WEIGHTS_HF_WRITER_INTERNAL_H
#define ND_WEIGHTS_HF_WRITER_INTERNAL_H
/* A folder that is being written: hf_writer.c makes and fills it, hf_writer_commit.c completes and
 * publishes it. */
#include "trainer/weights/coverage.h"
#include "trainer/weights/hf_folder.h"
#include "trainer/weights/safetensors.h"

typedef struct nd_hf_weight_file {
    char *path;
    int fd; /* -1 when not open */
    int64_t unsynced;
    nd_st_list list;
} nd_hf_weight_file;

/* A tensor's place and what of it has arrived; sorted by name. */
typedef struct nd_hf_entry {
    const nd_st_tensor *tensor; /* lent by the file's list */
    nd_hf_weight_file *file;
    nd_coverage coverage;
} nd_hf_entry;

struct nd_hf_writer {
    char *folder;    /* where it will be */
    char *temporary; /* where it is now; beside it */
    nd_hf_writer_options options;
    nd_hf_weight_file *files; /* owned */
    int64_t file_count;
    nd_hf_entry *entries; /* owned */
    int64_t entry_count;
    uint64_t tensor_bytes;
    nd_bf16 *converted; /* (CONVERT_ELEMENTS) */
};

#endif
