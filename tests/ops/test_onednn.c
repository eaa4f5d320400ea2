// SPDX-License-Identifier: Apache-2.0
/* What happens inside of oneDNN, of which other backends' programs have nothing. */
#include <criterion/criterion.h>
#include <string.h>

#include "kernels/cpu/dnnl_matmul.h"
#include "tests/ops/conformance.h"

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
