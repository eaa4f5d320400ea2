// SPDX-License-Identifier: Apache-2.0
/* `ndtrain tokenize`: text and JSON lines to token files. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/process.h"
#include "trainer/commands/command.h"
#include "trainer/corpus/chat.h"
#include "trainer/corpus/corpus.h"
#include "trainer/corpus/token_file.h"

typedef struct tokenize_call {
    const char *tokenizer; /* a tokenizer.json or its folder */
    const char *prefix;    /* of the output */
    nd_corpus_files files;
    nd_corpus_rules rules; /* without those of `chat` */
    nd_chat_choice chat;
    char *separator; /* owned, as `files` is */
    int threads;
    int64_t skip_bad;
    bool overwrite;
} tokenize_call;

/* Flags. */

static nd_status read_separator(tokenize_call *call, const char *text)
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

static nd_status parse(const nd_command_flags *line, tokenize_call *out)
{
    static const nd_data_format formats[] = {ND_DATA_AUTO, ND_DATA_TEXT, ND_DATA_JSONL};
    const nd_flag_value *v = line->values, *threads = &v[ND_TOKENIZE_THREADS];
    const char *input;
    *out = (tokenize_call){.tokenizer = v[ND_TOKENIZE_TOKENIZER].text,
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

/* Signals. */

static atomic_bool stop;

static void on_signal(int signal_number)
{
    (void)signal_number;
    atomic_store(&stop, true);
}

static void catch_signals(void)
{
    const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    const struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        sigaction(signals[i], &action, NULL);
    }
}

/* Progress. */

typedef struct work {
    const tokenize_call *call;
    nd_megatron_output out;
    double begin;
    bool bar; /* standard error is a terminal */
} work;

static nd_status write_piece(void *context, const nd_corpus_piece *piece)
{
    work *w = context;
    return nd_megatron_output_write(&w->out, piece);
}

static void show_progress(void *context, uint64_t bytes)
{
    enum { CELLS = 30 };
    static const char full[] = "##############################";
    const work *w = context;
    char left[40] = "";
    double seconds = nd_clock_seconds() - w->begin, all = (double)w->call->files.bytes;
    double part = all > 0 ? (double)bytes / all : 1.0;
    int cells = (int)(part * CELLS);
    if (!w->bar || seconds <= 0) {
        return;
    }
    cells = cells > CELLS ? CELLS : cells;
    if (part > 0) {
        snprintf(left, sizeof left, "  %.0f s left", seconds * (1 - part) / part);
    }
    fprintf(stderr, "\r[%.*s%*s] %3.0f %%  %.1f MB/s%s \x1b[K", cells, full, CELLS - cells, "",
            100 * part, (double)bytes * 1e-6 / seconds, left);
    fflush(stderr);
}

static void clear_progress(const work *w)
{
    if (w->bar) {
        fprintf(stderr, "\r\x1b[K");
        fflush(stderr);
    }
}

/* The closing table. */

static const char *grouped(char text[32], int64_t n)
{
    char digits[24];
    int size = snprintf(digits, sizeof digits, "%lld", (long long)n), at = 0;
    for (int i = 0; i < size; i++) {
        if (i > 0 && (size - i) % 3 == 0) {
            text[at++] = ',';
        }
        text[at++] = digits[i];
    }
    text[at] = '\0';
    return text;
}

static void print_count(const char *what, int64_t n, const char *remark)
{
    char text[32];
    printf("  %-28s %16s  %s\n", what, grouped(text, n), remark);
}

static void print_table(const work *w, const nd_corpus_counts *c)
{
    const tokenize_call *call = w->call;
    const nd_encode_counts *t = &c->text;
    static const char *const special[] = {"kept as text", "became tokens", ""};
    double seconds = nd_clock_seconds() - w->begin;
    printf("%zu file%s, %.1f MB of text in %.2f s: %.1f MB/s, %.0f tokens/s, %d thread%s\n",
           call->files.count, call->files.count == 1 ? "" : "s", (double)t->bytes * 1e-6, seconds,
           (double)t->bytes * 1e-6 / seconds, (double)c->tokens / seconds, call->threads,
           call->threads == 1 ? "" : "s");
    print_count("documents", c->documents, "");
    print_count("tokens", c->tokens, "");
    if (c->ignored > 0) {
        char share[32];
        snprintf(share, sizeof share, "%.1f %%",
                 100.0 * (double)(c->tokens - c->ignored) / (double)c->tokens);
        print_count("tokens that count in loss", c->tokens - c->ignored, share);
    }
    printf("  %-28s %16.3f\n", "bytes per token",
           c->tokens > 0 ? (double)t->bytes / (double)c->tokens : 0.0);
    print_count("empty documents", c->empty, "left out");
    print_count("bad lines", c->bad, "left out");
    print_count("invalid bytes", t->invalid, "became U+FFFD");
    print_count("halves of surrogate pairs", c->lone, "became U+FFFD");
    print_count("characters without a piece", t->dropped, "left out");
    print_count("unknown tokens", t->unknown, "");
    print_count("special tokens met", t->special, special[call->rules.special_in_text]);
    if (c->doubled > 0) {
        print_count("documents that begin twice", c->doubled,
                    "the text begins with what is added: --no-special-tokens");
    }
    if (c->stray[0]) {
        printf("  messages have the key \"%s\", which nothing reads\n", c->stray);
    }
    if (call->files.skipped > 0) {
        print_count("files of other kinds", call->files.skipped, "not read");
    }
    if (call->files.folders > 0) {
        print_count("folders within", call->files.folders, "not read");
    }
    printf("%s.bin%s and .idx, %s ids; train with data.path: %s, data.tokenizer: file\n",
           call->prefix, c->ignored > 0 ? ", .mask" : "", w->out.bin.width == 2 ? "u16" : "i32",
           call->prefix);
}

/* The work. */

static nd_status check_output(const tokenize_call *call)
{
    static const char *const suffixes[] = {".bin", ".idx", ".mask"};
    for (int i = 0; i < 3; i++) {
        char *path = NULL;
        ND_TRY(nd_fs_format(&path, "%s%s", call->prefix, suffixes[i]));
        bool there = false;
        nd_status status = nd_fs_exists(path, &there);
        free(path);
        ND_TRY(status);
        if (there && !call->overwrite) {
            return nd_fail(
                ND_ERR_CANTCREATE,
                "\"%s%s\" is there already; give another --output-prefix, or --overwrite",
                call->prefix, suffixes[i]);
        }
    }
    return ND_OK;
}

static nd_status encode(work *w, const nd_tokenizer *tokenizer, const char *path)
{
    nd_corpus_counts counts = {0};
    nd_corpus_rules rules = w->call->rules;
    nd_corpus_job job = {.files = &w->call->files,
                         .rules = &rules,
                         .tokenizer = tokenizer,
                         .eod = -1,
                         .threads = w->call->threads,
                         .skip_bad = w->call->skip_bad,
                         .stop = &stop,
                         .context = w,
                         .write = write_piece,
                         .progress = show_progress};
    ND_TRY(nd_chat_rules_find(path, w->call->chat, &rules.chat));
    nd_chat_rules_tell(&rules.chat);
    if (w->call->rules.append_eod && !path) {
        return nd_fail(ND_ERR_CONFIG, "--tokenizer is bytes, which have no end of text; leave "
                                      "--append-eod out");
    }
    if (w->call->rules.append_eod) {
        ND_TRY(nd_corpus_eod(tokenizer, path, &job.eod));
    }
    nd_status status = nd_corpus_encode(&job, &counts);
    clear_progress(w);
    ND_TRY(status);
    if (counts.documents == 0) {
        return nd_fail(ND_ERR_DATA, "the input has no document with text in it");
    }
    ND_TRY(nd_megatron_output_commit(&w->out));
    print_table(w, &counts);
    return ND_OK;
}

/* A tokenizer.json, or NULL for bytes. *out is owned by the caller. */
static nd_status find_tokenizer(const char *path, char **out)
{
    nd_fs_kind kind;
    if (strcmp(path, "bytes") == 0) {
        *out = NULL;
        return ND_OK;
    }
    ND_TRY(nd_fs_look(path, &kind, NULL));
    if (kind == ND_FS_ABSENT) {
        return nd_fail(ND_ERR_CONFIG,
                       "--tokenizer \"%s\" does not exist; give bytes, or the path of a "
                       "tokenizer.json or of its folder",
                       path);
    }
    return nd_fs_format(out, kind == ND_FS_FOLDER ? "%s/tokenizer.json" : "%s", path);
}

static nd_status tokenize(const tokenize_call *call)
{
    work w = {.call = call, .begin = nd_clock_seconds(), .bar = isatty(STDERR_FILENO)};
    nd_tokenizer *tokenizer = NULL;
    char *path = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(check_output(call));
    ND_TRY_OUT(find_tokenizer(call->tokenizer, &path));
    ND_TRY_OUT(path ? nd_tokenizer_open(path, &tokenizer) : nd_byte_tokenizer_create(&tokenizer));
    ND_TRY_OUT(nd_megatron_output_open(call->prefix, nd_tokenizer_vocab_size(tokenizer), &w.out));
    ND_TRY_OUT(encode(&w, tokenizer, path));
out:
    nd_megatron_output_fini(&w.out);
    nd_tokenizer_close(tokenizer);
    free(path);
    return status;
}

nd_status nd_tokenize(const nd_command_flags *line, int *code)
{
    tokenize_call call = {0};
    (void)code;
    catch_signals();
    nd_status status = parse(line, &call);
    status = status == ND_OK ? tokenize(&call) : status;
    nd_corpus_files_fini(&call.files);
    free(call.separator);
    return status;
}
