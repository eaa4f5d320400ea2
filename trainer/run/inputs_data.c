// SPDX-License-Identifier: Apache-2.0
/* Opens what data.path and data.validation_path name. */
#include <stdlib.h>
#include <string.h>

#include "runtime/config/sources.h"
#include "trainer/corpus/chat.h"
#include "trainer/run/run.h"

/* Takes the dataset over when it fails. */
static nd_status set_documents(const nd_config *config, const nd_inputs *inputs, nd_dataset **data)
{
    const nd_shape *shape = &inputs->shape;
    const nd_document_rules rules = {
        .rule = config->data.documents,
        .end_of_text = config->data.end_of_text,
        .model_end = shape->eos_is_default ? -1 : shape->eos_id,
        .drop_long = config->data.long_rows == ND_LONG_ROWS_DROP,
    };
    nd_status status = nd_dataset_set_documents(*data, &rules);
    if (status != ND_OK) {
        nd_dataset_close(*data);
        *data = NULL;
    }
    return status;
}

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
    const nd_dataset_text text = {.path = path,
                                  .format = config->data.format,
                                  .tokenizer = inputs->tokenizer,
                                  .rules = &rules,
                                  .skip_bad = config->data.skip_bad,
                                  .cache_dir = config->data.cache_dir,
                                  .threads = nd_corpus_threads(),
                                  .stop = inputs->stop};
    nd_status status =
        nd_dataset_open_text(&text, inputs->shape.vocab, config->train.sequence_length, out);
    free(separator);
    return status == ND_OK ? set_documents(config, inputs, out) : status;
}

static bool reads_bytes(const nd_config *config, const nd_inputs *inputs)
{
    return !inputs->tokenizer && strcmp(config->data.tokenizer, "bytes") == 0;
}

/* A text whose bytes are taken as they are has no use for rules of encoding. */
static nd_status check_bytes(const nd_config *config, const char *path)
{
    if (config->data.document_separator[0]) {
        return nd_fail(ND_ERR_CONFIG,
                       "data.document_separator is set, but \"%s\" is read as bytes, in which no "
                       "document ends; name a tokenizer (data.tokenizer), or leave it out",
                       path);
    }
    if (config->data.invalid_utf8 == ND_CHOOSE_INVALID_REFUSE) {
        return nd_fail(ND_ERR_CONFIG,
                       "data.invalid_utf8 is refuse, but \"%s\" is read as bytes, which may be "
                       "anything; name a tokenizer (data.tokenizer), or leave it out",
                       path);
    }
    return ND_OK;
}

/* A file of token ids, or a text. */
static nd_status open_path(const nd_config *config, const nd_inputs *inputs, const char *path,
                           nd_dataset **out)
{
    const nd_data_format format = config->data.format;
    bool ids = false, streamed = false;
    ND_TRY(nd_data_holds(path, format, &ids, &streamed));
    if ((inputs->tokenizer && !ids) || (streamed && reads_bytes(config, inputs))) {
        return open_text(config, inputs, path, out);
    }
    ND_TRY(!ids && reads_bytes(config, inputs) ? check_bytes(config, path) : ND_OK);
    ND_TRY(nd_dataset_open(path, format, /* a tokenizer is the one that made the ids */
                           inputs->tokenizer ? "file" : config->data.tokenizer, inputs->shape.vocab,
                           config->train.sequence_length, out));
    return set_documents(config, inputs, out);
}

/* Whether all are JSON lines. */
static bool are_rows(const nd_corpus_files *files)
{
    for (size_t i = 0; i < files->count; i++) {
        if (!files->list[i].rows) {
            return false;
        }
    }
    return true;
}

/* The files as one text. An .idx belongs to its .bin. */
static nd_status open_files(const nd_config *config, const nd_inputs *inputs,
                            const nd_corpus_files *files, nd_dataset **out)
{
    nd_dataset_part *parts = NULL;
    int count = 0;
    nd_status status = ND_ALLOC(files->count, &parts);
    for (size_t i = 0; i < files->count && status == ND_OK; i++) {
        parts[count] = (nd_dataset_part){.name = ""};
        status = open_path(config, inputs, files->list[i].path, &parts[count].data);
        count += status == ND_OK;
    }
    if (status == ND_OK) {
        status = nd_dataset_blend(parts, count, out);
    } else {
        for (int i = 0; i < count; i++) {
            nd_dataset_close(parts[i].data);
        }
    }
    free(parts);
    return status;
}

nd_status nd_inputs_open_data(const nd_config *config, const nd_inputs *inputs, const char *path,
                              nd_dataset **out)
{
    nd_corpus_files files = {0};
    bool several = false;
    ND_TRY(nd_corpus_is_several(path, &several));
    if (!several) {
        return open_path(config, inputs, path, out);
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
        nd_data_say_left_out(path, files.skipped, files.folders);
    } else if (status == ND_OK && !one) {
        nd_corpus_files_fini(&files); /* which also forgets what was left out */
        status = nd_corpus_files_add(&files, path, config->data.format);
        one = status == ND_OK && reads_bytes(config, inputs) && are_rows(&files);
        if (status == ND_OK && !one) {
            nd_data_say_left_out(path, files.skipped, files.folders);
        }
    }
    if (status == ND_OK) {
        status =
            one ? open_text(config, inputs, path, out) : open_files(config, inputs, &files, out);
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
    nd_data_sources sources;
    nd_dataset_part *parts = NULL;
    int count = 0;
    const bool validation = text == config->data.validation_path;
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
        parts[0].data = NULL;
    } else if (status == ND_OK) {
        status = nd_dataset_blend(parts, count, out);
    }
    for (int i = 0; i < count; i++) {
        nd_dataset_close(parts[i].data);
    }
    free(parts);
    nd_data_sources_fini(&sources);
    return status;
}
