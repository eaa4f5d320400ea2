// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_FAILURE_RECORD_H
#define ND_RDZV_FAILURE_RECORD_H
/*
 * Which failure of a job came first.
 *
 * Under ndlaunch, each worker's record in the progress page tells it (runtime/base/progress.h).
 *
 * Without ndlaunch, the store records which failure came first. A rank that fails sets
 * ND_FAILURE_FIRST to its message with nd_store_set, and ND_FAILURE_PRINTED once it has
 * printed it. The store's engine sets ND_FAILURE_FIRST for a worker whose connection closes without
 * a goodbye, at the moment in which it closes, and sends the first failure to every worker at once.
 */
#include "runtime/base/status.h"
#include "runtime/rdzv/identity.h"

#define ND_FAILURE_FIRST   "first failure"
#define ND_FAILURE_PRINTED "first failure is printed"
enum { ND_FAILURE_FIRST_MAX = ND_ERROR_MESSAGE_MAX + 1024 }; /* of its value, which has no NUL */

/* Worker: records the error that ends it. The first record stays. Does nothing without a launcher,
 * and never fails. */
void nd_failure_report(const nd_identity *identity, const nd_error *error);
/* Worker: from now on it handles the signals that ndlaunch forwards, instead of dying of them. */
void nd_failure_set_ready(const nd_identity *identity);
/* Worker: records the name of its device for the failure screen, such as "cuda:3" or "cpu". */
void nd_failure_set_device(const nd_identity *identity, const char *device);

#endif
