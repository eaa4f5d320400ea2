// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ranks.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "tests/support/local_transport.h"

static int slot_of_rank(void *context, int rank)
{
    return rank;
}

static nd_status begin(nd_ranks *ranks)
{
    ND_ASSERT(ranks->size >= 1 && ranks->size <= ND_RANKS_MAX && ranks->body);
    memset(ranks->results, 0, sizeof ranks->results);
    if (ranks->timeout_seconds == 0) {
        ranks->timeout_seconds = 20;
    }
    return nd_progress_create(ranks->size, &ranks->page);
}

static void store_failure(nd_rank_result *result, nd_status status)
{
    result->status = status;
    snprintf(result->message, sizeof result->message, "%s", nd_error_last()->message);
}

/* Runs the body on an open transport and writes the result; closes the transport. */
static void run_body(nd_ranks *ranks, nd_transport *transport, nd_rank_result *result)
{
    double started = nd_clock_seconds();
    nd_status status = ranks->body(transport, ranks->context);
    result->seconds = nd_clock_seconds() - started;
    if (status != ND_OK) {
        store_failure(result, status);
    }
    result->finished = true;
    nd_transport_close(transport);
}

static nd_status end_ranks(nd_ranks *ranks)
{
    nd_progress_close(&ranks->page);
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

/* Threads. */

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
    nd_progress_slot *slot = &ranks->page.slots[self->rank];
    atomic_store(&slot->rank, self->rank);
    nd_status status =
        nd_transport_open_local(self->hub, self->rank, ranks->timeout_seconds, slot, &transport);
    if (status != ND_OK) {
        store_failure(result, status);
        result->finished = true;
        return NULL;
    }
    transport->page = &ranks->page;
    transport->slot_of_rank = slot_of_rank;
    run_body(ranks, transport, result);
    return NULL;
}

nd_status nd_ranks_run_threads(nd_ranks *ranks)
{
    nd_local_hub *hub = NULL;
    thread_rank threads[ND_RANKS_MAX];
    ND_TRY(begin(ranks));
    nd_status status = nd_local_hub_create(ranks->size, &hub);
    if (status != ND_OK) {
        nd_progress_close(&ranks->page);
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
    return end_ranks(ranks);
}

/* Processes. */

/* The rendezvous store's allgather, in memory that the forked ranks share. */
enum { PLACE_BYTES = 8192 };

typedef struct shared_table {
    _Atomic int arrived[4]; /* ranks in exchange number k */
    nd_rank_result results[ND_RANKS_MAX];
    char places[4][ND_RANKS_MAX][PLACE_BYTES];
} shared_table;

typedef struct exchange_end {
    shared_table *table;
    int rank, size, number;
} exchange_end;

static nd_status exchange(void *context, const void *send, void *recv, size_t bytes)
{
    exchange_end *end = context;
    shared_table *table = end->table;
    int number = end->number++;
    ND_CHECK(number < 4 && bytes <= PLACE_BYTES, "exchange %d of %zu bytes", number, bytes);
    memcpy(table->places[number][end->rank], send, bytes);
    atomic_fetch_add(&table->arrived[number], 1);
    for (double until = nd_clock_seconds() + 20;
         atomic_load(&table->arrived[number]) < end->size;) {
        ND_CHECK(nd_clock_seconds() < until, "rank %d waits in exchange %d", end->rank, number);
        usleep(200);
    }
    for (int r = 0; r < end->size; r++) {
        memcpy((char *)recv + (size_t)r * bytes, table->places[number][r], bytes);
    }
    return ND_OK;
}

/* Every rank has the same key, and listens on loopback. */
static nd_status network(void *context, nd_comm_network *out)
{
    const uint8_t key[ND_KEY_BYTES] = {7};
    int count;
    nd_address addresses[ND_ADDRESS_MAX];
    ND_TRY(nd_address_resolve("127.0.0.1", 0, addresses, &count));
    ND_TRY(nd_tls_context_create(false, key, &out->client));
    ND_TRY(nd_tls_context_create(true, key, &out->server));
    out->address = addresses[0];
    return ND_OK;
}

static nd_status no_network(void *context, nd_comm_network *out)
{
    return nd_fail(ND_ERR_IO, "this host has no address");
}

static void child_main(nd_ranks *ranks, shared_table *table, int rank)
{
    nd_rank_result *result = &table->results[rank];
    exchange_end end = {.table = table, .rank = rank, .size = ranks->size};
    nd_transport *transport = NULL;
    atomic_store(&ranks->page.slots[rank].rank, rank);
    nd_transport_options options = {.rank = rank,
                                    .size = ranks->size,
                                    .timeout_seconds = ranks->timeout_seconds,
                                    .progress = &ranks->page.slots[rank],
                                    .page = &ranks->page,
                                    .slot_of_rank = slot_of_rank,
                                    .exchange = exchange,
                                    .exchange_context = &end,
                                    .network = ranks->no_network ? no_network : network,
                                    .apart = ranks->apart};
    nd_status status = nd_transport_open_ucx(&options, &transport);
    if (status != ND_OK) {
        store_failure(result, status);
        result->finished = true;
        return;
    }
    run_body(ranks, transport, result);
}

/* Waits for all children; kills what is left when every operation's deadline has long passed. */
static void reap(nd_ranks *ranks, pid_t *children)
{
    double until = nd_clock_seconds() + 60 + 10 * ranks->timeout_seconds;
    for (int left = ranks->size; left > 0;) {
        bool late = nd_clock_seconds() > until;
        left = 0;
        int stopped = 0;
        for (int r = 0; r < ranks->size; r++) {
            int code;
            if (children[r] > 0 && waitpid(children[r], &code, WNOHANG | WUNTRACED) > 0) {
                bool ended = !WIFSTOPPED(code);
                children[r] = ended ? -1 : -children[r]; /* negative: stopped */
            }
            stopped += children[r] < -1;
            left += children[r] != -1;
        }
        /* A rank that stopped itself ends when the others have. */
        for (int r = 0; r < ranks->size && left > 0 && (late || left == stopped); r++) {
            pid_t pid = children[r] < -1 ? -children[r] : children[r];
            if (pid > 0) {
                kill(pid, SIGKILL);
                waitpid(pid, NULL, 0);
                children[r] = -1;
            }
        }
        usleep(1000);
    }
}

nd_status nd_ranks_run_processes(nd_ranks *ranks)
{
    pid_t children[ND_RANKS_MAX];
    ND_TRY(begin(ranks));
    shared_table *table =
        mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ND_ASSERT(table != MAP_FAILED);
    fflush(NULL);
    for (int r = 0; r < ranks->size; r++) {
        children[r] = fork();
        ND_ASSERT(children[r] >= 0);
        if (children[r] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            child_main(ranks, table, r);
            fflush(NULL);
            _exit(0);
        }
    }
    reap(ranks, children);
    memcpy(ranks->results, table->results, sizeof ranks->results);
    munmap(table, sizeof *table);
    return end_ranks(ranks);
}
