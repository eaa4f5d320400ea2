// SPDX-License-Identifier: Apache-2.0
#include "trainer/worker/failure.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "runtime/rdzv/ranks.h"

enum { ANSWER_SECONDS = 3, GATHER_SECONDS = 2 };

static nd_status count(const nd_worker *worker, int rank, int64_t delta, int64_t *sum)
{
    char key[48];
    snprintf(key, sizeof key, "deadlines of rank %d", rank);
    return nd_store_add(worker->store, key, delta, sum);
}

static nd_status list_silent(const nd_worker *worker, char *text, size_t capacity)
{
    int world = worker->identity.world_size;
    char ranks[256];
    bool *reported = NULL;
    nd_status status = ND_ALLOC(world, &reported);
    for (int rank = 0; rank < world && status == ND_OK; rank++) {
        int64_t times = 0;
        status = count(worker, rank, 0, &times);
        reported[rank] = times > 0;
    }
    if (status == ND_OK) {
        nd_ranks_text(reported, false, world, ranks, sizeof ranks);
        snprintf(text, capacity, "; not waiting for anyone: rank %s", ranks[0] ? ranks : "none");
    }
    free(reported);
    return status;
}

void nd_hang_report(const nd_worker *worker, bool *first, char *text, size_t capacity)
{
    int64_t times = 0, order = 0;
    nd_store_set_timeout(worker->store, ANSWER_SECONDS);
    nd_status status = count(worker, worker->identity.rank, 1, &times);
    status = status == ND_OK ? nd_store_add(worker->store, "deadlines", 1, &order) : status;
    *first = status == ND_OK && order == 1;
    text[0] = '\0';
    if (*first) {
        sleep(GATHER_SECONDS);
        status = list_silent(worker, text, capacity);
    }
    if (status != ND_OK) {
        snprintf(text, capacity, "; rank 0, which hosts the store, does not answer");
    }
}
