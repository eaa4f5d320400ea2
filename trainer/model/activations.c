// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/model.h"

#include <stddef.h>

#include "runtime/base/math.h"

/* Buffers that all blocks share: `lender` of block_acts.def. */
typedef enum lender {
    LENDER_NONE = 0,
    LENDER_DX, /* (Tl, C) */
    LENDER_DH,
    LENDER_DBRANCH, /* (Tl, C), of a branch before the norm behind it */
    LENDER_DACT,    /* (T, F) */
    LENDER_DQKV,    /* (T, QKV) */
    LENDER_COUNT
} lender;

typedef struct act {
    const char *name;
    size_t view;    /* offset of its tensor in nd_block_acts */
    int kept;       /* the most recompute that keeps it */
    bool delayed;   /* kept for delayed weight gradients */
    nd_input input; /* ND_INPUT_COUNT: none */
    enum lender lender;
} act;

enum { ND_RECOMPUTE_NEVER = -1, FOR_DX = false, FOR_DW = true };

/* Numbers of the rows of block_acts.def: of_x_in, ... */
enum {
#define ND_ACT(field, shape, kept, reader, input, lender, name) of_##field,
#include "trainer/model/block_acts.def"
#undef ND_ACT
    ACT_COUNT
};

static const act acts[] = {
#define ND_ACT(field, shape, kept, reader, input, lender, name)                                    \
    {name,                                                                                         \
     offsetof(nd_block_acts, field),                                                               \
     (int)ND_RECOMPUTE_##kept,                                                                     \
     FOR_##reader,                                                                                 \
     ND_INPUT_##input,                                                                             \
     LENDER_##lender},
#include "trainer/model/block_acts.def"
#undef ND_ACT
};

static nd_tensor shape_of(const act *a, const nd_dims *d)
{
    const nd_dtype f32 = ND_DTYPE_F32, fp8 = ND_DTYPE_F8_E4M3;
#define SHAPE_LOCAL             nd_tensor_2d(NULL, d->act, d->Tl, d->C)
#define SHAPE_LOCAL_CODES       nd_tensor_2d(NULL, fp8, d->Tl, d->C)
#define SHAPE_STATISTICS        nd_tensor_1d(NULL, f32, d->Tl)
#define SHAPE_QKV               nd_tensor_2d(NULL, d->act, d->T, d->QKV)
#define SHAPE_HEADS             nd_tensor_2d(NULL, d->act, d->T, d->H * d->D)
#define SHAPE_LSE               nd_tensor_4d(NULL, f32, d->chunks, d->B, d->H, d->chunk)
#define SHAPE_GATE_UP           nd_tensor_2d(NULL, d->act, d->piece, 2 * d->F)
#define SHAPE_FFN               nd_tensor_2d(NULL, d->act, d->piece, d->F)
#define SHAPE_FFN_CODES         nd_tensor_2d(NULL, fp8, d->T, d->F)
#define SHAPE_NORMED            nd_tensor_2d(NULL, d->act, d->T * d->normed, d->D)
#define SHAPE_NORMED_STATISTICS nd_tensor_1d(NULL, f32, d->T * d->normed)
#define SHAPE_BEHIND            nd_tensor_2d(NULL, d->act, d->post_norm ? d->Tl : 0, d->C)
#define SHAPE_BEHIND_STATISTICS nd_tensor_1d(NULL, f32, d->post_norm ? d->Tl : 0)
#define SHAPE_VECTORS           nd_tensor_1d(NULL, f32, 6 * d->C + 2 * d->D + 2 * d->QKV + 2 * d->F)
    const nd_tensor shapes[] = {
#define ND_ACT(field, shape, kept, reader, input, lender, name) SHAPE_##shape,
#include "trainer/model/block_acts.def"
#undef ND_ACT
    };
    return shapes[a - acts];
}

static bool is_codes(const act *a)
{
    return shape_of(a, &(nd_dims){0}).dtype == ND_DTYPE_F8_E4M3;
}

/* PLACE_BORROWED: a gradient that no block keeps lies in a buffer of the backward. So does an input
 * of linears whose codes are kept, until they are made. */
typedef enum place { PLACE_NONE, PLACE_SHARED, PLACE_BORROWED, PLACE_KEPT } place;

/* Returns where an activation of a layer lives. The backward needs an input of linears as codes or
 * in BF16, not both. Gradients of norms and biases wait only where they are reduced over several
 * shards. */
static place place_of(const nd_model *m, const act *a, int64_t layer)
{
    /* The next piece of an MLP overwrites what the last one made. */
    const bool of_piece = nd_mlp_has_pieces(m) && (a == &acts[of_gu] || a == &acts[of_act]);
    bool kept = !m->forward_only && !of_piece &&
                ((int)m->recompute <= a->kept || (m->delays && a->delayed));
    const bool as_codes =
        a->input != ND_INPUT_COUNT && nd_scales_keep_codes(&m->scales, a->input, layer);
    const bool vectors = a == &acts[of_dvectors];
    if ((is_codes(a) && !as_codes) || (vectors && !(kept && m->layout->shards > 1))) {
        return PLACE_NONE;
    }
    if (kept && is_codes(a) == as_codes) {
        return PLACE_KEPT;
    }
    return a->kept < 0 || (as_codes && !is_codes(a)) ? PLACE_BORROWED : PLACE_SHARED;
}

/* Every layer's tensor starts on a 256-byte boundary. */
static size_t stride_of(const nd_model *m, const act *a)
{
    return nd_round_up_bytes(nd_tensor_bytes(shape_of(a, &m->dims)), 256);
}

static size_t layers_in(const nd_model *m, const act *a, place where)
{
    const nd_layer_range layers = m->stage->layers;
    size_t count = 0;
    for (int64_t l = layers.begin; l < layers.end; l++) {
        count += place_of(m, a, l) == where;
    }
    return count;
}

static nd_tensor *view_of(const nd_activation_set *set, const act *a, int64_t layer)
{
    return (nd_tensor *)((char *)nd_set_block(set, layer) + a->view);
}

nd_input_acts nd_set_input(nd_block_call c, nd_input input)
{
    const nd_scales *s = &c.model->scales;
    nd_input_acts out = {0};
    for (int i = 0; i < ACT_COUNT; i++) {
        if (acts[i].input == input) {
            *(is_codes(&acts[i]) ? &out.codes : &out.rows) = *view_of(c.set, &acts[i], c.layer);
        }
    }
    if (s->recipe.name) {
        out.scale = nd_scales_at(s, nd_site_input(s, c.layer, input));
    }
    return out;
}

nd_tensor nd_block_vector_gradient(nd_block_call c, nd_param_id first, nd_param_id last)
{
    const nd_layout *layout = c.model->layout;
    const nd_unit *unit = nd_layout_unit(layout, ND_UNIT_BLOCK, c.layer);
    float *waits = nd_set_block(c.set, c.layer)->dvectors.data;
    int64_t before = 0, rows = 0;
    if (!waits) {
        return nd_fsdp_grad(&c.model->fsdp, first, last, c.layer);
    }
    for (int i = unit->first_param; i < unit->first_param + unit->param_count; i++) {
        const nd_param *p = &layout->params[i];
        before += p->axes == 1 && p->id < first ? p->local_rows : 0;
        rows += p->id >= first && p->id <= last ? p->local_rows : 0;
    }
    return nd_tensor_1d(waits + before, ND_DTYPE_F32, rows);
}

/* The layers that have an activation in `where` find it in a buffer, each `stride` bytes after the
 * one before. */
static void point(nd_model *m, nd_memplan *plan, const act *a, place where, int want, size_t stride)
{
    const nd_layer_range range = m->stage->layers;
    const int64_t layers = range.end - range.begin;
    size_t before = 0;
    for (int64_t i = 0; i < m->set_count * layers; i++) { /* set by set */
        const int64_t l = range.begin + i % layers;
        if (place_of(m, a, l) == where) {
            nd_memplan_also(plan, want, before++ * stride,
                            &view_of(&m->sets[i / layers], a, l)->data);
        }
    }
}

/* Wants the buffer of the layers that keep it, and the one that the other layers share. */
static void plan_activation(nd_model *m, nd_memplan *plan, const act *a)
{
    size_t bytes = stride_of(m, a);
    int want = nd_memplan_want(plan, ND_MEM_ACTIVATIONS, a->name,
                               (size_t)m->set_count * layers_in(m, a, PLACE_KEPT) * bytes, NULL);
    point(m, plan, a, PLACE_KEPT, want, bytes);
    if (!is_codes(a)) {
        want = nd_memplan_want(plan, ND_MEM_SCRATCH, a->name,
                               layers_in(m, a, PLACE_SHARED) ? bytes : 0, NULL);
        point(m, plan, a, PLACE_SHARED, want, 0);
    }
}

/* Recompute makes the codes of one input after the other, each just before its use: they share one
 * buffer. */
static void plan_shared_codes(nd_model *m, nd_memplan *plan)
{
    size_t bytes = 0;
    for (int i = 0; i < ACT_COUNT; i++) {
        bool needed = is_codes(&acts[i]) && layers_in(m, &acts[i], PLACE_SHARED);
        bytes = nd_max_bytes(bytes, needed ? stride_of(m, &acts[i]) : 0);
    }
    int want =
        nd_memplan_want(plan, ND_MEM_SCRATCH, "fp8: codes of a recomputed input", bytes, NULL);
    for (int i = 0; i < ACT_COUNT; i++) {
        if (is_codes(&acts[i])) {
            point(m, plan, &acts[i], PLACE_SHARED, want, 0);
        }
    }
}

/* The block's backward does not read the output of down. */
bool nd_recompute_multiplies(nd_recompute recompute, nd_input input)
{
    static const act *const outputs[ND_INPUT_COUNT] = {[ND_INPUT_QKV] = &acts[of_qkv],
                                                       [ND_INPUT_O] = &acts[of_x_mid],
                                                       [ND_INPUT_GATE_UP] = &acts[of_gu]};
    return outputs[input] && (int)recompute > outputs[input]->kept;
}

static nd_status init_set(const nd_model *m, nd_activation_set *set)
{
    const nd_layer_range layers = m->stage->layers;
    set->layers = layers;
    set->T = m->dims.T;
    set->Tl = m->dims.Tl;
    ND_TRY(ND_ALLOC(layers.end - layers.begin, &set->blocks));
    for (int64_t l = layers.begin; l < layers.end; l++) {
        for (int i = 0; i < ACT_COUNT; i++) {
            *view_of(set, &acts[i], l) = shape_of(&acts[i], &m->dims);
        }
    }
    return ND_OK;
}

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
    int wants[LENDER_COUNT] = {0};
    wants[LENDER_DX] = want(plan, scratch, "residual gradient", dlocal, &m->work.dx);
    wants[LENDER_DH] = want(plan, scratch, "norm gradient", lends ? local : dlocal, &m->work.dh);
    wants[LENDER_DACT] =
        want(plan, scratch, "swiglu gradient",
             nd_tensor_2d(NULL, d->act, lends ? d->piece : 0, d->F), &m->work.dact);
    want(plan, scratch, "q k around their norms",
         nd_tensor_2d(NULL, d->act, d->T * d->normed, d->D), &m->work.qk);
    want(plan, scratch, "q k sums of squares",
         nd_tensor_1d(NULL, ND_DTYPE_F32, d->qk_as_one ? 2 * d->T : 0), &m->work.qk_sums);
    const nd_tensor dbranch = nd_tensor_2d(NULL, d->act, d->post_norm && !m->delays ? Tl : 0, d->C);
    wants[LENDER_DBRANCH] =
        nd_memplan_want(plan, scratch, "branch gradient", nd_tensor_bytes(dbranch), NULL);
    const size_t dqkv = nd_tensor_bytes(nd_tensor_2d(NULL, d->act, T, d->QKV));
    wants[LENDER_DQKV] =
        nd_memplan_want(plan, scratch, "q k v gradient", m->delays ? 0 : dqkv, NULL);
    want(plan, scratch, "attention gradient", nd_tensor_2d(NULL, d->act, T, d->H * d->D),
         &m->work.dout);
    nd_memplan_want(plan, scratch, "tp: gathered", nd_tensor_bytes(full), &m->work.full_a);
    nd_memplan_want(plan, scratch, "tp: partial sums", nd_tensor_bytes(full), &m->work.full_b);
    nd_memplan_want(plan, scratch, "tp: gathered for an mlp in pieces",
                    nd_mlp_has_pieces(m) && !m->forward_only ? nd_tensor_bytes(full) : 0,
                    &m->work.full_h);
    /* Where weight gradients are not delayed, gradients lie in their lenders. An input of linears
     * that is kept as codes lies there until they are made. */
    for (int i = 0; i < ACT_COUNT; i++) {
        ND_ASSERT(acts[i].lender != LENDER_NONE || !layers_in(m, &acts[i], PLACE_BORROWED));
        point(m, plan, &acts[i], PLACE_BORROWED, wants[acts[i].lender], 0);
    }
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

nd_status nd_activations_plan(nd_model *m, const nd_kv_options *cache, nd_memplan *plan)
{
    const nd_dims *d = &m->dims;
    const char *prompts = m->rank->config->train.sample_prompt;
    for (int s = 0; s < m->set_count; s++) {
        ND_TRY(init_set(m, &m->sets[s]));
    }
    for (int i = 0; i < ACT_COUNT; i++) {
        plan_activation(m, plan, &acts[i]);
    }
    plan_shared_codes(m, plan);
    plan_shared(m, plan);
    want_each(m, plan, "final residual", nd_tensor_2d(NULL, d->act, d->Tl, d->C),
              offsetof(nd_activation_set, head.x));
    want(plan, ND_MEM_HEAD, "final norm output of a chunk",
         nd_tensor_2d(NULL, d->act, cache ? d->Tl : d->head_rows, d->C), &m->work.head.h);
    want_each(m, plan, "final norm statistics", nd_tensor_1d(NULL, ND_DTYPE_F32, d->Tl),
              offsetof(nd_activation_set, head.rstd));
    if (!cache) {
        plan_head(m, plan);
    }
    if (cache || (!m->forward_only && prompts && prompts[0])) {
        plan_logits(m, cache ? cache->logits : 1, plan);
    }
    return ND_OK;
}

void nd_activations_narrow(nd_activation_set *set, int64_t T, int64_t Tl)
{
    for (int64_t l = set->layers.begin; l < set->layers.end; l++) {
        for (int i = 0; i < ACT_COUNT; i++) {
            nd_tensor *view = view_of(set, &acts[i], l);
            const int64_t rows = view->axes < 4 ? view->shape[0] : 0; /* lse has chunks */
            view->shape[0] = rows == set->Tl ? Tl : rows == set->T ? T : view->shape[0];
        }
    }
    set->T = T;
    set->Tl = Tl;
}
