// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/runtime/comm/cases.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime/comm/p2p.h"

void *case_shared(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ND_ASSERT(p != MAP_FAILED);
    return p;
}

nd_status case_world(nd_transport *transport, nd_comm **out)
{
    nd_mesh mesh = {{1, 1, transport->size, 1, 1}};
    return nd_comm_create(transport, &mesh, ND_GROUP_WORLD, 0, out);
}

static nd_status finish(nd_event *event)
{
    return event->finish ? event->finish(event->operation) : ND_OK;
}

/* ND_CHECK in a function with a label. */
#define CHECK_OUT(condition, ...)                                                                  \
    ND_TRY_OUT((condition) ? ND_OK : nd_fail(ND_ERR_INTERNAL, __VA_ARGS__))

static nd_status use_pending(nd_comm *comms[4])
{
    enum { N = 5000, OPS = 4 };
    static const int order[OPS + 3] = {5, 2, 6, 0, 3, 1, 4};
    nd_event events[OPS + 3] = {0};
    int n = comms[0]->size, index = comms[0]->index;
    nd_status status = ND_OK;
    float *sums = NULL, *gathered = NULL;
    ND_TRY_OUT(ND_ALLOC(OPS * N, &sums));
    ND_TRY_OUT(ND_ALLOC(3 * N * n, &gathered));
    for (int k = 0; k < OPS; k++) {
        for (int i = 0; i < N; i++) {
            sums[k * N + i] = (float)(index + k + i % 5);
        }
        ND_TRY_OUT(nd_comm_all_reduce(comms[0], NULL, sums + k * N, N, ND_DTYPE_F32, ND_REDOP_SUM,
                                      &events[k]));
    }
    for (int k = 0; k < 3; k++) {
        float *own = gathered + (k * n + index) * N;
        for (int i = 0; i < N; i++) {
            own[i] = (float)(100 * k + index);
        }
        ND_TRY_OUT(nd_comm_all_gather(
            comms[k + 1], NULL,
            &(nd_comm_args){
                .send = own, .recv = gathered + k * n * N, .count = N, .dtype = ND_DTYPE_F32},
            &events[OPS + k]));
    }
    for (int k = 0; k < OPS + 3; k++) {
        ND_TRY_OUT(finish(&events[order[k]]));
    }
    for (int k = 0; k < OPS * N; k++) {
        float want = (float)(n * (n - 1) / 2 + n * (k / N + k % N % 5));
        CHECK_OUT(sums[k] == want, "pending sum %d is %g, not %g", k, sums[k], want);
    }
    for (int k = 0; k < 3 * n * N; k++) {
        CHECK_OUT(gathered[k] == (float)(100 * (k / (n * N)) + k / N % n),
                  "pending gather: element %d is %g", k, gathered[k]);
    }
out:
    free(sums);
    free(gathered);
    return status;
}

/* More operations than places: the first ones are completed by the later calls, and waiting for
 * them is harmless. */
static nd_status overfill(nd_comm *comm)
{
    enum { OPS = 21 };
    nd_event events[OPS] = {0};
    int64_t x[OPS];
    for (int k = 0; k < OPS; k++) {
        x[k] = 100 * k + comm->index;
        ND_TRY(nd_comm_all_reduce(comm, NULL, &x[k], 1, ND_DTYPE_I64, ND_REDOP_SUM, &events[k]));
    }
    for (int k = 0; k < OPS; k++) {
        ND_TRY(finish(&events[k]));
        int64_t want = comm->size * 100 * k + comm->size * (comm->size - 1) / 2;
        ND_CHECK(x[k] == want, "sum %d of %d is %lld", k, OPS, (long long)x[k]);
    }
    return ND_OK;
}

nd_status case_pending_body(nd_transport *transport, void *context)
{
    nd_mesh mesh = {{1, 1, transport->size, 1, 1}};
    nd_comm *comms[4] = {0};
    nd_status status = ND_OK;
    for (int k = 0; k < 4; k++) {
        ND_TRY_OUT(nd_comm_create(transport, &mesh, ND_GROUP_DP_SHARD, k, &comms[k]));
    }
    for (int repeat = 0; repeat < 10; repeat++) {
        ND_TRY_OUT(use_pending(comms));
    }
    ND_TRY_OUT(overfill(comms[3]));
out:
    for (int k = 0; k < 4; k++) {
        nd_comm_destroy(comms[k]);
    }
    return status;
}

static nd_status sum_one(nd_comm *comm, int64_t *x, nd_event *done)
{
    return nd_comm_all_reduce(comm, NULL, x, 1, ND_DTYPE_I64, ND_REDOP_SUM, done);
}

nd_status case_uneven_body(nd_transport *transport, void *context)
{
    nd_comm *comm = NULL;
    float *x = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(case_world(transport, &comm));
    size_t staging = nd_comm_staging_bytes(comm->size);
    size_t round = staging / 2 / (size_t)(comm->size - 1) / 64 * 64 / sizeof *x;
    int64_t count = comm->size * (int64_t)round + 1;
    ND_TRY_OUT(ND_ALLOC(count, &x));
    for (int64_t i = 0; i < count; i++) {
        x[i] = (float)(comm->index + i % 7);
    }
    ND_TRY_OUT(nd_comm_all_reduce(comm, NULL, x, count, ND_DTYPE_F32, ND_REDOP_SUM, NULL));
    for (int64_t i = 0; i < count; i++) {
        float want = (float)(comm->size * (comm->size - 1) / 2 + comm->size * (i % 7));
        CHECK_OUT(x[i] == want, "element %lld of %lld is %g, not %g", (long long)i,
                  (long long)count, (double)x[i], (double)want);
    }
out:
    free(x);
    nd_comm_destroy(comm);
    return status;
}

/* Rank 1 enters the last operation when rank 0 has waited for the event of the first one. */
nd_status case_stale_body(nd_transport *transport, void *context)
{
    enum { PLACES = 8, MOST_MS = 60000 };
    case_stale *c = context;
    nd_comm *comm = NULL;
    nd_event first = {0}, last = {0};
    int64_t x[PLACES + 1];
    nd_status status = ND_OK;
    ND_TRY_OUT(case_world(transport, &comm));
    for (int k = 0; k < PLACES; k++) {
        x[k] = k;
        ND_TRY_OUT(sum_one(comm, &x[k], k == 0 ? &first : NULL));
    }
    x[PLACES] = 1;
    for (int i = 0; transport->rank == 1 && i < MOST_MS && !atomic_load(&c->waited); i++) {
        usleep(1000);
    }
    ND_TRY_OUT(sum_one(comm, &x[PLACES], &last));
    status = finish(&first);
    atomic_store(&c->waited, 1);
    status = status == ND_OK ? finish(&last) : status;
    if (status == ND_OK && x[PLACES] != 2) {
        status = nd_fail(ND_ERR_INTERNAL, "the last sum is %lld", (long long)x[PLACES]);
    }
out:
    nd_comm_destroy(comm);
    return status;
}

static nd_status sum_ranks(nd_comm *comm)
{
    int64_t sum = comm->transport->rank, want = 0;
    for (int i = 0; i < comm->size; i++) {
        want += comm->ranks[i];
    }
    ND_TRY(nd_comm_all_reduce(comm, NULL, &sum, 1, ND_DTYPE_I64, ND_REDOP_SUM, NULL));
    ND_CHECK(sum == want, "the ranks of %s add up to %lld, not %lld", nd_group_name(comm->kind),
             (long long)sum, (long long)want);
    ND_CHECK(comm->stats.calls[ND_COMM_ALL_REDUCE] > 0, "the call was not counted");
    ND_CHECK((comm->stats.bytes_sent[ND_COMM_ALL_REDUCE] == 0) == (comm->size == 1),
             "%s of %d members sent %lld bytes", nd_group_name(comm->kind), comm->size,
             (long long)comm->stats.bytes_sent[ND_COMM_ALL_REDUCE]);
    return ND_OK;
}

nd_status case_groups_body(nd_transport *transport, void *context)
{
    nd_mesh mesh = {{1, 2, 2, 1, 2}};
    nd_groups groups;
    ND_TRY(nd_groups_create(transport, &mesh, &groups));
    nd_status status = ND_OK;
    for (int repeat = 0; repeat < 3; repeat++) {
        for (int kind = 0; kind < ND_GROUP_COUNT; kind++) {
            int wanted = nd_group_rows[kind].communicators;
            ND_CHECK((groups.by_kind[kind] != NULL) == (wanted > 0) &&
                         (groups.second[kind] != NULL) == (wanted > 1),
                     "%s does not have %d communicators", nd_group_name((nd_group_kind)kind),
                     wanted);
            if (wanted > 0) {
                ND_TRY_OUT(sum_ranks(groups.by_kind[kind]));
            }
            if (wanted > 1) {
                ND_TRY_OUT(sum_ranks(groups.second[kind]));
            }
        }
    }
out:
    nd_groups_destroy(&groups);
    return status;
}

nd_status case_nan_body(nd_transport *transport, void *context)
{
    enum { N = 40000 }; /* long enough for the owner-reduces path */
    nd_comm *comm = NULL;
    nd_status status = ND_OK;
    float *x = NULL, *others = NULL;
    ND_TRY_OUT(case_world(transport, &comm));
    ND_TRY_OUT(ND_ALLOC(N, &x));
    ND_TRY_OUT(ND_ALLOC(N * transport->size, &others));
    for (int64_t count = 8; count <= N; count += N - 8) {
        for (int64_t i = 0; i < count; i++) {
            x[i] = i % 8 == transport->rank ? NAN : (float)i;
        }
        ND_TRY_OUT(nd_comm_all_reduce(comm, NULL, x, count, ND_DTYPE_F32, ND_REDOP_MAX, NULL));
        ND_TRY_OUT(nd_comm_all_gather(
            comm, NULL,
            &(nd_comm_args){.send = x, .recv = others, .count = count, .dtype = ND_DTYPE_F32},
            NULL));
        for (int64_t i = 0; i < count; i++) {
            bool nan_expected = i % 8 < transport->size;
            CHECK_OUT(nan_expected ? isnan(x[i]) : x[i] == (float)i, "max of element %lld is %g",
                      (long long)i, x[i]);
        }
        for (int r = 0; r < transport->size; r++) {
            CHECK_OUT(memcmp(others + r * count, x, (size_t)count * sizeof *x) == 0,
                      "rank %d has other bits", r);
        }
    }
out:
    free(x);
    free(others);
    nd_comm_destroy(comm);
    return status;
}

/* Faults. */

static void wait_for_others(const nd_comm *comm, const case_faulty *c)
{
    for (int i = 0; i < 60000 && atomic_load(&c->ended) < comm->size - 1; i++) {
        usleep(1000);
    }
}

/* `to` and `from`: (size x count). */
static nd_status enter(nd_comm *comm, nd_comm_op op, float *from, float *to, int64_t count)
{
    static nd_comm_call *const calls[ND_COMM_OP_COUNT] = {
        [ND_COMM_ALL_GATHER] = nd_comm_all_gather,
        [ND_COMM_REDUCE_SCATTER] = nd_comm_reduce_scatter,
        [ND_COMM_EXCHANGE] = nd_comm_exchange,
        [ND_COMM_ALL_TO_ALL] = nd_comm_all_to_all,
    };
    switch (op) {
    case ND_COMM_ALL_REDUCE:
        return nd_comm_all_reduce(comm, NULL, from, count, ND_DTYPE_F32, ND_REDOP_SUM, NULL);
    case ND_COMM_BROADCAST:
        return nd_comm_broadcast(comm, NULL, from, count, ND_DTYPE_F32, 0, NULL);
    case ND_COMM_BARRIER:
        return nd_comm_barrier(comm);
    default:
        return calls[op](comm, NULL,
                         &(nd_comm_args){.send = from,
                                         .recv = to,
                                         .count = count,
                                         .dtype = ND_DTYPE_F32,
                                         .to = (comm->index + 1) % comm->size,
                                         .from = (comm->index + comm->size - 1) % comm->size},
                         NULL);
    }
}

static nd_status misbehave(nd_comm *comm, const case_faulty *c, float *buffer)
{
    switch (c->fault) {
    case CASE_SKIP:
        wait_for_others(comm, c);
        return ND_OK;
    case CASE_LEAVE:
        return ND_OK;
    case CASE_OTHER_OP:
        return enter(comm, c->other, buffer, buffer + comm->size * c->count, c->count);
    case CASE_OTHER_COUNT:
        return nd_comm_all_reduce(comm, NULL, buffer, c->count - 1, ND_DTYPE_F32, ND_REDOP_SUM,
                                  NULL);
    case CASE_OTHER_TYPE:
        return nd_comm_all_reduce(comm, NULL, buffer, c->count, ND_DTYPE_I32, ND_REDOP_SUM, NULL);
    case CASE_OTHER_ROOT:
        return nd_comm_broadcast(comm, NULL, buffer, c->count, ND_DTYPE_F32, comm->size - 1, NULL);
    case CASE_OTHER_SUM:
        return nd_comm_all_reduce(comm, NULL, buffer, c->count, ND_DTYPE_F32, ND_REDOP_MAX, NULL);
    case CASE_STOP:
        raise(SIGSTOP);
        return ND_OK;
    case CASE_KILL:
        raise(SIGKILL);
        return ND_OK;
    }
    return ND_OK;
}

nd_status case_fault_body(nd_transport *transport, void *context)
{
    case_faulty *c = context;
    nd_comm *comm = NULL;
    float *buffer = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(case_world(transport, &comm));
    ND_TRY_OUT(ND_ALLOC(2 * comm->size * c->count, &buffer));
    for (int k = 1; k <= 4; k++) {
        if (k == 3 && transport->rank == c->rank) {
            nd_progress_set_phase(transport->progress, ND_PHASE_BACKWARD, 41);
            status = misbehave(comm, c, buffer);
            goto out;
        }
        ND_TRY_OUT(enter(comm, c->op, buffer, buffer + comm->size * c->count, c->count));
    }
out:
    atomic_fetch_add(&c->ended, transport->rank != c->rank);
    nd_comm_destroy(comm);
    free(buffer);
    return status;
}

nd_status case_check_fault(const case_expected *e, nd_status (*run)(nd_ranks *))
{
    enum { SIZE = 4, FAULTY = 2 };
    case_faulty *c = case_shared(sizeof *c);
    *c = (case_faulty){.fault = e->fault, .rank = FAULTY, .count = e->count};
    c->op = e->fault == CASE_OTHER_ROOT ? ND_COMM_BROADCAST : ND_COMM_ALL_REDUCE;
    c->other = ND_COMM_BROADCAST;
    nd_ranks ranks = {.size = SIZE,
                      .timeout_seconds = e->status == ND_ERR_HANG ? 3 : 60,
                      .body = case_fault_body,
                      .context = c,
                      .apart = e->apart};
    run(&ranks);
    int named = 0;
    for (int r = 0; r < SIZE; r++) {
        const nd_rank_result *result = &ranks.results[r];
        bool ended = strstr(result->message, "has ended") != NULL;
        /* The faulty rank may be the first to notice a mismatch. */
        if ((r == FAULTY && result->status != e->status) || (ended && e->status != ND_ERR_IO)) {
            continue;
        }
        ND_CHECK(result->status == e->status, "rank %d: status %d: %s", r, result->status,
                 result->message);
        for (int w = 0; e->words[w]; w++) {
            ND_CHECK(strstr(result->message, e->words[w]), "rank %d: no '%s' in: %s", r,
                     e->words[w], result->message);
        }
        named++;
    }
    ND_CHECK(named > 0, "nobody named the fault: %s", ranks.results[0].message);
    return ND_OK;
}
