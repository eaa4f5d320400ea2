// SPDX-License-Identifier: Apache-2.0
#include "kernels/cached.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/context.h"

size_t nd_cpu_attention_scratch(const nd_device *device, const nd_attention *a, nd_dtype act,
                                bool backward)
{
    if (backward) {
        return nd_attention_bwd_scratch(device->threads, a);
    }
    const size_t tiles = nd_attention_fwd_scratch(device->threads, a);
    return a->sq == 1 ? nd_max_bytes(tiles, nd_attention_one_scratch(device->threads, a)) : tiles;
}

/* What is enough for any segment: no extent of one is larger, but a shorter one may be cut into
 * other tasks. */
size_t nd_cpu_attention_cached_scratch(const nd_device *device, const nd_attention *most,
                                       nd_dtype act)
{
    const nd_attention of_one = nd_attention_of_segment(most, 1, nd_max(most->sk, 1));
    size_t bytes = nd_attention_one_scratch(device->threads, &of_one);
    for (int64_t rows = 1;; rows = nd_min(2 * rows, most->sq)) {
        const int64_t before = nd_max(most->sk - rows, 0), own = nd_min(rows, most->sk);
        const nd_attention a = nd_attention_of_segment(most, own, before + own);
        bytes = nd_max_bytes(bytes, nd_attention_fwd_scratch(device->threads, &a));
        if (rows == most->sq) {
            return nd_cached_lse_bytes(most, most->sq) + bytes;
        }
    }
}

nd_status nd_cpu_attention_cached(nd_stream *stream, const nd_attention_cached_args *x)
{
    const nd_cached_ops ops = {nd_cpu_cast, nd_cpu_attention_fwd};
    return nd_attention_cached_by(stream, &ops, x);
}

bool nd_cpu_attention_uses_delta(const nd_device *device, const nd_attention *a, nd_dtype act)
{
    return true;
}

static const nd_ops cpu_ops = {.name = "cpu",
                               .limits = {.hidden = ND_CPU_NORM_COLUMNS, .tokens = INT32_MAX},
                               .optimizer_measures = true,
                               ND_EACH_OP(ND_OP_ENTRY, nd_cpu_)
                                   ND_EACH_QUERY(ND_QUERY_ENTRY, nd_cpu_)};

nd_status nd_ops_cpu(nd_device *device, const nd_ops **out)
{
    ND_TRY(nd_ops_check(&cpu_ops));
    ND_TRY(nd_cpu_context_create(device));
    *out = &cpu_ops;
    return ND_OK;
}
