// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/trace.h"

const char *nd_trace_name(nd_trace_kind kind)
{
    static const char *const names[ND_TRACE_COUNT] = {
        "head", "gemm", "attention", "elementwise", "cast", "communication", "optimizer", "data",
    };
    return names[kind];
}
