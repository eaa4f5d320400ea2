// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "trainer/checkpoint/export.h"
#include "trainer/commands/command.h"
#include "trainer/generate/model_files.h"
#include "trainer/run/run.h"

/* In the order of --dtype. */
enum { BF16, FP16, FP32, Q8_0 };
static const char *const names[] = {"bf16", "fp16", "fp32", "q8_0"};
static const int gguf_types[] = {ND_GGUF_BF16, ND_GGUF_FP16, ND_GGUF_FP32, ND_GGUF_Q8_0};

static const char *setting(const nd_model_files *m, const char *key)
{
    const char *value = nd_manifest_find(m->manifest.config, key);
    return value ? value : "";
}

/* Takes those of --side-files. Where the model that the run began with is not found, a checkpoint
 * goes without. */
static nd_status choose_side_files(nd_model_files *m, const char *flag)
{
    const char *path = setting(m, "model.path"), *name = setting(m, "model.name");
    if (flag) {
        free(m->side);
        m->side = NULL;
        return nd_ckpt_folder(flag, &m->side);
    }
    if (!m->side && (path[0] || name[0])) {
        nd_error_clear();
        nd_log_warning("%s not exported: the run began with the model \"%s\", which is not found "
                       "from here; give its folder with --side-files",
                       m->bytes ? "generation_config.json is"
                                : "tokenizer and generation_config.json are",
                       path[0] ? path : name);
    }
    return ND_OK;
}

/* The tokenizer.json that the run's data.tokenizer names, or NULL; owned by the caller. The side
 * files of a checkpoint that has its own, or a saved model beside it, have it already. */
static nd_status choose_tokenizer(const nd_model_files *m, char **out)
{
    nd_status status = nd_inputs_find_tokenizer(setting(m, "data.tokenizer"), m->side,
                                                setting(m, "model.config"), out);
    if (status == ND_ERR_CONFIG) {
        nd_log_warning("the run's tokenizer is not exported: %s", nd_error_last()->message);
        nd_error_clear();
        return ND_OK;
    }
    return status;
}

/* The tokenizer that goes into a GGUF file. NULL: ids are bytes. */
static nd_status find_for_gguf(const nd_model_files *m, char **tokenizer)
{
    bool there = false;
    ND_TRY(m->side && !*tokenizer ? nd_fs_has(m->side, "tokenizer.json", &there) : ND_OK);
    if (there) {
        return nd_fs_format(tokenizer, "%s/tokenizer.json", m->side);
    }
    return *tokenizer || m->bytes
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "\"%s\" has no tokenizer.json, and a GGUF file holds the tokenizer too; "
                         "copy the model's tokenizer.json there",
                         m->side ? m->side : m->folder);
}

static nd_status export(nd_model_files *m, const nd_command_flags *line, char **tokenizer)
{
    const char *file = line->values[ND_EXPORT_GGUF].text, *out = line->word[1];
    const char *side = line->values[ND_EXPORT_SIDE_FILES].text, *slash = strrchr(m->folder, '/');
    /* Unless a flag says otherwise, weights keep their type; a checkpoint's get the run's. */
    const nd_flag_value *dtype = &line->values[ND_EXPORT_DTYPE];
    const bool wide = m->reader ? !nd_hf_reader_is_bf16(m->reader)
                                : strcmp(setting(m, "output.dtype"), "fp32") == 0;
    const int64_t type = dtype->given ? dtype->whole : wide ? FP32 : BF16;
    const double begin = nd_clock_seconds();
    char size[64], step[48] = "";
    uint64_t bytes = 0;
    struct stat st = {0};
    nd_fs_kind kind;
    ND_TRY(choose_side_files(m, side));
    ND_TRY(side || !m->side_is_base ? ND_OK : choose_tokenizer(m, tokenizer));
    ND_TRY(file ? find_for_gguf(m, tokenizer) : ND_OK);
    const nd_gguf_options gguf = {.shape = &m->shape,
                                  .type = gguf_types[type],
                                  .tokenizer = *tokenizer,
                                  .name = slash && slash[1] ? slash + 1 : m->folder};
    const nd_export_options options = {.out = file ? file : out,
                                       .dtype = type == FP32 ? ND_DTYPE_F32 : ND_DTYPE_BF16,
                                       .byte_tokenizer = m->bytes,
                                       .source = m->side,
                                       .tokenizer = *tokenizer,
                                       .verify = !line->values[ND_EXPORT_NO_VERIFY].given,
                                       .model = m->reader,
                                       .gguf = file ? &gguf : NULL};
    if (!file && (type == FP16 || type == Q8_0)) {
        return nd_fail(ND_ERR_CONFIG,
                       "--dtype %s is for GGUF files (--gguf FILE); a folder has bf16 "
                       "or fp32",
                       names[type]);
    }
    ND_TRY(nd_checkpoint_export(m->folder, &m->manifest, &options));
    ND_TRY(nd_fs_look(options.out, &kind, &st));
    ND_TRY(nd_fs_tree_bytes(options.out, false, &bytes));
    bytes = file ? (uint64_t)st.st_size : bytes;
    if (!m->reader) {
        snprintf(step, sizeof step, ", step %lld", (long long)m->manifest.position.step);
    }
    printf("%s: the %s model of %s%s: %s in %.1f s\n", options.out, names[type], m->folder, step,
           nd_file_bytes_format(size, sizeof size, (double)bytes), nd_clock_seconds() - begin);
    return ND_OK;
}

nd_status nd_export(const nd_command_flags *line)
{
    const nd_flag_value *file = &line->values[ND_EXPORT_GGUF];
    const char *out = line->word[1];
    char *tokenizer = NULL;
    nd_model_files m;
    if (!out == !file->given || (out && !out[0]) || (file->given && !file->text[0])) {
        return nd_fail(ND_ERR_CONFIG, "give either OUT, the folder that is made, or --gguf FILE");
    }
    ND_TRY(nd_model_files_open(line->word[0], &m));
    nd_status status = export(&m, line, &tokenizer);
    free(tokenizer);
    nd_model_files_close(&m);
    return status;
}
