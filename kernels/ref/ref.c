// SPDX-License-Identifier: Apache-2.0
#include "kernels/ref/ref.h"

static const nd_ops ref_ops = {.name = "ref",
                               .optimizer_measures = true,
                               .limits = {.tokens = INT32_MAX},
                               ND_EACH_OP(ND_OP_ENTRY, nd_ref_)
                                   ND_EACH_QUERY(ND_QUERY_ENTRY, nd_ref_)};

size_t nd_ref_workspace(const nd_device *device)
{
    return 0;
}

nd_status nd_ops_ref(const nd_ops **out)
{
    ND_TRY(nd_ops_check(&ref_ops));
    *out = &ref_ops;
    return ND_OK;
}
