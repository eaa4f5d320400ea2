// SPDX-License-Identifier: Apache-2.0
#ifndef ND_PARALLEL_CP_H
#define ND_PARALLEL_CP_H
/*
 * Attention over a sequence that is split in zig-zag order over cp: rank r of n holds chunks r and
 * 2 n - 1 - r of the 2 n chunks, so that causal work is equal (Llama 3 paper 3.3.2; Brandon et al.,
 * Striped Attention, 2023).
 *
 * There are two methods of exchange (cp_method.h). allgather: K and V are gathered once (again in
 * backward rather than kept); each local query chunk sees a prefix of the global keys. ring: K and
 * V travel, partial results merge online by LSE in F32; in backward dK and dV travel one hop
 * behind, accumulated in F32. Which blocks meet is data, made by pure functions; the methods loop
 * over it. cp = 1 is one causal block in place.
 */
#include "runtime/device/memplan.h"
#include "trainer/layout/layout.h"
#include "trainer/rank.h"

/* Query chunk `q_chunk` of this rank against keys [kv_begin, kv_begin + kv_count): key j visible to
 * row i iff i + diag - window < j <= i + diag (both counted from the block's start); without a
 * window iff j <= i + diag. */
typedef struct nd_attention_block {
    int q_chunk;
    int64_t kv_begin, kv_count, diag;
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

typedef struct nd_cp {
    nd_rank *rank;
    nd_dims dims;
    int64_t window;                         /* of the layer of this call; 0: none */
    const struct nd_cp_method *method;      /* NULL: cp is 1 */
    void *pack, *visiting[2], *global_kv;   /* act: (T, 2 K D), (T, 2 K D) twice, (B, S, 2 K D) */
    float *dkv[2], *dkv_global, *dkv_ranks; /* F32 of the same extents */
    float *acc, *acc_lse, *dq;              /* ring: (T, H D), (2, B, H, chunk); dq (T, H D) */
    void *part;                             /* ring: partial output (T, H D) act */
    float *part_lse, *delta;                /* (2, B, H, chunk); delta NULL: not used */
    void *scratch;                          /* of the attention op */
    nd_exchange arriving;                   /* between the two halves of a backward: */
    const float *arrived;                   /* dk and dv of this rank's tokens, in dkv[] */
} nd_cp;

void nd_cp_init(nd_cp *cp, nd_rank *rank, const nd_dims *dims, nd_memplan *plan);

/* window: of the layer, nd_shape_window. qkv (T, QKV), roped; o (T, H D) and lse F32 (chunks, B, H,
 * chunk) are written. */
nd_status nd_cp_attention_fwd(nd_cp *cp, int64_t window, nd_tensor qkv, nd_tensor o, float *lse);
/* dqkv (T, QKV) from dout (T, H D) and what the forward made, o and lse. Other ranks' parts of dk
 * and dv are on their way afterwards, and are there when the backward is finished. */
nd_status nd_cp_attention_bwd(nd_cp *cp, int64_t window, nd_tensor dqkv, nd_tensor qkv, nd_tensor o,
                              const float *lse, nd_tensor dout);
nd_status nd_cp_attention_bwd_finish(nd_cp *cp, nd_tensor dqkv);

#endif
