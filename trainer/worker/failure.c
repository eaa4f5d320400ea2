// SPDX-License-Identifier: Apache-2.0
#include "trainer/worker/failure.h"

#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/rdzv/failure_page.h"
#include "runtime/rdzv/ranks.h"

static const double answer_seconds = 3; /* for the store to answer */
static const double gather_seconds = 2; /* for other ranks to reach their deadlines */
static const double kill_seconds = 1;   /* for a job that is being ended to reach this process */
static const double rank_0_seconds = 2; /* for rank 0, which reads the same files, to report */

/* The abstract name of a socket: it goes with its process, and leaves no file. */
static socklen_t host_name_of(const nd_identity *identity, struct sockaddr_un *out)
{
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    int n = snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "ndtrain-failure-%lu-%s",
                     (unsigned long)geteuid(), identity->run_id);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* A signal does not end it. */
void nd_failure_wait_end(double seconds)
{
    double end = nd_clock_seconds() + seconds;
    for (double left = seconds; left > 0; left = end - nd_clock_seconds()) {
        (void)poll(NULL, 0, (int)(left * 1e3 + 1));
    }
}

/* A process of another user that has the name must silence nobody. */
static bool is_held_by_this_user(const struct sockaddr_un *name, socklen_t length)
{
    enum { TRIES = 1000 }; /* of 1 ms: the holder listens right after it took the name */
    struct ucred holder;
    socklen_t bytes = sizeof holder;
    int code = -1, fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    for (int i = 0; fd >= 0 && code != 0 && i < TRIES; i++) {
        code = connect(fd, (const struct sockaddr *)name, length);
        if (code != 0) {
            nd_failure_wait_end(1e-3);
        }
    }
    bool same = code == 0 && getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &holder, &bytes) == 0 &&
                holder.uid == geteuid();
    if (fd >= 0) {
        close(fd);
    }
    return same;
}

bool nd_failure_claim_host(const nd_identity *identity, int *held)
{
    struct sockaddr_un name;
    socklen_t length = host_name_of(identity, &name);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    *held = -1;
    if (fd < 0) {
        return true;
    }
    if (bind(fd, (const struct sockaddr *)&name, length) == 0) {
        (void)listen(fd, SOMAXCONN);
        *held = fd;
        return true;
    }
    close(fd);
    return !is_held_by_this_user(&name, length);
}

static bool may_be_elsewhere(const nd_error *error)
{
    return error->cause == ND_CAUSE_ELSEWHERE || error->status == ND_ERR_IO ||
           error->status == ND_ERR_HANG;
}

static const char *deadline_key(int rank, char key[48])
{
    snprintf(key, 48, "deadline of rank %d", rank);
    return key;
}

/* Waits for a key. ND_OK with *found false when nobody set it in time. */
static nd_status wait_for(const nd_failure *f, const char *key, double seconds, char *value,
                          size_t capacity, bool *found)
{
    size_t bytes = capacity - 1;
    nd_store_set_timeout(f->store, seconds);
    nd_status status = nd_store_get(f->store, key, value, &bytes);
    nd_store_set_timeout(f->store, answer_seconds);
    *found = status == ND_OK;
    value[status == ND_OK ? bytes : 0] = '\0';
    return status == ND_ERR_HANG ? ND_OK : status;
}

/* Records that this rank's deadline passed. *first: no other rank's did before. */
static nd_status record_deadline(const nd_failure *f, bool *first)
{
    char key[48];
    int64_t sum = 0;
    ND_TRY(nd_store_add(f->store, deadline_key(f->identity->rank, key), 1, &sum));
    ND_TRY(nd_store_add(f->store, "deadlines", 1, &sum));
    *first = sum == 1;
    return ND_OK;
}

/* Waits until all other ranks have recorded their deadlines, or for gather_seconds. */
static nd_status wait_for_deadlines(const nd_failure *f)
{
    int64_t until = nd_clock_ns() + (int64_t)(gather_seconds * 1e9);
    for (int rank = 0; rank < f->identity->world_size; rank++) {
        char key[48], value[16];
        bool found = false;
        double left = (double)(until - nd_clock_ns()) * 1e-9;
        if (left <= 0) {
            break;
        }
        /* A rank that is lost meanwhile is not waited for. */
        nd_status status = wait_for(f, deadline_key(rank, key), left, value, sizeof value, &found);
        if (status != ND_OK && status != ND_ERR_IO) {
            return status;
        }
    }
    return ND_OK;
}

static nd_status list_silent(const nd_failure *f, char *text, size_t capacity)
{
    int world = f->identity->world_size;
    char ranks[256];
    bool *recorded = NULL;
    nd_status status = ND_ALLOC(world, &recorded);
    for (int rank = 0; rank < world && status == ND_OK; rank++) {
        char key[48];
        int64_t times = 0;
        status = nd_store_add(f->store, deadline_key(rank, key), 0, &times);
        recorded[rank] = times > 0;
    }
    if (status == ND_OK) {
        nd_ranks_text(recorded, false, world, ranks, sizeof ranks);
        snprintf(text, capacity, "; not waiting for anyone: rank %s", ranks[0] ? ranks : "none");
    }
    free(recorded);
    return status;
}

/* Adds this failure to the others. *first: it is the first, and the others can now read it. */
static nd_status add_failure(const nd_failure *f, const nd_error *error, const char *suffix,
                             bool *first)
{
    char text[ND_FAILURE_FIRST_MAX];
    int64_t order = 0;
    ND_TRY(nd_store_add(f->store, ND_FAILURE_COUNT, 1, &order));
    *first = order == 1;
    if (!*first) {
        return ND_OK;
    }
    snprintf(text, sizeof text, "rank %d (%s): %s%s", f->identity->rank, f->identity->host,
             error->message, suffix);
    return nd_store_set(f->store, ND_FAILURE_FIRST, text, strlen(text));
}

/* Asks the store. *first: this failure is the job's first; otherwise `other` is the first one's
 * message, or "" when it is not there yet. */
static nd_status ask_store(const nd_failure *f, const nd_error *error, double patience_seconds,
                           bool *first, char *other, char *suffix, size_t capacity)
{
    bool leads = false, known = false;
    nd_store_set_timeout(f->store, answer_seconds);
    if (error->status == ND_ERR_HANG) {
        ND_TRY(record_deadline(f, &leads));
    }
    if (leads) {
        ND_TRY(wait_for_deadlines(f));
        ND_TRY(list_silent(f, suffix, capacity));
    } else if (may_be_elsewhere(error)) {
        ND_TRY(
            wait_for(f, ND_FAILURE_FIRST, patience_seconds, other, ND_FAILURE_FIRST_MAX, &known));
    }
    if (known) {
        return ND_OK;
    }
    ND_TRY(add_failure(f, error, suffix, first));
    return *first
               ? ND_OK
               : wait_for(f, ND_FAILURE_FIRST, answer_seconds, other, ND_FAILURE_FIRST_MAX, &known);
}

bool nd_failure_claim(const nd_failure *f, const nd_error *error, double patience_seconds,
                      char *suffix, size_t capacity)
{
    const nd_identity *id = f->identity;
    char other[ND_FAILURE_FIRST_MAX] = "";
    bool first = false;
    suffix[0] = '\0';
    *f->held = -1;
    if (!f->store) {
        if (id->pmix && id->rank > 0 && id->node_rank > 0) {
            nd_failure_wait_end(rank_0_seconds);
        }
        return !id->pmix || nd_failure_claim_host(id, f->held);
    }
    nd_status status = ask_store(f, error, patience_seconds, &first, other, suffix, capacity);
    if (status != ND_OK) {
        snprintf(suffix, capacity, "; rank 0, which hosts the store, %s",
                 status == ND_ERR_HANG ? "does not answer" : "was lost");
        if (id->pmix && status != ND_ERR_HANG) {
            nd_failure_wait_end(kill_seconds);
        }
        return !id->pmix || nd_failure_claim_host(id, f->held);
    }
    if (first && id->pmix) {
        (void)nd_failure_claim_host(id, f->held); /* for those of this host that cannot ask */
    }
    if (!first && !id->pmix && other[0]) {
        snprintf(suffix, capacity, "; first failure: %s", other);
    }
    return first || !id->pmix;
}
