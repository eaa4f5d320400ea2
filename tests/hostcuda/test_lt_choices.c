// SPDX-License-Identifier: Apache-2.0
/* Choices of algorithms for products: the fastest is kept, and installed elsewhere it gives the
 * same bits. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/device/cuda.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/ops/conformance.h"

enum { M = 24, N = 40, K = 72, BYTES = 1 << 16 };

static nd_side s;
static char *memory; /* of three matrices */

static void open_side(void)
{
    nd_side_open_cuda(&s, true, true);
    ND_OK_OR_FAIL(nd_device_alloc(s.device, 3 * BYTES, (void **)&memory));
}

static void close_side(void)
{
    nd_device_free(s.device, memory, 3 * BYTES);
    nd_side_close(&s);
}

/* c = a b^T in F32 of numbers whose sum depends on its order. */
static void multiply(float out[M * N])
{
    static float values[M * K + N * K];
    for (int i = 0; i < M * K + N * K; i++) {
        values[i] = 1.0f / (float)(i % 97 + 3);
    }
    nd_tensor a = nd_tensor_2d(memory, ND_DTYPE_F32, M, K);
    nd_tensor b = nd_tensor_2d(memory + BYTES, ND_DTYPE_F32, N, K);
    nd_tensor c = nd_tensor_2d(memory + 2 * BYTES, ND_DTYPE_F32, M, N);
    cr_assert_eq(nd_copy(&s.stream, a.data, values, sizeof(float) * M * K), ND_OK);
    cr_assert_eq(nd_copy(&s.stream, b.data, values + M * K, sizeof(float) * N * K), ND_OK);
    ND_RUN(&s, product, .c = c, .a = nd_rows(a), .b = nd_rows(b), .b_transposed = true);
    cr_assert_eq(nd_copy(&s.stream, out, c.data, sizeof(float) * M * N), ND_OK);
    cr_assert_eq(nd_stream_sync(&s.stream), ND_OK);
}

/* Its form is another one, so it needs a choice of its own. */
static nd_status small_product(void)
{
    nd_tensor a = nd_tensor_2d(memory, ND_DTYPE_F32, 16, 16);
    nd_tensor c = nd_tensor_2d(memory + BYTES, ND_DTYPE_F32, 16, 16);
    return ND_CALL(s.ops, &s.stream, product, .c = c, .a = nd_rows(a), .b = nd_rows(a));
}

static nd_lt_choice choices[ND_LT_PLANS];
static float first[M * N], tuned[M * N], again[M * N];

/* A product by an algorithm that is chosen within so many seconds. */
static void tune_one(double seconds)
{
    s.ops->tuner->tune(s.device, ND_LT_CANDIDATES, seconds);
    multiply(tuned);
    cr_assert_eq(s.ops->tuner->choices(s.device, choices), 1);
}

Test(lt_choices, the_fastest_is_kept_and_can_be_installed_elsewhere)
{
    setenv("ND_DOUBLE_LT_TIMES", "3,1,2", 1);
    open_side();
    multiply(first); /* the library's first algorithm */
    cr_assert_eq(s.ops->tuner->install(s.device, NULL, 0), ND_OK);
    tune_one(60.0);
    cr_expect_eq(choices[0].candidates, 3);
    cr_expect_eq(choices[0].picked, 1);
    cr_expect_eq(choices[0].workspace, 0, "the double's second algorithm needs none");
    cr_expect(choices[0].seconds > 0.9 && choices[0].seconds < 1.9);
    cr_expect(choices[0].first_seconds > 2.9);
    cr_expect(memcmp(first, tuned, sizeof tuned) != 0, "the double's algorithms differ in bits");
    close_side();

    open_side();
    long timings = nd_double_counts_get().timings;
    cr_assert_eq(s.ops->tuner->install(s.device, choices, 1), ND_OK, "%s",
                 nd_error_last()->message);
    multiply(again);
    cr_expect(memcmp(again, tuned, sizeof tuned) == 0, "the same algorithm, the same bits");
    cr_expect_eq(nd_double_counts_get().timings, timings, "nothing was timed");
    cr_expect_eq(s.ops->tuner->unchosen(s.device), 0);
    cr_assert_eq(small_product(), ND_OK);
    cr_expect_eq(s.ops->tuner->unchosen(s.device), 1, "a form that nobody chose for is counted");
    close_side();
}

/* A product for fewer processors is another form, with a choice of its own. */
Test(lt_choices, products_leave_processors_to_collectives)
{
    open_side();
    s.ops->tuner->tune(s.device, ND_LT_CANDIDATES, 60.0);
    multiply(first);
    cr_assert_eq(nd_ops_cuda_limit_products(s.device, 116), ND_OK);
    multiply(tuned);
    multiply(again);
    cr_assert_eq(s.ops->tuner->choices(s.device, choices), 2);
    cr_expect_eq(choices[0].key.processors, 0);
    cr_expect_eq(choices[1].key.processors, 116);
    cr_assert_eq(s.ops->tuner->install(s.device, choices + 1, 1), ND_OK, "%s",
                 nd_error_last()->message);
    multiply(again);
    cr_expect_eq(s.ops->tuner->unchosen(s.device), 0, "the choice for 116 processors is used");
    nd_lt_choice other = choices[1];
    other.key.processors = 100; /* its algorithm was chosen for 116 */
    cr_expect_eq(s.ops->tuner->install(s.device, &other, 1), ND_ERR_CONFIG);
    cr_expect(strstr(nd_error_last()->message, "for 100 multiprocessors"), "%s",
              nd_error_last()->message);
    cr_expect_eq(nd_ops_cuda_limit_products(s.device, 133), ND_ERR_CONFIG);
    cr_expect(strstr(nd_error_last()->message, "has 132 multiprocessors"), "%s",
              nd_error_last()->message);
    close_side();
}

Test(lt_choices, without_time_the_first_algorithm_stays)
{
    setenv("ND_DOUBLE_LT_TIMES", "3,1,2", 1);
    open_side();
    tune_one(0.0);
    cr_expect_eq(choices[0].candidates, 0);
    cr_expect_eq(choices[0].picked, 0);
    close_side();
}

static void expect_refused(const char *part)
{
    cr_expect_neq(s.ops->tuner->install(s.device, choices, 1), ND_OK);
    cr_expect(strstr(nd_error_last()->message, part), "%s", nd_error_last()->message);
}

Test(lt_choices, what_the_library_does_not_take_is_said)
{
    open_side();
    tune_one(60.0);
    nd_lt_choice good = choices[0];
    choices[0].algorithm[0] ^= 1;
    expect_refused("does not accept the recorded algorithm");
    choices[0] = good;
    choices[0].key.k += 16; /* the algorithm is of another form */
    choices[0].key.lda += 16;
    choices[0].key.ldb += 16;
    expect_refused("does not accept the recorded algorithm");
    choices[0] = good;
    choices[0].workspace += 7;
    expect_refused("in the record");
    choices[0] = good;
    setenv("ND_DOUBLE_LT_REFUSES", "all", 1);
    expect_refused("time again with kernels.autotune");
    close_side();
}

/* The heuristic's entries hold nothing where their state is not success. */
Test(lt_choices, entries_without_an_algorithm_are_passed_over)
{
    setenv("ND_DOUBLE_LT_TIMES", "3,1,2", 1);
    open_side();
    multiply(first);
    setenv("ND_DOUBLE_LT_UNFIT", "0", 1);
    cr_assert_eq(s.ops->tuner->install(s.device, NULL, 0), ND_OK);
    multiply(again);
    cr_expect(memcmp(first, again, sizeof first) != 0, "the second algorithm");
    cr_assert_eq(s.ops->tuner->install(s.device, NULL, 0), ND_OK);
    tune_one(60.0);
    cr_expect_eq(choices[0].candidates, 2);
    cr_expect(memcmp(tuned, again, sizeof tuned) == 0, "the second algorithm again");
    close_side();
}

Test(lt_choices, a_form_without_any_algorithm_is_said)
{
    setenv("ND_DOUBLE_LT_UNFIT", "all", 1);
    open_side();
    cr_expect_eq(small_product(), ND_ERR_INTERNAL);
    cr_expect(strstr(nd_error_last()->message, "has no algorithm"), "%s", nd_error_last()->message);
    close_side();
}

/* An algorithm that the library proposes, runs, and would not take back. */
Test(lt_choices, what_cannot_be_replayed_is_not_chosen)
{
    setenv("ND_DOUBLE_LT_TIMES", "3,1,2", 1);
    setenv("ND_DOUBLE_LT_REFUSES", "1", 1);
    open_side();
    tune_one(60.0);
    cr_expect_eq(choices[0].candidates, 2);
    cr_expect_eq(choices[0].picked, 2, "the second of the others' order");
    close_side();
    setenv("ND_DOUBLE_LT_REFUSES", "all", 1);
    open_side();
    s.ops->tuner->tune(s.device, ND_LT_CANDIDATES, 60.0);
    multiply(again);
    cr_expect_eq(s.ops->tuner->choices(s.device, choices), 0);
    cr_assert_eq(s.ops->tuner->install(s.device, choices, 0), ND_OK);
    multiply(first);
    cr_expect(memcmp(first, again, sizeof first) == 0, "the library's first choice in both");
    cr_expect_eq(s.ops->tuner->unchosen(s.device), 1);
    close_side();
}

/* Both versions are said, as of NCCL (test_nccl.c) and cuDNN (test_old_cudnn.c). */
Test(libraries, an_old_cublaslt_is_refused_with_both_versions)
{
    nd_cuda_options options = {.local_workers = 1};
    nd_device *device = NULL;
    const nd_ops *ops = NULL;
    setenv("ND_DOUBLE_CUBLASLT", "120205", 1);
    cr_assert_eq(nd_device_open_cuda(&options, &device), ND_OK);
    cr_assert_eq(nd_ops_cuda(device, false, &ops), ND_ERR_CONFIG);
    const char *message = nd_error_last()->message;
    cr_expect(strstr(message, "cuBLASLt") && strstr(message, "12.2.5") && strstr(message, "12.3.0"),
              "%s", message);
    nd_device_close(device);
}
