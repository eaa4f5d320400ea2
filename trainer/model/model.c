// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/model.h"

#include <stddef.h>
#include <stdlib.h>

#include "kernels/rope.h"
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

/* Wants a buffer for a view of this shape. */
static int want(nd_memplan *plan, nd_mem_class class, const char *name, nd_tensor shape,
                nd_tensor *view)
{
    *view = shape;
    return nd_memplan_want(plan, class, name, nd_tensor_bytes(shape), &view->data);
}

/* Wants, for each set, a buffer for its view of this shape that lies `field` bytes into the set. */
static void want_each(nd_model *m, nd_memplan *plan, const char *name, nd_tensor shape,
                      size_t field)
{
    const size_t each = nd_round_up_bytes(nd_tensor_bytes(shape), 256);
    const size_t bytes = (size_t)(m->set_count - 1) * each + nd_tensor_bytes(shape);
    const int wanted = nd_memplan_want(plan, ND_MEM_HEAD, name, bytes, NULL);
    for (int s = 0; s < m->set_count; s++) {
        nd_tensor *view = (nd_tensor *)((char *)&m->sets[s] + field);
        *view = shape;
        nd_memplan_also(plan, wanted, (size_t)s * each, &view->data);
    }
}

static void plan_shared(nd_model *m, nd_memplan *plan)
{
    const nd_dims *d = &m->dims;
    const nd_mem_class scratch = ND_MEM_SCRATCH;
    nd_tensor local = nd_tensor_2d(NULL, d->act, d->Tl, d->C);
    nd_tensor full = nd_tensor_2d(NULL, d->act, d->Tl == d->T ? 0 : d->T, d->C);
    /* Rows of what only a backward uses; with FP8 the inputs of linears lie in dh and dact. */
    const int64_t T = m->forward_only ? 0 : d->T, Tl = m->forward_only ? 0 : d->Tl;
    const bool lends = !m->forward_only || m->scales.recipe.name;
    nd_tensor dlocal = nd_tensor_2d(NULL, d->act, Tl, d->C);
    want(plan, scratch, "branch output", local, &m->work.branch);
    int wants[ND_LENDER_COUNT] = {0};
    wants[ND_LENDER_DX] = want(plan, scratch, "residual gradient", dlocal, &m->work.dx);
    wants[ND_LENDER_DH] = want(plan, scratch, "norm gradient", lends ? local : dlocal, &m->work.dh);
    wants[ND_LENDER_DACT] =
        want(plan, scratch, "swiglu gradient",
             nd_tensor_2d(NULL, d->act, lends ? d->piece : 0, d->F), &m->work.dact);
    want(plan, scratch, "q k around their norms",
         nd_tensor_2d(NULL, d->act, d->T * d->normed, d->D), &m->work.qk);
    want(plan, scratch, "q k sums of squares",
         nd_tensor_1d(NULL, ND_DTYPE_F32, d->qk_as_one ? 2 * d->T : 0), &m->work.qk_sums);
    const nd_tensor dbranch = nd_tensor_2d(NULL, d->act, d->post_norm && !m->delays ? Tl : 0, d->C);
    wants[ND_LENDER_DBRANCH] =
        nd_memplan_want(plan, scratch, "branch gradient", nd_tensor_bytes(dbranch), NULL);
    const size_t dqkv = nd_tensor_bytes(nd_tensor_2d(NULL, d->act, T, d->QKV));
    wants[ND_LENDER_DQKV] =
        nd_memplan_want(plan, scratch, "q k v gradient", m->delays ? 0 : dqkv, NULL);
    want(plan, scratch, "attention gradient", nd_tensor_2d(NULL, d->act, T, d->H * d->D),
         &m->work.dout);
    nd_memplan_want(plan, scratch, "tp: gathered", nd_tensor_bytes(full), &m->work.full_a);
    nd_memplan_want(plan, scratch, "tp: partial sums", nd_tensor_bytes(full), &m->work.full_b);
    nd_memplan_want(plan, scratch, "tp: gathered for an mlp in pieces",
                    nd_mlp_has_pieces(m) && !m->forward_only ? nd_tensor_bytes(full) : 0,
                    &m->work.full_h);
    nd_activations_borrow(m, plan, wants);
}

/* Bytes of a chunk's rows as the first weight gradient packs them for those of the other tiles; 0:
 * there is one tile, or each packs them. */
static size_t packed_rows_bytes(const nd_model *m)
{
    const nd_dims *d = &m->dims;
    const nd_form_need need = {.role = ND_X_OF_DW,
                               .rows = d->head_rows * (d->T / d->Tl),
                               .columns = d->C,
                               .others = d->head_columns,
                               .stored = d->act,
                               .format = d->act,
                               .uses = (int)nd_ceil_div(d->V, d->head_columns)};
    return m->forward_only ? 0 : m->rank->ops->form(m->rank->device, &need).bytes;
}

static void plan_head(nd_model *m, nd_memplan *plan)
{
    const nd_dims *d = &m->dims;
    int64_t n = d->head_rows * (d->T / d->Tl);
    const nd_mem_class head = ND_MEM_HEAD;
    nd_tensor full = nd_tensor_2d(NULL, d->act, d->Tl == d->T ? 0 : n, d->C);
    want_each(m, plan, "final norm gradient",
              nd_tensor_2d(NULL, d->act, m->forward_only ? 0 : d->Tl, d->C),
              offsetof(nd_activation_set, head.dh));
    nd_tensor logits = nd_tensor_2d(NULL, d->act, n, m->forward_only ? d->head_columns : d->V);
    bool tiles = !m->forward_only && d->act != ND_DTYPE_F32 && d->head_columns < d->V;
    nd_tensor dsum = nd_tensor_2d(NULL, ND_DTYPE_F32, n, tiles ? d->C : 0);
    nd_memplan_want(plan, head, "logits of a chunk", nd_tensor_bytes(logits), &m->work.head.logits);
    nd_memplan_want(plan, head, "gradient over tiles of logits", nd_tensor_bytes(dsum),
                    &m->work.head.dsum);
    nd_memplan_want(plan, head, "packed rows of a chunk, for dw", packed_rows_bytes(m),
                    &m->work.head.packed_h.memory);
    nd_memplan_want(plan, head, "tp: gathered chunk", nd_tensor_bytes(full), &m->work.head.full);
    nd_memplan_want(plan, head, "tp: chunk gradient", m->forward_only ? 0 : nd_tensor_bytes(full),
                    &m->work.head.dfull);
    nd_memplan_want(plan, head, "row maxima", (size_t)n * sizeof(float), &m->work.head.row_max);
    nd_memplan_want(plan, head, "row sums and targets", (size_t)(2 * n) * sizeof(float),
                    &m->work.head.row_sums);
    nd_memplan_want(plan, head, "global maxima", (size_t)n * sizeof(float),
                    &m->work.head.global_max);
    const size_t sums = (size_t)(2 * m->sources) * sizeof *m->source_sums;
    int numbers = nd_memplan_want(plan, head, "numbers of the step", sums + sizeof *m->numbers,
                                  &m->source_sums);
    nd_memplan_also(plan, numbers, sums, &m->numbers);
}

/* The logits that the host reads. */
static void plan_logits(nd_model *m, int64_t count, nd_memplan *plan)
{
    const nd_dims *d = &m->dims;
    const nd_mem_class head = ND_MEM_HEAD;
    const int64_t tp = d->T / d->Tl;
    nd_tensor logits = nd_tensor_2d(NULL, ND_DTYPE_F32, count, d->V);
    want(plan, head, "rows of logits", nd_tensor_2d(NULL, d->act, count, d->C),
         &m->work.logits.rows);
    want(plan, head, "logits", logits, &m->work.logits.logits);
    nd_memplan_want(plan, head, "tp: gathered logits",
                    tp > 1 ? (size_t)tp * nd_tensor_bytes(logits) : 0, &m->work.logits.gathered);
}

static void plan_rope(nd_model *m, int64_t positions, nd_memplan *plan)
{
    const nd_dims *d = &m->dims;
    size_t bytes = (size_t)(positions * d->rotated / 2) * sizeof(float);
    const nd_shape *s = &m->rank->shape;
    nd_rope_view *const views[] = {&m->rope, s->rope.query_beta > 0 ? &m->query_rope : NULL,
                                   s->window_theta > 0 ? &m->window_rope : NULL};
    for (size_t v = 0; v < sizeof views / sizeof *views; v++) {
        if (!views[v]) {
            continue;
        }
        views[v]->positions = positions;
        nd_memplan_want(plan, ND_MEM_DATA, "rope cosines", bytes, &views[v]->cos);
        nd_memplan_want(plan, ND_MEM_DATA, "rope sines", bytes, &views[v]->sin);
    }
}

nd_status nd_model_plan_weights(nd_model *m, bool shares, nd_memplan *plan)
{
    const int64_t tiles = nd_ceil_div(m->dims.V, m->dims.head_columns);
    ND_TRY(nd_fsdp_plan_weights(&m->fsdp, shares, plan));
    ND_TRY(nd_packed_init(&m->packed, &m->fsdp, tiles));
    if (!m->forward_only) {
        nd_linears_want_packed(m);
        nd_head_want_packed(m);
    }
    return ND_OK;
}

nd_status nd_model_create(nd_rank *rank, const nd_model_options *o, nd_memplan *plan,
                          nd_model **out)
{
    nd_model *m = NULL;
    size_t fp8[ND_FP8_BUFFERS];
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &m));
    m->rank = rank;
    m->dims =
        nd_dims_of(&rank->shape, &rank->mesh, rank->coord, rank->config, nd_rank_is_gpu(rank));
    if (o->cache) {
        m->dims = nd_dims_of_rows(m->dims, &rank->mesh, o->cache->tokens);
    }
    m->recompute = rank->config->parallel.recompute;
    m->forward_only = o->forward_only;
    m->sources = o->sources > 1 ? o->sources : 0;
    m->set_count = (int)nd_max(1, o->sets);
    m->delays = o->delays;
    ND_TRY_OUT(ND_ALLOC(m->set_count, &m->sets));
    ND_ASSERT(!o->cache || o->forward_only);
    ND_TRY_OUT(nd_scales_init(&m->scales, rank, o->linears, o->forward_only));
    ND_TRY_OUT(o->cache ? ND_OK : nd_mlp_pieces_init(m));
    ND_TRY_OUT(m->set_count == 1 || !m->scales.recipe.name
                   ? ND_OK
                   : nd_fail(ND_ERR_INTERNAL, "%d micro-batches in flight, but FP8 scales of one",
                             m->set_count));
    /* linear.c pads the rows of FP8 products up to these. */
    ND_ASSERT(!m->scales.recipe.name || rank->ops->fp8_rows == 0 ||
              m->dims.T % rank->ops->fp8_rows == 0);
    nd_layout_options layout = {.shape = &rank->shape,
                                .mesh = &rank->mesh,
                                .coord = rank->coord,
                                .converts = nd_scales_in_segment,
                                .context = &m->scales};
    ND_TRY_OUT(nd_layout_create(&layout, &m->layout));
    m->stage = &m->layout->stages[0];
    /* plan_head, and forward and backward below, take the stage for the whole model. */
    ND_ASSERT(m->layout->stage_count == 1 && m->stage->embeds && m->stage->has_head);
    ND_TRY_OUT(nd_fsdp_init(&m->fsdp, rank, m->layout, &m->scales, o->forward_only, plan));
    ND_TRY_OUT(nd_linears_create(m, fp8));
    const nd_dims *d = &m->dims;
    /* Kept weights have their own. A backward has those of dy and w of up to three linears. */
    ND_TRY_OUT(nd_scales_plan(&m->scales, m->layout,
                              nd_max(nd_max(d->T, d->C), nd_max(d->H * d->D, d->F)),
                              o->forward_only ? d->T : 3 * (d->T + d->C), plan));
    ND_TRY_OUT(nd_activations_init(m, plan));
    plan_shared(m, plan);
    const char *prompts = rank->config->train.sample_prompt;
    want_each(m, plan, "final residual", nd_tensor_2d(NULL, d->act, d->Tl, d->C),
              offsetof(nd_activation_set, head.x));
    want(plan, ND_MEM_HEAD, "final norm output of a chunk",
         nd_tensor_2d(NULL, d->act, o->cache ? d->Tl : d->head_rows, d->C), &m->work.head.h);
    want_each(m, plan, "final norm statistics", nd_tensor_1d(NULL, ND_DTYPE_F32, d->Tl),
              offsetof(nd_activation_set, head.rstd));
    if (!o->cache) {
        plan_head(m, plan);
    }
    if (o->cache || (!o->forward_only && prompts && prompts[0])) {
        plan_logits(m, o->cache ? o->cache->logits : 1, plan);
    }
    plan_rope(m, o->cache ? o->cache->capacity : m->dims.S, plan);
    m->batches.sources = (int)nd_min(m->sources, rank->config->train.micro_batch_size);
    m->batches.first_keys = o->separate ? nd_cp_first_key_count(rank, &m->dims) : 0;
    nd_batches_plan(&m->batches, rank, &m->dims, m->set_count, plan);
    nd_linears_plan(m, fp8, plan);
    if (o->cache) {
        nd_kv_cache_plan(&m->kv, rank, &m->dims, m->stage->layers, o->cache, plan);
    } else {
        nd_cp_init(&m->cp, rank, &m->dims, o->separate, plan);
    }
    *out = m;
out:
    if (status != ND_OK) {
        nd_model_destroy(m);
    }
    return status;
}

/* The host computes the table and copies it. */
static nd_status load_rope_table(nd_model *m, const nd_rope_config *rope, nd_rope_view to,
                                 bool queries)
{
    const nd_dims *d = &m->dims;
    int64_t count = to.positions * d->rotated / 2;
    float *host = NULL;
    if (count == 0) { /* there is no such table */
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(2 * count, &host));
    nd_rope_table(rope, d->rotated, to.positions, queries, host, host + count);
    nd_stream *stream = &m->rank->stream;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_copy(stream, (float *)to.cos, host, (size_t)count * 4));
    ND_TRY_OUT(nd_copy(stream, (float *)to.sin, host + count, (size_t)count * 4));
    ND_TRY_OUT(nd_stream_sync(stream));
out:
    free(host);
    return status;
}

nd_status nd_model_start(nd_model *m)
{
    ND_TRY(nd_scales_start(&m->scales));
    ND_TRY(nd_batches_open(&m->batches));
    const nd_shape *s = &m->rank->shape;
    const nd_rope_config windows = {.theta = s->window_theta};
    ND_TRY(load_rope_table(m, &s->rope, m->query_rope, true));
    ND_TRY(load_rope_table(m, &windows, m->window_rope, false));
    return load_rope_table(m, &s->rope, m->rope, false);
}

void nd_model_destroy(nd_model *m)
{
    if (m) {
        nd_batches_close(&m->batches);
        free(m->linears);
        nd_packed_fini(&m->packed);
        nd_fsdp_fini(&m->fsdp);
        nd_scales_fini(&m->scales);
        nd_layout_destroy(m->layout);
        for (int s = 0; m->sets && s < m->set_count; s++) {
            nd_activations_fini(&m->sets[s]);
        }
        free(m->sets);
        free(m);
    }
}

nd_status nd_model_unshard(nd_model *m)
{
    ND_TRY(nd_scales_refresh(&m->scales, m->fsdp.master, m->fsdp.version));
    return nd_fsdp_prefetch(&m->fsdp, nd_layout_param(m->layout, ND_PARAM_EMBED, -1)->unit);
}

nd_activation_set *nd_model_take_set(nd_model *m)
{
    nd_activation_set *set = m->sets;
    while (set->taken) {
        set++;
        ND_ASSERT(set < m->sets + m->set_count);
    }
    set->taken = true;
    return set;
}

nd_status nd_model_load(nd_model *m, nd_activation_set *set, const nd_step_batch *from, int micro)
{
    ND_ASSERT(set->taken && !set->loaded);
    set->loaded = true;
    set->micro = micro;
    return nd_batches_load(&m->batches, from, micro, (int)(set - m->sets), &set->batch);
}

nd_status nd_model_load_batch(nd_model *m, nd_activation_set *set, const int32_t *inputs,
                              const int32_t *labels, const int32_t *positions)
{
    const nd_step_batch from = {.inputs = inputs, .labels = labels, .positions = positions};
    return nd_model_load(m, set, &from, 0);
}

nd_status nd_model_give_back(nd_model *m, nd_activation_set *set)
{
    bool loaded = set->loaded;
    ND_ASSERT(set->taken);
    set->taken = set->loaded = false;
    return loaded ? nd_batches_give_back(&m->batches, &set->batch) : ND_OK;
}

/* Embedding and blocks; the head's weights are on their way behind them. */
static nd_status forward_to_head(nd_model *m, nd_activation_set *set, nd_pass pass,
                                 nd_residual *residual)
{
    const nd_unit *head = nd_layout_unit(m->layout, ND_UNIT_HEAD, -1);
    ND_TRY(nd_scales_refresh(&m->scales, m->fsdp.master, m->fsdp.version));
    ND_TRY(nd_embed_forward(m, set, residual));
    return nd_blocks_forward(m, set, m->stage->layers, pass, head, residual);
}

nd_status nd_model_forward(nd_model *m, nd_activation_set *set, nd_pass pass)
{
    nd_residual residual;
    ND_TRY(forward_to_head(m, set, pass, &residual));
    return nd_head_forward(m, set, pass, residual);
}

nd_status nd_model_logits(nd_model *m, nd_activation_set *set, const nd_logits_call *call)
{
    const int64_t tp = m->dims.T / m->dims.Tl, rows = nd_kv_cache_begin(&m->kv, &call->kv, tp);
    nd_residual residual;
    nd_activations_narrow(set, rows, rows / tp);
    ND_TRY(forward_to_head(m, set, ND_PASS_GENERATE, &residual));
    return nd_head_logits(m, set, residual, call);
}

nd_status nd_model_sample(nd_model *m, nd_activation_set *set, int64_t row, float *logits)
{
    nd_residual residual;
    ND_TRY(forward_to_head(m, set, ND_PASS_EVAL, &residual));
    return nd_head_sample(m, set, residual, row, logits);
}

nd_status nd_model_input_gradient(nd_model *m, nd_activation_set *set)
{
    ND_ASSERT(!m->forward_only);
    ND_TRY(nd_head_backward(m, set));
    ND_TRY(nd_blocks_backward(m, set, m->stage->layers, NULL));
    return nd_embed_backward(m, set);
}

nd_status nd_model_weight_gradient(nd_model *m, nd_activation_set *set)
{
    ND_ASSERT(m->delays);
    ND_TRY(nd_blocks_weight_gradient(m, set, m->stage->layers));
    return nd_fsdp_grad_finish(&m->fsdp);
}

nd_status nd_model_backward(nd_model *m, nd_activation_set *set)
{
    ND_TRY(nd_model_input_gradient(m, set));
    return m->delays ? nd_model_weight_gradient(m, set) : nd_fsdp_grad_finish(&m->fsdp);
}
