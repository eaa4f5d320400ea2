// SPDX-License-Identifier: Apache-2.0
/* Training with CUDA graphs of the blocks (kernels.cuda_graphs): the same bits with fewer launches,
 * and never more graphs than are planned. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/mesh_cuda.h"
#include "tests/parity/mesh_data.h"
#include "tests/parity/schedules.h"
#include "tests/support/ranks.h"
#include "trainer/step/step.h"

enum { STEPS = 5, VALIDATED = 2 };

static tempdir dir;

TEMPDIR_SUITE(graph_steps, tempdir_leave_empty, .timeout = 600);

/* The events of a run beside its steps. */
typedef struct scenario {
    int recorded_in;   /* the step */
    nd_dataset *data;  /* validated on before every step but the first; NULL: no validation */
    bool turns_blocks; /* before the third step the first blocks are gathered in another order */
    int spoiled;       /* the step that is not finite, and skipped; 0: none */
    float kept;
} scenario;

/* Rank 0's counts. */
static struct {
    nd_double_counts before;
    long calls[STEPS], waits[STEPS], allocations[STEPS];
    nd_graph_counts graphs;
    int64_t gathered, selected; /* exchanges of all keys over cp, of those that are seen */
} seen;

static nd_status never(void *context, bool *stop)
{
    *stop = false;
    return ND_OK;
}

static nd_status validate(nd_trainer *t, const nd_dataset *data)
{
    const nd_stop_check pause = {never, NULL};
    nd_loader_options options = nd_loader_options_of(t->rank, true);
    nd_loader *loader = NULL;
    double loss = 0.0;
    int64_t tokens = 0;
    ND_TRY(nd_loader_open(data, &options, &loader));
    nd_status status = nd_trainer_evaluate(t, loader, VALIDATED, &pause, &loss, &tokens);
    nd_loader_close(loader);
    return status;
}

static nd_status gather_in_another_order(nd_fsdp *f)
{
    const nd_unit *first = nd_layout_unit(f->layout, ND_UNIT_BLOCK, 0);
    const nd_unit *second = nd_layout_unit(f->layout, ND_UNIT_BLOCK, 1);
    ND_TRY(nd_fsdp_acquire(f, second));
    ND_TRY(nd_fsdp_acquire(f, first));
    nd_fsdp_release(f, second);
    nd_fsdp_release(f, first);
    return ND_OK;
}

static nd_status swap_weight(nd_trainer *t, float *out, const float *in)
{
    if (t->rank->rank == 0) {
        nd_stream *stream = &t->rank->stream;
        ND_TRY(out ? nd_copy(stream, out, t->model->fsdp.master, sizeof *out) : ND_OK);
        ND_TRY(in ? nd_copy(stream, t->model->fsdp.master, in, sizeof *in) : ND_OK);
    }
    nd_fsdp_weights_changed(&t->model->fsdp);
    return ND_OK;
}

static nd_status before(void *context, nd_trainer *t, int64_t step)
{
    static const float infinite = INFINITY;
    scenario *s = context;
    if (s->data && step > 0) {
        ND_TRY(validate(t, s->data));
    }
    if (s->turns_blocks && step == 2) {
        ND_TRY(gather_in_another_order(&t->model->fsdp));
    }
    if (s->spoiled == step + 1) {
        ND_TRY(swap_weight(t, &s->kept, &infinite));
    }
    if (t->rank->rank == 0) {
        seen.before = nd_double_counts_get();
    }
    return ND_OK;
}

/* All is recorded in one step, and it is what was planned. */
static nd_status check_recorded(const nd_trainer *t, int64_t step, int recorded_in)
{
    nd_graph_counts got = nd_graphs_count(t->graphs);
    const nd_graph_counts none = {0}, *want = step + 1 < recorded_in ? &none : &t->planned_graphs;
    ND_CHECK(got.works == want->works && got.graphs == want->graphs && got.ops == want->ops,
             "step %lld, rank %d: %lld works, %lld graphs, %lld ops instead of %lld, %lld, %lld",
             (long long)step + 1, t->rank->rank, (long long)got.works, (long long)got.graphs,
             (long long)got.ops, (long long)want->works, (long long)want->graphs,
             (long long)want->ops);
    return ND_OK;
}

static nd_status after(void *context, nd_trainer *t, int64_t step)
{
    scenario *s = context;
    if (t->rank->rank == 0) {
        nd_double_counts now = nd_double_counts_get();
        seen.calls[step] = now.calls - seen.before.calls;
        seen.waits[step] = now.host_waits - seen.before.host_waits;
        seen.allocations[step] = now.allocations - seen.before.allocations;
        seen.graphs = t->graphs ? nd_graphs_count(t->graphs) : (nd_graph_counts){0};
        const nd_comm *cp = t->rank->groups.by_kind[ND_GROUP_CP];
        seen.gathered = cp ? cp->stats.calls[ND_COMM_ALL_GATHER] : 0;
        seen.selected = cp ? cp->stats.calls[ND_COMM_ALL_TO_ALL] : 0;
    }
    ND_CHECK(t->position.skipped == (s->spoiled > 0 && step + 1 >= s->spoiled),
             "rank %d has skipped %lld of %lld steps", t->rank->rank,
             (long long)t->position.skipped, (long long)step + 1);
    if (s->spoiled == step + 1) {
        ND_TRY(swap_weight(t, NULL, &s->kept));
    }
    return t->graphs ? check_recorded(t, step, s->recorded_in) : ND_OK;
}

static void train(mesh_job *job, const mesh_case *mesh, scenario *s, bool graphs, mesh_result *out)
{
    job->cuda_graphs = graphs;
    job->before_step = before;
    job->after_step = after;
    job->context = s;
    *out = mesh_trained(job, mesh);
}

/* With and without graphs; the last step has neither a report nor anything to record. */
static void compare(mesh_job *job, const mesh_case *mesh, scenario s)
{
    mesh_result plain, graphs;
    int64_t last = job->steps - 1;
    s.recorded_in = s.recorded_in ? s.recorded_in : 2;
    train(job, mesh, &s, false, &plain);
    long calls = seen.calls[last];
    train(job, mesh, &s, true, &graphs);
    mesh_expect_same(&graphs, &plain, MESH_LOSSES | MESH_NORMS | MESH_WEIGHTS, mesh->name);
    /* One launch stands for several ops; exchanges of tp and cp divide a block. */
    cr_expect_gt(seen.graphs.ops, seen.graphs.graphs, "%s", mesh->name);
    cr_expect_lt(seen.calls[last], calls, "%s", mesh->name);
    cr_expect_eq(seen.waits[last], 1, "%s: %ld waits", mesh->name, seen.waits[last]);
    cr_expect_eq(seen.allocations[last], 0, "%s", mesh->name);
    cr_expect(isfinite(graphs.loss[last]), "%s: the last loss is %g", mesh->name,
              graphs.loss[last]);
}

static mesh_job job_of(nd_precision precision, int order, bool cast_units)
{
    nd_double_machine_get()->strict_capture = true; /* step 1 has used all that is recorded */
    mesh_use_gpus(true, cast_units);
    nd_double_machine_get()->order = order;
    return mesh_cuda_job(&dir, precision);
}

static const mesh_case one = {"one GPU", 1, 1, 1, 1, 1};
static const mesh_case meshes[] = {
    {"one GPU, full recompute, micro-batch 2", 1, 1, 1, 1, 2, .recompute = ND_RECOMPUTE_FULL},
    {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1},
    {"fsdp 2 x cp 2", 1, 2, 2, 1, 1},
    {"fsdp 2 x cp 2, ring", 1, 2, 2, 1, 1, .ring = true},
    {"cp 4, ulysses 2 of ring, micro-batch 2", 1, 1, 4, 1, 2, .ring = true, .ulysses = 2},
    {"fsdp 2 x cp 2, all but attention", 1, 2, 2, 1, 1,
     .recompute = ND_RECOMPUTE_ALL_BUT_ATTENTION},
};

enum { MESHES = sizeof meshes / sizeof *meshes };

Test(graph_steps, bf16_gives_the_same_bits_with_fewer_calls)
{
    mesh_job job = job_of(ND_PRECISION_BF16, ND_DOUBLE_LAZY, false);
    for (int i = 0; i < MESHES; i++) {
        compare(&job, &meshes[i], (scenario){0});
    }
}

Test(graph_steps, fp8_gives_the_same_bits_with_fewer_calls)
{
    mesh_job job = job_of(ND_PRECISION_FP8, ND_DOUBLE_LAZY, false);
    for (int i = 0; i < MESHES; i++) {
        compare(&job, &meshes[i], (scenario){0});
    }
    job.recipe = ND_FP8_DELAYED;
    job.history_length = 4;
    job.all_gather = true;
    nd_double_machine_get()->order = ND_DOUBLE_OTHERS;
    compare(&job, &meshes[1], (scenario){0});
}

/* Blocks share two buffers; validations, and whoever else gathers blocks in between, in whatever
 * order, leave each block its own. */
Test(graph_steps, nothing_is_recorded_again_after_a_validation)
{
    static const mesh_case fsdp = {"fsdp 2", 1, 2, 1, 1, 1};
    nd_dataset *data = NULL;
    for (int sharded = 0; sharded < 2; sharded++) {
        mesh_job job = job_of(ND_PRECISION_BF16, ND_DOUBLE_OTHERS, true);
        job.shape.layers = 5;
        job.steps = STEPS;
        cr_assert_eq(nd_dataset_open(job.data_path, job.format, job.tokenizer, job.shape.vocab,
                                     job.sequence, &data),
                     ND_OK);
        compare(&job, sharded ? &fsdp : &one, (scenario){.data = data, .turns_blocks = true});
        nd_dataset_close(data);
    }
}

/* ZeRO-2, several micro-batches, and a step that is skipped. */
Test(graph_steps, a_step_is_skipped)
{
    static const mesh_case zero2 = {"fsdp 2 x tp 2, ZeRO-2", 1, 2, 1, 2, 1, .zero2 = true};
    mesh_job job = job_of(ND_PRECISION_FP8, ND_DOUBLE_LAZY, false);
    job.nonfinite = ND_NONFINITE_SKIP;
    job.steps = STEPS;
    compare(&job, &zero2, (scenario){.spoiled = 3});
}

Test(graph_steps, more_than_two_ranks_of_cp)
{
    static const mesh_case cp[] = {
        {"cp 4", 1, 1, 4, 1, 1, .recompute = ND_RECOMPUTE_SELECTIVE},
        {"cp 4, ring", 1, 1, 4, 1, 2, .ring = true, .recompute = ND_RECOMPUTE_FULL},
    };
    mesh_job job = job_of(ND_PRECISION_BF16, ND_DOUBLE_OTHERS, false);
    for (int i = 0; i < 2; i++) {
        compare(&job, &cp[i], (scenario){0});
    }
}

/* With separate documents ranks exchange all keys or those that are seen, as the micro-batch asks
 * for, between graphs that are the same. */
Test(graph_steps, exchanges_of_separate_documents)
{
    static const mesh_case cp[] = {
        {"cp 2, documents", 1, 1, 2, 1, 1},
        {"cp 2, documents, micro-batch 2", 1, 1, 2, 1, 2, .recompute = ND_RECOMPUTE_FULL},
        {"cp 4, ulysses 2, documents", 1, 1, 4, 1, 1, .ulysses = 2},
        {"cp 2, ring, documents", 1, 1, 2, 1, 1, .ring = true},
    };
    int64_t gathered = 0, selected = 0;
    mesh_job job = job_of(ND_PRECISION_BF16, ND_DOUBLE_LAZY, false);
    job.data_path = mesh_token_file(&dir, "documents.bin", 8000, 24, 0);
    job.separate = true;
    job.end_of_text = 3;
    for (int i = 0; i < 4; i++) {
        job.sequence = i == 1 ? 256 : 64;
        compare(&job, &cp[i], (scenario){0});
        gathered += seen.gathered;
        selected += seen.selected;
    }
    cr_expect(gathered > 0 && selected > 0, "%lld and %lld exchanges", (long long)gathered,
              (long long)selected);
}

/* Weight gradients have graphs of their own, and two sets have two of each. */
Test(graph_steps, delayed_weight_gradients)
{
    static const mesh_case fsdp = {"fsdp 2 x tp 2", 1, 2, 1, 2, 1};
    mesh_job job = job_of(ND_PRECISION_BF16, ND_DOUBLE_OTHERS, false);
    job.schedule = schedule_overlapping;
    compare(&job, &fsdp, (scenario){0});
    job.precision = ND_PRECISION_FP8;
    job.schedule = schedule_split;
    compare(&job, &one, (scenario){0});
}

/* Attention's backward of several tiles, with its sums, is one op of a graph. */
Test(graph_steps, deterministic_tiles)
{
    mesh_job job = job_of(ND_PRECISION_BF16, ND_DOUBLE_LAZY, false);
    job.sequence = 200;
    mesh_use_ordered(1 << 16);
    compare(&job, &one, (scenario){0});
}

/* Steps 2 and 4 are reported, so step 3 records. */
Test(graph_steps, health_reports_run_beside_graphs)
{
    mesh_job job = job_of(ND_PRECISION_FP8, ND_DOUBLE_LAZY, false);
    long calls[STEPS];
    job.steps = STEPS;
    compare(&job, &one, (scenario){0});
    memcpy(calls, seen.calls, sizeof calls);
    job.health_interval = 2;
    compare(&job, &one, (scenario){.recorded_in = 3});
    cr_expect_gt(seen.calls[3], calls[3], "step 4 is reported");
}

/* Forward once; backward that begins a gradient, and one that adds to it. */
Test(graph_steps, a_block_of_one_gpu_is_one_graph)
{
    mesh_result got;
    scenario s = {.recorded_in = 2};
    mesh_job job = job_of(ND_PRECISION_BF16, ND_DOUBLE_LAZY, false);
    train(&job, &one, &s, true, &got);
    cr_expect_eq(seen.graphs.works, 3 * job.shape.layers);
    cr_expect_eq(seen.graphs.graphs, seen.graphs.works);
    cr_expect_lt(seen.calls[2], seen.calls[0] / 2, "%ld calls, without graphs %ld", seen.calls[2],
                 seen.calls[0]);
}

static void expect_as_planned(mesh_job *job, const mesh_case *mesh)
{
    mesh_result got;
    scenario s = {.recorded_in = 2};
    train(job, mesh, &s, true, &got);
    cr_expect_gt(seen.graphs.ops, 0, "%s", mesh->name);
}

/* A run records what the dry run counted (check_recorded), in every recipe and mode. */
Test(graph_steps, graphs_are_as_planned_in_every_precision)
{
    mesh_job job = job_of(ND_PRECISION_FP8, ND_DOUBLE_LAZY, false);
    mesh_case mesh = one;
    job.steps = 2;
    job.history_length = 4;
    for (int recipe = -1; recipe < (int)ND_FP8_RECIPE_COUNT; recipe++) {
        job.precision = recipe < 0 ? ND_PRECISION_BF16 : ND_PRECISION_FP8;
        job.recipe = recipe < 0 ? 0 : (nd_fp8_recipe)recipe;
        for (int mode = ND_RECOMPUTE_NONE; mode <= (int)ND_RECOMPUTE_FULL; mode++) {
            mesh.recompute = (nd_recompute)mode;
            expect_as_planned(&job, &mesh);
        }
    }
}

/* A run records what the dry run counted, also where each of many cp ranks adds ops of its own. */
Test(graph_steps, graphs_are_as_planned_on_many_cp_ranks)
{
    mesh_job job = job_of(ND_PRECISION_BF16, ND_DOUBLE_LAZY, false);
    job.steps = 2;
    for (int cp = 2; cp <= 8; cp *= 2) {
        for (int ring = 0; ring < 2; ring++) {
            mesh_case mesh = {"cp", 1, 1, cp, 1, 4, .ring = ring, .recompute = ND_RECOMPUTE_FULL};
            expect_as_planned(&job, &mesh);
        }
    }
}
