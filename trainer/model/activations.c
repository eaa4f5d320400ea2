// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/activations.h"

#include <stddef.h>
#include <stdlib.h>

#include "runtime/base/math.h"

typedef enum act {
    ACT_X_IN = 0,
    ACT_RSTD1,
    ACT_H1,
    ACT_QKV,
    ACT_O,
    ACT_LSE,
    ACT_X_MID,
    ACT_RSTD2,
    ACT_H2,
    ACT_GU,
    ACT_SWIGLU,
    ACT_H1_CODES, /* codes from here on */
    ACT_H2_CODES,
    ACT_SWIGLU_CODES,
    ACT_COUNT
} act;

/* What each mode keeps of a block: one bit per activation. */
static unsigned kept_activations(const nd_activation_options *o)
{
    const unsigned all = (1u << ACT_COUNT) - 1;
    if (o->forward_only) {
        return 0;
    }
    switch (o->recompute) {
    case ND_RECOMPUTE_NONE:
        return all;
    case ND_RECOMPUTE_SELECTIVE:
        return all & ~(1u << ACT_H1 | 1u << ACT_H2 | 1u << ACT_SWIGLU | 1u << ACT_H1_CODES |
                       1u << ACT_H2_CODES | 1u << ACT_SWIGLU_CODES);
    case ND_RECOMPUTE_FULL:
        break;
    }
    return 1u << ACT_X_IN;
}

typedef struct act_spec {
    const char *name;
    size_t view; /* offset of its tensor in nd_block_acts */
    nd_tensor shape;
} act_spec;

#define VIEW(member) offsetof(nd_block_acts, member)

static void describe(const nd_dims *d, act_spec out[ACT_COUNT])
{
    const nd_dtype f32 = ND_DTYPE_F32, fp8 = ND_DTYPE_F8_E4M3;
    nd_tensor local = nd_tensor_2d(NULL, d->act, d->Tl, d->C),
              rows = nd_tensor_1d(NULL, f32, d->Tl);
    nd_tensor local_codes = nd_tensor_2d(NULL, fp8, d->Tl, d->C);
    nd_tensor qkv = nd_tensor_2d(NULL, d->act, d->T, d->QKV);
    nd_tensor o = nd_tensor_2d(NULL, d->act, d->T, d->H * d->D);
    nd_tensor lse = nd_tensor_4d(NULL, f32, d->chunks, d->B, d->H, d->chunk);
    nd_tensor gu = nd_tensor_2d(NULL, d->act, d->T, 2 * d->F);
    nd_tensor swiglu = nd_tensor_2d(NULL, d->act, d->T, d->F);
    nd_tensor swiglu_codes = nd_tensor_2d(NULL, fp8, d->T, d->F);
    out[ACT_X_IN] = (act_spec){"block inputs", VIEW(x_in), local};
    out[ACT_RSTD1] = (act_spec){"norm 1 statistics", VIEW(rstd1), rows};
    out[ACT_H1] = (act_spec){"norm 1 outputs", VIEW(h1), local};
    out[ACT_QKV] = (act_spec){"q k v", VIEW(qkv), qkv};
    out[ACT_O] = (act_spec){"attention outputs", VIEW(o), o};
    out[ACT_LSE] = (act_spec){"attention lse", VIEW(lse), lse};
    out[ACT_X_MID] = (act_spec){"after attention", VIEW(x_mid), local};
    out[ACT_RSTD2] = (act_spec){"norm 2 statistics", VIEW(rstd2), rows};
    out[ACT_H2] = (act_spec){"norm 2 outputs", VIEW(h2), local};
    out[ACT_GU] = (act_spec){"gate up", VIEW(gu), gu};
    out[ACT_SWIGLU] = (act_spec){"swiglu outputs", VIEW(act), swiglu};
    out[ACT_H1_CODES] = (act_spec){"norm 1 outputs, fp8 codes", VIEW(h1_codes), local_codes};
    out[ACT_H2_CODES] = (act_spec){"norm 2 outputs, fp8 codes", VIEW(h2_codes), local_codes};
    out[ACT_SWIGLU_CODES] = (act_spec){"swiglu outputs, fp8 codes", VIEW(act_codes), swiglu_codes};
}

static bool is_codes(act id)
{
    return id >= ACT_H1_CODES;
}

/* Which input of linears an activation is, as rows or as codes; -1: none. */
static int input_of(act id)
{
    switch (id) {
    case ACT_H1:
    case ACT_H1_CODES:
        return ND_INPUT_QKV;
    case ACT_H2:
    case ACT_H2_CODES:
        return ND_INPUT_GATE_UP;
    case ACT_SWIGLU:
    case ACT_SWIGLU_CODES:
        return ND_INPUT_DOWN;
    default:
        return -1;
    }
}

static bool kept_as_codes(const nd_activation_options *o, act id, int64_t layer)
{
    int input = input_of(id);
    return input >= 0 && nd_scales_keep_codes(o->scales, (nd_input)input, layer);
}

/* PLACE_BORROWED: an input of linears whose codes are kept lies in a backward buffer until they are
 * made. */
typedef enum place { PLACE_NONE, PLACE_SHARED, PLACE_BORROWED, PLACE_KEPT } place;

/* Where an activation of a layer lives. Backward needs an input of linears as codes or in BF16, not
 * both. */
static place place_of(const nd_activation_options *o, act id, int64_t layer)
{
    bool kept = kept_activations(o) >> id & 1;
    bool as_codes = kept_as_codes(o, id, layer);
    if (is_codes(id) && !as_codes) {
        return PLACE_NONE;
    }
    if (kept && is_codes(id) == as_codes) {
        return PLACE_KEPT;
    }
    return as_codes && !is_codes(id) ? PLACE_BORROWED : PLACE_SHARED;
}

/* Every layer's tensor starts on a 256-byte boundary. */
static size_t stride_of(const act_spec *spec)
{
    return nd_round_up_bytes(nd_tensor_bytes(spec->shape), 256);
}

static size_t layers_in(const nd_activation_options *o, act id, place where)
{
    size_t layers = 0;
    for (int64_t l = o->layers.begin; l < o->layers.end; l++) {
        layers += place_of(o, id, l) == where;
    }
    return layers;
}

static nd_tensor *view_of(const nd_activation_set *set, const act_spec *spec, int64_t layer)
{
    return (nd_tensor *)((char *)nd_set_block(set, layer) + spec->view);
}

/* A buffer of the layers that have an activation in `where`, each `stride` bytes after the one
 * before. */
typedef struct buffer {
    int want;
    place where;
    size_t stride;
} buffer;

static void point(nd_activation_set *set, const nd_activation_options *o, nd_memplan *plan, act id,
                  buffer at)
{
    act_spec specs[ACT_COUNT];
    size_t before = 0;
    describe(o->dims, specs);
    for (int64_t l = o->layers.begin; l < o->layers.end; l++) {
        if (place_of(o, id, l) == at.where) {
            nd_memplan_also(plan, at.want, before++ * at.stride,
                            &view_of(set, &specs[id], l)->data);
        }
    }
}

/* Wants the buffer of the layers that keep it, and the one that the other layers share. */
static void plan_activation(nd_activation_set *set, const nd_activation_options *o,
                            nd_memplan *plan, act id, const act_spec *spec)
{
    size_t bytes = stride_of(spec);
    int want = nd_memplan_want(plan, ND_MEM_ACTIVATIONS, spec->name,
                               layers_in(o, id, PLACE_KEPT) * bytes, NULL);
    point(set, o, plan, id, (buffer){want, PLACE_KEPT, bytes});
    if (!is_codes(id)) {
        want = nd_memplan_want(plan, ND_MEM_SCRATCH, spec->name,
                               layers_in(o, id, PLACE_SHARED) ? bytes : 0, NULL);
        point(set, o, plan, id, (buffer){want, PLACE_SHARED, 0});
    }
}

/* Recompute makes the codes of one input after the other, each just before its use: they share one
 * buffer. */
static void plan_shared_codes(nd_activation_set *set, const nd_activation_options *o,
                              nd_memplan *plan, const act_spec *specs)
{
    size_t bytes = 0;
    for (act id = ACT_H1_CODES; id < ACT_COUNT; id++) {
        size_t needed = layers_in(o, id, PLACE_SHARED) ? stride_of(&specs[id]) : 0;
        bytes = nd_max_bytes(bytes, needed);
    }
    int want =
        nd_memplan_want(plan, ND_MEM_SCRATCH, "fp8: codes of a recomputed input", bytes, NULL);
    for (act id = ACT_H1_CODES; id < ACT_COUNT; id++) {
        point(set, o, plan, id, (buffer){want, PLACE_SHARED, 0});
    }
}

nd_status nd_activations_init(nd_activation_set *set, const nd_activation_options *o,
                              nd_memplan *plan)
{
    act_spec specs[ACT_COUNT];
    int64_t layers = o->layers.end - o->layers.begin;
    set->layers = o->layers;
    set->T = o->dims->T;
    set->Tl = o->dims->Tl;
    ND_TRY(ND_ALLOC(layers, &set->blocks));
    ND_TRY(ND_ALLOC(layers * ND_INPUT_COUNT, &set->inputs));
    describe(o->dims, specs);
    for (act id = 0; id < ACT_COUNT; id++) {
        for (int64_t l = o->layers.begin; l < o->layers.end; l++) {
            *view_of(set, &specs[id], l) = specs[id].shape;
        }
        plan_activation(set, o, plan, id, &specs[id]);
    }
    plan_shared_codes(set, o, plan, specs);
    return ND_OK;
}

void nd_activations_borrow(nd_activation_set *set, const nd_activation_options *o, nd_memplan *plan,
                           int dh, int dact)
{
    point(set, o, plan, ACT_H1, (buffer){dh, PLACE_BORROWED, 0});
    point(set, o, plan, ACT_H2, (buffer){dh, PLACE_BORROWED, 0});
    point(set, o, plan, ACT_SWIGLU, (buffer){dact, PLACE_BORROWED, 0});
}

void nd_activations_narrow(nd_activation_set *set, int64_t T, int64_t Tl)
{
    set->T = T;
    set->Tl = Tl;
    for (int64_t l = set->layers.begin; l < set->layers.end; l++) {
        nd_block_acts *a = nd_set_block(set, l);
        nd_tensor *local[] = {&a->x_in,  &a->rstd1, &a->h1,       &a->x_mid,
                              &a->rstd2, &a->h2,    &a->h1_codes, &a->h2_codes};
        nd_tensor *full[] = {&a->qkv, &a->o, &a->gu, &a->act, &a->act_codes};
        for (size_t i = 0; i < sizeof local / sizeof *local; i++) {
            local[i]->shape[0] = Tl;
        }
        for (size_t i = 0; i < sizeof full / sizeof *full; i++) {
            full[i]->shape[0] = T;
        }
    }
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
