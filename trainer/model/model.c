// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/model.h"

#include <stdlib.h>

#include "kernels/rope.h"
#include "trainer/model/linear.h"

/* Segments of the memory plan, in the order of ids_of_plan. */
enum {
    ID_X_IN,
    ID_RSTD1,
    ID_H1,
    ID_QKV,
    ID_O,
    ID_LSE,
    ID_X_MID,
    ID_RSTD2,
    ID_H2,
    ID_GU,
    ID_ACT,
    ID_H1_CODES,
    ID_H2_CODES,
    ID_ACT_CODES,
    ID_BRANCH,
    ID_DX,
    ID_DH,
    ID_DACT,
    ID_DQKV,
    ID_DOUT,
    ID_FULL_A,
    ID_FULL_B,
    ID_X_FINAL,
    ID_H_FINAL,
    ID_RSTD_FINAL,
    ID_DH_FINAL,
    ID_LOGITS,
    ID_HEAD_FULL,
    ID_HEAD_DFULL,
    ID_ROW_MAX,
    ID_ROW_SUMS,
    ID_GLOBAL_MAX,
    ID_NUMBERS,
    ID_ROPE_COS,
    ID_ROPE_SIN,
    ID_LINEAR,
    ID_COUNT = ID_LINEAR + ND_LINEAR_PLAN_IDS
};

/* What each mode keeps of a block: one bit per activation, ID_X_IN .. ID_ACT_CODES. */
static unsigned kept_activations(nd_recompute mode)
{
    const unsigned all = (1u << ND_ACT_COUNT) - 1;
    switch (mode) {
    case ND_RECOMPUTE_NONE:
        return all;
    case ND_RECOMPUTE_SELECTIVE:
        return all & ~(1u << ID_H1 | 1u << ID_H2 | 1u << ID_ACT | 1u << ID_H1_CODES |
                       1u << ID_H2_CODES | 1u << ID_ACT_CODES);
    case ND_RECOMPUTE_FULL:
        break;
    }
    return 1u << ID_X_IN;
}

typedef struct act_spec {
    const char *name;
    int64_t rows, columns;
    size_t width;
} act_spec;

static void describe_activations(const nd_dims *d, act_spec out[ND_ACT_COUNT])
{
    size_t act = nd_dtype_size(d->act);
    out[ID_X_IN] = (act_spec){"block inputs", d->Tl, d->C, act};
    out[ID_RSTD1] = (act_spec){"norm 1 statistics", d->Tl, 1, 4};
    out[ID_H1] = (act_spec){"norm 1 outputs", d->Tl, d->C, act};
    out[ID_QKV] = (act_spec){"q k v", d->T, d->QKV, act};
    out[ID_O] = (act_spec){"attention outputs", d->T, d->H * d->D, act};
    out[ID_LSE] = (act_spec){"attention lse", d->T, d->H, 4};
    out[ID_X_MID] = (act_spec){"after attention", d->Tl, d->C, act};
    out[ID_RSTD2] = (act_spec){"norm 2 statistics", d->Tl, 1, 4};
    out[ID_H2] = (act_spec){"norm 2 outputs", d->Tl, d->C, act};
    out[ID_GU] = (act_spec){"gate up", d->T, 2 * d->F, act};
    out[ID_ACT] = (act_spec){"swiglu outputs", d->T, d->F, act};
    out[ID_H1_CODES] = (act_spec){"norm 1 outputs, fp8 codes", d->Tl, d->C, 1};
    out[ID_H2_CODES] = (act_spec){"norm 2 outputs, fp8 codes", d->Tl, d->C, 1};
    out[ID_ACT_CODES] = (act_spec){"swiglu outputs, fp8 codes", d->T, d->F, 1};
}

/* The group of linears that an activation is the input of, and whether it is its codes; -1: of
 * none. */
static int input_of(int id, bool *codes)
{
    *codes = id >= ID_H1_CODES;
    switch (id) {
    case ID_H1:
    case ID_H1_CODES:
        return ND_INPUT_QKV;
    case ID_H2:
    case ID_H2_CODES:
        return ND_INPUT_GATE_UP;
    case ID_ACT:
    case ID_ACT_CODES:
        return ND_INPUT_DOWN;
    default:
        return -1;
    }
}

typedef enum place { PLACE_NONE, PLACE_SHARED, PLACE_KEPT } place;

/* The backward buffer that an input of linears can lie in until its codes are made; -1: it needs
 * one of its own. */
static int borrowed_buffer(const nd_model *m, int id, int64_t layer)
{
    bool codes;
    int input = input_of(id, &codes);
    if (codes || input < 0 || !nd_linear_keeps_codes(&m->scales, (nd_input)input, layer)) {
        return -1;
    }
    return id == ID_ACT ? ID_DACT : ID_DH;
}

/* Where an activation of a layer lives. Backward needs an input of linears as codes or in BF16, not
 * both. */
static place place_of(const nd_model *m, int id, int64_t layer)
{
    bool codes, kept = kept_activations(m->recompute) >> id & 1;
    int input = input_of(id, &codes);
    bool as_codes = input >= 0 && nd_linear_keeps_codes(&m->scales, (nd_input)input, layer);
    if (codes && !as_codes) {
        return PLACE_NONE;
    }
    return kept && codes == as_codes ? PLACE_KEPT : PLACE_SHARED;
}

/* Every layer's tensor starts on a 256-byte boundary. */
static int64_t layer_stride(const act_spec *spec)
{
    int64_t bytes = spec->rows * spec->columns * (int64_t)spec->width;
    return (bytes + 255) / 256 * 256;
}

/* Recompute makes the codes of one input after the other, each before its use: they share one
 * buffer. */
static int shared_id(int id)
{
    return id >= ID_H1_CODES ? ID_ACT_CODES : id;
}

static void plan_blocks(nd_model *m, nd_memplan *plan)
{
    act_spec specs[ND_ACT_COUNT];
    int64_t codes = 0;
    describe_activations(&m->dims, specs);
    for (int i = 0; i < ND_ACT_COUNT; i++) {
        int64_t kept = 0, shared = 0, stride = layer_stride(&specs[i]);
        for (int64_t l = 0; l < m->dims.L; l++) {
            kept += place_of(m, i, l) == PLACE_KEPT;
            shared |= place_of(m, i, l) == PLACE_SHARED && borrowed_buffer(m, i, l) < 0;
        }
        m->ids_of_plan[i] =
            nd_memplan_add(plan, ND_MEM_ACTIVATIONS, specs[i].name, kept * stride, 1);
        if (shared_id(i) == i && i != ID_ACT_CODES) {
            m->ids_shared[i] =
                nd_memplan_add(plan, ND_MEM_SCRATCH, specs[i].name, shared * stride, 1);
        }
        codes = shared && i >= ID_H1_CODES && stride > codes ? stride : codes;
    }
    m->ids_shared[ID_ACT_CODES] =
        nd_memplan_add(plan, ND_MEM_SCRATCH, "fp8: codes of a recomputed input", codes, 1);
}

static void plan_shared(nd_model *m, nd_memplan *plan)
{
    const nd_dims *d = &m->dims;
    size_t act = nd_dtype_size(d->act);
    int64_t local = d->Tl * d->C, full = d->Tl == d->T ? 0 : d->T * d->C;
    int64_t n = d->head_rows * (d->T / d->Tl);
    struct {
        int id;
        nd_mem_class class;
        const char *name;
        int64_t count;
        size_t width;
    } specs[] = {
        {ID_BRANCH, ND_MEM_SCRATCH, "branch output", local, act},
        {ID_DX, ND_MEM_SCRATCH, "residual gradient", local, act},
        {ID_DH, ND_MEM_SCRATCH, "norm gradient", local, act},
        {ID_DACT, ND_MEM_SCRATCH, "swiglu gradient", d->T * d->F, act},
        {ID_DQKV, ND_MEM_SCRATCH, "q k v gradient", d->T * d->QKV, act},
        {ID_DOUT, ND_MEM_SCRATCH, "attention gradient", d->T * d->H * d->D, act},
        {ID_FULL_A, ND_MEM_SCRATCH, "tp: gathered", full, act},
        {ID_FULL_B, ND_MEM_SCRATCH, "tp: partial sums", full, act},
        {ID_X_FINAL, ND_MEM_HEAD, "final residual", local, act},
        {ID_H_FINAL, ND_MEM_HEAD, "final norm output", local, act},
        {ID_RSTD_FINAL, ND_MEM_HEAD, "final norm statistics", d->Tl, 4},
        {ID_DH_FINAL, ND_MEM_HEAD, "final norm gradient", local, act},
        {ID_LOGITS, ND_MEM_HEAD, "logits of a chunk", n * d->V, act},
        {ID_HEAD_FULL, ND_MEM_HEAD, "tp: gathered chunk", full ? n * d->C : 0, act},
        {ID_HEAD_DFULL, ND_MEM_HEAD, "tp: chunk gradient", full ? n * d->C : 0, act},
        {ID_ROW_MAX, ND_MEM_HEAD, "row maxima", n, 4},
        {ID_ROW_SUMS, ND_MEM_HEAD, "row sums and targets", 2 * n, 4},
        {ID_GLOBAL_MAX, ND_MEM_HEAD, "global maxima", n, 4},
        {ID_NUMBERS, ND_MEM_HEAD, "numbers of the step", 1, sizeof(nd_step_numbers)},
        {ID_ROPE_COS, ND_MEM_DATA, "rope cosines", d->S * d->D / 2, 4},
        {ID_ROPE_SIN, ND_MEM_DATA, "rope sines", d->S * d->D / 2, 4},
    };
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        m->ids_of_plan[specs[i].id] =
            nd_memplan_add(plan, specs[i].class, specs[i].name, specs[i].count, specs[i].width);
    }
}

nd_status nd_model_create(nd_rank *rank, nd_memplan *plan, nd_model **out)
{
    nd_model *m = NULL;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &m));
    m->rank = rank;
    m->dims =
        nd_dims_of(&rank->shape, &rank->mesh, rank->coord, rank->config, nd_rank_is_gpu(rank));
    m->recompute = rank->config->parallel.recompute;
    ND_TRY_OUT(nd_scales_init(&m->scales, rank));
    ND_TRY_OUT(nd_layout_create(&rank->shape, &rank->mesh, rank->coord, nd_scales_in_segment,
                                &m->scales, &m->layout));
    ND_TRY_OUT(ND_ALLOC(m->dims.L, &m->acts));
    ND_TRY_OUT(nd_fsdp_init(&m->fsdp, rank, m->layout, &m->scales, m->dims.act, plan));
    ND_TRY_OUT(nd_scales_plan(&m->scales, m->layout, nd_linear_vector(&m->dims), plan));
    plan_blocks(m, plan);
    plan_shared(m, plan);
    nd_batches_plan(&m->batches, rank, &m->dims, plan);
    nd_linear_plan(m, plan, ID_LINEAR);
    nd_cp_init(&m->cp, rank, &m->dims, plan);
    *out = m;
out:
    if (status != ND_OK) {
        nd_model_destroy(m);
    }
    return status;
}

/* One layer's activation: its own part of what is kept, or the buffer that the layers share. */
static char *activation_at(nd_model *m, const nd_memplan *plan, int id, int64_t layer,
                           int64_t stride)
{
    int64_t before = 0;
    int borrowed = borrowed_buffer(m, id, layer);
    switch (place_of(m, id, layer)) {
    case PLACE_NONE:
        break;
    case PLACE_SHARED:
        return nd_memplan_at(plan, borrowed < 0 ? m->ids_shared[shared_id(id)]
                                                : m->ids_of_plan[borrowed]);
    case PLACE_KEPT:
        for (int64_t l = 0; l < layer; l++) {
            before += place_of(m, id, l) == PLACE_KEPT;
        }
        return (char *)nd_memplan_at(plan, m->ids_of_plan[id]) + before * stride;
    }
    return NULL;
}

static nd_dtype activation_dtype(const nd_dims *d, int id)
{
    return id >= ID_H1_CODES ? ND_DTYPE_F8_E4M3 : d->act;
}

static void bind_blocks(nd_model *m, const nd_memplan *plan)
{
    const nd_dims *d = &m->dims;
    act_spec specs[ND_ACT_COUNT];
    describe_activations(d, specs);
    for (int64_t l = 0; l < d->L; l++) {
        nd_block_acts *a = &m->acts[l];
        nd_tensor *views[ND_ACT_COUNT] = {
            [ID_X_IN] = &a->x_in,
            [ID_RSTD1] = &a->rstd1,
            [ID_H1] = &a->h1,
            [ID_QKV] = &a->qkv,
            [ID_O] = &a->o,
            [ID_X_MID] = &a->x_mid,
            [ID_RSTD2] = &a->rstd2,
            [ID_H2] = &a->h2,
            [ID_GU] = &a->gu,
            [ID_ACT] = &a->act,
            [ID_H1_CODES] = &a->h1_codes,
            [ID_H2_CODES] = &a->h2_codes,
            [ID_ACT_CODES] = &a->act_codes,
        };
        for (int i = 0; i < ND_ACT_COUNT; i++) {
            char *data = activation_at(m, plan, i, l, layer_stride(&specs[i]));
            if (i == ID_LSE) {
                a->lse = (float *)data;
            } else if (i == ID_RSTD1 || i == ID_RSTD2) {
                *views[i] = nd_tensor_1d(data, ND_DTYPE_F32, specs[i].rows);
            } else {
                *views[i] =
                    nd_tensor_2d(data, activation_dtype(d, i), specs[i].rows, specs[i].columns);
            }
        }
    }
}

/* The table is made by the host and copied. */
static nd_status load_rope_table(nd_model *m, float *cosines, float *sines)
{
    const nd_dims *d = &m->dims;
    int64_t count = d->S * d->D / 2;
    float *host = NULL;
    ND_TRY(ND_ALLOC(2 * count, &host));
    nd_rope_table(&m->rank->shape.rope, d->D, d->S, host, host + count);
    nd_stream *stream = &m->rank->stream;
    nd_status status = nd_copy(stream, cosines, host, (size_t)count * 4);
    if (status == ND_OK) {
        status = nd_copy(stream, sines, host + count, (size_t)count * 4);
    }
    if (status == ND_OK) {
        status = nd_stream_sync(stream);
    }
    free(host);
    return status;
}

nd_status nd_model_bind(nd_model *m, const nd_memplan *plan)
{
    const nd_dims *d = &m->dims;
    const int *id = m->ids_of_plan;
    nd_fsdp_bind(&m->fsdp, plan);
    ND_TRY(nd_scales_bind(&m->scales, plan));
    nd_linear_bind(m, plan, ID_LINEAR);
    nd_cp_bind(&m->cp, plan);
    bind_blocks(m, plan);
    m->branch = nd_tensor_2d(nd_memplan_at(plan, id[ID_BRANCH]), d->act, d->Tl, d->C);
    m->dx = nd_tensor_2d(nd_memplan_at(plan, id[ID_DX]), d->act, d->Tl, d->C);
    m->dh = nd_tensor_2d(nd_memplan_at(plan, id[ID_DH]), d->act, d->Tl, d->C);
    m->dact = nd_tensor_2d(nd_memplan_at(plan, id[ID_DACT]), d->act, d->T, d->F);
    m->dqkv = nd_tensor_2d(nd_memplan_at(plan, id[ID_DQKV]), d->act, d->T, d->QKV);
    m->dout = nd_tensor_2d(nd_memplan_at(plan, id[ID_DOUT]), d->act, d->T, d->H * d->D);
    m->full_a = nd_memplan_at(plan, id[ID_FULL_A]);
    m->full_b = nd_memplan_at(plan, id[ID_FULL_B]);
    m->x_final = nd_tensor_2d(nd_memplan_at(plan, id[ID_X_FINAL]), d->act, d->Tl, d->C);
    m->h_final = nd_tensor_2d(nd_memplan_at(plan, id[ID_H_FINAL]), d->act, d->Tl, d->C);
    m->rstd_final = nd_tensor_1d(nd_memplan_at(plan, id[ID_RSTD_FINAL]), ND_DTYPE_F32, d->Tl);
    m->dh_final = nd_tensor_2d(nd_memplan_at(plan, id[ID_DH_FINAL]), d->act, d->Tl, d->C);
    m->logits = nd_tensor_2d(nd_memplan_at(plan, id[ID_LOGITS]), d->act,
                             d->head_rows * (d->T / d->Tl), d->V);
    m->head_full = nd_memplan_at(plan, id[ID_HEAD_FULL]);
    m->head_dfull = nd_memplan_at(plan, id[ID_HEAD_DFULL]);
    m->row_max = nd_memplan_at(plan, id[ID_ROW_MAX]);
    m->row_sums = nd_memplan_at(plan, id[ID_ROW_SUMS]);
    m->global_max = nd_memplan_at(plan, id[ID_GLOBAL_MAX]);
    m->numbers = nd_memplan_at(plan, id[ID_NUMBERS]);
    float *cosines = nd_memplan_at(plan, id[ID_ROPE_COS]),
          *sines = nd_memplan_at(plan, id[ID_ROPE_SIN]);
    m->rope = (nd_rope_view){cosines, sines, d->S};
    ND_TRY(nd_batches_bind(&m->batches, plan));
    return load_rope_table(m, cosines, sines);
}

void nd_model_destroy(nd_model *m)
{
    if (m) {
        nd_batches_fini(&m->batches);
        nd_fsdp_fini(&m->fsdp);
        nd_scales_fini(&m->scales);
        nd_layout_destroy(m->layout);
        free(m->acts);
        free(m);
    }
}

nd_status nd_model_load_batch(nd_model *m, const int32_t *inputs, const int32_t *labels,
                              const int32_t *positions)
{
    return nd_batches_load(&m->batches, inputs, labels, positions);
}
