// SPDX-License-Identifier: Apache-2.0
/* SwiGLU, RoPE and the embedding. */
#include <criterion/criterion.h>
#include <math.h>

#include "kernels/rope.h"
#include "tests/ops/conformance.h"

static const nd_dtype dtypes[] = {ND_DTYPE_F32, ND_DTYPE_BF16};
typedef struct shape {
    int64_t n, F, gap;
} shape;

/* Gates from -150 to 150 among the usual ones: both ends of the exponential. */
static nd_tensor random_gate(nd_dtype dtype, int64_t n, int64_t F, int64_t gap)
{
    nd_tensor gate = nd_random_2d(dtype, n, F, gap, 3.0f);
    for (int64_t i = 0; i < nd_tensor_count(gate); i += 11) {
        nd_put(gate, i, nd_get(gate, i) * 10.0f);
    }
    return gate;
}

/*
 * exp: 2e-7, then a handful of roundings: 8 eps relative to the terms. The sigmoid ends at e^-88 =
 * 6e-39 and may be 0 there: times the other factors, at most about 1000, 1e-35. 1 + g (1 - s)
 * cancels near its root at -1.28, where its terms are about 1, so the error is absolute there: 8
 * eps times |d u s| (at most about 16 x 0.3).
 *
 * With GELU z has three roundings, which are 3 z eps of the sigmoid where that is small: at most
 * 4 eps of |d u| with the factor g z'. Above, 1 - s rounds by eps / 4 or to 0 and is multiplied by
 * g z', at most 36 where that matters: 9 eps of the result.
 */
static const nd_tolerance forward_tolerances[] = {
    {.relative = 8 * 1.2e-7, .absolute = 1e-35},
    {.relative = 8 * 1.2e-7, .absolute = 40 * 1.2e-7},
};
static const nd_tolerance backward_tolerances[] = {
    {.relative = 8 * 1.2e-7, .absolute = 40 * 1.2e-7},
    {.relative = 20 * 1.2e-7, .absolute = 100 * 1.2e-7},
};

/* Bits of `how`: results in the place of gate and up; GELU. */
enum { IN_PLACE = 1, GELU = 2, HOWS = 4 };

static void swiglu_once(const nd_backend *backend, nd_dtype dtype, const shape *of, int how)
{
    const bool in_place = how & IN_PLACE, gelu = how & GELU;
    int64_t n = of->n, F = of->F, gap = of->gap;
    nd_tensor gate = random_gate(dtype, n, F, gap), up = nd_random_2d(dtype, n, F, gap, 1.0f);
    nd_tensor dout = nd_random_2d(dtype, n, F, gap, 1.0f), out[2], dgate[2], dup[2];
    for (int s = 0; s < 2; s++) {
        const nd_side *side = &backend->sides[s];
        nd_tensor own_gate = nd_clone(gate), own_up = nd_clone(up);
        out[s] = nd_clone(gate);
        dgate[s] = in_place ? own_gate : nd_clone(gate);
        dup[s] = in_place ? own_up : nd_clone(gate);
        ND_RUN(side, swiglu_fwd, .out = out[s], .gate = own_gate, .up = own_up, .gelu = gelu);
        ND_RUN(side, swiglu_bwd, .dgate = dgate[s], .dup = dup[s], .dout = dout, .gate = own_gate,
               .up = own_up, .gelu = gelu);
    }
    nd_expect_close(backend->name, "swiglu_fwd", out[1], out[0], forward_tolerances[gelu]);
    nd_expect_close(backend->name, "swiglu_bwd dgate", dgate[1], dgate[0],
                    backward_tolerances[gelu]);
    nd_expect_close(backend->name, "swiglu_bwd dup", dup[1], dup[0], forward_tolerances[gelu]);
    nd_case_free();
}

TEST_EACH_BACKEND(swiglu, a_nan_stays_where_it_is)
{
    nd_tensor gate = nd_random_2d(ND_DTYPE_BF16, 2, 70, 0, 1.0f), up = nd_clone(gate);
    nd_tensor out = nd_clone(gate);
    nd_put(gate, 3, NAN);
    nd_put(gate, 139, NAN);
    ND_RUN(&backend->side, swiglu_fwd, .out = out, .gate = gate, .up = up);
    for (int64_t i = 0; i < 140; i++) {
        cr_assert(isnan(nd_get(out, i)) == (i == 3 || i == 139), "%s: element %d", backend->name,
                  (int)i);
    }
}

enum { POSITIONS = 96 };

static nd_rope_view rope_table(int64_t D)
{
    static float cosines[POSITIONS * 64], sines[POSITIONS * 64];
    nd_rope_config config = {.type = ND_ROPE_DEFAULT, .theta = 10000.0};
    cr_assert(D <= 128);
    nd_rope_table(&config, D, POSITIONS, false, cosines, sines);
    return (nd_rope_view){.cos = cosines, .sin = sines, .positions = POSITIONS};
}

static void rope_once(const nd_backend *backend, nd_dtype dtype, int64_t n, int64_t heads,
                      int64_t D, int64_t gap, bool in_place)
{
    nd_rope_view table = rope_table(D);
    nd_tensor x = nd_random(dtype, 3, (int64_t[]){n, heads, D}, gap, 1.0f), out[2][2];
    nd_tensor positions = nd_random_ids(n, 0, POSITIONS);
    for (int s = 0; s < 2; s++) {
        for (int inverse = 0; inverse < 2; inverse++) {
            nd_tensor own = nd_clone(x);
            out[s][inverse] = in_place ? own : nd_clone(x);
            ND_RUN(&backend->sides[s], rope, .out = out[s][inverse], .x = own,
                   .positions = positions, .table = table, .inverse = inverse);
        }
    }
    /* Two products of numbers up to about 5, and their sum. */
    nd_tolerance tolerance = {.absolute = 5 * nd_eps_f32};
    nd_expect_close(backend->name, "rope", out[1][0], out[0][0], tolerance);
    nd_expect_close(backend->name, "rope, inverse", out[1][1], out[0][1], tolerance);
    nd_case_free();
}

static void embedding_once(const nd_backend *backend, nd_dtype dtype, int64_t n, int64_t V,
                           int64_t C, int64_t gap)
{
    const int64_t first = 10;
    nd_tensor table = nd_random_2d(dtype, V, C, gap, 1.0f);
    nd_tensor ids = nd_random_ids(n, 0, first + V + 5); /* some before, some behind the slice */
    nd_tensor dout = nd_random_2d(dtype, n, C, gap, 1.0f);
    nd_tensor dtable = nd_random_2d(ND_DTYPE_F32, V, C, gap, 1.0f), out[2], dt[2];
    for (int s = 0; s < 2; s++) {
        const nd_side *side = &backend->sides[s];
        out[s] = nd_clone(dout);
        dt[s] = nd_clone(dtable);
        ND_RUN(side, embedding_fwd, .out = out[s], .ids = ids, .table = table, .first = first);
        ND_RUN(side, embedding_bwd, .dtable = dt[s], .ids = ids, .dout = dout, .first = first);
    }
    /* Copies, and F32 additions in the order that the contract fixes. */
    nd_expect_same(backend->name, "embedding_fwd", out[1], out[0]);
    nd_expect_same(backend->name, "embedding_bwd", dt[1], dt[0]);
    nd_case_free();
}

TEST_EACH_DRAW(swiglu, drawn)
{
    const shape drawn = {draw_range(d, 0, 40), draw_extent(d, 600), draw_range(d, 0, 20)};
    const nd_dtype dtype = dtypes[draw_range(d, 0, 1)];
    for (int how = 0; how < HOWS; how++) {
        swiglu_once(backend, dtype, &drawn, how);
    }
}

/* Few ids and many, of up to 19 bits, of which most may lie outside or be alike. */
TEST_EACH_DRAW(activation, drawn)
{
    for (int t = 0; t < 2; t++) {
        const bool large = t == 0 && d->seed % 8 == 0;
        embedding_once(backend, dtypes[t],
                       large ? 1300 : DRAW(d, 0, 1, 19, 1025, draw_range(d, 0, 1300)),
                       large ? 270000 : DRAW(d, 1, 7, 50, 2000), large ? 3 : draw_extent(d, 160),
                       draw_range(d, 0, 20));
        rope_once(backend, dtypes[t], draw_range(d, 0, 90), draw_range(d, 1, 8),
                  2 * draw_extent(d, 64), draw_range(d, 0, 32), draw_once_in(d, 2));
    }
}
