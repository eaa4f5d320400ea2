// SPDX-License-Identifier: Apache-2.0
/*
 * Writes and checks small Hugging Face folders for check_transformers.py, which opens them with
 * transformers:
 *   hf_model_tool write FOLDER f32|bf16 tied|untied MAX_FILE_BYTES
 *   hf_model_tool verify FOLDER
 * Element e of a tensor is ((sum of the bytes of its name + 31 e) mod 251 - 128) / 256, exact in
 * BF16.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/weights/hf_shape.h"
#include "trainer/weights/weights.h"
#include "trainer/layout/layout.h"

static float value_of(const char *name, int64_t element)
{
    int64_t sum = 0;
    for (const char *c = name; *c; c++) {
        sum += (unsigned char)*c;
    }
    return (float)((sum + 31 * element) % 251 - 128) / 256.0f;
}

static nd_status layout_of(const nd_shape *shape, nd_layout **out)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    return nd_layout_create(&(nd_layout_options){.shape = shape, .mesh = &one}, out);
}

static nd_status write_tensor(nd_hf_writer *writer, const nd_param *p)
{
    float *values = NULL;
    ND_TRY(ND_ALLOC(p->rows * p->cols, &values));
    for (int64_t e = 0; e < p->rows * p->cols; e++) {
        values[e] = value_of(p->name, e);
    }
    nd_status status = nd_hf_writer_write(writer, p->name, 0, p->rows * p->cols, values);
    free(values);
    return status;
}

static nd_status write_folder(const char *folder, const nd_hf_writer_options *options)
{
    nd_layout *layout = NULL;
    nd_hf_writer *writer = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(layout_of(&options->shape, &layout));
    ND_TRY_OUT(nd_hf_writer_open(folder, options, &writer));
    for (int i = 0; i < layout->param_count; i++) {
        ND_TRY_OUT(write_tensor(writer, &layout->params[i]));
    }
    status = nd_hf_writer_commit(writer);
    writer = NULL;
out:
    nd_hf_writer_abort(writer);
    nd_layout_destroy(layout);
    return status;
}

static nd_status verify_tensor(const nd_hf_reader *reader, const nd_param *p)
{
    float *values = NULL;
    int64_t count = p->rows * p->cols;
    ND_TRY(ND_ALLOC(count, &values));
    nd_status status = nd_hf_reader_read(reader, p->name, 0, count, values);
    for (int64_t e = 0; e < count && status == ND_OK; e++) {
        if (values[e] != value_of(p->name, e)) {
            status =
                nd_fail(ND_ERR_DATA, "%s[%lld] is %g", p->name, (long long)e, (double)values[e]);
        }
    }
    free(values);
    return status;
}

static nd_status verify_folder(const char *folder)
{
    nd_hf_reader *reader = NULL;
    nd_layout *layout = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_hf_reader_open(folder, &reader));
    ND_TRY_OUT(nd_hf_reader_check(reader));
    ND_TRY_OUT(layout_of(nd_hf_reader_shape(reader), &layout));
    for (int i = 0; i < layout->param_count; i++) {
        ND_TRY_OUT(verify_tensor(reader, &layout->params[i]));
    }
out:
    nd_layout_destroy(layout);
    nd_hf_reader_close(reader);
    return status;
}

int main(int argc, char **argv)
{
    nd_status status = ND_ERR_CONFIG;
    if (argc == 6 && strcmp(argv[1], "write") == 0) {
        nd_hf_writer_options options = {.shape = hf_small_shape(strcmp(argv[4], "tied") == 0),
                                        .dtype = strcmp(argv[3], "bf16") == 0 ? ND_DTYPE_BF16
                                                                              : ND_DTYPE_F32,
                                        .max_file_bytes = atoll(argv[5]),
                                        .byte_tokenizer = true};
        status = write_folder(argv[2], &options);
    } else if (argc == 3 && strcmp(argv[1], "verify") == 0) {
        status = verify_folder(argv[2]);
    }
    if (status != ND_OK) {
        fprintf(stderr, "hf_model_tool: %s\n", nd_error_last()->message);
    }
    return (int)status;
}
