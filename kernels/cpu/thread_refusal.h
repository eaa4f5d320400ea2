// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_THREAD_REFUSAL_H
#define ND_CPU_THREAD_REFUSAL_H
#include <stddef.h>

#include "runtime/base/status.h"

/* Fails with ND_ERR_RESOURCE and says which limit forbids a worker of `wanted` threads to have more
 * than `most`. `code` is what pthread_create returned for a stack of `stack_bytes`. The threads
 * that did start still run, since the limits are looked at as they are now. */
nd_status nd_cpu_refuse_threads(int wanted, int most, int code, size_t stack_bytes);

#endif
