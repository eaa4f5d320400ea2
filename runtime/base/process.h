// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_PROCESS_H
#define ND_BASE_PROCESS_H
/* The properties that a process gets from its parent and hands on to its children: limits, blocked
 * signals, standard streams. */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"

/*
 * Raises the number of files that may be open to what the user is allowed (1,024 is a usual
 * default, too few for a thousand connections), and returns it.
 */
int64_t nd_limits_raise_files(void);

/*
 * A limit of this process's memory: of address space (ulimit -v) or of data (ulimit -d), the one
 * that leaves less. `left` is what it leaves beyond what the process has now.
 */
typedef struct nd_memory_limit {
    const char *option; /* "ulimit -v", "ulimit -d"; NULL: there is none, or it cannot be read */
    int64_t bytes, left;
} nd_memory_limit;
nd_memory_limit nd_limits_read_memory(void);
/* ND_ERR_RESOURCE with the numbers when less than `more` bytes are left. `who` needs them. */
nd_status nd_limits_check_memory(int64_t more, const char *who);

/* ND_ERR_RESOURCE when the stack of the first thread may not grow to what the program needs
 * (ulimit -s). To be called before anything else: a stack that is too small ends in SIGSEGV. */
nd_status nd_limits_check_stack(void);

/*
 * Unblocks all signals for the calling thread, the first of its process. A program inherits which
 * signals its parent had blocked: it would then miss the end of a child, or a request to stop. An
 * ignored signal stays ignored, as under nohup.
 */
void nd_signals_unblock(void);

/*
 * Opens those of the descriptors 0 to 2 that are closed on /dev/null. Otherwise the next file or
 * socket of the program would get such a number, and its messages would go there.
 */
void nd_streams_open(void);

/* Writes out what was printed on standard output. ND_ERR_CANTCREATE when any of it was lost, for
 * example because the disk is full. */
nd_status nd_process_flush_output(void);

/* The aborts of a guarded call that are caught: any, or that of an exception of C++ which nobody
 * catches. All others end the process, as they would without a guard. */
typedef enum nd_abort_kind { ND_ABORT_ANY, ND_ABORT_EXCEPTION } nd_abort_kind;

/* Calls a function of a library that may abort the process; it holds nothing of ours. False: it has
 * aborted, and what it held is lost, so the library must not be called again. From its first
 * guarded call on, a thread does not block SIGABRT. */
bool nd_abort_guard(nd_abort_kind kind, void (*call)(void *context), void *context);

#endif
