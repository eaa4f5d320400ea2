// SPDX-License-Identifier: Apache-2.0
/* CUDA graphs of the blocks (kernels.cuda_graphs): the same bits with fewer launches. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/mesh_cuda.h"
#include "trainer/trainer.h"

enum { STEPS = MESH_CUDA_STEPS };

static tempdir dir;

/* Of rank 0. */
static struct {
    nd_double_counts before;
    long calls[STEPS], waits[STEPS], allocations[STEPS];
    nd_graph_counts graphs;
} seen;

static nd_status before(void *context, nd_trainer *t, int64_t step)
{
    if (t->rank->rank == 0) {
        seen.before = nd_double_counts_get();
    }
    return ND_OK;
}

static nd_status after(void *context, nd_trainer *t, int64_t step)
{
    if (t->rank->rank == 0) {
        nd_double_counts now = nd_double_counts_get();
        seen.calls[step] = now.calls - seen.before.calls;
        seen.waits[step] = now.host_waits - seen.before.host_waits;
        seen.allocations[step] = now.allocations - seen.before.allocations;
        if (t->graphs) {
            seen.graphs = nd_graphs_count(t->graphs);
        }
    }
    return ND_OK;
}

static void train(mesh_job *job, const mesh_case *mesh, bool graphs, mesh_result *out)
{
    job->cuda_graphs = graphs;
    job->before_step = before;
    job->after_step = after;
    cr_assert_eq(mesh_run(job, mesh, out), ND_OK, "%s", nd_error_last()->message);
}

static void expect_same(const char *name, const mesh_result *a, const mesh_result *b)
{
    cr_expect_eq(memcmp(a->loss, b->loss, sizeof a->loss), 0, "%s: other losses", name);
    cr_expect_eq(memcmp(a->norm, b->norm, sizeof a->norm), 0, "%s: other norms", name);
    for (int i = 0; i < a->tensors; i++) {
        cr_expect_eq(memcmp(a->weights[i], b->weights[i], (size_t)a->sizes[i] * sizeof(float)), 0,
                     "%s: %s is another", name, a->names[i]);
    }
}

static const mesh_case meshes[] = {
    {"one GPU", 1, 1, 1, 1, 1},
    {"one GPU, full recompute, micro-batch 2", 1, 1, 1, 1, 2, .recompute = ND_RECOMPUTE_FULL},
    {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1},
    {"fsdp 2 x cp 2", 1, 2, 2, 1, 1},
    {"fsdp 2 x cp 2, ring", 1, 2, 2, 1, 1, .ring = true},
};

enum { MESHES = sizeof meshes / sizeof *meshes };

static void compare(mesh_job *job, int first, int count, int order, bool cast_units)
{
    mesh_use_gpus(true, cast_units);
    nd_double_machine_get()->order = order;
    for (int i = first; i < first + count; i++) {
        mesh_result plain, graphs;
        train(job, &meshes[i], false, &plain);
        long calls = seen.calls[STEPS - 1];
        train(job, &meshes[i], true, &graphs);
        expect_same(meshes[i].name, &graphs, &plain);
        /* Blocks were recorded, forward and backward, and one launch stands for many ops. */
        cr_expect_geq(seen.graphs.works, 2 * job->shape.layers, "%s", meshes[i].name);
        cr_expect_gt(seen.graphs.ops, 2 * seen.graphs.graphs, "%s", meshes[i].name);
        cr_expect_eq(seen.calls[0] > seen.calls[STEPS - 1], true, "%s", meshes[i].name);
        cr_expect_lt(seen.calls[STEPS - 1], calls, "%s", meshes[i].name);
        cr_expect_eq(seen.waits[STEPS - 1], 1, "%s: %ld waits", meshes[i].name,
                     seen.waits[STEPS - 1]);
        cr_expect_eq(seen.allocations[STEPS - 1], 0, "%s", meshes[i].name);
        mesh_result_free(&graphs);
        mesh_result_free(&plain);
    }
}

Test(graphs_cuda, bf16_gives_the_same_bits_with_fewer_calls, .timeout = 300)
{
    tempdir_make(&dir);
    mesh_job job = mesh_cuda_job(&dir, ND_PRECISION_BF16);
    compare(&job, 0, MESHES, ND_DOUBLE_LAZY, false);
    compare(&job, 0, 1, ND_DOUBLE_OTHERS, true);
    tempdir_remove(&dir);
}

Test(graphs_cuda, fp8_gives_the_same_bits_with_fewer_calls, .timeout = 300)
{
    tempdir_make(&dir);
    mesh_job job = mesh_cuda_job(&dir, ND_PRECISION_FP8);
    compare(&job, 0, MESHES, ND_DOUBLE_LAZY, false);
    job.recipe = ND_FP8_DELAYED;
    job.history_length = 4;
    job.all_gather = true;
    compare(&job, 2, 1, ND_DOUBLE_OTHERS, false);
    tempdir_remove(&dir);
}

/* What a step of a block is made of: between collectives at most a handful of launches are left. */
Test(graphs_cuda, a_block_of_one_gpu_is_one_graph, .timeout = 300)
{
    mesh_result got;
    tempdir_make(&dir);
    mesh_job job = mesh_cuda_job(&dir, ND_PRECISION_BF16);
    mesh_use_gpus(true, false);
    train(&job, &meshes[0], true, &got);
    /* Forward once; backward that begins a gradient, and one that adds to it. */
    cr_expect_eq(seen.graphs.works, 3 * job.shape.layers);
    cr_expect_eq(seen.graphs.graphs, seen.graphs.works);
    cr_expect_lt(seen.calls[STEPS - 1], seen.calls[0] / 2, "%ld calls, without graphs %ld",
                 seen.calls[STEPS - 1], seen.calls[0]);
    mesh_result_free(&got);
    tempdir_remove(&dir);
}

typedef struct fixture {
    nd_device *device;
    nd_stream stream;
    nd_graphs *graphs;
} fixture;

/* The graphs keep the address of the stream. */
static void open_graphs(fixture *f)
{
    nd_cuda_options options = {.local_workers = 1};
    cr_assert_eq(nd_device_open_cuda(&options, &f->device), ND_OK);
    cr_assert_eq(f->device->table->stream_init(f->device, &f->stream), ND_OK);
    cr_assert_eq(nd_graphs_create(&f->stream, &f->graphs), ND_OK, "%s", nd_error_last()->message);
}

static void nothing(void *closure)
{
}

static void fault(void *closure)
{
    nd_double_break(cudaErrorIllegalAddress);
}

/* An op as the model calls it. */
static nd_status op(nd_stream *stream, const char *name, void (*kernel)(void *))
{
    bool enqueue;
    ND_TRY(nd_stream_inside(stream, true, &enqueue));
    if (!enqueue) {
        return ND_OK;
    }
    cudaError_t launched = nd_double_launch(nd_cuda_stream(stream), kernel, "", 1);
    return nd_cuda_op_done(stream, name, launched);
}

static nd_status work(fixture *f, int ops, void (*kernel)(void *))
{
    static const char *const names[] = {"rmsnorm_fwd", "matmul", "rope"};
    nd_graph_key key = {.name = "forward", .number = 3};
    ND_TRY(nd_graphs_begin(f->graphs, &key));
    for (int i = 0; i < ops; i++) {
        ND_TRY(op(&f->stream, names[i], kernel));
    }
    return nd_graphs_end(f->graphs);
}

Test(graphs_cuda, a_fault_names_the_graph_and_its_ops)
{
    fixture f;
    open_graphs(&f);
    cr_assert_eq(work(&f, 2, fault), ND_OK);
    cr_assert_eq(nd_stream_sync(&f.stream), ND_ERR_INTERNAL);
    const char *message = nd_error_last()->message;
    cr_expect(strstr(message, "error 700") &&
                  strstr(message, "forward of block 3, part 1 (rmsnorm_fwd, matmul)"),
              "%s", message);
}

Test(graphs_cuda, other_ops_than_were_recorded_are_an_error)
{
    fixture f;
    open_graphs(&f);
    cr_assert_eq(work(&f, 2, nothing), ND_OK);
    cr_assert_eq(work(&f, 2, nothing), ND_OK, "%s", nd_error_last()->message);
    cr_assert_eq(nd_stream_sync(&f.stream), ND_OK);
    cr_expect_eq(nd_double_counts_get().graphs_launched, 2);
    cr_assert_eq(work(&f, 3, nothing), ND_ERR_INTERNAL);
    const char *message = nd_error_last()->message;
    cr_expect(strstr(message, "forward of block 3 has 3 ops") && strstr(message, "has 2"), "%s",
              message);
}

Test(graphs_cuda, ops_that_wait_are_refused)
{
    fixture f;
    open_graphs(&f);
    nd_graphs *second = NULL;
    setenv("ND_CUDA_SYNC", "1", 1);
    cr_assert_eq(nd_graphs_create(&f.stream, &second), ND_ERR_CONFIG);
    cr_expect(strstr(nd_error_last()->message, "kernels.cuda_graphs: false"));
}
