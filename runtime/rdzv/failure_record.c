// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/failure_record.h"

#include <stdio.h>

#include "runtime/base/clock.h"

/* The worker's own record; NULL without a launcher, or where the identity could not be read and is
 * all zeros. The page is mapped for the moment, since a worker may fail before it has opened it.
 * The last error stays, since it is the one that is recorded. */
static nd_failure_slot *open_record(const nd_identity *identity, nd_progress *page)
{
    const nd_error before = *nd_error_last();
    const int workers = identity->local_world_size;
    if (identity->progress_fd < 0 || workers == 0) {
        return NULL;
    }
    if (nd_progress_open(identity->progress_fd, workers, page) != ND_OK) {
        nd_error_restore(&before);
        return NULL;
    }
    return &page->failures[identity->local_rank];
}

static void close_record(nd_progress *page)
{
    page->fd = -1; /* the identity's */
    nd_progress_close(page);
}

void nd_failure_report(const nd_identity *identity, const nd_error *error)
{
    nd_progress page;
    nd_failure_slot *slot = open_record(identity, &page);
    if (!slot) {
        return;
    }
    if (atomic_load(&slot->time_ns) == 0) {
        slot->status = (int32_t)error->status;
        slot->cause = (int32_t)error->cause;
        snprintf(slot->message, sizeof slot->message, "%s", error->message);
        atomic_store(&slot->time_ns, nd_clock_ns());
    }
    close_record(&page);
}

void nd_failure_set_device(const nd_identity *identity, const char *device)
{
    nd_progress page;
    nd_failure_slot *slot = open_record(identity, &page);
    if (slot) {
        snprintf(slot->device, sizeof slot->device, "%s", device);
        close_record(&page);
    }
}

void nd_failure_set_ready(const nd_identity *identity)
{
    nd_progress page;
    nd_failure_slot *slot = open_record(identity, &page);
    if (slot) {
        atomic_store(&slot->ready, 1);
        close_record(&page);
    }
}
