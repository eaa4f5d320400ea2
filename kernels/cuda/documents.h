// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_DOCUMENTS_H
#define ND_CUDA_DOCUMENTS_H
/*
 * Attention of separate documents (nd_attention.documents) by cuDNN: documents as the batch of a
 * call on ragged tensors. Where they lie is computed on the GPU from first_key, so neither the host
 * nor a CUDA graph needs to know it, and a run has the same few plans whatever its documents are.
 *
 * Tiers: cuDNN starts blocks for each document as if it were the longest one, so documents go by
 * length: those of more than S / 8 rows in one call, those of more than S / 64 in the next, and so
 * on while a call's longest have at least 64 rows. With that a call has about S / 16 blocks of rows
 * for each head, most of which end at once, whatever the documents are; a causal one has S / 128.
 * What is shorter goes to the plain kernels, which then walk over few keys.
 *
 * Slots: a document of at least n rows contains a multiple of n, and its slot in a tier is the
 * first multiple that it contains, so no count of documents is needed and none is too many.
 *
 * Results go through the scratch: what cuDNN writes between the documents of a call is not
 * documented, and other documents are there. Only rows of the tier are taken out of it.
 */
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/kernels.h"

struct nd_cuda_context; /* context.h */

enum { ND_DOCUMENT_TIERS = 10 };

typedef struct nd_document_tier {
    int64_t least, most; /* rows of a document */
    int64_t slots;       /* of all sequences of the batch */
} nd_document_tier;

typedef struct nd_document_tiers {
    nd_document_tier of[ND_DOCUMENT_TIERS]; /* the longest documents first */
    int count;                              /* 0: sequences are too short */
    int64_t batch, rows;                    /* B, S */
} nd_document_tiers;

/* The scratch of a call holds these parts behind the workspace, each aligned to 256 bytes. */
typedef struct nd_documents_layout {
    size_t owners; /* I32 (B, S): the tier of a row's document, or minus the end of the document */
    size_t lengths[ND_DOCUMENT_TIERS]; /* I32 (slots) */
    size_t starts[ND_DOCUMENT_TIERS];  /* I64 (kinds, slots + 1) */
    size_t stats;                      /* F32 (B S, H) */
    size_t rows;                       /* BF16 (B S, H D): out, or dq */
    size_t keys[2];                    /* BF16 (B S, K D): dk, dv */
    size_t end;
} nd_documents_layout;

/* Pure arithmetic, in every build. */
nd_document_tiers nd_document_tiers_of(const nd_attention *);
nd_documents_layout nd_documents_layout_of(const nd_attention *, size_t workspace, bool backward);
/* True where cuDNN can make such a call on Hopper; its heads are of those that cuDNN takes
 * (nd_cuda_sdpa_is_cudnn). The plan of a job knows all that this asks. ordered: gradients are added
 * in a fixed order, for which cuDNN would take too much memory. */
bool nd_documents_fit(const nd_attention *, bool ordered);
/* Bytes by formula, where nd_documents_fit. */
size_t nd_documents_scratch_by_formula(const nd_attention *, bool backward);

/* sdpa_documents.c. Where cuDNN turns out to have no plan, no such call is taken any more, and the
 * plain kernels compute it. */

/* Make the plans of a call and record its scratch, as nd_cuda_sdpa_prepare_*; false: it is not
 * taken. */
bool nd_documents_prepare_fwd(struct nd_cuda_context *, const nd_attention_fwd_args *);
bool nd_documents_prepare_bwd(struct nd_cuda_context *, const nd_attention_bwd_args *);
/* Without *taken nothing was enqueued. The backward reads delta, for the short documents. */
nd_status nd_documents_fwd(nd_stream *, const nd_attention_fwd_args *, bool *taken);
nd_status nd_documents_bwd(nd_stream *, const nd_attention_bwd_args *, bool *taken);

/* documents_check.c: on the device of the context. Allocates, waits, and logs what is wrong. */
bool nd_documents_are_right(struct nd_cuda_context *, const nd_attention *like);

/* documents.cu: launchers as in kernels.h */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nd_documents_find_args {
    nd_document_tiers tiers;
    const int32_t *first_key; /* (B, S) */
    int32_t *owners;
    int32_t *lengths[ND_DOCUMENT_TIERS];
    int64_t *starts[ND_DOCUMENT_TIERS];
    int64_t widths[ND_RAGGED_KINDS]; /* elements from one token to the next */
} nd_documents_find_args;

/* Writes owners, and lengths and starts of each tier. */
int nd_cuda_documents_find(nd_cuda_queue, const nd_documents_find_args *);

typedef struct nd_documents_take_args {
    nd_tensor out, x; /* (B, S, heads, D): x is BF16 and contiguous */
    const int32_t *owners;
    int32_t tier;
    bool add; /* out is F32 */
} nd_documents_take_args;

/* out (+)= x in the rows of a tier. */
int nd_cuda_documents_take(nd_cuda_queue, const nd_documents_take_args *);

typedef struct nd_documents_stats_args {
    nd_tensor lse; /* F32 (B, H, S) */
    float *stats;  /* F32 (B S, H) */
    const int32_t *owners;
    int32_t tier;
    bool to_lse; /* lse = stats in the rows of the tier; else stats = lse in all rows */
} nd_documents_stats_args;

int nd_cuda_documents_stats(nd_cuda_queue, const nd_documents_stats_args *);

#ifdef __cplusplus
}
#endif
#endif
