// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_PARALLEL_H
#define ND_CPU_PARALLEL_H
/*
 * The one way in which the elementwise ops use threads: independent items, cut into one contiguous
 * range per thread. How an op cuts its work into items depends on shapes only, so no result depends
 * on the number of threads.
 */
#include <stdint.h>

#include "runtime/device/device.h"

/* Does items [begin, end). */
typedef void (*nd_cpu_body)(void *arg, int64_t begin, int64_t end);

/*
 * Runs body over [0, items) on up to stream->device->threads threads. `work` is the number of
 * elements that one item touches: small jobs, and all jobs of a device with one thread, run in the
 * caller without entering OpenMP.
 */
void nd_cpu_parallel(nd_stream *stream, int64_t items, int64_t work, nd_cpu_body body, void *arg);

#endif
