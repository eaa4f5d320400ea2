// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/linear_impl.h"

/* Transformer Engine's validation runs in BF16, where the BF16 weights are at hand. */
static bool in_fp8(const nd_model *m, int64_t layer, int linear)
{
    const nd_scales *s = &m->scales;
    bool in_bf16 =
        m->pass == ND_PASS_EVAL && nd_recipe_is_delayed(&s->recipe) && !s->codes_gathered;
    return !in_bf16 && nd_filter_converts(&s->filter, layer, linear);
}

bool nd_linear_any_in_fp8(const nd_model *m, nd_input input, int64_t layer)
{
    bool any = false;
    int first, count = nd_input_linears(input, &first);
    for (int l = first; l < first + count; l++) {
        any |= in_fp8(m, layer, l);
    }
    return any;
}

bool nd_linear_keeps_codes(const nd_scales *s, nd_input input, int64_t layer)
{
    int first, count = nd_input_linears(input, &first);
    bool all = nd_filter_mask(&s->filter, layer, input) == (1 << count) - 1;
    return all && input != ND_INPUT_O && nd_recipe_is_per_tensor(&s->recipe);
}

/* the parts of a group: neighbours in BF16 together, each FP8 linear alone */

static int64_t rows_of(const nd_model *m, int64_t layer, int linear)
{
    return nd_layout_param(m->layout, nd_linear_param(linear), layer)->local_rows;
}

nd_linear_part nd_linear_first_part(nd_input input)
{
    int first;
    (void)nd_input_linears(input, &first);
    return (nd_linear_part){.last = first - 1};
}

bool nd_linear_next_part(const nd_model *m, nd_input input, int64_t layer, nd_linear_part *p)
{
    int first, count = nd_input_linears(input, &first), last = first + count - 1;
    if (p->last == last) {
        return false;
    }
    p->offset += p->rows;
    p->first = ++p->last;
    p->fp8 = in_fp8(m, layer, p->first);
    p->rows = rows_of(m, layer, p->first);
    while (!p->fp8 && p->last < last && !in_fp8(m, layer, p->last + 1)) {
        p->rows += rows_of(m, layer, ++p->last);
    }
    return true;
}

nd_tensor nd_linear_weight(const nd_model *m, int64_t layer, const nd_linear_part *p)
{
    return nd_fsdp_weight(&m->fsdp, nd_linear_param(p->first), nd_linear_param(p->last), layer);
}

nd_tensor nd_linear_gradient(const nd_model *m, int64_t layer, const nd_linear_part *p)
{
    return nd_fsdp_grad(&m->fsdp, nd_linear_param(p->first), nd_linear_param(p->last), layer);
}

/* operands */

static nd_fp8 with_codes(nd_fp8 out, const nd_cast_request *q)
{
    nd_dtype format = q->rule->format;
    if (q->codes) {
        out.codes = nd_tensor_2d(q->codes, format, q->x.shape[0], q->x.shape[1]);
    }
    if (q->transposed) {
        out.transposed = nd_tensor_2d(q->transposed, format, q->x.shape[1], q->x.shape[0]);
    }
    return out;
}

static nd_status settle_vector(nd_model *m, const nd_cast_request *q, nd_fp8 *out)
{
    nd_scale_vectors *v = q->vectors;
    bool rows = q->rule->granularity == ND_PER_ROW;
    ND_OP(m->rank, ND_TRACE_CAST, amax, .amax = v->amax, .x = q->x,
          .granularity = q->rule->granularity);
    *out = (nd_fp8){.scale = v->scale, .inverse = v->inverse, .granularity = q->rule->granularity};
    return nd_scales_settle_vector(&m->scales, v, q->x.shape[rows ? 0 : 1], q->rule->format,
                                   q->split);
}

nd_status nd_linear_cast(nd_model *m, const nd_cast_request *q, nd_fp8 *out)
{
    nd_scales *s = &m->scales;
    bool delayed = q->rule->scaling == ND_SCALING_DELAYED;
    nd_fp8 result = nd_scales_at(s, q->site);
    if (q->rule->granularity != ND_PER_TENSOR) {
        ND_TRY(settle_vector(m, q, &result));
    } else if (!delayed && !q->known) {
        if (q->made != ND_MADE_AMAX) {
            ND_TRY(nd_scales_measure(s, q->site, q->x));
        }
        ND_TRY(nd_scales_settle(s, q->site, 1, q->rule->format, q->split));
    }
    result = with_codes(result, q);
    if (q->made != ND_MADE_CODES) {
        float *amax = delayed && q->record ? s->amax + q->site : NULL;
        ND_TRY(nd_scales_cast(s, q->site, result, amax, q->x));
    }
    *out = result;
    return ND_OK;
}

nd_status nd_linear_add_transposed(nd_model *m, nd_fp8 *operand, void *buffer)
{
    if (m->rank->ops->fp8_needs_transposed) {
        operand->transposed = nd_tensor_2d(buffer, operand->codes.dtype, operand->codes.shape[1],
                                           operand->codes.shape[0]);
        ND_OP(m->rank, ND_TRACE_CAST, fp8_transpose, .out = operand->transposed,
              .codes = operand->codes);
    }
    return ND_OK;
}

nd_status nd_linear_weight_operand(nd_model *m, int64_t layer, int linear, const nd_cast_rule *rule,
                                   bool over_rows, nd_fp8 *out)
{
    nd_scales *s = &m->scales;
    nd_param_id id = nd_linear_param(linear);
    int64_t site = nd_site_weight(s, layer, linear);
    bool transposed = over_rows && m->rank->ops->fp8_needs_transposed;
    if (s->codes_gathered) {
        *out = nd_scales_at(s, site);
        out->codes = nd_fsdp_codes(&m->fsdp, id, layer);
        return transposed ? nd_linear_add_transposed(m, out, m->fp8.w_transposed) : ND_OK;
    }
    bool row_parallel = nd_layout_param(m->layout, id, layer)->split == ND_SPLIT_COLS;
    nd_cast_request q = {
        .rule = rule,
        .site = site,
        .x = nd_fsdp_weight(&m->fsdp, id, id, layer),
        .split = over_rows ? !row_parallel : row_parallel,
        .known = true,
        .vectors = &s->vectors[1],
        .codes = transposed ? NULL : m->fp8.w,
        .transposed = transposed ? m->fp8.w_transposed : NULL,
    };
    s->casts.weights++;
    return nd_linear_cast(m, &q, out);
}

static nd_tensor as_bytes(nd_tensor codes)
{
    codes.dtype = ND_DTYPE_U8;
    return codes;
}

nd_status nd_linear_gather_codes(nd_model *m, nd_tensor codes, void *buffer, nd_tensor *full)
{
    ND_TRY(nd_tp_gather(m->rank, as_bytes(codes), buffer, ND_TRACE_COMMUNICATION, full));
    full->dtype = codes.dtype;
    return ND_OK;
}

nd_cast_request nd_linear_input_request(nd_model *m, nd_input input, int64_t layer,
                                        const nd_cast_rule *rule, nd_tensor x)
{
    return (nd_cast_request){
        .rule = rule,
        .site = nd_site_input(&m->scales, layer, input),
        .x = x,
        .known = m->pass == ND_PASS_BACKWARD,
        .record = m->pass == ND_PASS_TRAIN,
        .made = nd_linear_take_input(m, input),
        .vectors = &m->scales.vectors[0],
    };
}

void nd_linear_want(nd_cast_request *q, bool transposed, void *codes, void *transposed_codes)
{
    q->codes = transposed ? NULL : codes;
    q->transposed = transposed ? transposed_codes : NULL;
}

nd_status nd_linear_recast(nd_model *m, nd_input input, int64_t layer, nd_tensor x, nd_tensor codes)
{
    nd_fp8 out;
    if (!codes.data) {
        return ND_OK;
    }
    nd_cast_request q = nd_linear_input_request(m, input, layer, &m->scales.recipe.output.a, x);
    q.split = true;
    q.codes = codes.data;
    m->scales.casts.inputs++;
    return nd_linear_cast(m, &q, &out);
}
