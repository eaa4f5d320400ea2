// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>

#include "runtime/tensor/tensor.h"

Test(tensor, bf16_values_survive_the_round_trip)
{
    for (uint32_t bits = 0; bits < 65536; bits++) {
        float x = nd_bf16_to_f32((nd_bf16)bits);
        nd_bf16 back = nd_bf16_from_f32(x);
        if (isnan(x)) {
            cr_assert(isnan(nd_bf16_to_f32(back)), "%04x", bits);
        } else {
            cr_assert_eq(back, bits, "%04x became %04x", bits, back);
        }
    }
}

Test(tensor, bf16_rounds_to_nearest_even)
{
    cr_assert_eq(nd_bf16_from_f32(1.0f + 0x1p-8f), 0x3f80, "a tie goes to the even value below");
    cr_assert_eq(nd_bf16_from_f32(1.0f + 0x3p-8f), 0x3f82, "and above");
    cr_assert_eq(nd_bf16_from_f32(1.0f + 0x1p-8f + 0x1p-20f), 0x3f81);
    cr_assert_eq(nd_bf16_from_f32(3.4e38f), 0x7f80, "beyond the largest: infinity");
    cr_assert(isnan(nd_bf16_to_f32(nd_bf16_from_f32(NAN))));
}

Test(tensor, views_of_rows_and_columns)
{
    float data[24];
    nd_tensor t = nd_tensor_2d(data, ND_DTYPE_F32, 4, 6);
    nd_tensor rows = nd_tensor_rows(t, 1, 2), columns = nd_tensor_columns(rows, 2, 3);
    cr_assert_eq((float *)rows.data, data + 6);
    cr_assert_eq((float *)columns.data, data + 8);
    cr_assert(nd_tensor_is_contiguous(t) && nd_tensor_is_contiguous(rows) &&
              !nd_tensor_is_contiguous(columns));
    cr_assert_eq(columns.stride[0], 6);
    cr_assert_eq(nd_tensor_count(columns), 6);
    cr_assert_eq(nd_tensor_bytes(nd_tensor_3d(NULL, ND_DTYPE_BF16, 2, 3, 4)), 48);
    const int64_t n = 131072, v = 128256; /* logits of a long sequence */
    nd_tensor logits = nd_tensor_4d(data, ND_DTYPE_F32, 1, 2, n, v);
    cr_assert_eq(nd_tensor_bytes(logits), (size_t)(8 * n * v));
    cr_assert_eq(logits.stride[0], 2 * n * v);
    nd_tensor last = nd_tensor_rows(nd_tensor_2d(data, ND_DTYPE_F32, n, v), n - 1, 1);
    cr_assert_eq((uintptr_t)last.data - (uintptr_t)data, (size_t)(4 * (n - 1) * v));
}
