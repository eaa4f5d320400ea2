// SPDX-License-Identifier: Apache-2.0
/* Tests of the inside of oneDNN, which programs of other backends do not contain. */
#include <criterion/criterion.h>
#include <string.h>

#include "kernels/cpu/dnnl_matmul.h"
#include "tests/ops/conformance.h"

/* Products of equal extents that differ in one other property have each their own plan: they give
 * what the first product of an engine gives. */
Test(onednn, a_plan_is_kept_for_its_strides_and_orders)
{
    enum { N = 4, ROOM = 64 };
    nd_dnnl_product all[7];
    float a[ROOM], b[ROOM];
    nd_dnnl *dnnl, *other;
    for (int i = 0; i < 7; i++) {
        all[i] = (nd_dnnl_product){.m = N, .n = N, .k = N, .lda = N, .ldb = N, .ldc = N};
        all[i].in = all[i].out = ND_DTYPE_F32;
    }
    for (int i = 0; i < ROOM; i++) {
        a[i] = (float)(i * i % 11);
        b[i] = (float)(i * 5 % 13);
    }
    all[1].lda = all[2].ldb = all[3].ldc = N + 3;
    all[4].a_transposed = all[5].b_transposed = all[6].accumulate = true;
    ND_OK_OR_FAIL(nd_dnnl_create(&dnnl));
    for (int i = 0; i < 7; i++) {
        float c[2][ROOM] = {{1}, {1}};
        ND_OK_OR_FAIL(nd_dnnl_create(&other));
        ND_OK_OR_FAIL(nd_dnnl_matmul(dnnl, &all[i], c[0], a, b));
        ND_OK_OR_FAIL(nd_dnnl_matmul(other, &all[i], c[1], a, b));
        cr_expect_eq(memcmp(c[0], c[1], sizeof c[0]), 0, "product %d", i);
        nd_dnnl_destroy(other);
    }
    nd_dnnl_destroy(dnnl);
}

#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__ /* whose malloc is their own */
static _Thread_local int until_failure; /* allocations of oneDNN's too; 0: none fails */

extern void *__libc_malloc(size_t size);
void *malloc(size_t size)
{
    return until_failure > 0 && --until_failure == 0 ? NULL : __libc_malloc(size);
}

/* That is an exception of C++ inside oneDNN, which nobody catches, and so an abort. */
Test(onednn, memory_that_runs_out_inside_is_told)
{
    static float a[64 * 64], b[64 * 64], c[64 * 64];
    const nd_dnnl_product p = {.m = 64,
                               .n = 64,
                               .k = 64,
                               .lda = 64,
                               .ldb = 64,
                               .ldc = 64,
                               .in = ND_DTYPE_F32,
                               .out = ND_DTYPE_F32};
    nd_dnnl *dnnl;
    ND_OK_OR_FAIL(nd_dnnl_create(&dnnl));
    until_failure = 10;
    const nd_status status = nd_dnnl_matmul(dnnl, &p, c, a, b);
    until_failure = 0;
    cr_expect_eq(status, ND_ERR_RESOURCE);
    cr_expect(
        strstr(nd_error_last()->message, "out of host memory for oneDNN, which aborted at a f32"),
        "%s", nd_error_last()->message);
    cr_expect_neq(nd_dnnl_matmul(dnnl, &p, c, a, b), ND_OK);
    nd_dnnl_destroy(dnnl);
}
#endif
