// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_THREAD_H
#define ND_BASE_THREAD_H
/* Threads that serve beside the one that computes: they read ahead, write files, watch clocks. */
#include <pthread.h>

/* Bytes of their stacks, whatever ulimit -s says: the room counts against ulimit -v as soon as the
 * thread starts. What they run keeps larger things elsewhere. */
enum { ND_THREAD_STACK_BYTES = 1 << 20 };

/*
 * Starts a thread that runs `run(context)` with every signal blocked, since signals are for the
 * process's first thread. Returns 0, or the errno of pthread_create; the caller joins the thread.
 */
int nd_thread_start(void *(*run)(void *), void *context, pthread_t *thread);

#endif
