// SPDX-License-Identifier: Apache-2.0
/* The store on a socket of the loopback. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "runtime/rdzv/store_server.h"
#include "runtime/rdzv/key.h"
#include "tests/support/tempdir.h"

static uv_loop_t loop;
static nd_store_server *host;
static char notices[4096];

static void on_notice(void *context, const char *line)
{
    size_t used = strlen(notices);
    snprintf(notices + used, sizeof notices - used, "%s\n", line);
}

static void setup(void)
{
    nd_address addresses[ND_ADDRESS_MAX];
    int count;
    nd_store_server_options options = {
        .loop = &loop,
        .server = {.version = "1.2", .run_id = "job", .world_size = 2, .nnodes = 1},
        .hooks = {.notice = on_notice},
    };
    cr_assert_eq(uv_loop_init(&loop), 0);
    assert_ok(nd_key_random(options.key));
    assert_ok(nd_address_resolve("127.0.0.1", 0, addresses, &count));
    options.address = addresses[0];
    assert_ok(nd_store_server_open(&options, &host));
}

static void teardown(void)
{
    nd_store_server_close(host);
    uv_run(&loop, UV_RUN_DEFAULT);
    cr_assert_eq(uv_loop_close(&loop), 0);
}

TestSuite(host, .init = setup, .fini = teardown, .timeout = 60);

/* Runs the loop until a notice holds the words, for at most 100 rounds of at least one event (ten a
 * second). */
static void until_notice(const char *words)
{
    for (int i = 0; i < 100 && !strstr(notices, words); i++) {
        uv_run(&loop, UV_RUN_ONCE);
    }
    cr_assert_not_null(strstr(notices, words), "no \"%s\" in: %s", words, notices);
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
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &files), 0);
    files.rlim_cur = LIMIT;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &files), 0);
    while (count < LIMIT && (taken[count] = fcntl(0, F_DUPFD_CLOEXEC, 3)) >= 0) {
        count++;
    }
    cr_assert_eq(errno, EMFILE);
    until_notice("ulimit -n");
    for (int i = 0; i < 3; i++) {
        uv_run(&loop, UV_RUN_ONCE);
    }
    cr_assert_eq(strstr(notices, "ulimit"), strrchr(notices, '(') + 1, "said once: %s", notices);
    while (count > 0) {
        close(taken[--count]);
    }
}
