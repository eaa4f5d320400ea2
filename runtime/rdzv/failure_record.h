// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_FAILURE_RECORD_H
#define ND_RDZV_FAILURE_RECORD_H
/* A worker's record in the progress page (runtime/base/progress.h), which tells ndlaunch which
 * failure of a job came first. */
#include "runtime/base/status.h"
#include "runtime/rdzv/identity.h"

/* Worker: records the error that ends it. The first record stays. Does nothing without a launcher,
 * and never fails. */
void nd_failure_report(const nd_identity *identity, const nd_error *error);
/* Worker: from now on it handles the signals that ndlaunch forwards, instead of dying of them. */
void nd_failure_set_ready(const nd_identity *identity);
/* Worker: records the name of its device for the failure screen, such as "cuda:3" or "cpu". */
void nd_failure_set_device(const nd_identity *identity, const char *device);

#endif
