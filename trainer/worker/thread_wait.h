// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WORKER_THREAD_WAIT_H
#define ND_WORKER_THREAD_WAIT_H

/*
 * How long a worker's threads spin before they sleep: about what sleeping and waking costs. The
 * OpenMP library would spin for milliseconds, in which a thread of this worker that has to wait for
 * its CPU makes the others burn theirs: a busy machine becomes many times slower. It reads its
 * settings before main, so the program begins again with them, once. A setting of the user
 * (GOMP_SPINCOUNT, OMP_WAIT_POLICY) stays. Returns when there is nothing to do or the program
 * cannot begin again.
 */
void nd_thread_wait_shorten(char **argv);

#endif
