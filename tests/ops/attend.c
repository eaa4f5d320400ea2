// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/attend.h"

#include <criterion/criterion.h>
#include <stdio.h>

const char *const nd_attend_names[ND_ATTEND_RESULTS] = {"dq", "dk", "dv", "out", "lse"};

void nd_attend_draw(const nd_attention *a, nd_dtype dtype, nd_tensor in[ND_ATTEND_INPUTS])
{
    in[ND_ATTEND_FIRST_KEY] = (nd_tensor){0};
    for (int i = 0; i < ND_ATTEND_FIRST_KEY; i++) {
        const bool keys = i == 1 || i == 2;
        in[i] = nd_random(
            dtype, 4,
            (int64_t[]){a->batch, keys ? a->sk : a->sq, keys ? a->kv_heads : a->heads, a->head_dim},
            0, 1.0f);
    }
}

void nd_attend_forward(const nd_side *side, const nd_attention *a,
                       const nd_tensor in[ND_ATTEND_INPUTS], nd_tensor out, nd_tensor lse)
{
    ND_RUN(side, attention_fwd, .attention = *a, .out = out, .lse = lse, .q = in[0], .k = in[1],
           .v = in[2], .first_key = in[ND_ATTEND_FIRST_KEY],
           .scratch = nd_attention_memory(side, a, out.dtype, false));
}

void nd_attend(const nd_side *side, const nd_attention *a, const nd_tensor in[ND_ATTEND_INPUTS],
               nd_tensor results[ND_ATTEND_RESULTS])
{
    for (int r = 0; r < ND_ATTEND_RESULTS; r++) {
        results[r] = r < ND_ATTEND_FIRST_KEY
                         ? nd_clone(in[r])
                         : nd_random_1d(ND_DTYPE_F32, a->batch * a->heads * a->sq, 0.0f);
    }
    const nd_tensor out = results[3], lse = results[4], delta = nd_clone(lse);
    nd_attend_forward(side, a, in, out, lse);
    ND_RUN(side, attention_delta, .attention = *a, .delta = delta, .out = out, .dout = in[3]);
    ND_RUN(side, attention_bwd, .attention = *a, .dq = results[0], .dk = results[1],
           .dv = results[2], .q = in[0], .k = in[1], .v = in[2], .out = out, .dout = in[3],
           .lse = lse, .delta = delta, .first_key = in[ND_ATTEND_FIRST_KEY],
           .scratch = nd_attention_memory(side, a, out.dtype, true));
}

static int compute_alone(int threads, nd_computation *compute, const void *arg, nd_tensor *results)
{
    nd_side side;
    nd_side_open_cpu(&side, threads);
    const int count = compute(&side, arg, results);
    nd_side_close(&side);
    return count;
}

void nd_with_all_threads(const char *what, nd_computation *compute, const void *arg)
{
    static const int threads[] = {2, 3, 5, 7};
    nd_tensor one[16], many[16];
    const int count = compute_alone(1, compute, arg, one);
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        (void)compute_alone(threads[i], compute, arg, many);
        for (int r = 0; r < count; r++) {
            char text[160];
            snprintf(text, sizeof text, "result %d of %s with %d threads", r, what, threads[i]);
            nd_expect_same("cpu", text, many[r], one[r]);
        }
    }
}

typedef struct attended {
    const nd_attention *a;
    nd_tensor in[ND_ATTEND_INPUTS];
} attended;

static int attend(const nd_side *side, const void *arg, nd_tensor *results)
{
    const attended *x = arg;
    nd_attend(side, x->a, x->in, results);
    return ND_ATTEND_RESULTS;
}

void nd_attend_with_all_threads(const nd_attention *a, nd_dtype dtype, nd_tensor first_key)
{
    attended x = {.a = a};
    char what[96];
    nd_attend_draw(a, dtype, x.in);
    x.in[ND_ATTEND_FIRST_KEY] = first_key;
    snprintf(what, sizeof what, "attention (%lld, %lld) of %lld heads", (long long)a->sq,
             (long long)a->sk, (long long)a->heads);
    nd_with_all_threads(what, attend, &x);
    nd_case_free();
}
