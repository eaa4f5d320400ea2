// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/tempdir.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/export.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/weights/weights.h"

static tempdir dir;
static char out[160]; /* where models go */

static void setup(void)
{
    tempdir_make(&dir);
    snprintf(out, sizeof out, "%.140s/model", dir.path);
}

static void teardown(void)
{
    nd_fs_remove_tree(dir.path);
}

TestSuite(export, .init = setup, .fini = teardown);

static fake_saved save(const nd_mesh *mesh, bool tied, int64_t step)
{
    const nd_shape shape = fake_shape(tied);
    return fake_save(dir.path, &shape, mesh, ND_STATE_KINDS, step);
}

static bool exists(const char *name)
{
    return tempdir_has_path(tempdir_file(&dir, name));
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
    cr_assert_eq(unlink(tempdir_file(&dir, "checkpoint-4/manifest.json")), 0);
    assert_ok(nd_checkpoint_export(s.path, &s.manifest, &options));
    check_model(s.path, &s.manifest, ND_DTYPE_BF16);
    assert_ok(nd_source_verify(s.path, &s.manifest, -1, &bytes));
    fake_forget(&s);
    s = save(&mesh, false, 5);
    assert_ok(nd_checkpoint_export(s.path, &s.manifest, &options));
    assert_fails(nd_checkpoint_export(s.path, &s.manifest, &options), ND_ERR_CANTCREATE,
                 "model.safetensors");
    fake_forget(&s);
    s = save(&mesh, false, 6);
    nd_prune_options prune = {.keep_last = 1, .keep = -1};
    assert_ok(nd_checkpoint_prune(dir.path, &prune, &deleted));
    cr_assert(exists("checkpoint-6") && !exists("checkpoint-5"));
    fake_forget(&s);
}

Test(export, takes_no_folder_that_holds_something)
{
    const nd_mesh mesh = {{1, 1, 1, 1, 1}};
    fake_saved s = save(&mesh, true, 1);
    nd_export_options options = {.out = out, .dtype = ND_DTYPE_F32, .verify = true};
    cr_assert_eq(mkdir(out, 0777), 0);
    tempdir_write(&dir, "model/mine", "x", 1);
    assert_fails(nd_checkpoint_export(s.path, &s.manifest, &options), ND_ERR_CANTCREATE,
                 "is not overwritten");
    cr_assert(exists("model/mine"));
    cr_assert_eq(unlink(tempdir_file(&dir, "model/mine")), 0);
    assert_ok(nd_checkpoint_export(s.path, &s.manifest, &options));
    check_model(out, &s.manifest, ND_DTYPE_F32);
    nd_fs_remove_tree(out);
    cr_assert_eq(mkdir(tempdir_file(&dir, "empty"), 0777), 0);
    cr_assert_eq(symlink("empty", out), 0);
    assert_fails(nd_checkpoint_export(s.path, &s.manifest, &options), ND_ERR_CANTCREATE,
                 "is not overwritten");
    cr_assert_eq(unlink(out), 0);
    fake_forget(&s);
}

Test(export, of_a_damaged_checkpoint_leaves_nothing)
{
    const nd_mesh mesh = {{1, 1, 1, 1, 1}};
    fake_saved s = save(&mesh, true, 1);
    nd_export_options options = {.out = out, .dtype = ND_DTYPE_F32, .verify = true};
    int fd =
        open(tempdir_file(&dir, "checkpoint-1/state/shard-00001-model-00001-of-00001.safetensors"),
             O_WRONLY);
    cr_assert_geq(fd, 0);
    cr_assert_eq(pwrite(fd, "x", 1, 9000), 1);
    close(fd);
    assert_fails(nd_checkpoint_export(s.path, &s.manifest, &options), ND_ERR_DATA, "is damaged");
    nd_fs_remove_tree(s.path);
    cr_assert_eq(rmdir(dir.path), 0, "something is left");
    cr_assert_eq(mkdir(dir.path, 0777), 0);
    fake_forget(&s);
}
