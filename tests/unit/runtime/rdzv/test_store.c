// SPDX-License-Identifier: Apache-2.0
/* Ranks whose store runs in rank 0, a process of its own. */
#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/rdzv/store.h"
#include "tests/support/port.h"
#include "tests/support/tempdir.h"

enum { RANKS = 2, SECONDS = 60 };

static tempdir dir;

static void setup(void)
{
    setenv("XDG_RUNTIME_DIR", dir.path, 1); /* for the key */
}

TEMPDIR_SUITE(store, setup, .timeout = 120);

static nd_identity identity_of(int rank, int port)
{
    return (nd_identity){.source = ND_IDENTITY_ENVIRONMENT,
                         .rank = rank,
                         .world_size = RANKS,
                         .local_rank = rank,
                         .local_world_size = RANKS,
                         .nnodes = 1,
                         .master_addr = "127.0.0.1",
                         .master_port = port,
                         .run_id = "store",
                         .host = "here",
                         .key_fd = -1};
}

static void say_lost(void *context, const char *message)
{
    (void)!write(*(int *)context, message, strlen(message));
}

static pid_t host; /* rank 0 */
static int said, port;
static bool leaves; /* rank 0 leaves once rank 1 has met it at "start" */

/* A process that is rank 0 until it is killed. It writes "y" once its store is open, and the
 * message about a lost rank. */
static void start_rank_0(void)
{
    int ends[2];
    port = port_reserve();
    cr_assert_eq(pipe(ends), 0);
    host = fork();
    cr_assert_geq(host, 0);
    if (host == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* also of a test whose assertion fails */
        nd_store *store = NULL;
        const nd_identity id = identity_of(0, port);
        const nd_store_watch watch = {say_lost, &ends[1]};
        bool opened = nd_store_open(&id, SECONDS, &watch, &store) == ND_OK;
        (void)!write(ends[1], opened ? "y" : "n", 1);
        if (leaves) {
            nd_status met = nd_store_barrier(store, "start");
            nd_store_close(store, met != ND_OK);
            _exit(met);
        }
        for (;;) {
            pause();
        }
    }
    close(ends[1]);
    said = ends[0];
    char answer = 0;
    cr_assert_eq(read(said, &answer, 1), 1);
    cr_assert_eq(answer, 'y');
}

static void end_rank_0(void)
{
    kill(host, SIGKILL);
    cr_assert_eq(waitpid(host, NULL, 0), host);
    close(said);
}

/* Both ranks; this process is rank 1. */
static nd_store *start_ranks(const nd_store_watch *watch)
{
    nd_store *store = NULL;
    start_rank_0();
    const nd_identity id = identity_of(1, port);
    assert_ok(nd_store_open(&id, SECONDS, watch, &store));
    return store;
}

static void end_ranks(nd_store *store)
{
    nd_store_close(store, true);
    end_rank_0();
}

static void expect_said(int fd, const char *words)
{
    char text[200];
    ssize_t n = read(fd, text, sizeof text - 1);
    text[n > 0 ? n : 0] = '\0';
    cr_expect_not_null(strstr(text, words), "%s", text);
}

Test(store, a_rank_0_that_never_comes_is_said_at_the_deadline)
{
    nd_store *store = NULL;
    const nd_identity id = identity_of(1, port_reserve());
    assert_fails(nd_store_open(&id, 0.2, NULL, &store), ND_ERR_HANG,
                 "rank 0 was not reached within 0.2 s: ");
}

Test(store, late_answers_of_a_store_that_stood_still_are_not_taken)
{
    char value[8] = "";
    size_t bytes = sizeof value;
    nd_store *store = start_ranks(NULL);
    cr_assert_eq(kill(host, SIGSTOP), 0);
    cr_assert_eq(waitpid(host, NULL, WUNTRACED), host);
    cr_expect_eq(nd_store_check(store, 0.1), ND_ERR_HANG);
    cr_assert_eq(kill(host, SIGCONT), 0);
    assert_ok(nd_store_set(store, "key", "value", 6));
    assert_ok(nd_store_get(store, "key", value, &bytes));
    cr_expect_eq(bytes, 6);
    bytes = 5;
    assert_fails(nd_store_get(store, "key", value, &bytes), ND_ERR_INTERNAL, "6 bytes, 5 fit");
    cr_expect_str_eq(value, "value");
    end_ranks(store);
}

/* Rank 0 stands still beyond the deadline of the request, and within the margin for its answer. */
Test(store, an_answer_shortly_after_the_deadline_is_taken)
{
    nd_store *store = start_ranks(NULL);
    nd_store_set_timeout(store, 0.1);
    cr_assert_eq(kill(host, SIGSTOP), 0);
    cr_assert_eq(waitpid(host, NULL, WUNTRACED), host);
    const pid_t waker = fork();
    cr_assert_geq(waker, 0);
    if (waker == 0) {
        usleep(300000);
        _exit(kill(host, SIGCONT));
    }
    assert_fails(nd_store_barrier(store, "step"), ND_ERR_HANG, "missing of 2 ranks: 0");
    cr_expect_eq(waitpid(waker, NULL, 0), waker);
    end_ranks(store);
}

/* The store still answers after the goodbye of rank 0; in the end the key is gone, too. */
Test(store, rank_0_stays_until_the_others_leave)
{
    int code = -1;
    leaves = true;
    nd_store *store = start_ranks(NULL);
    assert_ok(nd_store_barrier(store, "start"));
    assert_fails(nd_store_barrier(store, "end"), ND_ERR_IO, "left the job");
    nd_store_set_timeout(store, 0.2);
    assert_fails(nd_store_get(store, "key", NULL, &(size_t){0}), ND_ERR_HANG,
                 "nobody set the key 'key' within 0.2 s");
    nd_store_close(store, false);
    cr_assert_eq(waitpid(host, &code, 0), host);
    cr_expect_eq(code, 0);
    cr_expect_eq(rmdir(dir.path), 0, "the key is still there");
}

Test(store, rank_0_hears_of_a_rank_that_ends_without_a_goodbye)
{
    nd_store_close(start_ranks(NULL), true);
    expect_said(said, "rank 1 (here) was lost: it ended without a goodbye");
    end_rank_0();
}

Test(store, the_others_hear_of_the_end_of_rank_0)
{
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    nd_store *store = start_ranks(&(nd_store_watch){say_lost, &ends[1]});
    end_rank_0();
    expect_said(ends[0], "rank 0, which hosts the store, was lost");
    nd_store_close(store, true);
}
