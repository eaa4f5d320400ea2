// SPDX-License-Identifier: Apache-2.0
/*
 * Column- and row-parallel products of a block, forward and backward, against the plain sums of the
 * whole matrices. Values are simple fractions, so F32 has the exact sums on every mesh; FP8
 * operands are cast here too, by the scale of the whole tensor, and BF16 results have a bound.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/tensor/fp8.h"
#include "tests/unit/trainer/mesh_ranks.h"
#include "trainer/model/linear.h"

enum { T = 32, C = 32, F = 64, QD = 64, LAYER = 0, WEIGHTS = 1 };
enum { MOST = F > QD ? F : QD };

typedef struct linear_case {
    int tp;
    const char *filter; /* NULL: F32 */
    bool all_gather;
    nd_recompute recompute;
} linear_case;

/* The operands of a linear, as its products see them. */
typedef struct linear_values {
    bool fp8;
    int64_t out, in;
    double x[T][MOST], w[MOST][MOST], dy[T][MOST]; /* (T, in), (out, in), (T, out) */
} linear_values;

typedef struct linear_world {
    const linear_case *of;
    linear_values linears[ND_LINEAR_COUNT];
} linear_world;

static bool is_column(nd_input input)
{
    return input == ND_INPUT_QKV || input == ND_INPUT_GATE_UP;
}

/* Each tp rank's part of an input or gradient has another largest value, and so has the gradient of
 * each linear. */
static float smaller(float value, int64_t at, int64_t extent)
{
    return value * (float)(4 - at * 4 / extent) / 4.0f;
}

/* The mean square of a token is 1, so with eps 0 a norm multiplies it by its weight alone: +-1, or,
 * in the third quarter of the tokens, +-2 in every fourth column. */
static float stream_value(int64_t token, int64_t column, bool second)
{
    float sign = mesh_value(second ? 51 : 50, token * C + column) < 0.0f ? -1.0f : 1.0f;
    bool sparse = token * 4 / T == 2;
    return !sparse ? sign : column % 4 == token % 4 ? 2.0f * sign : 0.0f;
}

static float input_value(const nd_layout *whole, nd_input input, int64_t token, int64_t column)
{
    bool second = input == ND_INPUT_GATE_UP;
    if (!is_column(input)) {
        return smaller(mesh_value(60 + input, token * MOST + column), column, MOST);
    }
    const nd_param *norm =
        nd_layout_param(whole, second ? ND_PARAM_NORM_2 : ND_PARAM_NORM_1, LAYER);
    return stream_value(token, column, second) * mesh_param_value(WEIGHTS, norm, column);
}

static float gradient_value(int linear, int64_t token, int64_t column)
{
    float value = mesh_value(70 + (uint64_t)linear, token * MOST + column);
    bool split = is_column(nd_linears[linear].input);
    return (split ? smaller(value, column, MOST) : smaller(value, token, T)) *
           smaller(1.0f, linear % 3, 4);
}

/* Rounds to the codes of one scale and back. */
static void quantize(double (*values)[MOST], int64_t rows, int64_t cols, nd_dtype format)
{
    double amax = 0.0;
    for (int64_t i = 0; i < rows * cols; i++) {
        amax = fmax(amax, fabs(values[i / cols][i % cols]));
    }
    float scale = (float)(nd_fp8_max(format) / amax), inverse = 1.0f / scale;
    for (int64_t i = 0; i < rows * cols; i++) {
        double *v = &values[i / cols][i % cols];
        *v = (double)nd_fp8_to_f32(format, nd_fp8_from_f32(format, (float)*v * scale)) *
             (double)inverse;
    }
}

static bool in_fp8(const linear_case *c, int linear)
{
    const char *name = strchr(nd_linears[linear].module, '.') + 1;
    return c->filter && (strcmp(c->filter, "*") == 0 || strstr(c->filter, name));
}

static void make_values(linear_world *world, const nd_layout *whole, int l)
{
    linear_values *v = &world->linears[l];
    const nd_param *p = nd_layout_param(whole, nd_linears[l].param, LAYER);
    v->fp8 = in_fp8(world->of, l);
    v->out = p->rows;
    v->in = p->cols;
    for (int64_t t = 0; t < T; t++) {
        for (int64_t k = 0; k < v->in; k++) {
            v->x[t][k] = (double)input_value(whole, nd_linears[l].input, t, k);
        }
        for (int64_t n = 0; n < v->out; n++) {
            v->dy[t][n] = (double)gradient_value(l, t, n);
        }
    }
    for (int64_t i = 0; i < v->out * v->in; i++) {
        v->w[i / v->in][i % v->in] = (double)mesh_param_value(WEIGHTS, p, i);
    }
    if (v->fp8) { /* the recipe tensorwise */
        quantize(v->x, T, v->in, ND_DTYPE_F8_E4M3);
        quantize(v->w, v->out, v->in, ND_DTYPE_F8_E4M3);
        quantize(v->dy, T, v->out, ND_DTYPE_F8_E5M2);
    }
}

/* A sum and the sum of the sizes of its terms. */
typedef struct sum {
    double value, size;
} sum;

static void add(sum *s, double term)
{
    s->value += term;
    s->size += fabs(term);
}

static sum output_sum(const linear_values *v, int64_t t, int64_t n)
{
    sum s = {0};
    for (int64_t k = 0; k < v->in; k++) {
        add(&s, v->x[t][k] * v->w[n][k]);
    }
    return s;
}

static sum weight_gradient_sum(const linear_values *v, int64_t n, int64_t k)
{
    sum s = {0};
    for (int64_t t = 0; t < T; t++) {
        add(&s, v->dy[t][n] * v->x[t][k]);
    }
    return s;
}

/* Over all linears with the input. */
static sum input_gradient_sum(const linear_world *world, nd_input input, int64_t t, int64_t k)
{
    int first, count = nd_input_linears(input, &first);
    sum s = {0};
    for (int l = first; l < first + count; l++) {
        const linear_values *v = &world->linears[l];
        for (int64_t n = 0; n < v->out; n++) {
            add(&s, v->dy[t][n] * v->w[n][k]);
        }
    }
    return s;
}

/* One rank. */

typedef struct linear_test {
    linear_world *world;
    nd_model *model;
    nd_activation_set *set;
    double times; /* micro-batches whose gradients are in the accumulator */
} linear_test;

static int tp_index(const linear_test *test)
{
    return test->model->rank->coord.at[ND_AXIS_TP];
}

/* `rounded`: how often BF16 rounds something that is at most s.size; 0: the result is F32, where
 * only the inverse scales round. Without FP8 and BF16 the sum is exact. */
static nd_status expect(const linear_test *test, double found, sum s, int rounded, const char *what,
                        int64_t i, int64_t j)
{
    double bound = s.size * 0x1p-20 + rounded * s.size * 0x1p-8;
    bound = test->world->of->filter ? bound : 0.0;
    ND_CHECK(fabs(found - s.value) <= bound, "%s (%lld, %lld) is %.9g, not %.9g (+-%.3g)", what,
             (long long)i, (long long)j, found, s.value, bound);
    return ND_OK;
}

static const nd_param *param_of(const linear_test *test, int linear)
{
    return nd_layout_param(test->model->layout, nd_linears[linear].param, LAYER);
}

/* y of a column-parallel linear is (T, columns of this rank), of a row-parallel one (Tl, C). */
static nd_status check_output(const linear_test *test, nd_input input, nd_tensor y)
{
    int first, count = nd_input_linears(input, &first);
    bool column = is_column(input);
    int64_t offset = 0, begin = column ? 0 : y.shape[0] * tp_index(test);
    for (int l = first; l < first + count; l++) {
        const nd_param *p = param_of(test, l);
        for (int64_t i = 0; i < y.shape[0]; i++) {
            for (int64_t j = 0; j < p->local_rows; j++) {
                sum s = output_sum(&test->world->linears[l], begin + i, p->row_begin + j);
                ND_TRY(expect(test, (double)mesh_get(y, i, offset + j), s, column ? 1 : 2,
                              nd_linears[l].module, i, j));
            }
        }
        offset += p->local_rows;
    }
    return ND_OK;
}

/* dx of column-parallel linears is (Tl, C), of a row-parallel one (T, columns of this rank). */
static nd_status check_input_gradient(const linear_test *test, nd_input input, nd_tensor dx)
{
    int first, parts = nd_input_linears(input, &first);
    bool column = is_column(input);
    int64_t row = column ? dx.shape[0] * tp_index(test) : 0;
    int64_t col = column ? 0 : param_of(test, first)->col_begin;
    for (int64_t i = 0; i < dx.shape[0]; i++) {
        for (int64_t j = 0; j < dx.shape[1]; j++) {
            sum s = input_gradient_sum(test->world, input, row + i, col + j);
            ND_TRY(expect(test, (double)mesh_get(dx, i, j), s, column ? parts + 1 : 1,
                          "input gradient", i, j));
        }
    }
    return ND_OK;
}

static nd_status check_weight_gradient(const linear_test *test, int linear)
{
    const nd_param *p = param_of(test, linear);
    nd_tensor dw = nd_fsdp_grad(&test->model->fsdp, p->id, p->id, LAYER);
    for (int64_t i = 0; i < p->local_rows; i++) {
        for (int64_t j = 0; j < p->local_cols; j++) {
            sum s = weight_gradient_sum(&test->world->linears[linear], p->row_begin + i,
                                        p->col_begin + j);
            s.value *= test->times;
            s.size *= test->times;
            ND_TRY(expect(test, (double)mesh_get(dw, i, j), s, 0, p->name, i, j));
        }
    }
    return ND_OK;
}

/* The norm that makes an input, as a block's forward calls it. */
static nd_status make_normed(nd_block_call c, nd_input input, nd_operand *x)
{
    nd_model *m = c.model;
    const nd_block_acts *a = nd_set_block(c.set, c.layer);
    bool second = input == ND_INPUT_GATE_UP;
    nd_param_id norm = second ? ND_PARAM_NORM_2 : ND_PARAM_NORM_1;
    nd_fuse fuse;
    ND_TRY(nd_operand_prepare(c, input, x, &fuse));
    ND_OP(m->rank, ND_TRACE_ELEMENTWISE, rmsnorm_fwd, .y = x->stored,
          .rstd = second ? a->rstd2 : a->rstd1, .x = second ? a->x_mid : a->x_in,
          .weight = nd_fsdp_weight(&m->fsdp, norm, norm, c.layer), .eps = 0.0f, .fuse = fuse);
    return ND_OK;
}

static nd_status make_input(const linear_test *test, nd_block_call c, nd_input input, nd_operand *x)
{
    if (is_column(input)) {
        return make_normed(c, input, x);
    }
    int first;
    (void)nd_input_linears(input, &first);
    const nd_param *p = param_of(test, first);
    const nd_input_acts acts = nd_set_input(c, input);
    *x = (nd_operand){.stored = acts.rows,
                      .codes = nd_linear_group_of(c, input)->keeps ? acts.codes : (nd_tensor){0},
                      .scale = acts.scale};
    for (int64_t i = 0; i < T; i++) {
        for (int64_t j = 0; j < p->local_cols; j++) {
            mesh_put(x->stored, i, j, input_value(test->model->layout, input, i, p->col_begin + j));
        }
    }
    return ND_OK;
}

/* Overwrites the inputs that forward did not keep, as later blocks do. */
static void forget_input(const linear_test *test, nd_block_call c, nd_input input)
{
    const nd_input_acts x = nd_set_input(c, input);
    bool again = test->world->of->recompute != ND_RECOMPUTE_NONE && is_column(input);
    if (x.codes.data || again) {
        memset(x.rows.data, 0xff, nd_tensor_bytes(x.rows));
    }
    if (x.codes.data && again) {
        memset(x.codes.data, 0xff, nd_tensor_bytes(x.codes));
    }
}

/* The gradient of the outputs, where a block's backward has it. */
static void write_gradient(const linear_test *test, nd_input input, nd_tensor dy)
{
    int first, count = nd_input_linears(input, &first);
    int64_t offset = 0, begin = is_column(input) ? 0 : dy.shape[0] * tp_index(test);
    for (int l = first; l < first + count; l++) {
        const nd_param *p = param_of(test, l);
        for (int64_t i = 0; i < dy.shape[0]; i++) {
            for (int64_t j = 0; j < p->local_rows; j++) {
                mesh_put(dy, i, offset + j, gradient_value(l, begin + i, p->row_begin + j));
            }
        }
        offset += p->local_rows;
    }
}

static nd_status check_input(linear_test *test, nd_input input)
{
    nd_model *m = test->model;
    const nd_block_acts *a = nd_set_block(test->set, LAYER);
    const nd_tensor outputs[] = {a->qkv, m->work.branch, a->gu, m->work.branch};
    const nd_tensor gradients[] = {a->dqkv, m->work.dx, a->gu, m->work.dx};
    const nd_tensor to[] = {m->work.dh, m->work.dout, m->work.dh, m->work.dact};
    int first, count = nd_input_linears(input, &first);
    nd_block_call forward = {m, test->set, LAYER, ND_PASS_TRAIN}, backward = forward;
    nd_operand x, dy = {.stored = gradients[input]};
    backward.pass = ND_PASS_BACKWARD;
    ND_TRY(make_input(test, forward, input, &x));
    ND_TRY(nd_linear_forward(forward, input, &x, outputs[input]));
    ND_TRY(check_output(test, input, outputs[input]));
    forget_input(test, forward, input);
    if (is_column(input)) {
        ND_TRY(nd_block_recompute(backward));
        ND_TRY(nd_block_recompute_codes(backward, input == ND_INPUT_GATE_UP));
    }
    write_gradient(test, input, gradients[input]);
    ND_TRY(nd_linear_backward(backward, input, &dy, to[input]));
    ND_TRY(check_input_gradient(test, input, to[input]));
    for (int l = first; l < first + count; l++) {
        ND_TRY(check_weight_gradient(test, l));
    }
    return ND_OK;
}

static bool is_in_fp8(nd_block_call c, nd_input input, int linear)
{
    const nd_linear_group *g = nd_linear_group_of(c, input);
    bool fp8 = false;
    for (int i = 0; i < g->part_count; i++) {
        const nd_linear_part *p = &g->parts[i];
        fp8 |= p->fp8 && linear >= p->linear && linear < p->linear + p->count;
    }
    return fp8;
}

/* Codes are kept where all linears with an input read them, but not of the attention output. */
static nd_status check_kept(const linear_test *test)
{
    nd_block_call c = {test->model, test->set, LAYER, ND_PASS_TRAIN};
    for (nd_input input = 0; input < ND_INPUT_COUNT; input++) {
        int first, count = nd_input_linears(input, &first);
        bool keeps = input != ND_INPUT_O;
        for (int l = first; l < first + count; l++) {
            keeps &= test->world->linears[l].fp8;
            ND_CHECK(is_in_fp8(c, input, l) == test->world->linears[l].fp8, "%s is %sin FP8",
                     nd_linears[l].module, is_in_fp8(c, input, l) ? "" : "not ");
        }
        ND_CHECK(nd_dtype_is_fp8(nd_operand_kept(c, input).stored.dtype) == keeps,
                 "input %d %s codes", (int)input, keeps ? "keeps no" : "keeps");
    }
    return ND_OK;
}

/* Two micro-batches of one step, then the first of the next step. */
static nd_status body(nd_rank *rank, void *context)
{
    linear_test test = {.world = context};
    ND_TRY(mesh_model_open(rank, NULL, WEIGHTS, &test.model));
    nd_model *m = test.model;
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_BLOCK, LAYER);
    test.set = nd_model_take_set(m);
    ND_TRY(check_kept(&test));
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    const nd_block_acts *a = nd_set_block(test.set, LAYER);
    for (int64_t i = 0; i < m->dims.Tl; i++) {
        for (int64_t k = 0; k < C; k++) {
            int64_t token = m->dims.Tl * tp_index(&test) + i;
            mesh_put(a->x_in, i, k, stream_value(token, k, false));
            mesh_put(a->x_mid, i, k, stream_value(token, k, true));
        }
    }
    for (int i = 0; i < 3; i++) {
        if (i != 1) {
            nd_fsdp_begin_step(&m->fsdp, 0);
        }
        test.times = i == 1 ? 2.0 : 1.0;
        ND_TRY(nd_fsdp_grad_acquire(&m->fsdp, unit));
        for (nd_input input = 0; input < ND_INPUT_COUNT; input++) {
            ND_TRY(check_input(&test, input));
        }
        ND_TRY(nd_fsdp_grad_release(&m->fsdp, unit));
    }
    nd_fsdp_release(&m->fsdp, unit);
    return ND_OK;
}

static void run(const linear_case *c)
{
    const nd_mesh mesh = {{1, 1, 1, 1, c->tp}};
    linear_world *world = calloc(1, sizeof *world);
    nd_layout *whole = NULL;
    mesh_ranks job = mesh_ranks_of(mesh, 1, false, body, world);
    job.config.parallel.recompute = c->recompute;
    job.config.fp8.all_gather = c->all_gather;
    if (c->filter) {
        job.config.train.precision = ND_PRECISION_FP8;
        job.config.fp8.filter = (char *)c->filter;
    }
    world->of = c;
    cr_assert_eq(nd_layout_create(&(nd_layout_options){.shape = &job.shape}, &whole), ND_OK);
    for (int l = 0; l < ND_LINEAR_COUNT; l++) {
        make_values(world, whole, l);
    }
    expect_ranks(&job, "tp %d, filter %s, all-gather %d, recompute %d", c->tp,
                 c->filter ? c->filter : "none", c->all_gather, (int)c->recompute);
    nd_layout_destroy(whole);
    free(world);
}

/* Weights gathered in BF16 or as codes, inputs kept or made again. */
static void on_every_mesh(const char *filter)
{
    for (int tp = 1; tp <= 4; tp *= 2) {
        run(&(linear_case){tp, filter, false, ND_RECOMPUTE_NONE});
        run(&(linear_case){tp, filter, true, ND_RECOMPUTE_SELECTIVE});
    }
}

Test(linear, products_in_f32_are_exact_on_every_mesh)
{
    on_every_mesh(NULL);
}

Test(linear, all_in_fp8)
{
    on_every_mesh("*");
    run(&(linear_case){2, "*", true, ND_RECOMPUTE_NONE});
    run(&(linear_case){2, "*", false, ND_RECOMPUTE_SELECTIVE});
}

/* Inputs are kept as codes or in BF16; the other linears stay in BF16. */
Test(linear, mixed_filters)
{
    on_every_mesh("q_proj,k_proj,v_proj");
    on_every_mesh("q_proj,v_proj");
    on_every_mesh("k_proj,up_proj");
    on_every_mesh("v_proj,o_proj,gate_proj");
    on_every_mesh("q_proj,down_proj");
}
