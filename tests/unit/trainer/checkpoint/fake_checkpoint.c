// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/source.h"

tempdir fake_run;
int64_t fake_extra_count = FAKE_EXTRA_COUNT;
const nd_mesh fake_one = {{1, 1, 1, 1, 1}};

void fake_setup(void)
{
    tempdir_make(&fake_run);
}

void fake_teardown(void)
{
    nd_fs_remove_tree(fake_run.path);
}

const char *fake_path(const char *name)
{
    return tempdir_file(&fake_run, name);
}

const char *fake_file(const char *name, const char *text)
{
    return tempdir_write(&fake_run, name, text, strlen(text));
}

void fake_folder(const char *name)
{
    ND_ASSERT(mkdir(fake_path(name), 0777) == 0);
}

void fake_move(const char *from, const char *to)
{
    tempdir run = fake_run; /* whose last path is another one */
    ND_ASSERT(rename(tempdir_file(&run, from), fake_path(to)) == 0);
}

bool fake_exists(const char *name)
{
    return tempdir_has_path(fake_path(name));
}

static void must(nd_status status)
{
    if (status != ND_OK) {
        fprintf(stderr, "fake checkpoint: %s\n", nd_error_last()->message);
        abort();
    }
}

int fake_prune(int64_t keep_last)
{
    const nd_prune_options options = {.keep_last = keep_last, .keep = -1};
    int deleted = 0;
    must(nd_checkpoint_prune(fake_run.path, &options, &deleted));
    return deleted;
}

nd_manifest fake_manifest(const nd_shape *shape, const nd_mesh *mesh, int arrays, int64_t step,
                          bool converts)
{
    nd_manifest m = {.position = {.step = step, .skipped = step / 6, .tokens_seen = 100 * step},
                     .samples_seen = 8 * step,
                     .metrics_bytes = 1234,
                     .mesh = *mesh,
                     .shape = *shape,
                     .extras = {{"fp8.scale", fake_extra_count}},
                     .extra_count = fake_extra_count > 0,
                     .arrays = arrays,
                     .writer_count = nd_mesh_world_size(mesh)};
    snprintf(m.program, sizeof m.program, "ndtrain test");
    snprintf(m.host, sizeof m.host, "host");
    snprintf(m.run_id, sizeof m.run_id, "test");
    snprintf(m.time, sizeof m.time, "2026-01-31T12:00:00Z");
    snprintf(m.reason, sizeof m.reason, "interval");
    snprintf(m.optimizer, sizeof m.optimizer, arrays > 1 ? "adamw" : "sgd");
    nd_layout *layout = fake_layout(shape, mesh, 0, converts);
    must(nd_manifest_layout(&m.shape, layout, &fake_one, (nd_coord){{0}}, &m.layout));
    nd_layout_destroy(layout);
    m.identity = json_pack("{s:s}", "data.path", "00ff");
    m.config = json_pack("{s:s, s:o}", "train.steps", "1000", "data.path",
                         nd_json_string("a \"quoted\" \\ path\xff"));
    must(ND_ALLOC(m.writer_count, &m.writers));
    return m;
}

typedef struct fake_source {
    const nd_shard_plan *plan;
    const fake_state *state;
} fake_source;

nd_status fake_any_unit(void *context, int unit)
{
    return ND_OK;
}

static const float *piece_data(void *context, int piece, nd_state_kind array)
{
    const fake_source *from = context;
    return from->state->arrays[array] + from->plan->pieces[piece].span.begin;
}

void fake_plan(const nd_manifest *m, const nd_layout *layout, int rank, nd_shard_plan *out)
{
    const nd_shard_plan_options options = {.layout = layout,
                                           .mesh = &m->mesh,
                                           .rank = rank,
                                           .arrays = m->arrays,
                                           .extras = m->extras,
                                           .extra_count = m->extra_count,
                                           .checksum = m->checksum};
    must(nd_shard_plan_init(out, &options));
}

static void write_rank(const nd_manifest *m, const char *state, int rank, bool converts,
                       nd_shard_record *record)
{
    nd_layout *layout = fake_layout(&m->shape, &m->mesh, rank, converts);
    fake_state values = fake_make(layout);
    nd_shard_plan plan;
    float extra[FAKE_EXTRA_COUNT];
    const float *extras[] = {extra};
    for (int i = 0; i < FAKE_EXTRA_COUNT; i++) {
        extra[i] = (float)(i + 1);
    }
    fake_plan(m, layout, rank, &plan);
    fake_source from = {&plan, &values};
    const nd_shard_data data = {fake_any_unit, piece_data, extras, &from};
    must(nd_shard_write(&plan, state, m->position.step - m->position.skipped, &data, record));
    nd_shard_plan_fini(&plan);
    fake_free(&values);
    nd_layout_destroy(layout);
}

void fake_write(const char *folder, const nd_shape *shape, const nd_mesh *mesh, int arrays,
                int64_t step, bool converts, nd_checksum checksum)
{
    nd_manifest m = fake_manifest(shape, mesh, arrays, step, converts);
    char *temporary = NULL, *state = NULL;
    m.checksum = checksum;
    must(nd_checkpoint_temporary(folder, step, "test", &temporary));
    must(nd_fs_format(&state, "%s/" ND_STATE_FOLDER, temporary));
    must(nd_fs_make_own_folder(temporary));
    must(nd_fs_make_own_folder(state));
    for (int rank = 0; rank < m.writer_count; rank++) {
        write_rank(&m, state, rank, converts, &m.writers[rank]);
    }
    must(nd_checkpoint_commit(folder, temporary, &m, NULL, NULL));
    free(state);
    free(temporary);
    nd_manifest_fini(&m);
}

void fake_write_small(int64_t step)
{
    const nd_shape shape = fake_shape(true);
    fake_write(fake_run.path, &shape, &fake_one, 1, step, false, ND_CHECKSUM_XXH3);
}

fake_saved fake_open(const char *folder, int64_t step)
{
    fake_saved s = {0};
    must(nd_checkpoint_path(folder, step, &s.path));
    must(nd_manifest_read(s.path, &s.manifest));
    return s;
}

fake_saved fake_save(const nd_shape *shape, const nd_mesh *mesh, int arrays, int64_t step)
{
    fake_write(fake_run.path, shape, mesh, arrays, step, step % 2 == 0, ND_CHECKSUM_XXH3);
    return fake_open(fake_run.path, step);
}

void fake_forget(fake_saved *s)
{
    nd_manifest_fini(&s->manifest);
    free(s->path);
}

void fake_write_golden(const char *folder)
{
    const nd_mesh sharded = {{1, 1, 2, 1, 2}};
    nd_shape shape = fake_shape(false);
    shape.vocab = 11;
    shape.hidden = 12;
    shape.ffn = 20;
    shape.layers = 2;
    shape.heads = shape.kv_heads = 2;
    fake_write(folder, &shape, &sharded, ND_STATE_KINDS, FAKE_GOLDEN_SHARDED, true,
               ND_CHECKSUM_XXH3);
    shape.tied = true;
    fake_write(folder, &shape, &fake_one, 1, FAKE_GOLDEN_SINGLE, false, ND_CHECKSUM_SHA256);
}

typedef struct wants {
    nd_source *source;
    fake_state *state;
    int arrays;
} wants;

static nd_status want_span(void *context, const nd_span *span)
{
    wants *w = context;
    for (int a = 0; a < w->arrays; a++) {
        ND_TRY(nd_source_add(w->source, span, a, w->state->arrays[a] + span->begin));
    }
    return ND_OK;
}

nd_status fake_load(nd_source *source, const nd_layout *layout, int arrays, fake_state *out)
{
    *out = fake_empty(layout);
    ND_TRY(fake_each_span(layout, want_span, &(wants){source, out, arrays}));
    return nd_source_run(source);
}

nd_status fake_load_rank(const fake_saved *s, const nd_mesh *mesh, int rank, bool converts)
{
    const int arrays = s->manifest.arrays;
    nd_source *source = NULL;
    fake_state state;
    nd_status status = ND_OK;
    float extra[FAKE_EXTRA_COUNT] = {0};
    ND_TRY(nd_source_open(s->path, &s->manifest, true, &source));
    nd_layout *layout = fake_layout(&s->manifest.shape, mesh, rank, converts);
    ND_TRY_OUT(fake_load(source, layout, arrays, &state));
    ND_TRY_OUT(nd_source_add_extra(source, "fp8.scale", FAKE_EXTRA_COUNT, extra));
    ND_TRY_OUT(nd_source_run(source));
    fake_check(layout, &state, arrays);
    ND_ASSERT(extra[0] == 1.0f && extra[FAKE_EXTRA_COUNT - 1] == (float)FAKE_EXTRA_COUNT);
out:
    fake_free(&state);
    nd_layout_destroy(layout);
    nd_source_close(source);
    return status;
}

nd_status fake_load_all(const char *path)
{
    fake_saved s = {.path = (char *)path};
    ND_TRY(nd_manifest_read(path, &s.manifest));
    nd_status status = fake_load_rank(&s, &fake_one, 0, false);
    nd_manifest_fini(&s.manifest);
    return status;
}

nd_status fake_verify(const char *path)
{
    nd_manifest m = {0};
    int64_t bytes = 0;
    ND_TRY(nd_manifest_read(path, &m));
    nd_status status = nd_source_verify(path, &m, -1, true, &bytes);
    nd_manifest_fini(&m);
    return status;
}
