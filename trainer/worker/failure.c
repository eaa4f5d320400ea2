// SPDX-License-Identifier: Apache-2.0
#include "trainer/worker/failure.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/rdzv/failure_record.h"
#include "runtime/rdzv/pmix.h"
#include "runtime/rdzv/ranks.h"

static const double answer_seconds = 3;   /* for the store to answer, and 3 s more */
static const double gather_seconds = 2;   /* for other ranks to reach their deadlines */
static const double patience_seconds = 4; /* for a better reason than a lost peer */

/* The abstract name of a socket: it goes with its process, and leaves no file. */
static socklen_t host_name_of(const nd_identity *identity, struct sockaddr_un *out)
{
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    int n = snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "ndtrain-failure-%lu-%s",
                     (unsigned long)geteuid(), identity->run_id);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* Until this process is killed because the job ends, or so long. A signal does not end it. */
static void wait_end(double seconds)
{
    double end = nd_clock_seconds() + seconds;
    for (double left = seconds; left > 0; left = end - nd_clock_seconds()) {
        (void)poll(NULL, 0, (int)(left * 1e3 + 1));
    }
}

void nd_failure_keep_host(int held, double seconds)
{
    double end = nd_clock_seconds() + seconds;
    struct pollfd p = {.fd = held, .events = POLLIN}; /* -1 is passed over */
    for (double left = seconds; left > 0; left = end - nd_clock_seconds()) {
        if (poll(&p, 1, (int)(left * 1e3 + 1)) > 0) {
            int fd = accept4(held, NULL, NULL, SOCK_CLOEXEC);
            if (fd < 0) {
                wait_end(1e-3); /* no further descriptor */
            } else {
                close(fd);
            }
        }
    }
}

/* A process of another user that has the name must silence nobody. */
static bool is_held_by_this_user(const struct sockaddr_un *name, socklen_t length)
{
    /* Tries of 1 ms. The holder listens right after it took the name. It answers when it has
     * reported, which takes longer only where the store or PMIx does not answer. */
    enum { TRIES = 1000, TRIES_WHERE_FULL = 12000 };
    struct ucred holder;
    socklen_t bytes = sizeof holder;
    int code = -1, fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool full = false;
    for (int i = 0; fd >= 0 && code != 0 && i < (full ? TRIES_WHERE_FULL : TRIES); i++) {
        code = connect(fd, (const struct sockaddr *)name, length);
        full = code != 0 && errno == EAGAIN;
        if (code != 0) {
            wait_end(1e-3);
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
    return error->cause == ND_CAUSE_ELSEWHERE ||
           (error->cause != ND_CAUSE_LOCAL &&
            (error->status == ND_ERR_IO || error->status == ND_ERR_HANG));
}

static const char *deadline_key(int rank, char key[48])
{
    snprintf(key, 48, "deadline of rank %d", rank);
    return key;
}

/* Waits for a key, or with 0 only asks. ND_OK with *found false when nobody set it in time. */
static nd_status wait_for(const nd_failure *f, const char *key, double seconds, char *value,
                          size_t capacity, bool *found)
{
    size_t bytes = capacity - 1;
    nd_store_set_timeout(f->store, seconds);
    nd_status status = nd_store_get(f->store, key, value, &bytes);
    nd_store_set_timeout(f->store, answer_seconds);
    *found = status == ND_OK;
    value[status == ND_OK ? bytes : 0] = '\0';
    return status == (seconds > 0 ? ND_ERR_HANG : ND_ERR_DATA) ? ND_OK : status;
}

/* Records that this rank's deadline passed. *first: no other rank's did before. */
static nd_status record_deadline(const nd_failure *f, bool *first)
{
    char key[48];
    ND_TRY(nd_store_set(f->store, deadline_key(f->identity->rank, key), "", 0, NULL));
    return nd_store_set(f->store, "a deadline", "", 0, first);
}

/* Waits until all other ranks have recorded their deadlines, or for gather_seconds. */
static nd_status wait_for_deadlines(const nd_failure *f)
{
    int64_t until = nd_clock_after(gather_seconds);
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
        char key[48], value[16];
        status = wait_for(f, deadline_key(rank, key), 0, value, sizeof value, &recorded[rank]);
    }
    if (status == ND_OK) {
        nd_ranks_text(recorded, false, world, ranks, sizeof ranks);
        snprintf(text, capacity, "; not waiting for anyone: rank %s", ranks[0] ? ranks : "none");
    }
    free(recorded);
    return status;
}

/* Makes this failure the job's first one (f->first), unless another is. */
static nd_status claim_first(nd_failure *f, const nd_error *error, const char *suffix)
{
    char text[ND_FAILURE_FIRST_MAX];
    snprintf(text, sizeof text, "rank %d (%s): %s%s", f->identity->rank, f->identity->host,
             error->message, suffix);
    return nd_store_set(f->store, ND_FAILURE_FIRST, text, strlen(text), &f->first);
}

/* Asks the store. f->first: this failure is the job's first; otherwise `other` is the message of
 * the one that is. */
static nd_status ask_store(nd_failure *f, const nd_error *error, double seconds, char *other,
                           char *suffix, size_t capacity)
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
        ND_TRY(wait_for(f, ND_FAILURE_FIRST, seconds, other, ND_FAILURE_FIRST_MAX, &known));
    }
    if (known) {
        return ND_OK;
    }
    ND_TRY(claim_first(f, error, suffix));
    return f->first
               ? ND_OK
               : wait_for(f, ND_FAILURE_FIRST, answer_seconds, other, ND_FAILURE_FIRST_MAX, &known);
}

/* All ranks of a torchrun-like start report; under PMIx one of each host that claims it. */
static bool reports_for_host(nd_failure *f)
{
    return !f->identity->pmix || nd_failure_claim_host(f->identity, &f->held);
}

bool nd_failure_claim(nd_failure *f, const nd_error *error, double seconds, char *suffix,
                      size_t capacity)
{
    char other[ND_FAILURE_FIRST_MAX] = "";
    suffix[0] = '\0';
    if (f->identity->source == ND_IDENTITY_NDLAUNCH || f->identity->world_size == 1) {
        return true;
    }
    if (!f->store) {
        return reports_for_host(f);
    }
    nd_status status = ask_store(f, error, seconds, other, suffix, capacity);
    if (status != ND_OK && !nd_store_first_failure(f->store, other, sizeof other)) {
        snprintf(suffix, capacity, "; rank 0, which hosts the store, %s",
                 status == ND_ERR_HANG ? "does not answer" : "was lost");
        return reports_for_host(f);
    }
    if (f->first) {
        return reports_for_host(f); /* some ranks of this host may not know of it */
    }
    if (!f->identity->pmix) {
        snprintf(suffix, capacity, "; first failure: %s", other);
    }
    return !f->identity->pmix;
}

/* The page comes first: ndlaunch recognises the line by it. Then the store learns that the reason
 * of the job is printed, before PMIx ends this process. */
static void report(nd_failure *f, const nd_error *error)
{
    const nd_identity *id = f->identity;
    nd_failure_report(id, error);
    nd_log_error("%s", error->message);
    if (f->first && nd_store_set(f->store, ND_FAILURE_PRINTED, "", 0, NULL) != ND_OK) {
        nd_error_clear(); /* rank 0 prints the reason once more */
    }
    if (id->pmix) {
        nd_pmix_abort(id->pmix, (int)error->status, error->message);
        nd_failure_keep_host(f->held, id->world_size > 1 ? f->kill_seconds : 0);
    }
}

/* Another rank reports and ends the job. If that does not happen, this thread goes on. Others may
 * enter meanwhile: rank 0 may learn that the other rank was lost before it could. False: one of
 * them still ends this process. */
static bool outlives_silence(nd_failure *f)
{
    atomic_store(&f->silent, true);
    nd_gate_leave(&f->gate);
    wait_end(f->kill_seconds);
    return nd_gate_enter(&f->gate, nd_clock_after(f->kill_seconds));
}

void nd_failure_end(nd_failure *f, const nd_error *error)
{
    char suffix[ND_ERROR_MESSAGE_MAX] = "";
    nd_error full = *error;
    if (!nd_gate_enter(&f->gate, nd_clock_after(f->kill_seconds))) {
        return;
    }
    bool reports = !f->ended && nd_failure_claim(f, error, patience_seconds, suffix, sizeof suffix);
    if (!f->ended && !reports) {
        if (!outlives_silence(f)) {
            return;
        }
        reports = !f->ended && reports_for_host(f);
    }
    if (reports) {
        size_t used = strlen(full.message);
        snprintf(full.message + used, sizeof full.message - used, "%s", suffix);
        report(f, &full);
    }
    f->ended = true;
    nd_gate_leave(&f->gate);
}

/* Rank 0 does not ask: the thread of its store calls this, and knows whether the loss comes
 * first. */
bool nd_failure_end_lost(nd_failure *f, const char *message, bool first)
{
    char other[ND_FAILURE_FIRST_MAX] = "";
    const nd_identity *id = f->identity;
    nd_error error = {.status = ND_ERR_IO};
    if (id->pmix && !first) {
        return true;
    }
    if (!nd_gate_enter(&f->gate, 0)) {
        return false;
    }
    bool known = !f->ended && id->rank > 0 && nd_store_first_failure(f->store, other, sizeof other);
    if (known && id->pmix && !outlives_silence(f)) {
        return false;
    }
    if (!f->ended && reports_for_host(f)) {
        snprintf(error.message, sizeof error.message, "%s%s%s", message,
                 known ? "; first failure: " : "", other);
        report(f, &error);
    }
    if (!f->ended) {
        _exit(ND_ERR_IO);
    }
    nd_gate_leave(&f->gate);
    return true;
}
