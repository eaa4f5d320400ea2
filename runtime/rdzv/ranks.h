// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_RANKS_H
#define ND_RDZV_RANKS_H
/* Sets of ranks in messages: "0-3, 7". */
#include <stdbool.h>
#include <stddef.h>

/* Writes the ranks r in [0, count) with member[r] == wanted as ranges; ends with ", ..." where out
 * is too short. */
void nd_ranks_text(const bool *member, bool wanted, int count, char *out, size_t capacity);

#endif
