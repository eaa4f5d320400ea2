// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_STATUS_H
#define ND_BASE_STATUS_H
/*
 * Status codes and the thread's error record.
 *
 * Every fallible function returns nd_status. The function that first recognises a fault fills the
 * calling thread's nd_error once with a whole sentence (what, where, how to fix it); callers pass
 * the status up with ND_TRY and may add a breadcrumb ("while reading model.path"). A status value
 * IS the documented exit code (docs/launch.md): main() ends the process with it, and so does a
 * thread that cannot wait for the trainer (trainer/worker, nccl_watch).
 */
#include <stdarg.h>
#include <stddef.h>

typedef enum nd_status {
    ND_OK = 0,
    ND_ERR_INTERNAL = 1, /* a bug of ours, or a library that failed without a better class */
    ND_ANSWER_NO = 1,    /* no failure: a command that answers a question with yes or no says no */
    ND_ERR_CONFIG =
        2, /* usage or configuration: flags, YAML, mesh, keys, versions, missing device */
    ND_ERR_DATA = 65,       /* bad data, model or checkpoint file */
    ND_ERR_NUMERIC = 70,    /* NaN or infinity by policy */
    ND_ERR_RESOURCE = 71,   /* memory of the host or a device, or threads, are used up */
    ND_ERR_CANTCREATE = 73, /* output cannot be written or would overwrite something */
    ND_ERR_IO = 74,         /* I/O: network, port in use, lost peer, failing read */
    ND_ERR_PREEMPTED = 75,  /* asked to stop by a signal; ended at a step boundary */
    ND_ERR_HANG = 124,      /* a deadline passed: stuck peer, rendezvous incomplete */
} nd_status;

enum { ND_ERROR_MESSAGE_MAX = 2048 };

/* The place of an error's reason: several ranks of a job often fail together, for one reason. */
typedef enum nd_failure_cause {
    ND_CAUSE_OWN = 0,   /* on this rank; a lost peer (74) or a deadline (124) may be elsewhere */
    ND_CAUSE_ELSEWHERE, /* on another rank, whose message explains more than this one */
    ND_CAUSE_LOCAL,     /* surely on this rank, whatever the status */
} nd_failure_cause;

typedef struct nd_error {
    nd_status status;
    nd_failure_cause cause;
    char message[ND_ERROR_MESSAGE_MAX]; /* one or a few whole sentences, no trailing newline */
} nd_error;

/* Fills the thread's record (replacing an older one) and returns `status`. */
nd_status nd_fail_as(nd_failure_cause cause, nd_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
#define nd_fail(status, ...) nd_fail_as(ND_CAUSE_OWN, status, __VA_ARGS__)
/* For an error whose reason another rank has and reports. */
#define nd_fail_elsewhere(status, ...) nd_fail_as(ND_CAUSE_ELSEWHERE, status, __VA_ARGS__)
/* For an I/O error (74) that no other rank has caused, such as a disk that fails. */
#define nd_fail_local(status, ...) nd_fail_as(ND_CAUSE_LOCAL, status, __VA_ARGS__)

/* Host memory ran out: fills the record with "out of host memory for <what>" and returns
 * ND_ERR_RESOURCE. Every failed allocation of host memory is reported through this. */
nd_status nd_fail_memory(const char *what, ...) __attribute__((format(printf, 1, 2)));

/*
 * A call that makes a thread, a mapping or a file of memory failed with this errno. Fills the
 * record with "<what> cannot be made: <reason>" and returns ND_ERR_RESOURCE where something is
 * used up: memory (ENOMEM, through nd_fail_memory), threads (EAGAIN), descriptors (EMFILE,
 * ENFILE). Else it returns ND_ERR_INTERNAL.
 */
nd_status nd_fail_system(int code, const char *what, ...) __attribute__((format(printf, 2, 3)));

/* Appends " (while ...)" to the record; returns `status` so that it can end a return statement. */
nd_status nd_fail_context(nd_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The calling thread's record; its status is ND_OK when nothing failed since nd_error_clear. */
const nd_error *nd_error_last(void);
void nd_error_clear(void);
/* Makes a copy of the thread's record, taken before calls whose errors do not count, the record
 * again. */
void nd_error_restore(const nd_error *error);

/* Short class name of a status: "configuration", "data", ... for log lines. */
const char *nd_status_name(nd_status status);

/* Returns from the calling function when `expr` is not ND_OK. */
#define ND_TRY(expr)                                                                               \
    do {                                                                                           \
        nd_status nd_try_status_ = (expr);                                                         \
        if (nd_try_status_ != ND_OK) {                                                             \
            return nd_try_status_;                                                                 \
        }                                                                                          \
    } while (0)

/* Like ND_TRY, but for functions with one cleanup label: needs `nd_status status` in scope. */
#define ND_TRY_OUT(expr)                                                                           \
    do {                                                                                           \
        status = (expr);                                                                           \
        if (status != ND_OK) {                                                                     \
            goto out;                                                                              \
        }                                                                                          \
    } while (0)

/* A programmer's invariant: prints file, line and expression, then aborts. Never for users'
 * mistakes. */
#define ND_ASSERT(cond) ((cond) ? (void)0 : nd_assert_failed(#cond, __FILE__, __LINE__))
__attribute__((noreturn)) void nd_assert_failed(const char *expression, const char *file, int line);

/* Allocation outside of a training step. Fails with ND_ERR_RESOURCE and the size. */
nd_status nd_alloc(size_t count, size_t size,
                   void **out); /* zeroed; *out owned by the caller, free() it */
#define ND_ALLOC(count, out) nd_alloc((size_t)(count), sizeof(**(out)), (void **)(out))

#endif
