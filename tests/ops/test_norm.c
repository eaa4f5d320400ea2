// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>

#include "tests/ops/conformance.h"

static const nd_dtype dtypes[] = {ND_DTYPE_F32, ND_DTYPE_BF16};
typedef struct shape {
    int64_t n, C, gap;
} shape;

static const shape shapes[] = {{1, 1, 0},     {1, 64, 0},    {3, 7, 5},     {33, 48, 16},
                               {70, 515, 3},  {257, 512, 0}, {0, 16, 0},    {3, 16384, 0},
                               {2, 20480, 8}, {2, 5001, 0},  {3, 262144, 0}};

/* The last one is what nd_op_limits allows, and is large: not in every combination. */
enum { SHAPES = sizeof shapes / sizeof shapes[0] - 1, LARGEST = SHAPES };

/* Which outputs share memory with which inputs. */
typedef enum sharing { APART, SUM_IS_X, SUM_IS_DELTA, NO_DELTA, SHARINGS } sharing;

static void forward_once(const nd_backend *backend, nd_dtype dtype, const shape *of, sharing how,
                         float plus)
{
    int64_t n = of->n, C = of->C, gap = of->gap;
    nd_tensor x = nd_random_2d(dtype, n, C, gap, 2.0f),
              delta = nd_random_2d(dtype, n, C, gap, 1.0f);
    nd_tensor weight = nd_random_1d(dtype, C, 1.0f), none = {0};
    nd_tensor out[2][3]; /* y, sum, rstd of the two sides */
    for (int s = 0; s < 2; s++) {
        nd_tensor own_x = nd_clone(x), own_delta = nd_clone(delta);
        out[s][0] = nd_clone(x);
        out[s][1] = how == SUM_IS_X ? own_x : how == SUM_IS_DELTA ? own_delta : nd_clone(delta);
        out[s][2] = s ? nd_clone(out[0][2]) : nd_random_1d(ND_DTYPE_F32, n, 1.0f);
        nd_case_poison(out[s][0]);
        ND_RUN(&backend->sides[s], rmsnorm_fwd, .y = out[s][0],
               .sum = how == NO_DELTA ? none : out[s][1], .rstd = out[s][2], .x = own_x,
               .delta = how == NO_DELTA ? none : own_delta, .weight = weight, .plus = plus,
               .eps = 1e-5f);
    }
    /* The sum of C squares: C additions, halved by the root. y inherits rstd's relative error. */
    nd_tolerance tolerance = {.relative = (double)C * nd_eps_f32};
    nd_expect_same(backend->name, "rmsnorm_fwd sum", out[1][1], out[0][1]);
    nd_expect_close(backend->name, "rmsnorm_fwd rstd", out[1][2], out[0][2], tolerance);
    nd_expect_close(backend->name, "rmsnorm_fwd y", out[1][0], out[0][0], tolerance);
    nd_case_free();
}

typedef enum bwd_sharing { BWD_APART, DX_IS_DRES, DX_IS_DY, NO_DRES, BWD_SHARINGS } bwd_sharing;

static void backward_once(const nd_backend *backend, nd_dtype dtype, const shape *of,
                          bwd_sharing how, float plus)
{
    int64_t n = of->n, C = of->C, gap = of->gap;
    nd_tensor x = nd_random_2d(dtype, n, C, gap, 2.0f), dy = nd_random_2d(dtype, n, C, gap, 1.0f);
    nd_tensor dres = nd_random_2d(dtype, n, C, gap, 1.0f), weight = nd_random_1d(dtype, C, 1.0f);
    nd_tensor dweight = nd_random_1d(ND_DTYPE_F32, C, 1.0f), y = nd_clone(x), none = {0};
    nd_tensor rstd = nd_random_1d(ND_DTYPE_F32, n, 1.0f), dx[2], dw[2];
    ND_RUN(&backend->ref, rmsnorm_fwd, .y = y, .rstd = rstd, .x = x, .weight = weight,
           .eps = 1e-5f);
    for (int s = 0; s < 2; s++) {
        nd_tensor own_dy = nd_clone(dy), own_dres = nd_clone(dres);
        dx[s] = how == DX_IS_DRES ? own_dres : how == DX_IS_DY ? own_dy : nd_clone(x);
        dw[s] = nd_clone(dweight);
        ND_RUN(&backend->sides[s], rmsnorm_bwd, .dx = dx[s], .dweight = dw[s], .dy = own_dy,
               .dres = how == NO_DRES ? none : own_dres, .x = x, .weight = weight, .plus = plus,
               .rstd = rstd);
    }
    /*
     * dx: a dot product of C terms of size about 1, divided by C and multiplied by x rstd of at
     * most about 5 (and all of it by rstd, at most 1 / sqrt(eps) = 316 when a row is one small
     * number). dweight: n terms of size about 1.
     */
    double largest = 0.0;
    for (int64_t i = 0; i < n; i++) {
        largest = nd_get(rstd, i) > largest ? nd_get(rstd, i) : largest;
    }
    double scale = 16.0 * largest * nd_eps_f32;
    nd_expect_close(backend->name, "rmsnorm_bwd dx", dx[1], dx[0],
                    (nd_tolerance){.relative = (double)C * nd_eps_f32, .absolute = scale});
    nd_expect_close(backend->name, "rmsnorm_bwd dweight", dw[1], dw[0],
                    (nd_tolerance){.absolute = (double)(n + 4) * 4.0 * nd_eps_f32});
    nd_case_free();
}

TEST_BEST_BACKEND(rmsnorm, backward_of_the_largest_width)
{
    int64_t most = backend->side.ops->limits.hidden;
    cr_assert(most == 0 || most >= shapes[LARGEST].C, "%s allows %lld", backend->name,
              (long long)most);
    cr_assert(strcmp(backend->side.ops->name, "cpu") != 0 || most == shapes[LARGEST].C);
    backward_once(backend, ND_DTYPE_BF16, &shapes[LARGEST], BWD_APART, 0.0f);
}

/* Two parts of the same rows, of unlike widths, give what the whole rows give. */
static void parts_once(const nd_backend *backend, nd_dtype dtype, const shape *of)
{
    enum { SQUARES, DOTS };
    const int64_t n = of->n, C = of->C, cut = C / 3;
    const nd_tensor x = nd_random_2d(dtype, n, C, of->gap, 2.0f),
                    dy = nd_random_2d(dtype, n, C, of->gap, 1.0f),
                    weight = nd_random_1d(dtype, C, 1.0f),
                    dweight = nd_random_1d(ND_DTYPE_F32, C, 1.0f);
    nd_tensor y[2], dx[2], dw[2], rstd = nd_random_1d(ND_DTYPE_F32, n, 1.0f);
    nd_tensor part[2], sums[2];
    for (int s = 0; s < 2; s++) {
        y[s] = nd_clone(x), dx[s] = nd_clone(x), dw[s] = nd_clone(dweight);
        part[s] = nd_clone(rstd), sums[s] = nd_clone(rstd);
    }
    ND_RUN(&backend->ref, rmsnorm_fwd, .y = y[0], .rstd = rstd, .x = x, .weight = weight,
           .eps = 1e-5f);
    ND_RUN(&backend->ref, rmsnorm_bwd, .dx = dx[0], .dweight = dw[0], .dy = dy, .x = x,
           .weight = weight, .rstd = rstd);
    for (int k = 0; k < 2; k++) { /* the parts' sums, added up */
        const int64_t at = k ? cut : 0, columns = k ? C - cut : cut;
        const nd_tensor of_x = nd_tensor_columns(x, at, columns),
                        w = nd_tensor_rows(weight, at, columns);
        ND_RUN(&backend->side, row_dots, .out = part[SQUARES], .x = of_x, .y = of_x);
        ND_RUN(&backend->side, row_dots, .out = part[DOTS], .x = nd_tensor_columns(dy, at, columns),
               .y = of_x, .weight = w);
        for (int64_t i = 0; i < 2 * n; i++) {
            float *to = (float *)sums[i % 2].data + i / 2;
            *to = (k ? *to : 0.0f) + ((float *)part[i % 2].data)[i / 2];
        }
    }
    for (int k = 0; k < 2; k++) {
        const int64_t at = k ? cut : 0, columns = k ? C - cut : cut;
        const nd_tensor w = nd_tensor_rows(weight, at, columns);
        ND_RUN(&backend->side, rmsnorm_fwd, .y = nd_tensor_columns(y[1], at, columns),
               .rstd = part[0], .x = nd_tensor_columns(x, at, columns), .weight = w, .eps = 1e-5f,
               .squares = sums[SQUARES], .width = C);
        ND_RUN(&backend->side, rmsnorm_bwd, .dx = nd_tensor_columns(dx[1], at, columns),
               .dweight = nd_tensor_rows(dw[1], at, columns),
               .dy = nd_tensor_columns(dy, at, columns), .x = nd_tensor_columns(x, at, columns),
               .weight = w, .rstd = part[0], .dots = sums[DOTS], .width = C);
    }
    const nd_tolerance relative = {.relative = (double)C * nd_eps_f32};
    nd_expect_close(backend->name, "rstd of parts", part[0], rstd, relative);
    nd_expect_close(backend->name, "y of parts", y[1], y[0], relative);
    /* As in backward_once with an rstd below 2, and what the parts' rstd differs by. */
    nd_expect_close(
        backend->name, "dx of parts", dx[1], dx[0],
        (nd_tolerance){.relative = (double)C * nd_eps_f32, .absolute = 64 * nd_eps_f32});
    nd_expect_close(backend->name, "dweight of parts", dw[1], dw[0],
                    (nd_tolerance){.relative = (double)C * nd_eps_f32,
                                   .absolute = (double)(n + 4) * 4.0 * nd_eps_f32});
    nd_case_free();
}

TEST_EACH_BACKEND(rmsnorm, rows_in_parts)
{
    static const shape parts[] = {{33, 48, 16}, {7, 515, 3}, {5, 3072, 0}, {2, 20480, 8}};
    for (int d = 0; d < 2; d++) {
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
            parts_once(backend, dtypes[d], &parts[i]);
        }
    }
}

TEST_EACH_DRAW(rmsnorm, drawn)
{
    const shape drawn = {draw_range(d, 0, 40), draw_extent(d, 600), draw_range(d, 0, 20)};
    for (int i = 0; i < 2 * 2; i++) {
        const shape *of = i < 2 ? &shapes[d->seed % SHAPES] : &drawn;
        forward_once(backend, dtypes[i % 2], of, (sharing)draw_range(d, 0, SHARINGS - 1),
                     (float)draw_range(d, 0, 1));
        backward_once(backend, dtypes[i % 2], of, (bwd_sharing)draw_range(d, 0, BWD_SHARINGS - 1),
                      (float)draw_range(d, 0, 1));
    }
}
