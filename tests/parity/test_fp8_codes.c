// SPDX-License-Identifier: Apache-2.0
/*
 * FP8 on meshes before the first update, against one worker. Scales and codes of weights are the
 * same bits on every mesh, whatever a rank holds of them, and so are the scale and the codes of the
 * first input that is cast (of the first block's k and v) where ranks see the same tokens: all
 * blocks of this data are equal, so every micro-batch is. Under context parallelism a scale covers
 * the rank's own tokens: it is compared with one worker's input, split and cast here. Input codes
 * are those of the step's casts, or of what a product casts, cast here with its scale; weights
 * gathered in BF16 are cast here, with the step's scales.
 */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/parity/cast_spy.h"
#include "tests/parity/fp8_job.h"
#include "tests/support/ranks.h"
#include "trainer/model/linear.h"
#include "trainer/step/step.h"

enum { SEQUENCE = FP8_SEQUENCE, LAYERS = 2, MAX_RANKS = 8 };
enum { HIDDEN = 64, FFN = 128, WEIGHTS = LAYERS * ND_LINEAR_COUNT, MAX_WEIGHT = HIDDEN * FFN };

static tempdir dir;

TEMPDIR_SUITE(fp8_codes, tempdir_leave_empty, .timeout = 600);

/* A rank's scales, codes and input before the first update. */
typedef struct observed {
    float scale[WEIGHTS], input_scale;
    uint8_t *codes
        [WEIGHTS];  /* of the whole matrix, from the ranks that hold parts of it; 0x7f: of none */
    uint8_t *input; /* (T, C) codes of the input of the first k and v, as the products had them */
    nd_bf16 *h1;    /* (T, C) the same before its cast */
    int64_t tokens;
    nd_coord coord;
} observed;

static cast_spy spies[MAX_RANKS];

static observed seen[MAX_RANKS];

/* The codes of a weight's local block, gathered or, of what is gathered in BF16, cast here with its
 * scale as the products do. */
static nd_status codes_of(nd_trainer *t, const nd_param *p, int64_t site, uint8_t *codes)
{
    nd_model *m = t->model;
    if (p->segment == ND_SEGMENT_FP8) {
        memcpy(codes, nd_fsdp_codes(&m->fsdp, p->id, p->layer).data,
               (size_t)(p->local_rows * p->local_cols));
        return ND_OK;
    }
    const nd_matrix out =
        nd_matrix_with(nd_scales_at(&m->scales, site), &m->scales.recipe.rules[ND_W_OF_Y],
                       nd_tensor_2d(codes, ND_DTYPE_F8_E4M3, p->local_rows, p->local_cols));
    return ND_CALL(t->rank->ops, &t->rank->stream, make_form, .out = out,
                   .x = nd_fsdp_weight(&m->fsdp, p->id, p->id, p->layer));
}

static nd_status observe_weights(void *context, nd_trainer *t)
{
    nd_model *m = t->model;
    observed *o = &seen[t->rank->rank];
    const nd_layout *layout = m->layout;
    uint8_t codes[MAX_WEIGHT];
    for (int64_t layer = 0; layer < LAYERS; layer++) {
        ND_TRY(nd_fsdp_acquire(&m->fsdp, nd_layout_unit(layout, ND_UNIT_BLOCK, layer)));
        for (int l = 0; l < ND_LINEAR_COUNT; l++) {
            const nd_param *p = nd_layout_param(layout, nd_linears[l].param, layer);
            int64_t site = nd_site_weight(&m->scales, layer, l);
            o->scale[site] = m->scales.scale[site];
            if (!nd_filter_converts(&m->scales.filter, layer, l)) {
                continue;
            }
            ND_TRY(codes_of(t, p, site, codes));
            for (int64_t i = 0; i < p->local_rows; i++) {
                memcpy(o->codes[site] + (p->row_begin + i) * p->cols + p->col_begin,
                       codes + i * p->local_cols, (size_t)p->local_cols);
            }
        }
        nd_fsdp_release(&m->fsdp, nd_layout_unit(layout, ND_UNIT_BLOCK, layer));
    }
    return ND_OK;
}

static nd_status spy_on(void *context, nd_trainer *t, int64_t step)
{
    cast_spy_start(&spies[t->rank->rank], t->rank);
    return ND_OK;
}

/* The first input that the step cast: the q of its group stays in BF16, so it is cast after it was
 * gathered, whole. */
static nd_status take_input(void *context, nd_trainer *t, int64_t step)
{
    nd_rank *r = t->rank;
    observed *o = &seen[r->rank];
    const nd_scales *s = &t->model->scales;
    const float *at = s->scale + nd_site_input(s, 0, ND_INPUT_QKV);
    const cast_spy *spy = &spies[r->rank];
    int i = 0;
    while (i < spy->count && i < CAST_SPY_MAX && spy->casts[i].at != at) {
        i++;
    }
    ND_CHECK(i < CAST_SPY_MAX && i < spy->count, "no cast of the first input in %d", spy->count);
    const spied_cast *c = &spy->casts[i];
    ND_CHECK(c->rows == t->model->dims.T && c->columns == HIDDEN, "%ld x %ld", (long)c->rows,
             (long)c->columns);
    o->coord = r->coord;
    o->tokens = c->rows;
    o->input_scale = c->scale[0];
    memcpy(o->h1, c->x, (size_t)(c->rows * HIDDEN) * 2);
    memcpy(o->input, c->codes, (size_t)(c->rows * HIDDEN));
    return ND_OK;
}

static void seen_begin(void)
{
    memset(seen, 0, sizeof seen);
    for (int r = 0; r < MAX_RANKS; r++) {
        for (int w = 0; w < WEIGHTS; w++) {
            seen[r].codes[w] = memset(cast_spy_memory(MAX_WEIGHT), 0x7f, MAX_WEIGHT);
        }
        seen[r].input = cast_spy_memory((size_t)SEQUENCE * HIDDEN);
        seen[r].h1 = cast_spy_memory((size_t)SEQUENCE * HIDDEN * 2);
    }
}

/* The input that a context-parallel rank sees, cast with a scale of its own. */
static spied_cast cast_split(const observed *whole, int cp, int index)
{
    const int64_t chunk = SEQUENCE / (2 * cp), rows = 2 * chunk;
    const size_t bytes = (size_t)(chunk * HIDDEN) * sizeof *whole->h1;
    nd_bf16 *part = cast_spy_memory(2 * bytes);
    memcpy(part, whole->h1 + index * chunk * HIDDEN, bytes);
    memcpy(part + chunk * HIDDEN, whole->h1 + (2 * cp - 1 - index) * chunk * HIDDEN, bytes);
    return cast_by_reference(part, ND_PER_TENSOR, rows, HIDDEN, false);
}

static void compare_inputs(const mesh_case *mesh, const observed *whole, const observed *o)
{
    const uint8_t *codes = whole->input;
    float scale = whole->input_scale;
    if (mesh->cp > 1) {
        const spied_cast split = cast_split(whole, mesh->cp, o->coord.at[ND_AXIS_CP]);
        codes = split.codes;
        scale = split.scale[0];
    }
    cr_assert_eq(memcmp(&o->input_scale, &scale, 4), 0, "%s: input scale %.9g, %.9g expected",
                 mesh->name, o->input_scale, scale);
    cr_assert_eq(memcmp(o->input, codes, (size_t)(o->tokens * HIDDEN)), 0, "%s: input codes",
                 mesh->name);
}

/* Every code that any rank holds is that of one worker, and together they hold all. */
static void compare_weights(const mesh_case *mesh, const observed *whole, int ranks)
{
    for (int w = 0; w < WEIGHTS; w++) {
        for (int i = 0; i < MAX_WEIGHT; i++) {
            int held = 0;
            for (int r = 0; r < ranks; r++) {
                held += seen[r].codes[w][i] != 0x7f;
                cr_assert(seen[r].codes[w][i] == 0x7f || seen[r].codes[w][i] == whole->codes[w][i],
                          "%s: code %d of weight %d on rank %d", mesh->name, i, w, r);
            }
            cr_assert(held > 0 || whole->codes[w][i] == 0x7f, "%s: nobody has code %d of weight %d",
                      mesh->name, i, w);
        }
    }
}

static void same_bits_before_the_first_update(bool all_gather)
{
    static const mesh_case meshes[] = {
        {"ddp 2", 2, 1, 1, 1, 1},
        {"fsdp 2", 1, 2, 1, 1, 1, .zero2 = true},
        {"fsdp 4", 1, 4, 1, 1, 1},
        {"fsdp 8", 1, 8, 1, 1, 1},
        {"tp 2", 1, 1, 1, 2, 1},
        {"tp 4", 1, 1, 1, 4, 1},
        {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1},
        {"cp 2", 1, 1, 2, 1, 1},
        {"fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 1, .ring = true},
    };
    mesh_job job = fp8_mesh_job(&dir, 1, true, ND_FP8_TENSORWISE, all_gather);
    job.observe = observe_weights;
    job.before_step = spy_on;
    job.after_step = take_input;
    seen_begin();
    mesh_trained(&job, &mesh_one);
    const observed whole = seen[0];
    for (int w = 0; w < WEIGHTS; w++) { /* of every linear but the first */
        cr_assert_eq(whole.codes[w][0] == 0x7f, w == 0, "weight %d", w);
    }
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        int ranks = meshes[i].dp_replicate * meshes[i].dp_shard * meshes[i].cp * meshes[i].tp;
        seen_begin();
        mesh_trained(&job, &meshes[i]);
        for (int r = 0; r < ranks; r++) {
            cr_assert_eq(memcmp(seen[r].scale, whole.scale, sizeof whole.scale), 0,
                         "%s: weight scales of rank %d", meshes[i].name, r);
            compare_inputs(&meshes[i], &whole, &seen[r]);
        }
        compare_weights(&meshes[i], &whole, ranks);
    }
}

Test(fp8_codes, same_scales_and_codes_before_the_first_update)
{
    same_bits_before_the_first_update(true);
}

Test(fp8_codes, same_scales_and_codes_when_gathered_in_bf16)
{
    same_bits_before_the_first_update(false);
}
