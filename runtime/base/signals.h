// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_SIGNALS_H
#define ND_BASE_SIGNALS_H

/*
 * Unblocks all signals for the calling thread, the first of its process. A program inherits what
 * its parent had blocked: an end of a child would then not be heard of, nor a request to stop.
 * What is ignored stays ignored, as under nohup.
 */
void nd_signals_unblock(void);

#endif
