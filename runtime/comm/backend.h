// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_BACKEND_H
#define ND_COMM_BACKEND_H
/*
 * Code that the backends of this folder share: the making of a transport, the arithmetic of
 * reductions, and descriptions of a rank that others wait for.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/comm/comm.h"

/* A transport as its caller described it. `native` gets native_bytes zero bytes, which
 * nd_transport_close frees after the backend's close. */
nd_status nd_transport_create(const nd_comm_backend *backend, const nd_transport_options *options,
                              size_t native_bytes, nd_transport **out);

/*
 * reduce.c: the arithmetic of a reduction. Element i of dst is src[0][i] op src[1][i] op ... in
 * ascending order of the sources.
 *
 * F32, F64, I64 and I32 accumulate in the type itself, BF16 in F32 with one rounding at the end.
 * MAX of floating point gives NaN as soon as one operand is NaN. Element-wise, so the bits depend
 * neither on how a buffer was cut into slices nor on the width of the vector unit.
 *
 * dst may be one of the sources, but must not overlap any partly. n >= 1.
 */
void nd_reduce(nd_dtype dtype, nd_redop op, void *dst, const void *const *src, int n,
               int64_t count);

/* report.c describes a peer that this rank waits for: its last place on the progress page of this
 * host, and the state of its process. */

/* Text grows to the right; what does not fit is cut. Starts as zeros. */
typedef struct nd_report {
    char text[1024];
    size_t used;
} nd_report;

void nd_report_add(nd_report *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The peer's slot of this host's page; NULL where there is none. */
const nd_progress_slot *nd_report_slot(const nd_transport *transport, int rank);

/*
 * Adds a clause: "; rank 3 is in reduce_scatter of dp_shard_cp, operation 17, since 12.3 s (process
 * 71 is stopped ...)". `absent` describes a rank that is in no operation, such as "has not entered
 * it"; `process` is a text in parentheses with a blank before it, or "".
 */
void nd_report_rank(const nd_transport *transport, int rank, const char *absent,
                    const char *process, nd_report *to);

/* A number that processes share which have the same boot of a system and the same namespaces, named
 * as in /proc/self/ns, up to NULL: with "pid" they see each other. ND_ERR_IO. */
nd_status nd_report_host(const char *const *spaces, uint64_t *out);

/* " (process 71 is stopped by a signal or a debugger)". Returns whether it is: of this host. */
bool nd_report_process(int pid, char *text, size_t size);

#endif
