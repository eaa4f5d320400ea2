// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WEIGHTS_SAFETENSORS_H
#define ND_WEIGHTS_SAFETENSORS_H
/*
 * The safetensors format: u64 header length, a JSON header, then the tensors without holes
 * (docs/formats.md).
 *
 * Reading parses and checks the header only; nothing is allocated from an unchecked length. Writing
 * lays tensors out and makes the header; the caller writes the values at these offsets.
 */
#include <stdint.h>

#include "runtime/base/status.h"

enum { ND_SAFETENSORS_AXES_MAX = 8, ND_SAFETENSORS_HEADER_MAX = 100000000 };

typedef enum nd_safetensors_dtype {
    ND_SAFETENSORS_BOOL = 0,
    ND_SAFETENSORS_F4,
    ND_SAFETENSORS_F6_E2M3,
    ND_SAFETENSORS_F6_E3M2,
    ND_SAFETENSORS_U8,
    ND_SAFETENSORS_I8,
    ND_SAFETENSORS_F8_E5M2,
    ND_SAFETENSORS_F8_E4M3,
    ND_SAFETENSORS_F8_E8M0,
    ND_SAFETENSORS_F8_E4M3FNUZ,
    ND_SAFETENSORS_F8_E5M2FNUZ,
    ND_SAFETENSORS_I16,
    ND_SAFETENSORS_U16,
    ND_SAFETENSORS_F16,
    ND_SAFETENSORS_BF16,
    ND_SAFETENSORS_I32,
    ND_SAFETENSORS_U32,
    ND_SAFETENSORS_F32,
    ND_SAFETENSORS_C64,
    ND_SAFETENSORS_F64,
    ND_SAFETENSORS_I64,
    ND_SAFETENSORS_U64,
    ND_SAFETENSORS_DTYPE_COUNT
} nd_safetensors_dtype;

const char *nd_safetensors_dtype_name(nd_safetensors_dtype dtype); /* "BF16" */
int nd_safetensors_dtype_bits(nd_safetensors_dtype dtype);

typedef struct nd_safetensors_tensor {
    char *name; /* owned by the list it is in */
    nd_safetensors_dtype dtype;
    int axes;
    int64_t shape[ND_SAFETENSORS_AXES_MAX];
    uint64_t begin, end; /* bytes from the start of the file */
    char *note;          /* its text in __metadata__, under its name; owned; NULL: none */
    int64_t number;      /* the caller's, which nd_safetensors_layout leaves with it */
} nd_safetensors_tensor;

typedef struct nd_safetensors_list {
    nd_safetensors_tensor *tensors; /* in the order of their data; owned */
    int64_t count;
} nd_safetensors_list;

void nd_safetensors_list_fini(nd_safetensors_list *list);
/* Orders tensors for qsort as they lie in a file. */
int nd_safetensors_by_place(const void *a, const void *b);
/* NULL when there is none. */
const nd_safetensors_tensor *nd_safetensors_list_find(const nd_safetensors_list *list,
                                                      const char *name);
int64_t nd_safetensors_tensor_count(const nd_safetensors_tensor *tensor); /* elements */

/*
 * Parses a header of `size` bytes in a file of `file_bytes`; `path` is for messages. ND_ERR_DATA
 * says what is wrong: not JSON, duplicate keys, unknown dtype, holes, overlap, sizes that disagree,
 * truncation, bytes after the last.
 */
nd_status nd_safetensors_parse(const char *header, size_t size, uint64_t file_bytes,
                               const char *path, nd_safetensors_list *out);

/* Reads and parses the header of an open file. */
nd_status nd_safetensors_read_header(int fd, const char *path, nd_safetensors_list *out);
/* Elements [begin, begin + count) of a tensor in F32, BF16 or F16, as F32 (exact). */
nd_status nd_safetensors_read(int fd, const char *path, const nd_safetensors_tensor *tensor,
                              int64_t begin, int64_t count, float *out);

/*
 * Sorts by element size (large first, so that all are aligned), then by name; sets begin and end;
 * gives the head of the file: length, JSON with {"format": "pt"} and the notes as metadata, padded
 * to 8 bytes.
 * *head is owned by the caller.
 */
nd_status nd_safetensors_layout(nd_safetensors_tensor *tensors, int64_t count, char **head,
                                size_t *head_bytes);

#endif
