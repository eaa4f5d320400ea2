// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>

#include "runtime/rdzv/server_state.h"

enum { SOME = 4 };
static const int64_t ms = 1000000;
static nd_strangers all;
static nd_stranger some[SOME];

static void add(int i, int64_t at_ms)
{
    nd_strangers_add(&all, &some[i], &some[i], at_ms * ms);
}

static int leaving(int64_t at_ms)
{
    nd_stranger *s = nd_strangers_leaving(&all, at_ms * ms);
    return s ? (int)(s - some) : -1;
}

Test(strangers, places_follow_the_limit_of_files)
{
    cr_expect_eq(nd_strangers_places(0, 0, 1), ND_STRANGERS_LEAST);
    cr_expect_eq(nd_strangers_places(1024, 64, 8), 1024 - 6 * 64 - 8 - 128);
    cr_expect_eq(nd_strangers_places(1024, 4096, 512), ND_STRANGERS_LEAST);
    cr_expect_eq(nd_strangers_places(524288, 64, 8), ND_STRANGERS_MOST);
}

Test(strangers, the_oldest_silent_one_leaves_first)
{
    for (int i = 0; i < SOME; i++) {
        add(i, i);
    }
    cr_expect_eq(leaving(10), -1, "all have come only now");
    cr_expect_eq(leaving(30), 0);
    cr_expect(nd_strangers_sign(&all, &some[0], 30 * ms));
    cr_expect_eq(leaving(30), 1);
    nd_strangers_remove(&all, &some[1]);
    cr_expect_eq(leaving(30), 2);
    nd_strangers_remove(&all, &some[2]);
    nd_strangers_remove(&all, &some[3]);
    cr_expect_eq(leaving(200), -1, "a handshake has more time");
    cr_expect_eq(leaving(281), 0);
    nd_strangers_remove(&all, &some[0]);
    cr_expect_eq(leaving(1000), -1);
    cr_expect_eq(all.count, 0);
}

/* A sign gives a stranger its time once more, but only a few signs count. */
Test(strangers, one_that_gives_signs_stays_for_a_while)
{
    int64_t at = 0;
    add(0, 0);
    add(1, 1);
    cr_expect(nd_strangers_sign(&all, &some[1], 1 * ms));
    for (int i = 0; i < ND_STRANGER_SIGNS; i++) {
        at += 240;
        cr_expect(nd_strangers_sign(&all, &some[0], at * ms));
        cr_expect(some[0].signs == i + 1);
    }
    cr_expect_eq(some[0].came, 0);
    cr_expect_eq(leaving(at + 200), 1);
    nd_strangers_remove(&all, &some[1]);
    cr_expect_eq(leaving(at + 200), -1);
    cr_expect_eq(leaving(at + 251), 0);
    cr_expect_not(nd_strangers_sign(&all, &some[0], (at + 251) * ms));
    cr_expect_eq(leaving(at + 251), 0);
}
