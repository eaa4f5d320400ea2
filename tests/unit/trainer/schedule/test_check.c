// SPDX-License-Identifier: Apache-2.0
/* Schedules that are whole are accepted; one action less, or one twice, makes them wrong. */
#include <criterion/criterion.h>
#include <string.h>

#include "trainer/schedule/schedule.h"

enum { MOST = 32 };

typedef struct list {
    nd_action actions[MOST];
    int count;
} list;

static void add(list *l, nd_action_kind kind, int stage, int micro)
{
    cr_assert_lt(l->count, MOST);
    l->actions[l->count++] = (nd_action){kind, stage, micro};
}

static nd_status check(list *l, int stages, int micros, nd_schedule_needs *needs)
{
    const nd_schedule schedule = {
        .stages = stages, .micros = micros, .actions = l->actions, .count = l->count};
    return nd_schedule_check(&schedule, needs);
}

/* Weight gradients of two micro-batches come when their weights are gone. */
static list split(void)
{
    list l = {0};
    add(&l, ND_UNSHARD, 0, 0);
    for (int micro = 0; micro < 3; micro++) {
        add(&l, ND_FORWARD, 0, micro);
        add(&l, ND_INPUT_GRADIENT, 0, micro);
        if (micro == 1) {
            add(&l, ND_RESHARD, 0, 0);
            add(&l, ND_WEIGHT_GRADIENT, 0, 0);
            add(&l, ND_WEIGHT_GRADIENT, 0, 1);
            add(&l, ND_UNSHARD, 0, 0);
        }
    }
    add(&l, ND_WEIGHT_GRADIENT, 0, 2);
    add(&l, ND_REDUCE, 0, 0);
    return l;
}

/* The middle one of three stages, of which each forward but the first comes before a backward. */
static list one_forward_one_backward(void)
{
    list l = {0};
    add(&l, ND_UNSHARD, 1, 0);
    for (int micro = 0; micro <= 3; micro++) {
        if (micro < 3) {
            add(&l, ND_RECEIVE_INPUT, 1, micro);
            add(&l, ND_FORWARD, 1, micro);
            add(&l, ND_SEND_OUTPUT, 1, micro);
        }
        if (micro > 0) {
            add(&l, ND_RECEIVE_GRADIENT, 1, micro - 1);
            add(&l, ND_BACKWARD, 1, micro - 1);
            add(&l, ND_SEND_GRADIENT, 1, micro - 1);
        }
    }
    add(&l, ND_REDUCE, 1, 0);
    return l;
}

static void expect_fragile(const list *whole, int stages, int micros)
{
    nd_schedule_needs needs;
    for (int at = 0; at < whole->count; at++) {
        const size_t behind = (size_t)(whole->count - at - 1) * sizeof *whole->actions;
        list less = *whole, twice = *whole;
        memmove(less.actions + at, whole->actions + at + 1, behind);
        less.count--;
        memmove(twice.actions + at + 1, whole->actions + at, behind + sizeof *whole->actions);
        twice.count++;
        cr_expect_eq(check(&less, stages, micros, &needs), ND_ERR_INTERNAL, "without action %d",
                     at);
        cr_expect_eq(check(&twice, stages, micros, &needs), ND_ERR_INTERNAL, "action %d twice", at);
        const nd_action a = whole->actions[at], before = whole->actions[at - (at > 0)];
        list early = *whole, bare = *whole;
        if (at > 0 && a.kind < ND_UNSHARD && before.kind < ND_UNSHARD && a.micro == before.micro) {
            early.actions[at - 1] = a; /* what it reads comes later */
            early.actions[at] = before;
            cr_expect_eq(check(&early, stages, micros, &needs), ND_ERR_INTERNAL, "early %d", at);
        }
        if (a.kind == ND_FORWARD || a.kind == ND_BACKWARD || a.kind == ND_INPUT_GRADIENT) {
            memmove(bare.actions + at + 3, whole->actions + at + 1, behind);
            bare.actions[at] = (nd_action){ND_RESHARD, a.stage, 0};
            bare.actions[at + 1] = a; /* it reads weights, which are away */
            bare.actions[at + 2] = (nd_action){ND_UNSHARD, a.stage, 0};
            bare.count += 2;
            cr_expect_eq(check(&bare, stages, micros, &needs), ND_ERR_INTERNAL, "bare %d", at);
        }
    }
}

Test(schedule, sequential_keeps_one_micro_batch)
{
    for (int micros = 1; micros <= 5; micros++) {
        nd_schedule schedule;
        nd_schedule_needs needs;
        list l = {0};
        cr_assert_eq(nd_schedule_sequential(micros, &schedule), ND_OK);
        cr_assert_eq(nd_schedule_check(&schedule, &needs), ND_OK, "%s", nd_error_last()->message);
        cr_expect(needs.sets == 1 && !needs.delays);
        memcpy(l.actions, schedule.actions, (size_t)schedule.count * sizeof *l.actions);
        l.count = schedule.count;
        expect_fragile(&l, 1, micros);
        nd_schedule_fini(&schedule);
    }
}

Test(schedule, delayed_weight_gradients_need_more_sets)
{
    list l = split();
    nd_schedule_needs needs;
    cr_assert_eq(check(&l, 1, 3, &needs), ND_OK, "%s", nd_error_last()->message);
    cr_expect(needs.sets == 2 && needs.delays);
    expect_fragile(&l, 1, 3);
    const nd_action last = l.actions[l.count - 1]; /* the reduction, before a weight gradient */
    l.actions[l.count - 1] = l.actions[l.count - 2];
    l.actions[l.count - 2] = last;
    cr_expect_eq(check(&l, 1, 3, &needs), ND_ERR_INTERNAL);
}

Test(schedule, a_stage_between_others_sends_and_receives)
{
    list l = one_forward_one_backward();
    nd_schedule_needs needs;
    cr_assert_eq(check(&l, 3, 3, &needs), ND_OK, "%s", nd_error_last()->message);
    cr_expect(needs.sets == 2 && !needs.delays);
    expect_fragile(&l, 3, 3);
    /* As the only stage it has nobody to send to. */
    for (int i = 0; i < l.count; i++) {
        l.actions[i].stage = 0;
    }
    cr_expect_eq(check(&l, 1, 3, &needs), ND_ERR_INTERNAL);
}

Test(schedule, the_last_stage_begins_no_forward_before_an_input_gradient)
{
    static const nd_action_kind kinds[] = {ND_FORWARD, ND_BACKWARD};
    nd_schedule_needs needs;
    list l = {0};
    add(&l, ND_UNSHARD, 0, 0);
    for (int i = 0; i < 4; i++) {
        add(&l, kinds[i / 2], 0, i % 2);
    }
    add(&l, ND_REDUCE, 0, 0);
    cr_expect_eq(check(&l, 1, 2, &needs), ND_ERR_INTERNAL);
}

Test(schedule, what_is_out_of_range_is_named)
{
    static const nd_action bad[] = {{ND_ACTION_KIND_COUNT, 0, 0},
                                    {ND_FORWARD, 1, 0},
                                    {ND_FORWARD, 0, 3},
                                    {ND_FORWARD, -1, 0},
                                    {ND_FORWARD, 0, -1}};
    nd_schedule_needs needs;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        list l = split();
        l.actions[1] = bad[i];
        cr_expect_eq(check(&l, 1, 3, &needs), ND_ERR_INTERNAL);
        cr_expect(strstr(nd_error_last()->message, "action 1 of the schedule"), "%s",
                  nd_error_last()->message);
    }
}
