// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_FAILURE_PAGE_H
#define ND_RDZV_FAILURE_PAGE_H
/*
 * Which failure of a job came first.
 *
 * Under ndlaunch, a page of memory records the order: one slot per local worker, shared with
 * ndlaunch (a memfd inherited by number). A worker writes its own slot once; ndlaunch reads it when
 * the worker has ended, even if it was killed meanwhile. Times are CLOCK_MONOTONIC of the host, so
 * they order the failures of its workers.
 *
 * Without ndlaunch, the store records which failure came first. A rank that fails sets
 * ND_FAILURE_FIRST to its message with nd_store_set_once, and ND_FAILURE_PRINTED once it has
 * printed it. The store's engine sets ND_FAILURE_FIRST for a worker whose connection closes without
 * a goodbye, at the moment in which it closes, and sends the first failure to every worker at once.
 */
#include <stdatomic.h>
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/rdzv/identity.h"

enum { ND_DEVICE_NAME_MAX = 48 };

typedef struct nd_failure_slot {
    _Atomic int64_t time_ns; /* when the record was complete, written last; 0: none */
    _Atomic int32_t ready;   /* the worker handles signals */
    int32_t status;          /* nd_status */
    int32_t cause;           /* nd_failure_cause */
    char device[ND_DEVICE_NAME_MAX];
    char message[ND_ERROR_MESSAGE_MAX];
} nd_failure_slot;

typedef struct nd_failure_page {
    nd_failure_slot *slots; /* [count] */
    int count;
    int fd;
} nd_failure_page;

#define ND_FAILURE_FIRST   "first failure"
#define ND_FAILURE_PRINTED "first failure is printed"
enum { ND_FAILURE_FIRST_MAX = ND_ERROR_MESSAGE_MAX + 1024 }; /* of its value, which has no NUL */

/* Launcher. */
nd_status nd_failure_page_create(int count, nd_failure_page *out);
void nd_failure_page_close(nd_failure_page *page);

/* Worker: records the error that ends it. The first record stays. Does nothing without a launcher,
 * and never fails. */
void nd_failure_report(const nd_identity *identity, const nd_error *error);
/* Worker: from now on it handles the signals that ndlaunch forwards, instead of dying of them. */
void nd_failure_set_ready(const nd_identity *identity);
/* Worker: records the name of its device for the failure screen, such as "cuda:3" or "cpu". */
void nd_failure_set_device(const nd_identity *identity, const char *device);

#endif
