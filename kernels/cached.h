// SPDX-License-Identifier: Apache-2.0
#ifndef ND_KERNELS_CACHED_H
#define ND_KERNELS_CACHED_H
/*
 * attention_cached by the ops of a backend on the host, segment by segment: a copy into the slot,
 * then a block of attention under a diagonal behind the tokens that the slot held.
 */
#include "kernels/ops.h"

typedef struct nd_cached_ops {
    nd_status (*cast)(nd_stream *, const nd_cast_args *);
    nd_status (*attention_fwd)(nd_stream *, const nd_attention_fwd_args *);
} nd_cached_ops;

/* A segment with these rows whose sequence then has `tokens`. */
nd_attention nd_attention_of_segment(const nd_attention *a, int64_t rows, int64_t tokens);
/* Bytes of the statistics of so many rows, which stand at the beginning of the scratch. */
size_t nd_cached_lse_bytes(const nd_attention *a, int64_t rows);
nd_status nd_attention_cached_by(nd_stream *stream, const nd_cached_ops *ops,
                                 const nd_attention_cached_args *args);

#endif
