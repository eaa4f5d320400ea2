// SPDX-License-Identifier: Apache-2.0
/*
 * Threads that encode blocks. A thread takes the next block under the lock of the reader, encodes
 * it, waits until all earlier blocks are written, and writes its own. So a failure is that of the
 * earliest block that fails, whatever the threads do.
 */
#include <math.h>
#include <sched.h>

#include "runtime/base/clock.h"
#include "runtime/base/json.h"
#include "runtime/base/thread.h"
#include "trainer/corpus/chat.h"
#include "trainer/corpus/row.h"

enum {
    THREADS_MAX = 64,
    BLOCK_BYTES = 1 << 20,
    ROW_BYTES_MAX = 256 << 20,
};

/* Cuts the files into blocks. The cuts depend on the files and the rules alone. */
typedef struct reader {
    size_t file; /* index of the next file, or of the open one */
    nd_text_stream *stream;
    nd_bytes held; /* what follows the last block */
    bool at_end;   /* of the open file */
    uint64_t line;
    int64_t number;
    uint64_t done;     /* bytes of the files before the open one */
    bool is_exhausted; /* there are no more blocks, or it failed */
} reader;

typedef struct crew {
    const nd_corpus_job *job;
    nd_chat chat;
    nd_monitor reading; /* guards the reader */
    reader reader;

    nd_monitor monitor; /* guards what follows */
    int64_t turn;       /* the block that is written next */
    nd_error error;     /* the first one; its status ND_OK: there is none */
    nd_corpus_counts counts;
} crew;

/* Whole lines of JSON, or a part of a text that can be encoded alone. */
typedef struct text_block {
    int64_t number; /* from 0, over all files */
    const nd_corpus_file *file;
    uint64_t line;     /* of its first byte, from 1 */
    bool begins, ends; /* it begins, ends a document; both where it holds whole documents */
    uint64_t bytes;    /* of the files up to its end */
    nd_bytes text;
} text_block;

typedef struct worker {
    crew *crew;
    nd_thread thread;
    nd_encoder *encoder;
    text_block block;
    nd_corpus_piece piece;
    nd_ids bad;              /* rows of the block that were left out, by their places in it */
    nd_corpus_counts counts; /* of all blocks so far; `text` comes from the encoder */
    nd_bytes strings[2];     /* of a row, unescaped */
    size_t column;           /* of the fault of a row; 0: it has none */
} worker;

/* Blocks. */

/* The end of the block: behind the last line, separator or good place of the text, of which the
 * first `searched` bytes hold none. 0: more must be read. */
static size_t cut_place(const crew *c, const nd_bytes *text, size_t searched)
{
    const nd_corpus_rules *rules = c->job->rules;
    const size_t n = rules->separator_size;
    const uint8_t *found, *begin = text->data;
    size_t last = 0;
    if (c->job->files->list[c->reader.file].rows) {
        found = memrchr(begin, '\n', text->count);
        return found ? (size_t)(found - begin) + 1 : 0;
    }
    if (!rules->separator) {
        return nd_text_cut(c->job->tokenizer, (const char *)begin, text->count);
    }
    for (size_t at = searched > n ? searched - n : 0;
         at < text->count && (found = memmem(begin + at, text->count - at, rules->separator, n));) {
        at = last = (size_t)(found - begin) + n;
    }
    return last;
}

/* Reads until there is a place to cut, and leaves what is behind it in `held`. */
static nd_status fill_block(crew *c, nd_bytes *text)
{
    reader *r = &c->reader;
    const nd_corpus_file *file = &c->job->files->list[r->file];
    const size_t limit = file->rows ? ROW_BYTES_MAX : ND_ENCODE_TEXT_BYTES_MAX;
    size_t wanted = c->job->block_bytes ? c->job->block_bytes : BLOCK_BYTES, place = 0;
    text->count = 0;
    ND_TRY(nd_bytes_add(text, r->held.data, r->held.count));
    r->held.count = 0;
    while (place == 0 && (text->count > 0 || !r->at_end)) {
        const size_t searched = text->count;
        if (!r->at_end) {
            const size_t size = wanted > searched ? wanted - searched : wanted;
            size_t got = 0;
            ND_TRY(nd_bytes_reserve(text, searched + size));
            ND_TRY(nd_text_stream_read(r->stream, text->data + searched, size, &got));
            text->count += got;
            r->at_end = got < size;
        }
        place = r->at_end ? text->count : cut_place(c, text, searched);
        if (place == 0 && text->count >= limit) {
            return file->rows
                       ? nd_fail(ND_ERR_DATA,
                                 "\"%s\" line %llu has more than %zu bytes; split the document",
                                 file->path, (unsigned long long)r->line, limit)
                       : nd_fail(ND_ERR_DATA,
                                 "a document of \"%s\" has more than %zu bytes, and its tokenizer "
                                 "cannot encode it in parts; split the file, or separate its "
                                 "documents",
                                 file->path, limit);
        }
        wanted = 2 * text->count < limit ? 2 * text->count : limit;
    }
    ND_TRY(nd_bytes_add(&r->held, text->data + place, text->count - place));
    text->count = place;
    return ND_OK;
}

/* Fills the block, unless the reader is exhausted. */
static nd_status read_block(crew *c, text_block *block)
{
    const nd_corpus_files *files = c->job->files;
    reader *r = &c->reader;
    nd_bytes *text = &block->text;
    for (text->count = 0; text->count == 0;) {
        if (!r->stream && r->file == files->count) {
            r->is_exhausted = true;
            return ND_OK;
        }
        const nd_corpus_file *file = &files->list[r->file];
        const bool first = !r->stream, whole = file->rows || c->job->rules->separator;
        if (first) {
            ND_TRY(nd_text_stream_open(file->path, &r->stream));
            r->at_end = false;
            r->line = 1;
        }
        ND_TRY(fill_block(c, text));
        ND_TRY(first ? nd_text_check(file->path, text->data, text->count) : ND_OK);
        if (first && text->count >= 3 && memcmp(text->data, "\xef\xbb\xbf", 3) == 0) {
            text->count -= 3; /* a byte order mark is not text */
            memmove(text->data, text->data + 3, text->count);
        }
        const bool last = r->at_end && r->held.count == 0;
        block->file = file;
        block->line = r->line;
        block->begins = whole || first;
        block->ends = whole || last;
        for (size_t i = 0; i < text->count; i++) {
            r->line += text->data[i] == '\n';
        }
        if (last) {
            nd_text_stream_close(r->stream);
            r->stream = NULL;
            r->done += file->bytes;
            r->file++;
        }
    }
    block->bytes = r->done + (r->stream ? nd_text_stream_consumed(r->stream) : 0);
    return ND_OK;
}

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
    const int32_t eod = w->crew->job->eod;
    const nd_ids *ids = &w->piece.ids;
    const bool ended = ids->count > 0 && ids->data[ids->count - 1] == eod;
    ND_TRY(nd_ids_add(&w->piece.ids, &eod, eod >= 0 && !chat && !ended));
    int32_t end = (int32_t)w->piece.ids.count;
    return nd_ids_add(&w->piece.ends, &end, 1);
}

/* A text, or a prompt, which does not count in the loss, and its completion. */
static nd_status add_texts(worker *w, nd_row_field *fields, int count)
{
    size_t size = 0;
    for (int i = 0; i < count; i++) {
        if (fields[i].kind != ND_ROW_STRING) {
            return nd_fail(
                ND_ERR_DATA, "\"%s\" %s", fields[i].key,
                fields[i].kind == ND_ROW_ABSENT
                    ? "is missing; name the key of the text with --json-key "
                      "(data.json_key), give rows of \"prompt\" and \"completion\", or of "
                      "\"messages\" with \"role\" and \"content\", or leave N rows out "
                      "with --skip-bad N (data.skip_bad)"
                    : "is not a string");
        }
        ND_TRY(nd_row_text(&fields[i], &w->strings[i], &w->counts.lone));
        size += fields[i].size;
    }
    if (size == 0) {
        w->counts.empty++;
        return ND_OK;
    }
    for (int i = 0; i < count; i++) {
        int32_t span[2] = {(int32_t)w->piece.ids.count};
        ND_TRY(add_ids(w, fields[i].begin, fields[i].size, i == 0, i == count - 1));
        span[1] = (int32_t)w->piece.ids.count;
        ND_TRY(nd_ids_add(&w->piece.spans, span, i < count - 1 && span[1] > span[0] ? 2 : 0));
    }
    return end_document(w, false);
}

static nd_status add_messages(worker *w, const nd_row_field *field, const nd_row_field *tools)
{
    bool empty;
    if (!tools->empty) {
        return nd_fail(
            ND_ERR_DATA,
            "it has \"tools\", which data.chat_format (--chat-format) does not write; "
            "write it with the chat template of the tokenizer, as scripts/encode_rows.py "
            "does");
    }
    if (field->kind != ND_ROW_ARRAY) {
        return nd_fail(ND_ERR_DATA, "\"messages\" is not a list");
    }
    ND_TRY(nd_chat_add(&w->crew->chat, w->encoder, field->begin, field->size, false, &w->piece,
                       &w->counts, &empty));
    w->counts.empty += empty;
    return empty ? ND_OK : end_document(w, true);
}

/* A row may have other keys than those that it is encoded from: with data.chat_format, messages go
 * before a text or prompt that was made of them. */
static nd_status add_row(worker *w, const uint8_t *row, size_t size)
{
    const nd_corpus_rules *rules = w->crew->job->rules;
    nd_row_field fields[] = {{.key = rules->json_key}, {.key = "prompt"}, {.key = "completion"},
                             {.key = "messages"},      {.key = "tools"},  {.key = "conversations"}};
    const nd_row_field *prompt = &fields[1], *completion = &fields[2], *messages = &fields[3];
    const char *fault = nd_row_scan(row, size, fields, rules->pairs ? 6 : 1, &w->column);
    if (fault) {
        return nd_fail(ND_ERR_DATA, "%s", fault);
    }
    w->column = 0;
    const bool text = fields[0].kind, pair = prompt->kind || completion->kind;
    if (messages->kind && w->crew->chat.rules.template) {
        return add_messages(w, messages, &fields[4]);
    }
    if (text && pair) {
        return nd_fail(ND_ERR_DATA,
                       "it has a text and also \"prompt\" or \"completion\"; leave one form out%s",
                       strcmp(rules->json_key, "text") == 0
                           ? ", or take the text with --json-key (data.json_key)"
                           : "");
    }
    if (messages->kind && !text && !(prompt->kind && completion->kind)) {
        return nd_fail(ND_ERR_DATA,
                       "it has \"messages\"%s; set data.chat_format to llama3, chatml or model "
                       "(--chat-format)",
                       pair ? ", and only one of \"prompt\" and \"completion\"" : "");
    }
    if (!pair && !text && fields[5].kind) {
        return nd_fail(ND_ERR_DATA,
                       "it has \"conversations\"; rename this key to \"messages\", \"from\" to "
                       "\"role\", \"value\" to \"content\", and the roles human and gpt to user "
                       "and assistant");
    }
    return pair ? add_texts(w, &fields[1], 2) : add_texts(w, &fields[0], 1);
}

/* Like add_row, but after an error the piece and all counts are as they were. */
static nd_status try_row(worker *w, const uint8_t *row, size_t size)
{
    const nd_corpus_piece before = w->piece;
    const nd_corpus_counts counts = w->counts;
    const nd_encode_counts text = *nd_encoder_counts(w->encoder);
    /* A chat goes on with the last span when its own first one is adjacent. */
    const int32_t last = before.spans.count > 0 ? before.spans.data[before.spans.count - 1] : 0;
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

/* Wrong rows are noted, up to one more than may be left out. */
static nd_status add_rows(worker *w)
{
    const char *text = (const char *)w->block.text.data;
    nd_json_lines rows = {.next = text, .left = w->block.text.count};
    while (nd_json_lines_next(&rows)) {
        nd_status status = try_row(w, (const uint8_t *)rows.line, rows.size);
        if (status == ND_ERR_DATA) {
            const int32_t place = (int32_t)(rows.line - text);
            ND_TRY(nd_ids_add(&w->bad, &place, 1));
            if ((int64_t)w->bad.count > w->crew->job->skip_bad) {
                return ND_OK;
            }
        } else {
            ND_TRY(status);
        }
    }
    return ND_OK;
}

/* The error was not kept, so the row is read again. */
static nd_status fail_row(worker *w, int32_t place)
{
    const char *text = (const char *)w->block.text.data;
    const int64_t skip = w->crew->job->skip_bad;
    nd_json_lines rows = {
        .next = text, .left = w->block.text.count, .number = (int64_t)w->block.line - 1};
    char column[32] = "";
    while (rows.line != text + place && nd_json_lines_next(&rows)) {
    }
    nd_status status = try_row(w, (const uint8_t *)rows.line, rows.size);
    ND_ASSERT(status != ND_OK);
    const nd_error error = *nd_error_last();
    if (w->column > 0) {
        snprintf(column, sizeof column, ", column %zu", w->column);
    }
    nd_fail(status, "\"%s\" line %lld%s: %s", w->block.file->path, (long long)rows.number, column,
            error.message);
    return skip == 0
               ? status
               : nd_fail_context(status,
                                 "leaving out %lld other bad row%s, as many as may be left out",
                                 (long long)skip, skip == 1 ? "" : "s");
}

/* Adds what stands between separators; without one, the block is a part of one document. */
static nd_status add_documents(worker *w)
{
    const nd_corpus_rules *rules = w->crew->job->rules;
    const nd_bytes *text = &w->block.text;
    const char *separator = rules->separator;
    for (size_t at = 0, n; at < text->count; at += n + rules->separator_size) {
        const uint8_t *p = text->data + at;
        const uint8_t *end =
            separator ? memmem(p, text->count - at, separator, rules->separator_size) : NULL;
        n = end ? (size_t)(end - p) : text->count - at;
        if (n == 0) {
            w->counts.empty++;
            continue;
        }
        ND_TRY(add_ids(w, p, n, w->block.begins, w->block.ends));
        ND_TRY(w->block.ends ? end_document(w, false) : ND_OK);
    }
    return ND_OK;
}

/* The threads. */

/* False: there is no block for this thread. A reader that fails has the next turn, and no rows. */
static bool take_block(worker *w, nd_status *status)
{
    crew *c = w->crew;
    reader *r = &c->reader;
    w->bad.count = 0;
    nd_monitor_lock(&c->reading);
    if (!r->is_exhausted) {
        w->block.number = r->number++;
        *status = read_block(c, &w->block);
    }
    const bool taken = !r->is_exhausted;
    r->is_exhausted |= *status != ND_OK;
    nd_monitor_unlock(&c->reading);
    return taken;
}

/* In the block's turn, with the lock held; `status`: of its piece. */
static nd_status write_piece(worker *w, nd_status status)
{
    crew *c = w->crew;
    const nd_corpus_piece *piece = &w->piece;
    const int64_t bad = (int64_t)w->bad.count, left = c->job->skip_bad - c->counts.bad;
    if (c->job->stop && atomic_load(c->job->stop)) {
        return nd_fail(ND_ERR_PREEMPTED, "stopped by a signal");
    }
    if (bad > left) {
        return fail_row(w, w->bad.data[left]);
    }
    ND_TRY(status);
    c->counts.bad += bad;
    c->counts.documents += (int64_t)piece->ends.count;
    c->counts.tokens += (int64_t)piece->ids.count;
    for (size_t i = 0; i < piece->spans.count; i += 2) {
        c->counts.ignored += piece->spans.data[i + 1] - piece->spans.data[i];
    }
    return c->job->write(c->job->context, piece, w->block.bytes);
}

static void encode_blocks(void *context)
{
    worker *w = context;
    crew *c = w->crew;
    nd_status status = ND_OK;
    for (bool goes_on = true; goes_on && take_block(w, &status);) {
        w->piece.ids.count = w->piece.ends.count = w->piece.spans.count = 0;
        if (status == ND_OK) {
            status = w->block.file->rows ? add_rows(w) : add_documents(w);
            status = status == ND_OK
                         ? status
                         : nd_fail_context(status, "encoding \"%s\" from line %llu on",
                                           w->block.file->path, (unsigned long long)w->block.line);
        }
        nd_monitor_lock(&c->monitor);
        while (c->error.status == ND_OK && c->turn != w->block.number) {
            nd_monitor_wait(&c->monitor, ND_CLOCK_NEVER);
        }
        if (c->error.status == ND_OK && write_piece(w, status) != ND_OK) {
            c->error = *nd_error_last();
        }
        goes_on = c->error.status == ND_OK;
        c->turn++;
        nd_monitor_tell(&c->monitor);
        nd_monitor_unlock(&c->monitor);
    }
}

/* The calling thread. */

static nd_status start_worker(crew *c, worker *w)
{
    const nd_corpus_rules *rules = c->job->rules;
    const nd_encode_options options = {.special_in_text = rules->special_in_text,
                                       .post_process = rules->add_special,
                                       .refuse_invalid = rules->refuse_invalid,
                                       .drop_unknown = rules->drop_unknown,
                                       .cache_bytes = ND_ENCODE_CACHE_BYTES};
    w->crew = c;
    ND_TRY(nd_encoder_create(c->job->tokenizer, &options, &w->encoder));
    return nd_thread_start(&w->thread, &c->monitor, "a thread that encodes text", encode_blocks, w);
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
    to->text.bytes += text->bytes;
    to->text.invalid += text->invalid;
    to->text.dropped += text->dropped;
    to->text.unknown += text->unknown;
    to->text.special += text->special;
}

nd_status nd_corpus_encode(const nd_corpus_job *job, nd_corpus_counts *counts)
{
    const int threads = job->threads < THREADS_MAX ? job->threads : THREADS_MAX;
    crew c = {.job = job, .reading = ND_MONITOR_INIT, .monitor = ND_MONITOR_INIT};
    worker *workers;
    int started = 0;
    ND_TRY(nd_chat_find(job->tokenizer, &job->rules->chat, &c.chat));
    ND_TRY(ND_ALLOC(threads, &workers));
    while (started < threads && start_worker(&c, &workers[started]) == ND_OK) {
        started++;
    }
    if (started < threads) {
        nd_monitor_lock(&c.monitor);
        c.error = c.error.status == ND_OK ? *nd_error_last() : c.error;
        nd_monitor_tell(&c.monitor);
        nd_monitor_unlock(&c.monitor);
    }
    for (int i = 0; i < started; i++) {
        nd_thread_join(&workers[i].thread, INFINITY);
        add_counts(&c.counts, &workers[i]);
    }
    for (worker *w = workers; w < workers + threads; w++) {
        nd_encoder_destroy(w->encoder);
        free(w->block.text.data);
        free(w->piece.ids.data);
        free(w->piece.ends.data);
        free(w->piece.spans.data);
        free(w->strings[0].data);
        free(w->strings[1].data);
        free(w->bad.data);
    }
    free(workers);
    nd_text_stream_close(c.reader.stream);
    free(c.reader.held.data);
    nd_monitor_fini(&c.monitor);
    nd_monitor_fini(&c.reading);
    if (c.error.status != ND_OK) {
        return nd_fail(c.error.status, "%s", c.error.message);
    }
    if (c.counts.tokens > 0 && c.counts.ignored == c.counts.tokens) {
        return nd_fail(ND_ERR_DATA,
                       "none of the %lld tokens of \"%s\"%s counts in the loss; completions, or "
                       "turns of the assistant, are missing",
                       (long long)c.counts.tokens, job->files->list[0].path,
                       job->files->count > 1 ? " and the other files" : "");
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
