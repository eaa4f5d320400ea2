// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_STAGING_H
#define ND_DEVICE_STAGING_H
/*
 * Host memory that the device copies from and to by itself: pinned on CUDA, plain memory on the
 * CPU. A copy from other host memory makes the caller wait.
 *
 * A ring of slots for what the host hands over again and again. The caller fills a slot, enqueues
 * the copies from it, and ends it; when the ring reaches the slot again, it is waited for only if
 * its copies have not run yet.
 */
#include <stdint.h>

#include "runtime/device/device.h"

enum { ND_STAGING_SLOTS = 64 };

typedef struct nd_staging {
    nd_device *device; /* borrowed */
    char *memory;      /* slots x slot_bytes */
    size_t slot_bytes;
    int slots, next;
    nd_event copied[ND_STAGING_SLOTS];
} nd_staging;

/* Zeroed; owned by the caller. Before step 0 only. */
nd_status nd_host_alloc(nd_device *device, size_t bytes, void **out);
void nd_host_free(nd_device *device, void *p); /* NULL is legal */

/* Makes the number of slots that is asked for, but at most ND_STAGING_SLOTS. */
nd_status nd_staging_init(nd_staging *staging, nd_device *device, size_t slot_bytes, int64_t slots);
void nd_staging_fini(nd_staging *staging);
/* The next slot, lent until nd_staging_end. */
nd_status nd_staging_begin(nd_staging *staging, void **slot);
/* All copies from the slot are enqueued on `stream`; *copied, borrowed until the next use of the
 * slot, is complete after them. */
nd_status nd_staging_end(nd_staging *staging, nd_stream *stream, nd_event **copied);

#endif
