// SPDX-License-Identifier: Apache-2.0
#include "tests/parity/schedules.h"

static nd_status begin(int micros, int each, nd_schedule *out)
{
    *out = (nd_schedule){.stages = 1, .micros = micros};
    return ND_ALLOC(each * micros + 2, &out->actions);
}

static void add(nd_schedule *s, nd_action_kind kind, int micro)
{
    s->actions[s->count++] = (nd_action){.kind = kind, .micro = micro};
}

nd_status schedule_resharding(int micros, nd_schedule *out)
{
    ND_TRY(begin(micros, 6, out));
    for (int micro = 0; micro < micros; micro++) {
        add(out, ND_UNSHARD, 0);
        add(out, ND_FORWARD, micro);
        add(out, ND_RESHARD, 0);
        add(out, ND_UNSHARD, 0);
        add(out, ND_BACKWARD, micro);
        add(out, ND_RESHARD, 0);
    }
    add(out, ND_REDUCE, 0);
    return ND_OK;
}

nd_status schedule_split(int micros, nd_schedule *out)
{
    ND_TRY(begin(micros, 5, out));
    for (int micro = 0; micro < micros; micro++) {
        add(out, ND_UNSHARD, 0);
        add(out, ND_FORWARD, micro);
        add(out, ND_INPUT_GRADIENT, micro);
        add(out, ND_RESHARD, 0);
        add(out, ND_WEIGHT_GRADIENT, micro);
    }
    add(out, ND_REDUCE, 0);
    return ND_OK;
}

nd_status schedule_overlapping(int micros, nd_schedule *out)
{
    ND_TRY(begin(micros, 3, out));
    add(out, ND_UNSHARD, 0);
    for (int micro = 0; micro < micros; micro++) {
        add(out, ND_FORWARD, micro);
        add(out, ND_INPUT_GRADIENT, micro);
        if (micro > 0) {
            add(out, ND_WEIGHT_GRADIENT, micro - 1);
        }
    }
    add(out, ND_WEIGHT_GRADIENT, micros - 1);
    add(out, ND_REDUCE, 0);
    return ND_OK;
}
