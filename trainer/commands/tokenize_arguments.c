// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/suggest.h"
#include "trainer/commands/tokenize.h"

typedef enum option {
    OPTION_TOKENIZER,
    OPTION_INPUT,
    OPTION_PREFIX,
    OPTION_FORMAT,
    OPTION_KEY,
    OPTION_CHAT,
    OPTION_SEPARATOR,
    OPTION_EOD,
    OPTION_NO_SPECIAL,
    OPTION_SPECIAL_IN_TEXT,
    OPTION_INVALID,
    OPTION_DROP,
    OPTION_SKIP,
    OPTION_THREADS,
    OPTION_OVERWRITE,
    OPTION_COUNT
} option;

static const struct {
    const char *name, *also; /* also: the name that Megatron-LM has, or that a run has */
    const char *value;       /* NULL: a switch */
    const char *help;
} options[OPTION_COUNT] = {
    [OPTION_TOKENIZER] = {"--tokenizer", "--tokenizer-model", "PATH",
                          "a tokenizer.json, the folder that has one, or bytes: id = byte"},
    [OPTION_INPUT] =
        {"--input", NULL, "PATH ...",
         "files, folders (their .jsonl, .ndjson and .txt) and patterns; gzip and zstd too"},
    [OPTION_PREFIX] = {"--output-prefix", NULL, "PREFIX", "writes PREFIX.bin and PREFIX.idx"},
    [OPTION_FORMAT] = {"--format", "--data-format", "auto|text|jsonl",
                       "of all inputs; auto: by their names"},
    [OPTION_KEY] = {"--json-key", "--json-keys", "KEY",
                    "the key of the text in a line; without it text, or prompt and completion, "
                    "whose prompts PREFIX.mask leaves out of the loss"},
    [OPTION_CHAT] = {"--chat-format", NULL, "none|llama3|chatml",
                     "rows may have messages, written in this form; PREFIX.mask leaves all but the "
                     "turns of the assistant out of the loss"},
    [OPTION_SEPARATOR] =
        {"--document-separator", NULL, "TEXT",
         "between documents of a text file (\\n and \\t are understood); without it a "
         "file is one document"},
    [OPTION_EOD] = {"--append-eod", NULL, NULL,
                    "ends each document with the tokenizer's end of text"},
    [OPTION_NO_SPECIAL] = {"--no-special-tokens", NULL, NULL,
                           "leaves out what the post-processor adds, as a beginning of sequence"},
    [OPTION_SPECIAL_IN_TEXT] =
        {"--special-in-text", NULL, "text|parse|refuse",
         "the writing of a special token in a text: text, the token, an error"},
    [OPTION_INVALID] = {"--invalid-utf8", NULL, "replace|refuse",
                        "bytes that are no UTF-8: U+FFFD, or an error"},
    [OPTION_DROP] = {"--drop-unknown", NULL, NULL,
                     "leaves out characters that have no piece, which is an error else"},
    [OPTION_SKIP] = {"--skip-bad", NULL, "N", "leaves out up to N bad lines; 0"},
    [OPTION_THREADS] = {"--threads", "--workers", "N",
                        "all CPUs if not given; the output does not "
                        "depend on it"},
    [OPTION_OVERWRITE] = {"--overwrite", NULL, NULL, "replaces files that are there"},
};

void nd_tokenize_print_help(void)
{
    printf(
        "usage: ndtrain tokenize --tokenizer PATH --input PATH ... --output-prefix PREFIX\n\n"
        "Encodes text and JSON lines into the pair of token files that Megatron-LM and ndtrain "
        "read\n(data.path: PREFIX, data.tokenizer: file), with a loss mask for ndtrain beside them "
        "when\nsome tokens do not count in the loss.\n\n");
    for (int i = 0; i < OPTION_COUNT; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s%s%s", options[i].name, options[i].value ? " " : "",
                 options[i].value ? options[i].value : "");
        printf("  %-36s %s\n", name, options[i].help);
    }
    printf("\nExit codes: 0 done, 2 wrong usage, 65 bad text or tokenizer, 71 out of memory,\n"
           "73 output that cannot be written, 74 a failing disk, 75 stopped by a signal.\n");
}

static nd_status find_option(const char *name, option *out)
{
    nd_suggest search;
    nd_suggest_init(&search, name);
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (strcmp(name, options[i].name) == 0 ||
            (options[i].also && strcmp(name, options[i].also) == 0)) {
            *out = (option)i;
            return ND_OK;
        }
        nd_suggest_offer(&search, options[i].name);
    }
    return nd_fail(ND_ERR_CONFIG, "ndtrain tokenize has no option \"%.60s\"; %s%s%s", name,
                   search.best ? "did you mean " : "ndtrain tokenize --help lists them",
                   search.best ? search.best : "", search.best ? "?" : "");
}

/* A value that begins alike is given behind "=". */
static bool is_option(const char *text)
{
    const size_t size = strcspn(text, "=");
    for (int i = 0; i < OPTION_COUNT; i++) {
        const char *names[] = {options[i].name, options[i].also};
        for (int k = 0; k < 2; k++) {
            if (names[k] && strlen(names[k]) == size && strncmp(text, names[k], size) == 0) {
                return true;
            }
        }
    }
    return false;
}

static nd_status read_count(option which, const char *text, int64_t least, int64_t most,
                            int64_t *out)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno != 0 || value < least || value > most) {
        return nd_fail(ND_ERR_CONFIG, "%s is \"%.40s\"; it must be %lld to %lld",
                       options[which].name, text, (long long)least, (long long)most);
    }
    *out = value;
    return ND_OK;
}

/* The place of `text` in the list of the option's values. */
static nd_status read_choice(option which, const char *text, int *out)
{
    const char *list = options[which].value;
    size_t size = strlen(text);
    *out = 0;
    for (const char *p = list; *p; (*out)++) {
        size_t n = strcspn(p, "|");
        if (n == size && memcmp(p, text, n) == 0) {
            return ND_OK;
        }
        p += n + (p[n] == '|');
    }
    return nd_fail(ND_ERR_CONFIG, "%s is \"%.40s\"; it must be %s", options[which].name, text,
                   list);
}

static nd_status read_separator(nd_tokenize_call *call, const char *text)
{
    if (!*text) {
        return nd_fail(ND_ERR_CONFIG, "--document-separator is empty; give a text");
    }
    free(call->separator);
    call->separator = NULL;
    return nd_corpus_separator(text, &call->rules, &call->separator);
}

typedef struct parse {
    nd_tokenize_call *call;
    nd_data_format format;
    const char **inputs;
    int input_count;
    bool key_given;
} parse;

static nd_status apply(parse *p, option which, const char *value)
{
    static const nd_data_format formats[] = {ND_DATA_AUTO, ND_DATA_TEXT, ND_DATA_JSONL};
    static const nd_chat_format chats[] = {ND_CHAT_NONE, ND_CHAT_LLAMA3, ND_CHAT_CHATML};
    static const nd_special_in_text specials[] = {ND_SPECIAL_TEXT, ND_SPECIAL_PARSE,
                                                  ND_SPECIAL_REFUSE};
    nd_tokenize_call *call = p->call;
    int choice = 0;
    int64_t count = 0;
    switch (which) {
    case OPTION_TOKENIZER:
        call->tokenizer = value;
        break;
    case OPTION_INPUT:
        p->inputs[p->input_count++] = value;
        break;
    case OPTION_PREFIX:
        call->prefix = value;
        break;
    case OPTION_FORMAT:
        ND_TRY(read_choice(which, value, &choice));
        p->format = formats[choice];
        break;
    case OPTION_KEY:
        call->rules.json_key = value;
        p->key_given = true;
        break;
    case OPTION_CHAT:
        ND_TRY(read_choice(which, value, &choice));
        call->rules.chat = chats[choice];
        break;
    case OPTION_SEPARATOR:
        return read_separator(call, value);
    case OPTION_EOD:
        call->rules.append_eod = true;
        break;
    case OPTION_NO_SPECIAL:
        call->rules.add_special = false;
        break;
    case OPTION_SPECIAL_IN_TEXT:
        ND_TRY(read_choice(which, value, &choice));
        call->rules.special_in_text = specials[choice];
        break;
    case OPTION_INVALID:
        ND_TRY(read_choice(which, value, &choice));
        call->rules.refuse_invalid = choice == 1;
        break;
    case OPTION_DROP:
        call->rules.drop_unknown = true;
        break;
    case OPTION_SKIP:
        return read_count(which, value, 0, INT64_MAX, &call->skip_bad);
    case OPTION_THREADS:
        ND_TRY(read_count(which, value, 1, 64, &count));
        call->threads = (int)count;
        break;
    case OPTION_OVERWRITE:
        call->overwrite = true;
        break;
    case OPTION_COUNT:
        break;
    }
    return ND_OK;
}

/* "--name value", "--name=value", and for --input several values. */
static nd_status read_arguments(parse *p, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        char name[64];
        const char *equals = strchr(argv[i], '='), *value = equals ? equals + 1 : NULL;
        option which = OPTION_COUNT;
        if (strncmp(argv[i], "--", 2) != 0) {
            return nd_fail(ND_ERR_CONFIG,
                           "\"%.100s\" belongs to no option; files are named behind --input",
                           argv[i]);
        }
        size_t size = equals ? (size_t)(equals - argv[i]) : strlen(argv[i]);
        snprintf(name, sizeof name, "%.*s", (int)(size < 60 ? size : 60), argv[i]);
        ND_TRY(find_option(name, &which));
        if (!options[which].value && value) {
            return nd_fail(ND_ERR_CONFIG, "%s takes no value", name);
        }
        if (options[which].value && !value) {
            if (i + 1 == argc || is_option(argv[i + 1])) {
                return nd_fail(ND_ERR_CONFIG, "%s needs a value: %s", name, options[which].value);
            }
            value = argv[++i];
        }
        ND_TRY(apply(p, which, value));
        while (which == OPTION_INPUT && i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0) {
            ND_TRY(apply(p, which, argv[++i]));
        }
    }
    return ND_OK;
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

static nd_status check_given(const parse *p)
{
    const struct {
        option which;
        bool given;
    } needed[] = {{OPTION_TOKENIZER, p->call->tokenizer},
                  {OPTION_INPUT, p->input_count > 0},
                  {OPTION_PREFIX, p->call->prefix && p->call->prefix[0]}};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        if (!needed[i].given) {
            return nd_fail(ND_ERR_CONFIG, "%s is missing: %s", options[needed[i].which].name,
                           options[needed[i].which].help);
        }
    }
    return ND_OK;
}

nd_status nd_tokenize_parse(int argc, char **argv, nd_tokenize_call *out)
{
    parse p = {.call = out};
    nd_status status = ND_OK;
    *out = (nd_tokenize_call){.rules = {.json_key = "text", .add_special = true},
                              .threads = nd_corpus_threads()};
    for (int i = 1; i < argc; i++) {
        out->help |= strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0;
    }
    if (out->help) {
        return ND_OK;
    }
    ND_TRY_OUT(ND_ALLOC(argc, &p.inputs));
    ND_TRY_OUT(read_arguments(&p, argc, argv));
    ND_TRY_OUT(check_given(&p));
    ND_TRY_OUT(check_prefix(out->prefix));
    /* With a key of its own a row is a text, whatever other keys it has. */
    out->rules.pairs = !p.key_given || out->rules.chat != ND_CHAT_NONE;
    for (int i = 0; i < p.input_count; i++) {
        ND_TRY_OUT(nd_corpus_files_add(&out->files, p.inputs[i], p.format));
    }
out:
    free(p.inputs);
    return status;
}

void nd_tokenize_call_fini(nd_tokenize_call *call)
{
    nd_corpus_files_fini(&call->files);
    free(call->separator);
}
