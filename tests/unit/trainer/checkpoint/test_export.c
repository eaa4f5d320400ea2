// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <unistd.h>

#include "runtime/base/math.h"
#include "tests/support/printed.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/export.h"
#include "trainer/weights/weights.h"

static char out[PATH_MAX]; /* where models go */
static nd_export_options options = {.out = out, .dtype = ND_DTYPE_F32, .verify = true};
static fake_saved s; /* what is exported */

static void setup(void)
{
    fake_setup();
    snprintf(out, sizeof out, "%s", fake_path("model"));
}

static void end(void)
{
    fake_forget(&s);
    fake_teardown();
}

TestSuite(export, .init = setup, .fini = end);

static void save(const nd_mesh *mesh, bool tied, int64_t step)
{
    const nd_shape shape = fake_shape(tied);
    fake_forget(&s);
    s = fake_save(&shape, mesh, ND_STATE_KINDS, step);
}

static nd_status export_it(void)
{
    return nd_checkpoint_export(s.path, &s.manifest, &options);
}

/* Every element of every tensor is the one that the checkpoint has. */
static void check_model(const char *folder)
{
    const nd_layout *layout = s.manifest.layout;
    nd_hf_reader *reader = NULL;
    int files = 0;
    assert_ok(nd_hf_reader_open(folder, &reader));
    assert_ok(nd_hf_reader_check(reader));
    assert_ok(nd_checksums_verify(folder, &files));
    cr_assert_eq(files, 2); /* model.safetensors, config.json */
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *t = &layout->params[i];
        int64_t count = t->rows * t->cols;
        float *values = malloc((size_t)count * sizeof *values);
        assert_ok(nd_hf_reader_read(reader, t->name, 0, count, values));
        for (int64_t e = 0; e < count; e++) {
            float expected = fake_value(ND_STATE_MASTER, t->name, e);
            if (options.dtype == ND_DTYPE_BF16) {
                expected = nd_bf16_to_f32(nd_bf16_from_f32(expected));
            }
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
        save(&meshes[i], i % 2 == 1, i);
        options.dtype = i % 3 == 0 ? ND_DTYPE_F32 : ND_DTYPE_BF16;
        options.verify = i % 2 == 0;
        assert_ok(export_it());
        check_model(out);
        nd_fs_remove_tree(out);
    }
}

Test(export, beside_the_state_it_is_part_of_a_good_checkpoint)
{
    const nd_mesh mesh = {{1, 1, 2, 1, 1}};
    int64_t bytes = 0;
    options = (nd_export_options){.dtype = ND_DTYPE_BF16, .verify = true};
    save(&mesh, false, 4);
    cr_assert_eq(unlink(fake_path("checkpoint-4/manifest.json")), 0);
    assert_ok(export_it());
    check_model(s.path);
    assert_ok(nd_source_verify(s.path, &s.manifest, -1, true, &bytes));
    save(&mesh, false, 5);
    assert_ok(export_it());
    assert_fails(export_it(), ND_ERR_CANTCREATE, "model.safetensors");
    save(&mesh, false, 6);
    fake_prune(1);
    cr_assert(fake_exists("checkpoint-6") && !fake_exists("checkpoint-5"));
}

Test(export, takes_no_folder_that_holds_something)
{
    save(&fake_one, true, 1);
    fake_folder("model");
    fake_file("model/mine", "x");
    assert_fails(export_it(), ND_ERR_CANTCREATE, "is not overwritten");
    cr_assert(fake_exists("model/mine"));
    cr_assert_eq(unlink(fake_path("model/mine")), 0);
    assert_ok(export_it());
    check_model(out);
    nd_fs_remove_tree(out);
    fake_folder("empty");
    cr_assert_eq(symlink("empty", out), 0);
    assert_fails(export_it(), ND_ERR_CANTCREATE, "is not overwritten");
}

Test(export, of_a_damaged_checkpoint_leaves_nothing)
{
    save(&fake_one, true, 1);
    int fd = open(fake_path("checkpoint-1/state/shard-00001-model-00001-of-00001.safetensors"),
                  O_WRONLY);
    cr_assert_geq(fd, 0);
    cr_assert_eq(pwrite(fd, "x", 1, 9000), 1);
    close(fd);
    assert_fails(export_it(), ND_ERR_DATA, "is damaged");
    nd_fs_remove_tree(s.path);
    cr_assert_eq(rmdir(fake_run.path), 0, "something is left");
}

static const char chat_tokenizer[] =
    "{\"added_tokens\": [], \"model\": {\"type\": \"BPE\", \"merges\": [], \"vocab\": "
    "{\"<|im_start|>\": 0, \"<|im_end|>\": 1, \"<|begin_of_text|>\": 2, "
    "\"<|start_header_id|>\": 3, \"<|end_header_id|>\": 4, \"<|eot_id|>\": 5}}}";
static const char plain_chatml[] =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}";

/* The run's own model names it too, by the run's data.chat_format. */
Test(export, of_a_run_on_messages_names_the_end_of_a_turn)
{
    static const struct {
        const char *format;
        int end; /* -1: none */
    } cases[] = {{"llama3", 5}, {"chatml", 1}, {"model", 1}, {"none", -1}};
    save(&fake_one, false, 1);
    fake_folder("source");
    options.source = printed("%s", fake_path("source"));
    fake_file("source/tokenizer.json", chat_tokenizer);
    fake_file("source/chat_template.jinja", plain_chatml);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_object_set_new(s.manifest.config, "data.chat_format", json_string(cases[i].format));
        assert_ok(export_it());
        json_t *root = json_load_file(fake_path("model/generation_config.json"), 0, NULL);
        const json_t *ends = json_object_get(root, "eos_token_id");
        const json_t *end = json_array_get(ends, 0);
        cr_expect(json_array_size(ends) == (cases[i].end >= 0) &&
                      (!end || json_integer_value(end) == cases[i].end),
                  "%s", cases[i].format);
        json_decref(root);
        nd_fs_remove_tree(out);
    }
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
    for (int k = 0; k < v->sources; k++) {
        for (int64_t i = 0; i < part->count; i++) {
            cr_assert_eq(part->values[k][i], fake_value(part->array, p->name, part->begin + i));
        }
    }
    v->parts++;
    v->largest = nd_max(v->largest, part->count);
    v->element += part->count;
    if (v->element == p->rows * p->cols) {
        v->element = 0;
        v->array = (v->array + 1) % v->arrays;
        v->param += v->array == 0;
    }
    return ND_OK;
}

/* Walks over checkpoints of one state in batches of so many elements; 0: of everything. kept: how
 * many writers of the first one are in memory behind it. */
static visitor walk(const fake_saved *saved, int sources, int arrays, int64_t batch, int64_t *kept)
{
    nd_layout *layout = fake_layout(&saved->manifest.shape, &fake_one, 0, false);
    visitor v = {.layout = layout, .arrays = arrays, .sources = sources};
    nd_tensors_walk all = {.layout = layout,
                           .arrays = arrays,
                           .source_count = sources,
                           .batch_elements = batch,
                           .visit = check_part,
                           .context = &v};
    for (int i = 0; i < sources; i++) {
        assert_ok(nd_source_open(saved[i].path, &saved[i].manifest, true, &all.sources[i]));
    }
    assert_ok(nd_tensors_each(&all));
    cr_assert_eq(v.param, layout->param_count);
    *kept = nd_source_get_stats(all.sources[0]).kept;
    for (int i = 0; i < sources; i++) {
        nd_source_close(all.sources[i]);
    }
    nd_layout_destroy(layout);
    return v;
}

/* Batches of a few rows, of some tensors, and of everything. */
Test(tensors, every_element_comes_once_and_in_order_whatever_fits_a_batch)
{
    static const int64_t sizes[] = {1, 24, 50, 100, 777, 2328, 5000, 0};
    const nd_mesh meshes[2] = {{{1, 2, 3, 1, 2}}, {{1, 1, 4, 1, 1}}};
    nd_shape shape = fake_shape(false);
    fake_saved saved[2];
    int64_t kept;
    for (int i = 0; i < 2; i++) {
        saved[i] = fake_save(&shape, &meshes[i], ND_STATE_KINDS, i);
    }
    for (int i = 0; i < (int)(sizeof sizes / sizeof *sizes); i++) {
        const visitor v = walk(saved, 1 + (i / 2) % 2, 1 + 2 * (i % 2), sizes[i], &kept);
        if (sizes[i] > 0) { /* the longest row has 36 */
            cr_assert_leq(v.largest, nd_max(sizes[i], 36));
        } else {
            cr_assert_eq(v.parts, v.param * v.arrays);
        }
    }
    fake_forget(&saved[0]);
    fake_forget(&saved[1]);
    shape.layers = 120; /* more tensors than a batch takes */
    saved[0] = fake_save(&shape, &fake_one, 1, 2);
    walk(saved, 1, 1, 0, &kept);
    fake_forget(&saved[0]);
    const nd_mesh many = {{1, 20, 7, 1, 1}};
    shape.layers = 3;
    saved[0] = fake_save(&shape, &many, ND_STATE_KINDS, 3);
    walk(saved, 1, 1, 300, &kept); /* few of its writers are kept in memory */
    cr_assert(kept > 0 && kept <= 128, "%ld of %d", (long)kept, 140);
    fake_forget(&saved[0]);
}
