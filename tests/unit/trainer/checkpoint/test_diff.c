// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <fcntl.h>
#include <math.h>
#include <unistd.h>

#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/export.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/weights/safetensors.h"

/* The differing arrays of a comparison. */
typedef struct found {
    int visited, count;
    char names[8][ND_STATE_NAME_MAX];
    nd_diff_array arrays[8];
} found;

static fake_saved a, b;
static nd_diff_side sides[2];
static nd_diff_totals totals;
static found f;

static void forget(void)
{
    fake_forget(&a);
    fake_forget(&b);
}

static void end(void)
{
    forget();
    fake_teardown();
}

TestSuite(diff, .init = fake_setup, .fini = end);

/* The sides are a and b, of these meshes and with so many arrays of each parameter. */
static void save_both(const nd_mesh *mesh_a, int arrays_a, const nd_mesh *mesh_b, int arrays_b)
{
    static int64_t step;
    const nd_shape shape = fake_shape(false);
    forget();
    a = fake_save(&shape, mesh_a, arrays_a, step++);
    b = fake_save(&shape, mesh_b, arrays_b, step++);
    sides[0] = (nd_diff_side){a.path, &a.manifest, a.manifest.shape};
    sides[1] = (nd_diff_side){b.path, &b.manifest, b.manifest.shape};
}

static nd_status note(void *context, const nd_diff_array *array)
{
    f.visited++;
    if (array->differing > 0 || array->presence != ND_DIFF_BOTH) {
        if (f.count < 8) {
            snprintf(f.names[f.count], sizeof f.names[0], "%s", array->name);
            f.arrays[f.count] = *array;
        }
        f.count++;
    }
    return ND_OK;
}

static nd_status compare(const nd_diff_options *options)
{
    f = (found){0};
    return nd_checkpoint_diff(sides, options, note, NULL, &totals);
}

static const nd_diff_options verified = {.verify = true}, unverified = {0};

Test(diff, states_are_equal_whatever_mesh_wrote_them)
{
    static const nd_mesh meshes[] = {
        {{1, 1, 1, 1, 1}}, {{1, 3, 1, 1, 1}}, {{1, 1, 3, 1, 2}},
        {{1, 2, 2, 1, 2}}, {{1, 1, 2, 3, 4}},
    };
    for (int i = 0; i < 5; i++) {
        save_both(&meshes[i], ND_STATE_KINDS, &meshes[(i + 1) % 5], ND_STATE_KINDS);
        assert_ok(compare(&verified));
        cr_assert_eq(f.count, 0);
        cr_assert_eq(f.visited, 30 * ND_STATE_KINDS + 1);
        cr_assert_eq(totals.arrays, f.visited);
        cr_assert_eq(totals.differing_arrays + totals.differing, 0);
        cr_assert_eq(totals.elements, ND_STATE_KINDS * nd_shape_parameters(&a.manifest.shape) + 7);
    }
}

/* Changes an element of an entry in a checkpoint that one rank wrote. */
static void change(const fake_saved *s, const char *name, int64_t element, float value)
{
    char file[PATH_MAX];
    nd_safetensors_list list = {0};
    assert_ok(nd_fs_path(file, "%s/state/shard-00001-model-00001-of-00001.safetensors", s->path));
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
    save_both(&fake_one, ND_STATE_KINDS, &mesh, ND_STATE_KINDS);
    change(&a, up, 700, fake_value(ND_STATE_MASTER, up, 700) + 8);
    change(&a, up, 3, fake_value(ND_STATE_MASTER, up, 3) - 2);
    change(&a, norm, 0, NAN);
    change(&a, norm_moment, 23, fake_value(ND_STATE_MOMENT2, norm, 23) + 0.5f);
    change(&a, "fp8.scale", 6, 7.5f);
    assert_fails(compare(&verified), ND_ERR_DATA, "is damaged");
    assert_ok(compare(&unverified));
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
}

/* The norm of the difference over that of A, of this array alone. */
Test(diff, a_tolerance_is_relative_and_is_itself_allowed)
{
    const char *norm = "model.norm.weight";
    double squares = 0;
    save_both(&fake_one, 1, &fake_one, 1);
    change(&a, norm, 3, fake_value(ND_STATE_MASTER, norm, 3) + 2);
    for (int i = 0; i < 24; i++) {
        squares += pow((double)fake_value(ND_STATE_MASTER, norm, i) + (i == 3 ? 2 : 0), 2);
    }
    assert_ok(compare(&unverified));
    const double at = f.arrays[0].relative;
    cr_expect_float_eq(at, 2 / sqrt(squares), 1e-6 * at, "%.17g", at); /* F32 rounds the change */
    assert_ok(compare(&(nd_diff_options){.tolerance = at}));
    cr_expect_eq(totals.differing_arrays + totals.differing, 0);
    assert_ok(compare(&(nd_diff_options){.tolerance = nextafter(at, 0)}));
    cr_expect_eq(totals.differing, 1);
}

Test(diff, the_sign_of_zero_and_a_nan_are_bits_too)
{
    save_both(&fake_one, 1, &fake_one, 1);
    change(&a, "model.norm.weight", 1, 0.0f);
    change(&b, "model.norm.weight", 1, -0.0f);
    change(&a, "model.norm.weight", 2, NAN); /* the same NaN is equal */
    change(&b, "model.norm.weight", 2, NAN);
    assert_ok(compare(&unverified));
    cr_assert_eq(f.count, 1);
    cr_assert_eq(f.arrays[0].differing, 1);
    cr_assert_eq(f.arrays[0].largest, 0.0);
}

/* Moments of AdamW, and FP8 histories, which may also have another length. */
Test(diff, arrays_that_one_side_lacks_or_has_in_another_size)
{
    static const struct {
        int arrays, count; /* arrays of the second side; what differs */
        int64_t extras[2];
        const char *last;
        nd_diff_presence presence;
    } cases[] = {{ND_STATE_KINDS, 2, {7, 7}, "exp_avg_sq", ND_DIFF_ONLY_B},
                 {1, 1, {7, 5}, "fp8.scale", ND_DIFF_SIZES},
                 {1, 1, {7, 0}, "fp8.scale", ND_DIFF_ONLY_A},
                 {1, 1, {0, 7}, "fp8.scale", ND_DIFF_ONLY_B}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fake_extra_count = cases[i].extras[0];
        save_both(&fake_one, 1, &fake_one, 1);
        fake_extra_count = cases[i].extras[1];
        fake_forget(&b);
        b = fake_save(&a.manifest.shape, &fake_one, cases[i].arrays, 100 + (int64_t)i);
        sides[1] = (nd_diff_side){b.path, &b.manifest, b.manifest.shape};
        assert_ok(compare(&verified));
        cr_assert(f.count == cases[i].count && totals.differing_arrays == f.count, "%zu", i);
        cr_expect_str_eq(f.names[f.count - 1], cases[i].last);
        cr_expect_eq(f.arrays[0].presence, cases[i].presence, "%zu", i);
    }
}

Test(diff, a_hugging_face_folder_has_weights_only)
{
    const nd_mesh mesh = {{1, 1, 2, 1, 2}};
    save_both(&mesh, ND_STATE_KINDS, &mesh, ND_STATE_KINDS);
    char out[PATH_MAX];
    snprintf(out, sizeof out, "%s", fake_path("model"));
    nd_export_options options = {.out = out, .dtype = ND_DTYPE_F32, .verify = true};
    assert_ok(nd_checkpoint_export(b.path, &b.manifest, &options));
    sides[0] = (nd_diff_side){out, NULL, b.manifest.shape};
    assert_ok(compare(&verified));
    cr_assert_eq(f.count, 0);
    cr_assert_eq(totals.arrays, 30);
    nd_fs_remove_tree(out);
    options.dtype = ND_DTYPE_BF16; /* 24 bits rounded to 8 */
    assert_ok(nd_checkpoint_export(b.path, &b.manifest, &options));
    assert_ok(compare(&verified));
    cr_assert_gt(totals.differing, totals.elements / 2);
    const nd_diff_options as_bf16 = {.verify = true, .bf16 = true};
    assert_ok(compare(&as_bf16));
    cr_assert_eq(totals.differing_arrays, 0);
}

Test(diff, other_models_are_refused)
{
    save_both(&fake_one, 1, &fake_one, 1);
    sides[1].shape.vocab = 98;
    assert_fails(compare(&verified), ND_ERR_DATA, "97 x 24; \"");
    sides[1].shape = sides[0].shape;
    sides[1].shape.tied = true;
    assert_fails(compare(&verified), ND_ERR_DATA, "the models differ");
}
