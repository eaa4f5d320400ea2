// SPDX-License-Identifier: Apache-2.0
/* `ndtrain tokenize`: text and JSON lines to token files. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/text.h"
#include "trainer/commands/command.h"
#include "trainer/corpus/chat.h"
#include "trainer/corpus/corpus.h"
#include "trainer/corpus/token_file.h"

typedef struct work {
    const nd_flag_value *flags;
    const char *prefix; /* of the output */
    nd_corpus_files files;
    nd_corpus_rules rules;
    char *separator; /* owned, as `files` is */
    int threads;
    nd_token_files out;
    double begin, shown; /* when the bar was drawn */
    bool bar;            /* standard error is a terminal */
} work;

/* The rules but for those of --chat-format. Choices stand in the order of their enums. */
static nd_corpus_rules rules_of(const nd_flag_value *v)
{
    const nd_flag_value *key = &v[ND_TOKENIZE_KEY];
    const bool chat = v[ND_TOKENIZE_CHAT].whole != ND_CHOOSE_CHAT_NONE;
    return (nd_corpus_rules){.json_key = key->given ? key->text : "text",
                             /* With a key of its own a row is a text, whatever others it has. */
                             .pairs = !key->given || chat,
                             .append_eod = v[ND_TOKENIZE_EOD].given,
                             .add_special = !v[ND_TOKENIZE_NO_SPECIAL].given,
                             .special_in_text =
                                 (nd_special_in_text)v[ND_TOKENIZE_SPECIAL_IN_TEXT].whole,
                             .refuse_invalid = v[ND_TOKENIZE_INVALID].whole == 1,
                             .drop_unknown = v[ND_TOKENIZE_DROP].given};
}

static nd_status read_flags(const nd_command_flags *line, work *w)
{
    const nd_flag_value *v = line->values, *threads = &v[ND_TOKENIZE_THREADS];
    const char *input, *separator = v[ND_TOKENIZE_SEPARATOR].text;
    *w = (work){.flags = v,
                .prefix = v[ND_TOKENIZE_PREFIX].text,
                .rules = rules_of(v),
                .threads = threads->given ? (int)threads->whole : nd_corpus_threads(),
                .begin = nd_clock_seconds(),
                .bar = isatty(STDERR_FILENO)};
    /* PREFIX.bin would be a file that no scan finds. */
    ND_REFUSE(nd_ends_with(w->prefix, "/"),
              "--output-prefix \"%s\" is a folder; add the beginning of the files' names, as in "
              "\"%stext\"",
              w->prefix, w->prefix);
    ND_REFUSE(separator && !*separator, "--document-separator is empty; give a text");
    ND_TRY(separator ? nd_corpus_separator(separator, &w->rules, &w->separator) : ND_OK);
    for (int at = 0; (input = nd_command_flags_next(line, ND_TOKENIZE_INPUT, &at));) {
        ND_TRY(nd_corpus_files_add(&w->files, input, (nd_data_format)v[ND_TOKENIZE_FORMAT].whole));
    }
    return ND_OK;
}

static atomic_bool stop;

static void on_signal(int signal_number)
{
    (void)signal_number;
    atomic_store(&stop, true);
}

static void show_progress(work *w, uint64_t bytes)
{
    enum { CELLS = 30 };
    static const char full[] = "##############################";
    char left[40] = "";
    const double now = nd_clock_seconds(), seconds = now - w->begin;
    double all = (double)w->files.bytes, part = all > 0 ? (double)bytes / all : 1.0;
    int cells = (int)(part * CELLS);
    if (!w->bar || (now - w->shown < 0.2 && bytes < w->files.bytes) || seconds <= 0) {
        return;
    }
    w->shown = now;
    cells = cells > CELLS ? CELLS : cells;
    if (part > 0) {
        snprintf(left, sizeof left, "  %.0f s left", seconds * (1 - part) / part);
    }
    fprintf(stderr, "\r[%.*s%*s] %3.0f %%  %.1f MB/s%s \x1b[K", cells, full, CELLS - cells, "",
            100 * part, (double)bytes * 1e-6 / seconds, left);
    fflush(stderr);
}

static nd_status write_piece(void *context, const nd_corpus_piece *piece, uint64_t bytes)
{
    work *w = context;
    show_progress(w, bytes);
    return nd_token_files_write(&w->out, piece);
}

static void print_count(const char *what, int64_t n, const char *remark)
{
    char digits[24], text[32]; /* text: with a comma between thousands */
    int size = snprintf(digits, sizeof digits, "%lld", (long long)n), at = 0;
    for (int i = 0; i < size; i++) {
        if (i > 0 && (size - i) % 3 == 0) {
            text[at++] = ',';
        }
        text[at++] = digits[i];
    }
    printf("  %-28s %16.*s  %s\n", what, at, text, remark);
}

static void print_table(const work *w, const nd_corpus_counts *c)
{
    const nd_encode_counts *t = &c->text;
    static const char *const special[] = {"kept as text", "became tokens", ""};
    double seconds = nd_clock_seconds() - w->begin;
    printf("%zu file%s, %.1f MB of text in %.2f s: %.1f MB/s, %.0f tokens/s, %d thread%s\n",
           w->files.count, w->files.count == 1 ? "" : "s", (double)t->bytes * 1e-6, seconds,
           (double)t->bytes * 1e-6 / seconds, (double)c->tokens / seconds, w->threads,
           w->threads == 1 ? "" : "s");
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
    print_count("special tokens met", t->special, special[w->rules.special_in_text]);
    if (c->doubled > 0) {
        print_count("documents that begin twice", c->doubled,
                    "the text begins with what is added: --no-special-tokens");
    }
    if (c->stray[0]) {
        printf("  messages have the key \"%s\", which nothing reads\n", c->stray);
    }
    if (w->files.skipped > 0) {
        print_count("files of other kinds", w->files.skipped, "not read");
    }
    if (w->files.folders > 0) {
        print_count("folders within", w->files.folders, "not read");
    }
    printf("%s.bin%s and .idx, %s ids; train with data.path: %s, data.tokenizer: file\n", w->prefix,
           c->ignored > 0 ? ", .mask" : "", w->out.width == 2 ? "u16" : "i32", w->prefix);
}

static nd_status check_output(const work *w)
{
    static const char *const suffixes[] = {".bin", ".idx", ".mask"};
    for (int i = 0; i < 3 && !w->flags[ND_TOKENIZE_OVERWRITE].given; i++) {
        char *path = NULL;
        bool there = false;
        ND_TRY(nd_fs_format(&path, "%s%s", w->prefix, suffixes[i]));
        nd_status status = nd_fs_exists(path, &there);
        free(path);
        ND_TRY(status);
        if (there) {
            return nd_fail(
                ND_ERR_CANTCREATE,
                "\"%s%s\" is there already; give another --output-prefix, or --overwrite",
                w->prefix, suffixes[i]);
        }
    }
    return ND_OK;
}

static nd_status encode(work *w, const nd_tokenizer *tokenizer, const char *path)
{
    nd_corpus_counts counts = {0};
    nd_corpus_job job = {.files = &w->files,
                         .rules = &w->rules,
                         .tokenizer = tokenizer,
                         .eod = -1,
                         .threads = w->threads,
                         .skip_bad = w->flags[ND_TOKENIZE_SKIP].whole,
                         .stop = &stop,
                         .context = w,
                         .write = write_piece};
    const nd_chat_choice chat = (nd_chat_choice)w->flags[ND_TOKENIZE_CHAT].whole;
    ND_TRY(nd_chat_rules_find(path, chat, &w->rules.chat));
    nd_chat_rules_tell(&w->rules.chat);
    ND_REFUSE(w->rules.append_eod && !path,
              "--tokenizer is bytes, which have no end of text; leave --append-eod out");
    ND_TRY(w->rules.append_eod ? nd_corpus_eod(tokenizer, path, &job.eod) : ND_OK);
    nd_status status = nd_corpus_encode(&job, &counts);
    if (w->bar) {
        fprintf(stderr, "\r\x1b[K");
        fflush(stderr);
    }
    ND_TRY(status);
    if (counts.documents == 0) {
        return nd_fail(ND_ERR_DATA, "the input has no document with text in it");
    }
    ND_TRY(nd_token_files_commit(&w->out));
    print_table(w, &counts);
    return ND_OK;
}

nd_status nd_tokenize(const nd_command_flags *line)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    const struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    work w;
    nd_tokenizer *tokenizer = NULL;
    char *path = NULL; /* of the tokenizer.json; NULL: bytes */
    nd_fs_kind kind = ND_FS_FILE;
    nd_status status = ND_OK;
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        sigaction(signals[i], &action, NULL);
    }
    ND_TRY_OUT(read_flags(line, &w));
    const char *named = w.flags[ND_TOKENIZE_TOKENIZER].text;
    ND_TRY_OUT(check_output(&w));
    if (strcmp(named, "bytes") != 0) {
        ND_TRY_OUT(nd_fs_look(named, &kind, NULL));
        ND_TRY_OUT(nd_fs_format(&path, kind == ND_FS_FOLDER ? "%s/tokenizer.json" : "%s", named));
    }
    if (kind == ND_FS_FILE && nd_ends_with(named, ".gguf")) {
        status =
            nd_fail(ND_ERR_CONFIG,
                    "--tokenizer \"%s\" is a GGUF file, whose tokenizer is not read here; give "
                    "the tokenizer.json of its model",
                    named);
        goto out;
    }
    if (kind == ND_FS_ABSENT) {
        status = nd_fail(ND_ERR_CONFIG,
                         "--tokenizer \"%s\" does not exist; give bytes, or the path of a "
                         "tokenizer.json or of its folder",
                         named);
        goto out;
    }
    ND_TRY_OUT(path ? nd_tokenizer_open(path, &tokenizer) : nd_byte_tokenizer_create(&tokenizer));
    ND_TRY_OUT(nd_token_files_open(w.prefix, nd_tokenizer_vocab_size(tokenizer), NULL, &w.out));
    status = encode(&w, tokenizer, path);
out:
    nd_token_files_fini(&w.out);
    nd_tokenizer_close(tokenizer);
    free(path);
    nd_corpus_files_fini(&w.files);
    free(w.separator);
    return status;
}
