// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/failure_record.h"

#include <stdio.h>

#include "runtime/base/clock.h"

/* The worker's own record; NULL without a launcher, or where the identity could not be read. */
static nd_failure_slot *record_of(const nd_identity *identity)
{
    return identity->page.failures ? &identity->page.failures[identity->local_rank] : NULL;
}

void nd_failure_report(const nd_identity *identity, const nd_error *error)
{
    nd_failure_slot *slot = record_of(identity);
    if (slot && atomic_load(&slot->time_ns) == 0) {
        slot->status = (int32_t)error->status;
        slot->cause = (int32_t)error->cause;
        snprintf(slot->message, sizeof slot->message, "%s", error->message);
        atomic_store(&slot->time_ns, nd_clock_ns());
    }
}

void nd_failure_set_device(const nd_identity *identity, const char *device)
{
    nd_failure_slot *slot = record_of(identity);
    if (slot) {
        snprintf(slot->device, sizeof slot->device, "%s", device);
    }
}

void nd_failure_set_ready(const nd_identity *identity)
{
    nd_failure_slot *slot = record_of(identity);
    if (slot) {
        atomic_store(&slot->ready, 1);
    }
}
