// SPDX-License-Identifier: Apache-2.0
#include "trainer/dry/dry.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

nd_call_entry *nd_calls_find(const nd_calls *calls, const nd_call *call)
{
    for (int i = 0; i < calls->count; i++) {
        if (memcmp(&calls->entries[i].call, call, sizeof *call) == 0) {
            return &calls->entries[i];
        }
    }
    return NULL;
}

nd_status nd_calls_add(nd_calls *calls, const nd_call *call)
{
    nd_call_entry *entry = nd_calls_find(calls, call);
    if (entry) {
        entry->times += calls->weight;
        return ND_OK;
    }
    if (calls->count == calls->capacity) {
        int capacity = calls->capacity > 0 ? 2 * calls->capacity : 64;
        void *grown = realloc(calls->entries, (size_t)capacity * sizeof *calls->entries);
        if (!grown) {
            return nd_fail_memory("the calls of a step");
        }
        calls->entries = grown;
        calls->capacity = capacity;
    }
    calls->entries[calls->count++] = (nd_call_entry){.call = *call, .times = calls->weight};
    return ND_OK;
}

nd_status nd_calls_add_all(nd_calls *calls, const nd_calls *from)
{
    for (int i = 0; i < from->count; i++) {
        calls->weight = from->entries[i].times;
        ND_TRY(nd_calls_add(calls, &from->entries[i].call));
    }
    return ND_OK;
}

static int64_t times_in(const nd_calls *step, const nd_call *call)
{
    const nd_call_entry *entry = nd_calls_find(step, call);
    return entry ? entry->times : 0;
}

double nd_calls_difference(const nd_calls *timed, const nd_calls *step, const nd_calls *other,
                           bool only_more)
{
    double seconds = 0.0;
    for (int i = 0; i < timed->count; i++) {
        const nd_call_entry *entry = &timed->entries[i];
        int64_t more = times_in(step, &entry->call) - times_in(other, &entry->call);
        if (more != 0 && entry->seconds < 0.0) {
            return NAN;
        }
        seconds += more > 0 || !only_more ? (double)more * entry->seconds : 0.0;
    }
    return seconds;
}

void nd_calls_free(nd_calls *calls)
{
    free(calls->entries);
    *calls = (nd_calls){0};
}
