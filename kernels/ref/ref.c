// SPDX-License-Identifier: Apache-2.0
#include "kernels/ref/ref.h"

#include "kernels/ops_list.h"

#define ENTRY(op) .op = nd_ref_##op,

static const nd_ops ref_ops = {.name = "ref", ND_EACH_OP(ENTRY)};

nd_status nd_ops_ref(const nd_ops **out)
{
    ND_TRY(nd_ops_check(&ref_ops));
    *out = &ref_ops;
    return ND_OK;
}
