// SPDX-License-Identifier: Apache-2.0
/* The plans of products and attention: all of a run are there before step 1, each once, and what
 * cannot be planned ends it there. */
#include <criterion/criterion.h>
#include <string.h>

#include "kernels/cuda/context.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/lt.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/mesh_cuda.h"
#include "trainer/step/step.h"

enum { RANKS = 8 };

static tempdir dir;

TEMPDIR_SUITE(plans_cuda, tempdir_leave_empty, .timeout = 600);

/* One for each rank, whose thread writes it. */
typedef struct plan_counts {
    int64_t attention;
    int products;
    long usual, ordered; /* backwards of attention that have run, not or deterministic */
} plan_counts;

static plan_counts at_start[RANKS], at_end[RANKS];
static int steps_begun;

static plan_counts count(const nd_trainer *t)
{
    const nd_cuda_context *c = nd_cuda_context_of(t->rank->device);
    nd_double_counts ran = nd_double_counts_get();
    return (plan_counts){nd_cudnn_plan_count(c->cudnn), c->lt->plan_count, ran.usual_backwards,
                         ran.ordered_backwards};
}

static nd_status before(void *context, nd_trainer *t, int64_t step)
{
    steps_begun = 1;
    if (step == 0) {
        at_start[t->rank->rank] = count(t);
    }
    return ND_OK;
}

/* With a validation at the end. */
static nd_status after(void *context, nd_trainer *t, int64_t step)
{
    if (step == MESH_CUDA_STEPS - 1) {
        nd_activation_set *set = nd_model_take_set(t->model); /* with the last micro-batch */
        ND_TRY(nd_model_forward(t->model, set, ND_PASS_EVAL));
        ND_TRY(nd_model_give_back(t->model, set));
        ND_TRY(nd_stream_sync(&t->rank->stream));
        at_end[t->rank->rank] = count(t);
    }
    return ND_OK;
}

typedef struct plan_case {
    mesh_case mesh;
    nd_precision precision;
    nd_fp8_recipe recipe;
    int64_t sequence, ordered;
    int64_t attention; /* plans */
    int64_t kv_heads;  /* each for 2 heads of queries; 0: 2 */
    bool cast_units;
} plan_case;

/* One block: 2 forms. Gathered over cp 2, rank 0 has a square and all 4 chunks, rank 1 two blocks
 * with a prefix: 4 forms. Ring: a square, and a chunk with one before it, each forward and
 * backward; a rank with an earlier one also an unmasked chunk, one with a later one an unmasked
 * block of two. Two KV heads to a call, of 3: forward all; backward two, and the last one. Tiles of
 * 128 (of 512 rows): forward the whole; backward a square and a tile. */
static const plan_case cases[] = {
    {{"one GPU", 1, 1, 1, 1, 1}, ND_PRECISION_BF16, .sequence = 32, .attention = 2},
    {{"micro-batches, recompute", 1, 1, 1, 1, 2, .recompute = ND_RECOMPUTE_FULL},
     ND_PRECISION_FP8,
     .sequence = 32,
     .attention = 2,
     .cast_units = true},
    {{"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1}, ND_PRECISION_FP8, .sequence = 32, .attention = 2},
    {{"rowwise", 1, 2, 1, 2, 1}, ND_PRECISION_FP8, ND_FP8_ROWWISE, 32, .attention = 2},
    {{"fsdp 2 x cp 2", 1, 2, 2, 1, 1}, ND_PRECISION_BF16, .sequence = 32, .attention = 4},
    {{"fsdp 2 x cp 2, ring", 1, 2, 2, 1, 1, .ring = true},
     ND_PRECISION_BF16,
     .sequence = 32,
     .attention = 6},
    {{"deterministic, odd rows", 1, 1, 1, 1, 1},
     ND_PRECISION_BF16,
     .sequence = 31,
     .ordered = 3844,
     .attention = 2},
    {{"an uneven last group of KV heads", 1, 1, 1, 1, 1},
     ND_PRECISION_BF16,
     .sequence = 32,
     .ordered = 8192,
     .attention = 3,
     .kv_heads = 3},
    {{"tiles", 1, 1, 1, 1, 2},
     ND_PRECISION_BF16,
     .sequence = 512,
     .ordered = 1 << 17,
     .attention = 3},
};

static mesh_job job_of(const plan_case *c)
{
    mesh_job job = mesh_cuda_job(&dir, c->precision);
    job.recipe = c->recipe;
    job.sequence = c->sequence;
    if (c->kv_heads > 0) {
        job.shape.kv_heads = c->kv_heads;
        job.shape.heads = 2 * c->kv_heads;
    }
    job.before_step = before;
    job.after_step = after;
    mesh_use_gpus(true, c->cast_units);
    mesh_use_ordered(c->ordered);
    return job;
}

/* Every backward of the steps asks cuDNN for its deterministic way, or none does. */
static void check_order(const plan_case *c, int rank)
{
    long usual = at_end[rank].usual - at_start[rank].usual;
    long ordered = at_end[rank].ordered - at_start[rank].ordered;
    bool as_asked = c->ordered > 0 ? ordered > 0 && usual == 0 : ordered == 0 && usual > 0;
    cr_expect(as_asked, "%s, rank %d: %ld deterministic backwards, %ld others", c->mesh.name, rank,
              ordered, usual);
}

Test(plans_cuda, are_all_there_before_the_first_step)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const plan_case *c = &cases[i];
        const mesh_case *m = &c->mesh;
        mesh_job job = job_of(c);
        mesh_trained(&job, m);
        for (int rank = 0; rank < m->dp_replicate * m->dp_shard * m->cp * m->tp; rank++) {
            cr_expect_eq(at_start[rank].attention, c->attention, "%s, rank %d: %lld forms", m->name,
                         rank, (long long)at_start[rank].attention);
            cr_expect_gt(at_start[rank].products, 0);
            cr_expect_eq(at_end[rank].attention, at_start[rank].attention, "%s: rank %d makes %lld",
                         m->name, rank,
                         (long long)(at_end[rank].attention - at_start[rank].attention));
            cr_expect_eq(at_end[rank].products, at_start[rank].products, "%s: rank %d makes %d",
                         m->name, rank, at_end[rank].products - at_start[rank].products);
            check_order(c, rank);
        }
    }
}

Test(plans_cuda, a_form_without_a_plan_ends_the_run_before_the_first_step)
{
    mesh_result got;
    mesh_job job = job_of(&cases[0]);
    nd_double_machine_get()->refused_rows = 32;
    steps_begun = 0;
    cr_assert_neq(mesh_run(&job, &cases[0].mesh, &got), ND_OK);
    cr_expect_eq(steps_begun, 0);
    cr_expect(strstr(nd_error_last()->message, "no plan"), "%s", nd_error_last()->message);
}

/* The memory plan has what cuDNN asks for, which no formula knows. */
Test(plans_cuda, a_larger_workspace_is_planned)
{
    mesh_job job = job_of(&cases[0]);
    nd_double_machine_get()->attention_extra = (size_t)96 << 20;
    mesh_result got = mesh_trained(&job, &cases[0].mesh);
    nd_double_machine_get()->memory = (size_t)128 << 20;
    steps_begun = 0;
    cr_assert_eq(mesh_run(&job, &cases[0].mesh, &got), ND_ERR_RESOURCE);
    cr_expect_eq(steps_begun, 0);
}

/* `ndtrain plan` for a GPU that is not here: 1 GiB of scores, and sums in F32 of dk and dv. */
Test(plans_cuda, a_plan_without_a_gpu_knows_of_deterministic_attention)
{
    nd_attention a = {1, 32768, 32768, 32, 8, 128, 0, 0.1f};
    nd_ops usual = nd_ops_cuda_planner(false), ordered = nd_ops_cuda_planner(true);
    nd_device *cpu = NULL;
    cr_assert_eq(nd_device_open_cpu(1, &cpu), ND_OK);
    cr_expect_eq(usual.attention_scratch(cpu, &a, ND_DTYPE_BF16, false),
                 ordered.attention_scratch(cpu, &a, ND_DTYPE_BF16, false));
    size_t sums = 2 * sizeof(float) * 32768 * 8 * 128;
    size_t bytes = ordered.attention_scratch(cpu, &a, ND_DTYPE_BF16, true);
    cr_expect(bytes > sums + (900u << 20) && bytes < sums + (1200u << 20), "%zu bytes", bytes);
    nd_device_close(cpu);
}

/*
 * Tiles against whole blocks. A gradient of a tile is rounded to BF16 before tiles are added in
 * F32: at most 2^-8 of each of the 4 parts, as of the whole, so gradients differ by less than
 * 2^-8 of the sum of the parts' sizes, and weights by as much of their updates (lr 0.003). The
 * losses, of order log 96, differ by far less than the updates do: 3 x 0.003 x 2^-8 x the norm of
 * the gradient (below 4).
 */
Test(plans_cuda, tiles_change_no_more_than_their_rounding)
{
    const plan_case *c = &cases[sizeof cases / sizeof *cases - 1];
    mesh_job job = job_of(c);
    mesh_result tiles = mesh_trained(&job, &c->mesh);
    mesh_use_ordered(0);
    mesh_result whole = mesh_trained(&job, &c->mesh);
    for (int step = 0; step < MESH_CUDA_STEPS; step++) {
        cr_expect_float_eq(tiles.loss[step], whole.loss[step], 3 * 0.003 * 4 / 256, "%g, %g",
                           tiles.loss[step], whole.loss[step]);
    }
}
