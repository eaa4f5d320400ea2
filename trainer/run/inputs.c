// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/run.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/corpus/corpus.h"

/* Finds model.path, or the cached folder of model.name; NULL when there is only a config.json. */
static nd_status find_model_folder(const nd_config *config, char **out)
{
    *out = NULL;
    if (config->model.path[0]) {
        *out = strdup(config->model.path);
        return *out ? ND_OK : nd_fail_memory("model.path");
    }
    return config->model.name[0] ? nd_hf_cache_find(config->model.name, out) : ND_OK;
}

nd_status nd_inputs_open_model(const nd_config *config, nd_inputs *inputs)
{
    ND_TRY(nd_config_check_model_path(config));
    ND_TRY(find_model_folder(config, &inputs->model_folder));
    if (inputs->model_folder) {
        ND_TRY(nd_hf_reader_open(inputs->model_folder, &inputs->weights));
        ND_TRY(nd_hf_reader_check(inputs->weights));
        ND_TRY(nd_hf_side_files_bytes(inputs->model_folder, true, &inputs->side_bytes));
        inputs->shape = *nd_hf_reader_shape(inputs->weights);
    } else {
        ND_TRY(nd_shape_read(config->model.config, &inputs->shape));
    }
    if (config->train.sequence_length > inputs->shape.max_positions) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.sequence_length is %lld, but the model's max_position_embeddings is "
                       "%lld; use a shorter "
                       "sequence or another model config",
                       (long long)config->train.sequence_length,
                       (long long)inputs->shape.max_positions);
    }
    return nd_shape_check_mesh(&inputs->shape, &config->resolved_mesh,
                               config->train.micro_batch_size, config->train.sequence_length);
}

nd_status nd_inputs_verify_folder(const nd_config *config, const char *folder)
{
    int files;
    if (!config->model.verify || !folder[0]) {
        return ND_OK;
    }
    ND_TRY(nd_checksums_verify(folder, &files));
    if (files > 0) {
        nd_log_info("model: %d files match SHA256SUMS of %s", files, folder);
    } else {
        nd_log_info("model: %s has no SHA256SUMS; damage of its files would go unnoticed", folder);
    }
    return ND_OK;
}

static nd_status tokenizer_of_model(const char *model_folder, const char *model_config, char **out)
{
    char *folder = NULL;
    if (!model_folder && !(model_config && model_config[0])) {
        return nd_fail(ND_ERR_CONFIG, "data.tokenizer is model, but there is no model folder; name "
                                      "one with model.path, or a tokenizer.json here");
    }
    ND_TRY(model_folder ? nd_fs_format(&folder, "%s", model_folder)
                        : nd_fs_parent(model_config, &folder));
    bool there = true;
    nd_status status = nd_fs_format(out, "%s/tokenizer.json", folder);
    status = status == ND_OK ? nd_fs_exists(*out, &there) : status;
    if (!there) {
        status = nd_fail(ND_ERR_CONFIG,
                         "data.tokenizer is model, but \"%s\" has no tokenizer.json; name another "
                         "one with data.tokenizer",
                         folder);
    }
    free(folder);
    return status;
}

static nd_status tokenizer_at(const char *path, char **out)
{
    bool folder = false, there = false;
    ND_TRY(nd_fs_is_folder(path, &folder));
    ND_TRY(nd_fs_format(out, folder ? "%s/tokenizer.json" : "%s", path));
    ND_TRY(nd_fs_exists(*out, &there));
    if (!there) {
        return nd_fail(ND_ERR_CONFIG,
                       "data.tokenizer is \"%s\", and \"%s\" does not exist; it is bytes, file, "
                       "model, or the path of a tokenizer.json or of its folder",
                       path, *out);
    }
    return ND_OK;
}

nd_status nd_inputs_find_tokenizer(const char *setting, const char *model_folder,
                                   const char *model_config, char **out)
{
    nd_status status = ND_OK;
    *out = NULL;
    if (strcmp(setting, "model") == 0) {
        status = tokenizer_of_model(model_folder, model_config, out);
    } else if (setting[0] && strcmp(setting, "bytes") != 0 && strcmp(setting, "file") != 0) {
        status = tokenizer_at(setting, out);
    }
    if (status != ND_OK) {
        free(*out);
        *out = NULL;
    }
    return status;
}

nd_epochs nd_inputs_epochs(const nd_config *config, const nd_inputs *inputs)
{
    return (nd_epochs){.samples = nd_dataset_epoch(inputs->data),
                       .limit = nd_dataset_samples(inputs->data),
                       .step = nd_step_blocks(config)};
}

/* Where config.json names no end of text, the model gets the one that its texts end with: the
 * default of a missing key is another token in most tokenizers. */
static void take_end(const nd_config *config, nd_inputs *inputs)
{
    nd_shape *shape = &inputs->shape;
    if (!shape->eos_is_default || !config->data.append_eod || !inputs->tokenizer) {
        return;
    }
    const int32_t end = nd_corpus_model_end(NULL, inputs->tokenizer, shape->vocab);
    shape->eos_id = end >= 0 ? end : shape->eos_id;
}

nd_status nd_inputs_open(nd_config *config, nd_inputs *inputs)
{
    nd_epochs epochs;
    ND_TRY(nd_inputs_open_model(config, inputs));
    ND_TRY(nd_config_check_data_paths(config));
    ND_TRY(nd_inputs_find_tokenizer(config->data.tokenizer, inputs->model_folder,
                                    config->model.config, &inputs->tokenizer));
    take_end(config, inputs);
    ND_TRY(nd_inputs_open_sources(config, inputs, config->data.path, &inputs->data));
    epochs = nd_inputs_epochs(config, inputs);
    ND_TRY(nd_config_take_epochs(config, &epochs));
    if (config->data.validation_path[0]) {
        ND_TRY(nd_inputs_open_sources(config, inputs, config->data.validation_path,
                                      &inputs->validation));
    }
    const bool separate = nd_dataset_is_separate(inputs->data) ||
                          (inputs->validation && nd_dataset_is_separate(inputs->validation));
    config->data.documents = separate ? ND_DOCUMENTS_SEPARATE : ND_DOCUMENTS_JOIN;
    return ND_OK;
}

void nd_inputs_close(nd_inputs *inputs)
{
    if (!inputs->still_read) {
        nd_dataset_close(inputs->validation);
        nd_dataset_close(inputs->data);
    }
    nd_hf_reader_close(inputs->weights);
    free(inputs->model_folder);
    free(inputs->tokenizer);
    memset(inputs, 0, sizeof *inputs);
}
