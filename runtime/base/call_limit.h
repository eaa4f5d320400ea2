// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_CALL_LIMIT_H
#define ND_BASE_CALL_LIMIT_H
/*
 * Time limits on calls of a library that waits for another process and has no reliable limit of its
 * own.
 *
 * Such a call cannot be stopped. A thread watches the open calls; when one has not returned in
 * time, the thread logs that and ends the process with the exit code given for the call. Calls may
 * be open in several threads at once.
 */
#include "runtime/base/status.h"

typedef struct nd_call_limit nd_call_limit;

nd_status nd_call_limit_create(nd_call_limit **out);
/* No call may be open; NULL is legal. */
void nd_call_limit_destroy(nd_call_limit *limit);

/*
 * `what` is borrowed until the call ends; the log says "<what> did not return within <seconds> s:
 * <why>". Returns the number to give to nd_call_limit_end.
 */
int nd_call_limit_begin(nd_call_limit *limit, const char *what, double seconds, const char *why,
                        int exit_code);
void nd_call_limit_end(nd_call_limit *limit, int call);

#endif
