// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_OPS_CONFORMANCE_H
#define ND_TESTS_OPS_CONFORMANCE_H
/*
 * Compares an op of a backend with that of the reference: the same inputs in the same layout, once
 * through each table, then a comparison of every element, and of the memory between the rows of
 * views, which no op may touch.
 *
 * Tensors live until nd_case_free. Mistakes of the test and disagreements end the test with a
 * message.
 */
#include "kernels/ops.h"
#include "tests/drawn/draw.h"

/* Sanitizers slow the reference down most, and find wrong accesses in fewer cases too. */
#ifdef __SANITIZE_ADDRESS__
enum { ND_SANITIZED = 1 };
#else
enum { ND_SANITIZED = 0 };
#endif

/* The backend under test, or the reference. */
typedef struct nd_side {
    const nd_ops *ops;
    nd_device *device;
    nd_stream stream;
} nd_side;

/* One backend at one level, "cpu, avx2, 2 threads", beside the reference. */
typedef struct nd_backend {
    char name[64];
    union {
        struct {
            nd_side ref, side;
        };
        nd_side sides[2]; /* both, to compute the same with each */
    };
} nd_backend;

/*
 * Calls check(backend) for each backend of the program: backends.c here, and others in
 * tests/hostcuda.
 *
 * Here that is the CPU backend at each instruction set of this CPU and at amx_emulated, with 1
 * thread, and at the best one also with 2 and 3 threads. Every level except the first that makes a
 * product shares the level of oneDNN with it.
 */
void nd_each_backend(void (*check)(const nd_backend *backend));
/* Like nd_each_backend, but at the best level alone, or at the one that ND_CPU_ISA names. */
void nd_best_backend(void (*check)(const nd_backend *backend));

/*
 * Drawn operands: calls check for each backend with seeds that are fixed and some of the day. A
 * tensor that a check makes begins at an address that its own draw decides, odd ones among them,
 * and NaN lies before, between and behind its rows. A failure names the draw, which the
 * environment's ND_DRAW repeats alone.
 */
typedef void nd_drawn_check(nd_draw *d, const nd_backend *backend);
void nd_each_draw(nd_drawn_check *check);

/* A test whose body, which follows, is called with `backend` by one of these. */
#define TEST_EACH_BACKEND(suite, name) ND_BACKEND_TEST(suite, name, nd_each_backend)
#define TEST_BEST_BACKEND(suite, name) ND_BACKEND_TEST(suite, name, nd_best_backend)
#define ND_BACKEND_TEST(suite, name, call)                                                         \
    static void check_##suite##_##name(const nd_backend *backend);                                 \
    Test(suite, name)                                                                              \
    {                                                                                              \
        call(check_##suite##_##name);                                                              \
    }                                                                                              \
    static void check_##suite##_##name(const nd_backend *backend)
/* Like TEST_EACH_BACKEND, but with `d`, for nd_each_draw. */
#define TEST_EACH_DRAW(suite, name)                                                                \
    static nd_drawn_check check_##suite##_##name;                                                  \
    Test(suite, name)                                                                              \
    {                                                                                              \
        nd_each_draw(check_##suite##_##name);                                                      \
    }                                                                                              \
    static void check_##suite##_##name(nd_draw *d, const nd_backend *backend)

/* Opens the reference, the CPU backend with `threads`, or the CUDA backend where a program has it;
 * nd_side_close ends it. */
void nd_side_open_ref(nd_side *side);
void nd_side_open_cpu(nd_side *side, int threads);
void nd_side_open_cuda(nd_side *side, bool fp8, bool deterministic);
void nd_side_close(nd_side *side);

/*
 * Tensors of F32 or BF16 filled with draws of mean 0 and the given deviation; `gap` elements lie
 * between rows of the last axis (and twice as many between those of the axis before it, and so on).
 * The seed counts up with each tensor.
 */
nd_tensor nd_random(nd_dtype dtype, int axes, const int64_t *shape, int64_t gap, float deviation);
nd_tensor nd_random_1d(nd_dtype dtype, int64_t n0, float deviation);
nd_tensor nd_random_2d(nd_dtype dtype, int64_t n0, int64_t n1, int64_t gap, float deviation);
/* Makes a tensor with the layout of nd_random_2d, of any dtype; its contents are anything. */
nd_tensor nd_blank_2d(nd_dtype dtype, int64_t n0, int64_t n1, int64_t gap);
nd_tensor nd_random_ids(int64_t n, int64_t low, int64_t high); /* I32 in [low, high) */
nd_tensor nd_clone(nd_tensor t); /* same layout, same contents, gaps too */
void nd_case_free(void);         /* frees all tensors and memory made so far */
/* Memory of an op, all NaN and aligned to 256 bytes. nd_case_free fails where something was written
 * behind it. */
void *nd_case_memory(size_t bytes);
/* Like nd_case_memory, but for attention, forward or backward. */
void *nd_attention_memory(const nd_side *side, const nd_attention *a, nd_dtype dtype,
                          bool backward);
void nd_case_poison(
    nd_tensor t); /* fills the elements with NaN: outputs that must be overwritten */

/* Scalar access by row-major index. */
float nd_get(nd_tensor t, int64_t index);
void nd_put(nd_tensor t, int64_t index, float value);

/*
 * |got - want| <= absolute + relative |want| for every element, plus one rounding of the stored
 * dtype: values that differ slightly may round to adjacent numbers, which are 2^-7 (BF16) or 2^-23
 * (F32) apart. NaN equals NaN, infinities must be equal. `got` and `want` must be clones: their
 * gaps must have stayed equal.
 */
typedef struct nd_tolerance {
    double relative, absolute;
} nd_tolerance;

void nd_expect_close(const char *backend, const char *what, nd_tensor got, nd_tensor want,
                     nd_tolerance tolerance);
/* Equal bits, elements and gaps; a NaN equals any NaN. */
void nd_expect_same(const char *backend, const char *what, nd_tensor got, nd_tensor want);

/* True on a GPU, not on its doubles: sums then lose more than one rounding an addition. */
bool nd_has_tensor_cores(const nd_backend *backend);

/* Fails the test with the thread's error when `status` is not ND_OK. */
void nd_expect_ok(nd_status status, const char *what);
#define ND_OK_OR_FAIL(call) nd_expect_ok((call), #call)

/* An op on the stream of a side, which succeeds. */
#define ND_RUN(side, op_, ...)                                                                     \
    nd_expect_ok(ND_CALL((side)->ops, (nd_stream[]){(side)->stream}, op_, __VA_ARGS__), #op_)

static const double nd_eps_f32 = 1.1920928955078125e-07; /* 2^-23 */
static const double nd_eps_bf16 = 0.0078125;             /* 2^-7 */

#endif
