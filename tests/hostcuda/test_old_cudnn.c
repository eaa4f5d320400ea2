// SPDX-License-Identifier: Apache-2.0
/* The sentence about a cuDNN that is too old, with both versions: only old_cudnn/old_cudnn.c is
 * found as libcudnn.so.9. */
#include <criterion/criterion.h>
#include <string.h>

#include "kernels/cuda/attention_cudnn.h"

Test(old_cudnn, is_refused_with_both_versions)
{
    nd_cudnn *cudnn = NULL;
    cr_assert_eq(nd_cudnn_create(NULL, 90, "", &cudnn), ND_ERR_CONFIG, "%s",
                 nd_error_last()->message);
    const char *message = nd_error_last()->message;
    cr_expect(strstr(message, "cuDNN") && strstr(message, "90100") && strstr(message, "90600"),
              "%s", message);
}
