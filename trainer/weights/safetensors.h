// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WEIGHTS_SAFETENSORS_H
#define ND_WEIGHTS_SAFETENSORS_H
/*
 * The safetensors format: u64 header length, a JSON header, then the tensors without holes
 * (docs/formats.md).
 *
 * Reading parses and checks the header only; nothing is allocated from an unchecked length. Writing
 * lays tensors out and makes the header; whoever writes the values uses the offsets.
 */
#include <stdint.h>

#include "runtime/base/status.h"

enum { ND_SAFETENSORS_AXES_MAX = 8, ND_SAFETENSORS_HEADER_MAX = 100000000 };

typedef enum nd_st_dtype {
    ND_ST_BOOL = 0,
    ND_ST_F4,
    ND_ST_F6_E2M3,
    ND_ST_F6_E3M2,
    ND_ST_U8,
    ND_ST_I8,
    ND_ST_F8_E5M2,
    ND_ST_F8_E4M3,
    ND_ST_F8_E8M0,
    ND_ST_F8_E4M3FNUZ,
    ND_ST_F8_E5M2FNUZ,
    ND_ST_I16,
    ND_ST_U16,
    ND_ST_F16,
    ND_ST_BF16,
    ND_ST_I32,
    ND_ST_U32,
    ND_ST_F32,
    ND_ST_C64,
    ND_ST_F64,
    ND_ST_I64,
    ND_ST_U64,
    ND_ST_DTYPE_COUNT
} nd_st_dtype;

const char *nd_st_dtype_name(nd_st_dtype dtype); /* "BF16" */
int nd_st_dtype_bits(nd_st_dtype dtype);

typedef struct nd_st_tensor {
    char *name; /* owned by the list it is in */
    nd_st_dtype dtype;
    int axes;
    int64_t shape[ND_SAFETENSORS_AXES_MAX];
    uint64_t begin, end; /* bytes from the start of the file */
} nd_st_tensor;

typedef struct nd_st_list {
    nd_st_tensor *tensors; /* in the order of their data; owned */
    int64_t count;
} nd_st_list;

void nd_st_list_fini(nd_st_list *list);
/* NULL when there is none. */
const nd_st_tensor *nd_st_list_find(const nd_st_list *list, const char *name);
int64_t nd_st_tensor_count(const nd_st_tensor *tensor); /* elements */

/*
 * Parses a header of `size` bytes in a file of `file_bytes`; `path` is for messages. ND_ERR_DATA
 * says what is wrong: not JSON, duplicate keys, unknown dtype, holes, overlap, sizes that disagree,
 * truncation, bytes after the last.
 */
nd_status nd_st_parse(const char *header, size_t size, uint64_t file_bytes, const char *path,
                      nd_st_list *out);

/* The header of an open file. */
nd_status nd_st_read_header(int fd, const char *path, nd_st_list *out);

/*
 * Sorts by element size (large first, so that all are aligned), then by name; sets begin and end;
 * gives the head of the file: length, JSON with {"format": "pt"} as metadata, padded to 8 bytes.
 * *head is owned by the caller.
 */
nd_status nd_st_layout(nd_st_tensor *tensors, int64_t count, char **head, size_t *head_bytes);

#endif
