// SPDX-License-Identifier: Apache-2.0
/* Checkpoints of device cuda: state is copied to pinned memory on a stream of its own, while the
 * next step computes, in whatever order the GPU's double carries the streams out. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/mesh_cuda.h"
#include "trainer/checkpoint/saver.h"

enum { STEPS = 4, SAVED = 2, MAX_RANKS = 8 };

static tempdir dir, runs;

static void setup(void)
{
    tempdir_make(&dir);
    tempdir_make(&runs);
}

static void teardown(void)
{
    mesh_use_gpus(false, false);
    nd_fs_remove_tree(runs.path);
    tempdir_remove(&dir);
}

TestSuite(checkpoint_cuda, .init = setup, .fini = teardown, .timeout = 600);

typedef struct saving {
    bool waits;
    const char *resume; /* a checkpoint folder, or NULL: the state is saved */
    int flips;          /* the rank that saves another bit of a norm's weight; 0: none */
    nd_saver *savers[MAX_RANKS];
    nd_save_report reports[MAX_RANKS];
} saving;

static nd_status start(void *context, nd_trainer *t)
{
    saving *s = context;
    if (s->resume) {
        nd_manifest manifest = {0};
        nd_restored restored;
        nd_status status = nd_restore_checkpoint(t, s->resume, &manifest, true, &restored);
        nd_manifest_fini(&manifest);
        return status;
    }
    const nd_saver_options options = {.trainer = t,
                                      .run = runs.path,
                                      .run_id = "test",
                                      .host = "host",
                                      .waits = s->waits,
                                      .batch_samples = 8};
    size_t planned = 0;
    long before = nd_double_counts_get().pinned_bytes;
    ND_TRY(nd_saver_pinned_bytes(t, &planned));
    ND_TRY(nd_saver_create(&options, &s->savers[t->rank->rank]));
    long pinned = nd_double_counts_get().pinned_bytes - before;
    cr_assert(planned > 0 && pinned == (long)planned, "%ld bytes are pinned, not %zu", pinned,
              planned);
    return ND_OK;
}

/* One bit of a tensor that tp does not split. */
static nd_status flip_bit(nd_trainer *t)
{
    const nd_layout *layout = t->model->layout;
    nd_stream *stream = &t->rank->stream;
    for (int i = 0; i < layout->param_count; i++) {
        nd_flat_range held = nd_layout_shard_range(layout, &layout->params[i]);
        if (strstr(layout->params[i].name, "norm") && held.begin < held.end) {
            uint32_t bits;
            ND_TRY(nd_copy(stream, &bits, t->model->fsdp.master + held.begin, sizeof bits));
            ND_TRY(nd_stream_sync(stream));
            bits ^= 1;
            ND_TRY(nd_copy(stream, t->model->fsdp.master + held.begin, &bits, sizeof bits));
            return nd_stream_sync(stream);
        }
    }
    return nd_fail(ND_ERR_INTERNAL, "rank %d has no norm", t->rank->rank);
}

/* Flips a bit, saves, and flips it back: mesh_run compares replicas too. */
static nd_status save_flipped(saving *s, nd_trainer *t)
{
    int rank = t->rank->rank;
    ND_TRY(rank == s->flips ? flip_bit(t) : ND_OK);
    ND_TRY(nd_saver_begin(s->savers[rank], "interval", 0));
    ND_TRY(nd_saver_finish(s->savers[rank], &s->reports[rank]));
    return rank == s->flips ? flip_bit(t) : ND_OK;
}

static nd_status after_step(void *context, nd_trainer *t, int64_t step)
{
    saving *s = context;
    int rank = t->rank->rank;
    nd_save_report report;
    ND_TRY(nd_saver_advance(s->savers[rank], t->received->save, &report));
    s->reports[rank] = report.ended ? report : s->reports[rank];
    if (s->flips > 0 && t->position.step == SAVED) {
        return save_flipped(s, t);
    }
    return t->position.step == SAVED ? nd_saver_begin(s->savers[rank], "interval", 0) : ND_OK;
}

static nd_status end(void *context, nd_trainer *t)
{
    saving *s = context;
    int rank = t->rank->rank;
    nd_save_report report;
    ND_TRY(nd_saver_finish(s->savers[rank], &report));
    s->reports[rank] = report.ended ? report : s->reports[rank];
    cr_assert(nd_saver_destroy(s->savers[rank]));
    return ND_OK;
}

static mesh_result train(saving *s, nd_precision precision, const mesh_case *mesh, int64_t first)
{
    mesh_job job = mesh_cuda_job(&dir, precision);
    job.first_step = first;
    job.steps = STEPS - first;
    if (s) {
        job.start = start;
        job.after_step = s->resume ? NULL : after_step;
        job.end = s->resume ? NULL : end;
        job.context = s;
    }
    return mesh_trained(&job, mesh);
}

static void check(const mesh_case *mesh, nd_precision precision, int order, bool waits)
{
    int ranks = mesh->dp_replicate * mesh->dp_shard * mesh->cp * mesh->tp;
    char *path = NULL;
    saving saves = {.waits = waits};
    mesh_use_gpus(true, false);
    nd_double_machine_get()->order = order;
    mesh_result whole = train(NULL, precision, mesh, 0);
    mesh_result saved = train(&saves, precision, mesh, 0);
    mesh_expect_same(&whole, &saved, MESH_WEIGHTS, mesh->name);
    for (int rank = 0; rank < ranks; rank++) {
        cr_assert(saves.reports[rank].good, "%s: rank %d: %s", mesh->name, rank,
                  saves.reports[rank].why);
    }
    assert_ok(nd_checkpoint_path(runs.path, SAVED, &path));
    saving resumes = {.resume = path};
    mesh_result resumed = train(&resumes, precision, mesh, SAVED);
    mesh_expect_same(&whole, &resumed, MESH_WEIGHTS, mesh->name);
    nd_fs_remove_tree(path);
    free(path);
}

Test(checkpoint_cuda, a_save_changes_no_bit_and_a_resumed_run_has_the_same)
{
    static const mesh_case meshes[] = {{"one GPU", 1, 1, 1, 1, 1},
                                       {"fsdp 2", 1, 2, 1, 1, 1},
                                       {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1}};
    static const int orders[] = {ND_DOUBLE_LAZY, ND_DOUBLE_OTHERS, ND_DOUBLE_LAZY};
    for (int i = 0; i < 3; i++) {
        check(&meshes[i], ND_PRECISION_BF16, orders[i], i == 1);
    }
    check(&meshes[1], ND_PRECISION_FP8, ND_DOUBLE_OTHERS, false);
}

/* Digests are made on the device, of what is copied. */
Test(checkpoint_cuda, ranks_that_differ_in_a_bit_are_no_checkpoint)
{
    static const mesh_case meshes[] = {{"ddp 2", 2, 1, 1, 1, 1}, {"tp 2", 1, 1, 1, 2, 1}};
    for (int i = 0; i < 2; i++) {
        char *path = NULL;
        saving saves = {.waits = true, .flips = 1};
        mesh_use_gpus(true, false);
        train(&saves, ND_PRECISION_FP32, &meshes[i], 0);
        const nd_save_report *report = &saves.reports[1];
        cr_assert(report->ended && !report->good, "%s", meshes[i].name);
        cr_assert(strstr(report->why, "rank 1 holds other values than rank 0"), "%s: %s",
                  meshes[i].name, report->why);
        assert_ok(nd_checkpoint_path(runs.path, SAVED, &path));
        cr_assert_not(tempdir_has_path(path), "%s", meshes[i].name);
        free(path);
    }
}

/* Written on GPUs, read by CPU workers on another mesh. */
Test(checkpoint_cuda, workers_of_cpus_go_on_from_it)
{
    const mesh_case gpus = {"fsdp 2", 1, 2, 1, 1, 1}, cpus = {"tp 2", 1, 1, 1, 2, 1};
    char *path = NULL;
    saving saves = {0};
    mesh_use_gpus(true, false);
    mesh_result whole = train(&saves, ND_PRECISION_FP32, &gpus, 0);
    assert_ok(nd_checkpoint_path(runs.path, SAVED, &path));
    saving resumes = {.resume = path};
    mesh_use_gpus(false, false);
    mesh_result resumed = train(&resumes, ND_PRECISION_FP32, &cpus, SAVED);
    mesh_expect_near(&resumed, &whole, (mesh_bounds){.weight = 1e-4}, cpus.name);
    free(path);
}
