// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/activations.h"

#include <stddef.h>

#include "trainer/model/linear.h"

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
static unsigned kept_activations(nd_recompute mode)
{
    const unsigned all = (1u << ACT_COUNT) - 1;
    switch (mode) {
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

/* The linears' input that an activation is, as rows or as codes; -1: none. */
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

static bool kept_as_codes(const nd_model *m, act id, int64_t layer)
{
    int input = input_of(id);
    return input >= 0 && nd_linear_keeps_codes(&m->scales, (nd_input)input, layer);
}

/* PLACE_BORROWED: an input of linears whose codes are kept lies in a backward buffer until they are
 * made. */
typedef enum place { PLACE_NONE, PLACE_SHARED, PLACE_BORROWED, PLACE_KEPT } place;

/* Where an activation of a layer lives. Backward needs an input of linears as codes or in BF16, not
 * both. */
static place place_of(const nd_model *m, act id, int64_t layer)
{
    bool kept = kept_activations(m->recompute) >> id & 1;
    bool as_codes = kept_as_codes(m, id, layer);
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
    return (nd_tensor_bytes(spec->shape) + 255) / 256 * 256;
}

static size_t layers_in(const nd_model *m, act id, place where)
{
    size_t layers = 0;
    for (int64_t l = 0; l < m->layout->layers; l++) {
        layers += place_of(m, id, l) == where;
    }
    return layers;
}

/* The layers that have an activation in `where` find it in a buffer, `stride` bytes apart. */
static void point(nd_model *m, nd_memplan *plan, int want, const act_spec *specs, act id,
                  place where, size_t stride)
{
    size_t before = 0;
    for (int64_t l = 0; l < m->layout->layers; l++) {
        if (place_of(m, id, l) == where) {
            char *view = (char *)&m->acts[l] + specs[id].view;
            nd_memplan_also(plan, want, before++ * stride, &((nd_tensor *)view)->data);
        }
    }
}

/* Recompute makes the codes of one input after the other, each just before its use: they share one
 * buffer. */
static void want_shared_codes(nd_model *m, nd_memplan *plan, const act_spec *specs)
{
    size_t bytes = 0;
    for (act id = ACT_H1_CODES; id < ACT_COUNT; id++) {
        size_t needed = layers_in(m, id, PLACE_SHARED) ? stride_of(&specs[id]) : 0;
        bytes = needed > bytes ? needed : bytes;
    }
    int want =
        nd_memplan_want(plan, ND_MEM_SCRATCH, "fp8: codes of a recomputed input", bytes, NULL);
    for (act id = ACT_H1_CODES; id < ACT_COUNT; id++) {
        point(m, plan, want, specs, id, PLACE_SHARED, 0);
    }
}

void nd_activations_plan(nd_model *m, nd_memplan *plan)
{
    act_spec specs[ACT_COUNT];
    describe(&m->dims, specs);
    for (act id = 0; id < ACT_COUNT; id++) {
        const act_spec *spec = &specs[id];
        for (int64_t l = 0; l < m->layout->layers; l++) {
            *(nd_tensor *)((char *)&m->acts[l] + spec->view) = spec->shape;
        }
        size_t kept = layers_in(m, id, PLACE_KEPT), shared = layers_in(m, id, PLACE_SHARED);
        int want =
            nd_memplan_want(plan, ND_MEM_ACTIVATIONS, spec->name, kept * stride_of(spec), NULL);
        point(m, plan, want, specs, id, PLACE_KEPT, stride_of(spec));
        if (!is_codes(id)) {
            want = nd_memplan_want(plan, ND_MEM_SCRATCH, spec->name, shared ? stride_of(spec) : 0,
                                   NULL);
            point(m, plan, want, specs, id, PLACE_SHARED, 0);
        }
    }
    want_shared_codes(m, plan, specs);
}

void nd_activations_borrow(nd_model *m, nd_memplan *plan, int dh, int dact)
{
    act_spec specs[ACT_COUNT];
    describe(&m->dims, specs);
    point(m, plan, dh, specs, ACT_H1, PLACE_BORROWED, 0);
    point(m, plan, dh, specs, ACT_H2, PLACE_BORROWED, 0);
    point(m, plan, dact, specs, ACT_SWIGLU, PLACE_BORROWED, 0);
}
