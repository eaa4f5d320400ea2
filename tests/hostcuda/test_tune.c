// SPDX-License-Identifier: Apache-2.0
/*
 * Autotune over cuBLASLt's double, whose three algorithms sum in orders of their own and take the
 * times that the test says: 3, 1 and 2 s a product, and in FP8 half of that. So the second
 * algorithm wins everywhere; FP8 loses for q k v, which are one product in BF16 and three in FP8;
 * gate and up are a draw, and stay in FP8; o and down win.
 */
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_ops.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/mesh_cuda.h"
#include "tests/support/ranks.h"
#include "trainer/step/step.h"

static tempdir dir;

static void setup(void)
{
    setenv("ND_DOUBLE_LT_TIMES", "3,1,2", 1);
    setenv("ND_DOUBLE_LT_FP8", "0.5", 1);
    mesh_use_gpus(true, false);
}

TEMPDIR_SUITE(tune, setup, .timeout = 600);

/* After the first step, on each rank: all its products were foreseen, and it has rank 0's
 * choices. */
typedef struct observed {
    const nd_lt_choice *first; /* rank 0's */
    int count, checked;
    long timings; /* events that were compared, on rank 0 */
} observed;

static observed seen;

static nd_status observe(void *context, nd_trainer *t)
{
    observed *o = context;
    const nd_tuning *tuning = t->tuning;
    ND_CHECK(tuning && tuning->choice_count > 0, "nothing was chosen");
    int unchosen = t->rank->ops->tuner->unchosen(t->rank->device);
    ND_CHECK(unchosen == 0, "%d forms of the step were not foreseen", unchosen);
    if (t->rank->rank == 0) {
        o->first = tuning->choices;
        o->count = tuning->choice_count;
        o->timings = nd_double_counts_get().timings;
    }
    ND_TRY(nd_comm_barrier(t->rank->groups.by_kind[ND_GROUP_WORLD]));
    ND_CHECK(tuning->choice_count == o->count &&
                 memcmp(tuning->choices, o->first, (size_t)o->count * sizeof *o->first) == 0,
             "rank %d has other choices than rank 0", t->rank->rank);
    ND_TRY(nd_comm_barrier(t->rank->groups.by_kind[ND_GROUP_WORLD]));
    o->checked += t->rank->rank == 0;
    return ND_OK;
}

static mesh_job job_of(nd_precision precision)
{
    static char data_path[PATH_MAX];
    mesh_job job = mesh_cuda_job(&dir, precision);
    job.data_path = strcpy(data_path, job.data_path); /* which the path of run.json replaces */
    job.steps = 1;
    job.history_length = 4;
    job.autotune = true;
    job.observe = observe;
    job.context = &seen;
    return job;
}

static void expect_second_algorithm(const char *record, const char *name)
{
    json_t *root = json_loads(record, 0, NULL), *product;
    size_t i;
    cr_assert_not_null(root);
    cr_expect_gt(json_array_size(json_object_get(root, "products")), 5, "%s", name);
    json_array_foreach(json_object_get(root, "products"), i, product)
    {
        cr_expect_eq(json_integer_value(json_object_get(product, "picked")), 1, "%s", name);
        cr_expect_eq(json_integer_value(json_object_get(product, "candidates")), 3, "%s", name);
    }
    json_decref(root);
}

/* "q_proj" in an entry whose linears run in FP8 */
static bool runs_in_fp8(const char *record, const char *linear)
{
    json_t *root = json_loads(record, 0, NULL), *entry, *name;
    size_t i, j;
    bool found = false;
    json_array_foreach(json_object_get(root, "linears"), i, entry)
    {
        json_array_foreach(json_object_get(entry, "asked"), j, name)
        {
            found |= json_is_true(json_object_get(entry, "fp8")) &&
                     strstr(json_string_value(name), linear);
        }
    }
    json_decref(root);
    return found;
}

static const char *write_record(const mesh_result *result)
{
    char *text = NULL;
    cr_assert_eq(nd_fs_format(&text, "{\"autotune\": %s}", result->autotune), ND_OK);
    const char *path = tempdir_write(&dir, "run.json", text, strlen(text));
    free(text);
    return path;
}

static const mesh_case one = {"one GPU", 1, 1, 1, 1, 1};
/* Chooses, replays, and compares with a run that does neither. */
static void check(mesh_job job, const mesh_case *mesh)
{
    long timings = nd_double_counts_get().timings; /* of the first GPU, as rank 0's */
    mesh_result tuned = mesh_trained(&job, mesh);
    cr_expect_eq(seen.checked, 1);
    cr_expect_gt(seen.timings, timings + 50);
    timings = seen.timings;
    expect_second_algorithm(tuned.autotune, mesh->name);
    if (job.precision == ND_PRECISION_FP8 && !mesh->recompute) {
        cr_expect_not(runs_in_fp8(tuned.autotune, "q_proj"), "%s: three against one", mesh->name);
        cr_expect(runs_in_fp8(tuned.autotune, "o_proj"), "%s: half the time", mesh->name);
        cr_expect(runs_in_fp8(tuned.autotune, "down_proj"), "%s: half the time", mesh->name);
    }
    char *path = strdup(write_record(&tuned));
    setenv("ND_DOUBLE_LT_TIMES", "1,2,3", 1); /* would choose otherwise */
    job.autotune_from = path;
    mesh_result again = mesh_trained(&job, mesh);
    cr_expect_eq(seen.timings, timings, "%s: a replay times nothing", mesh->name);
    mesh_expect_same(&again, &tuned, MESH_LOSSES | MESH_WEIGHTS, mesh->name);
    setenv("ND_DOUBLE_LT_TIMES", "3,1,2", 1);
    if (mesh == &one) {
        job.autotune = false;
        job.autotune_from = NULL;
        job.observe = NULL;
        mesh_result plain = mesh_trained(&job, mesh);
        cr_expect_neq(plain.norm[0], tuned.norm[0], "%s: other algorithms, other bits", mesh->name);
    }
    free(path);
    seen = (observed){0};
}

static const mesh_case meshes[] = {
    {"one GPU, full recompute, micro-batch 2", 1, 1, 1, 1, 2, .recompute = ND_RECOMPUTE_FULL},
    {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1},
    {"fsdp 2 x cp 2, ring, zero-2", 1, 2, 2, 1, 1, .ring = true, .zero2 = true},
};

enum { MESHES = sizeof meshes / sizeof *meshes };

/* Heads that are normed, norms before and behind, GELU, a window in the first of two layers. */
Test(tune, a_family_with_switches)
{
    for (int fp8 = 0; fp8 < 2; fp8++) {
        mesh_job job = job_of(fp8 ? ND_PRECISION_FP8 : ND_PRECISION_BF16);
        job.shape.family = ND_FAMILY_GEMMA3_TEXT;
        job.shape.qk_norm = 1;
        job.shape.post_norm = 2;
        job.shape.window = 11;
        job.shape.window_theta = 500;
        nd_layer_set_add(&job.shape.full, 1);
        check(job, fp8 ? &meshes[1] : &one);
    }
}

Test(tune, one_gpu)
{
    check(job_of(ND_PRECISION_FP32), &one);
    check(job_of(ND_PRECISION_BF16), &one);
    check(job_of(ND_PRECISION_FP8), &one);
}

Test(tune, meshes)
{
    for (int i = 0; i < MESHES; i++) {
        check(job_of(i % 2 ? ND_PRECISION_FP8 : ND_PRECISION_BF16), &meshes[i]);
    }
}

Test(tune, recipes)
{
    static const nd_fp8_recipe recipes[] = {ND_FP8_ROWWISE, ND_FP8_ROWWISE_GW_HP, ND_FP8_DELAYED,
                                            ND_FP8_TENSORWISE};
    for (int i = 0; i < 4; i++) {
        mesh_job job = job_of(ND_PRECISION_FP8);
        job.recipe = recipes[i];
        job.all_gather = recipes[i] == ND_FP8_TENSORWISE;
        check(job, i % 2 ? &meshes[1] : &one);
    }
}

/* Products of codes whose scales are applied afterwards. */
Test(tune, an_older_library)
{
    mesh_job job = job_of(ND_PRECISION_FP8);
    setenv("ND_DOUBLE_CUBLASLT", "120800", 1);
    job.recipe = ND_FP8_ROWWISE;
    check(job, &one);
}

static void expect_refused(const mesh_job *job, const char *a, const char *b)
{
    mesh_result result;
    cr_expect_eq(mesh_run(job, &one, &result), ND_ERR_CONFIG);
    const char *said = nd_error_last()->message;
    cr_expect(strstr(said, a) && strstr(said, b), "%s", said);
}

Test(tune, a_replay_for_another_machine_is_refused)
{
    mesh_job job = job_of(ND_PRECISION_BF16);
    mesh_result tuned = mesh_trained(&job, &one);
    job.autotune_from = strdup(write_record(&tuned));
    nd_double_machine_get()->other = 0;
    expect_refused(&job, "\"double of a GPU\"", "\"double of another GPU\"");
    nd_double_machine_get()->other = -1;
    setenv("ND_DOUBLE_LT_REFUSES", "all", 1);
    expect_refused(&job, "does not accept the recorded algorithm", "time again");
    free((char *)job.autotune_from);
}
