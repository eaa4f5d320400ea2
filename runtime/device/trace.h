// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_TRACE_H
#define ND_DEVICE_TRACE_H
/*
 * The time of a step by kind of work: host time around each call, which on the CPU is
 * the work itself. One trace per rank, written by its thread only; nothing is allocated.
 */
#include <stdint.h>

#include "runtime/base/clock.h"
#include "runtime/device/profile.h"

typedef enum nd_trace_kind {
    ND_TRACE_HEAD = 0, /* final projection and cross entropy */
    ND_TRACE_GEMM,
    ND_TRACE_ATTENTION,
    ND_TRACE_ELEMENTWISE, /* norms, RoPE, SwiGLU, embedding, BF16 copies */
    ND_TRACE_CAST,        /* FP8: amaxes, scales, codes */
    ND_TRACE_COMMUNICATION,
    ND_TRACE_OPTIMIZER,
    ND_TRACE_DATA, /* waiting for the loader */
    ND_TRACE_COUNT
} nd_trace_kind;

typedef struct nd_trace {
    int64_t ns[ND_TRACE_COUNT];
    int64_t calls[ND_TRACE_COUNT];
    nd_profile *profile; /* borrowed; NULL: single calls are not kept */
} nd_trace;

static inline const char *nd_trace_name(nd_trace_kind kind)
{
    static const char *const names[ND_TRACE_COUNT] = {
        "head", "gemm", "attention", "elementwise", "cast", "communication", "optimizer", "data",
    };
    return names[kind];
}

/* `name` is static: of the op, or the call as it stands in the source. */
static inline void nd_trace_add(nd_trace *trace, nd_trace_kind kind, const char *name,
                                int64_t begin_ns)
{
    int64_t now = nd_clock_ns();
    trace->ns[kind] += now - begin_ns;
    trace->calls[kind]++;
    if (trace->profile) {
        nd_profile_add(trace->profile, (int32_t)kind, name, begin_ns, now);
    }
}

#endif
