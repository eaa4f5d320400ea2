// SPDX-License-Identifier: Apache-2.0
#include "trainer/dry/dry.h"

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

void nd_calls_free(nd_calls *calls)
{
    free(calls->entries);
    *calls = (nd_calls){0};
}
