// SPDX-License-Identifier: Apache-2.0
/*
 * Saving while training and resuming, with the product's own trainer on meshes of threads: a save
 * changes no bit of the run, holds the state of its step although later steps go on, and a run that
 * is resumed from it on the same mesh has the bits of one that was never stopped.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tests/parity/mesh_data.h"
#include "tests/support/printed.h"
#include "trainer/checkpoint/export.h"
#include "trainer/checkpoint/saver.h"
#include "trainer/weights/weights.h"

enum { STEPS = 6, SAVED = 3, MAX_RANKS = 8 };

static tempdir dir, runs;

static void setup(void)
{
    tempdir_make(&dir);
    tempdir_make(&runs);
}

static void teardown(void)
{
    nd_fs_remove_tree(runs.path);
    tempdir_remove(&dir);
}

TestSuite(checkpoint, .init = setup, .fini = teardown);

/* The plan of one run, which its ranks share; arrays of MAX_RANKS are by rank. */
typedef struct plan {
    const char *folder; /* NULL: runs */
    int64_t save_at;    /* steps done; 0: never */
    bool save_first;    /* before the first step of the run */
    const char *resume; /* a checkpoint folder */
    int64_t rewind_at;  /* with resume: not at the start, but before this step of the run */
    const char *broken; /* with resume: what rank 1 takes instead, which cannot be loaded */
    nd_status statuses[MAX_RANKS]; /* with broken: what the load returned */
    nd_failure_cause causes[MAX_RANKS];
    char reason[ND_ERROR_MESSAGE_MAX]; /* with broken: of rank 1 */
    bool stale[MAX_RANKS]; /* with resume: copies made of the weights before do not count */
    bool waits;
    int copied[MAX_RANKS]; /* units_begun when nd_saver_begin returned */
    double patience;       /* seconds; 0: that of the mesh */
    int64_t committed;
    void (*before_unit)(void *context, int unit);
    struct hanging *hanging; /* rank 0's writer hangs before it commits */
    struct updating *updating;
    const nd_export_options *export; /* each checkpoint gets its model */
    const char *model;               /* where the run saves its own, after the last step */
    int64_t skipped;                 /* steps, and as many samples, that the save counts so */
    bool flipped;                    /* the save is made at once, with: */
    int flips;                       /* the rank whose state has another bit; 0: none */
    nd_alike flips_in;               /* of such a parameter; ND_ALIKE_SHARDS: of the last unit */
    nd_saver *savers[MAX_RANKS];
    nd_save_report reports[MAX_RANKS];
    nd_restored restored[MAX_RANKS];
} plan;

/* On the writer's thread of rank 0; the checkpoint has its name. */
static void note_committed(void *context, int64_t step)
{
    plan *p = context;
    char *path = NULL;
    assert_ok(nd_checkpoint_path(p->folder, step, &path));
    p->committed = tempdir_has_path(path) ? step : -1;
    free(path);
}

static nd_status export_model(void *context, const char *temporary, const nd_manifest *manifest)
{
    plan *p = context;
    return nd_checkpoint_export(temporary, manifest, p->export);
}

/* A writer's thread in a system call that does not return: it is there, until it is let go. */
typedef struct hanging {
    atomic_bool there, released;
    nd_status finished; /* of nd_saver_finish */
    char why[512];
    bool destroyed; /* at the first try */
} hanging;

static nd_status hang(void *context, const char *temporary, const nd_manifest *manifest)
{
    hanging *h = ((plan *)context)->hanging;
    atomic_store(&h->there, true);
    while (!atomic_load(&h->released)) {
        usleep(1000);
    }
    return nd_fail(ND_ERR_CANTCREATE, "the call has returned");
}

/* A writer that copies the second unit when the first has been updated; of one rank. */
typedef struct updating {
    nd_trainer *trainer;
    float *before; /* the first unit as it was copied */
    bool updated;
} updating;

static void wait_for_update(void *context, int unit)
{
    updating *w = ((plan *)context)->updating;
    const nd_unit *first = &w->trainer->model->layout->units[0];
    const float *now = w->trainer->model->fsdp.master + first->shard_offset;
    size_t bytes = (size_t)first->shard_count * sizeof *now;
    if (unit == 0) {
        w->before = malloc(bytes);
        memcpy(w->before, now, bytes);
    }
    for (int i = 0; unit == 1 && !w->updated && i < 20000; i++) {
        usleep(1000);
        w->updated = memcmp(w->before, now, bytes) != 0;
    }
}

static nd_status start(void *context, nd_trainer *t)
{
    plan *p = context;
    int rank = t->rank->rank;
    if (p->patience > 0) {
        ((nd_config *)t->rank->config)->launch.comm_timeout_seconds = p->patience;
    }
    if (p->resume && p->rewind_at == 0) {
        nd_manifest m = {0};
        const char *from = p->broken && rank == 1 ? p->broken : p->resume;
        const int64_t version = t->model->fsdp.version;
        p->statuses[rank] = nd_restore_checkpoint(t, from, &m, true, &p->restored[rank]);
        p->causes[rank] = nd_error_last()->cause;
        p->stale[rank] = t->model->fsdp.version != version;
        if (p->broken && rank == 1) {
            snprintf(p->reason, sizeof p->reason, "%s", nd_error_last()->message);
        }
        nd_manifest_fini(&m);
        ND_TRY(p->broken ? ND_OK : p->statuses[rank]);
    }
    nd_saver_options options = {
        .trainer = t,
        .run = p->folder,
        .run_id = "test",
        .host = "host",
        .checksum = ND_CHECKSUM_XXH3,
        .waits = p->waits,
        .batch_samples = 8,
        .restart_epoch = 5,
        .before_unit = p->before_unit,
        .extra = p->hanging  ? hang
                 : p->export ? export_model
                             : NULL,
        .committed = note_committed,
        .context = p,
    };
    ND_TRY(nd_saver_create(&options, &p->savers[rank]));
    if (p->updating) {
        p->updating->trainer = t;
    }
    return p->save_first ? nd_saver_begin(p->savers[rank], "interval", 77) : ND_OK;
}

static nd_status rewind_before(void *context, nd_trainer *t, int64_t step)
{
    const plan *p = context;
    nd_manifest m = {0};
    nd_restored restored;
    nd_status status = p->rewind_at == 0 || step != p->rewind_at
                           ? ND_OK
                           : nd_restore_checkpoint(t, p->resume, &m, true, &restored);
    nd_manifest_fini(&m);
    return status;
}

/* An element in the last unit, or of a parameter that this rank holds and other ranks of tp too. */
static int64_t flipped_element(const nd_layout *layout, nd_alike what)
{
    for (int i = 0; what != ND_ALIKE_SHARDS && i < layout->param_count; i++) {
        nd_flat_range held = nd_layout_shard_range(layout, &layout->params[i]);
        if (nd_param_is_alike(&layout->params[i], what) && held.begin < held.end) {
            return held.begin;
        }
    }
    cr_assert(what == ND_ALIKE_SHARDS, "this rank has no such parameter");
    return layout->units[layout->unit_count - 1].shard_offset + 1;
}

/* Saves with the bit flipped on one rank, and flips it back: mesh_run compares replicas too. */
static nd_status save_flipped(plan *p, nd_trainer *t)
{
    int rank = t->rank->rank;
    const uint32_t flips = rank > 0 && rank == p->flips;
    uint32_t *bits = (uint32_t *)(void *)t->model->fsdp.master;
    bits += flips ? flipped_element(t->model->layout, p->flips_in) : 0;
    *bits ^= flips;
    ND_TRY(nd_saver_begin(p->savers[rank], "interval", 77));
    ND_TRY(nd_saver_finish(p->savers[rank], &p->reports[rank]));
    *bits ^= flips;
    return ND_OK;
}

static atomic_int units_begun; /* by sleep_before_each */

static nd_status after_step(void *context, nd_trainer *t, int64_t step)
{
    plan *p = context;
    int rank = t->rank->rank;
    nd_save_report report;
    ND_TRY(nd_saver_advance(p->savers[rank], t->received->save, &report));
    if (report.ended) {
        p->reports[rank] = report;
    }
    if (t->position.step == p->save_at && p->flipped) {
        return save_flipped(p, t);
    }
    if (t->position.step == p->save_at) {
        const nd_run_position position = t->position;
        ND_TRY(nd_saver_finish(p->savers[rank], &report)); /* with save_first */
        t->position.skipped = p->skipped;
        t->position.samples_ahead = -p->skipped;
        ND_TRY(nd_saver_begin(p->savers[rank], "interval", 77));
        t->position = position;
        p->copied[rank] = units_begun;
    }
    return ND_OK;
}

/* The writer hangs, and is let go when all was seen. */
static nd_status end_hanging(nd_saver *saver, hanging *h)
{
    nd_save_report report;
    h->finished = nd_saver_finish(saver, &report);
    snprintf(h->why, sizeof h->why, "%.500s", nd_error_last()->message);
    h->destroyed = nd_saver_destroy(saver);
    atomic_store(&h->released, true);
    while (!h->destroyed && !nd_saver_destroy(saver)) {
        usleep(1000);
    }
    return ND_OK;
}

static nd_status end(void *context, nd_trainer *t)
{
    plan *p = context;
    int rank = t->rank->rank;
    nd_save_report report;
    if (p->hanging) {
        return end_hanging(p->savers[rank], p->hanging);
    }
    ND_TRY(nd_saver_finish(p->savers[rank], &report));
    if (report.ended) {
        p->reports[rank] = report;
    }
    cr_assert(nd_saver_destroy(p->savers[rank]));
    p->savers[rank] = NULL;
    return p->model
               ? nd_weights_save(&t->model->fsdp, p->model, p->export->dtype,
                                 p->export->byte_tokenizer, p->export->source, p->export->tokenizer)
               : ND_OK;
}

/* With tp 4 two ranks have copies of each KV head. */
static nd_shape shape_of(void)
{
    nd_shape shape = mesh_small_llama(97);
    shape.kv_heads = 2;
    return shape;
}

/* The model of these tests, which also has biases, and norms of heads and behind the branches. */
static nd_shape shape_with_switches(void)
{
    nd_shape shape = shape_of();
    shape.qkv_bias = shape.o_bias = shape.mlp_bias = shape.qk_norm = shape.post_norm = 1;
    return shape;
}

static mesh_job job_of(nd_precision precision, plan *p, int64_t first, int64_t steps)
{
    mesh_job job = mesh_sized_job(&dir, 4000, shape_of(), precision, 8, 32, (int)steps);
    job.first_step = first;
    job.recipe = ND_FP8_DELAYED; /* carries scales and histories */
    job.history_length = 4;
    if (p) {
        p->folder = p->folder ? p->folder : runs.path;
        job.start = start;
        job.before_step = rewind_before;
        job.after_step = after_step;
        job.end = end;
        job.context = p;
    }
    return job;
}

static mesh_result train(mesh_job job, mesh_case mesh)
{
    return mesh_trained(&job, &mesh);
}

static const mesh_case meshes[] = {
    {"one", 1, 1, 1, 1, 1},          {"ddp 2", 2, 1, 1, 1, 1},
    {"fsdp 4", 1, 4, 1, 1, 1},       {"fsdp 3 as zero-2", 1, 2, 1, 1, 2, .zero2 = true},
    {"tp 4", 1, 1, 1, 4, 1},         {"fsdp 2, tp 2", 1, 2, 1, 2, 1},
    {"hsdp 2 x 2", 2, 2, 1, 1, 1},   {"cp 2", 1, 1, 2, 1, 1},
    {"fsdp 2, tp 4", 1, 2, 1, 4, 1}, {"hsdp 2 x 2, tp 2", 2, 2, 1, 2, 1},
};
enum { MESHES = sizeof meshes / sizeof *meshes };
static const mesh_case fsdp_2 = {"fsdp 2", 1, 2, 1, 1, 1};

static const char *saved_path(void)
{
    static char *path;
    if (!path) {
        assert_ok(nd_checkpoint_path(runs.path, SAVED, &path));
    }
    return path;
}

static void remove_saved(void)
{
    nd_fs_remove_tree(saved_path());
}

/* `rest` has the steps of `whole` behind step SAVED. */
static void expect_rest(const mesh_result *whole, const mesh_result *rest, const char *name)
{
    mesh_result last = *whole;
    last.steps = STEPS - SAVED;
    memmove(last.loss, last.loss + SAVED, sizeof last.loss - SAVED * sizeof *last.loss);
    memmove(last.norm, last.norm + SAVED, sizeof last.norm - SAVED * sizeof *last.norm);
    mesh_expect_same(rest, &last, MESH_LOSSES | MESH_NORMS | MESH_WEIGHTS, name);
}

/* Saves after step SAVED and goes on; then a second run resumes there. */
static void check_mesh(mesh_case mesh, nd_precision precision, bool waits)
{
    plan saving = {.save_at = SAVED, .waits = waits};
    mesh_result whole = train(job_of(precision, NULL, 0, STEPS), mesh);
    mesh_result first = train(job_of(precision, &saving, 0, STEPS), mesh);
    mesh_expect_same(&whole, &first, MESH_LOSSES | MESH_WEIGHTS, mesh.name);
    cr_assert(saving.reports[0].ended && saving.reports[0].good, "%s: %s", mesh.name,
              saving.reports[0].why);
    cr_assert_eq(saving.reports[0].step, SAVED);
    cr_assert_eq(saving.committed, SAVED);
    plan resuming = {.resume = saved_path()};
    mesh_result second = train(job_of(precision, &resuming, SAVED, STEPS - SAVED), mesh);
    expect_rest(&whole, &second, mesh.name);
    const nd_restored *restored = &resuming.restored[1];
    cr_assert(precision != ND_PRECISION_FP8 || (restored->scales && !restored->scales_differ));
    remove_saved();
}

Test(checkpoint, resumed_runs_have_the_same_bits_on_every_mesh)
{
    for (int i = 0; i < MESHES; i++) {
        check_mesh(meshes[i], i % 2 ? ND_PRECISION_BF16 : ND_PRECISION_FP32, i % 3 == 0);
    }
    check_mesh(fsdp_2, ND_PRECISION_FP8, false); /* whose histories are part of the state */
}

/* A trainer that goes back to a checkpoint has the bits of a fresh one that begins there, on the
 * same batches: no copy, scale or maximum of the weights that it gives up is used again. */
Test(checkpoint, a_rewound_trainer_has_the_bits_of_a_fresh_one)
{
    static const struct {
        mesh_case mesh;
        nd_precision precision;
        nd_fp8_recipe recipe;
    } cases[] = {
        {{"one", 1, 1, 1, 1, 1}, ND_PRECISION_BF16, 0},
        {{"ddp 2, zero-2", 2, 1, 1, 1, 1, .zero2 = true}, ND_PRECISION_BF16, 0},
        {{"fsdp 2, tp 2", 1, 2, 1, 2, 1}, ND_PRECISION_BF16, 0},
        {{"fsdp 2", 1, 2, 1, 1, 1}, ND_PRECISION_FP8, ND_FP8_TENSORWISE},
        {{"one, delayed", 1, 1, 1, 1, 1}, ND_PRECISION_FP8, ND_FP8_DELAYED},
        {{"tp 4, rowwise", 1, 1, 1, 4, 1}, ND_PRECISION_FP8, ND_FP8_ROWWISE},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const mesh_case mesh = cases[c].mesh;
        plan saving = {.save_at = 1};
        plan fresh = {0}, rewound = {.rewind_at = SAVED};
        char *path = NULL;
        mesh_job jobs[] = {job_of(cases[c].precision, &saving, 0, 1),
                           job_of(cases[c].precision, &fresh, SAVED, STEPS - SAVED),
                           job_of(cases[c].precision, &rewound, 0, STEPS)};
        mesh_result results[3];
        assert_ok(nd_checkpoint_path(runs.path, 1, &path));
        fresh.resume = rewound.resume = path;
        for (int j = 0; j < 3; j++) {
            jobs[j].recipe = cases[c].recipe;
            jobs[j].lr = 0.05; /* the weights that are given up are far from those before */
            results[j] = train(jobs[j], mesh);
        }
        expect_rest(&results[2], &results[1], mesh.name);
        nd_fs_remove_tree(path);
        free(path);
    }
}

/* The bytes that all ranks want together: replicas share their reads, as do ranks of tp those of
 * what it does not split; each copy of a KV head is read. */
static int64_t bytes_of_state(const mesh_case *mesh)
{
    const nd_shape shape = shape_with_switches();
    nd_layout *layout = NULL;
    const nd_mesh tp = {{1, 1, 1, 1, mesh->tp}};
    int64_t elements = 0;
    assert_ok(nd_layout_create(&(nd_layout_options){.shape = &shape, .mesh = &tp}, &layout));
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[i];
        const bool kv = p->id == ND_PARAM_K || p->id == ND_PARAM_V || p->id == ND_PARAM_K_BIAS ||
                        p->id == ND_PARAM_V_BIAS;
        elements += p->rows * p->cols * (kv && mesh->tp == 4 ? 2 : 1);
    }
    nd_layout_destroy(layout);
    return elements * ND_STATE_KINDS * (int64_t)sizeof(float);
}

/* Each rank has read some part, and none of the `stored` bytes twice. */
static void check_reads(const plan *resumed, const mesh_case *mesh, uint64_t stored,
                        const char *from)
{
    int64_t wanted = 0;
    for (int rank = 0; rank < mesh->dp_replicate * mesh->dp_shard * mesh->cp * mesh->tp; rank++) {
        const nd_source_stats stats = resumed->restored[rank].stats;
        wanted += stats.wanted_bytes;
        cr_assert(stats.wanted_bytes > 0 && stats.read_bytes <= (int64_t)stored,
                  "%s to %s: rank %d reads %lld of %llu bytes", from, mesh->name, rank,
                  (long long)stats.read_bytes, (unsigned long long)stored);
    }
    cr_assert_eq(wanted, bytes_of_state(mesh), "%s to %s: all ranks want %lld bytes", from,
                 mesh->name, (long long)wanted);
}

static mesh_job switched(plan *p, int64_t first, int64_t steps)
{
    mesh_job job = job_of(ND_PRECISION_FP32, p, first, steps);
    job.shape = shape_with_switches();
    return job;
}

/*
 * Rank 1 cannot load what it reads: all ranks say so, alike, and none waits for another. Only what
 * rank 0 finds to be damaged too is damage.
 */
Test(checkpoint, ranks_agree_when_one_cannot_load)
{
    static const struct {
        const char *change; /* of rank 1's copy */
        nd_status status;
        const char *reason;
    } cases[] = {
        {"rm -r copy", ND_ERR_IO, "rank 1 on "},
        {"rm -r copy/state", ND_ERR_IO, "which may not see the run folder"},
        {"rm copy/state/shard-00002.hashes", ND_ERR_IO, "cannot open "},
        {"truncate -s 100 copy/manifest.json", ND_ERR_IO, "copy/manifest.json"},
        {"truncate -s 9 copy/state/*", ND_ERR_IO, "copy/state/"},
        {"truncate -s 9 copy/state/shard-00002*.safetensors", ND_ERR_DATA, "copy/state/"},
        {"truncate -s 9 copy/state/shard-00002.hashes", ND_ERR_DATA, "copy/state/"},
    };
    plan saving = {.save_at = SAVED};
    train(job_of(ND_PRECISION_FP32, &saving, 0, SAVED), meshes[2]);
    const char *saved = saved_path();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char command[1000], copy[300];
        snprintf(copy, sizeof copy, "%s/copy", dir.path);
        snprintf(command, sizeof command, "cd %s && rm -rf copy && cp -r %s copy && %s", dir.path,
                 saved, cases[i].change);
        cr_assert_eq(system(command), 0, "%s", command);
        plan broken = {.resume = saved, .broken = copy};
        broken.resume = cases[i].status == ND_ERR_DATA ? copy : saved; /* all ranks have it */
        train(job_of(ND_PRECISION_FP32, &broken, 0, 1), meshes[2]);
        for (int rank = 0; rank < 4; rank++) {
            cr_assert_eq(broken.statuses[rank], cases[i].status, "%s, rank %d: %d (%s)",
                         cases[i].change, rank, (int)broken.statuses[rank], broken.reason);
            cr_assert(broken.stale[rank], "%s, rank %d keeps copies of overwritten weights",
                      cases[i].change, rank);
            nd_failure_cause own = cases[i].status == ND_ERR_IO ? ND_CAUSE_LOCAL : ND_CAUSE_OWN;
            cr_assert_eq(broken.causes[rank], rank == 1 ? own : ND_CAUSE_ELSEWHERE, "%s, rank %d",
                         cases[i].change, rank);
        }
        cr_assert_not_null(strstr(broken.reason, cases[i].reason), "%s: %s", cases[i].change,
                           broken.reason);
    }
    remove_saved();
}

static void sleep_before(void *context, int unit)
{
    usleep(unit == 0 ? 1000000 : 100000);
}

/* The writer is slower than several steps would be: each update waits for it, unit by unit, also
 * in the second save of a run. */
Test(checkpoint, a_slow_copy_holds_the_saved_step_and_not_the_next)
{
    const mesh_case mesh = meshes[5];
    const time_t begin = time(NULL);
    struct tm utc = {0};
    plan slow = {.save_at = SAVED, .save_first = true, .before_unit = sleep_before, .skipped = 1};
    mesh_result whole = train(job_of(ND_PRECISION_BF16, NULL, 0, STEPS), mesh);
    mesh_result until = train(job_of(ND_PRECISION_BF16, NULL, 0, SAVED), mesh);
    mesh_result first = train(job_of(ND_PRECISION_BF16, &slow, 0, STEPS), mesh);
    mesh_expect_same(&whole, &first, MESH_WEIGHTS, mesh.name);
    cr_assert(slow.reports[0].good);
    cr_assert_gt(slow.reports[0].blocked_seconds, 0);
    const char *path = saved_path();
    nd_source *source = NULL;
    nd_manifest m = {0};
    nd_layout *layout = NULL;
    int64_t bytes = 0;
    assert_ok(nd_manifest_read(path, &m));
    assert_ok(nd_source_verify(path, &m, -1, true, &bytes));
    cr_expect_eq(slow.reports[0].bytes, (uint64_t)bytes, "of the files of all ranks");
    cr_expect(strcmp(m.host, "host") == 0 && strcmp(m.run_id, "test") == 0);
    cr_expect(strcmp(m.reason, "interval") == 0 && strcmp(m.optimizer, "adamw") == 0);
    cr_expect(m.restart_epoch == 5 && m.metrics_bytes == 77 && m.samples_seen == 8 * SAVED - 1);
    /* The updates that AdamW has made stand at the end of a file. */
    const char *const updates = printed("test $(tail -qc 4 %s/state/shard-00001-model-00001-of-* | "
                                        "od -An -tf4) = %d",
                                        path, SAVED - 1);
    cr_expect(m.position.skipped == 1 && system(updates) == 0);
    cr_assert_not_null(strptime(m.time, "%Y-%m-%dT%H:%M:%SZ", &utc), "%s", m.time);
    cr_expect(timegm(&utc) >= begin && timegm(&utc) <= time(NULL), "%s", m.time);
    assert_ok(nd_source_open(path, &m, true, &source));
    assert_ok(nd_manifest_layout(&m.shape, m.layout, NULL, (nd_coord){{0}}, &layout));
    for (int i = 0; i < until.tensors; i++) {
        const nd_param *p = &layout->params[i];
        const nd_span all = {.param = p, .rows = p->rows, .cols = p->cols};
        float *got = malloc((size_t)until.sizes[i] * sizeof *got);
        assert_ok(nd_source_add(source, &all, ND_STATE_MASTER, got));
        assert_ok(nd_source_run(source));
        cr_assert_eq(memcmp(got, until.weights[i], (size_t)until.sizes[i] * sizeof *got), 0,
                     "%s is not that of step %d", p->name, SAVED);
        free(got);
    }
    nd_layout_destroy(layout);
    nd_source_close(source);
    nd_manifest_fini(&m);
}

Test(checkpoint, the_update_of_a_unit_waits_for_the_copy_of_no_other)
{
    updating w = {0};
    plan saving = {.save_at = SAVED, .before_unit = wait_for_update, .updating = &w};
    train(job_of(ND_PRECISION_FP32, &saving, 0, STEPS), meshes[0]);
    cr_assert(w.updated, "no unit was updated before all were copied");
    cr_assert(saving.reports[0].good, "%s", saving.reports[0].why);
    free(w.before);
}

static void sleep_before_each(void *context, int unit)
{
    units_begun++;
    usleep(800000);
}

/* launch.comm_timeout_seconds is the deadline of one unit: a copy that takes longer in all, but
 * goes on, is no failure; also where no step waits for it, but the end of the run. */
Test(checkpoint, a_slow_copy_may_take_longer_than_the_deadline)
{
    for (int waits = 0; waits < 2; waits++) {
        plan slow = {
            .save_at = SAVED, .waits = waits, .patience = 2, .before_unit = sleep_before_each};
        train(job_of(ND_PRECISION_FP32, &slow, 0, SAVED), meshes[0]);
        cr_assert(slow.reports[0].good, "%s", slow.reports[0].why);
        cr_assert(!waits || slow.reports[0].blocked_seconds > 2, "too few units for this test");
        cr_assert(!waits || slow.copied[0] == units_begun, "the copy was not waited for");
        remove_saved();
    }
}

/* An fsync or rename that does not return: the run ends, and frees nothing that the thread uses. */
Test(checkpoint, a_writer_that_hangs_is_waited_for_no_longer_than_the_deadline)
{
    hanging h = {.destroyed = true};
    plan stuck = {.save_at = SAVED, .patience = 2, .hanging = &h};
    train(job_of(ND_PRECISION_FP32, &stuck, 0, SAVED), meshes[0]);
    cr_assert(h.there);
    cr_assert_eq(h.finished, ND_ERR_HANG);
    cr_assert_not_null(strstr(h.why, "has made no progress for 2 s"), "%s", h.why);
    cr_assert_not(h.destroyed, "the saver is gone, and its thread still runs");
}

/* One rank cannot write: no rank's part becomes a checkpoint, and training goes on. */
static void block_folder(void *context, int unit)
{
    char path[256];
    if (unit == 1) { /* a folder in the place of the hash file of rank 2 */
        snprintf(path, sizeof path, "%s/.tmp-checkpoint-%d-test/state/shard-00003.hashes",
                 runs.path, SAVED);
        mkdir(path, 0777);
    }
}

Test(checkpoint, a_save_that_fails_leaves_nothing_and_training_goes_on)
{
    plan blocked = {.save_at = SAVED, .before_unit = block_folder};
    mesh_result whole = train(job_of(ND_PRECISION_FP32, NULL, 0, STEPS), meshes[2]);
    mesh_result first = train(job_of(ND_PRECISION_FP32, &blocked, 0, STEPS), meshes[2]);
    mesh_expect_same(&whole, &first, MESH_WEIGHTS, "fsdp 4");
    for (int rank = 0; rank < 4; rank++) {
        cr_assert(blocked.reports[rank].ended && !blocked.reports[rank].good);
        cr_assert_eq(blocked.reports[rank].why[0] != '\0', rank == 2, "rank %d: %s", rank,
                     blocked.reports[rank].why);
    }
    cr_expect_not_null(strstr(blocked.reports[2].why, "shard-00003.hashes"));
    cr_assert_eq(rmdir(runs.path), 0, "the run folder is not empty");
}

/* Replicas hold the same bits, as do ranks of a tp group of norms, and some of KV heads, of which
 * only the first's are written. One that does not is found, and its state is not saved. */
Test(checkpoint, copies_that_differ_are_no_checkpoint)
{
    static const char replicas[] = ", although both are replicas", norms[] = ", in tensors that",
                      heads[] = ", in KV heads of";
    static const struct {
        mesh_case mesh;
        int flips, tells, first; /* flips 0: none; the rank that tells names the first one */
        nd_alike what;
        const char *words;
    } cases[] = {{{"hsdp 2 x 2", 2, 2, 1, 1, 1}, 0, -1, 0, ND_ALIKE_SHARDS, NULL},
                 {{"hsdp 2 x 2", 2, 2, 1, 1, 1}, 1, 3, 1, ND_ALIKE_SHARDS, replicas},
                 {{"hsdp 2 x 2", 2, 2, 1, 1, 1}, 2, 2, 0, ND_ALIKE_SHARDS, replicas},
                 {{"hsdp 2 x 2", 2, 2, 1, 1, 1}, 3, 3, 1, ND_ALIKE_SHARDS, replicas},
                 {{"tp 2", 1, 1, 1, 2, 1}, 1, 1, 0, ND_ALIKE_UNSPLIT, norms},
                 {{"fsdp 2, tp 2", 1, 2, 1, 2, 1}, 1, 1, 0, ND_ALIKE_UNSPLIT, norms},
                 {{"cp 2, tp 2", 1, 1, 2, 2, 1}, 1, 1, 0, ND_ALIKE_UNSPLIT, norms},
                 {{"tp 4", 1, 1, 1, 4, 1}, 3, 3, 2, ND_ALIKE_KV_COPIES, heads},
                 {{"fsdp 2, tp 4", 1, 2, 1, 4, 1}, 1, 1, 0, ND_ALIKE_KV_COPIES, heads}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const mesh_case *mesh = &cases[i].mesh;
        plan flipped = {
            .save_at = SAVED, .flipped = true, .flips = cases[i].flips, .flips_in = cases[i].what};
        char first[16];
        train(job_of(ND_PRECISION_FP32, &flipped, 0, SAVED), *mesh);
        cr_assert_eq(tempdir_has_path(saved_path()), cases[i].flips == 0, "case %zu", i);
        snprintf(first, sizeof first, "rank %d,", cases[i].first);
        for (int rank = 0; rank < mesh->dp_replicate * mesh->dp_shard * mesh->cp * mesh->tp;
             rank++) {
            const nd_save_report *report = &flipped.reports[rank];
            const bool tells = rank == cases[i].tells;
            cr_assert(report->ended && report->good == (cases[i].flips == 0), "case %zu", i);
            cr_assert(tells ? strstr(report->why, first) && strstr(report->why, cases[i].words)
                            : !report->why[0],
                      "%s, rank %d: %s", mesh->name, rank, report->why);
        }
        remove_saved();
    }
}

/* The model in the checkpoint of the last step has the bytes of the one that the run saves itself;
 * so has one that is exported later. */
static void check_export(mesh_case mesh, nd_precision precision, nd_export_options options)
{
    char model[192], later[192], command[1024];
    snprintf(model, sizeof model, "%s/model", runs.path);
    snprintf(later, sizeof later, "%s/later", runs.path);
    plan saving = {.save_at = SAVED, .export = &options, .model = model};
    train(job_of(precision, &saving, 0, SAVED), mesh);
    cr_assert(saving.reports[0].good, "%s: %s", mesh.name, saving.reports[0].why);
    const char *path = saved_path();
    nd_manifest m = {0};
    assert_ok(nd_manifest_read(path, &m));
    options.out = later;
    assert_ok(nd_checkpoint_export(path, &m, &options));
    snprintf(command, sizeof command,
             "cd %s && diff -r model later && cd %s && rm -r state manifest.json && "
             "diff -r . %s && rm -r %s %s",
             runs.path, path, model, model, later);
    cr_assert_eq(system(command), 0, "%s", mesh.name);
    nd_manifest_fini(&m);
    remove_saved();
}

Test(checkpoint, the_exported_model_has_the_bytes_of_the_saved_one)
{
    tempdir_write(&dir, "tokenizer.json", "{}", 2);
    tempdir_write(&dir, "generation_config.json", "{\"top_k\": 1}", 12);
    for (int i = 0; i < MESHES; i++) {
        nd_export_options options = {.dtype = i % 2 ? ND_DTYPE_BF16 : ND_DTYPE_F32,
                                     .byte_tokenizer = i % 3 == 0,
                                     .source = i % 4 == 0 ? NULL : dir.path,
                                     .verify = true};
        check_export(meshes[i], i % 2 ? ND_PRECISION_BF16 : ND_PRECISION_FP32, options);
    }
}

static nd_status pass_over(void *context, const nd_diff_array *array)
{
    return ND_OK;
}

static nd_diff_totals compare(const char *a, const char *b)
{
    nd_manifest m[2] = {0};
    nd_diff_totals totals;
    assert_ok(nd_manifest_read(a, &m[0]));
    assert_ok(nd_manifest_read(b, &m[1]));
    const nd_diff_options verified = {.verify = true};
    const nd_diff_side sides[2] = {{a, &m[0], m[0].shape}, {b, &m[1], m[1].shape}};
    assert_ok(nd_checkpoint_diff(sides, &verified, pass_over, NULL, &totals));
    nd_manifest_fini(&m[0]);
    nd_manifest_fini(&m[1]);
    return totals;
}

/* Loaded on another mesh and saved again at once: the same bits in weights and moments. In the
 * steps that follow sums are formed in another order, so losses agree within what F32 leaves. */
Test(checkpoint, any_mesh_resumes_what_any_other_saved)
{
    char again[160], *second = NULL;
    snprintf(again, sizeof again, "%s/again", runs.path);
    assert_ok(nd_checkpoint_path(again, SAVED, &second));
    mesh_result one = train(switched(NULL, 0, STEPS), meshes[0]);
    for (int from = 0; from < MESHES; from++) {
        plan saving = {.save_at = SAVED};
        train(switched(&saving, 0, SAVED), meshes[from]);
        for (int to = 0; to < MESHES; to++) {
            plan passing = {.folder = again, .resume = saved_path(), .save_first = true};
            assert_ok(nd_fs_make_folders(again, "folder", ""));
            mesh_result next = train(switched(&passing, SAVED, STEPS - SAVED), meshes[to]);
            for (int s = SAVED; s < STEPS; s++) {
                cr_assert_lt(fabs(next.loss[s - SAVED] - one.loss[s]), 2e-4, "%s to %s, step %d",
                             meshes[from].name, meshes[to].name, s + 1);
            }
            check_reads(&passing, &meshes[to], saving.reports[0].bytes, meshes[from].name);
            cr_assert(passing.reports[0].good, "%s", passing.reports[0].why);
            nd_diff_totals totals = compare(saved_path(), second);
            cr_assert_eq(totals.differing_arrays, 0, "%s to %s", meshes[from].name,
                         meshes[to].name);
            cr_assert_eq(totals.arrays, ND_STATE_KINDS * next.tensors);
            nd_fs_remove_tree(again);
        }
        remove_saved();
    }
    free(second);
}
