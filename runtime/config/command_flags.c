// SPDX-License-Identifier: Apache-2.0
#include "runtime/config/command_flags.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/suggest.h"
#include "runtime/config/reader.h"

enum { NAMES_MAX = 32 };

/* A model that is used stands on each replica whole, on the CPU; what a configuration file says of
 * shards and devices is about training. */
static const char *const use_settings[] = {
    "--device", "cpu", "--dp-shard-size", "1", "--dp-replicate-size", "-1", NULL};

static const char *const no_settings[] = {NULL};

static const nd_command_flag generate_list[ND_GENERATE_FLAGS] = {
    [ND_GENERATE_MODEL] =
        {"--model", "PATH",
         "a model's folder, a run folder, a checkpoint, or ORG/NAME in the cache"},
    [ND_GENERATE_TOKENIZER] =
        {"--tokenizer", "PATH",
         "a tokenizer.json or its folder, bytes, or file (ids only); the model's if not given"},
    [ND_GENERATE_PROMPT] = {"--prompt", "TEXT", "the text to continue"},
    [ND_GENERATE_PROMPT_FILE] =
        {"--prompt-file", "FILE",
         "a file with it, - for standard input, which is read if there is no "
         "prompt; .jsonl: one prompt a line"},
    [ND_GENERATE_JSONL] = {"--jsonl", NULL,
                           "the output is JSON lines, and so is the file, or standard input"},
    [ND_GENERATE_INTERACTIVE] = {"--interactive", NULL,
                                 "reads line after line from the terminal, each a prompt; with "
                                 "--chat a conversation"},
    [ND_GENERATE_CONTEXT] = {"--context", "N",
                             "--interactive: tokens of a prompt with its text at most; 4096, or "
                             "what the model has"},
    [ND_GENERATE_CHAT] =
        {"--chat", NULL,
         "the prompt is a user's message; in the form of --chat-format, or the one that "
         "the tokenizer has tokens for"},
    [ND_GENERATE_MAX_NEW] = {"--max-new-tokens", "N",
                             "tokens of a text at most; 128, or the model's room"},
    [ND_GENERATE_TEMPERATURE] = {"--temperature", "T", "0: the likeliest token each time; 0"},
    [ND_GENERATE_TOP_K] = {"--top-k", "K", "draw among the K likeliest; 0: all"},
    [ND_GENERATE_TOP_P] = {"--top-p", "P",
                           "draw among the likeliest that together reach P; 1: all"},
    [ND_GENERATE_MIN_P] = {"--min-p", "P",
                           "draw among those with P times the greatest probability; 0"},
    [ND_GENERATE_STOP] = {"--stop", "TEXT", "ends a text before it; may be given several times"},
    [ND_GENERATE_IGNORE_EOS] = {"--ignore-eos", NULL, "end tokens are tokens like any other"},
    [ND_GENERATE_BATCH] = {"--max-batch", "N", "texts of a replica at once at most; 32"},
    [ND_GENERATE_ROWS] = {"--prefill-chunk", "N", "tokens of one call of the model at most; 512"},
};

static const nd_command_flag eval_list[ND_EVAL_FLAGS] = {
    [ND_EVAL_MODEL] = {"--model", "PATH",
                       "a model's folder, a run folder, a checkpoint, or ORG/NAME in the cache"},
    [ND_EVAL_TOKENIZER] =
        {"--tokenizer", "PATH",
         "a tokenizer.json or its folder, bytes, or file (ids only); the model's if not given"},
    [ND_EVAL_DATA] = {"--data", "FILE", "a data file, as data.path; may be given several times"},
    [ND_EVAL_REQUESTS] = {"--requests", "FILE",
                          "JSON lines with \"context\", \"choices\" and \"gold\""},
    [ND_EVAL_SERVE] = {"--serve-stdin", NULL,
                       "answers each line of standard input, a request, with a line of JSON"},
    [ND_EVAL_CONTEXT] = {"--context", "N",
                         "--serve-stdin: tokens of context and choice at most; 4096, or what the "
                         "model has"},
    [ND_EVAL_JSONL] = {"--jsonl", NULL, "the output is JSON lines; of requests one for each"},
    [ND_EVAL_ADD_SPECIAL] = {"--add-special-tokens", NULL,
                             "requests: texts have what the post-processor adds, as a beginning of "
                             "text"},
    [ND_EVAL_ROWS] = {"--prefill-chunk", "N", "requests: tokens of one call of the model; 512"},
};

static const nd_command_flag bench_list[ND_BENCH_FLAGS] = {
    [ND_BENCH_PRODUCTS] = {"--products", NULL,
                           "times single linears: those of the model, or of --sizes"},
    [ND_BENCH_LAYER] = {"--layer", NULL, "times one layer of the model on the mesh"},
    [ND_BENCH_SIZES] = {"--sizes", "LIST",
                        "--products: MxKxN,...: tokens x inputs x outputs of a linear"},
    [ND_BENCH_REPEATS] = {"--repeats", "N", "--layer: repeats, of which the median counts; 9"},
    [ND_BENCH_JSONL] = {"--jsonl", NULL, "the output is JSON lines, in seconds"},
};

static const nd_command_refusal generate_refused[] = {
    {"max-tokens max-length max-new", "new tokens are counted by --max-new-tokens"},
    {"do-sample", "a --temperature above 0 draws tokens; without it the likeliest one is taken"},
    {"batch-size micro-batch-size per-device-train-batch-size",
     "texts of a replica at once are --max-batch"},
    {"sequence-length seq-length", "the room follows from the prompt and --max-new-tokens; of "
                                   "--interactive it is --context"},
    {"lr learning-rate num-steps max-steps num-train-epochs gradient-accumulation-steps "
     "warmup-steps weight-decay",
     "it is about training, and has no effect here; leave it out"},
    {"num-beams repetition-penalty num-return-sequences",
     "it does not exist here; tokens are chosen by --temperature, --top-k, --top-p and --min-p"},
    {NULL, NULL}};

const nd_command_flags nd_generate_flags = {
    "generate", generate_list, ND_GENERATE_FLAGS, use_settings, -1, generate_refused};
const nd_command_flags nd_eval_flags = {"eval", eval_list, ND_EVAL_FLAGS, use_settings,
                                        ND_EVAL_DATA};

const nd_command_flags nd_bench_flags = {"bench", bench_list, ND_BENCH_FLAGS, no_settings, -1};

const nd_command_flags *nd_command_flags_find(const char *command)
{
    static const nd_command_flags *const all[] = {&nd_generate_flags, &nd_eval_flags,
                                                  &nd_bench_flags};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (strcmp(all[i]->command, command) == 0) {
            return all[i];
        }
    }
    return NULL;
}

/* Commands of the programs. */

static const char *const launcher_commands[] = {"config", "env", "generate", "eval", "bench", NULL};
static const char *const trainer_commands[] = {"train", "check",    "plan",   "generate", "eval",
                                               "ckpt",  "tokenize", "report", "bench",    NULL};

static bool has(const char *const *words, const char *word)
{
    for (; *words; words++) {
        if (strcmp(*words, word) == 0) {
            return true;
        }
    }
    return false;
}

nd_status nd_command_check_name(const char *program, const char *word)
{
    const bool launches = strcmp(program, "ndlaunch") == 0;
    const char *const *own = launches ? launcher_commands : trainer_commands;
    const char *const *others = launches ? trainer_commands : launcher_commands;
    const char *other = launches ? "ndtrain" : "ndlaunch";
    nd_suggest search;
    if (launches && strcmp(word, "train") == 0) {
        return nd_fail(ND_ERR_CONFIG, "ndlaunch starts `ndtrain train` itself; leave out the word "
                                      "train");
    }
    if (has(others, word)) {
        return nd_fail(ND_ERR_CONFIG, "%s has no command \"%s\"; it is `%s %s`", program, word,
                       other, word);
    }
    nd_suggest_init(&search, word);
    for (int i = 0; own[i]; i++) {
        nd_suggest_offer(&search, own[i]);
    }
    const int distance = search.distance;
    for (int i = 0; others[i]; i++) {
        nd_suggest_offer(&search, others[i]);
    }
    return search.best
               ? nd_fail(ND_ERR_CONFIG, "%s has no command \"%.60s\"; did you mean `%s %s`?",
                         program, word, search.distance < distance ? other : program, search.best)
               : ND_OK;
}

static bool same_name(const char *name, const char *word, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        char c = word[i] == '_' ? '-' : word[i];
        if (c != name[i]) { /* also at the end of the name */
            return false;
        }
    }
    return name[size] == '\0';
}

/* The flag of a word "--name" or "--name=value"; -1: it is none of the table. */
static int find(const nd_command_flags *flags, const char *word, const char **value)
{
    const char *equals = strchr(word, '=');
    size_t size = equals ? (size_t)(equals - word) : strlen(word);
    *value = equals ? equals + 1 : NULL;
    for (int i = 0; i < flags->count; i++) {
        if (same_name(flags->list[i].name, word, size)) {
            return i;
        }
    }
    return -1;
}

nd_status nd_command_flags_read(const nd_command_flags *flags, int argc, char **argv,
                                nd_command_flag_apply *apply, void *context)
{
    for (int i = 1; i < argc; i++) {
        const char *value;
        int number = find(flags, argv[i], &value);
        if (number < 0) {
            continue;
        }
        const nd_command_flag *flag = &flags->list[number];
        if (!flag->value && value) {
            return nd_fail(ND_ERR_CONFIG, "%s takes no value", flag->name);
        }
        if (flag->value && !value) {
            if (i + 1 == argc) {
                return nd_fail(ND_ERR_CONFIG, "%s needs a value: %s", flag->name, flag->value);
            }
            value = argv[++i];
        }
        ND_TRY(apply(context, number, value));
    }
    return ND_OK;
}

static bool has_flag(const nd_command_flags *flags, int number, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *value;
        int at = find(flags, argv[i], &value);
        if (at == number) {
            return true;
        }
        i += at >= 0 && flags->list[at].value && !value;
    }
    return false;
}

/* ND_ERR_CONFIG when the word is one of the refusal's flags. */
static nd_status check_refused(const nd_command_refusal *refusal, const char *word)
{
    char name[ND_FLAG_NAME_MAX];
    const size_t size = strcspn(word, "=");
    if (strncmp(word, "--", 2) != 0) {
        return ND_OK;
    }
    for (int i = 0; nd_flag_list_word(refusal->names, i, name, sizeof name); i++) {
        if (same_name(name, word + 2, size - 2)) {
            return nd_fail(ND_ERR_CONFIG, "--%s: %s", name, refusal->sentence);
        }
    }
    return ND_OK;
}

/* A word that is none of the command's flags. */
static nd_status check_setting(const nd_command_flags *flags, const char *word)
{
    const char *names[NAMES_MAX + 1] = {NULL};
    char otherwise[80];
    ND_ASSERT(flags->count <= NAMES_MAX);
    for (const nd_command_refusal *r = flags->refused; r && r->names; r++) {
        ND_TRY(check_refused(r, word));
    }
    for (int i = 0; i < flags->count; i++) {
        names[i] = flags->list[i].name + 2;
    }
    snprintf(otherwise, sizeof otherwise, "ndtrain %s --help lists those of the command, ",
             flags->command);
    return nd_flags_check(word, names, otherwise);
}

nd_status nd_command_flags_split(const nd_command_flags *flags, int argc, char **argv, bool own,
                                 char ***out, int *count)
{
    const char *const *settings = flags->settings;
    int settings_count = 0, n = 0;
    while (settings[settings_count]) {
        settings_count++;
    }
    for (int i = 1; i < argc && !own; i++) {
        const char *value;
        int at = find(flags, argv[i], &value);
        ND_TRY(at < 0 ? check_setting(flags, argv[i]) : ND_OK);
        i += at >= 0 && flags->list[at].value && !value;
    }
    ND_TRY(ND_ALLOC(argc + settings_count + 1, out));
    (*out)[n++] = argv[0];
    if (!own &&
        (flags->settings_unless < 0 || !has_flag(flags, flags->settings_unless, argc, argv))) {
        for (int i = 0; i < settings_count; i++) {
            (*out)[n++] = (char *)settings[i];
        }
    }
    for (int i = 1; i < argc; i++) {
        const char *value;
        int at = find(flags, argv[i], &value);
        if ((at >= 0) == own) {
            (*out)[n++] = argv[i];
        }
        if (at >= 0 && flags->list[at].value && !value && i + 1 < argc) { /* the next word is it */
            i++;
            if (own) {
                (*out)[n++] = argv[i];
            }
        }
    }
    *count = n;
    return ND_OK;
}

void nd_command_flags_print(const nd_command_flags *flags)
{
    for (int i = 0; i < flags->count; i++) {
        const nd_command_flag *f = &flags->list[i];
        char name[64];
        snprintf(name, sizeof name, "%s%s%s", f->name, f->value ? " " : "",
                 f->value ? f->value : "");
        printf("  %-26s %s\n", name, f->help);
    }
}

nd_status nd_command_flag_whole(const nd_command_flag *flag, const char *value, int64_t least,
                                int64_t *out)
{
    char *end;
    errno = 0;
    long long number = strtoll(value, &end, 10);
    if (end == value || *end || errno != 0 || number < least) {
        return nd_fail(ND_ERR_CONFIG, "%s is \"%.40s\"; it must be a whole number of at least %lld",
                       flag->name, value, (long long)least);
    }
    *out = number;
    return ND_OK;
}

nd_status nd_command_flag_real(const nd_command_flag *flag, const char *value, double *out)
{
    char *end;
    double number = strtod(value, &end);
    if (end == value || *end || !isfinite(number)) {
        return nd_fail(ND_ERR_CONFIG, "%s is \"%.40s\"; it must be a number", flag->name, value);
    }
    *out = number;
    return ND_OK;
}
