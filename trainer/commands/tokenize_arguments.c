// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "trainer/commands/tokenize.h"

static nd_status read_separator(nd_tokenize_call *call, const char *text)
{
    if (!*text) {
        return nd_fail(ND_ERR_CONFIG, "--document-separator is empty; give a text");
    }
    return nd_corpus_separator(text, &call->rules, &call->separator);
}

/* PREFIX.bin of a folder would be a hidden file, which no scan of the folder finds. */
static nd_status check_prefix(const char *prefix)
{
    const char *slash = strrchr(prefix, '/');
    return slash && !slash[1]
               ? nd_fail(ND_ERR_CONFIG,
                         "--output-prefix \"%s\" is a folder; add the beginning of the files' "
                         "names, as in \"%stext\"",
                         prefix, prefix)
               : ND_OK;
}

/* With a key of its own a row is a text, whatever other keys it has. */
static nd_corpus_rules rules_of(const nd_flag_value *v)
{
    static const nd_special_in_text specials[] = {ND_SPECIAL_TEXT, ND_SPECIAL_PARSE,
                                                  ND_SPECIAL_REFUSE};
    const nd_flag_value *key = &v[ND_TOKENIZE_KEY];
    const bool chat = v[ND_TOKENIZE_CHAT].whole != ND_CHOOSE_CHAT_NONE;
    return (nd_corpus_rules){.json_key = key->given ? key->text : "text",
                             .pairs = !key->given || chat,
                             .append_eod = v[ND_TOKENIZE_EOD].given,
                             .add_special = !v[ND_TOKENIZE_NO_SPECIAL].given,
                             .special_in_text = specials[v[ND_TOKENIZE_SPECIAL_IN_TEXT].whole],
                             .refuse_invalid = v[ND_TOKENIZE_INVALID].whole == 1,
                             .drop_unknown = v[ND_TOKENIZE_DROP].given};
}

nd_status nd_tokenize_parse(const nd_command_flags *line, nd_tokenize_call *out)
{
    static const nd_data_format formats[] = {ND_DATA_AUTO, ND_DATA_TEXT, ND_DATA_JSONL};
    const nd_flag_value *v = line->values, *threads = &v[ND_TOKENIZE_THREADS];
    const char *input;
    *out = (nd_tokenize_call){.tokenizer = v[ND_TOKENIZE_TOKENIZER].text,
                              .prefix = v[ND_TOKENIZE_PREFIX].text,
                              .rules = rules_of(v),
                              .chat = (nd_chat_choice)v[ND_TOKENIZE_CHAT].whole,
                              .threads = threads->given ? (int)threads->whole : nd_corpus_threads(),
                              .skip_bad = v[ND_TOKENIZE_SKIP].whole,
                              .overwrite = v[ND_TOKENIZE_OVERWRITE].given};
    ND_TRY(nd_command_flags_need(line, ND_TOKENIZE_TOKENIZER));
    ND_TRY(nd_command_flags_need(line, ND_TOKENIZE_INPUT));
    ND_TRY(nd_command_flags_need(line, ND_TOKENIZE_PREFIX));
    ND_TRY(check_prefix(out->prefix));
    ND_TRY(v[ND_TOKENIZE_SEPARATOR].given ? read_separator(out, v[ND_TOKENIZE_SEPARATOR].text)
                                          : ND_OK);
    for (int at = 0; (input = nd_command_flags_next(line, ND_TOKENIZE_INPUT, &at));) {
        ND_TRY(nd_corpus_files_add(&out->files, input, formats[v[ND_TOKENIZE_FORMAT].whole]));
    }
    return ND_OK;
}

void nd_tokenize_call_fini(nd_tokenize_call *call)
{
    nd_corpus_files_fini(&call->files);
    free(call->separator);
}
