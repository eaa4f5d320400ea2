// SPDX-License-Identifier: Apache-2.0
#include "tests/hostcuda/kernel_table.h"

#include "kernels/cuda/kernels.h"
#include "kernels/ref/ref.h"

static _Alignas(256) char scratch[ND_CUDA_SCRATCH];

#define LAUNCHED(op, prefix)                                                                       \
    static nd_status prefix##op(nd_stream *stream, const nd_##op##_args *args)                     \
    {                                                                                              \
        int error = nd_cuda_##op(stream->native, args, scratch);                                   \
        return error ? nd_fail(ND_ERR_INTERNAL, "a launcher returned %d", error) : ND_OK;          \
    }
ND_EACH_KERNEL_OP(LAUNCHED, launched_)

/* As on a GPU, whose products read transposed codes; the reference reads both. */
static nd_form_rule form(const nd_device *device, const nd_form_need *need)
{
    nd_form_rule rule = nd_ref_form(device, need);
    rule.transposed = need->role == ND_W_OF_DX;
    return rule;
}

const nd_ops *nd_ops_kernels(void)
{
    static nd_ops kernels = {.name = "kernels",
                             ND_EACH_PREPARED_OP(ND_OP_ENTRY, nd_ref_)
                                 ND_EACH_KERNEL_OP(ND_OP_ENTRY, launched_)
                                     ND_EACH_QUERY(ND_QUERY_ENTRY, nd_ref_)};
    kernels.form = form;
    return &kernels;
}
