// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/export.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/weights/safetensors.h"

TestSuite(diff, .init = fake_setup, .fini = fake_teardown);

static fake_saved save(const nd_mesh *mesh, int arrays, int64_t step)
{
    const nd_shape shape = fake_shape(false);
    return fake_save(fake_run.path, &shape, mesh, arrays, step);
}

static nd_diff_side side_of(const fake_saved *s)
{
    return (nd_diff_side){s->path, &s->manifest, s->manifest.shape};
}

/* The differing arrays of a comparison. */
typedef struct found {
    int visited, count;
    char names[8][ND_STATE_NAME_MAX];
    nd_diff_array arrays[8];
} found;

static nd_status note(void *context, const nd_diff_array *array)
{
    found *f = context;
    f->visited++;
    if (array->differing > 0 || array->presence != ND_DIFF_BOTH) {
        cr_assert_lt(f->count, 8);
        snprintf(f->names[f->count], sizeof f->names[0], "%s", array->name);
        f->arrays[f->count++] = *array;
    }
    return ND_OK;
}

static nd_status ignore(void *context, const nd_diff_array *array)
{
    (void)context;
    (void)array;
    return ND_OK;
}

static const nd_diff_options verified = {.verify = true}, unverified = {0};

Test(diff, states_are_equal_whatever_mesh_wrote_them)
{
    static const nd_mesh meshes[] = {
        {{1, 1, 1, 1, 1}}, {{1, 3, 1, 1, 1}}, {{1, 1, 3, 1, 2}},
        {{1, 2, 2, 1, 2}}, {{1, 1, 2, 3, 4}},
    };
    for (int i = 0; i < 5; i++) {
        fake_saved a = save(&meshes[i], ND_STATE_KINDS, 2 * i),
                   b = save(&meshes[(i + 1) % 5], ND_STATE_KINDS, 2 * i + 1);
        const nd_diff_side sides[2] = {side_of(&a), side_of(&b)};
        nd_diff_totals totals;
        found f = {0};
        assert_ok(nd_checkpoint_diff(sides, &verified, note, &f, &totals));
        cr_assert_eq(f.count, 0);
        cr_assert_eq(f.visited, 30 * ND_STATE_KINDS + 1);
        cr_assert_eq(totals.arrays, f.visited);
        cr_assert_eq(totals.differing_arrays + totals.differing, 0);
        cr_assert_eq(totals.elements, ND_STATE_KINDS * nd_shape_parameters(&a.manifest.shape) + 7);
        fake_forget(&a);
        fake_forget(&b);
    }
}

/* Changes an element of an entry in a checkpoint that one rank wrote. */
static void change(const fake_saved *s, const char *name, int64_t element, float value)
{
    char file[300];
    nd_safetensors_list list = {0};
    snprintf(file, sizeof file, "%s/state/shard-00001-model-00001-of-00001.safetensors", s->path);
    int fd = open(file, O_RDWR);
    cr_assert_geq(fd, 0);
    assert_ok(nd_safetensors_read_header(fd, file, &list));
    const nd_safetensors_tensor *entry = nd_safetensors_list_find(&list, name);
    cr_assert_not_null(entry, "%s", name);
    off_t at = (off_t)entry->begin + (off_t)(element * (int64_t)sizeof value);
    cr_assert_eq(pwrite(fd, &value, sizeof value, at), sizeof value);
    close(fd);
    nd_safetensors_list_fini(&list);
}

Test(diff, names_each_array_and_measures_it)
{
    const nd_mesh mesh = {{1, 2, 2, 1, 2}};
    const char *up = "model.layers.1.mlp.up_proj.weight", *norm = "model.norm.weight";
    const char *norm_moment = "optimizer.state.model.norm.weight.exp_avg_sq";
    fake_saved a = save(&fake_one, ND_STATE_KINDS, 1), b = save(&mesh, ND_STATE_KINDS, 2);
    change(&a, up, 700, fake_value(ND_STATE_MASTER, up, 700) + 8);
    change(&a, up, 3, fake_value(ND_STATE_MASTER, up, 3) - 2);
    change(&a, norm, 0, NAN);
    change(&a, norm_moment, 23, fake_value(ND_STATE_MOMENT2, norm, 23) + 0.5f);
    change(&a, "fp8.scale", 6, 7.5f);
    const nd_diff_side sides[2] = {side_of(&a), side_of(&b)};
    nd_diff_totals totals;
    found f = {0};
    assert_fails(nd_checkpoint_diff(sides, &verified, note, &f, &totals), ND_ERR_DATA,
                 "is damaged");
    f = (found){0};
    assert_ok(nd_checkpoint_diff(sides, &unverified, note, &f, &totals));
    cr_assert_eq(f.count, 4);
    cr_assert_str_eq(f.names[0], up);
    cr_assert_eq(f.arrays[0].count, 36 * 24);
    cr_assert_eq(f.arrays[0].differing, 2);
    cr_assert_eq(f.arrays[0].largest, 8.0);
    cr_assert_str_eq(f.names[1], norm);
    cr_assert(isnan(f.arrays[1].largest) && f.arrays[1].differing == 1);
    cr_assert_str_eq(f.names[2], norm_moment);
    cr_assert_eq(f.arrays[2].largest, 0.5);
    cr_assert_str_eq(f.names[3], "fp8.scale");
    cr_assert_eq(f.arrays[3].largest, 0.5);
    cr_assert_eq(totals.differing_arrays, 4);
    cr_assert_eq(totals.differing, 5);
    fake_forget(&a);
    fake_forget(&b);
}

Test(diff, the_sign_of_zero_and_a_nan_are_bits_too)
{
    fake_saved a = save(&fake_one, 1, 1), b = save(&fake_one, 1, 2);
    nd_diff_totals totals;
    found f = {0};
    const nd_diff_side sides[2] = {side_of(&a), side_of(&b)};
    change(&a, "model.norm.weight", 1, 0.0f);
    change(&b, "model.norm.weight", 1, -0.0f);
    change(&a, "model.norm.weight", 2, NAN); /* the same NaN is equal */
    change(&b, "model.norm.weight", 2, NAN);
    assert_ok(nd_checkpoint_diff(sides, &unverified, note, &f, &totals));
    cr_assert_eq(f.count, 1);
    cr_assert_eq(f.arrays[0].differing, 1);
    cr_assert_eq(f.arrays[0].largest, 0.0);
    fake_forget(&a);
    fake_forget(&b);
}

Test(diff, moments_that_one_side_lacks)
{
    fake_saved a = save(&fake_one, 1, 1), b = save(&fake_one, ND_STATE_KINDS, 2);
    const nd_diff_side sides[2] = {side_of(&a), side_of(&b)};
    nd_diff_totals totals;
    found f = {0};
    assert_ok(nd_checkpoint_diff(sides, &verified, note, &f, &totals));
    cr_assert_eq(f.count, 2);
    cr_assert_str_eq(f.names[0], "exp_avg");
    cr_assert_str_eq(f.names[1], "exp_avg_sq");
    cr_assert_eq(f.arrays[0].presence, ND_DIFF_ONLY_B);
    cr_assert_eq(totals.differing_arrays, 2);
    fake_forget(&a);
    fake_forget(&b);
}

Test(diff, a_hugging_face_folder_has_weights_only)
{
    const nd_mesh mesh = {{1, 1, 2, 1, 2}};
    fake_saved a = save(&mesh, ND_STATE_KINDS, 2);
    char out[160];
    snprintf(out, sizeof out, "%.140s/model", fake_run.path);
    nd_export_options options = {.out = out, .dtype = ND_DTYPE_F32, .verify = true};
    assert_ok(nd_checkpoint_export(a.path, &a.manifest, &options));
    const nd_diff_side sides[2] = {{out, NULL, a.manifest.shape}, side_of(&a)};
    nd_diff_totals totals;
    found f = {0};
    assert_ok(nd_checkpoint_diff(sides, &verified, note, &f, &totals));
    cr_assert_eq(f.count, 0);
    cr_assert_eq(totals.arrays, 30);
    nd_fs_remove_tree(out);
    options.dtype = ND_DTYPE_BF16; /* 24 bits rounded to 8 */
    assert_ok(nd_checkpoint_export(a.path, &a.manifest, &options));
    assert_ok(nd_checkpoint_diff(sides, &verified, ignore, NULL, &totals));
    cr_assert_gt(totals.differing, totals.elements / 2);
    const nd_diff_options as_bf16 = {.verify = true, .bf16 = true};
    assert_ok(nd_checkpoint_diff(sides, &as_bf16, ignore, NULL, &totals));
    cr_assert_eq(totals.differing_arrays, 0);
    fake_forget(&a);
}

Test(diff, other_models_are_refused)
{
    fake_saved a = save(&fake_one, 1, 1), b = save(&fake_one, 1, 2);
    nd_diff_side sides[2] = {side_of(&a), side_of(&b)};
    nd_diff_totals totals;
    found f = {0};
    sides[1].shape.vocab = 98;
    assert_fails(nd_checkpoint_diff(sides, &verified, note, &f, &totals), ND_ERR_DATA,
                 "97 x 24; \"");
    sides[1].shape = sides[0].shape;
    sides[1].shape.tied = true;
    assert_fails(nd_checkpoint_diff(sides, &verified, note, &f, &totals), ND_ERR_DATA,
                 "the models differ");
    fake_forget(&a);
    fake_forget(&b);
}
