// SPDX-License-Identifier: Apache-2.0
/* Fast accumulation is what the caller of matmul_fp8 says, in each way that a product is made. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "tests/hostcuda/doubles/double.h"
#include "tests/ops/conformance.h"

enum { M = 32, N = 48, K = 64, BYTES = 1 << 16, CODES = 4096, SCRATCH = 3 * BYTES };

/* At `at`: scales of 1, then codes of 0, along the summed axis. */
static nd_matrix operand(char *at, int64_t lines, bool as_stored, nd_dtype format, bool vector)
{
    nd_matrix x = {.scale = (float *)at, .inverse = (float *)at};
    nd_tensor codes = nd_tensor_2d(at + CODES, format, lines, K);
    x.granularity = !vector ? ND_PER_TENSOR : as_stored ? ND_PER_ROW : ND_PER_COLUMN;
    x.stored = codes;
    x.transposed = !as_stored;
    return x;
}

/* One product of each form: 6 bits of the layouts, of vectors of scales, beta and dtype. */
static void multiply(nd_side *side, char *memory, int form, bool fast)
{
    bool at = form & 1, bt = form & 2, f32 = form & 32;
    nd_matrix a = operand(memory, M, !at, at ? ND_DTYPE_F8_E5M2 : ND_DTYPE_F8_E4M3, form & 4);
    nd_matrix b = operand(memory + BYTES, N, bt, ND_DTYPE_F8_E4M3, form & 8);
    nd_tensor c = nd_tensor_2d(memory + 2 * BYTES, f32 ? ND_DTYPE_F32 : ND_DTYPE_BF16, M, N);
    nd_double_counts before = nd_double_counts_get();
    ND_RUN(side, product, .c = c, .a = a, .a_transposed = at, .b = b, .b_transposed = bt,
           .beta = form & 16 ? 1.0f : 0.0f, .fast_accumulation = fast, .scratch = memory + SCRATCH);
    ND_OK_OR_FAIL(nd_stream_sync(&side->stream));
    nd_double_counts after = nd_double_counts_get();
    long ran[2] = {0};
    for (int kind = 0; kind < ND_DOUBLE_FP8_KINDS; kind++) {
        long count = after.fp8_products[kind] - before.fp8_products[kind];
        bool gradient = kind & ND_DOUBLE_B_E5M2;
        cr_expect(count == 0 || (gradient == at && !(kind & ND_DOUBLE_A_E5M2)), "form %d", form);
        ran[kind & ND_DOUBLE_FAST ? 1 : 0] += count;
    }
    cr_expect(ran[fast] == 1 && ran[!fast] == 0, "form %d: asked for %s, %ld fast and %ld not",
              form, fast ? "fast" : "not fast", ran[1], ran[0]);
}

static void multiply_all(void)
{
    nd_side side;
    char *memory = NULL;
    static _Alignas(float) char initial[2 * BYTES];
    for (int i = 0; i < N; i++) {
        ((float *)initial)[i] = ((float *)(initial + BYTES))[i] = 1.0f;
    }
    nd_side_open_cuda(&side, true, true);
    size_t scratch = side.ops->product_scratch(side.device, M, N, K, ND_DTYPE_BF16);
    ND_OK_OR_FAIL(nd_device_alloc(side.device, SCRATCH + scratch, (void **)&memory));
    ND_OK_OR_FAIL(nd_copy(&side.stream, memory, initial, sizeof initial));
    for (int form = 0; form < 64; form++) {
        multiply(&side, memory, form, false);
        multiply(&side, memory, form, true);
    }
    nd_device_free(side.device, memory, SCRATCH + scratch);
    nd_side_close(&side);
}

/* A result whose sums have no room in the scratch at once is made in parts of rows: each row of
 * ones has its own scale. */
Test(lt_fast, parts_of_a_product_have_the_scales_of_their_rows)
{
    enum { ROWS = 80, COLUMNS = 1 << 18, INNER = 16, ONE = 0x38 /* E4M3 */ };
    const size_t codes = (ROWS + COLUMNS) * INNER, result = (size_t)ROWS * COLUMNS * 2;
    nd_side side;
    char *memory = NULL, *host = malloc(codes);
    float scales[ROWS];
    nd_side_open_cuda(&side, true, true);
    const size_t scratch =
        side.ops->product_scratch(side.device, ROWS, COLUMNS, INNER, ND_DTYPE_BF16);
    ND_OK_OR_FAIL(nd_device_alloc(side.device, CODES + codes + result + scratch, (void **)&memory));
    char *a = memory + CODES, *b = a + ROWS * INNER, *c = b + (size_t)COLUMNS * INNER;
    for (int i = 0; i < ROWS; i++) {
        scales[i] = (float)(i + 1);
    }
    memset(host, ONE, codes);
    ND_OK_OR_FAIL(nd_copy(&side.stream, memory, scales, sizeof scales));
    ND_OK_OR_FAIL(nd_copy(&side.stream, a, host, codes));
    nd_matrix x = {.stored = nd_tensor_2d(a, ND_DTYPE_F8_E4M3, ROWS, INNER),
                   .inverse = (float *)(void *)memory,
                   .granularity = ND_PER_ROW};
    nd_matrix y = {.stored = nd_tensor_2d(b, ND_DTYPE_F8_E4M3, COLUMNS, INNER),
                   .inverse = (float *)(void *)memory};
    ND_RUN(&side, product, .c = nd_tensor_2d(c, ND_DTYPE_BF16, ROWS, COLUMNS), .a = x, .b = y,
           .b_transposed = true, .scratch = c + result);
    for (int i = 0; i < ROWS; i++) {
        nd_bf16 ends[2];
        char *row = c + (size_t)i * COLUMNS * 2;
        ND_OK_OR_FAIL(nd_copy(&side.stream, &ends[0], row, 2));
        ND_OK_OR_FAIL(nd_copy(&side.stream, &ends[1], row + (COLUMNS - 1) * 2, 2));
        ND_OK_OR_FAIL(nd_stream_sync(&side.stream));
        cr_expect(nd_bf16_to_f32(ends[0]) == INNER * scales[i] && ends[0] == ends[1],
                  "row %d begins with %g, not %g", i, (double)nd_bf16_to_f32(ends[0]),
                  (double)(INNER * scales[i]));
    }
    free(host);
    nd_device_free(side.device, memory, CODES + codes + result + scratch);
    nd_side_close(&side);
}

Test(lt_fast, the_library_is_told_what_the_caller_says)
{
    multiply_all();
}

/* Vectors of scales by our kernel, after a product of the codes. */
Test(lt_fast, so_is_an_older_library)
{
    setenv("ND_DOUBLE_CUBLASLT", "120800", 1);
    multiply_all();
}

/* A library that refuses such vectors when it is asked for an algorithm, or only when it is to make
 * the product, for all types of the result or for one. */
Test(lt_fast, so_is_one_that_refuses_vectors_of_scales)
{
    setenv("ND_DOUBLE_LT_VECTORS", "heuristic", 1);
    multiply_all();
    setenv("ND_DOUBLE_LT_VECTORS", "product", 1);
    multiply_all();
    setenv("ND_DOUBLE_LT_VECTORS", "product-f32", 1);
    multiply_all();
}
