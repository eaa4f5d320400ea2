// SPDX-License-Identifier: Apache-2.0
/* The linears with one input: exchanges over tp, and products part by part. */
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

static const nd_trace_kind GEMM = ND_TRACE_GEMM;
static const nd_trace_kind COMM = ND_TRACE_COMMUNICATION;

/* What the methods share. */

nd_tensor nd_linear_weight(nd_block_call c, const nd_linear_part *p)
{
    return nd_fsdp_weight(&c.model->fsdp, p->first, p->last, c.layer);
}

nd_tensor nd_linear_gradient(nd_block_call c, const nd_linear_part *p, float *beta)
{
    nd_fsdp *fsdp = &c.model->fsdp;
    *beta = nd_fsdp_grad_beta(fsdp, nd_layout_unit(c.model->layout, ND_UNIT_BLOCK, c.layer));
    return nd_fsdp_grad(fsdp, p->first, p->last, c.layer);
}

static nd_packed_weight packed_weight(int64_t layer, const nd_linear_part *p, bool transposed)
{
    return (nd_packed_weight){
        .first = p->first, .last = p->last, .layer = layer, .transposed = transposed};
}

nd_kept_form *nd_linear_kept(nd_block_call c, const nd_linear_part *p, bool transposed)
{
    const nd_packed_weight w = packed_weight(c.layer, p, transposed);
    return nd_packed_form_of(&c.model->packed, &w);
}

void nd_linear_join(const nd_linear_part *p, nd_tensor rows, nd_matrix *first)
{
    if (p->count > 1) {
        ND_ASSERT(first->rows.data && p->count <= ND_FP8_PARTS);
        first->rows = rows;
        first->parts = p->count;
        memcpy(first->lines, p->lines, sizeof first->lines);
    }
}

nd_status nd_linear_gather_rows(nd_block_call c, const nd_linear_group *g, nd_operand *x)
{
    return nd_tp_gather(c.model->rank, x->rows, c.model->full_a, COMM, &x->rows);
}

/*
 * Rows of an FP8 product as the backend takes them: those of the micro-batch and, up to a multiple
 * of nd_ops.fp8_rows, rows behind them. Every buffer has them (nd_model_create). What x holds there
 * is left from earlier, and enters no amax; what y gets there is not read.
 */
static nd_tensor padded_rows(const nd_model *m, nd_tensor rows)
{
    if (m->rank->ops->fp8_rows > 0) {
        rows.shape[0] = nd_round_up(rows.shape[0], m->rank->ops->fp8_rows);
    }
    ND_ASSERT(rows.shape[0] <= m->dims.T);
    return rows;
}

nd_status nd_linear_output_fp8(nd_block_call c, const nd_linear_group *g, nd_matrix x, nd_matrix w,
                               nd_tensor y)
{
    nd_model *m = c.model;
    x.codes = padded_rows(m, x.codes);
    x.rows = padded_rows(m, x.rows);
    ND_OP(m->rank, GEMM, product, .c = padded_rows(m, y), .a = x, .b = w, .b_transposed = true,
          .beta = g->beta, .fast_accumulation = m->scales.recipe.output.fast_accumulation,
          .scratch = m->fp8.gemm);
    return ND_OK;
}

nd_status nd_linear_input_gradient_fp8(nd_block_call c, const nd_linear_part *p, nd_matrix dy,
                                       nd_matrix w, nd_tensor dx)
{
    nd_model *m = c.model;
    ND_OP(m->rank, GEMM, product, .c = dx, .a = dy, .b = w, .beta = p->offset > 0 ? 1.0f : 0.0f,
          .fast_accumulation = m->scales.recipe.input_gradient.fast_accumulation,
          .scratch = m->fp8.gemm);
    return ND_OK;
}

nd_status nd_linear_weight_gradient_fp8(nd_block_call c, const nd_linear_part *p, nd_matrix dy,
                                        nd_matrix x)
{
    nd_model *m = c.model;
    float beta;
    const nd_tensor dw = nd_linear_gradient(c, p, &beta);
    ND_OP(m->rank, GEMM, product, .c = dw, .a = dy, .a_transposed = true, .b = x, .beta = beta,
          .fast_accumulation = m->scales.recipe.weight_gradient.fast_accumulation,
          .scratch = m->fp8.gemm);
    return ND_OK;
}

nd_operand nd_linear_part_of(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                             const nd_operand *dy)
{
    const nd_scales *s = &c.model->scales;
    const int64_t T = c.model->dims.T;
    nd_operand part = *dy;
    part.rows = nd_tensor_columns(dy->rows, p->offset, p->rows);
    if (p->fp8) {
        part.scale = nd_scales_at(s, nd_site_gradient(s, c.layer, p->linear));
        part.codes = dy->codes.data ? nd_tensor_rows(dy->codes, (p->linear - g->first) * T, T)
                                    : (nd_tensor){0};
    }
    return part;
}

/* Groups. */

static const nd_trace_kind ELEMENTWISE = ND_TRACE_ELEMENTWISE;

/* The products are added to the biases. */
static nd_status begin_with_bias(nd_block_call c, const nd_linear_group *g, nd_tensor y)
{
    const nd_param_id first = nd_linear_bias(g->first),
                      last = nd_linear_bias(g->first + g->count - 1);
    if (g->beta == 0.0f) {
        return ND_OK;
    }
    nd_tensor bias = nd_fsdp_weight(&c.model->fsdp, first, last, c.layer);
    ND_OP(c.model->rank, ELEMENTWISE, bias_fwd, .out = y, .bias = bias);
    return ND_OK;
}

/* dy (T, N), or (Tl, C) of a row-parallel group, whose sums of tp ranks are added up later. */
static nd_status bias_gradient(nd_block_call c, const nd_linear_group *g, nd_tensor dy)
{
    if (!g->bias) {
        return ND_OK;
    }
    const nd_param_id first = nd_linear_bias(g->first),
                      last = nd_linear_bias(g->first + g->count - 1);
    ND_OP(c.model->rank, ELEMENTWISE, bias_bwd,
          .dbias = nd_fsdp_grad(&c.model->fsdp, first, last, c.layer), .dout = dy);
    return ND_OK;
}

nd_status nd_linear_forward(nd_block_call c, nd_input input, nd_operand *x, nd_tensor y)
{
    nd_model *m = c.model;
    const nd_linear_group *g = nd_linear_group_of(c, input);
    const nd_tensor all = g->column ? y : nd_tp_partial(m->rank, y, m->full_b);
    x->codes = g->fp8 ? x->codes : (nd_tensor){0};
    if (g->column) {
        ND_TRY(x->codes.data ? nd_operand_keep(c, x) : nd_linear_gather_rows(c, g, x));
    }
    ND_TRY(begin_with_bias(c, g, all));
    for (int i = 0; i < g->part_count; i++) {
        const nd_linear_part *p = &g->parts[i];
        ND_TRY(p->method->forward(c, g, p, x, nd_tensor_columns(all, p->offset, p->rows)));
    }
    return g->column ? ND_OK : nd_tp_reduce(m->rank, all, y, COMM);
}

/* dx of each product, then dw of all of the part. */
static nd_status part_backward(nd_block_call c, const nd_linear_group *g, const nd_linear_part *p,
                               const nd_operand *dy, nd_operand *x, nd_tensor dx)
{
    nd_operand all = nd_linear_part_of(c, g, p, dy);
    for (int i = 0; i < g->alone_count; i++) {
        const nd_linear_part *one = &g->alone[i];
        if (one->linear >= p->linear && one->linear < p->linear + p->count) {
            nd_operand part = nd_linear_part_of(c, g, one, dy);
            ND_TRY(one->method->input_gradient(c, g, one, &part, dx));
            all.cast = one->linear == p->linear ? part.cast : all.cast;
        }
    }
    return p->method->weight_gradient(c, g, p, x, &all);
}

nd_status nd_linear_backward(nd_block_call c, nd_input input, nd_operand *dy, nd_tensor dx)
{
    nd_model *m = c.model;
    const nd_linear_group *g = nd_linear_group_of(c, input);
    const nd_tensor all = g->column ? nd_tp_partial(m->rank, dx, m->full_b) : dx;
    nd_operand x = nd_operand_of(c, input);
    ND_TRY(bias_gradient(c, g, dy->rows));
    if (g->column) {
        ND_TRY(g->method->settle_gradients(c, g, dy));
        ND_TRY(x.codes.data ? ND_OK : nd_linear_gather_rows(c, g, &x));
    } else {
        ND_TRY(g->method->gather_gradient(c, g, dy));
    }
    for (int i = 0; i < g->part_count; i++) {
        ND_TRY(part_backward(c, g, &g->parts[i], dy, &x, all));
    }
    return g->column ? nd_tp_reduce(m->rank, all, dx, COMM) : ND_OK;
}

/* Packed weights. */

/* The weight of an FP8 part is kept packed where its codes are gathered, or where products cast it;
 * otherwise it is cast for each product. transposed: for y, else for dx. */
static void want_packed(nd_model *m, int64_t layer, const nd_linear_group *g,
                        const nd_linear_part *p, bool transposed)
{
    const int64_t micros = m->rank->config->train.gradient_accumulation_steps;
    const bool again = transposed && nd_recompute_multiplies(m->recompute, g->input);
    const nd_packed_weight w = packed_weight(layer, p, transposed);
    const nd_dtype stored = p->fp8 && m->scales.codes_gathered ? ND_DTYPE_F8_E4M3 : m->dims.act;
    const nd_dtype format = p->fp8 ? ND_DTYPE_F8_E4M3 : m->dims.act;
    if (stored == format || nd_products_cast(m)) {
        nd_packed_want(&m->packed, &w, stored, format, m->dims.T, micros * (again ? 2 : 1));
    }
}

void nd_linear_want_packed(nd_model *m)
{
    for (int64_t l = m->stage->layers.begin; l < m->stage->layers.end; l++) {
        for (nd_input input = 0; input < ND_INPUT_COUNT; input++) {
            const nd_linear_group *g =
                nd_linear_group_of((nd_block_call){m, &m->set, l, ND_PASS_TRAIN}, input);
            for (int i = 0; i < g->part_count; i++) {
                want_packed(m, l, g, &g->parts[i], true);
            }
            for (int i = 0; i < g->alone_count; i++) {
                want_packed(m, l, g, &g->alone[i], false);
            }
        }
    }
}
