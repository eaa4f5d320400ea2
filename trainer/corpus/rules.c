// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "trainer/corpus/corpus.h"

nd_status nd_tokenizer_config_read(const char *folder, json_t **out)
{
    /* transformers writes a model_max_length of 10^30 where there is no limit. */
    return nd_json_read(folder, "tokenizer_config.json", JSON_DECODE_INT_AS_REAL, out);
}

const char *nd_tokenizer_config_token(const json_t *config, const char *key)
{
    const json_t *token = json_object_get(config, key);
    return json_string_value(json_is_object(token) ? json_object_get(token, "content") : token);
}

nd_status nd_corpus_eod(const nd_tokenizer *tokenizer, const char *path, int32_t *id)
{
    static const char *const known[] = {"<|end_of_text|>", "<|endoftext|>", "</s>"};
    char *folder = NULL;
    json_t *config = NULL;
    nd_status status = ND_OK;
    *id = -1;
    ND_TRY_OUT(nd_fs_parent(path, &folder));
    ND_TRY_OUT(nd_tokenizer_config_read(folder, &config));
    const char *name = nd_tokenizer_config_token(config, "eos_token");
    for (size_t i = 0; i < (name ? 1 : sizeof known / sizeof *known) && *id < 0; i++) {
        const char *token = name ? name : known[i];
        *id = nd_tokenizer_find(tokenizer, token, strlen(token));
    }
    if (*id < 0 && name) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s/tokenizer_config.json\" names the eos_token \"%s\", which \"%s\" "
                         "lacks",
                         folder, name, path);
    } else if (*id < 0) {
        status =
            nd_fail(ND_ERR_DATA,
                    "the tokenizer \"%s\" names no end of text: it has no tokenizer_config.json "
                    "with an eos_token beside it, and none of <|end_of_text|>, <|endoftext|> "
                    "and </s>; give --append-eod false, or leave --append-eod out of ndtrain "
                    "tokenize",
                    path);
    }
out:
    json_decref(config);
    free(folder);
    return status;
}

int32_t nd_corpus_model_end(const nd_tokenizer *tokenizer, const char *path, int64_t vocab)
{
    nd_tokenizer *opened = NULL;
    int32_t end = -1;
    nd_status status = tokenizer ? ND_OK : nd_tokenizer_open(path, &opened);
    status = status == ND_OK ? nd_corpus_eod(tokenizer ? tokenizer : opened, path, &end) : status;
    if (status != ND_OK) {
        nd_error_clear();
    }
    nd_tokenizer_close(opened);
    return end < vocab ? end : -1;
}

nd_status nd_corpus_separator(const char *text, nd_corpus_rules *rules, char **out)
{
    size_t n = 0;
    ND_TRY(ND_ALLOC(strlen(text) + 1, out));
    for (const char *p = text; *p; p++) {
        char c = *p;
        if (c == '\\' && p[1] && strchr("nrt\\", p[1])) {
            p++;
            c = *p == 'n' ? '\n' : *p == 'r' ? '\r' : *p == 't' ? '\t' : '\\';
        }
        (*out)[n++] = c;
    }
    rules->separator = *out;
    rules->separator_size = n;
    return ND_OK;
}
