// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/checkpoint/export.h"
#include "trainer/commands/ckpt.h"
#include "trainer/generate/model_files.h"
#include "trainer/gguf/gguf.h"
#include "trainer/run/run.h"
#include "trainer/weights/weights.h"

static const char *setting(const nd_manifest *manifest, const char *key)
{
    const char *value = nd_manifest_pairs_find(&manifest->config, key);
    return value ? value : "";
}

/* The run's own output.dtype unless a flag says otherwise. */
static nd_dtype choose_dtype(const nd_manifest *manifest, const char *flag)
{
    return strcmp(flag ? flag : setting(manifest, "output.dtype"), "fp32") == 0 ? ND_DTYPE_F32
                                                                                : ND_DTYPE_BF16;
}

/*
 * Where tokenizer and generation_config.json come from: the flag; the model beside the state; the
 * model that the run began with. *out is NULL when there was none, owned by the caller.
 */
static nd_status choose_side_files(const char *folder, const nd_manifest *manifest,
                                   bool byte_tokenizer, const char *flag, char **out)
{
    const char *path = setting(manifest, "model.path"), *name = setting(manifest, "model.name");
    if (flag) {
        return nd_ckpt_folder(flag, out);
    }
    bool has = false;
    ND_TRY(nd_fs_has(folder, "config.json", &has));
    if (has) {
        return nd_fs_format(out, "%s", folder);
    }
    ND_TRY(path[0] ? nd_fs_has(path, "config.json", &has) : ND_OK);
    if (has) {
        return nd_fs_format(out, "%s", path);
    }
    if (!path[0] && name[0]) {
        nd_status status = nd_hf_cache_find(name, out);
        if (status == ND_OK || status == ND_ERR_IO) {
            return status;
        }
    }
    if (path[0] || name[0]) {
        nd_error_clear();
        nd_log_warning("%s not exported: the run began with the model \"%s\", which is not found "
                       "from here; give its folder with --side-files",
                       byte_tokenizer ? "generation_config.json is"
                                      : "tokenizer and generation_config.json are",
                       path[0] ? path : name);
    }
    return ND_OK;
}

/* The tokenizer.json that the run's data.tokenizer names, or NULL; owned by the caller. */
static nd_status choose_tokenizer(const nd_manifest *manifest, const char *side_files, char **out)
{
    nd_status status = nd_inputs_find_tokenizer(setting(manifest, "data.tokenizer"), side_files,
                                                setting(manifest, "model.config"), out);
    if (status == ND_ERR_CONFIG) {
        nd_log_warning("the run's tokenizer is not exported: %s", nd_error_last()->message);
        nd_error_clear();
        return ND_OK;
    }
    return status;
}

static nd_status export(const char *folder, const nd_manifest *manifest,
                        const nd_command_flags *line)
{
    char *side_files = NULL, *tokenizer = NULL, size[ND_CKPT_TEXT_MAX];
    nd_export_options options = {
        .out = nd_ckpt_place(line, 1),
        .verify = !line->values[ND_CKPT_EXPORT_NO_VERIFY].given,
        .dtype = choose_dtype(manifest, line->values[ND_CKPT_EXPORT_DTYPE].text)};
    nd_status status = ND_OK;
    double begin = nd_clock_seconds();
    options.byte_tokenizer =
        manifest->shape.vocab == 256 && strcmp(setting(manifest, "data.tokenizer"), "bytes") == 0;
    ND_TRY_OUT(choose_side_files(folder, manifest, options.byte_tokenizer,
                                 line->values[ND_CKPT_EXPORT_SIDE_FILES].text, &side_files));
    options.source = side_files;
    if (!line->values[ND_CKPT_EXPORT_SIDE_FILES].text) {
        ND_TRY_OUT(choose_tokenizer(manifest, side_files, &tokenizer));
        options.tokenizer = tokenizer;
    }
    ND_TRY_OUT(nd_checkpoint_export(folder, manifest, &options));
    double seconds = nd_clock_seconds() - begin;
    double bytes =
        (double)nd_shape_parameters(&manifest->shape) * (double)nd_dtype_size(options.dtype);
    printf("%s: the %s model of %s, step %lld: %s in %.1f s\n", options.out,
           options.dtype == ND_DTYPE_F32 ? "fp32" : "bf16", folder,
           (long long)manifest->position.step, nd_file_bytes_format(size, sizeof size, bytes),
           seconds);
out:
    free(tokenizer);
    free(side_files);
    return status;
}

nd_status nd_ckpt_export(const nd_command_flags *line, int *code)
{
    char *folder = NULL;
    nd_manifest manifest = {0};
    (void)code;
    ND_TRY(nd_ckpt_open(nd_ckpt_place(line, 0), &folder, &manifest));
    nd_status status = export(folder, &manifest, line);
    nd_manifest_fini(&manifest);
    free(folder);
    return status;
}

nd_status nd_ckpt_gguf(const nd_command_flags *line, int *code)
{
    const nd_flag_value *type = &line->values[ND_CKPT_GGUF_TYPE];
    const char *path = nd_ckpt_place(line, 1);
    nd_model_files model;
    char size[ND_CKPT_TEXT_MAX];
    uint64_t bytes = 0;
    const double begin = nd_clock_seconds();
    (void)code;
    if (!path[0]) {
        return nd_fail(ND_ERR_CONFIG, "FILE is empty; give the name of the file to write");
    }
    ND_TRY(nd_model_files_open(nd_ckpt_place(line, 0), &model));
    nd_status status =
        model.kind == ND_MODEL_FOLDER
            ? nd_gguf_export(model.reader, model.folder, (nd_gguf_type)type->whole, path, &bytes)
            : nd_fail(ND_ERR_DATA, "%s is no model folder; ndtrain ckpt export makes one of it",
                      model.folder);
    if (status == ND_OK) {
        printf("%s: the model of %s, %s: %s in %.1f s\n", path, model.folder,
               type->given ? type->text : "bf16",
               nd_file_bytes_format(size, sizeof size, (double)bytes), nd_clock_seconds() - begin);
    }
    nd_model_files_close(&model);
    return status;
}
