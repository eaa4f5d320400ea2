// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/activations.h"

#include <stddef.h>
#include <stdlib.h>

#include "runtime/base/math.h"

typedef struct act {
    const char *name;
    size_t view;    /* offset of its tensor in nd_block_acts */
    int kept;       /* the most recompute that keeps it */
    bool delayed;   /* kept for delayed weight gradients */
    nd_input input; /* ND_INPUT_COUNT: none */
} act;

enum { ND_RECOMPUTE_NEVER = -1, FOR_DX = false, FOR_DW = true };

static const act acts[] = {
#define ND_ACT(field, shape, kept, reader, input, name)                                            \
    {name, offsetof(nd_block_acts, field), (int)ND_RECOMPUTE_##kept, FOR_##reader,                 \
     ND_INPUT_##input},
#include "trainer/model/block_acts.def"
#undef ND_ACT
};

enum { ACT_COUNT = sizeof acts / sizeof *acts };

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
#define ND_ACT(field, shape, kept, reader, input, name) SHAPE_##shape,
#include "trainer/model/block_acts.def"
#undef ND_ACT
    };
    return shapes[a - acts];
}

static bool is(const act *a, size_t view)
{
    return a->view == view;
}

static bool is_codes(const act *a)
{
    return shape_of(a, &(nd_dims){0}).dtype == ND_DTYPE_F8_E4M3;
}

static bool kept_as_codes(const nd_activation_options *o, const act *a, int64_t layer)
{
    return a->input != ND_INPUT_COUNT && nd_scales_keep_codes(o->scales, a->input, layer);
}

/* PLACE_BORROWED: a gradient that no block keeps lies in a buffer of the backward. So does an input
 * of linears whose codes are kept, until they are made. */
typedef enum place { PLACE_NONE, PLACE_SHARED, PLACE_BORROWED, PLACE_KEPT } place;

/* Of the MLP in pieces: its next piece overwrites it. */
static bool of_piece(const nd_activation_options *o, const act *a)
{
    return o->dims->piece < o->dims->T &&
           (is(a, offsetof(nd_block_acts, gu)) || is(a, offsetof(nd_block_acts, act)));
}

/* Where an activation of a layer lives. Backward needs an input of linears as codes or in BF16, not
 * both. */
static place place_of(const nd_activation_options *o, const act *a, int64_t layer)
{
    bool kept = !o->forward_only && !of_piece(o, a) &&
                ((int)o->recompute <= a->kept || (o->delays && a->delayed));
    bool as_codes = kept_as_codes(o, a, layer), vectors = is(a, offsetof(nd_block_acts, dvectors));
    if ((is_codes(a) && !as_codes) || (vectors && !(kept && o->collects_vectors))) {
        return PLACE_NONE;
    }
    if (kept && is_codes(a) == as_codes) {
        return PLACE_KEPT;
    }
    return a->kept < 0 || (as_codes && !is_codes(a)) ? PLACE_BORROWED : PLACE_SHARED;
}

/* Every layer's tensor starts on a 256-byte boundary. */
static size_t stride_of(const act *a, const nd_activation_options *o)
{
    return nd_round_up_bytes(nd_tensor_bytes(shape_of(a, o->dims)), 256);
}

static size_t layers_in(const nd_activation_options *o, const act *a, place where)
{
    size_t layers = 0;
    for (int64_t l = o->layers.begin; l < o->layers.end; l++) {
        layers += place_of(o, a, l) == where;
    }
    return layers;
}

static nd_tensor *view_of(const nd_activation_set *set, const act *a, int64_t layer)
{
    return (nd_tensor *)((char *)nd_set_block(set, layer) + a->view);
}

nd_input_acts nd_set_input(const nd_activation_set *set, int64_t layer, nd_input input)
{
    nd_input_acts out = {
        .scale = set->inputs[(layer - set->layers.begin) * ND_INPUT_COUNT + (int64_t)input]};
    for (int i = 0; i < ACT_COUNT; i++) {
        if (acts[i].input == input) {
            *(is_codes(&acts[i]) ? &out.codes : &out.rows) = *view_of(set, &acts[i], layer);
        }
    }
    return out;
}

/* A buffer of the layers that have an activation in `where`, each `stride` bytes after the one
 * before. */
typedef struct buffer {
    int want;
    place where;
    size_t stride;
} buffer;

static void point(nd_activation_set *sets, const nd_activation_options *o, nd_memplan *plan,
                  const act *a, buffer at)
{
    const int64_t layers = o->layers.end - o->layers.begin;
    size_t before = 0;
    for (int64_t i = 0; i < o->sets * layers; i++) { /* set by set */
        const int64_t l = o->layers.begin + i % layers;
        if (place_of(o, a, l) == at.where) {
            void *pointer = &view_of(&sets[i / layers], a, l)->data;
            nd_memplan_also(plan, at.want, before++ * at.stride, pointer);
        }
    }
}

/* Wants the buffer of the layers that keep it, and the one that the other layers share. */
static void plan_activation(nd_activation_set *sets, const nd_activation_options *o,
                            nd_memplan *plan, const act *a)
{
    size_t bytes = stride_of(a, o);
    int want = nd_memplan_want(plan, ND_MEM_ACTIVATIONS, a->name,
                               (size_t)o->sets * layers_in(o, a, PLACE_KEPT) * bytes, NULL);
    point(sets, o, plan, a, (buffer){want, PLACE_KEPT, bytes});
    if (!is_codes(a)) {
        want = nd_memplan_want(plan, ND_MEM_SCRATCH, a->name,
                               layers_in(o, a, PLACE_SHARED) ? bytes : 0, NULL);
        point(sets, o, plan, a, (buffer){want, PLACE_SHARED, 0});
    }
}

/* Recompute makes the codes of one input after the other, each just before its use: they share one
 * buffer. */
static void plan_shared_codes(nd_activation_set *sets, const nd_activation_options *o,
                              nd_memplan *plan)
{
    size_t bytes = 0;
    for (int i = 0; i < ACT_COUNT; i++) {
        bool needed = is_codes(&acts[i]) && layers_in(o, &acts[i], PLACE_SHARED);
        bytes = nd_max_bytes(bytes, needed ? stride_of(&acts[i], o) : 0);
    }
    int want =
        nd_memplan_want(plan, ND_MEM_SCRATCH, "fp8: codes of a recomputed input", bytes, NULL);
    for (int i = 0; i < ACT_COUNT; i++) {
        if (is_codes(&acts[i])) {
            point(sets, o, plan, &acts[i], (buffer){want, PLACE_SHARED, 0});
        }
    }
}

static bool keeps(nd_recompute recompute, size_t view)
{
    const act *a = acts;
    while (!is(a, view)) {
        a++;
    }
    return (int)recompute <= a->kept;
}

bool nd_recompute_multiplies(nd_recompute recompute, nd_input input)
{
    switch (input) {
    case ND_INPUT_QKV:
        return !keeps(recompute, offsetof(nd_block_acts, qkv));
    case ND_INPUT_O:
        return !keeps(recompute, offsetof(nd_block_acts, x_mid));
    case ND_INPUT_GATE_UP:
        return !keeps(recompute, offsetof(nd_block_acts, gu));
    case ND_INPUT_DOWN: /* the block's backward does not read its output */
    case ND_INPUT_COUNT:
        break;
    }
    return false;
}

static nd_status init_set(nd_activation_set *set, const nd_activation_options *o)
{
    int64_t layers = o->layers.end - o->layers.begin;
    set->layers = o->layers;
    set->T = o->dims->T;
    set->Tl = o->dims->Tl;
    ND_TRY(ND_ALLOC(layers, &set->blocks));
    ND_TRY(ND_ALLOC(layers * ND_INPUT_COUNT, &set->inputs));
    for (int64_t l = o->layers.begin; l < o->layers.end; l++) {
        for (int i = 0; i < ACT_COUNT; i++) {
            *view_of(set, &acts[i], l) = shape_of(&acts[i], o->dims);
        }
    }
    return ND_OK;
}

nd_status nd_activations_init(nd_activation_set *sets, const nd_activation_options *o,
                              nd_memplan *plan)
{
    for (int s = 0; s < o->sets; s++) {
        ND_TRY(init_set(&sets[s], o));
    }
    for (int i = 0; i < ACT_COUNT; i++) {
        plan_activation(sets, o, plan, &acts[i]);
    }
    plan_shared_codes(sets, o, plan);
    return ND_OK;
}

void nd_activations_borrow(nd_activation_set *sets, const nd_activation_options *o,
                           nd_memplan *plan, const nd_backward_wants *from)
{
    for (int i = 0; i < ACT_COUNT; i++) {
        const act *a = &acts[i];
        const int of_input = is(a, offsetof(nd_block_acts, act)) ? from->dact : from->dh;
        const bool behind =
            is(a, offsetof(nd_block_acts, dout1)) || is(a, offsetof(nd_block_acts, dout2));
        const int of_gradient = is(a, offsetof(nd_block_acts, dqkv)) ? from->dqkv
                                : behind                             ? from->dbranch
                                                                     : from->dx;
        point(sets, o, plan, a, (buffer){a->kept < 0 ? of_gradient : of_input, PLACE_BORROWED, 0});
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

void nd_activations_start(nd_activation_set *set, const nd_scales *scales)
{
    nd_scale_ref *input = set->inputs;
    for (int64_t l = set->layers.begin; l < set->layers.end && scales->recipe.name; l++) {
        for (nd_input i = 0; i < ND_INPUT_COUNT; i++) {
            *input++ = nd_scales_at(scales, nd_site_input(scales, l, i));
        }
    }
}

void nd_activations_fini(nd_activation_set *set)
{
    free(set->blocks);
    free(set->inputs);
    *set = (nd_activation_set){0};
}
