// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_REPORT_H
#define ND_COMM_REPORT_H
/*
 * What every backend says of a peer that it waits for: where the progress page of this host saw it
 * last, and the state of its process.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/comm/comm.h"

/* Text grows to the right; what does not fit is cut. Starts as zeros. */
typedef struct nd_report {
    char text[1024];
    size_t used;
} nd_report;

void nd_report_add(nd_report *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The peer's slot of this host's page; NULL where there is none. */
const nd_progress_slot *nd_report_slot(const nd_transport *transport, int rank);

/*
 * Adds a clause: "; rank 3 is in reduce_scatter of dp_shard_cp, operation 17, since 12.3 s
 * (process 71 is stopped ...)". `absent` is what a rank does that is in no operation, such as "has
 * not entered it"; `process` is a text in parentheses with a blank before it, or "".
 */
void nd_report_rank(const nd_transport *transport, int rank, const char *absent,
                    const char *process, nd_report *to);

/* Hosts with the same number see each other's processes: same boot, same PID namespace. */
uint64_t nd_report_host(void);

/* Of a process of this host: stopped by a signal or a debugger. */
bool nd_report_is_stopped(int pid);
/* " (process 71 is stopped by a signal or a debugger)" */
void nd_report_process(int pid, char *text, size_t size);

#endif
