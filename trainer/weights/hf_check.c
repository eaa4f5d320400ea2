// SPDX-License-Identifier: Apache-2.0
/* The tensors of a folder against those of a Llama of its config.json. */
#include <string.h>

#include "trainer/weights/hf_reader_impl.h"
#include "trainer/layout/layout.h"

static nd_status check_tensor(const nd_hf_reader *reader, const char *name, int axes, int64_t rows,
                              int64_t cols)
{
    const nd_hf_place *found = nd_hf_reader_find(reader, name);
    if (!found) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" lacks tensor \"%s\", which a model of its config.json has: the folder is "
            "incomplete, or of another kind of model",
            reader->folder, name);
    }
    const nd_st_tensor *t = found->tensor;
    if (t->axes != axes || t->shape[0] != rows || (axes == 2 && t->shape[1] != cols)) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": tensor \"%s\" has %d axes of %lld x %lld, but config.json asks for "
                       "%lld x %lld",
                       found->file->path, name, t->axes, (long long)(t->axes > 0 ? t->shape[0] : 1),
                       (long long)(t->axes > 1 ? t->shape[1] : 1), (long long)rows,
                       (long long)cols);
    }
    if (t->dtype != ND_ST_F32 && t->dtype != ND_ST_BF16 && t->dtype != ND_ST_F16) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": tensor \"%s\" is %s; F32, BF16 and F16 are read: load the model in "
                       "transformers and save it in one of these",
                       found->file->path, name, nd_st_dtype_name(t->dtype));
    }
    return ND_OK;
}

static bool ends_with(const char *text, const char *suffix)
{
    size_t n = strlen(text), m = strlen(suffix);
    return n >= m && strcmp(text + n - m, suffix) == 0;
}

static bool is_known(const nd_layout *layout, const char *name)
{
    for (int i = 0; i < layout->param_count; i++) {
        if (strcmp(layout->params[i].name, name) == 0) {
            return true;
        }
    }
    return ends_with(name, "rotary_emb.inv_freq");
}

static nd_status check_against(const nd_hf_reader *reader, const nd_layout *layout)
{
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[i];
        ND_TRY(check_tensor(reader, p->name, p->axes, p->rows, p->cols));
    }
    for (int64_t i = 0; i < reader->place_count; i++) {
        const nd_hf_place *p = &reader->places[i];
        bool tied_head = layout->tied && strcmp(p->tensor->name, "lm_head.weight") == 0;
        if (tied_head) {
            ND_TRY(check_tensor(reader, "lm_head.weight", 2, reader->shape.vocab,
                                reader->shape.hidden));
        } else if (!is_known(layout, p->tensor->name)) {
            return nd_fail(
                ND_ERR_DATA,
                "\"%s\" holds tensor \"%.200s\", which a Llama of %lld layers does not have: "
                "it is another kind of model, or config.json is of another one",
                p->file->path, p->tensor->name, (long long)reader->shape.layers);
        }
    }
    return ND_OK;
}

nd_status nd_hf_reader_check(const nd_hf_reader *reader)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    nd_layout *layout = NULL;
    ND_TRY(nd_layout_create(&reader->shape, &one, (nd_coord){0}, NULL, NULL, &layout));
    nd_status status = check_against(reader, layout);
    nd_layout_destroy(layout);
    return status;
}
