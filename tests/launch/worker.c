// SPDX-License-Identifier: Apache-2.0
/*
 * A worker for tests of ndlaunch: joins the store as ndtrain does, then does what ND_TEST says.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/progress.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/store.h"

/* Without a signal; longer than any test waits for something else. */
enum { STAYS_SECONDS = 400 };

extern char **environ;

static volatile sig_atomic_t asked;

static void on_signal(int number)
{
    asked = number;
}

/* Prints the worker's identity; rank 1 also prints its environment and the job's key. */
static int print_self(const nd_identity *id)
{
    char bytes[32];
    printf("rank %d of %d, local %d of %d, node %d of %d, run %s, at %s:%d\n", id->rank,
           id->world_size, id->local_rank, id->local_world_size, id->node_rank, id->nnodes,
           id->run_id, id->master_addr, id->master_port);
    for (char **e = environ; id->rank == 1 && *e; e++) {
        printf("env %s\n", *e);
    }
    if (id->rank == 1 && pread(id->key_fd, bytes, sizeof bytes, 0) == sizeof bytes) {
        printf("key ");
        for (size_t i = 0; i < sizeof bytes; i++) {
            printf("%02x", (unsigned char)bytes[i]);
        }
        printf("\n");
    }
    return 0;
}

static int until_signal(const nd_identity *id)
{
    for (int i = 0; i < STAYS_SECONDS * 10 && !asked; i++) {
        usleep(100000);
    }
    printf("rank %d ended by signal %d\n", id->rank, (int)asked);
    return asked == SIGTERM ? ND_ERR_PREEMPTED : asked == SIGUSR1 ? 0 : 3;
}

/*
 * One start of a job that is started again. ND_TEST_PLAN has a part for each epoch, with ';' in
 * between; the last one serves all further epochs. A part is a list of letters with a number:
 * B the steps done when the start begins, T steps done, D the step of a durable checkpoint (all
 * written by rank 0, with the mark of a first step after a T), then what the chosen rank does: E
 * ends with this code, K dies of this signal, and otherwise, as other ranks do, stays until a
 * signal; X: all ranks end with this code.
 */
static const char *plan_of(int64_t epoch)
{
    const char *plan = getenv("ND_TEST_PLAN"), *next;
    for (int64_t e = 0; plan && e < epoch && (next = strchr(plan, ';')); e++) {
        plan = next + 1;
    }
    return plan ? plan : "";
}

static void write_progress(const nd_identity *id, nd_progress *page, char what, long number)
{
    if (id->rank != 0) {
        return;
    }
    switch (what) {
    case 'B':
        atomic_store(&page->job->first_step, number);
        break;
    case 'T':
        nd_progress_set_phase(&page->slots[0], ND_PHASE_EVAL, number);
        nd_progress_set_stepped(page);
        break;
    case 'D':
        atomic_store(&page->job->durable_step, number);
        break;
    default:
        break;
    }
}

static int follow_plan(const nd_identity *id, nd_store *store, int chosen)
{
    nd_progress page = id->page;
    char folder[64];
    snprintf(folder, sizeof folder, "/begun/in/start-%d", (int)id->restart_epoch);
    if (nd_progress_set_run_folder(&page, id->run_folder[0] ? id->run_folder : folder) != ND_OK) {
        return 98;
    }
    printf("epoch %d of rank %d, run %s, folder '%s'\n", (int)id->restart_epoch, id->rank,
           id->run_id, id->run_folder);
    printf("rank %d is one of %d on %d nodes\n", id->rank, id->world_size, id->nnodes);
    char key[32];
    int epoch = -1; /* the first value of a key stays */
    size_t bytes = sizeof epoch;
    snprintf(key, sizeof key, "rank %d was here", id->rank);
    if (nd_store_set(store, key, &id->restart_epoch, sizeof id->restart_epoch) != ND_OK ||
        nd_store_get(store, key, &epoch, &bytes) != ND_OK || epoch != id->restart_epoch) {
        printf("the store is not empty\n");
        return 97;
    }
    for (const char *at = plan_of(id->restart_epoch); *at && *at != ';';) {
        char what = *at++, *rest;
        long number = strtol(at, &rest, 10);
        at = rest;
        write_progress(id, &page, what, number);
        bool fails = id->rank == chosen && (what == 'E' || what == 'K');
        if ((fails || what == 'X') && nd_store_barrier(store, "page written") != ND_OK) {
            return 96;
        }
        if (fails && what == 'K') {
            raise((int)number);
        }
        if (fails || what == 'X') {
            return (int)number;
        }
    }
    if (nd_store_barrier(store, "page written") != ND_OK) {
        return 96;
    }
    printf("rank %d of epoch %d waits\n", id->rank, (int)id->restart_epoch);
    return until_signal(id);
}

/* The chosen rank records a deadline and ends last; the others lose it and end at once. */
static int end_late(const nd_identity *id, nd_store *store, int chosen)
{
    nd_status code = id->rank == chosen ? ND_ERR_HANG : ND_ERR_IO;
    if (id->rank == chosen) {
        nd_fail(code, "the file system does not answer");
        nd_failure_record(&id->page, id->local_rank, nd_error_last());
    }
    if (nd_store_barrier(store, "recorded") != ND_OK) {
        return 96;
    }
    if (id->rank == chosen) {
        until_signal(id);
    } else {
        nd_fail(code, "rank %d has ended", chosen);
        nd_failure_record(&id->page, id->local_rank, nd_error_last());
    }
    return (int)code;
}

static int act(const nd_identity *id, nd_store *store, const char *what, int chosen)
{
    if (strcmp(what, "end late") == 0) {
        return end_late(id, store, chosen);
    }
    if (strcmp(what, "self") == 0) {
        return print_self(id);
    }
    const bool talks = strcmp(what, "talk") == 0; /* longer than an unread output is waited for */
    if (talks || strcmp(what, "chatter") == 0) {
        for (int i = 0; i < (talks ? 450 : 4000); i++) {
            printf("line %d of rank %d, of which there are many\n", i, id->rank);
            usleep(talks ? 20000 : 0);
        }
        return 0;
    }
    if (strcmp(what, "until signal") == 0) {
        return until_signal(id);
    }
    if (strcmp(what, "stubborn") == 0) {
        signal(SIGINT, SIG_IGN);
        signal(SIGTERM, SIG_IGN);
    } else if (id->rank == chosen && strcmp(what, "fail") == 0) {
        nd_fail(ND_ERR_DATA, "the test file is damaged");
        nd_failure_record(&id->page, id->local_rank, nd_error_last());
        fprintf(stderr, "a line before\nerror: the test file is damaged\na line after\n");
        return ND_ERR_DATA;
    } else if (id->rank == chosen && strcmp(what, "exit 7") == 0) {
        fprintf(stderr, "1 %%\r99 %%\rboth ends\r\nlast words"); /* without a newline */
        return 7;
    } else if (strcmp(what, "done") == 0) {
        return 0;
    }
    sleep(STAYS_SECONDS);
    return 99;
}

/* `check`: ndlaunch compares the version; what else it sees of this process goes to stderr. */
static int check(const char *what)
{
    printf("ndtrain %s\n", ND_VERSION);
    if (strcmp(what, "check environment") == 0) {
        for (char **e = environ; *e; e++) {
            fprintf(stderr, "check env %s\n", *e);
        }
    } else if (strcmp(what, "check stays") == 0) {
        fflush(stdout);
        fprintf(stderr, "check pid %ld\n", (long)getpid());
        sleep(STAYS_SECONDS);
    }
    return 0;
}

int main(int argc, char **argv)
{
    const char *what = getenv("ND_TEST"), *chosen = getenv("ND_TEST_RANK");
    nd_worker_die_with_parent();
    if (argc > 1 && strcmp(argv[1], "check") == 0) {
        return check(what ? what : "done");
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    signal(SIGUSR1, on_signal);
    nd_identity id;
    nd_store *store = NULL;
    nd_status status = nd_identity_read(&id);
    if (nd_failure_slot_of(&id.page, id.local_rank)) {
        atomic_store(&nd_failure_slot_of(&id.page, id.local_rank)->ready, 1);
    }
    status = status == ND_OK ? nd_store_open(&id, 20, NULL, &store) : status;
    status = status == ND_OK ? nd_store_barrier(store, "all here") : status;
    if (status != ND_OK) {
        fprintf(stderr, "%s\n", nd_error_last()->message);
        nd_store_close(store, false);
        return (int)status;
    }
    printf("ready %d pid %ld\n", id.rank, (long)getpid());
    int number = chosen ? atoi(chosen) : 1;
    int code = what && strcmp(what, "plan") == 0 ? follow_plan(&id, store, number)
                                                 : act(&id, store, what ? what : "done", number);
    nd_store_close(store, false);
    return code;
}
