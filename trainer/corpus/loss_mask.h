// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CORPUS_LOSS_MASK_H
#define ND_CORPUS_LOSS_MASK_H
/*
 * The loss mask P.mask beside a pair of token files P.bin and P.idx: which tokens do not count in
 * the loss, as spans of the .bin. A pair without a mask counts every token. scripts/encode_rows.py
 * writes the same file; docs/formats.md has its bytes.
 *
 * A mask names its .idx by SHA-256, and its .bin by that of samples; it ends with the SHA-256 of
 * all its other bytes.
 */
#include "trainer/text/buffer.h"

enum { ND_LOSS_MASK_HEADER_BYTES = 168, ND_LOSS_MASK_DIGEST_BYTES = 64 };

typedef struct nd_loss_mask_view {
    uint64_t tokens, spans;
    uint64_t ignored;     /* tokens in spans, less than `tokens` */
    const uint8_t *pairs; /* [spans] pairs of u64: tokens [begin, end), in order, none empty */
    const char *digest;   /* the 64 digits at the end of the file, without a terminating NUL */
} nd_loss_mask_view;

/* The token files that a mask is beside; names are for messages. */
typedef struct nd_loss_mask_pair {
    const char *bin, *idx;
    uint64_t tokens;          /* of the .bin */
    const char *index_sha256; /* of the .idx, 64 hexadecimal digits */
    const char *bin_sha256;   /* what nd_loss_mask_bin_sha256 gives */
} nd_loss_mask_pair;

/* SHA-256 of a .bin of up to 16 MiB; of a larger one, that of 256 pieces of 64 KiB, the first at
 * its beginning, the last at its end and the others evenly between them. */
nd_status nd_loss_mask_bin_sha256(const char *bin, char hex[65]);

/* ND_ERR_DATA: `data` is no mask, cut, damaged, that of another pair, or counts no token. `name` is
 * for messages. Apart from files so that it can be fuzzed. */
nd_status nd_loss_mask_parse(const uint8_t *data, size_t size, const char *name,
                             const nd_loss_mask_pair *pair, nd_loss_mask_view *out);

/* A mask under construction; an all-zero one has no spans, the owner frees spans.data. */
typedef struct nd_loss_mask {
    nd_u64s spans; /* begin and end of each */
    uint64_t ignored;
} nd_loss_mask;

/* Appends tokens [begin, end), which lie behind the last span; adjacent spans become one. */
nd_status nd_loss_mask_add(nd_loss_mask *mask, uint64_t begin, uint64_t end);
/* Appends the bytes of the file. */
nd_status nd_loss_mask_make(const nd_loss_mask *mask, const nd_loss_mask_pair *pair, nd_bytes *out);

#endif
