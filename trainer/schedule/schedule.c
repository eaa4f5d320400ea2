// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>

#include "runtime/base/math.h"
#include "trainer/schedule/schedule.h"

nd_status nd_schedule_sequential(int micros, nd_schedule *out)
{
    nd_action *next = NULL;
    *out = (nd_schedule){.stages = 1, .micros = micros, .count = 2 * micros + 2};
    ND_TRY(ND_ALLOC(out->count, &out->actions));
    next = out->actions;
    *next++ = (nd_action){.kind = ND_UNSHARD};
    for (int micro = 0; micro < micros; micro++) {
        *next++ = (nd_action){.kind = ND_FORWARD, .micro = micro};
        *next++ = (nd_action){.kind = ND_BACKWARD, .micro = micro};
    }
    *next = (nd_action){.kind = ND_REDUCE};
    return ND_OK;
}

void nd_schedule_fini(nd_schedule *schedule)
{
    free(schedule->actions);
    *schedule = (nd_schedule){0};
}

/* A stage does this with a micro-batch. */
enum {
    RECEIVED = 1,
    FORWARD = 2,
    SENT = 4,
    GRADIENT_RECEIVED = 8,
    INPUT_GRADIENT = 16,
    WEIGHT_GRADIENT = 32,
    GRADIENT_SENT = 64,
    ALL = 127
};

static const struct {
    const char *name;
    int needs, gives;
    bool reads_weights;
} rules[ND_ACTION_KIND_COUNT] = {
    [ND_RECEIVE_INPUT] = {"receive input", 0, RECEIVED, false},
    [ND_FORWARD] = {"forward", RECEIVED, FORWARD, true},
    [ND_SEND_OUTPUT] = {"send output", FORWARD, SENT, false},
    [ND_RECEIVE_GRADIENT] = {"receive gradient", SENT, GRADIENT_RECEIVED, false},
    [ND_INPUT_GRADIENT] = {"input gradient", FORWARD | GRADIENT_RECEIVED, INPUT_GRADIENT, true},
    [ND_WEIGHT_GRADIENT] = {"weight gradient", INPUT_GRADIENT, WEIGHT_GRADIENT, false},
    [ND_BACKWARD] = {"backward", FORWARD | GRADIENT_RECEIVED, INPUT_GRADIENT | WEIGHT_GRADIENT,
                     true},
    [ND_SEND_GRADIENT] = {"send gradient", INPUT_GRADIENT, GRADIENT_SENT, false},
    [ND_UNSHARD] = {"unshard", 0, 0, false},
    [ND_RESHARD] = {"reshard", 0, 0, false},
    [ND_REDUCE] = {"reduce", 0, 0, false},
};

typedef struct stage_state {
    bool named, unsharded, reduced;
    int open; /* micro-batches between forward and input gradient */
} stage_state;

typedef struct checking {
    const nd_schedule *schedule;
    stage_state *stages; /* [stages] */
    int *done;           /* [stages][micros] */
    int taken;           /* micro-batches between forward and weight gradient, of all stages */
    nd_schedule_needs needs;
} checking;

static nd_status wrong(const checking *c, int at, const char *why)
{
    const nd_action *a = &c->schedule->actions[at];
    return nd_fail(ND_ERR_INTERNAL,
                   "action %d of the schedule (%s of stage %d, micro-batch %d): %s", at,
                   a->kind < ND_ACTION_KIND_COUNT ? rules[a->kind].name : "no action", a->stage,
                   a->micro, why);
}

static int *done_of(const checking *c, int stage, int micro)
{
    return &c->done[stage * c->schedule->micros + micro];
}

static bool is_over(const checking *c, int stage, int what)
{
    for (int micro = 0; micro < c->schedule->micros; micro++) {
        if ((*done_of(c, stage, micro) & what) != what) {
            return false;
        }
    }
    return true;
}

static nd_status check_micro(checking *c, int at)
{
    const nd_action *a = &c->schedule->actions[at];
    stage_state *s = &c->stages[a->stage];
    int *done = done_of(c, a->stage, a->micro);
    if ((*done & rules[a->kind].gives) != 0) {
        return wrong(c, at, "it is done already, or there is no adjacent stage");
    }
    if ((*done & rules[a->kind].needs) != rules[a->kind].needs) {
        return wrong(c, at, "what it reads is not there yet");
    }
    if (rules[a->kind].reads_weights && !s->unsharded) {
        return wrong(c, at, "the weights that it reads are not gathered");
    }
    s->open += (a->kind == ND_FORWARD) - ((rules[a->kind].gives & INPUT_GRADIENT) != 0);
    if (s->open > 1 && a->stage + 1 == c->schedule->stages) {
        return wrong(c, at, "the head's gradients of the micro-batch before it are not complete");
    }
    *done |= rules[a->kind].gives;
    c->taken += a->kind == ND_FORWARD;
    c->needs.sets = (int)nd_max(c->needs.sets, c->taken);
    c->taken -= (rules[a->kind].gives & WEIGHT_GRADIENT) != 0;
    c->needs.delays |= a->kind == ND_WEIGHT_GRADIENT;
    return ND_OK;
}

static nd_status check_action(checking *c, int at)
{
    const nd_action *a = &c->schedule->actions[at];
    if (a->kind >= ND_ACTION_KIND_COUNT || a->stage < 0 || a->stage >= c->schedule->stages ||
        a->micro < 0 || a->micro >= c->schedule->micros) {
        return wrong(c, at, "there is no such action, stage or micro-batch");
    }
    stage_state *s = &c->stages[a->stage];
    s->named = true;
    if (a->kind < ND_UNSHARD) {
        return check_micro(c, at);
    }
    if (a->kind == ND_REDUCE) {
        if (s->reduced || !is_over(c, a->stage, WEIGHT_GRADIENT)) {
            return wrong(c, at, "it comes once, after the last weight gradient");
        }
        s->reduced = true;
        return ND_OK;
    }
    if (s->unsharded == (a->kind == ND_UNSHARD)) {
        return wrong(c, at, "the weights are in that state already");
    }
    s->unsharded = a->kind == ND_UNSHARD;
    return ND_OK;
}

static nd_status check_end(const checking *c)
{
    for (int stage = 0; stage < c->schedule->stages; stage++) {
        const stage_state *s = &c->stages[stage];
        if (s->named && !(s->reduced && is_over(c, stage, ALL))) {
            return nd_fail(
                ND_ERR_INTERNAL,
                "the schedule ends before stage %d has done all of its micro-batches and "
                "reduced their gradients",
                stage);
        }
    }
    return ND_OK;
}

nd_status nd_schedule_check(const nd_schedule *schedule, nd_schedule_needs *out)
{
    checking c = {.schedule = schedule};
    nd_status status = ND_OK;
    ND_TRY_OUT(ND_ALLOC(schedule->stages, &c.stages));
    ND_TRY_OUT(ND_ALLOC((int64_t)schedule->stages * schedule->micros, &c.done));
    for (int i = 0; i < schedule->micros; i++) { /* what the ends of the model do not exchange */
        *done_of(&c, 0, i) |= RECEIVED | GRADIENT_SENT;
        *done_of(&c, schedule->stages - 1, i) |= SENT | GRADIENT_RECEIVED;
    }
    for (int at = 0; at < schedule->count; at++) {
        ND_TRY_OUT(check_action(&c, at));
    }
    ND_TRY_OUT(check_end(&c));
    *out = c.needs;
out:
    free(c.stages);
    free(c.done);
    return status;
}
