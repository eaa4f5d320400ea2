// SPDX-License-Identifier: Apache-2.0
/* The line of node 0 about a restart. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "launcher/supervise.h"
#include "runtime/base/log.h"
#include "tests/support/tempdir.h"

static const char line[] = "ndlaunch: restart 1 of 3 on nodes 0, 2, since node 1 was lost: ";

static uv_loop_t loop;
static nd_config config;
static nd_supervisor *s;
static int reader;

/* In the first restart, before its first step. */
static void setup(void)
{
    int ends[2];
    cr_assert_eq(pipe2(ends, O_NONBLOCK), 0);
    reader = ends[0];
    cr_assert_eq(dup2(ends[1], STDERR_FILENO), STDERR_FILENO);
    close(ends[1]);
    nd_log_init(ND_LOG_INFO, NULL);
    cr_assert_eq(uv_loop_init(&loop), 0);
    assert_ok(nd_config_init(&config));
    config.launch.max_restarts = 3;
    assert_ok(nd_supervisor_create(&s));
    assert_ok(nd_progress_create(1, &s->attempt->progress));
    cr_assert_eq(uv_timer_init(&loop, &s->first_step_timer), 0);
    s->options.loop = &loop;
    s->options.config = &config;
    s->epoch = 1;
    s->awaits_first_step = true;
    snprintf(s->nodes, sizeof s->nodes, "0, 2");
    snprintf(s->what, sizeof s->what, "node 1 was lost");
}

static void teardown(void)
{
    uv_close((uv_handle_t *)&s->first_step_timer, NULL);
    uv_run(&loop, UV_RUN_DEFAULT);
    cr_assert_eq(uv_loop_close(&loop), 0);
    nd_supervisor_destroy(s);
    nd_config_fini(&config);
    close(reader);
}

TestSuite(supervise, .init = setup, .fini = teardown);

static void expect_line(bool printed)
{
    char text[4096];
    ssize_t n = read(reader, text, sizeof text - 1);
    text[n > 0 ? n : 0] = '\0';
    cr_assert_eq(strstr(text, line) != NULL, printed, "%s", text);
}

static void end_job(void)
{
    const nd_nodes_end end = {.node = -1};
    double wait = 0;
    cr_assert_not(nd_supervisor_restarts(s, &end, &wait));
}

/* The timer that looks for the step is due, but the callback of another one, in which the job ends,
 * comes before its own: libuv 1.48 and later have stopped both. */
Test(supervise, a_job_that_ends_right_after_the_first_step_of_a_restart_tells_of_it)
{
    nd_progress_mark(&s->attempt->progress, ND_MARK_FIRST_STEP);
    cr_assert_not(uv_is_active((uv_handle_t *)&s->first_step_timer));
    end_job();
    expect_line(true);
    end_job();
    expect_line(false);
}

Test(supervise, a_restart_without_a_step_has_no_such_line)
{
    end_job();
    expect_line(false);
    nd_progress_mark(&s->attempt->progress, ND_MARK_FIRST_STEP); /* of a later start */
    end_job();
    expect_line(false);
}
