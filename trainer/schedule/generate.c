// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>

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
