// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WEIGHTS_HF_READER_IMPL_H
#define ND_WEIGHTS_HF_READER_IMPL_H
/* What hf_reader.c and hf_check.c share. */
#include "trainer/weights/hf_folder.h"
#include "trainer/weights/safetensors.h"

typedef struct nd_hf_file {
    char *name; /* within the folder */
    char *path;
    int fd;
    nd_st_list list;
} nd_hf_file;

/* A tensor and the file that holds it; sorted by name. */
typedef struct nd_hf_place {
    const nd_st_tensor *tensor; /* lent by the file's list */
    const nd_hf_file *file;
} nd_hf_place;

struct nd_hf_reader {
    char *folder;
    nd_llama_shape shape;
    nd_hf_file *files; /* owned */
    int64_t file_count;
    nd_hf_place *places; /* owned */
    int64_t place_count;
};

/* NULL: the folder has no such tensor. */
const nd_hf_place *nd_hf_reader_find(const nd_hf_reader *reader, const char *name);

#endif
