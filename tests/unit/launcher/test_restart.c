// SPDX-License-Identifier: Apache-2.0
/* Which failures are followed by a restart, and when. */
#include <criterion/criterion.h>
#include <string.h>

#include "launcher/supervise.h"
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
    c.brief = 1000000;
    c.seconds = 0;
    cr_expect_eq(nd_restart_decide(&c).wait_seconds, 60);
}

Test(restart, every_refusal_of_a_failure_has_a_reason)
{
    for (int v = ND_RESTART_NOT_WORTH; v <= ND_RESTART_LEFT_BEHIND; v++) {
        cr_expect_not_null(nd_restart_reason((nd_restart)v), "%d", v);
    }
    cr_expect_null(nd_restart_reason(ND_RESTART_OFF));
    cr_expect_null(nd_restart_reason(ND_RESTART_ASKED));
}

Test(restart, each_start_has_a_run_id_of_its_own)
{
    char id[64];
    nd_restart_run_id("nd-12345678", 0, id, sizeof id);
    cr_expect_str_eq(id, "nd-12345678");
    nd_restart_run_id("nd-12345678", 12, id, sizeof id);
    cr_expect_str_eq(id, "nd-12345678.12");
}
