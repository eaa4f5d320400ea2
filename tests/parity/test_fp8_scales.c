// SPDX-License-Identifier: Apache-2.0
/*
 * Which ranks agree on which scales, and that those of weights follow every update. A rank of a tp
 * group measures a part of every split tensor: with current scaling the group agrees on one amax,
 * so that codes which travel mean the same everywhere; groups that see other tokens have scales of
 * their own. With `delayed` all ranks of the job agree at the end of a step. Weights are the same
 * everywhere, and so are their scales, from one reduction a step.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "tests/parity/fp8_job.h"
#include "trainer/step/step.h"

enum { STEPS = 3 };
enum { MAX_RANKS = 8, MAX_SITES = 64, WEIGHTS = 2 * ND_LINEAR_COUNT };

static tempdir dir;

TEMPDIR_SUITE(fp8_scales, tempdir_leave_empty, .timeout = 300);

typedef struct observed {
    float scale[MAX_SITES];
    int64_t first, sites; /* inputs and gradients: sites [first, sites) */
    nd_coord coord;
} observed;

static observed seen[MAX_RANKS];

static mesh_job job_of(nd_fp8_recipe recipe, bool all_gather)
{
    mesh_job job = fp8_mesh_job(&dir, STEPS, false, recipe, all_gather);
    job.weight_decay = 0.0;
    return job;
}

static nd_status keep_scales(void *context, nd_trainer *t)
{
    const nd_scales *s = &t->model->scales;
    observed *o = &seen[t->rank->rank];
    cr_assert_leq(s->sites, MAX_SITES);
    o->coord = t->rank->coord;
    o->first = s->layers * ND_LINEAR_COUNT;
    o->sites = s->sites;
    memcpy(o->scale, s->scale, (size_t)s->sites * sizeof *o->scale);
    return ND_OK;
}

static nd_status keep_last(void *context, nd_trainer *t, int64_t step)
{
    return step == STEPS - 1 ? keep_scales(context, t) : ND_OK;
}

static bool same_tokens(const observed *a, const observed *b)
{
    nd_coord x = a->coord, y = b->coord;
    x.at[ND_AXIS_TP] = y.at[ND_AXIS_TP] = 0;
    return memcmp(&x, &y, sizeof x) == 0;
}

/* Ranks that see the same tokens agree, or all do. A cast site on which all ranks agree without
 * need was reduced over too many of them. */
static void compare(const mesh_case *mesh, int ranks, bool all_agree)
{
    for (int64_t i = seen[0].first; i < seen[0].sites; i++) {
        bool differ = false;
        for (int r = 1; r < ranks; r++) {
            for (int q = 0; q < r; q++) {
                float a = seen[r].scale[i], b = seen[q].scale[i];
                bool must = all_agree || same_tokens(&seen[r], &seen[q]);
                differ = differ || a != b;
                cr_assert(a == b || !must, "%s: scale of site %d is %.9g on rank %d, %.9g on %d",
                          mesh->name, (int)i, a, r, b, q);
            }
        }
        /* Nothing is measured of a linear in BF16: amax 0 gives max / 1e-12, at least 4.48e14. */
        bool cast = seen[0].scale[i] != 1.0f && seen[0].scale[i] < 4e14f;
        cr_assert(all_agree || !cast || differ, "%s: all ranks have scale %.9g of site %d",
                  mesh->name, seen[0].scale[i], (int)i);
    }
}

static void run_on(const mesh_job *job, const mesh_case *mesh)
{
    memset(seen, 0, sizeof seen);
    mesh_trained(job, mesh);
}

static void tp_ranks_agree(bool all_gather)
{
    static const mesh_case alone[] = {{"tp 2", 1, 1, 1, 2, 8}, {"tp 4", 1, 1, 1, 4, 8}};
    static const mesh_case shared[] = {{"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 2},
                                       {"fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 4}};
    mesh_job job = job_of(ND_FP8_TENSORWISE, all_gather);
    job.steps = 1;
    job.observe = keep_scales;
    for (int i = 0; i < 2; i++) {
        run_on(&job, &alone[i]);
        cr_assert_gt(seen[0].sites, seen[0].first);
        compare(&alone[i], alone[i].tp, true);
    }
    for (int i = 0; i < 2; i++) {
        run_on(&job, &shared[i]);
        compare(&shared[i], 8, false);
    }
}

Test(fp8_scales, tp_ranks_agree_on_what_they_split_and_codes_gathered)
{
    tp_ranks_agree(true);
}

Test(fp8_scales, tp_ranks_agree_on_what_they_split_and_weights_in_bf16)
{
    tp_ranks_agree(false);
}

Test(fp8_scales, all_ranks_agree_at_the_end_of_a_step_with_delayed)
{
    static const mesh_case meshes[] = {
        {"ddp 2", 2, 1, 1, 1, 4}, {"cp 2", 1, 1, 2, 1, 8}, {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 2}};
    mesh_job job = job_of(ND_FP8_DELAYED, false);
    job.before_step = keep_last;
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        const mesh_case *m = &meshes[i];
        run_on(&job, m);
        compare(m, m->dp_replicate * m->dp_shard * m->cp * m->tp, true);
        int moved = 0;
        for (int64_t s = seen[0].first; s < seen[0].sites; s++) {
            moved += seen[0].scale[s] != 1.0f;
        }
        cr_assert_gt(moved, 0, "%s: all scales have their start value", m->name);
    }
}

/* scales of weights */

/* A rank's weights: the largest |w| that it holds before each step, and the scale after it. */
typedef struct weights_seen {
    float amax[STEPS][WEIGHTS], scale[STEPS][WEIGHTS];
} weights_seen;

static weights_seen weights[MAX_RANKS];

static nd_status keep_amaxes(void *context, nd_trainer *t, int64_t step)
{
    const nd_scales *s = &t->model->scales;
    const float *master = t->model->fsdp.master;
    float *amax = weights[t->rank->rank].amax[step];
    for (int w = 0; w < WEIGHTS; w++) {
        const nd_flat_range part = nd_scales_part(s, w);
        for (int64_t i = part.begin; i < part.end; i++) {
            amax[w] = fmaxf(amax[w], fabsf(master[i]));
        }
    }
    return ND_OK;
}

static nd_status keep_weight_scales(void *context, nd_trainer *t, int64_t step)
{
    memcpy(weights[t->rank->rank].scale[step], t->model->scales.scale, sizeof weights[0].scale[0]);
    return ND_OK;
}

/* 448 / amax of the values that are cast; in F32 as in F64, since a quotient of F32 numbers is
 * rounded alike from both. */
static float scale_of(float amax, const mesh_job *job)
{
    float scale = 448.0f / (job->all_gather ? amax : nd_bf16_to_f32(nd_bf16_from_f32(amax)));
    return job->recipe == ND_FP8_ROWWISE_GW_HP ? exp2f(floorf(log2f(scale))) : scale;
}

static void compare_weight_scales(const mesh_job *job, const mesh_case *mesh, int ranks)
{
    int converted = 0;
    for (int w = 0; w < WEIGHTS; w++) {
        float last = 0.0f;
        for (int step = 0; step < STEPS; step++) {
            float amax = 0.0f;
            for (int r = 0; r < ranks; r++) {
                amax = fmaxf(amax, weights[r].amax[step][w]);
            }
            cr_assert(amax == 0.0f || amax != last, "step %d does not change weight %d", step, w);
            for (int r = 0; r < ranks && amax > 0.0f; r++) {
                cr_expect_eq(weights[r].scale[step][w], scale_of(amax, job),
                             "%s, recipe %d, step %d: scale %.9g of weight %d on rank %d, not %.9g",
                             mesh->name, job->recipe, step, weights[r].scale[step][w], w, r,
                             scale_of(amax, job));
            }
            converted += amax > 0.0f;
            last = amax;
        }
    }
    cr_assert_eq(converted, STEPS * (WEIGHTS - 1), "%d", converted);
}

static long model_reductions(const mesh_job *job, const mesh_case *mesh)
{
    memset(weights, 0, sizeof weights);
    return (long)mesh_trained(job, mesh).calls[ND_GROUP_MODEL][ND_COMM_ALL_REDUCE];
}

/*
 * Updates so large that every weight's largest element changes. With `delayed` the scale after a
 * step is of that step's weights too, used in the next. A step has two micro-batches; the model's
 * group reduces once a step more than in BF16.
 */
Test(fp8_scales, of_weights_follow_every_update_by_one_reduction_a_step)
{
    static const mesh_case meshes[] = {{"fsdp 2 x tp 2", 1, 2, 1, 2, 2},
                                       {"fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 2}};
    static const struct {
        nd_fp8_recipe recipe;
        bool all_gather;
    } ways[] = {{ND_FP8_TENSORWISE, false},
                {ND_FP8_TENSORWISE, true},
                {ND_FP8_DELAYED, false},
                {ND_FP8_DELAYED, true},
                {ND_FP8_ROWWISE_GW_HP, false}};
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        const mesh_case *m = &meshes[i];
        mesh_job job = job_of(ND_FP8_TENSORWISE, false);
        job.lr = 0.05;
        job.precision = ND_PRECISION_BF16;
        long without = model_reductions(&job, m);
        job.precision = ND_PRECISION_FP8;
        job.before_step = keep_amaxes;
        job.after_step = keep_weight_scales;
        for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
            job.recipe = ways[w].recipe;
            job.all_gather = ways[w].all_gather;
            long more = model_reductions(&job, m) - without;
            compare_weight_scales(&job, m, m->dp_shard * m->cp * m->tp);
            cr_expect_eq(more, job.recipe == ND_FP8_DELAYED ? 0 : STEPS,
                         "%s, recipe %d: %ld reductions", m->name, job.recipe, more);
        }
    }
}

/* Products of plain rowwise read no scale of a whole weight: its amaxes are reduced for the health
 * log only, in the steps that it counts: here the second of three. */
Test(fp8_scales, of_rowwise_weights_are_found_for_reports_alone)
{
    static const mesh_case mesh = {"fsdp 2 x tp 2", 1, 2, 1, 2, 2};
    mesh_job job = job_of(ND_FP8_ROWWISE, false);
    job.precision = ND_PRECISION_BF16;
    long without = model_reductions(&job, &mesh);
    job.precision = ND_PRECISION_FP8;
    cr_expect_eq(model_reductions(&job, &mesh), without, "without reports");
    job.health_interval = 2;
    cr_expect_eq(model_reductions(&job, &mesh), without + STEPS / 2, "a report every other step");
}
