// SPDX-License-Identifier: Apache-2.0
#ifndef ND_PARALLEL_TP_H
#define ND_PARALLEL_TP_H
/*
 * Tensor parallel with sequence parallel: between the column- and row-parallel products activations
 * are split over tp on the flattened local tokens, (Tl, C) of (T, C), in local order. Entering a
 * column-parallel product gathers them, leaving a row-parallel product reduces and scatters. On an
 * axis of size 1 the local tensor is the full one: nothing is copied. All exchanges of tp share a
 * communicator, so one that was begun is finished before the next begins.
 */
#include "trainer/rank.h"

/* Returns where a row-parallel product writes its partial sums (T, X): `local` when tp is 1, else
 * `buffer`. */
static inline nd_tensor nd_tp_partial(const nd_rank *rank, nd_tensor local, void *buffer)
{
    const int size = rank->groups.by_kind[ND_GROUP_TP]->size;
    return size == 1 ? local
                     : nd_tensor_2d(buffer, local.dtype, local.shape[0] * size, local.shape[1]);
}

/* With `later` an exchange is only begun, and ends when `later` is finished; NULL: at once. */

/* (Tl, X) -> (T, X): `local` itself when tp is 1, else gathered into `buffer`. */
static inline nd_status nd_tp_gather(nd_rank *rank, nd_tensor local, void *buffer,
                                     nd_exchange *later, nd_tensor *full)
{
    const nd_tensor out = nd_tp_partial(rank, local, buffer);
    ND_COMM(rank, rank->groups.by_kind[ND_GROUP_TP], all_gather, later ? &later->done : NULL,
            .send = local.data, .recv = out.data, .count = nd_tensor_count(local),
            .dtype = local.dtype);
    *full = out;
    return ND_OK;
}

/* Sums partial (T, X) over tp and leaves this rank's rows in local (Tl, X). */
static inline nd_status nd_tp_reduce(nd_rank *rank, nd_tensor partial, nd_tensor local,
                                     nd_exchange *later)
{
    ND_COMM(rank, rank->groups.by_kind[ND_GROUP_TP], reduce_scatter, later ? &later->done : NULL,
            .send = partial.data, .recv = local.data, .count = nd_tensor_count(local),
            .dtype = local.dtype, .redop = ND_REDOP_SUM);
    return ND_OK;
}

#endif
