// SPDX-License-Identifier: Apache-2.0
/* Only old_cudnn/old_cudnn.c is found as libcudnn.so.9: the sentence about a cuDNN that is too old,
 * with both versions; and what is opened beside cuDNN. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/attention_cudnn.h"

/* An old version is refused with the oldest that serves, and those with known bugs by name; the
 * next one is opened. */
Test(old_cudnn, versions_that_are_old_or_have_bugs_are_refused)
{
    static const struct {
        const char *number, *named, *wanted;
    } refused[] = {{"90100", "cuDNN here is version 90100 ", "90600 or newer"},
                   {"91000", "cuDNN here is version 9.10.0,", "9.10.2 or newer"},
                   {"91001", "cuDNN here is version 9.10.1,", "9.10.2 or newer"}};
    nd_device gpu = {.kind = ND_DEVICE_CUDA};
    nd_cudnn *cudnn = NULL;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        setenv("ND_FAKE_CUDNN_VERSION", refused[i].number, 1);
        cr_assert_eq(nd_cudnn_create(&gpu, 90, NULL, &cudnn), ND_ERR_CONFIG, "%s",
                     refused[i].number);
        const char *message = nd_error_last()->message;
        cr_expect(strstr(message, refused[i].named) && strstr(message, refused[i].wanted), "%s",
                  message);
    }
    setenv("ND_FAKE_CUDNN_VERSION", "91002", 1);
    cr_assert_eq(nd_cudnn_create(&gpu, 90, NULL, &cudnn), ND_OK, "%s", nd_error_last()->message);
    nd_cudnn_destroy(cudnn);
}

/* The program has the CUDA runtime inside, and runs where there is no libcudart.so: planning with a
 * handle, as on a GPU, comes to cuDNN's own functions without one. */
Test(old_cudnn, plans_are_made_without_a_shared_cuda_runtime)
{
    nd_device gpu = {.kind = ND_DEVICE_CUDA};
    nd_sdpa_form form;
    nd_cudnn *cudnn = NULL;
    size_t bytes = 0;
    setenv("ND_FAKE_CUDNN_VERSION", "91900", 1);
    setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", "libcudart-which-is-not-here.so", 1);
    cr_assert_eq(nd_cudnn_create(&gpu, 90, NULL, &cudnn), ND_OK, "%s", nd_error_last()->message);
    for (int backward = 0; backward < 2; backward++) {
        const nd_sdpa_strides row = {256 * 128, 128, 64}; /* two heads of 64, 256 rows */
        memset(&form, 0, sizeof form);
        form.batch = 1;
        form.sq = form.sk = 256;
        form.heads = form.kv_heads = 2;
        form.head_dim = 64;
        form.q = form.k = form.v = form.out = form.dout = form.dq = form.dk = form.dv = row;
        form.scale = 0.125f;
        form.mask = ND_SDPA_TOP_LEFT;
        form.backward = backward;
        cr_assert_neq(nd_cudnn_workspace(cudnn, &form, &bytes), ND_OK);
        const char *message = nd_error_last()->message;
        cr_expect(strstr(message, "cudnnBackend") && !strstr(message, "cudart"), "%s", message);
    }
    nd_cudnn_destroy(cudnn);
}
