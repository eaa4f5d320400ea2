// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/export.h"
#include "trainer/checkpoint/folder.h"

static tempdir dir;

static void setup(void)
{
    tempdir_make(&dir);
}

static void teardown(void)
{
    nd_fs_remove_tree(dir.path);
}

TestSuite(tensors, .init = setup, .fini = teardown);

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
    fake_write(dir.path, &shape, mesh, ND_STATE_KINDS, step, false, ND_CHECKSUM_XXH3);
    assert_ok(nd_checkpoint_path(dir.path, step, &path));
    assert_ok(nd_manifest_read(path, manifest));
    assert_ok(nd_source_open(path, manifest, true, &source));
    free(path);
    return source;
}

/* Batches of a few rows, of some tensors, and of everything. */
Test(tensors, every_element_comes_once_and_in_order_whatever_fits_a_batch)
{
    static const int64_t sizes[] = {1, 24, 50, 100, 777, 2328, 5000, 0};
    const nd_mesh one = {{1, 1, 1, 1, 1}}, meshes[2] = {{{1, 2, 3, 1, 2}}, {{1, 1, 4, 1, 1}}};
    nd_shape shape = fake_shape(false);
    nd_layout *layout = fake_layout(&shape, &one, 0, false);
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

/* What is known of the writers of a large mesh does not pile up. */
Test(tensors, few_writers_are_kept)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}}, many = {{1, 20, 7, 1, 1}};
    nd_shape shape = fake_shape(false);
    nd_layout *layout = fake_layout(&shape, &one, 0, false);
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
