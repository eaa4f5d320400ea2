// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_SUPPORT_RANKS_INTERNAL_H
#define TESTS_SUPPORT_RANKS_INTERNAL_H
/* What ranks as threads and ranks as processes share. */
#include "tests/support/ranks.h"

nd_status nd_ranks_begin(nd_ranks *ranks, nd_progress *page);
/* Runs the body on an open transport and writes the result; closes the transport. */
void nd_ranks_run_body(nd_ranks *ranks, nd_transport *transport, nd_rank_result *result);
void nd_ranks_store_failure(nd_rank_result *result, nd_status status);
nd_status nd_ranks_end(nd_ranks *ranks, nd_progress *page);

int nd_ranks_slot(void *context, int rank);

#endif
