// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/trainer/weights/hf_model.h"

#include <unistd.h>

#include "runtime/base/rng.h"
#include "tests/unit/trainer/weights/hf_shape.h"
#include "trainer/layout/layout.h"

tempdir hf_dir;
hf_tensor hf_tensors[HF_TENSORS_MAX];
int hf_tensor_count;

static int next_file;

/* The number of the next file that is opened: the same again once all files are closed. */
static int find_next_file(void)
{
    const int fd = dup(STDERR_FILENO);
    close(fd);
    return fd;
}

void hf_setup(void)
{
    tempdir_make(&hf_dir);
    next_file = find_next_file();
}

void hf_expect_closed(void)
{
    cr_expect_eq(find_next_file(), next_file, "a file is still open");
}

void hf_teardown(void)
{
    tempdir_remove(&hf_dir);
}

void hf_list_tensors(const nd_shape *shape)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    nd_layout *layout;
    assert_ok(nd_layout_create(&(nd_layout_options){.shape = shape, .mesh = &one}, &layout));
    hf_tensor_count = layout->param_count;
    cr_assert_leq(hf_tensor_count, HF_TENSORS_MAX);
    for (int i = 0; i < hf_tensor_count; i++) {
        const nd_param *p = &layout->params[i];
        hf_tensors[i] = (hf_tensor){.axes = p->axes, .shape = {p->rows, p->cols}};
        snprintf(hf_tensors[i].name, sizeof hf_tensors[i].name, "%s", p->name);
    }
    nd_layout_destroy(layout);
}

int64_t hf_count_of(const hf_tensor *t)
{
    return t->shape[0] * (t->axes == 2 ? t->shape[1] : 1);
}

float hf_value_of(int tensor, int64_t element)
{
    return nd_rng_normal(9, (uint64_t)tensor, (uint64_t)element);
}

nd_hf_writer_options hf_options_of(bool tied, nd_dtype dtype)
{
    return (nd_hf_writer_options){
        .shape = hf_small_shape(tied), .dtype = dtype, .byte_tokenizer = true};
}

nd_status hf_write_piece(nd_hf_writer *writer, int i, int64_t begin, int64_t end)
{
    static float values[65536];
    for (int64_t e = begin; e < end; e++) {
        values[e - begin] = hf_value_of(i, e);
    }
    return nd_hf_writer_write(writer, hf_tensors[i].name, begin, end - begin, values);
}

const char *hf_begin_model(const char *name, const nd_hf_writer_options *options,
                           nd_hf_writer **writer)
{
    const char *folder = tempdir_file(&hf_dir, name);
    hf_list_tensors(&options->shape);
    assert_ok(nd_hf_writer_open(folder, options, writer));
    /* They are written backwards, each in three pieces, the last one first. */
    for (int i = hf_tensor_count - 1; i >= 0; i--) {
        int64_t n = hf_count_of(&hf_tensors[i]);
        assert_ok(hf_write_piece(*writer, i, n / 2, n));
        assert_ok(hf_write_piece(*writer, i, n / 3, n / 2));
        assert_ok(hf_write_piece(*writer, i, 0, n / 3));
    }
    return folder;
}

const char *hf_write_model(const char *name, const nd_hf_writer_options *options)
{
    nd_hf_writer *writer;
    const char *folder = hf_begin_model(name, options, &writer);
    assert_ok(nd_hf_writer_commit(writer));
    return folder;
}

/* Rows are written backwards, one by one. */
static nd_status fill_gguf(void *scale, nd_gguf_writer *writer)
{
    static float values[65536];
    for (int i = hf_tensor_count - 1; i >= 0; i--) {
        const int64_t rows = hf_tensors[i].shape[0], cols = hf_count_of(&hf_tensors[i]) / rows;
        for (int64_t row = rows; row-- > 0;) {
            for (int64_t k = 0; k < cols; k++) {
                values[k] = hf_value_of(i, row * cols + k) * *(const float *)scale;
            }
            ND_TRY(nd_gguf_write_rows(writer, hf_tensors[i].name, row * cols, cols, values));
        }
    }
    return ND_OK;
}

nd_status hf_write_gguf(const char *name, nd_shape shape, int type, float scale)
{
    const nd_gguf_options options = {.shape = &shape, .type = type, .name = "small"};
    hf_list_tensors(&shape);
    shape.eos_id = 0;
    return nd_gguf_write(tempdir_file(&hf_dir, name), &options, fill_gguf, &scale);
}
