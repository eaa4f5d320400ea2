// SPDX-License-Identifier: Apache-2.0
#include "kernels/ref/ref.h"

/* Element (i, j) of op(t). */
static double element(nd_tensor t, bool transposed, int64_t i, int64_t j)
{
    return transposed ? nd_ref_get(t, j * t.stride[0] + i) : nd_ref_get(t, i * t.stride[0] + j);
}

nd_status nd_ref_matmul(nd_stream *stream, nd_tensor c, nd_tensor a, bool a_transposed, nd_tensor b,
                        bool b_transposed, float beta)
{
    int64_t m = c.shape[0], n = c.shape[1], k = a_transposed ? a.shape[0] : a.shape[1];
    ND_ASSERT(nd_is_act(a) && nd_is_act(b) && nd_is_act(c) && (beta == 0.0f || beta == 1.0f));
    ND_ASSERT(nd_is_2d(c, m, n));
    ND_ASSERT(a_transposed ? nd_is_2d(a, k, m) : nd_is_2d(a, m, k));
    ND_ASSERT(b_transposed ? nd_is_2d(b, n, k) : nd_is_2d(b, k, n));
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            int64_t at = i * c.stride[0] + j;
            double sum = beta == 0.0f ? 0.0 : nd_ref_get(c, at);
            for (int64_t p = 0; p < k; p++) {
                sum += element(a, a_transposed, i, p) * element(b, b_transposed, p, j);
            }
            nd_ref_put(c, at, sum);
        }
    }
    return ND_OK;
}
