// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_FAILURE_H
#define ND_RDZV_FAILURE_H
/*
 * The last words of a worker: one slot per local worker in memory shared with ndlaunch (a memfd
 * inherited by number). A worker writes its own slot once; ndlaunch reads it when the worker has
 * gone, also when it was killed meanwhile. Times are CLOCK_MONOTONIC of the host, so they order the
 * failures of its workers.
 */
#include <stdatomic.h>
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/rdzv/identity.h"

enum { ND_DEVICE_NAME_MAX = 48 };

typedef struct nd_failure_slot {
    _Atomic int64_t time_ns; /* when the record was complete, written last; 0: none */
    int32_t status;          /* nd_status */
    char device[ND_DEVICE_NAME_MAX];
    char message[ND_ERROR_MESSAGE_MAX];
} nd_failure_slot;

typedef struct nd_failure_page {
    nd_failure_slot *slots; /* [count] */
    int count;
    int fd;
} nd_failure_page;

/* Launcher. */
nd_status nd_failure_page_create(int count, nd_failure_page *out);
void nd_failure_page_close(nd_failure_page *page);

/* Worker: the error that ends it. The first report stays. Without a launcher it does nothing. Never
 * fails. */
void nd_failure_report(const nd_identity *identity, nd_status status, const char *message);
/* Worker: what the failure screen calls its device, such as "cuda:3" or "cpu"; once it is known. */
void nd_failure_set_device(const nd_identity *identity, const char *device);

#endif
