// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/run.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"

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
        inputs->shape = *nd_hf_reader_shape(inputs->weights);
    } else {
        ND_TRY(nd_llama_shape_read(config->model.config, &inputs->shape));
    }
    if (config->train.sequence_length > inputs->shape.max_positions) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.sequence_length is %lld, but the model's max_position_embeddings is "
                       "%lld; use a shorter "
                       "sequence or another model config",
                       (long long)config->train.sequence_length,
                       (long long)inputs->shape.max_positions);
    }
    return nd_llama_shape_check_mesh(&inputs->shape, &config->resolved_mesh,
                                     config->train.micro_batch_size, config->train.sequence_length);
}

nd_status nd_inputs_verify_model(const nd_config *config)
{
    const char *folder = config->model.path;
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

nd_status nd_inputs_open(const nd_config *config, nd_inputs *inputs)
{
    ND_TRY(nd_inputs_open_model(config, inputs));
    ND_TRY(nd_config_check_data_paths(config));
    ND_TRY(nd_dataset_open(config->data.path, config->data.format, config->data.tokenizer,
                           inputs->shape.vocab, config->train.sequence_length, &inputs->data));
    if (!config->data.validation_path[0]) {
        return ND_OK;
    }
    return nd_dataset_open(config->data.validation_path, config->data.format,
                           config->data.tokenizer, inputs->shape.vocab,
                           config->train.sequence_length, &inputs->validation);
}

void nd_inputs_close(nd_inputs *inputs)
{
    if (!inputs->still_read) {
        nd_dataset_close(inputs->validation);
        nd_dataset_close(inputs->data);
    }
    nd_hf_reader_close(inputs->weights);
    free(inputs->model_folder);
    memset(inputs, 0, sizeof *inputs);
}
