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
#include "runtime/comm/nccl/nccl.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/doubles/nccl_double.h"
#include "tests/hostcuda/mesh_cuda.h"
#include "tests/parity/mesh_data.h"
#include "tests/support/ranks.h"
#include "trainer/step/step.h"
#include "trainer/tune/measure.h"

enum { SEQUENCE = 32, GLOBAL_BATCH = 4, STEPS = 1, TOKENS = 3000, VOCAB = 96 };

static tempdir dir;
static char data_path[PATH_MAX];

static void setup(void)
{
    tempdir_make(&dir);
    snprintf(data_path, sizeof data_path, "%s",
             mesh_token_file(&dir, "tokens.bin", TOKENS, VOCAB, 0));
    setenv("ND_DOUBLE_LT_TIMES", "3,1,2", 1);
    setenv("ND_DOUBLE_LT_FP8", "0.5", 1);
    mesh_use_gpus(true, false);
}

static void teardown(void)
{
    tempdir_remove(&dir);
}

TestSuite(tune, .init = setup, .fini = teardown, .timeout = 600);

/* After the first step, on each rank: all its products were foreseen, and it has rank 0's
 * choices. */
typedef struct observed {
    const nd_lt_choice *first; /* rank 0's */
    int count, checked;
    long timings; /* events that were compared, on rank 0 */
} observed;

static nd_status observe(void *context, nd_trainer *t)
{
    observed *o = context;
    const nd_tuning *tuning = t->tuning;
    ND_CHECK(tuning && tuning->choice_count > 0, "nothing was chosen");
    int unchosen = nd_ops_cuda_unchosen(t->rank->device);
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

static mesh_job job_of(nd_precision precision, observed *o)
{
    mesh_job job = mesh_job_on_tokens(data_path, mesh_small_llama(VOCAB), precision);
    job.global_batch = GLOBAL_BATCH;
    job.sequence = SEQUENCE;
    job.steps = STEPS;
    job.lr = 0.003;
    job.history_length = 4;
    job.autotune = true;
    job.observe = observe;
    job.context = o;
    return job;
}

static void expect_same_bits(const mesh_result *a, const mesh_result *b, const char *name)
{
    cr_expect(memcmp(a->loss, b->loss, sizeof a->loss) == 0, "%s: losses", name);
    for (int t = 0; t < a->tensors; t++) {
        cr_expect(memcmp(a->weights[t], b->weights[t], (size_t)a->sizes[t] * 4) == 0, "%s: %s",
                  name, a->names[t]);
    }
}

static bool differs(const mesh_result *a, const mesh_result *b)
{
    for (int t = 0; t < a->tensors; t++) {
        if (memcmp(a->weights[t], b->weights[t], (size_t)a->sizes[t] * 4) != 0) {
            return true;
        }
    }
    return false;
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

/* "q_proj" in "fp8" of an entry that was asked for it */
static bool runs_in_fp8(const char *record, const char *linear)
{
    json_t *root = json_loads(record, 0, NULL), *entry, *name;
    size_t i, j;
    bool found = false;
    json_array_foreach(json_object_get(root, "linears"), i, entry)
    {
        json_array_foreach(json_object_get(entry, "fp8"), j, name)
        {
            found |= strstr(json_string_value(name), linear) != NULL;
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
    observed *o = job.context;
    mesh_result tuned, again, plain;
    long timings = nd_double_counts_get().timings; /* of the first GPU, as rank 0's */
    cr_assert_eq(mesh_run(&job, mesh, &tuned), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(o->checked, 1);
    cr_expect_gt(o->timings, timings + 50);
    timings = o->timings;
    expect_second_algorithm(tuned.autotune, mesh->name);
    if (job.precision == ND_PRECISION_FP8 && !mesh->recompute) {
        cr_expect_not(runs_in_fp8(tuned.autotune, "q_proj"), "%s: three against one", mesh->name);
        cr_expect(runs_in_fp8(tuned.autotune, "o_proj"), "%s: half the time", mesh->name);
        cr_expect(runs_in_fp8(tuned.autotune, "down_proj"), "%s: half the time", mesh->name);
    }
    char *path = strdup(write_record(&tuned));
    setenv("ND_DOUBLE_LT_TIMES", "1,2,3", 1); /* would choose otherwise */
    job.autotune_from = path;
    cr_assert_eq(mesh_run(&job, mesh, &again), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(o->timings, timings, "%s: a replay times nothing", mesh->name);
    expect_same_bits(&again, &tuned, mesh->name);
    setenv("ND_DOUBLE_LT_TIMES", "3,1,2", 1);
    if (mesh == &one) {
        job.autotune = false;
        job.autotune_from = NULL;
        job.observe = NULL;
        cr_assert_eq(mesh_run(&job, mesh, &plain), ND_OK, "%s", nd_error_last()->message);
        cr_expect(differs(&plain, &tuned), "%s: other algorithms, other bits", mesh->name);
        mesh_result_free(&plain);
    }
    mesh_result_free(&tuned);
    mesh_result_free(&again);
    free(path);
    *o = (observed){0};
}

static const mesh_case meshes[] = {
    {"one GPU, full recompute, micro-batch 2", 1, 1, 1, 1, 2, .recompute = ND_RECOMPUTE_FULL},
    {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1},
    {"fsdp 2 x cp 2, ring, zero-2", 1, 2, 2, 1, 1, .ring = true, .zero2 = true},
};

enum { MESHES = sizeof meshes / sizeof *meshes };

Test(tune, one_gpu)
{
    observed o = {0};
    check(job_of(ND_PRECISION_FP32, &o), &one);
    check(job_of(ND_PRECISION_BF16, &o), &one);
    check(job_of(ND_PRECISION_FP8, &o), &one);
}

Test(tune, meshes)
{
    observed o = {0};
    for (int i = 0; i < MESHES; i++) {
        check(job_of(i % 2 ? ND_PRECISION_FP8 : ND_PRECISION_BF16, &o), &meshes[i]);
    }
}

Test(tune, recipes)
{
    static const nd_fp8_recipe recipes[] = {ND_FP8_ROWWISE, ND_FP8_ROWWISE_GW_HP, ND_FP8_DELAYED,
                                            ND_FP8_TENSORWISE};
    observed o = {0};
    for (int i = 0; i < 4; i++) {
        mesh_job job = job_of(ND_PRECISION_FP8, &o);
        job.recipe = recipes[i];
        job.all_gather = recipes[i] == ND_FP8_TENSORWISE;
        check(job, i % 2 ? &meshes[1] : &one);
    }
}

/* Products of codes whose scales are applied afterwards. */
Test(tune, an_older_library)
{
    observed o = {0};
    mesh_job job = job_of(ND_PRECISION_FP8, &o);
    setenv("ND_DOUBLE_CUBLASLT", "120800", 1);
    job.recipe = ND_FP8_ROWWISE;
    check(job, &one);
}

/* How the GPU is divided, on each rank after the first step. */
typedef struct divided {
    int64_t blocks, processors; /* what is expected */
    int own; /* communicators that a rank has without autotune; 0: not compared */
    _Atomic int checked;
} divided;

static int blocks_of(const nd_comm *comm)
{
    return nd_double_nccl_blocks(((const nccl_comm *)comm->native)->native);
}

static nd_status observe_division(void *context, nd_trainer *t)
{
    divided *d = context;
    const nd_groups *groups = &t->rank->groups;
    const nd_tuning *tuning = t->tuning;
    const int gathers = blocks_of(groups->by_kind[ND_GROUP_DP_SHARD_CP]),
              reductions = blocks_of(groups->second[ND_GROUP_DP_SHARD_CP]);
    ND_CHECK(gathers == d->blocks && reductions == d->blocks, "rank %d: %d and %d blocks, not %d",
             t->rank->rank, gathers, reductions, (int)d->blocks);
    for (int i = 0; tuning && i < tuning->choice_count; i++) {
        ND_CHECK(tuning->choices[i].key.processors == d->processors,
                 "rank %d: product %d is for %d multiprocessors, not %d", t->rank->rank, i,
                 (int)tuning->choices[i].key.processors, (int)d->processors);
    }
    const int unchosen = nd_ops_cuda_unchosen(t->rank->device), living = nd_double_nccl_living();
    ND_CHECK(!tuning || unchosen == 0, "%d forms of the step were not foreseen", unchosen);
    ND_CHECK(d->own == 0 || living == d->own, "rank %d: %d communicators, not %d", t->rank->rank,
             living, d->own);
    d->checked++;
    return ND_OK;
}

/* "why" of the record's division; owned by the caller, as is *pairs. */
static char *read_division(const mesh_result *result, json_t **pairs)
{
    json_t *root = json_loads(result->autotune, 0, NULL);
    json_t *division = json_object_get(root, "division");
    cr_assert_not_null(division, "%s", result->autotune);
    char *why = strdup(json_string_value(json_object_get(division, "why")));
    *pairs = json_incref(json_object_get(division, "pairs"));
    json_decref(root);
    return why;
}

static const mesh_case fsdp = {"fsdp 2", 1, 2, 1, 1, 1};
enum { WORLD_GATHERS_GRADIENTS = 3 }; /* the communicators of a rank of it */

/* Chooses, and replays in a run whose times would choose otherwise. */
static void expect_division(const mesh_case *mesh, divided expected, const char *why, size_t pairs)
{
    mesh_result tuned, again;
    json_t *timed = NULL;
    divided d = expected;
    mesh_job job = job_of(ND_PRECISION_BF16, NULL);
    const bool gathers = mesh->dp_shard * mesh->cp > 1;
    const int ranks = gathers ? mesh->dp_replicate * mesh->dp_shard * mesh->cp * mesh->tp : 0;
    job.observe = gathers ? observe_division : NULL;
    job.context = &d;
    cr_assert_eq(mesh_run(&job, mesh, &tuned), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(d.checked, ranks);
    char *text = read_division(&tuned, &timed), *path = strdup(write_record(&tuned));
    cr_expect_str_eq(text, why);
    cr_expect_eq(json_array_size(timed), pairs);
    const char *times = getenv("ND_DOUBLE_NCCL_TIMES");
    char *before = times ? strdup(times) : NULL;
    setenv("ND_DOUBLE_NCCL_TIMES", "0=9,4=0.5", 1);
    job.autotune_from = path;
    cr_assert_eq(mesh_run(&job, mesh, &again), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(d.checked, 2 * ranks);
    expect_same_bits(&again, &tuned, mesh->name);
    if (before) {
        setenv("ND_DOUBLE_NCCL_TIMES", before, 1);
    } else {
        unsetenv("ND_DOUBLE_NCCL_TIMES");
    }
    json_decref(timed);
    mesh_result_free(&tuned);
    mesh_result_free(&again);
    free(before);
    free(text);
    free(path);
}

/* Products and collectives take the sum of their times on the double's one clock. */
Test(tune, the_gpu_is_divided_as_takes_least_time)
{
    setenv("ND_DOUBLE_NCCL_TIMES", "0=8,4=6,8=3,16=1,32=9", 1);
    setenv("ND_DOUBLE_LT_PROCESSORS", "0=1,116=0.5", 1);
    expect_division(&fsdp, (divided){16, 116, WORLD_GATHERS_GRADIENTS, 0}, "timed", 9);
    expect_division(&meshes[1], (divided){16, 116, 0, 0}, "timed", 9);
    expect_division(&meshes[2], (divided){16, 116, 0, 0}, "timed", 9);
    setenv("ND_DOUBLE_LT_PROCESSORS", "0=1,128=9,124=9,116=9,100=9", 1);
    expect_division(&fsdp, (divided){16, 132, WORLD_GATHERS_GRADIENTS, 0}, "timed", 9);
}

/* Each rank alone would take another pair: rank 0 four blocks, and rank 1 eight. */
Test(tune, ranks_that_time_differently_divide_alike)
{
    setenv("ND_DOUBLE_LT_PROCESSORS", "128=0.9,124=0.9,116=0.9,100=0.9", 1);
    setenv("ND_DOUBLE_NCCL_TIMES_0", "0=9,4=1,8=9,16=4,32=9", 1);
    setenv("ND_DOUBLE_NCCL_TIMES_1", "0=9,4=9,8=1,16=4,32=9", 1);
    expect_division(&fsdp, (divided){16, 116, WORLD_GATHERS_GRADIENTS, 0}, "timed", 9);
    setenv("ND_DOUBLE_NCCL_TIMES_0", "0=20,4=1,8=1,16=1,32=1", 1);
    setenv("ND_DOUBLE_NCCL_TIMES_1", "0=0.1,4=9,8=10,16=10,32=10", 1); /* alone would not divide */
    expect_division(&fsdp, (divided){4, 128, WORLD_GATHERS_GRADIENTS, 0}, "timed", 9);
}

Test(tune, an_undivided_gpu_stays_so_for_a_small_gain)
{
    setenv("ND_DOUBLE_NCCL_TIMES", "0=8,4=7.9,8=7.9,16=7.9,32=7.9", 1);
    expect_division(&fsdp, (divided){0, 0, WORLD_GATHERS_GRADIENTS, 0}, "timed", 9);
}

/* Without others who gather, and without memory to time them. */
Test(tune, what_cannot_be_timed_is_not_divided)
{
    setenv("ND_DOUBLE_NCCL_TIMES", "0=8,4=1", 1);
    expect_division(&one, (divided){0}, "alone", 0);
    expect_division(&(mesh_case){"tp 2", 1, 1, 1, 2, 1}, (divided){0}, "alone", 0);
    nd_double_machine_get()->memory = (size_t)400 << 20; /* NCCL is estimated at 576 MiB */
    expect_division(&fsdp, (divided){0, 0, WORLD_GATHERS_GRADIENTS, 0}, "memory", 0);
}

static nd_status divide_without_time(void *context, nd_trainer *t)
{
    nd_tuned_division d = {0};
    ND_TRY(nd_divide(t->rank, 0.0, &d));
    ND_CHECK(d.pair_count == 9 && d.pairs[0].seconds > 0.0, "the first pair is timed");
    for (int i = 1; i < d.pair_count; i++) {
        ND_CHECK(d.pairs[i].seconds < 0.0, "pair %d is timed, and time is up", i);
    }
    ND_CHECK(d.reason == ND_DIVISION_TIMED && d.comm_blocks == 0 && d.product_processors == 0,
             "%d and %d without times", (int)d.comm_blocks, (int)d.product_processors);
    return observe_division(context, t);
}

Test(tune, time_that_is_up_divides_nothing)
{
    mesh_result result;
    divided d = {0, 0, WORLD_GATHERS_GRADIENTS, 0};
    mesh_job job = job_of(ND_PRECISION_BF16, NULL);
    setenv("ND_DOUBLE_NCCL_TIMES", "0=8,4=1", 1);
    job.autotune = false;
    job.observe = NULL;
    job.start = divide_without_time;
    job.context = &d;
    cr_assert_eq(mesh_run(&job, &fsdp, &result), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(d.checked, 2);
    mesh_result_free(&result);
}

static void expect_refused(const mesh_job *job, const mesh_case *mesh, const char *a, const char *b)
{
    mesh_result result;
    cr_expect_eq(mesh_run(job, mesh, &result), ND_ERR_CONFIG);
    const char *said = nd_error_last()->message;
    cr_expect(strstr(said, a) && strstr(said, b), "%s", said);
    mesh_result_free(&result);
}

/* All ranks end, none waits for the others. */
Test(tune, a_rank_with_another_gpu_refuses)
{
    observed o = {0};
    mesh_job job = job_of(ND_PRECISION_BF16, &o);
    nd_double_machine_get()->other = 3;
    expect_refused(&job, &meshes[1], "rank 3", "autotune");
}

Test(tune, a_replay_for_another_machine_is_refused)
{
    observed o = {0};
    mesh_result tuned;
    mesh_job job = job_of(ND_PRECISION_BF16, &o);
    cr_assert_eq(mesh_run(&job, &one, &tuned), ND_OK, "%s", nd_error_last()->message);
    job.autotune_from = strdup(write_record(&tuned));
    nd_double_machine_get()->other = 0;
    expect_refused(&job, &one, "\"double of a GPU\"", "\"double of another GPU\"");
    nd_double_machine_get()->other = -1;
    setenv("ND_DOUBLE_CUBLASLT", "130200", 1);
    expect_refused(&job, &one, "cublaslt", "130200");
    unsetenv("ND_DOUBLE_CUBLASLT");
    setenv("ND_DOUBLE_LT_REFUSES", "all", 1);
    expect_refused(&job, &one, "does not accept the recorded algorithm", "time again");
    unsetenv("ND_DOUBLE_LT_REFUSES");
    expect_refused(&job, &meshes[1], "train.gradient_accumulation_steps 4", "this run has 1");
    job.precision = ND_PRECISION_FP32;
    expect_refused(&job, &one, "train.precision bf16", "fp32");
    free((char *)job.autotune_from);
    mesh_result_free(&tuned);
}

Test(tune, on_a_cpu_it_is_an_error)
{
    observed o = {0};
    mesh_job job = job_of(ND_PRECISION_BF16, &o);
    mesh_use_gpus(false, false);
    expect_refused(&job, &one, "kernels.autotune is true", "--device cuda");
}
