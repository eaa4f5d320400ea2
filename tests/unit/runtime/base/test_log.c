// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/log.h"

static int reader;

/* stderr becomes a pipe that keeps packets apart, so each write() comes back as one read(). */
static void catch_stderr(void)
{
    int ends[2];
    cr_assert_eq(pipe2(ends, O_DIRECT | O_NONBLOCK), 0);
    reader = ends[0];
    cr_assert_eq(dup2(ends[1], STDERR_FILENO), STDERR_FILENO);
    close(ends[1]);
}

TestSuite(log, .init = catch_stderr);

static const char *next_write(void)
{
    static char text[8192];
    ssize_t n = read(reader, text, sizeof text - 1);
    text[n > 0 ? n : 0] = '\0';
    return text;
}

Test(log, control_characters_are_escaped)
{
    nd_log_init(ND_LOG_INFO, NULL);
    nd_log_info("key %s is %s", "\x1b[31mred", "a\rb");
    cr_assert_str_eq(next_write(), "key \\x1b[31mred is a\\x0db\n");
    nd_log_info("two\nlines");
    cr_assert_str_eq(next_write(), "two\nlines\n", "a line end is the caller's own");
}

Test(log, a_line_is_one_write_with_prefix_and_level)
{
    nd_log_init(ND_LOG_DEBUG, "host:3");
    nd_log_error("no %s", "luck");
    cr_assert_str_eq(next_write(), "host:3: error: no luck\n");
    nd_log_warning("slow");
    cr_assert_str_eq(next_write(), "host:3: warning: slow\n");
    nd_log_info("step %d", 1);
    cr_assert_str_eq(next_write(), "host:3: step 1\n");
    nd_log_debug("detail");
    cr_assert_str_eq(next_write(), "host:3: debug: detail\n");
    nd_log_init(ND_LOG_INFO, NULL);
    nd_log_info("step %d", 2);
    cr_assert_str_eq(next_write(), "step 2\n");
}

Test(log, what_is_above_the_level_is_not_written)
{
    nd_log_init(ND_LOG_WARNING, "");
    cr_assert_eq(nd_log_get_level(), ND_LOG_WARNING);
    nd_log_info("no");
    nd_log_debug("no");
    cr_assert_str_eq(next_write(), "");
    nd_log_error("yes");
    cr_assert_str_eq(next_write(), "error: yes\n");
}

Test(log, a_long_message_is_cut_and_still_ends_its_line)
{
    char text[6000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    nd_log_init(ND_LOG_INFO, "");
    nd_log_info("%s", text);
    const char *got = next_write();
    size_t length = strlen(got);
    cr_assert_gt(length, 4000);
    cr_assert_leq(length, 4096);
    cr_assert_eq(got[length - 1], '\n');
}

Test(log, a_closed_stderr_is_no_error)
{
    close(STDERR_FILENO);
    nd_log_error("nobody hears this");
}
