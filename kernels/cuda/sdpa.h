// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_SDPA_H
#define ND_CUDA_SDPA_H
/*
 * The attention ops over cuDNN, which knows BF16 results, three masks, and no addition to what is
 * there. Separate documents go document by document (documents.h); other calls with a first_key,
 * and blocks that it cannot make or makes wrong (nd_sdpa_fits), go to the plain kernels. A block of
 * any `diag` is cut into at most three parts by rows: rows that see nothing, rows under a diagonal
 * that ends at the last key, rows that see all keys. F32 or added gradients go through BF16 results
 * in the scratch, statistics that are not packed as a whole through a copy.
 *
 * On Hopper the backward cuts some unmasked keys into halves, so that cuDNN makes no NaN
 * (sdpa_parts.h). Deterministic: cuDNN's own way needs a workspace of B H Sq Sk 2 bytes, so the
 * backward is also cut into groups of KV heads, and long blocks into tiles of rows and keys, until
 * that is at most ND_SDPA_ORDERED_BYTES. Gradients of several pieces are added up in F32 in a fixed
 * order.
 */
#include "kernels/cuda/context.h"
#include "kernels/ops.h"

/* True where cuDNN computes such heads when tensors are aligned to 16 bytes and 8 elements; its
 * backward then reads out, not delta. The plain kernels compute everything else. */
bool nd_cuda_sdpa_is_cudnn(const nd_attention *, nd_dtype act);
/* prepare: make the plans of such a call and record the scratch that it needs, and enqueue nothing.
 * Tensors need no memory then, but addresses that are aligned as those of the call. */
nd_status nd_cuda_sdpa_fwd(nd_stream *, const nd_attention_fwd_args *, bool prepare);
nd_status nd_cuda_sdpa_bwd(nd_stream *, const nd_attention_bwd_args *, bool prepare);
/* Bytes by formula (docs/cuda.md), as on Hopper. ordered: the most bytes of scores of one call of a
 * deterministic backward (ND_SDPA_ORDERED_BYTES); 0: not deterministic. In every build. */
size_t nd_cuda_sdpa_scratch_by_formula(const nd_attention *, nd_dtype act, bool backward,
                                       int64_t ordered);
/* nd_ops.attention_scratch: at least the bytes by formula, and what prepared calls need, or, before
 * any was prepared, what plans of such a block ask for. */
size_t nd_cuda_sdpa_scratch(const nd_device *, const nd_attention *, nd_dtype act, bool backward);

#endif
