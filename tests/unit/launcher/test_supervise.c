// SPDX-License-Identifier: Apache-2.0
/* Node 0 says when a restart follows, and what it costs. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "launcher/supervise.h"
#include "runtime/base/log.h"
#include "tests/support/tempdir.h"

static nd_config config;
static nd_supervisor *s;
static int reader;

static void setup(void)
{
    int ends[2];
    cr_assert_eq(pipe2(ends, O_NONBLOCK), 0);
    reader = ends[0];
    cr_assert_eq(dup2(ends[1], STDERR_FILENO), STDERR_FILENO);
    close(ends[1]);
    nd_log_init(ND_LOG_INFO, NULL);
    assert_ok(nd_config_init(&config));
    config.launch.max_restarts = 3;
    assert_ok(nd_supervisor_create(&s));
    assert_ok(nd_progress_create(1, &s->attempt->progress));
    s->options.config = &config;
}

static void teardown(void)
{
    nd_supervisor_destroy(s);
    nd_config_fini(&config);
    close(reader);
}

TestSuite(supervise, .init = setup, .fini = teardown);

static void expect_line(const char *line)
{
    char text[4096];
    ssize_t n = read(reader, text, sizeof text - 1);
    text[n > 0 ? n : 0] = '\0';
    cr_expect_not_null(strstr(text, line), "%s", text);
}

/* The job began after `first` steps, has done `done`, and has a checkpoint of `durable`. */
static void expect_restart(int64_t first, int64_t done, int64_t durable, const char *line)
{
    const nd_nodes_end end = {.code = 137, .words = "node 1 was lost"};
    nd_progress *page = &s->attempt->progress;
    double wait = -1;
    nd_progress_set_first_step(page, first);
    nd_progress_set_durable_step(page, durable);
    nd_progress_set_phase(&page->slots[0], ND_PHASE_EVAL, done);
    nd_progress_set_stepped(page);
    cr_assert(nd_supervisor_restarts(s, &end, &wait));
    cr_expect_eq(wait, 0);
    expect_line(line);
}

Test(supervise, a_restart_says_from_where_it_goes_on_and_what_is_lost)
{
    expect_restart(0, 46, 40,
                   "ndlaunch: node 1 was lost; restart 1 of 3 follows at once, from step 40; "
                   "6 steps are lost\n");
    expect_restart(0, 41, 40, "from step 40; 1 step is lost\n");
    expect_restart(0, 39, 40, "from step 40; 0 steps are lost\n"); /* it died after the save */
    expect_restart(30, 46, -1, "from step 30; 16 steps are lost\n");
    expect_restart(0, 46, -1, "from the beginning; 46 steps are lost\n");
}

Test(supervise, the_folder_of_the_run_is_kept_for_the_next_start)
{
    assert_ok(nd_progress_set_run_folder(&s->attempt->progress, "/a/run"));
    expect_restart(0, 2, -1, "2 steps are lost\n");
    cr_expect_str_eq(s->run_folder, "/a/run");
}
