// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_CALL_LIMIT_H
#define ND_RDZV_CALL_LIMIT_H
/*
 * Bounds on calls of a library that waits for another process, with no limit that can be relied on.
 *
 * Nobody can stop such a call. A thread of its own watches the calls that are open; when one has
 * not returned in time it says so in the log and ends the process, with the code that the call came
 * with. Calls may be open in several threads at once.
 */
#include "runtime/base/status.h"

typedef struct nd_call_limit nd_call_limit;

nd_status nd_call_limit_create(nd_call_limit **out);
/* No call may be open; NULL is legal. */
void nd_call_limit_destroy(nd_call_limit *limit);

/*
 * `what` is borrowed until the call ends; the log says "<what> did not return within <seconds> s:
 * <why>". Returns what nd_call_limit_end takes.
 */
int nd_call_limit_begin(nd_call_limit *limit, const char *what, double seconds, const char *why,
                        int exit_code);
void nd_call_limit_end(nd_call_limit *limit, int call);

#endif
