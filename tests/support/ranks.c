// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ranks.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "tests/support/local_transport.h"
#include "tests/support/ranks_internal.h"

int nd_ranks_slot(void *context, int rank)
{
    return rank;
}

nd_status nd_ranks_begin(nd_ranks *ranks, nd_progress *page)
{
    ND_ASSERT(ranks->size >= 1 && ranks->size <= ND_RANKS_MAX && ranks->body);
    memset(ranks->results, 0, sizeof ranks->results);
    if (ranks->timeout_seconds == 0) {
        ranks->timeout_seconds = 20;
    }
    ND_TRY(nd_progress_create(ranks->size, page));
    ranks->page = page;
    return ND_OK;
}

void nd_ranks_store_failure(nd_rank_result *result, nd_status status)
{
    result->status = status;
    snprintf(result->message, sizeof result->message, "%s", nd_error_last()->message);
}

void nd_ranks_run_body(nd_ranks *ranks, nd_transport *transport, nd_rank_result *result)
{
    double started = nd_clock_seconds();
    nd_status status = ranks->body(transport, ranks->context);
    result->seconds = nd_clock_seconds() - started;
    if (status != ND_OK) {
        nd_ranks_store_failure(result, status);
    }
    result->finished = true;
    nd_transport_close(transport);
}

nd_status nd_ranks_end(nd_ranks *ranks, nd_progress *page)
{
    ranks->page = NULL;
    nd_progress_close(page);
    const nd_rank_result *worst = NULL;
    int worst_rank = 0;
    for (int r = 0; r < ranks->size; r++) {
        const nd_rank_result *result = &ranks->results[r];
        bool failed = !result->finished || result->status != ND_OK;
        /* A wrong result or a bug explains more than a peer that ended. */
        if (failed && (!worst || (worst->status == ND_ERR_IO && result->status != ND_ERR_IO))) {
            worst = result;
            worst_rank = r;
        }
    }
    if (!worst) {
        return ND_OK;
    }
    return nd_fail(worst->status != ND_OK ? worst->status : ND_ERR_INTERNAL, "rank %d: %.1500s",
                   worst_rank, worst->finished ? worst->message : "did not finish");
}

typedef struct thread_rank {
    nd_ranks *ranks;
    nd_local_hub *hub;
    int rank;
    pthread_t thread;
} thread_rank;

static void *thread_main(void *argument)
{
    thread_rank *self = argument;
    nd_ranks *ranks = self->ranks;
    nd_rank_result *result = &ranks->results[self->rank];
    nd_transport *transport = NULL;
    nd_progress_slot *slot = &ranks->page->slots[self->rank];
    atomic_store(&slot->rank, self->rank);
    nd_status status =
        nd_transport_open_local(self->hub, self->rank, ranks->timeout_seconds, slot, &transport);
    if (status != ND_OK) {
        nd_ranks_store_failure(result, status);
        result->finished = true;
        return NULL;
    }
    transport->page = ranks->page;
    transport->slot_of_rank = nd_ranks_slot;
    nd_ranks_run_body(ranks, transport, result);
    return NULL;
}

nd_status nd_ranks_run_threads(nd_ranks *ranks)
{
    nd_progress page;
    nd_local_hub *hub = NULL;
    thread_rank threads[ND_RANKS_MAX];
    ND_TRY(nd_ranks_begin(ranks, &page));
    nd_status status = nd_local_hub_create(ranks->size, &hub);
    if (status != ND_OK) {
        nd_progress_close(&page);
        return status;
    }
    for (int r = 0; r < ranks->size; r++) {
        threads[r] = (thread_rank){.ranks = ranks, .hub = hub, .rank = r};
        ND_ASSERT(pthread_create(&threads[r].thread, NULL, thread_main, &threads[r]) == 0);
    }
    for (int r = 0; r < ranks->size; r++) {
        pthread_join(threads[r].thread, NULL);
    }
    nd_local_hub_destroy(hub);
    return nd_ranks_end(ranks, &page);
}
