// SPDX-License-Identifier: Apache-2.0
/*
 * FP8 on meshes against one worker.
 *
 * Before the first update scales and codes of weights are the same bits on every mesh, whatever a
 * rank holds of them, and so are the scale and the codes of the first input that is cast (of the
 * first block's k and v) where ranks see the same tokens: all blocks of this data are equal, so
 * every micro-batch is. Under context parallelism a scale covers the rank's own tokens: it is
 * compared with one worker's input, split and cast here.
 *
 * Later steps differ: sums in another order fall to the other side of a rounding to 3 bits now and
 * then. The losses of 20 steps stay within 5e-3.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/parity/mesh_data.h"
#include "trainer/model/linear.h"
#include "trainer/trainer.h"

enum { SEQUENCE = 64, GLOBAL_BATCH = 8, STEPS = 20, LAYERS = 2, VOCAB = 97, MAX_RANKS = 8 };
enum { HIDDEN = 64, FFN = 128, WEIGHTS = LAYERS * ND_LINEARS_OF_BLOCK, MAX_WEIGHT = HIDDEN * FFN };

static const mesh_case one = {"one worker", 1, 1, 1, 1, 1};
static tempdir dir;

/* With `period` every block is the same. */
static const char *token_file(bool period)
{
    return mesh_token_file(&dir, period ? "same.bin" : "tokens.bin",
                           STEPS * GLOBAL_BATCH * (SEQUENCE + 1), VOCAB, period ? SEQUENCE + 1 : 0);
}

static mesh_job job_of(const char *path, nd_fp8_recipe recipe, bool all_gather)
{
    mesh_job job = mesh_job_on_tokens(path, mesh_small_llama(VOCAB), ND_PRECISION_FP8);
    job.global_batch = GLOBAL_BATCH;
    job.sequence = SEQUENCE;
    job.steps = STEPS;
    job.recipe = recipe;
    job.all_gather = all_gather;
    job.history_length = 16;
    return job;
}

/* What a rank has before the first update. */
typedef struct observed {
    float scale[WEIGHTS], input_scale;
    uint8_t *codes
        [WEIGHTS];  /* of the whole matrix, from the ranks that hold parts of it; 0x7f: of none */
    uint8_t *input; /* (T, C) codes of the input of the first k and v */
    nd_bf16 *h1;    /* (T, C) the same before its cast */
    int64_t tokens;
    nd_coord coord;
} observed;

static observed seen[MAX_RANKS];

static nd_status observe_weights(observed *o, nd_trainer *t)
{
    nd_model *m = t->model;
    const nd_layout *layout = m->layout;
    for (int64_t layer = 0; layer < LAYERS; layer++) {
        ND_TRY(nd_fsdp_acquire(&m->fsdp, layout->first_block + (int)layer));
        for (int l = 0; l < ND_LINEARS_OF_BLOCK; l++) {
            const nd_param *p = &layout->params[nd_layout_find(layout, nd_linear_param(l), layer)];
            int64_t site = nd_site_weight(&m->scales, layer, l);
            o->scale[site] = m->scales.scale[site];
            if (p->segment != ND_SEGMENT_FP8) {
                continue;
            }
            const uint8_t *codes = nd_fsdp_codes(&m->fsdp, p->id, layer).data;
            for (int64_t i = 0; i < p->local_rows; i++) {
                memcpy(o->codes[site] + (p->row_begin + i) * p->cols + p->col_begin,
                       codes + i * p->local_cols, (size_t)p->local_cols);
            }
        }
        nd_fsdp_release(&m->fsdp, layout->first_block + (int)layer);
    }
    return ND_OK;
}

static nd_status observe(void *context, nd_trainer *t)
{
    nd_model *m = t->model;
    nd_rank *r = t->rank;
    observed *o = &seen[r->rank];
    int64_t site = nd_site_input(&m->scales, 0, ND_INPUT_QKV);
    nd_tensor h1;
    ND_TRY(observe_weights(o, t));
    o->coord = r->coord;
    o->tokens = m->dims.T;
    o->input_scale = m->scales.scale[site];
    ND_TRY(nd_tp_gather(r, m->acts[0].h1, o->h1, ND_TRACE_COMMUNICATION, &h1));
    if (h1.data != o->h1) {
        memcpy(o->h1, h1.data, nd_tensor_bytes(h1));
    }
    nd_fp8 out = nd_scales_at(&m->scales, site);
    out.codes = nd_tensor_2d(o->input, ND_DTYPE_F8_E4M3, o->tokens, HIDDEN);
    return r->ops->fp8_cast(&r->stream, out, NULL, h1);
}

static void seen_alloc(void)
{
    for (int r = 0; r < MAX_RANKS; r++) {
        for (int w = 0; w < WEIGHTS; w++) {
            seen[r].codes[w] = malloc(MAX_WEIGHT);
            memset(seen[r].codes[w], 0x7f, MAX_WEIGHT);
        }
        seen[r].input = malloc((size_t)SEQUENCE * HIDDEN);
        seen[r].h1 = malloc((size_t)SEQUENCE * HIDDEN * 2);
    }
}

static void seen_free(void)
{
    for (int r = 0; r < MAX_RANKS; r++) {
        for (int w = 0; w < WEIGHTS; w++) {
            free(seen[r].codes[w]);
        }
        free(seen[r].input);
        free(seen[r].h1);
    }
}

/* The input that a context-parallel rank sees, cast with a scale of its own. */
static void cast_split(const observed *whole, int cp, int index, float *scale, uint8_t *codes)
{
    int64_t chunk = SEQUENCE / (2 * cp), rows = 2 * chunk;
    nd_bf16 *part = malloc((size_t)(rows * HIDDEN) * 2);
    float amax, inverse;
    nd_device *device;
    nd_stream stream;
    const nd_ops *ops;
    memcpy(part, whole->h1 + index * chunk * HIDDEN, (size_t)(chunk * HIDDEN) * 2);
    memcpy(part + chunk * HIDDEN, whole->h1 + (2 * cp - 1 - index) * chunk * HIDDEN,
           (size_t)(chunk * HIDDEN) * 2);
    nd_tensor x = nd_tensor_2d(part, ND_DTYPE_BF16, rows, HIDDEN);
    cr_assert_eq(nd_device_open_cpu(1, &device), ND_OK);
    cr_assert_eq(nd_ops_ref(&ops), ND_OK);
    cr_assert_eq(device->table->stream_init(device, &stream), ND_OK);
    cr_assert_eq(ops->amax(&stream, &amax, x, ND_PER_TENSOR, false), ND_OK);
    cr_assert_eq(ops->fp8_scale(&stream, scale, &inverse, &amax, 1, ND_DTYPE_F8_E4M3, false),
                 ND_OK);
    nd_fp8 out = {.codes = nd_tensor_2d(codes, ND_DTYPE_F8_E4M3, rows, HIDDEN),
                  .scale = scale,
                  .inverse = &inverse};
    cr_assert_eq(ops->fp8_cast(&stream, out, NULL, x), ND_OK);
    nd_device_close(device);
    free(part);
}

static void compare_inputs(const mesh_case *mesh, const observed *whole, const observed *o)
{
    uint8_t codes[SEQUENCE * HIDDEN];
    float scale = whole->input_scale;
    memcpy(codes, whole->input, sizeof codes);
    if (mesh->cp > 1) {
        cast_split(whole, mesh->cp, o->coord.at[ND_AXIS_CP], &scale, codes);
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

static observed keep_first(void)
{
    observed whole = seen[0];
    for (int w = 0; w < WEIGHTS; w++) {
        whole.codes[w] = malloc(MAX_WEIGHT);
        memcpy(whole.codes[w], seen[0].codes[w], MAX_WEIGHT);
    }
    whole.input = malloc((size_t)SEQUENCE * HIDDEN);
    whole.h1 = malloc((size_t)SEQUENCE * HIDDEN * 2);
    memcpy(whole.input, seen[0].input, (size_t)SEQUENCE * HIDDEN);
    memcpy(whole.h1, seen[0].h1, (size_t)SEQUENCE * HIDDEN * 2);
    return whole;
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
    mesh_result result;
    tempdir_make(&dir);
    mesh_job job = job_of(token_file(true), ND_FP8_TENSORWISE, all_gather);
    job.steps = 1;
    job.observe = observe;
    seen_alloc();
    cr_assert_eq(mesh_run(&job, &one, &result), ND_OK, "%s", nd_error_last()->message);
    mesh_result_free(&result);
    observed whole = keep_first();
    seen_free();
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        int ranks = meshes[i].dp_replicate * meshes[i].dp_shard * meshes[i].cp * meshes[i].tp;
        seen_alloc();
        cr_assert_eq(mesh_run(&job, &meshes[i], &result), ND_OK, "%s", nd_error_last()->message);
        for (int r = 0; r < ranks; r++) {
            cr_assert_eq(memcmp(seen[r].scale, whole.scale, sizeof whole.scale), 0,
                         "%s: weight scales of rank %d", meshes[i].name, r);
            compare_inputs(&meshes[i], &whole, &seen[r]);
        }
        compare_weights(&meshes[i], &whole, ranks);
        mesh_result_free(&result);
        seen_free();
    }
    tempdir_remove(&dir);
}

Test(fp8_mesh, same_scales_and_codes_before_the_first_update, .timeout = 600)
{
    same_bits_before_the_first_update(true);
}

Test(fp8_mesh, same_scales_before_the_first_update_when_gathered_in_bf16, .timeout = 600)
{
    same_bits_before_the_first_update(false);
}

static void losses_stay_near(const mesh_job *job, const mesh_case *meshes, size_t count)
{
    mesh_result expected, got;
    cr_assert_eq(mesh_run(job, &one, &expected), ND_OK, "%s", nd_error_last()->message);
    cr_assert_lt(expected.loss[STEPS - 1], expected.loss[0], "the model learns");
    for (size_t i = 0; i < count; i++) {
        double most = 0.0;
        cr_assert_eq(mesh_run(job, &meshes[i], &got), ND_OK, "%s", nd_error_last()->message);
        for (int s = 0; s < STEPS; s++) {
            double error = fabs(got.loss[s] / expected.loss[s] - 1.0);
            most = error > most ? error : most;
            cr_assert_lt(error, 5e-3, "%s: loss of step %d is %.6f, of one worker %.6f",
                         meshes[i].name, s + 1, got.loss[s], expected.loss[s]);
        }
        fprintf(stderr, "fp8 mesh: recipe %d, %-28s losses within %.1e\n", job->recipe,
                meshes[i].name, most);
        mesh_result_free(&got);
    }
    mesh_result_free(&expected);
}

static const mesh_case meshes_of_all_kinds[] = {
    {"ddp 2", 2, 1, 1, 1, 1},
    {"fsdp 4", 1, 4, 1, 1, 2},
    {"fsdp 2, zero-2", 1, 2, 1, 1, 1, .zero2 = true},
    {"hsdp 2 x 2", 2, 2, 1, 1, 1},
    {"tp 2", 1, 1, 1, 2, 1},
    {"tp 4", 1, 1, 1, 4, 1},
    {"cp 2", 1, 1, 2, 1, 1},
    {"cp 2, ring", 1, 1, 2, 1, 1, .ring = true},
    {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1},
    {"fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 1},
};

static void recipe_on_all_meshes(nd_fp8_recipe recipe, bool all_gather)
{
    tempdir_make(&dir);
    mesh_job job = job_of(token_file(false), recipe, all_gather);
    losses_stay_near(&job, meshes_of_all_kinds,
                     sizeof meshes_of_all_kinds / sizeof *meshes_of_all_kinds);
    tempdir_remove(&dir);
}

Test(fp8_mesh, tensorwise, .timeout = 600)
{
    recipe_on_all_meshes(ND_FP8_TENSORWISE, true);
}

Test(fp8_mesh, tensorwise_gathered_in_bf16, .timeout = 600)
{
    recipe_on_all_meshes(ND_FP8_TENSORWISE, false);
}

Test(fp8_mesh, rowwise, .timeout = 600)
{
    recipe_on_all_meshes(ND_FP8_ROWWISE, false);
}

Test(fp8_mesh, rowwise_with_gw_hp, .timeout = 600)
{
    recipe_on_all_meshes(ND_FP8_ROWWISE_GW_HP, false);
}

Test(fp8_mesh, delayed, .timeout = 600)
{
    recipe_on_all_meshes(ND_FP8_DELAYED, true);
}

/* Groups in which some linears stay in BF16: their input travels and is kept in BF16 and is cast
 * after its gather. */
Test(fp8_mesh, groups_of_both_kinds, .timeout = 600)
{
    static const mesh_case meshes[] = {
        {"fsdp 2 x tp 2", 1, 2, 1, 2, 1},
        {"fsdp 2 x tp 2, selective", 1, 2, 1, 2, 1, .recompute = ND_RECOMPUTE_SELECTIVE},
    };
    tempdir_make(&dir);
    for (int all_gather = 0; all_gather < 2; all_gather++) {
        mesh_job job = job_of(token_file(false), ND_FP8_TENSORWISE, all_gather);
        job.filter = "k_proj,up_proj,layers.1.mlp.down_proj,layers.0.self_attn.o_proj";
        losses_stay_near(&job, meshes, sizeof meshes / sizeof *meshes);
    }
    tempdir_remove(&dir);
}

static void assert_same_result(const mesh_result *a, const mesh_result *b, const char *what)
{
    cr_assert_eq(memcmp(a->loss, b->loss, sizeof a->loss), 0, "%s: losses", what);
    for (int t = 0; t < a->tensors; t++) {
        cr_assert_eq(memcmp(a->weights[t], b->weights[t], (size_t)a->sizes[t] * 4), 0, "%s: %s",
                     what, a->names[t]);
    }
}

/* Casting again in backward uses the scales of the forward pass, and delayed amaxes are not taken
 * twice. */
Test(fp8_mesh, recompute_gives_the_same_bits, .timeout = 600)
{
    static const mesh_case base[] = {{"one", 1, 1, 1, 1, 1},
                                     {"fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 1}};
    tempdir_make(&dir);
    for (int recipe = ND_FP8_TENSORWISE; recipe <= (int)ND_FP8_DELAYED; recipe++) {
        mesh_job job =
            job_of(token_file(false), (nd_fp8_recipe)recipe, recipe == ND_FP8_TENSORWISE);
        job.steps = 3;
        for (size_t i = 0; i < sizeof base / sizeof *base; i++) {
            mesh_result expected, got;
            cr_assert_eq(mesh_run(&job, &base[i], &expected), ND_OK);
            for (int mode = ND_RECOMPUTE_SELECTIVE; mode <= (int)ND_RECOMPUTE_FULL; mode++) {
                mesh_case again = base[i];
                again.recompute = (nd_recompute)mode;
                cr_assert_eq(mesh_run(&job, &again, &got), ND_OK);
                assert_same_result(&got, &expected, again.name);
                mesh_result_free(&got);
            }
            mesh_result_free(&expected);
        }
    }
    tempdir_remove(&dir);
}

/*
 * Gathering codes or BF16: the scale of a weight is that of its F32 or of its BF16 values, and so
 * are the codes. While the master weights are BF16 values, as a model loaded from a BF16 file has
 * them, both are the same bits: loss and every gradient of the first step.
 */
Test(fp8_mesh, all_gather_of_codes_changes_nothing_for_bf16_weights, .timeout = 600)
{
    static const mesh_case meshes[] = {
        {"one", 1, 1, 1, 1, 1}, {"fsdp 2 x tp 2", 1, 2, 1, 2, 1}, {"fsdp 4", 1, 4, 1, 1, 1}};
    static const nd_fp8_recipe recipes[] = {ND_FP8_TENSORWISE, ND_FP8_DELAYED};
    tempdir_make(&dir);
    for (size_t i = 0; i < 6; i++) {
        mesh_job job = job_of(token_file(false), recipes[i % 2], true);
        mesh_result on, off;
        job.steps = 1;
        job.bf16_weights = true;
        cr_assert_eq(mesh_run(&job, &meshes[i / 2], &on), ND_OK);
        job.all_gather = false;
        cr_assert_eq(mesh_run(&job, &meshes[i / 2], &off), ND_OK);
        cr_assert_eq(memcmp(on.loss, off.loss, sizeof on.loss), 0, "%s: %.9g, %.9g",
                     meshes[i / 2].name, on.loss[0], off.loss[0]);
        for (int t = 0; t < on.tensors; t++) {
            cr_assert_eq(memcmp(on.gradients[t], off.gradients[t], (size_t)on.sizes[t] * 4), 0,
                         "%s: gradient of %s", meshes[i / 2].name, on.names[t]);
        }
        mesh_result_free(&on);
        mesh_result_free(&off);
    }
    tempdir_remove(&dir);
}
