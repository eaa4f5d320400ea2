// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEST_FORMS_H
#define ND_TEST_FORMS_H
/* Questions of tests to a backend about its forms of operands (nd_ops.form). */
#include "kernels/ops.h"

/* Bytes in which the backend keeps op(b) (k, n), stored in this dtype and multiplied in it, for
 * products of m rows; 0: it keeps none. */
static inline size_t kept_bytes(const nd_ops *ops, const nd_device *device, int64_t m, int64_t k,
                                int64_t n, bool b_transposed, nd_dtype b)
{
    const nd_form_need need = {.role = b_transposed ? ND_W_OF_Y : ND_W_OF_DX,
                               .rows = b_transposed ? n : k,
                               .columns = b_transposed ? k : n,
                               .others = m,
                               .stored = b,
                               .format = b,
                               .uses = 2};
    const nd_form_rule rule = ops->form(device, &need);
    return rule.maker == ND_FORM_BY_PRODUCT ? rule.bytes : 0;
}

/* Returns whether products cast BF16 to FP8 while they read it. */
static inline bool products_cast(const nd_ops *ops, const nd_device *device)
{
    const nd_form_need need = {.role = ND_X_OF_Y,
                               .rows = 16,
                               .columns = 16,
                               .others = 16,
                               .stored = ND_DTYPE_BF16,
                               .format = ND_DTYPE_F8_E4M3,
                               .uses = 1};
    return ops->form(device, &need).maker == ND_FORM_BY_PRODUCT;
}

/* Returns whether products read codes transposed where the stored ones do not lie along the summed
 * axis. Where products do not, no op makes such codes. */
static inline bool reads_transposed(const nd_ops *ops, const nd_device *device)
{
    const nd_form_need need = {.role = ND_W_OF_DX,
                               .rows = 16,
                               .columns = 16,
                               .others = 16,
                               .stored = ND_DTYPE_F8_E4M3,
                               .format = ND_DTYPE_F8_E4M3,
                               .uses = 1};
    return ops->form(device, &need).transposed;
}

#endif
