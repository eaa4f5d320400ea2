// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/linear.h"

#include <stddef.h>
#include <stdlib.h>

#include "runtime/base/math.h"

typedef struct act {
    const char *name;
    size_t view;    /* offset of its tensor in nd_block_acts */
    int kept;       /* the most recompute that keeps it */
    bool delayed;   /* kept for delayed weight gradients */
    nd_input input; /* ND_INPUT_COUNT: none */
    nd_lender lender;
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
     ND_LENDER_##lender},
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

/* Where an activation of a layer lives. Backward needs an input of linears as codes or in BF16, not
 * both. Gradients of norms and biases wait only where they are reduced over several shards. */
static place place_of(const nd_model *m, const act *a, int64_t layer)
{
    /* What an MLP in pieces makes, its next piece overwrites. */
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

nd_status nd_activations_init(nd_model *m, nd_memplan *plan)
{
    for (int s = 0; s < m->set_count; s++) {
        ND_TRY(init_set(m, &m->sets[s]));
    }
    for (int i = 0; i < ACT_COUNT; i++) {
        plan_activation(m, plan, &acts[i]);
    }
    plan_shared_codes(m, plan);
    return ND_OK;
}

void nd_activations_borrow(nd_model *m, nd_memplan *plan, const int wants[ND_LENDER_COUNT])
{
    for (int i = 0; i < ACT_COUNT; i++) {
        ND_ASSERT(acts[i].lender != ND_LENDER_NONE || !layers_in(m, &acts[i], PLACE_BORROWED));
        point(m, plan, &acts[i], PLACE_BORROWED, wants[acts[i].lender], 0);
    }
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

void nd_activations_fini(nd_activation_set *set)
{
    free(set->blocks);
    *set = (nd_activation_set){0};
}
