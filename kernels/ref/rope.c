// SPDX-License-Identifier: Apache-2.0
#include "kernels/ref/ref.h"

nd_status nd_ref_rope(nd_stream *stream, nd_tensor out, nd_tensor x, nd_tensor positions,
                      nd_rope_view table, bool inverse)
{
    int64_t n = x.shape[0], heads = x.shape[1], half = x.shape[2] / 2;
    ND_ASSERT(nd_is_act(x) && x.axes == 3 && x.shape[2] % 2 == 0 && x.stride[2] == 1);
    ND_ASSERT(out.axes == 3 && out.dtype == x.dtype && out.shape[0] == n && out.stride[2] == 1);
    ND_ASSERT(out.shape[1] == heads && out.shape[2] == x.shape[2]);
    ND_ASSERT(nd_is_vector(positions, ND_DTYPE_I32, n));
    for (int64_t i = 0; i < n; i++) {
        int64_t position = ((const int32_t *)positions.data)[i];
        ND_ASSERT(position >= 0 && position < table.positions);
        for (int64_t h = 0; h < heads; h++) {
            int64_t from = i * x.stride[0] + h * x.stride[1];
            int64_t to = i * out.stride[0] + h * out.stride[1];
            for (int64_t d = 0; d < half; d++) {
                double cosine = table.cos[position * half + d];
                double sine = table.sin[position * half + d] * (inverse ? -1.0 : 1.0);
                double low = nd_ref_get(x, from + d), high = nd_ref_get(x, from + d + half);
                nd_ref_put(out, to + d, low * cosine - high * sine);
                nd_ref_put(out, to + d + half, high * cosine + low * sine);
            }
        }
    }
    return ND_OK;
}
