// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/backend.h"

/*
 * The body of each loop is written once, as an always-inline function, and compiled per instruction
 * set below: the compiler vectorises it with what the enclosing function may use. Blocks keep the
 * accumulator in the first cache.
 */
enum { BLOCK = 1024 };

#define INLINE static inline __attribute__((always_inline))

typedef struct reduce_args {
    nd_dtype dtype;
    nd_redop op;
    void *dst;
    const void *const *src;
    int n;
    int64_t count;
} reduce_args;

#define ADD(a, b)       ((a) + (b))
#define MAX_FLOAT(a, b) ((b) > (a) || (b) != (b) ? (b) : (a)) /* a stays when it is NaN */
#define MAX_INT(a, b)   ((b) > (a) ? (b) : (a))
#define SAME(x)         (x)

/* NAME: dst (count) of TYPE from n sources; ACC is the accumulator's type, LOAD and STORE
 * convert. */
#define DEFINE_REDUCTION(NAME, TYPE, ACC, LOAD, STORE, COMBINE)                                    \
    INLINE void NAME(const reduce_args *args)                                                      \
    {                                                                                              \
        for (int64_t begin = 0; begin < args->count; begin += BLOCK) {                             \
            ACC acc[BLOCK];                                                                        \
            int length = (int)(args->count - begin < BLOCK ? args->count - begin : BLOCK);         \
            const TYPE *first = (const TYPE *)args->src[0] + begin;                                \
            for (int i = 0; i < length; i++) {                                                     \
                acc[i] = LOAD(first[i]);                                                           \
            }                                                                                      \
            for (int r = 1; r < args->n; r++) {                                                    \
                const TYPE *next = (const TYPE *)args->src[r] + begin;                             \
                for (int i = 0; i < length; i++) {                                                 \
                    ACC x = LOAD(next[i]);                                                         \
                    acc[i] = COMBINE(acc[i], x);                                                   \
                }                                                                                  \
            }                                                                                      \
            TYPE *dst = (TYPE *)args->dst + begin;                                                 \
            for (int i = 0; i < length; i++) {                                                     \
                dst[i] = STORE(acc[i]);                                                            \
            }                                                                                      \
        }                                                                                          \
    }

DEFINE_REDUCTION(sum_f32, float, float, SAME, SAME, ADD)
DEFINE_REDUCTION(max_f32, float, float, SAME, SAME, MAX_FLOAT)
DEFINE_REDUCTION(sum_f64, double, double, SAME, SAME, ADD)
DEFINE_REDUCTION(max_f64, double, double, SAME, SAME, MAX_FLOAT)
DEFINE_REDUCTION(sum_i64, uint64_t, uint64_t, SAME, SAME, ADD) /* wraps, as unsigned */
DEFINE_REDUCTION(max_i64, int64_t, int64_t, SAME, SAME, MAX_INT)
DEFINE_REDUCTION(sum_i32, uint32_t, uint32_t, SAME, SAME, ADD)
DEFINE_REDUCTION(max_i32, int32_t, int32_t, SAME, SAME, MAX_INT)
DEFINE_REDUCTION(sum_bf16, nd_bf16, float, nd_bf16_to_f32, nd_bf16_from_f32, ADD)
DEFINE_REDUCTION(max_bf16, nd_bf16, float, nd_bf16_to_f32, nd_bf16_from_f32, MAX_FLOAT)

INLINE void reduce_any(const reduce_args *args)
{
    bool sum = args->op == ND_REDOP_SUM;
    switch (args->dtype) {
    case ND_DTYPE_F32:
        sum ? sum_f32(args) : max_f32(args);
        break;
    case ND_DTYPE_F64:
        sum ? sum_f64(args) : max_f64(args);
        break;
    case ND_DTYPE_I64:
        sum ? sum_i64(args) : max_i64(args);
        break;
    case ND_DTYPE_I32:
        sum ? sum_i32(args) : max_i32(args);
        break;
    case ND_DTYPE_BF16:
        sum ? sum_bf16(args) : max_bf16(args);
        break;
    default:
        ND_ASSERT(!"a type that is only moved");
    }
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) static void
reduce_avx512(const reduce_args *args)
{
    reduce_any(args);
}

__attribute__((target("avx2"))) static void reduce_avx2(const reduce_args *args)
{
    reduce_any(args);
}
#endif

void nd_reduce(nd_dtype dtype, nd_redop op, void *dst, const void *const *src, int n, int64_t count)
{
    reduce_args args = {dtype, op, dst, src, n, count};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
        reduce_avx512(&args);
        return;
    }
    if (__builtin_cpu_supports("avx2")) {
        reduce_avx2(&args);
        return;
    }
#endif
    reduce_any(&args);
}
