// SPDX-License-Identifier: Apache-2.0
/*
 * The store's thread in rank 0, the threads that watch it, and bounded calls, under the thread
 * sanitizer: a plain program, as Criterion does not run there. The ranks are threads of this
 * process, started as torchrun's variables would start them; they meet over loopback.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/rng.h"
#include "runtime/base/call_limit.h"
#include "runtime/rdzv/store.h"
#include "tests/support/port.h"

enum { RANKS = 4, LARGE = 1 << 18, SECONDS = 60, LOST = 2 };

typedef struct rank_thread {
    pthread_t thread;
    int rank, port;
    nd_call_limit *limit; /* one for all ranks */
    bool lose;            /* rank LOST leaves without a goodbye */
    nd_status status;
    char message[ND_ERROR_MESSAGE_MAX];
} rank_thread;

static _Atomic int lost_ranks;

static void on_lost(void *context, const char *message)
{
    atomic_fetch_add(&lost_ranks, strstr(message, "rank 2 ") != NULL);
}

/* Each function of the store once; the exchange takes several turns although it is packed. */
static nd_status talk(nd_store *store, int rank)
{
    static uint8_t all[RANKS][RANKS * LARGE];
    static uint8_t own[RANKS][LARGE];
    char value[16] = "";
    size_t bytes = sizeof value;
    ND_TRY(nd_store_set(store, "a key", "a value", 8));
    ND_TRY(nd_store_get(store, "a key", value, &bytes));
    for (int i = 0; i < LARGE; i++) {
        own[rank][i] = i + 1 == LARGE ? (uint8_t)(rank + 1)
                                      : (uint8_t)(nd_rng_u64((uint64_t)rank, 1, (uint64_t)i) & 15);
    }
    ND_TRY(nd_store_exchange(store, "parts", own[rank], all[rank], LARGE));
    for (int other = 0; other < RANKS; other++) {
        if (all[rank][(other + 1) * LARGE - 1] != other + 1) {
            return nd_fail(ND_ERR_INTERNAL, "rank %d has not the part of rank %d", rank, other);
        }
    }
    return strcmp(value, "a value") == 0
               ? nd_store_barrier(store, "end")
               : nd_fail(ND_ERR_INTERNAL, "rank %d read \"%s\"", rank, value);
}

static nd_status run_rank(const rank_thread *t)
{
    nd_identity id = {.source = ND_IDENTITY_ENVIRONMENT,
                      .rank = t->rank,
                      .world_size = RANKS,
                      .local_rank = t->rank,
                      .local_world_size = RANKS,
                      .nnodes = 1,
                      .master_addr = "127.0.0.1",
                      .master_port = t->port,
                      .run_id = "tsan",
                      .host = "here",
                      .key_fd = -1};
    nd_store *store;
    int call = nd_call_limit_begin(t->limit, "the store", SECONDS, "nobody answers", 124);
    const nd_store_watch watch = {.lost = on_lost};
    nd_status status = nd_store_open(&id, SECONDS, &watch, &store);
    if (status == ND_OK) {
        status = talk(store, t->rank);
        if (t->lose && t->rank == LOST) {
            nd_store_close(store, true);
        } else {
            /* Rank 0 leaves when it knows of the loss. */
            for (int i = 0; t->lose && t->rank == 0 && i < SECONDS * 100 && !lost_ranks; i++) {
                usleep(10000);
            }
            nd_store_close(store, false);
        }
    }
    nd_call_limit_end(t->limit, call);
    return status;
}

static void *thread_main(void *argument)
{
    rank_thread *t = argument;
    t->status = run_rank(t);
    if (t->status != ND_OK) {
        snprintf(t->message, sizeof t->message, "%s", nd_error_last()->message);
    }
    return NULL;
}

static int run_job(const char *name, bool lose)
{
    rank_thread threads[RANKS] = {0};
    nd_call_limit *limit;
    int failures = 0, port = port_reserve();
    atomic_store(&lost_ranks, 0);
    ND_ASSERT(nd_call_limit_create(&limit) == ND_OK);
    for (int r = 0; r < RANKS; r++) {
        threads[r] = (rank_thread){.rank = r, .port = port, .limit = limit, .lose = lose};
        ND_ASSERT(pthread_create(&threads[r].thread, NULL, thread_main, &threads[r]) == 0);
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(threads[r].thread, NULL);
        if (threads[r].status != ND_OK) {
            printf("%s, rank %d: %s\n", name, r, threads[r].message);
            failures++;
        }
    }
    nd_call_limit_destroy(limit);
    if (lost_ranks != lose) {
        printf("%s: %d ranks were lost, not %d\n", name, lost_ranks, lose);
        failures++;
    }
    printf("%s: %s\n", name, failures ? "failed" : "passed");
    return failures;
}

int main(void)
{
    char folder[] = "/tmp/nd_tsan_XXXXXX"; /* of the key */
    ND_ASSERT(mkdtemp(folder) && setenv("XDG_RUNTIME_DIR", folder, 1) == 0);
    int failures = run_job("a store in rank 0", false);
    failures += run_job("another one after it", false);
    failures += run_job("a rank that leaves without a goodbye", true);
    nd_fs_remove_tree(folder);
    return failures > 0;
}
