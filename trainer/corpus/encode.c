// SPDX-License-Identifier: Apache-2.0
/*
 * Threads that encode blocks. A thread takes the next block under the lock of the reader, encodes
 * it, waits until all earlier blocks are written, and writes its own. So a failure is that of the
 * earliest block that fails, whatever the threads do.
 */
#include <math.h>
#include <sched.h>

#include "runtime/base/clock.h"
#include "runtime/base/thread.h"
#include "trainer/corpus/blocks.h"
#include "trainer/corpus/chat.h"
#include "trainer/corpus/row.h"

enum { THREADS_MAX = 64, PROGRESS_MS = 200 };

typedef struct crew {
    const nd_corpus_job *job;
    nd_chat chat;
    pthread_mutex_t read_lock;
    nd_block_reader reader;
    bool exhausted; /* by read_lock: the reader has no more blocks, or failed */

    nd_monitor monitor; /* guards what follows */
    int64_t turn;       /* the block that is written next */
    uint64_t bytes;     /* of the files that were read */
    int running;        /* threads */
    bool failed;
    nd_error error;
    nd_corpus_counts counts;
} crew;

typedef struct worker {
    crew *crew;
    nd_thread thread;
    nd_encoder *encoder;
    nd_corpus_block block;
    nd_corpus_piece piece;
    nd_bytes strings[2];
    size_t column;           /* of the fault of a row; 0: it has none */
    nd_ids bad;              /* rows of the block, by their places in it */
    nd_corpus_counts counts; /* of all blocks; `text` comes from the encoder */
} worker;

/* Pieces. */

static nd_status add_ids(worker *w, const uint8_t *text, size_t size, bool begins, bool ends)
{
    const int32_t *ids;
    size_t count;
    ND_TRY(nd_encode_part(w->encoder, (const char *)text, size, begins, ends, &ids, &count));
    if (begins && w->crew->job->rules->add_special) {
        w->counts.doubled += nd_tokenizer_begins_twice(w->crew->job->tokenizer, ids, count);
    }
    return nd_ids_add(&w->piece.ids, ids, count);
}

/* The ids of a chat have their own end, and so have those that end with the end of text, which the
 * text or the tokenizer's post-processor has given them. */
static nd_status end_document(worker *w, bool chat)
{
    const nd_corpus_job *job = w->crew->job;
    const nd_ids *ids = &w->piece.ids;
    const bool ended = ids->count > 0 && ids->data[ids->count - 1] == job->eod;
    ND_TRY(nd_ids_add(&w->piece.ids, &job->eod, job->eod >= 0 && !chat && !ended));
    int32_t end = (int32_t)w->piece.ids.count;
    return nd_ids_add(&w->piece.ends, &end, 1);
}

enum {
    FIELD_TEXT,
    FIELD_PROMPT,
    FIELD_COMPLETION,
    FIELD_MESSAGES,
    FIELD_TOOLS,
    FIELD_CONVERSATIONS,
    FIELDS
};

static nd_status check_field(const nd_row_field *field)
{
    if (field->kind == ND_ROW_STRING) {
        return ND_OK;
    }
    return nd_fail(
        ND_ERR_DATA, "\"%s\" %s", field->key,
        field->kind == ND_ROW_ABSENT
            ? "is missing; name the key of the text with --json-key (data.json_key), give rows of "
              "\"prompt\" and \"completion\", or of \"messages\" with \"role\" and \"content\", "
              "or leave N rows out with --skip-bad N (data.skip_bad)"
            : "is not a string");
}

static nd_status add_pair(worker *w, const nd_row_field *fields)
{
    const uint8_t *text[2];
    size_t size[2];
    int32_t span[2] = {(int32_t)w->piece.ids.count};
    for (int i = 0; i < 2; i++) {
        ND_TRY(nd_row_text(&fields[FIELD_PROMPT + i], &w->strings[i], &text[i], &size[i],
                           &w->counts.lone));
    }
    if (size[0] + size[1] == 0) {
        w->counts.empty++;
        return ND_OK;
    }
    ND_TRY(add_ids(w, text[0], size[0], true, false));
    span[1] = (int32_t)w->piece.ids.count;
    ND_TRY(nd_ids_add(&w->piece.spans, span, span[1] > span[0] ? 2 : 0));
    ND_TRY(add_ids(w, text[1], size[1], false, true));
    return end_document(w, false);
}

static nd_status add_messages(worker *w, const nd_row_field *field, const nd_row_field *tools)
{
    bool empty;
    if (!nd_row_is_empty(tools)) {
        return nd_fail(
            ND_ERR_DATA,
            "it has \"tools\", which data.chat_format (--chat-format) does not write; "
            "write it with the chat template of the tokenizer, as scripts/encode_rows.py "
            "does");
    }
    if (field->kind != ND_ROW_ARRAY) {
        return nd_fail(ND_ERR_DATA, "\"messages\" is not a list");
    }
    ND_TRY(nd_chat_add(&w->crew->chat, w->encoder, field->begin, field->size, &w->piece, &w->counts,
                       &empty));
    w->counts.empty += empty;
    return empty ? ND_OK : end_document(w, true);
}

static nd_status add_text(worker *w, const nd_row_field *field)
{
    const uint8_t *text;
    size_t size;
    ND_TRY(nd_row_text(field, &w->strings[0], &text, &size, &w->counts.lone));
    if (size == 0) {
        w->counts.empty++;
        return ND_OK;
    }
    ND_TRY(add_ids(w, text, size, true, true));
    return end_document(w, false);
}

/* A row may have other keys than those that it is encoded from: with data.chat_format, messages go
 * before a text or prompt that was made of them. */
static nd_status add_row(worker *w, const uint8_t *row, size_t size)
{
    const nd_corpus_rules *rules = w->crew->job->rules;
    nd_row_field fields[FIELDS] = {{.key = rules->json_key}, {.key = "prompt"},
                                   {.key = "completion"},    {.key = "messages"},
                                   {.key = "tools"},         {.key = "conversations"}};
    const char *fault = nd_row_scan(row, size, fields, rules->pairs ? FIELDS : 1, &w->column);
    if (fault) {
        return nd_fail(ND_ERR_DATA, "%s", fault);
    }
    w->column = 0;
    bool text = fields[FIELD_TEXT].kind != ND_ROW_ABSENT;
    bool pair = fields[FIELD_PROMPT].kind != ND_ROW_ABSENT ||
                fields[FIELD_COMPLETION].kind != ND_ROW_ABSENT;
    bool messages = fields[FIELD_MESSAGES].kind != ND_ROW_ABSENT;
    bool whole_pair = fields[FIELD_PROMPT].kind != ND_ROW_ABSENT &&
                      fields[FIELD_COMPLETION].kind != ND_ROW_ABSENT;
    if (messages && w->crew->chat.rules.template) {
        return add_messages(w, &fields[FIELD_MESSAGES], &fields[FIELD_TOOLS]);
    }
    if (text && pair) {
        return nd_fail(ND_ERR_DATA,
                       "it has a text and also \"prompt\" or \"completion\"; leave one form out%s",
                       strcmp(w->crew->job->rules->json_key, "text") == 0
                           ? ", or take the text with --json-key (data.json_key)"
                           : "");
    }
    if (messages && !text && !whole_pair) {
        return nd_fail(ND_ERR_DATA,
                       "it has \"messages\"%s; set data.chat_format to llama3, chatml or model "
                       "(--chat-format)",
                       pair ? ", and only one of \"prompt\" and \"completion\"" : "");
    }
    if (!pair && !text && fields[FIELD_CONVERSATIONS].kind != ND_ROW_ABSENT) {
        return nd_fail(ND_ERR_DATA,
                       "it has \"conversations\"; rename this key to \"messages\", \"from\" to "
                       "\"role\", \"value\" to \"content\", and the roles human and gpt to user "
                       "and assistant");
    }
    if (!pair) {
        ND_TRY(check_field(&fields[FIELD_TEXT]));
        return add_text(w, &fields[FIELD_TEXT]);
    }
    ND_TRY(check_field(&fields[FIELD_PROMPT]));
    ND_TRY(check_field(&fields[FIELD_COMPLETION]));
    return add_pair(w, fields);
}

/* The same; after an error the piece and all counts are as they were. */
static nd_status try_row(worker *w, const uint8_t *row, size_t size)
{
    const nd_corpus_piece before = w->piece;
    const nd_corpus_counts counts = w->counts;
    const nd_encode_counts text = *nd_encoder_counts(w->encoder);
    /* A chat goes on with the last span when its own first one is adjacent. */
    const int32_t last = before.spans.count > 0 ? before.spans.data[before.spans.count - 1] : 0;
    w->column = 0;
    nd_status status = add_row(w, row, size);
    if (status != ND_OK) {
        nd_encoder_set_counts(w->encoder, &text);
        w->piece.ids.count = before.ids.count;
        w->piece.ends.count = before.ends.count;
        w->piece.spans.count = before.spans.count;
        if (before.spans.count > 0) {
            w->piece.spans.data[before.spans.count - 1] = last;
        }
        w->counts = counts;
    }
    return status;
}

/* An error of a row gets its file and line, and says so when it is one too many. */
static nd_status fail_row(const worker *w, nd_status status, uint64_t line)
{
    const nd_error error = *nd_error_last();
    const char *path = w->block.file->path;
    const int64_t skip = w->crew->job->skip_bad;
    char column[32] = "";
    if (status != ND_ERR_DATA) {
        return nd_fail_context(status, "encoding \"%s\" line %llu", path, (unsigned long long)line);
    }
    if (w->column > 0) {
        snprintf(column, sizeof column, ", column %zu", w->column);
    }
    nd_fail(status, "\"%s\" line %llu%s: %s", path, (unsigned long long)line, column,
            error.message);
    return skip == 0
               ? status
               : nd_fail_context(status,
                                 "leaving out %lld other bad row%s, as many as may be left out",
                                 (long long)skip, skip == 1 ? "" : "s");
}

static bool is_blank(const uint8_t *p, size_t size)
{
    while (size > 0 && (*p == ' ' || *p == '\t' || *p == '\r')) {
        p++;
        size--;
    }
    return size == 0;
}

/* Rows from `at` on; *bad is the place of the one that fails. */
static nd_status add_rows(worker *w)
{
    const nd_bytes *text = &w->block.text;
    uint64_t line = w->block.line;
    for (size_t at = 0, n; at < text->count; at += n + 1, line++) {
        const uint8_t *row = text->data + at;
        const uint8_t *newline = memchr(row, '\n', text->count - at);
        n = newline ? (size_t)(newline - row) : text->count - at;
        if (is_blank(row, n)) {
            continue;
        }
        nd_status status = try_row(w, row, n);
        if (status == ND_ERR_DATA && (int64_t)w->bad.count < w->crew->job->skip_bad) {
            int32_t place = (int32_t)at;
            ND_TRY(nd_ids_add(&w->bad, &place, 1));
        } else if (status != ND_OK) {
            return fail_row(w, status, line);
        }
    }
    return ND_OK;
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

static nd_status add_documents(worker *w)
{
    const nd_corpus_rules *rules = w->crew->job->rules;
    const nd_bytes *text = &w->block.text;
    if (!rules->separator) {
        ND_TRY(add_ids(w, text->data, text->count, w->block.begins, w->block.ends));
        return w->block.ends ? end_document(w, false) : ND_OK;
    }
    for (size_t at = 0, n; at < text->count; at += n + rules->separator_size) {
        const uint8_t *p = text->data + at;
        const uint8_t *end = memmem(p, text->count - at, rules->separator, rules->separator_size);
        n = end ? (size_t)(end - p) : text->count - at;
        if (n == 0) {
            w->counts.empty++;
            continue;
        }
        ND_TRY(add_ids(w, p, n, true, true));
        ND_TRY(end_document(w, false));
    }
    return ND_OK;
}

static nd_status encode_block(worker *w)
{
    if (w->block.file->rows) {
        return add_rows(w);
    }
    nd_status status = add_documents(w);
    return status == ND_OK
               ? status
               : nd_fail_context(status, "encoding \"%s\" from line %llu on", w->block.file->path,
                                 (unsigned long long)w->block.line);
}

/* Blocks. */

/* The row that is one too many: gives its own error again, which was not kept. */
static nd_status fail_bad_row(worker *w, int32_t place)
{
    const uint8_t *text = w->block.text.data;
    uint64_t line = w->block.line;
    ND_ASSERT(place >= 0 && (size_t)place < w->block.text.count);
    const uint8_t *row = text + place;
    const uint8_t *newline = memchr(row, '\n', w->block.text.count - (size_t)place);
    size_t size = newline ? (size_t)(newline - row) : w->block.text.count - (size_t)place;
    for (int32_t i = 0; i < place; i++) {
        line += text[i] == '\n';
    }
    nd_status status = try_row(w, row, size);
    ND_ASSERT(status != ND_OK);
    return fail_row(w, status, line);
}

/* In the block's turn, with the lock held. */
static nd_status write_block(worker *w, nd_status status)
{
    crew *c = w->crew;
    int64_t left = c->job->skip_bad - c->counts.bad;
    if ((int64_t)w->bad.count > left) {
        return fail_bad_row(w, w->bad.data[left]);
    }
    ND_TRY(status);
    c->counts.bad += (int64_t)w->bad.count;
    c->counts.documents += (int64_t)w->piece.ends.count;
    c->counts.tokens += (int64_t)w->piece.ids.count;
    for (size_t i = 0; i < w->piece.spans.count; i += 2) {
        c->counts.ignored += w->piece.spans.data[i + 1] - w->piece.spans.data[i];
    }
    return c->job->write(c->job->context, &w->piece);
}

static void note_failure(crew *c)
{
    if (!c->failed) {
        c->failed = true;
        c->error = *nd_error_last();
    }
}

/* False: there is no block for this thread. A reader that fails has the next turn. */
static bool take_block(worker *w, nd_status *status)
{
    crew *c = w->crew;
    bool end = true;
    /* Or a reader that fails would be blamed on bad rows of the block before. */
    w->piece.ids.count = w->piece.ends.count = w->piece.spans.count = w->bad.count = 0;
    pthread_mutex_lock(&c->read_lock);
    if (!c->exhausted) {
        w->block.number = c->reader.number;
        *status = nd_block_reader_next(&c->reader, &w->block, &end);
        c->exhausted = end || *status != ND_OK;
        end = end && *status == ND_OK;
    }
    uint64_t bytes = nd_block_reader_bytes(&c->reader);
    pthread_mutex_unlock(&c->read_lock);
    nd_monitor_lock(&c->monitor);
    c->bytes = bytes > c->bytes ? bytes : c->bytes;
    nd_monitor_unlock(&c->monitor);
    return !end;
}

/* False: the work ends early. */
static bool finish_block(worker *w, nd_status status)
{
    crew *c = w->crew;
    nd_monitor_lock(&c->monitor);
    while (!c->failed && c->turn != w->block.number) {
        nd_monitor_wait(&c->monitor, ND_CLOCK_NEVER);
    }
    bool goes_on = !c->failed;
    if (goes_on && c->job->stop && atomic_load(c->job->stop)) {
        status = nd_fail(ND_ERR_PREEMPTED, "stopped by a signal");
    }
    if (goes_on && (status == ND_ERR_PREEMPTED || write_block(w, status) != ND_OK)) {
        note_failure(c);
        goes_on = false;
    }
    c->turn += goes_on;
    nd_monitor_tell(&c->monitor);
    nd_monitor_unlock(&c->monitor);
    return goes_on;
}

static void add_counts(nd_corpus_counts *to, const worker *w)
{
    const nd_encode_counts *text = nd_encoder_counts(w->encoder);
    to->empty += w->counts.empty;
    to->lone += w->counts.lone;
    to->doubled += w->counts.doubled;
    if (!to->stray[0]) {
        memcpy(to->stray, w->counts.stray, sizeof to->stray);
    }
    to->text.texts += text->texts;
    to->text.bytes += text->bytes;
    to->text.ids += text->ids;
    to->text.invalid += text->invalid;
    to->text.dropped += text->dropped;
    to->text.unknown += text->unknown;
    to->text.special += text->special;
}

static void work(void *context)
{
    worker *w = context;
    crew *c = w->crew;
    nd_status status = ND_OK;
    while (take_block(w, &status)) {
        if (status == ND_OK) {
            status = encode_block(w);
        }
        if (!finish_block(w, status)) {
            break;
        }
    }
    nd_monitor_lock(&c->monitor);
    add_counts(&c->counts, w);
    c->running--;
    nd_monitor_tell(&c->monitor);
    nd_monitor_unlock(&c->monitor);
}

/* The calling thread. */

static nd_status start(crew *c, worker *w)
{
    const nd_corpus_rules *rules = c->job->rules;
    const nd_encode_options options = {.special_in_text = rules->special_in_text,
                                       .post_process = rules->add_special,
                                       .refuse_invalid = rules->refuse_invalid,
                                       .drop_unknown = rules->drop_unknown,
                                       .cache_bytes = ND_ENCODE_CACHE_BYTES};
    w->crew = c;
    ND_TRY(nd_encoder_create(c->job->tokenizer, &options, &w->encoder));
    return nd_thread_start(&w->thread, &c->monitor, "a thread that encodes text", work, w);
}

static void fini(worker *w)
{
    nd_encoder_destroy(w->encoder);
    free(w->block.text.data);
    free(w->piece.ids.data);
    free(w->piece.ends.data);
    free(w->piece.spans.data);
    free(w->strings[0].data);
    free(w->strings[1].data);
    free(w->bad.data);
}

/* Waits until all threads have ended. */
static void watch(crew *c)
{
    const nd_corpus_job *job = c->job;
    nd_monitor_lock(&c->monitor);
    while (c->running > 0) {
        const int64_t until = nd_clock_after(PROGRESS_MS * 1e-3);
        while (c->running > 0 && nd_monitor_wait(&c->monitor, until)) {
        }
        uint64_t bytes = c->bytes;
        nd_monitor_unlock(&c->monitor);
        if (job->progress) {
            job->progress(job->context, bytes);
        }
        nd_monitor_lock(&c->monitor);
    }
    nd_monitor_unlock(&c->monitor);
}

/* Returns the number of threads, which is less after a failure. */
static int start_all(crew *c, worker *workers, int threads)
{
    int started = 0;
    nd_status status = ND_OK;
    while (started < threads && status == ND_OK) {
        nd_monitor_lock(&c->monitor);
        c->running++;
        nd_monitor_unlock(&c->monitor);
        status = start(c, &workers[started]);
        nd_monitor_lock(&c->monitor);
        if (status == ND_OK) {
            started++;
        } else {
            c->running--;
            note_failure(c);
            nd_monitor_tell(&c->monitor);
        }
        nd_monitor_unlock(&c->monitor);
    }
    return started;
}

nd_status nd_corpus_encode(const nd_corpus_job *job, nd_corpus_counts *counts)
{
    const int threads = job->threads < THREADS_MAX ? job->threads : THREADS_MAX;
    crew c = {.job = job, .read_lock = PTHREAD_MUTEX_INITIALIZER, .monitor = ND_MONITOR_INIT};
    worker *workers;
    ND_TRY(nd_chat_find(job->tokenizer, &job->rules->chat, &c.chat));
    ND_TRY(ND_ALLOC(threads, &workers));
    nd_block_reader_init(&c.reader, job);
    int started = start_all(&c, workers, threads);
    watch(&c);
    for (int i = 0; i < started; i++) {
        nd_thread_join(&workers[i].thread, INFINITY);
    }
    c.counts.bytes = nd_block_reader_bytes(&c.reader);
    for (int i = 0; i < threads; i++) {
        fini(&workers[i]);
    }
    free(workers);
    nd_block_reader_fini(&c.reader);
    nd_monitor_fini(&c.monitor);
    pthread_mutex_destroy(&c.read_lock);
    if (c.failed) {
        return nd_fail(c.error.status, "%s", c.error.message);
    }
    *counts = c.counts;
    return ND_OK;
}

int nd_corpus_threads(void)
{
    cpu_set_t set;
    int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return count < 1 ? 1 : count > THREADS_MAX ? THREADS_MAX : count;
}
