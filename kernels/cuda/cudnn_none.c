// SPDX-License-Identifier: Apache-2.0
/* The functions of attention_cudnn.h in a program that was built without the headers of
 * cudnn-frontend. */
#include "kernels/cuda/attention_cudnn.h"

static nd_status absent(void)
{
    return nd_fail(ND_ERR_CONFIG,
                   "device cuda needs cuDNN attention, and this program was built without the "
                   "headers of cudnn-frontend; run scripts/setup --cuda and scripts/build --cuda");
}

nd_status nd_cudnn_create(nd_device *device, int capability, const char *description,
                          nd_cudnn **out)
{
    return absent();
}

bool nd_cudnn_is_built(void)
{
    return false;
}

void nd_cudnn_destroy(nd_cudnn *cudnn)
{
}

size_t nd_cudnn_version(const nd_cudnn *cudnn)
{
    return 0;
}

nd_status nd_cudnn_workspace(nd_cudnn *cudnn, const nd_sdpa_form *form, size_t *out)
{
    return absent();
}

int64_t nd_cudnn_plan_count(const nd_cudnn *cudnn)
{
    return 0;
}

nd_status nd_cudnn_run(nd_cudnn *cudnn, nd_stream *stream, const nd_sdpa_form *form,
                       const nd_sdpa_tensors *tensors)
{
    return absent();
}
