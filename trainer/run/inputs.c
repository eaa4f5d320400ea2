// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/run.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/config/sources.h"
#include "trainer/corpus/chat.h"
#include "trainer/corpus/corpus.h"

nd_status nd_inputs_open_model(const nd_config *config, nd_inputs *inputs)
{
    ND_TRY(nd_config_check_model_path(config));
    /* With a config.json alone there is no folder. */
    ND_TRY(config->model.path[0]   ? nd_fs_format(&inputs->model_folder, "%s", config->model.path)
           : config->model.name[0] ? nd_hf_cache_find(config->model.name, &inputs->model_folder)
                                   : ND_OK);
    if (inputs->model_folder) {
        ND_TRY(nd_hf_reader_open(inputs->model_folder, &inputs->weights));
        ND_TRY(nd_hf_reader_check(inputs->weights));
        free(inputs->model_folder);
        inputs->model_folder = NULL;
        ND_TRY(nd_fs_format(&inputs->model_folder, "%s", nd_hf_reader_folder(inputs->weights)));
        ND_TRY(nd_hf_side_files_bytes(inputs->model_folder, &inputs->side_bytes));
        inputs->shape = *nd_hf_reader_shape(inputs->weights);
    } else {
        ND_TRY(nd_shape_read(config->model.config, &inputs->shape));
    }
    if (config->train.sequence_length > inputs->shape.max_positions) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.sequence_length is %lld, but the model's max_position_embeddings is "
                       "%lld; use a shorter sequence or another model config",
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

nd_status nd_inputs_find_tokenizer(const char *setting, const char *model_folder,
                                   const char *model_config, char **out)
{
    const bool of_model = strcmp(setting, "model") == 0;
    char *place = NULL;
    bool folder = true, there = false;
    nd_status status = ND_OK;
    *out = NULL;
    if (!setting[0] || strcmp(setting, "bytes") == 0 || strcmp(setting, "file") == 0) {
        return ND_OK;
    }
    if (of_model && !model_folder && !(model_config && model_config[0])) {
        return nd_fail(ND_ERR_CONFIG, "data.tokenizer is model, but there is no model folder; name "
                                      "one with model.path, or a tokenizer.json here");
    }
    ND_TRY_OUT(of_model && !model_folder
                   ? nd_fs_parent(model_config, &place)
                   : nd_fs_format(&place, "%s", of_model ? model_folder : setting));
    ND_TRY_OUT(of_model ? ND_OK : nd_fs_is_folder(place, &folder));
    ND_TRY_OUT(nd_fs_format(out, folder ? "%s/tokenizer.json" : "%s", place));
    ND_TRY_OUT(nd_fs_exists(*out, &there));
    if (!there && of_model) {
        status = nd_fail(ND_ERR_CONFIG,
                         "data.tokenizer is model, but \"%s\" has no tokenizer.json; name another "
                         "one with data.tokenizer",
                         place);
    } else if (!there) {
        status = nd_fail(ND_ERR_CONFIG,
                         "data.tokenizer is \"%s\", and \"%s\" does not exist; it is bytes, file, "
                         "model, or the path of a tokenizer.json or of its folder",
                         setting, *out);
    }
out:
    free(place);
    if (status != ND_OK) {
        free(*out);
        *out = NULL;
    }
    return status;
}

/* The data that data.path and data.validation_path name. */

/* A text that the tokenizer encodes, or JSON lines or a compressed text that are read as bytes: a
 * file, a folder or a pattern. */
static nd_status open_text(const nd_config *config, const nd_inputs *inputs, const char *path,
                           nd_dataset **out)
{
    static const nd_special_in_text special[] = {
        [ND_CHOOSE_SPECIAL_TEXT] = ND_SPECIAL_TEXT,
        [ND_CHOOSE_SPECIAL_PARSE] = ND_SPECIAL_PARSE,
        [ND_CHOOSE_SPECIAL_REFUSE] = ND_SPECIAL_REFUSE,
    };
    /* With a key of its own a row is a text, whatever other keys it has but "messages". */
    const char *key = config->data.json_key;
    const nd_chat_choice chat = config->data.chat_format;
    nd_corpus_rules rules = {.special_in_text = special[config->data.special_in_text],
                             .add_special = true,
                             .append_eod = config->data.append_eod,
                             .refuse_invalid =
                                 config->data.invalid_utf8 == ND_CHOOSE_INVALID_REFUSE,
                             .json_key = key[0] ? key : "text",
                             .pairs = !key[0] || chat != ND_CHOOSE_CHAT_NONE};
    char *separator = NULL;
    ND_TRY(nd_chat_rules_find(inputs->tokenizer, chat, &rules.chat));
    if (config->data.document_separator[0]) {
        ND_TRY(nd_corpus_separator(config->data.document_separator, &rules, &separator));
    }
    const nd_token_cache_request request = {.job = {.rules = &rules,
                                                    .threads = nd_corpus_threads(),
                                                    .skip_bad = config->data.skip_bad,
                                                    .stop = inputs->stop},
                                            .tokenizer = inputs->tokenizer,
                                            .folder = config->data.cache_dir,
                                            .vocab = inputs->shape.vocab};
    nd_status status = nd_dataset_open_text(path, config->data.format, request,
                                            config->train.sequence_length, out);
    free(separator);
    return status;
}

/* One text, or one file of token ids. */
static nd_status open_one(const nd_config *config, const nd_inputs *inputs, const char *path,
                          bool is_text, nd_dataset **out)
{
    const nd_shape *shape = &inputs->shape;
    const nd_document_rules rules = {
        .rule = config->data.documents,
        .end_of_text = config->data.end_of_text,
        .model_end = shape->eos_is_default ? -1 : shape->eos_id,
        .drop_long = config->data.long_rows == ND_LONG_ROWS_DROP,
    };
    /* A tokenizer is the one that made the ids. */
    const char *tokenizer = inputs->tokenizer ? "file" : config->data.tokenizer;
    ND_TRY(is_text ? open_text(config, inputs, path, out)
                   : nd_dataset_open(path, config->data.format, tokenizer, shape->vocab,
                                     config->train.sequence_length, out));
    const nd_status status = nd_dataset_set_documents(*out, &rules);
    if (status != ND_OK) {
        nd_dataset_close(*out);
        *out = NULL;
    }
    return status;
}

static bool reads_bytes(const nd_config *config, const nd_inputs *inputs)
{
    return !inputs->tokenizer && strcmp(config->data.tokenizer, "bytes") == 0;
}

/* A text whose bytes are taken as they are has no use for rules of encoding. */
static nd_status check_bytes(const nd_config *config, const char *path)
{
    const bool separator = config->data.document_separator[0];
    if (!separator && config->data.invalid_utf8 != ND_CHOOSE_INVALID_REFUSE) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_CONFIG,
                   "%s, but \"%s\" is read as bytes, %s; name a tokenizer (data.tokenizer), or "
                   "leave it out",
                   separator ? "data.document_separator is set" : "data.invalid_utf8 is refuse",
                   path, separator ? "in which no document ends" : "which may be anything");
}

static nd_status open_file(const nd_config *config, const nd_inputs *inputs, const char *path,
                           nd_dataset **out)
{
    const bool bytes = reads_bytes(config, inputs);
    bool ids = false, streamed = false;
    ND_TRY(nd_data_holds(path, config->data.format, &ids, &streamed));
    const bool is_text = (inputs->tokenizer && !ids) || (streamed && bytes);
    ND_TRY(!is_text && !ids && bytes ? check_bytes(config, path) : ND_OK);
    return open_one(config, inputs, path, is_text, out);
}

/* Makes one text of the parts, which it takes over, and closes them where that or their opening
 * failed. */
static nd_status join_parts(nd_dataset_part *parts, int count, nd_status opened, nd_dataset **out)
{
    const nd_status status = opened == ND_OK ? nd_dataset_blend(parts, count, out) : opened;
    for (int i = 0; i < count; i++) {
        nd_dataset_close(parts[i].data);
    }
    free(parts);
    return status;
}

/* The files as one text. An .idx belongs to its .bin. */
static nd_status open_files(const nd_config *config, const nd_inputs *inputs,
                            const nd_corpus_files *files, nd_dataset **out)
{
    nd_dataset_part *parts = NULL;
    int count = 0;
    nd_status status = ND_ALLOC(files->count, &parts);
    for (; count < (int)files->count && status == ND_OK; count++) {
        parts[count].name = "";
        status = open_file(config, inputs, files->list[count].path, &parts[count].data);
    }
    return join_parts(parts, count, status, out);
}

nd_status nd_inputs_open_data(const nd_config *config, const nd_inputs *inputs, const char *path,
                              nd_dataset **out)
{
    nd_corpus_files files = {0};
    bool several = false;
    ND_TRY(nd_corpus_is_several(path, &several));
    if (!several) {
        return open_file(config, inputs, path, out);
    }
    nd_status status = nd_corpus_files_add_tokens(&files, path);
    const bool ids = files.count > 0;
    bool one = !ids && inputs->tokenizer; /* one text, encoded into one cache */
    if (status == ND_OK && ids && files.text) {
        /* Token ids are taken as they are, and text would be encoded. */
        status = nd_fail(ND_ERR_DATA,
                         "\"%s\" has token files, as \"%s\", and others, as \"%s\"; name them "
                         "apart, for example with patterns in a list",
                         path, files.list[0].path, files.text);
    } else if (status == ND_OK && ids) {
        nd_corpus_files_say_left_out(&files, path);
    } else if (status == ND_OK && !one) {
        nd_corpus_files_fini(&files); /* which also forgets what was left out */
        status = nd_corpus_files_add(&files, path, config->data.format);
        one = status == ND_OK && reads_bytes(config, inputs);
        for (size_t i = 0; i < files.count; i++) {
            one &= files.list[i].rows;
        }
        if (status == ND_OK && !one) {
            nd_corpus_files_say_left_out(&files, path);
        }
    }
    if (status == ND_OK) {
        status = one ? open_one(config, inputs, path, true, out)
                     : open_files(config, inputs, &files, out);
    }
    nd_corpus_files_fini(&files);
    return status;
}

nd_status nd_inputs_hold_ids(const nd_config *config, const char *path, bool *ids)
{
    nd_corpus_files files = {0};
    bool several = false, streamed;
    ND_TRY(nd_corpus_is_several(path, &several));
    if (!several) {
        return nd_data_holds(path, config->data.format, ids, &streamed);
    }
    nd_status status = nd_corpus_files_add_tokens(&files, path);
    *ids = files.count > 0;
    nd_corpus_files_fini(&files);
    return status;
}

nd_status nd_inputs_open_sources(const nd_config *config, const nd_inputs *inputs, const char *text,
                                 nd_dataset **out)
{
    const bool validation = text == config->data.validation_path;
    nd_data_sources sources;
    nd_dataset_part *parts = NULL;
    int count = 0;
    ND_TRY(nd_data_sources_read("", validation ? "data.validation_path" : "data.path", text,
                                &sources));
    nd_status status = ND_ALLOC(sources.count + 1, &parts);
    for (; count < sources.count && status == ND_OK; count++) {
        const nd_data_source *s = &sources.list[count];
        parts[count] = (nd_dataset_part){.name = s->name, .weight = s->weight, .epochs = s->epochs};
        status = nd_inputs_open_data(config, inputs, s->path, &parts[count].data);
    }
    if (status == ND_OK && count == 1 && parts[0].epochs == 0) {
        *out = parts[0].data;
        free(parts);
    } else {
        status = join_parts(parts, count, status, out);
    }
    nd_data_sources_fini(&sources);
    return status;
}

/* All of them. */

nd_epochs nd_inputs_epochs(const nd_config *config, const nd_inputs *inputs)
{
    return (nd_epochs){.samples = nd_dataset_facts_of(inputs->data).epoch,
                       .limit = nd_dataset_facts_of(inputs->data).samples,
                       .step = nd_step_blocks(config)};
}

/* A file of data.validation_path that a folder or a pattern in data.path has too would be trained
 * on. What cannot be listed is told of when it is opened. */
static nd_status check_apart(const nd_config *config)
{
    nd_data_sources training = {0}, validation = {0};
    nd_corpus_files files = {0};
    struct stat own, other;
    nd_fs_kind kind;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_data_sources_read("", "data.path", config->data.path, &training));
    ND_TRY_OUT(nd_data_sources_read("", "data.validation_path", config->data.validation_path,
                                    &validation));
    for (int i = 0; i < training.count; i++) {
        const char *path = training.list[i].path;
        const size_t before = files.count;
        bool several = false;
        if (nd_corpus_is_several(path, &several) == ND_OK && several &&
            nd_corpus_files_add_tokens(&files, path) == ND_OK && files.count == before) {
            (void)nd_corpus_files_add(&files, path, config->data.format);
        }
    }
    nd_error_clear();
    for (size_t i = 0; i < files.count * (size_t)validation.count && status == ND_OK; i++) {
        const char *file = files.list[i / (size_t)validation.count].path;
        const char *path = validation.list[i % (size_t)validation.count].path;
        if (nd_fs_look(path, &kind, &own) == ND_OK && kind == ND_FS_FILE &&
            nd_fs_look(file, &kind, &other) == ND_OK && kind == ND_FS_FILE &&
            own.st_dev == other.st_dev && own.st_ino == other.st_ino) {
            status = nd_fail(ND_ERR_CONFIG,
                             "\"%s\" (data.validation_path) is \"%s\" of data.path, so it would be "
                             "trained on too; move it elsewhere, or name the training files with a "
                             "pattern that leaves it out",
                             path, file);
        }
    }
out:
    nd_corpus_files_fini(&files);
    nd_data_sources_fini(&training);
    nd_data_sources_fini(&validation);
    return status;
}

nd_status nd_inputs_open(nd_config *config, nd_inputs *inputs)
{
    nd_shape *shape = &inputs->shape;
    ND_TRY(nd_inputs_open_model(config, inputs));
    ND_TRY(nd_config_check_data_paths(config));
    ND_TRY(nd_inputs_find_tokenizer(config->data.tokenizer, inputs->model_folder,
                                    config->model.config, &inputs->tokenizer));
    /* Where config.json names no end of text, the model gets the one that its texts end with: the
     * default of a missing key is another token in most tokenizers. */
    if (shape->eos_is_default && config->data.append_eod && inputs->tokenizer) {
        const int32_t end = nd_corpus_model_end(NULL, inputs->tokenizer, shape->vocab);
        shape->eos_id = end >= 0 ? end : shape->eos_id;
    }
    ND_TRY(config->data.validation_path[0] ? check_apart(config) : ND_OK);
    ND_TRY(nd_inputs_open_sources(config, inputs, config->data.path, &inputs->data));
    const nd_epochs epochs = nd_inputs_epochs(config, inputs);
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

/* Steps and validations without a label that counts, as masks and the order of samples tell. */

/* The limit of all data together: all ranks wait meanwhile, and a block of whole rows has as many
 * places of the file as rows, each of which may take milliseconds where the file is far away. A
 * step without labels behind the limit makes no update when it comes, and says so. */
enum { TOKENS_MAX = 4 << 20 };

typedef struct search {
    const nd_dataset *data;
    nd_block block;
    int64_t sequence, tokens; /* tokens: of the blocks that were read */
} search;

/* Finds whether a label counts in `count` blocks, of the training's order from a sample on, or
 * without `seed` of the file from a block on. Past the limit one is taken to. */
static nd_status look_for_label(search *s, const int64_t *seed, int64_t first, int64_t count,
                                bool *counts)
{
    *counts = false;
    for (int64_t i = first; i < first + count && !*counts; i++) {
        const int64_t block = seed ? nd_dataset_sample(s->data, *seed, i) : i;
        *counts = s->tokens >= TOKENS_MAX;
        ND_TRY(*counts ? ND_OK : nd_dataset_block(s->data, block, &s->block));
        s->tokens += s->sequence;
        for (int64_t k = 0; k < s->sequence && !*counts; k++) {
            *counts = s->block.labels[k] != ND_LABEL_IGNORED;
        }
    }
    return ND_OK;
}

static nd_status warn_of_steps(search *s, const nd_config *config, int64_t begin, int64_t ahead)
{
    const int64_t samples = nd_step_blocks(config);
    const nd_loader_options options = {/* of all ranks together */
                                       .micro_batch = samples,
                                       .accumulation = 1,
                                       .dp_size = 1,
                                       .first_step = begin,
                                       .samples_ahead = ahead};
    const int64_t last = nd_loader_last_step(s->data, &options, config->train.steps);
    int64_t first = 0, found = 0;
    char later[48] = "has";
    for (int64_t step = begin; step < last && s->tokens < TOKENS_MAX; step++) {
        bool counts;
        ND_TRY(look_for_label(s, &config->data.shuffle_seed, step * samples + ahead, samples,
                              &counts));
        first = !counts && found == 0 ? step + 1 : first;
        found += !counts;
    }
    if (found > 1) {
        snprintf(later, sizeof later, "and %lld later ones have", (long long)found - 1);
    }
    if (found > 0) {
        nd_log_warning("step %lld %s no label that counts in the loss, and will make no update; "
                       "see to the prompts and masks of data.path, or give a step more samples",
                       (long long)first, later);
    }
    return ND_OK;
}

static nd_status warn_of_set(search *s, const nd_config *config, const char *name)
{
    const int64_t all = nd_dataset_blocks(s->data), wanted = config->train.validation_batches;
    const int64_t batch =
        config->train.micro_batch_size * nd_mesh_group_size(&config->resolved_mesh, ND_GROUP_DP);
    const int64_t blocks = wanted > 0 && wanted < (all + batch - 1) / batch ? wanted * batch : all;
    bool counts;
    ND_TRY(look_for_label(s, NULL, 0, blocks, &counts));
    if (!counts) {
        nd_log_warning("no label counts in the %lld sequences that a validation reads of %s; see "
                       "to data.validation_path, or raise train.validation_batches",
                       (long long)blocks, name[0] ? name : "its data");
    }
    return ND_OK;
}

nd_status nd_inputs_warn_of_labels(const nd_config *config, const nd_inputs *inputs, int64_t begin,
                                   int64_t samples_ahead)
{
    search s = {.sequence = config->train.sequence_length};
    const int sets = inputs->validation ? nd_dataset_sources(inputs->validation) : 0;
    nd_status status = ND_OK;
    ND_TRY_OUT(ND_ALLOC(s.sequence, &s.block.inputs));
    ND_TRY_OUT(ND_ALLOC(s.sequence, &s.block.labels));
    for (int i = 0; i <= sets; i++) { /* the training's last: many steps take what is left */
        int64_t ignored = 0;
        s.data = i < sets ? nd_dataset_source(inputs->validation, i) : inputs->data;
        ND_TRY_OUT(nd_dataset_ignored(s.data, &ignored));
        if (ignored > 0) {
            ND_TRY_OUT(i < sets
                           ? warn_of_set(&s, config, nd_dataset_source_name(inputs->validation, i))
                           : warn_of_steps(&s, config, begin, samples_ahead));
        }
    }
out:
    free(s.block.inputs);
    free(s.block.labels);
    return status;
}
