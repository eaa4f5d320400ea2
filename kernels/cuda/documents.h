// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_DOCUMENTS_H
#define ND_CUDA_DOCUMENTS_H
/*
 * Attention of separate documents (nd_attention.documents) by cuDNN: segments of documents as the
 * batch of a call on ragged tensors. A segment is adjacent rows and the adjacent keys that they
 * see, under a diagonal that ends at the last of both, or without one. Where they lie is computed
 * on the GPU from the bounds, so the host need not know it, and a run has the same few plans
 * whatever its documents are.
 *
 * Rounds: the segments of one document have its first keys in common, so each goes in a round of
 * its own. In a round no two segments share a row or a key, and both ascend, as cuDNN's ragged
 * tensors do. The host says how many rounds there are (nd_attention.rounds), and the plain kernels
 * compute what is left. With all tokens on one rank a document is one segment.
 *
 * Tiers: cuDNN starts blocks for each segment as if it were the longest one, so segments go by
 * extent, which is rows and keys together: those above an eighth of the most in one call, those
 * above a 64th in the next, and so on while a call's longest have at least 128. With that a call of
 * whole documents has about S / 16 blocks of rows for each head, most of which end at once,
 * whatever the documents are; a causal one has S / 128. What is shorter goes to the plain kernels,
 * which then walk over few keys, and so do segments of one row (sdpa_parts.h).
 *
 * Slots: a segment covers the numbers from its first row and key added up to its ends added up. One
 * of at least n covers a multiple of n, and its slot in a tier is the first multiple that it
 * covers, so no count of segments is needed and none is too many.
 *
 * Groups: a call has as many KV heads as have room in ND_DOCUMENTS_BYTES, or one.
 *
 * Results go through the scratch: what cuDNN writes between the segments of a call is not
 * documented, and other segments are there. Only what is of the call is taken out of it.
 */
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/kernels.h"

struct nd_sdpa_call; /* sdpa_parts.h */

enum {
    ND_DOCUMENT_TIERS = 10,
    ND_DOCUMENTS_BYTES = 1 << 30 /* the most of a backward's workspace for several KV heads */
};

typedef struct nd_document_tier {
    int64_t least;      /* rows and keys of a segment, added up */
    int64_t rows, keys; /* the most of either */
    int64_t slots;      /* of all sequences of the batch */
    size_t lengths;     /* I32 (2, slots): rows, keys */
    size_t starts;      /* I64 (kinds, slots + 1) */
} nd_document_tier;

/* Calls of some KV heads. Their scratch has the parts whose places are here behind the workspace,
 * each aligned to 256 bytes. */
typedef struct nd_documents {
    int64_t batch, rows, keys; /* B, Sq, Sk */
    int64_t kvs;               /* KV heads of a call: divides all */
    int count;
    nd_document_tier tiers[ND_DOCUMENT_TIERS]; /* the longest segments first */
    size_t owners;                             /* I32 (2, B, Sq): kernels.h */
    size_t stats;                              /* F32 (B Sq, heads) */
    size_t results;                            /* BF16 (B Sq, heads D): out, or dq */
    size_t dk, dv;                             /* BF16 (B Sk, kvs D) */
    size_t end;
} nd_documents;

/* planner.c: pure arithmetic, in every build. */
nd_documents nd_documents_of(const nd_attention *, size_t workspace, bool backward);
/* True where cuDNN can make such a call on Hopper; its heads are of those that cuDNN takes
 * (nd_cuda_sdpa_is_cudnn). The plan of a job knows all that this asks. ordered: gradients are added
 * in a fixed order, for which cuDNN would take too much memory. */
bool nd_documents_fit(const nd_attention *, bool ordered);
/* Bytes by formula, where nd_documents_fit. */
size_t nd_documents_scratch_by_formula(const nd_attention *, bool backward);

/* sdpa_documents.c */

/* True where cuDNN computes the call's segments. Makes the plans, and call->documents. Where cuDNN
 * turns out to have no plan, no such call is taken any more, and the plain kernels compute it. */
bool nd_documents_take(struct nd_sdpa_call *call);
/* Computes what was taken, all but rows that are left to the plain kernels: *owners. The call's dk
 * and dv are added to unless documents are whole. */
nd_status nd_documents_run(nd_stream *, struct nd_sdpa_call *call, void *scratch,
                           const int32_t **owners);

/* documents.cu: launchers as in kernels.h */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nd_documents_find_args {
    nd_documents of;
    char *scratch;
    nd_segments form;
    int64_t round, rounds;
    const int32_t *first_key, *end_key; /* (B, Sq) */
    int64_t widths[ND_RAGGED_KINDS];    /* elements from one token to the next */
} nd_documents_find_args;

/* Writes owners, and of a round lengths and starts of each tier. */
int nd_cuda_documents_find(nd_cuda_queue, const nd_documents_find_args *);

typedef struct nd_documents_take_args {
    nd_tensor out;          /* (B, S, heads, D) of whole packs of 8 */
    const void *x;          /* BF16, contiguous, of the same shape */
    nd_tensor lse;          /* F32 (B, heads, S), with free strides on the first axis, or none */
    const float *stats;     /* F32 (B S, heads) */
    int64_t slots, most;    /* of a tier; the most tokens of one */
    const int32_t *lengths; /* (slots): tokens of each */
    const int64_t *starts;  /* (slots): their elements in x */
    bool add;               /* to what out has */
} nd_documents_take_args;

/* out (+)= x, and lse = stats, in the tokens of the segments of a tier. */
int nd_cuda_documents_take(nd_cuda_queue, const nd_documents_take_args *);

#ifdef __cplusplus
}
#endif
#endif
