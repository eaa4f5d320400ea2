// SPDX-License-Identifier: Apache-2.0
/* What a user reads when a library is older than needed: both versions. (NCCL is in test_nccl.c,
 * cuDNN in test_old_cudnn.c.) */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/device/cuda.h"

Test(libraries, an_old_cublaslt_is_refused_with_both_versions)
{
    nd_cuda_options options = {.local_workers = 1};
    nd_device *device = NULL;
    const nd_ops *ops = NULL;
    setenv("ND_DOUBLE_CUBLASLT", "120205", 1);
    cr_assert_eq(nd_device_open_cuda(&options, &device), ND_OK);
    cr_assert_eq(nd_ops_cuda(device, false, &ops), ND_ERR_CONFIG);
    const char *message = nd_error_last()->message;
    cr_expect(strstr(message, "cuBLASLt") && strstr(message, "12.2.5") && strstr(message, "12.3.0"),
              "%s", message);
    nd_device_close(device);
}
