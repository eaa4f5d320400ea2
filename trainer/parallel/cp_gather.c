// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/cp_method.h"

/* Copies between rank order (cp, B, s, X) and global order (B, S, X), X bytes wide rows, chunk by
 * chunk. */
static nd_status reorder(nd_cp *cp, char *ranks, char *global, size_t row_bytes, bool to_global)
{
    const nd_dims *d = &cp->dims;
    int n = cp->rank->groups.by_kind[ND_GROUP_CP]->size;
    size_t bytes = (size_t)d->chunk * row_bytes;
    for (int p = 0; p < n; p++) {
        for (int64_t b = 0; b < d->B; b++) {
            for (int c = 0; c < 2; c++) {
                int64_t place = c == 0 ? p : 2 * n - 1 - p;
                char *in_ranks = ranks + (size_t)((p * d->B + b) * d->s + c * d->chunk) * row_bytes;
                char *in_global = global + (size_t)(b * d->S + place * d->chunk) * row_bytes;
                ND_TRY(to_global ? nd_copy(&cp->rank->stream, in_global, in_ranks, bytes)
                                 : nd_copy(&cp->rank->stream, in_ranks, in_global, bytes));
            }
        }
    }
    return ND_OK;
}

nd_status nd_cp_gather_kv(nd_cp *cp, nd_tensor qkv, nd_kv_source *out)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    int64_t kv = 2 * d->K * d->D;
    if (d->chunks == 1) {
        *out = nd_cp_local_source(d, qkv);
        return ND_OK;
    }
    ND_TRY(nd_cp_pack_kv(cp, qkv, cp->pack));
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_all_gather(r->groups.by_kind[ND_GROUP_CP], &r->stream, cp->pack, cp->visiting[0],
                              d->T * kv, d->act, NULL));
    ND_RUN(r, ND_TRACE_ATTENTION,
           reorder(cp, cp->visiting[0], cp->global_kv, (size_t)kv * nd_dtype_size(d->act), true));
    *out = nd_cp_buffer_source(d, cp->global_kv, d->act, d->S);
    return ND_OK;
}

nd_status nd_cp_gathered_bwd(nd_cp *cp, nd_tensor dqkv, nd_tensor qkv, nd_tensor o,
                             const float *lse, nd_tensor dout)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    int64_t kv_columns = 2 * d->K * d->D;
    nd_cp_block blocks[2];
    nd_kv_source kv, dkv = nd_cp_buffer_source(d, cp->dkv_global, ND_DTYPE_F32, d->S);
    ND_TRY(nd_cp_gather_kv(cp, qkv, &kv));
    ND_TRY(nd_zero(&r->stream, cp->dkv_global, (size_t)(d->B * d->S * kv_columns) * 4));
    int count = nd_cp_blocks_gathered(comm->size, comm->index, d->chunk, blocks);
    for (int b = 0; b < count; b++) {
        ND_TRY(nd_cp_run_bwd(cp, &blocks[b], dqkv, &dkv, qkv, &kv, o, lse, dout, false, true));
    }
    ND_RUN(
        r, ND_TRACE_ATTENTION,
        reorder(cp, (char *)cp->dkv_ranks, (char *)cp->dkv_global, (size_t)kv_columns * 4, false));
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_reduce_scatter(comm, &r->stream, cp->dkv_ranks, cp->dkv[0], d->T * kv_columns,
                                  ND_DTYPE_F32, ND_REDOP_SUM, NULL));
    return nd_cp_store_dkv(cp, dqkv, cp->dkv[0]);
}
