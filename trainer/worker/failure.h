// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WORKER_FAILURE_H
#define ND_WORKER_FAILURE_H
/*
 * Which rank holds up a job that no ndlaunch watches. One that is stuck makes others wait, who make
 * others wait: each names the rank that it waits for, and only the stuck one says nothing. They
 * meet in the store.
 */
#include "trainer/worker/worker.h"

/*
 * A rank whose deadline has passed calls it. *first: it is the first one, to the store's knowledge;
 * `text` then tells which ranks have not called within two seconds. A store that does not answer
 * counts as rank 0's silence.
 */
void nd_hang_report(const nd_worker *worker, bool *first, char *text, size_t capacity);

#endif
