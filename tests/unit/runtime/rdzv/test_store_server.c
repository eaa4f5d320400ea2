// SPDX-License-Identifier: Apache-2.0
/* The store on a socket of the loopback. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/process.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/store.h"
#include "runtime/rdzv/store_server.h"
#include "runtime/rdzv/server_state.h"
#include "runtime/rdzv/key.h"
#include "tests/support/port.h"
#include "tests/support/tempdir.h"

static uv_loop_t loop;
static nd_store_server *host;
static char notices[4096];
static uint8_t key[ND_KEY_BYTES];

static void on_notice(void *context, const char *line)
{
    size_t used = strlen(notices);
    snprintf(notices + used, sizeof notices - used, "%s\n", line);
}

static void open_host(const char *version, double hello_seconds)
{
    nd_address addresses[ND_ADDRESS_MAX];
    int count;
    nd_store_server_options options = {
        .loop = &loop,
        .server = {.version = version,
                   .run_id = "job",
                   .world_size = 2,
                   .nnodes = 1,
                   .hello_seconds = hello_seconds},
        .hooks = {.notice = on_notice},
    };
    cr_assert_eq(uv_loop_init(&loop), 0);
    assert_ok(nd_key_random(key));
    memcpy(options.key, key, sizeof key);
    assert_ok(nd_address_resolve("127.0.0.1", 0, addresses, &count));
    options.address = addresses[0];
    assert_ok(nd_store_server_open(&options, &host));
}

static void close_host(void)
{
    nd_store_server_close(host);
    uv_run(&loop, UV_RUN_DEFAULT);
    cr_assert_eq(uv_loop_close(&loop), 0);
}

static void setup(void)
{
    open_host("1.2", 0);
}

TestSuite(host, .init = setup, .fini = close_host, .timeout = 120);

/* Runs the loop until a notice holds the words, for at most 100 rounds of at least one event (ten a
 * second). */
static void until_notice(const char *words)
{
    for (int i = 0; i < 100 && !strstr(notices, words); i++) {
        uv_run(&loop, UV_RUN_ONCE);
    }
    cr_assert_not_null(strstr(notices, words), "no \"%s\" in: %s", words, notices);
}

static int connect_to_host(void)
{
    int fd = port_connect(nd_store_server_port(host));
    cr_assert_geq(fd, 0, "%s", strerror(errno));
    return fd;
}

Test(host, says_that_no_file_can_be_opened)
{
    enum { LIMIT = 64 };
    struct rlimit files;
    int taken[LIMIT], count = 0;
    for (int i = 0; i < 3; i++) {
        uv_run(&loop, UV_RUN_ONCE);
    }
    cr_assert_str_eq(notices, "");
    int waiting = connect_to_host();
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &files), 0);
    files.rlim_cur = LIMIT;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &files), 0);
    while (count < LIMIT && (taken[count] = fcntl(0, F_DUPFD_CLOEXEC, 3)) >= 0) {
        count++;
    }
    cr_assert_eq(errno, EMFILE);
    until_notice("Too many open files (ulimit -n)");
    for (int i = 0; i < 3; i++) {
        uv_run(&loop, UV_RUN_ONCE);
    }
    cr_assert_eq(strstr(notices, "ulimit"), strrchr(notices, '(') + 1, "said once: %s", notices);
    while (count > 0) {
        close(taken[--count]);
    }
    close(waiting);
}

static bool is_closed(int fd)
{
    char byte;
    return recv(fd, &byte, 1, MSG_DONTWAIT) == 0 || (errno != EAGAIN && errno != EWOULDBLOCK);
}

static int count_open(const int *fds, int count)
{
    int left = 0;
    for (int i = 0; i < count; i++) {
        left += !is_closed(fds[i]);
    }
    return left;
}

/* Runs the loop until at most `most` of the connections are open, for at most 60 s. */
static int until_open(const int *fds, int count, int most)
{
    int left = count;
    for (double end = nd_clock_seconds() + 60.0; left > most && nd_clock_seconds() < end;) {
        uv_run(&loop, UV_RUN_ONCE);
        left = count_open(fds, count);
    }
    return left;
}

/* All places are taken by connections that may be dropped: one more takes the place of the oldest
 * one, and nobody leaves for a connection that does not come. */
Test(host, a_connection_takes_one_place)
{
    enum { ALL = ND_STRANGERS_LEAST + 4 };
    int silent[ALL];
    struct rlimit limit;
    close_host(); /* and again, with the least number of places, and time enough for a hello */
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = 160;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    open_host("1.2", 600);
    cr_assert_geq(nd_limits_raise_files(), 2 * ALL);
    for (int i = 0; i < ALL; i++) {
        double begin = nd_clock_seconds();
        silent[i] = connect_to_host();
        int open = i < ND_STRANGERS_LEAST ? i + 1 : ND_STRANGERS_LEAST;
        do { /* long enough for the connection to be old enough to leave */
            uv_run(&loop, UV_RUN_NOWAIT);
        } while (nd_clock_seconds() - begin < (i == ND_STRANGERS_LEAST - 1 ? 0.1 : 0.002));
        cr_assert_eq(until_open(silent, i + 1, open), open, "connection %d", i);
    }
    cr_assert(is_closed(silent[3]) && !is_closed(silent[4]), "the oldest go first");
    for (int i = 0; i < ALL; i++) {
        close(silent[i]);
    }
}

/* A worker of the first start, which asks whether it still belongs to the job. */
typedef struct asking {
    atomic_int stage; /* 1: the answer was yes; 2: the job was started again; 3: done */
    nd_status before, after;
    char why[ND_ERROR_MESSAGE_MAX];
} asking;

enum { ASKING_SECONDS = 30 };

static void *ask(void *context)
{
    asking *a = context;
    nd_store *store = NULL;
    nd_identity id = {.source = ND_IDENTITY_NDLAUNCH,
                      .world_size = 2,
                      .local_world_size = 2,
                      .nnodes = 1,
                      .master_addr = "127.0.0.1",
                      .master_port = nd_store_server_port(host),
                      .run_id = "job",
                      .host = "here"};
    a->before = nd_key_to_fd(key, &id.key_fd);
    a->before = a->before == ND_OK ? nd_store_open(&id, ASKING_SECONDS, NULL, &store) : a->before;
    a->before = a->before == ND_OK ? nd_store_check(store, ASKING_SECONDS) : a->before;
    atomic_store(&a->stage, 1);
    while (atomic_load(&a->stage) == 1) {
        usleep(1000);
    }
    a->after = store ? nd_store_check(store, ASKING_SECONDS) : ND_OK;
    snprintf(a->why, sizeof a->why, "%s", nd_error_last()->message);
    nd_store_close(store, true);
    close(id.key_fd);
    atomic_store(&a->stage, 3);
    return NULL;
}

static void run_until(asking *a, int stage)
{
    while (atomic_load(&a->stage) != stage) {
        uv_run(&loop, UV_RUN_NOWAIT);
        usleep(1000);
    }
}

Test(store_check, a_process_of_an_earlier_start_gets_no_answer, .timeout = 120)
{
    asking a = {0};
    pthread_t thread;
    open_host(ND_VERSION, 0);
    cr_assert_eq(pthread_create(&thread, NULL, ask, &a), 0);
    run_until(&a, 1);
    nd_server_restart(nd_store_server_engine(host), "job.1", 1, 2);
    atomic_store(&a.stage, 2);
    run_until(&a, 3);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_expect_eq(a.before, ND_OK, "%d: %s", a.before, a.why);
    cr_expect_eq(a.after, ND_ERR_IO, "%d: %s", a.after, a.why);
    cr_expect_not_null(strstr(a.why, "this start of the job has ended"), "%s", a.why);
    close_host();
}

Test(store_check, a_job_of_one_asks_nobody)
{
    nd_store *store = NULL;
    char value[6] = "";
    assert_ok(nd_store_check(store, ASKING_SECONDS));
    assert_ok(nd_store_set(store, "key", "value", 6));
    assert_ok(nd_store_barrier(store, "start"));
    assert_ok(nd_store_exchange(store, "places", "value", value, 6));
    cr_expect_str_eq(value, "value");
    nd_store_close(store, false);
}
