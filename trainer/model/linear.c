// SPDX-License-Identifier: Apache-2.0
/* Products of the linears that share an input, part by part. */
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

static const nd_trace_kind GEMM = ND_TRACE_GEMM;
static const nd_trace_kind COMM = ND_TRACE_COMMUNICATION;

static bool is_column_parallel(nd_input input)
{
    return input == ND_INPUT_QKV || input == ND_INPUT_GATE_UP;
}

/* Parts. */

static int64_t rows_of(nd_block_call c, int linear)
{
    return nd_layout_param(c.model->layout, nd_linear_param(linear), c.layer)->local_rows;
}

/* Before the first part. */
static nd_linear_part no_part(nd_input input)
{
    int first;
    (void)nd_input_linears(input, &first);
    return (nd_linear_part){.last = first - 1};
}

static bool next_of(nd_block_call c, nd_input input, bool fp8_joined, nd_linear_part *p)
{
    int first, count = nd_input_linears(input, &first), last = first + count - 1;
    if (p->last == last) {
        return false;
    }
    p->offset += p->rows;
    p->fp8_before += p->fp8 ? p->last - p->first + 1 : 0;
    p->first = ++p->last;
    p->fp8 = nd_linear_in_fp8(c, p->first);
    p->rows = rows_of(c, p->first);
    while ((!p->fp8 || fp8_joined) && p->last < last &&
           nd_linear_in_fp8(c, p->last + 1) == p->fp8) {
        p->rows += rows_of(c, ++p->last);
    }
    return true;
}

/* The part after p in which each FP8 linear is alone; false when there is none. */
static bool next_part(nd_block_call c, nd_input input, nd_linear_part *p)
{
    return next_of(c, input, false, p);
}

/* The same in which FP8 linears are together where they can be. */
static bool next_joined_part(nd_block_call c, nd_input input, nd_linear_part *p)
{
    return next_of(c, input, nd_linears_join(c.model), p);
}

/* Goes through the parts of p in which each FP8 linear is alone; `one` is {0} before the first. */
static bool next_within(nd_block_call c, const nd_linear_part *p, nd_linear_part *one)
{
    if (one->rows == 0) {
        *one = (nd_linear_part){
            .last = p->first - 1, .fp8_before = p->fp8_before, .offset = p->offset};
    }
    return one->last < p->last && next_part(c, nd_linear_input(p->first), one);
}

/* The operand of all linears of an FP8 part, from that of its first one: a weight, or the gradient
 * of the outputs. */
static nd_matrix joined(nd_block_call c, const nd_linear_part *p, nd_matrix first, nd_tensor rows)
{
    ND_ASSERT(first.rows.data && p->last - p->first < ND_FP8_PARTS);
    first.rows = rows;
    for (int linear = p->first; p->last > p->first && linear <= p->last; linear++) {
        first.lines[first.parts++] = rows_of(c, linear);
    }
    return first;
}

static nd_tensor weight_of(nd_block_call c, const nd_linear_part *p)
{
    return nd_fsdp_weight(&c.model->fsdp, nd_linear_param(p->first), nd_linear_param(p->last),
                          c.layer);
}

static nd_kept_form *packed_of(nd_block_call c, const nd_linear_part *p, bool transposed)
{
    const nd_packed_weight w = {.first = nd_linear_param(p->first),
                                .last = nd_linear_param(p->last),
                                .layer = c.layer,
                                .transposed = transposed};
    return nd_packed_form_of(&c.model->packed, &w);
}

/* The weight of an FP8 part is kept packed where its codes are gathered, or where products cast it;
 * otherwise it is cast for each product. transposed: for y, else for dx. */
static void want_packed(nd_block_call c, const nd_linear_part *p, bool transposed)
{
    nd_model *m = c.model;
    const int64_t micros = m->rank->config->train.gradient_accumulation_steps;
    const bool again =
        transposed && nd_recompute_multiplies(m->recompute, nd_linear_input(p->first));
    const nd_packed_weight w = {.first = nd_linear_param(p->first),
                                .last = nd_linear_param(p->last),
                                .layer = c.layer,
                                .transposed = transposed};
    const nd_dtype stored = p->fp8 && m->scales.codes_gathered ? ND_DTYPE_F8_E4M3 : m->dims.act;
    const nd_dtype format = p->fp8 ? ND_DTYPE_F8_E4M3 : m->dims.act;
    if (stored == format || nd_products_cast(m)) {
        nd_packed_want(&m->packed, &w, stored, format, m->dims.T, micros * (again ? 2 : 1));
    }
}

void nd_linear_want_packed(nd_model *m)
{
    for (int64_t l = m->stage->layers.begin; l < m->stage->layers.end; l++) {
        const nd_block_call call = {.model = m, .layer = l, .pass = ND_PASS_TRAIN};
        for (nd_input input = 0; input < ND_INPUT_COUNT; input++) {
            for (nd_linear_part p = no_part(input); next_joined_part(call, input, &p);) {
                want_packed(call, &p, true);
            }
            for (nd_linear_part p = no_part(input); next_part(call, input, &p);) {
                want_packed(call, &p, false);
            }
        }
    }
}

static nd_tensor gradient_of(nd_block_call c, const nd_linear_part *p)
{
    return nd_fsdp_grad(&c.model->fsdp, nd_linear_param(p->first), nd_linear_param(p->last),
                        c.layer);
}

/*
 * Scales of rows and columns that tp splits: in forward of a row-parallel linear's x and weight, in
 * backward of the column-parallel linears' dy and weights. The amaxes of all parts with one input
 * lie one after the other, so that one reduction settles them.
 */
typedef struct joint {
    bool rows, weight; /* whether x or dy, and the weight, have such scales */
    nd_scale_ref of_rows, of_weight;
    int64_t end; /* behind those of this part */
} joint;

/* x or dy of the part has `rows` rows. */
static joint joint_of(nd_block_call c, const nd_linear_part *p, bool backward, int64_t rows)
{
    const nd_scales *s = &c.model->scales;
    const nd_gemm_rule *rule = backward ? &s->recipe.input_gradient : &s->recipe.output;
    bool splits = is_column_parallel(nd_linear_input(p->first)) == backward;
    joint j = {.rows = p->fp8 && splits && rule->a.granularity == ND_PER_ROW};
    if (j.rows) {
        j.weight = rule->b.granularity != ND_PER_TENSOR && !s->codes_gathered;
        int64_t of_weight = j.weight ? c.model->dims.C : 0;
        int64_t begin = p->fp8_before * (rows + of_weight);
        j.of_rows = nd_scales_joint(s, begin, rows);
        j.of_weight = nd_scales_joint(s, begin + rows, of_weight);
        j.end = begin + rows + of_weight;
    }
    return j;
}

/* x (T, K), or in backward dy (T, N) of all outputs. */
static nd_status settle_joint(nd_block_call c, nd_input input, bool backward, nd_tensor all)
{
    nd_scales *s = &c.model->scales;
    const nd_gemm_rule *rule = backward ? &s->recipe.input_gradient : &s->recipe.output;
    int64_t count = 0;
    for (nd_linear_part p = no_part(input); next_part(c, input, &p);) {
        joint j = joint_of(c, &p, backward, all.shape[0]);
        nd_tensor rows = backward ? nd_tensor_columns(all, p.offset, p.rows) : all;
        if (j.rows) {
            ND_TRY(nd_scales_measure(s, j.of_rows, rule->a.granularity, rows));
            count = j.end;
        }
        if (j.weight) {
            ND_ASSERT(rule->a.format == rule->b.format);
            ND_TRY(nd_scales_measure(s, j.of_weight, rule->b.granularity, weight_of(c, &p)));
        }
    }
    return count == 0
               ? ND_OK
               : nd_scales_settle(s, nd_scales_joint(s, 0, count), count, rule->a.format, true);
}

/* Makes x->cast, the form of an input that the FP8 products of y or (for_weight) of dw read.
 * of_rows: its scales, where they are settled already. */
static nd_status cast_input(nd_block_call c, nd_input input, bool for_weight,
                            const nd_scale_ref *of_rows, nd_operand *x)
{
    nd_model *m = c.model;
    const nd_recipe *recipe = &m->scales.recipe;
    const nd_cast_rule *rule = for_weight ? &recipe->weight_gradient.b : &recipe->output.a;
    bool column = is_column_parallel(input);
    if (x->codes.data && (column || for_weight)) { /* they were made before */
        x->cast = nd_matrix_with(x->scale, ND_PER_TENSOR);
        x->cast.codes = x->codes;
        if (column) {
            ND_TRY(nd_operand_gather_codes(m, x->codes, m->fp8.x, &x->cast.codes));
        }
        return for_weight ? nd_operand_transpose(m, &x->cast, m->fp8.x_transposed) : ND_OK;
    }
    bool per_tensor = rule->granularity == ND_PER_TENSOR;
    nd_cast how = {
        .rule = rule,
        .split = !column && per_tensor,
        .settled = of_rows || (per_tensor && c.pass == ND_PASS_BACKWARD),
        .record = c.pass == ND_PASS_TRAIN,
        .vectors = of_rows ? *of_rows : m->scales.vectors[0],
    };
    if (x->codes.data) {
        how.codes = x->codes.data;
    } else {
        nd_cast_want(m, &how, for_weight && nd_products_transpose(m), m->fp8.x,
                     m->fp8.x_transposed);
    }
    m->scales.casts.inputs++;
    return nd_operand_cast(m, x, &how);
}

/* Forward. */

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

/* The weight of an FP8 part, for y. */
static nd_status weight_operand(nd_block_call c, const nd_linear_part *p, const joint *j,
                                nd_matrix *w)
{
    const nd_cast_rule *rule = &c.model->scales.recipe.output.b;
    for (int linear = p->first; linear <= p->last; linear++) {
        nd_matrix one;
        ND_TRY(nd_operand_weight(c, linear, rule, false, j->weight ? &j->of_weight : NULL, &one));
        *w = linear == p->first ? one : *w;
    }
    if (p->last > p->first) {
        *w = joined(c, p, *w, weight_of(c, p));
    }
    return ND_OK;
}

/* y (T, rows) of one part; x (T, K). */
static nd_status output(nd_block_call c, const nd_linear_part *p, const nd_operand *x, nd_tensor y)
{
    nd_model *m = c.model;
    const nd_gemm_rule *rule = &m->scales.recipe.output;
    nd_matrix w;
    if (!p->fp8) {
        ND_OP(m->rank, GEMM, product, .c = y, .a = nd_rows(x->rows),
              .b = {.rows = weight_of(c, p), .kept = packed_of(c, p, true)}, .b_transposed = true,
              .few_rows = c.pass == ND_PASS_GENERATE);
        return ND_OK;
    }
    joint j = joint_of(c, p, false, x->rows.shape[0]);
    ND_TRY(weight_operand(c, p, &j, &w));
    w.kept = packed_of(c, p, true);
    nd_matrix a = x->cast;
    a.codes = padded_rows(m, a.codes);
    a.rows = padded_rows(m, a.rows);
    ND_OP(m->rank, GEMM, product, .c = padded_rows(m, y), .a = a, .b = w, .b_transposed = true,
          .fast_accumulation = rule->fast_accumulation, .scratch = m->fp8.gemm);
    return ND_OK;
}

/* The rows of all tp ranks. */
static nd_status gather_rows(nd_model *m, nd_operand *x)
{
    return nd_tp_gather(m->rank, x->rows, m->full_a, COMM, &x->rows);
}

static nd_status column_forward(nd_block_call c, nd_input input, nd_operand *x, nd_tensor y)
{
    nd_model *m = c.model;
    bool any = nd_input_in_fp8(c, input);
    x->codes = any ? x->codes : (nd_tensor){0};
    if (x->codes.data) {
        ND_TRY(nd_operand_keep(c, x));
    } else {
        ND_TRY(gather_rows(m, x));
    }
    if (any) {
        ND_TRY(cast_input(c, input, false, NULL, x));
    }
    for (nd_linear_part p = no_part(input); next_joined_part(c, input, &p);) {
        ND_TRY(output(c, &p, x, nd_tensor_columns(y, p.offset, p.rows)));
    }
    return ND_OK;
}

static nd_status row_forward(nd_block_call c, nd_input input, nd_operand *x, nd_tensor y)
{
    nd_model *m = c.model;
    nd_tensor partial = nd_tp_partial(m->rank, y, m->full_b);
    nd_linear_part p = no_part(input);
    (void)next_part(c, input, &p);
    if (p.fp8) {
        joint j = joint_of(c, &p, false, x->rows.shape[0]);
        ND_TRY(settle_joint(c, input, false, x->rows));
        ND_TRY(cast_input(c, input, false, j.rows ? &j.of_rows : NULL, x));
    }
    ND_TRY(output(c, &p, x, partial));
    return nd_tp_reduce(m->rank, partial, y, COMM);
}

nd_status nd_linear_forward(nd_block_call c, nd_input input, nd_operand *x, nd_tensor y)
{
    return is_column_parallel(input) ? column_forward(c, input, x, y) : row_forward(c, input, x, y);
}

/* Backward. */

/* Makes dy->cast, the form of the gradient of a part's output that dx or (for_weight) dw reads.
 * With one scale both read the same codes. */
static nd_status cast_gradient(nd_block_call c, const nd_linear_part *p, bool for_weight,
                               nd_operand *dy)
{
    nd_model *m = c.model;
    const nd_recipe *recipe = &m->scales.recipe;
    const nd_cast_rule *rule = for_weight ? &recipe->weight_gradient.a : &recipe->input_gradient.a;
    bool per_tensor = rule->granularity == ND_PER_TENSOR;
    bool transposes = nd_products_transpose(m);
    joint j = for_weight ? (joint){0} : joint_of(c, p, true, dy->rows.shape[0]);
    nd_cast how = {
        .rule = rule,
        .settled = per_tensor || j.rows, /* with the other gradients of the same input */
        .record = true,
        .vectors = j.rows ? j.of_rows : m->scales.vectors[2],
        .codes = m->fp8.dy,
        .transposed = transposes ? m->fp8.dy_transposed : NULL,
    };
    if (per_tensor && dy->cast.scale) {
        return ND_OK;
    }
    if (!per_tensor || nd_products_cast(m)) {
        nd_cast_want(m, &how, for_weight && transposes, m->fp8.dy, m->fp8.dy_transposed);
    }
    m->scales.casts.gradients++;
    if (dy->known == ND_KNOWN_CODES) {
        how.codes = dy->codes.data;
        how.transposed = NULL;
        ND_TRY(nd_operand_cast(m, dy, &how));
        return nd_operand_transpose(m, &dy->cast, m->fp8.dy_transposed);
    }
    return nd_operand_cast(m, dy, &how);
}

nd_status nd_linear_input_gradient(nd_block_call c, const nd_linear_part *p, nd_operand *dy,
                                   nd_tensor dx)
{
    nd_model *m = c.model;
    const nd_gemm_rule *rule = &m->scales.recipe.input_gradient;
    float beta = p->offset > 0 ? 1.0f : 0.0f;
    nd_matrix w;
    ND_ASSERT(!p->fp8 || p->first == p->last);
    if (!p->fp8) {
        ND_OP(m->rank, GEMM, product, .c = dx, .a = nd_rows(dy->rows),
              .b = {.rows = weight_of(c, p), .kept = packed_of(c, p, false)}, .beta = beta);
        return ND_OK;
    }
    ND_TRY(cast_gradient(c, p, false, dy));
    joint j = joint_of(c, p, true, dy->rows.shape[0]);
    ND_TRY(nd_operand_weight(c, p->first, &rule->b, true, j.weight ? &j.of_weight : NULL, &w));
    w.kept = packed_of(c, p, false);
    ND_OP(m->rank, GEMM, product, .c = dx, .a = dy->cast, .b = w, .beta = beta,
          .fast_accumulation = rule->fast_accumulation, .scratch = m->fp8.gemm);
    return ND_OK;
}

nd_status nd_linear_weight_gradient(nd_block_call c, const nd_linear_part *p, nd_operand *x,
                                    nd_operand *dy)
{
    nd_model *m = c.model;
    const nd_gemm_rule *rule = &m->scales.recipe.weight_gradient;
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_BLOCK, c.layer);
    float beta = nd_fsdp_grad_beta(&m->fsdp, unit);
    nd_tensor dw = gradient_of(c, p);
    if (!p->fp8 || rule->a.scaling == ND_SCALING_NONE) {
        ND_OP(m->rank, GEMM, product, .c = dw, .a = nd_rows(dy->rows), .a_transposed = true,
              .b = nd_rows(x->rows), .beta = beta);
        return ND_OK;
    }
    ND_ASSERT(p->first == p->last || dy->cast.parts == p->last - p->first + 1);
    ND_TRY(cast_gradient(c, p, true, dy));
    if (!x->cast.scale) {
        ND_TRY(cast_input(c, nd_linear_input(p->first), true, NULL, x));
    }
    ND_OP(m->rank, GEMM, product, .c = dw, .a = dy->cast, .a_transposed = true, .b = x->cast,
          .beta = beta, .fast_accumulation = rule->fast_accumulation, .scratch = m->fp8.gemm);
    return ND_OK;
}

/* One part's columns of the gradient of all outputs. */
static nd_operand part_of(nd_block_call c, const nd_operand *dy, const nd_linear_part *p)
{
    const nd_model *m = c.model;
    const nd_scales *s = &m->scales;
    nd_operand part = {.rows = nd_tensor_columns(dy->rows, p->offset, p->rows), .known = dy->known};
    if (p->fp8) {
        part.scale = nd_scales_at(s, nd_site_gradient(s, c.layer, p->first));
    }
    if (p->fp8 && dy->codes.data) {
        int first;
        (void)nd_input_linears(nd_linear_input(p->first), &first);
        part.codes = nd_tensor_rows(dy->codes, (p->first - first) * m->dims.T, m->dims.T);
    }
    return part;
}

/* Settles the scales of the gradients of all outputs with one reduction, and those of the weights
 * that tp splits. */
static nd_status settle_gradients(nd_block_call c, nd_input input, const nd_operand *dy)
{
    nd_scales *s = &c.model->scales;
    const nd_cast_rule *rule = &s->recipe.input_gradient.a;
    int first, count = nd_input_linears(input, &first);
    if (rule->scaling != ND_SCALING_CURRENT || !nd_input_in_fp8(c, input)) {
        return ND_OK;
    }
    if (rule->granularity != ND_PER_TENSOR) {
        return settle_joint(c, input, true, dy->rows);
    }
    for (nd_linear_part p = no_part(input); next_part(c, input, &p);) {
        if (p.fp8 && dy->known != ND_KNOWN_AMAX) {
            nd_operand part = part_of(c, dy, &p);
            ND_TRY(nd_scales_measure(s, part.scale, ND_PER_TENSOR, part.rows));
        }
    }
    return nd_scales_settle(s, nd_scales_at(s, nd_site_gradient(s, c.layer, first)), count,
                            rule->format, true);
}

/* dx and dw of a part of column-parallel linears. */
static nd_status part_backward(nd_block_call c, const nd_linear_part *p, const nd_operand *dy,
                               nd_operand *x, nd_tensor dx)
{
    nd_operand all = part_of(c, dy, p);
    for (nd_linear_part one = {0}; next_within(c, p, &one);) {
        nd_operand part = part_of(c, dy, &one);
        ND_TRY(nd_linear_input_gradient(c, &one, &part, dx));
        all.cast = one.first == p->first ? part.cast : all.cast;
    }
    if (p->fp8 && p->last > p->first) {
        all.cast = joined(c, p, all.cast, all.rows);
    }
    return nd_linear_weight_gradient(c, p, x, &all);
}

static nd_status column_backward(nd_block_call c, nd_input input, nd_operand *dy, nd_tensor dlocal)
{
    nd_model *m = c.model;
    bool casts = m->scales.recipe.weight_gradient.a.scaling != ND_SCALING_NONE;
    nd_tensor dx = nd_tp_partial(m->rank, dlocal, m->full_b);
    nd_operand x = nd_operand_of(c, input);
    ND_TRY(settle_gradients(c, input, dy));
    if (!x.codes.data) {
        ND_TRY(gather_rows(m, &x));
    }
    if (casts && nd_input_in_fp8(c, input)) {
        ND_TRY(cast_input(c, input, true, NULL, &x));
    }
    for (nd_linear_part p = no_part(input); next_joined_part(c, input, &p);) {
        ND_TRY(part_backward(c, &p, dy, &x, dx));
    }
    return nd_tp_reduce(m->rank, dx, dlocal, COMM);
}

/* With one scale: the gradient is cast, then gathered as codes, which both products read. */
static nd_status gather_gradient_codes(nd_block_call c, nd_operand *dy)
{
    nd_model *m = c.model;
    bool local = m->fp8.dy_local != NULL;
    nd_cast how = {
        .rule = &m->scales.recipe.input_gradient.a,
        .split = true,
        .record = true,
        .codes = local ? m->fp8.dy_local : m->fp8.dy,
        .transposed = local ? NULL : m->fp8.dy_transposed,
    };
    m->scales.casts.gradients++;
    if (!local && nd_products_cast(m)) {
        nd_cast_want(m, &how, false, NULL, NULL);
        return nd_operand_cast(m, dy, &how);
    }
    ND_TRY(nd_operand_cast(m, dy, &how));
    ND_TRY(nd_operand_gather_codes(m, dy->cast.codes, m->fp8.dy, &dy->cast.codes));
    return local ? nd_operand_transpose(m, &dy->cast, m->fp8.dy_transposed) : ND_OK;
}

static nd_status row_backward(nd_block_call c, nd_input input, nd_operand *dy, nd_tensor dx)
{
    nd_model *m = c.model;
    const nd_scales *s = &m->scales;
    nd_linear_part p = no_part(input);
    nd_operand x = nd_operand_of(c, input);
    (void)next_part(c, input, &p);
    if (p.fp8) {
        dy->scale = nd_scales_at(s, nd_site_gradient(s, c.layer, p.first));
    }
    if (p.fp8 && s->recipe.input_gradient.a.granularity == ND_PER_TENSOR) {
        ND_TRY(gather_gradient_codes(c, dy));
    } else {
        ND_TRY(nd_tp_gather(m->rank, dy->rows, m->full_a, COMM, &dy->rows));
    }
    ND_TRY(nd_linear_input_gradient(c, &p, dy, dx));
    return nd_linear_weight_gradient(c, &p, &x, dy);
}

nd_status nd_linear_backward(nd_block_call c, nd_input input, nd_operand *dy, nd_tensor dx)
{
    return is_column_parallel(input) ? column_backward(c, input, dy, dx)
                                     : row_backward(c, input, dy, dx);
}
