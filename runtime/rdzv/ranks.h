// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_RANKS_H
#define ND_RDZV_RANKS_H
/* Sets of ranks, or of nodes, in messages: "0-3, 7". */
#include <stdbool.h>
#include <stddef.h>

typedef bool nd_rank_test(const void *context, int rank);

/* Writes those of `count` ranks from `first` on that pass the test as ranges; ends with ", ..."
 * where out is too short. */
void nd_ranks_text(nd_rank_test *passes, const void *context, int first, int count, char *out,
                   size_t capacity);

#endif
