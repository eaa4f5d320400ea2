// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_DCP_H
#define ND_CHECKPOINT_DCP_H
/*
 * torch DCP's dialect of safetensors (docs/checkpoint.md): each entry of a file is one rectangle of
 * a tensor, and __metadata__ says at which offsets of the global tensor it lies, as a JSON string
 * under DCP_SHARDING_INFO. torch's HuggingFaceStorageReader opens and reshards such files.
 *
 * A file without that key is an ordinary safetensors file: its entries are whole tensors. Newer
 * torch may store several rectangles of a tensor in a file under names of their own, and gives the
 * tensor's name as logical_fqn; both are read.
 */
#include "trainer/checkpoint/pieces.h"
#include "trainer/weights/safetensors.h"

enum { ND_DCP_ALIGNMENT = 4096, ND_DCP_FILE_NAME_MAX = 80 };

typedef struct nd_dcp_entry {
    char *name; /* of the global tensor; owned by the list */
    nd_safetensors_dtype dtype;
    nd_rect rect;        /* axes above 2: no tensor of a model, and the extents are not set */
    uint64_t begin, end; /* bytes of the file */
} nd_dcp_entry;

typedef struct nd_dcp_list {
    nd_dcp_entry *entries; /* in the order of their data */
    int64_t count, capacity;
} nd_dcp_list;

void nd_dcp_list_fini(nd_dcp_list *list);
/* Appends a rectangle; `name` is copied. For writing: begin and end are set by nd_dcp_head. */
nd_status nd_dcp_list_add(nd_dcp_list *list, const char *name, nd_safetensors_dtype dtype,
                          const nd_rect *rect);

/*
 * The head of a file that holds the entries in their order: length, JSON, and spaces up to a
 * multiple of ND_DCP_ALIGNMENT. Names are printable ASCII without quotes and backslashes. Sets
 * begin and end. *head is owned by the caller.
 */
nd_status nd_dcp_head(nd_dcp_list *list, char **head, size_t *head_bytes);

/*
 * Reads the head of an open file. ND_ERR_DATA, besides what safetensors forbids: a sharding string
 * that is not JSON, entries without offsets, offsets that are negative, too large or of another
 * number of axes, entries that the file does not hold, two entries with one rectangle's corner.
 */
nd_status nd_dcp_read_head(int fd, const char *path, nd_dcp_list *out);

/* The same from memory, for the fuzzer: a header and the sharding string of a file. */
nd_status nd_dcp_entries(const nd_safetensors_list *list, const char *path, nd_dcp_list *out);

/* "shard-00001-model-00001-of-00003.safetensors": file `index` of `count` of a rank. Returns
 * `name`. */
const char *nd_dcp_file_name(char name[ND_DCP_FILE_NAME_MAX], int rank, int index, int count);

#endif
