// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/export.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/weights/weights.h"

static char out[160]; /* where models go */

static void setup(void)
{
    fake_setup();
    snprintf(out, sizeof out, "%.140s/model", fake_run.path);
}

TestSuite(export, .init = setup, .fini = fake_teardown);

static fake_saved save(const nd_mesh *mesh, bool tied, int64_t step)
{
    const nd_shape shape = fake_shape(tied);
    return fake_save(fake_run.path, &shape, mesh, ND_STATE_KINDS, step);
}

/* Every element of every tensor is the one that the checkpoint has. */
static void check_model(const char *folder, const nd_manifest *m, nd_dtype dtype)
{
    nd_hf_reader *reader = NULL;
    int files = 0;
    assert_ok(nd_hf_reader_open(folder, &reader));
    assert_ok(nd_hf_reader_check(reader));
    assert_ok(nd_checksums_verify(folder, &files));
    cr_assert_eq(files, 2); /* model.safetensors, config.json */
    for (int i = 0; i < m->layout->param_count; i++) {
        const nd_param *t = &m->layout->params[i];
        int64_t count = t->rows * t->cols;
        float *values = malloc((size_t)count * sizeof *values);
        assert_ok(nd_hf_reader_read(reader, t->name, 0, count, values));
        for (int64_t e = 0; e < count; e++) {
            float expected = fake_value(ND_STATE_MASTER, t->name, e);
            expected =
                dtype == ND_DTYPE_BF16 ? nd_bf16_to_f32(nd_bf16_from_f32(expected)) : expected;
            cr_assert_eq(values[e], expected, "%s element %lld", t->name, (long long)e);
        }
        free(values);
    }
    nd_hf_reader_close(reader);
}

Test(export, any_mesh_gives_the_same_model)
{
    static const nd_mesh meshes[] = {
        {{1, 1, 1, 1, 1}}, {{1, 3, 1, 1, 1}}, {{1, 1, 3, 1, 2}},
        {{1, 2, 2, 1, 2}}, {{1, 1, 2, 3, 4}}, {{1, 19, 7, 1, 1}}, /* more than are kept open */
    };
    for (int i = 0; i < (int)(sizeof meshes / sizeof *meshes); i++) {
        fake_saved s = save(&meshes[i], i % 2 == 1, i);
        nd_dtype dtype = i % 3 == 0 ? ND_DTYPE_F32 : ND_DTYPE_BF16;
        nd_export_options options = {.out = out, .dtype = dtype, .verify = i % 2 == 0};
        assert_ok(nd_checkpoint_export(s.path, &s.manifest, &options));
        check_model(out, &s.manifest, dtype);
        nd_fs_remove_tree(out);
        fake_forget(&s);
    }
}

Test(export, beside_the_state_it_is_part_of_a_good_checkpoint)
{
    const nd_mesh mesh = {{1, 1, 2, 1, 1}};
    fake_saved s = save(&mesh, false, 4);
    int64_t bytes = 0;
    int deleted = 0;
    nd_export_options options = {.dtype = ND_DTYPE_BF16, .verify = true};
    cr_assert_eq(unlink(tempdir_file(&fake_run, "checkpoint-4/manifest.json")), 0);
    assert_ok(nd_checkpoint_export(s.path, &s.manifest, &options));
    check_model(s.path, &s.manifest, ND_DTYPE_BF16);
    assert_ok(nd_source_verify(s.path, &s.manifest, -1, true, &bytes));
    fake_forget(&s);
    s = save(&mesh, false, 5);
    assert_ok(nd_checkpoint_export(s.path, &s.manifest, &options));
    assert_fails(nd_checkpoint_export(s.path, &s.manifest, &options), ND_ERR_CANTCREATE,
                 "model.safetensors");
    fake_forget(&s);
    s = save(&mesh, false, 6);
    nd_prune_options prune = {.keep_last = 1, .keep = -1};
    assert_ok(nd_checkpoint_prune(fake_run.path, &prune, &deleted));
    cr_assert(fake_exists("checkpoint-6") && !fake_exists("checkpoint-5"));
    fake_forget(&s);
}

Test(export, takes_no_folder_that_holds_something)
{
    fake_saved s = save(&fake_one, true, 1);
    nd_export_options options = {.out = out, .dtype = ND_DTYPE_F32, .verify = true};
    cr_assert_eq(mkdir(out, 0777), 0);
    tempdir_write(&fake_run, "model/mine", "x", 1);
    assert_fails(nd_checkpoint_export(s.path, &s.manifest, &options), ND_ERR_CANTCREATE,
                 "is not overwritten");
    cr_assert(fake_exists("model/mine"));
    cr_assert_eq(unlink(tempdir_file(&fake_run, "model/mine")), 0);
    assert_ok(nd_checkpoint_export(s.path, &s.manifest, &options));
    check_model(out, &s.manifest, ND_DTYPE_F32);
    nd_fs_remove_tree(out);
    cr_assert_eq(mkdir(tempdir_file(&fake_run, "empty"), 0777), 0);
    cr_assert_eq(symlink("empty", out), 0);
    assert_fails(nd_checkpoint_export(s.path, &s.manifest, &options), ND_ERR_CANTCREATE,
                 "is not overwritten");
    cr_assert_eq(unlink(out), 0);
    fake_forget(&s);
}

Test(export, of_a_damaged_checkpoint_leaves_nothing)
{
    fake_saved s = save(&fake_one, true, 1);
    nd_export_options options = {.out = out, .dtype = ND_DTYPE_F32, .verify = true};
    int fd = open(
        tempdir_file(&fake_run, "checkpoint-1/state/shard-00001-model-00001-of-00001.safetensors"),
        O_WRONLY);
    cr_assert_geq(fd, 0);
    cr_assert_eq(pwrite(fd, "x", 1, 9000), 1);
    close(fd);
    assert_fails(nd_checkpoint_export(s.path, &s.manifest, &options), ND_ERR_DATA, "is damaged");
    nd_fs_remove_tree(s.path);
    cr_assert_eq(rmdir(fake_run.path), 0, "something is left");
    cr_assert_eq(mkdir(fake_run.path, 0777), 0);
    fake_forget(&s);
}

/* The walk over all tensors. */

TestSuite(tensors, .init = fake_setup, .fini = fake_teardown);

/* Which element comes next. */
typedef struct visitor {
    const nd_layout *layout;
    int param, array, arrays, sources;
    int64_t element, largest, parts;
} visitor;

static nd_status check_part(void *context, const nd_tensor_part *part)
{
    visitor *v = context;
    const nd_param *p = &v->layout->params[v->param];
    cr_assert_eq(part->param, p);
    cr_assert_eq((int)part->array, v->array);
    cr_assert_eq(part->begin, v->element);
    for (int s = 0; s < v->sources; s++) {
        for (int64_t i = 0; i < part->count; i++) {
            cr_assert_eq(part->values[s][i], fake_value(part->array, p->name, part->begin + i));
        }
    }
    v->parts++;
    v->largest = part->count > v->largest ? part->count : v->largest;
    v->element += part->count;
    if (v->element == p->rows * p->cols) {
        v->element = 0;
        v->array = (v->array + 1) % v->arrays;
        v->param += v->array == 0;
    }
    return ND_OK;
}

static nd_source *open_source(const nd_mesh *mesh, int64_t step, nd_manifest *manifest)
{
    nd_shape shape = fake_shape(false);
    nd_source *source = NULL;
    char *path = NULL;
    fake_write(fake_run.path, &shape, mesh, ND_STATE_KINDS, step, false, ND_CHECKSUM_XXH3);
    assert_ok(nd_checkpoint_path(fake_run.path, step, &path));
    assert_ok(nd_manifest_read(path, manifest));
    assert_ok(nd_source_open(path, manifest, true, &source));
    free(path);
    return source;
}

/* Batches of a few rows, of some tensors, and of everything. */
Test(tensors, every_element_comes_once_and_in_order_whatever_fits_a_batch)
{
    static const int64_t sizes[] = {1, 24, 50, 100, 777, 2328, 5000, 0};
    const nd_mesh meshes[2] = {{{1, 2, 3, 1, 2}}, {{1, 1, 4, 1, 1}}};
    nd_shape shape = fake_shape(false);
    nd_layout *layout = fake_layout(&shape, &fake_one, 0, false);
    nd_manifest m[2] = {0};
    nd_source *sources[2];
    for (int s = 0; s < 2; s++) {
        sources[s] = open_source(&meshes[s], s, &m[s]);
    }
    for (int i = 0; i < (int)(sizeof sizes / sizeof *sizes); i++) {
        visitor v = {.layout = layout, .arrays = 1 + 2 * (i % 2), .sources = 1 + (i / 2) % 2};
        nd_tensors_walk walk = {.layout = layout,
                                .arrays = v.arrays,
                                .sources = {sources[0], sources[1]},
                                .source_count = v.sources,
                                .batch_elements = sizes[i],
                                .visit = check_part,
                                .context = &v};
        assert_ok(nd_tensors_each(&walk));
        cr_assert_eq(v.param, layout->param_count);
        if (sizes[i] > 0) { /* the longest row has 36 */
            cr_assert_leq(v.largest, sizes[i] < 36 ? 36 : sizes[i]);
        } else {
            cr_assert_eq(v.parts, layout->param_count * v.arrays);
        }
    }
    for (int s = 0; s < 2; s++) {
        nd_source_close(sources[s]);
        nd_manifest_fini(&m[s]);
    }
    nd_layout_destroy(layout);
}

/* A reader keeps few of the writers of a large mesh in memory. */
Test(tensors, few_writers_are_kept)
{
    const nd_mesh many = {{1, 20, 7, 1, 1}};
    nd_shape shape = fake_shape(false);
    nd_layout *layout = fake_layout(&shape, &fake_one, 0, false);
    nd_manifest m = {0};
    nd_source *source = open_source(&many, 1, &m);
    visitor v = {.layout = layout, .arrays = 1, .sources = 1};
    nd_tensors_walk walk = {.layout = layout,
                            .arrays = 1,
                            .sources = {source},
                            .source_count = 1,
                            .batch_elements = 300,
                            .visit = check_part,
                            .context = &v};
    assert_ok(nd_tensors_each(&walk));
    const int64_t kept = nd_source_get_stats(source).kept;
    cr_assert(kept > 0 && kept <= 128, "%ld of %d", (long)kept, 140);
    cr_assert_eq(v.param, layout->param_count);
    nd_source_close(source);
    nd_manifest_fini(&m);
    nd_layout_destroy(layout);
}
