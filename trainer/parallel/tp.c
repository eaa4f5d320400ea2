// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/tp.h"

static nd_comm *tp_comm(const nd_rank *rank)
{
    return rank->groups.by_kind[ND_GROUP_TP];
}

nd_tensor nd_tp_partial(const nd_rank *rank, nd_tensor local, void *buffer)
{
    int size = tp_comm(rank)->size;
    return size == 1 ? local
                     : nd_tensor_2d(buffer, local.dtype, local.shape[0] * size, local.shape[1]);
}

nd_status nd_tp_gather(nd_rank *rank, nd_tensor local, void *buffer, nd_exchange *later,
                       nd_tensor *full)
{
    nd_tensor out = nd_tp_partial(rank, local, buffer);
    ND_COMM(rank, tp_comm(rank), all_gather, later ? &later->done : NULL, .send = local.data,
            .recv = out.data, .count = nd_tensor_count(local), .dtype = local.dtype);
    *full = out;
    return ND_OK;
}

nd_status nd_tp_reduce(nd_rank *rank, nd_tensor partial, nd_tensor local, nd_exchange *later)
{
    ND_COMM(rank, tp_comm(rank), reduce_scatter, later ? &later->done : NULL, .send = partial.data,
            .recv = local.data, .count = nd_tensor_count(local), .dtype = local.dtype,
            .redop = ND_REDOP_SUM);
    return ND_OK;
}
