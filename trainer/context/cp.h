// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONTEXT_CP_H
#define ND_CONTEXT_CP_H
/*
 * Attention over a sequence whose tokens are dealt to the ranks of cp (deal.h). Joined documents
 * are in zig-zag order: rank r of n holds chunks r and 2 n - 1 - r of the 2 n chunks, so that
 * causal work is equal (Llama 3 paper 3.3.2; Brandon et al., Striped Attention, 2023).
 *
 * There are two methods of exchanging keys (method.h). allgather: K and V are gathered once
 * (again in backward rather than kept); each local query chunk sees a prefix of the global keys.
 * ring: K and V travel, partial results merge online by LSE in F32; in backward dK and dV travel
 * one hop behind, accumulated in F32. Which blocks meet is data, made by pure functions; the
 * methods loop over it. Where there is one rank it is one causal block in place (local).
 *
 * Ulysses goes before that: u adjacent ranks of cp exchange q, k and v, so that each has H / u of
 * the heads for the tokens of all u, and exchange the output back. Their chunks together are the
 * two zig-zag chunks of one of cp / u ranks, or with u = cp the whole sequence, in its order. So
 * attention is what it is over cp / u ranks, with fewer heads. Where K < u each KV head is on u / K
 * ranks, and its gradient is the sum of theirs.
 *
 * Where documents are separate, each query has a first key: the first token of its document, which
 * is data of the micro-batch. All queries of the rank are then one block, whatever the keys, since
 * those of any rank are in the order of the text: a query sees an adjacent part of them. allgather
 * puts the keys of all ranks into that order; where few of them are seen by other ranks, the ranks
 * exchange these alone.
 */
#include "runtime/device/memplan.h"
#include "trainer/layout/layout.h"
#include "trainer/rank.h"

/* The ranks of cp exchange this for attention: heads among `ulysses` of them, keys among the
 * others. */
typedef struct nd_cp_exchange {
    int ulysses;
    bool ring; /* else allgather; means nothing where ulysses is cp */
    double
        exposed_bytes; /* that a rank sends in a step and waits for at once, as a dry run counts */
} nd_cp_exchange;

enum { ND_CP_EXCHANGES_MAX = 32 };

/* Those that the model allows, from ulysses 1, allgather before ring; returns their number. */
int nd_cp_list_exchanges(const nd_shape *shape, const nd_config *config,
                         nd_cp_exchange list[ND_CP_EXCHANGES_MAX]);
/* That of the job. parallel.cp_comm auto takes the first one with the least exposed bytes. */
nd_cp_exchange nd_cp_exchange_of(const nd_shape *shape, const nd_config *config);
/* config->resolved_mesh with its ranks, and with the copies of KV heads. */
nd_mesh nd_shape_mesh(const nd_shape *shape, const nd_config *config);
/* "allgather", "ulysses", "ulysses 2, then ring"; returns buffer. */
const char *nd_cp_exchange_format(const nd_cp_exchange *exchange, const nd_mesh *mesh, char *buffer,
                                  size_t size);

/* Queries [q_begin, q_begin + q_count) of this rank against keys [kv_begin, kv_begin + kv_count).
 * Of joined documents key j is visible to row i iff i + diag - window < j <= i + diag (both counted
 * from the block's start); without a window iff j <= i + diag. */
typedef struct nd_attention_block {
    int64_t q_begin, q_count, kv_begin, kv_count, diag;
    nd_segments documents; /* that are separate */
    int64_t rounds;
} nd_attention_block;

enum { ND_CP_BLOCKS = 3 }; /* the most of one step */

/* Blocks of rank `index` of `size` against the keys in global order, all in one step; returns their
 * number. */
int nd_cp_blocks_gathered(int size, int index, int step, int64_t chunk, int64_t window,
                          nd_attention_block out[ND_CP_BLOCKS]);
/* Blocks of rank `index` at ring step `step`, where the visiting keys are those of rank index -
 * step (mod size), in that rank's local order. */
int nd_cp_blocks_ring(int size, int index, int step, int64_t chunk, int64_t window,
                      nd_attention_block out[ND_CP_BLOCKS]);

/* This says which of the keys up to its own a query sees. */
typedef struct nd_sight {
    int64_t window; /* of the layer, nd_shape_window; 0: none */
    /* On the device, what nd_cp_first_keys made of the micro-batch; NULL: documents are joined. */
    const int32_t *first_keys;
    const int64_t *sent; /* what else it made */
} nd_sight;

/* The exchange of heads, and its buffers; NULLs where members is 1. */
typedef struct nd_cp_ulysses {
    int members;      /* u; 1: no exchange of heads */
    void *out, *in;   /* act (u, T, QKV of a member's heads): messages */
    void *qkv, *dqkv; /* act (T, QKV) of the rank's heads */
    void *o, *dout;   /* act (T, H D) of the rank's heads */
    float *sums;      /* of replicas: (T, K D) of the rank's tokens */
} nd_cp_ulysses;

typedef struct nd_cp {
    nd_rank *rank;
    nd_dims tokens; /* of the rank's tokens, with all heads */
    nd_dims dims;   /* of its heads, with the tokens of all ranks of the group ulysses */
    nd_cp_ulysses ulysses;
    bool separate;  /* calls may have first keys */
    nd_sight sight; /* of this call */
    const struct nd_cp_method *method;
    /* Rows of 2 K D, act and F32: (T) twice, or gathered (T + B S); (B S) */
    void *visiting[2], *global_kv;
    float *dkv[2], *dkv_global;
    float *acc, *acc_lse, *dq; /* ring: (T, H D), (2, B, H, chunk); dq (T, H D) */
    void *part;                /* ring: partial output (T, H D) act */
    float *part_lse, *delta;   /* (2, B, H, chunk); delta NULL: not used */
    void *scratch;             /* of the attention op */
    nd_exchange arriving;      /* between the two halves of a backward: */
    void *arrived;             /* dk and dv of this rank's tokens, in dkv[] */
} nd_cp;

/* separate: calls may have first keys. */
void nd_cp_init(nd_cp *cp, nd_rank *rank, const nd_dims *dims, bool separate, nd_memplan *plan);

/* These are the numbers that nd_cp_first_keys makes of a micro-batch, those of `sent`, and the
 * bytes of its scratch. */
typedef struct nd_cp_key_sizes {
    int64_t numbers, sent, scratch;
} nd_cp_key_sizes;
nd_cp_key_sizes nd_cp_key_sizes_of(const nd_rank *rank, const nd_dims *dims);

/* On the host: which keys this rank's queries see, and where they come from. first_keys (B, S): for
 * each token of all ranks, in the order of the text, the place of the first one of its document;
 * places: what nd_deal made of these. sent: elements of keys and values that all ranks together
 * send, then those that this one sends to each rank of cp / u, then those that it receives from
 * each, then the rounds (nd_attention) of each step; the first is -1 where all of them are
 * gathered, or travel. */
void nd_cp_first_keys(const nd_rank *rank, const nd_dims *dims, const int32_t *first_keys,
                      const int32_t *places, void *scratch, int32_t *out, int64_t *sent);

/* qkv (T, QKV), roped; o (T, H D) of the rank's tokens and lse F32 (chunks, B, H, chunk) of its
 * heads, which has T H elements of either, are written. */
nd_status nd_cp_attention_fwd(nd_cp *cp, nd_sight sight, nd_tensor qkv, nd_tensor o, float *lse);
/* dqkv (T, QKV) from dout (T, H D) and what the forward made, o and lse. */
typedef struct nd_cp_backward {
    nd_tensor dqkv, qkv, o, dout;
    const float *lse;
} nd_cp_backward;

/* Other ranks' parts of dk and dv are on their way afterwards, and there when it is finished. */
nd_status nd_cp_attention_bwd(nd_cp *cp, nd_sight sight, const nd_cp_backward *b);
nd_status nd_cp_attention_bwd_finish(nd_cp *cp, nd_tensor dqkv);

#endif
