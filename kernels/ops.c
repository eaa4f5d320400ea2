// SPDX-License-Identifier: Apache-2.0
#include "kernels/ops.h"

nd_status nd_ops_check(const nd_ops *ops)
{
#define CHECK(op, ...)                                                                             \
    if (!ops->op) {                                                                                \
        return nd_fail(ND_ERR_INTERNAL,                                                            \
                       "the \"%s\" backend does not implement the op \"" #op "\"", ops->name);     \
    }
    ND_EACH_OP(CHECK, )
    ND_EACH_QUERY(CHECK, )
#undef CHECK
    return ND_OK;
}
