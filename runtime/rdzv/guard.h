// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_GUARD_H
#define ND_RDZV_GUARD_H
/*
 * No orphans: a worker started by ndlaunch dies with it, also when ndlaunch is killed by SIGKILL.
 * To be called first thing in main(), by the main thread. Without ndlaunch it does nothing.
 */
void nd_worker_guard(void);

#endif
