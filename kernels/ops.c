// SPDX-License-Identifier: Apache-2.0
#include "kernels/ops.h"

#include <stddef.h>

#include "kernels/ops_list.h"

/* One pointer per op from the first on: an op added to the struct must be added to the
 * list. */
#define ND_COUNT_OP(op) +1
_Static_assert(sizeof(nd_ops) - offsetof(nd_ops, matmul) ==
                   (0 ND_EACH_OP(ND_COUNT_OP)) * sizeof(void (*)(void)),
               "ND_EACH_OP lists every op of nd_ops");

nd_status nd_ops_check(const nd_ops *ops)
{
#define ND_CHECK_OP(op)                                                                            \
    if (!ops->op) {                                                                                \
        return nd_fail(ND_ERR_INTERNAL,                                                            \
                       "the \"%s\" backend does not implement the op \"" #op "\"", ops->name);     \
    }
    ND_EACH_OP(ND_CHECK_OP)
#undef ND_CHECK_OP
    return ND_OK;
}
