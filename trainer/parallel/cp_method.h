// SPDX-License-Identifier: Apache-2.0
#ifndef ND_PARALLEL_CP_METHOD_H
#define ND_PARALLEL_CP_METHOD_H
/* Inside cp: cp.c plans and chooses the exchange, cp_gather.c or cp_ring.c; both are made of the
 * blocks and views of cp_block.c. */
#include "trainer/parallel/cp.h"

/* Where the keys of a block are: the projection itself (cp = 1), or a buffer of k v rows. */
typedef struct nd_kv_source {
    void *data;
    nd_dtype dtype;
    int64_t rows, stride; /* rows per sample, elements per row */
    int64_t k, v;         /* first column of each */
} nd_kv_source;

nd_kv_source nd_cp_local_source(const nd_dims *d, nd_tensor qkv);
nd_kv_source nd_cp_buffer_source(const nd_dims *d, void *data, nd_dtype dtype, int64_t rows);

nd_attention nd_cp_describe(const nd_dims *d, const nd_cp_block *block);
/* Rows of query chunk `c` of a (T, columns) tensor, `heads` heads from column `column`: (B, chunk,
 * heads, D). */
nd_tensor nd_cp_q_view(const nd_dims *d, nd_tensor t, int c, int64_t column, int64_t heads);
/* (B, H, chunk) of query chunk `chunk`. */
nd_tensor nd_cp_row_view(const nd_dims *d, const float *base, int chunk);

/* k and v columns of qkv, packed to rows of 2 K D. */
nd_status nd_cp_pack_kv(nd_cp *cp, nd_tensor qkv, void *out);
/* F32 dk and dv rows -> the columns of dqkv. */
nd_status nd_cp_store_dkv(nd_cp *cp, nd_tensor dqkv, const float *dkv);

/* One block forward, and backward: dq into `dq`, dk and dv into `dkv`. */
nd_status nd_cp_run_fwd(nd_cp *cp, const nd_cp_block *block, nd_tensor qkv, const nd_kv_source *kv,
                        nd_tensor o, const float *lse);
nd_status nd_cp_run_bwd(nd_cp *cp, const nd_cp_block *block, nd_tensor dq, const nd_kv_source *dkv,
                        nd_tensor qkv, const nd_kv_source *kv, nd_tensor o, const float *lse,
                        nd_tensor dout, bool add_q, bool add_kv);

/* K and V gathered over cp (cp = 1: where they are), and the whole backward of that exchange. */
nd_status nd_cp_gather_kv(nd_cp *cp, nd_tensor qkv, nd_kv_source *out);
nd_status nd_cp_gathered_bwd(nd_cp *cp, nd_tensor dqkv, nd_tensor qkv, nd_tensor o,
                             const float *lse, nd_tensor dout);

nd_status nd_cp_ring_fwd(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse);
nd_status nd_cp_ring_bwd(nd_cp *cp, nd_tensor dqkv, nd_tensor qkv, nd_tensor o, const float *lse,
                         nd_tensor dout);

#endif
