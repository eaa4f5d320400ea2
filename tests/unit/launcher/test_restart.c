// SPDX-License-Identifier: Apache-2.0
/* Which failures are followed by a restart, and when. */
#include <criterion/criterion.h>
#include <string.h>

#include "launcher/launcher.h"
#include "runtime/base/status.h"

/* Restart 1 of 3 after a kill in the fifth step, with a checkpoint at step 4. */
static nd_restart_case plain(void)
{
    return (nd_restart_case){
        .code = 128 + 9, .max_restarts = 3, .stepped = true, .durable = 4, .seconds = 100};
}

static void expect(const nd_restart_case *c, nd_restart verdict)
{
    nd_restart_choice choice = nd_restart_decide(c);
    cr_expect_eq(choice.verdict, verdict, "code %d, epoch %d: %d, not %d", c->code, (int)c->epoch,
                 choice.verdict, verdict);
    cr_expect_eq(!choice.text[0], verdict == ND_RESTART_OFF || verdict == ND_RESTART_ASKED,
                 "what needs a reason, and only that, has one: %s", choice.text);
}

Test(restart, the_class_of_the_exit_code_decides)
{
    static const struct {
        int code;
        nd_restart verdict;
    } cases[] = {
        {0, ND_RESTART_OFF},        {1, ND_RESTART_YES},        {2, ND_RESTART_NOT_WORTH},
        {7, ND_RESTART_YES}, /* of a library that ended the process */
        {65, ND_RESTART_NOT_WORTH}, {70, ND_RESTART_NOT_WORTH}, {71, ND_RESTART_NOT_WORTH},
        {73, ND_RESTART_NOT_WORTH}, {74, ND_RESTART_YES},       {75, ND_RESTART_ASKED},
        {124, ND_RESTART_YES},      {128 + 6, ND_RESTART_YES},  {128 + 9, ND_RESTART_YES},
        {128 + 11, ND_RESTART_YES},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_restart_case c = plain();
        c.code = cases[i].code;
        expect(&c, cases[i].verdict);
        c.asked = true;
        expect(&c, c.code == 0 ? ND_RESTART_OFF : ND_RESTART_ASKED);
        c.max_restarts = 0;
        expect(&c, ND_RESTART_OFF);
    }
}

Test(restart, the_first_one_needs_a_step_and_no_checkpoint)
{
    nd_restart_case c = plain();
    c.durable = -1;
    expect(&c, ND_RESTART_YES);
    c.stepped = false;
    expect(&c, ND_RESTART_NO_STEP);
}

Test(restart, a_further_one_needs_a_newer_checkpoint)
{
    nd_restart_case c = plain();
    c.epoch = 1;
    c.began_at = 4;
    expect(&c, ND_RESTART_NO_PROGRESS);
    c.durable = 5;
    expect(&c, ND_RESTART_YES);
}

/* "Never twice without progress in between", whatever the restarts before it have reached. */
Test(restart, none_follows_one_that_does_not_come_to_its_first_step)
{
    nd_restart_case c = plain();
    c.stepped = false;
    c.max_restarts = 9;
    for (c.epoch = 1; c.epoch < 4; c.epoch++) {
        expect(&c, ND_RESTART_NO_START);
    }
    c.code = ND_ERR_CONFIG;
    expect(&c, ND_RESTART_NOT_WORTH);
}

Test(restart, there_are_at_most_max_restarts)
{
    nd_restart_case c = plain();
    c.durable = 9;
    for (c.epoch = 0; c.epoch < 3; c.epoch++) {
        expect(&c, ND_RESTART_YES);
    }
    expect(&c, ND_RESTART_ALL_USED);
}

/* Its memory, its GPU and its lock of the run folder may not be free. */
Test(restart, none_while_a_killed_worker_has_not_ended)
{
    nd_restart_case c = plain();
    c.left_behind = true;
    expect(&c, ND_RESTART_LEFT_BEHIND);
}

/* At once, until starts fail soon after their first step, one after the other. */
Test(restart, the_wait_doubles_while_starts_fail_soon)
{
    static const double waits[] = {0, 1, 2, 4, 8, 16, 32, 60, 60};
    nd_restart_case c = plain();
    c.max_restarts = 1000;
    c.seconds = 0.5;
    for (c.epoch = 0; c.epoch < (int64_t)(sizeof waits / sizeof *waits); c.epoch++) {
        nd_restart_choice choice = nd_restart_decide(&c);
        cr_expect_eq(choice.verdict, ND_RESTART_YES);
        cr_expect_float_eq(choice.wait_seconds, waits[c.epoch], 1e-9, "restart %d: %g s",
                           (int)c.epoch + 1, choice.wait_seconds);
        c.brief = choice.brief;
    }
    c.seconds = 100;
    nd_restart_choice choice = nd_restart_decide(&c);
    cr_expect_eq(choice.wait_seconds, 0);
    cr_expect_eq(choice.brief, 0);
    c.seconds = 10; /* not sooner than this */
    cr_expect_eq(nd_restart_decide(&c).brief, 0);
    c.brief = 1000000;
    c.seconds = 0;
    cr_expect_eq(nd_restart_decide(&c).wait_seconds, 60);
}

/* The job began after `first` steps, has done `done`, and has a checkpoint of `durable`. */
static void expect_text(int64_t first, int64_t done, int64_t durable, const char *text)
{
    nd_restart_case c = plain();
    c.began_at = first;
    c.done = done;
    c.durable = durable;
    cr_expect_str_eq(nd_restart_decide(&c).text, text);
}

Test(restart, it_says_from_where_it_goes_on_and_what_is_lost)
{
    expect_text(0, 46, 40, "restart 1 of 3 follows at once, from step 40; 6 steps are lost");
    expect_text(0, 41, 40, "restart 1 of 3 follows at once, from step 40; 1 step is lost");
    /* It died after the save. */
    expect_text(0, 39, 40, "restart 1 of 3 follows at once, from step 40; 0 steps are lost");
    expect_text(30, 46, -1, "restart 1 of 3 follows at once, from step 30; 16 steps are lost");
    expect_text(0, 46, -1, "restart 1 of 3 follows at once, from the beginning; 46 steps are lost");
    nd_restart_case c = plain();
    c.lacks_nodes = true;
    cr_expect_not_null(strstr(nd_restart_decide(&c).text, "follows when enough nodes are back,"));
}
