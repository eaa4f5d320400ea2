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
#include "trainer/corpus/pieces.h"

enum {
    THREADS_MAX = 64,
    PROGRESS_MS = 200,
    BLOCK_BYTES = 1 << 20,
    ROW_BYTES_MAX = 256 << 20,
};

/* Cuts the files into blocks. The cuts depend on the files and the rules alone. */
typedef struct reader {
    size_t file; /* index of the next file, or of the open one */
    nd_text_stream *stream;
    nd_bytes held; /* what follows the last block */
    bool at_end;   /* of the open file */
    bool fresh;    /* no block of the open file was given yet */
    uint64_t line;
    int64_t number;
    uint64_t done;     /* bytes of the files before the open one */
    bool is_exhausted; /* there are no more blocks, or it failed */
} reader;

typedef struct crew {
    const nd_corpus_job *job;
    nd_chat chat;
    pthread_mutex_t read_lock; /* guards the reader */
    reader reader;
    atomic_ullong bytes; /* of the files that were read */

    nd_monitor monitor; /* guards what follows */
    int64_t turn;       /* the block that is written next */
    bool failed;
    nd_error error;
    nd_corpus_counts counts;
} crew;

typedef struct worker {
    crew *crew;
    nd_thread thread;
    nd_piece_maker maker;
} worker;

/* Blocks. */

/* Where the block ends: behind the last line, separator or good place of the text, of which the
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
        return nd_text_cut_find(nd_tokenizer_cut(c->job->tokenizer), (const char *)begin,
                                text->count);
    }
    for (size_t at = searched > n ? searched - n : 0;
         at < text->count && (found = memmem(begin + at, text->count - at, rules->separator, n));) {
        at = last = (size_t)(found - begin) + n;
    }
    return last;
}

static nd_status fail_long(const crew *c, size_t size)
{
    const nd_corpus_file *file = &c->job->files->list[c->reader.file];
    if (file->rows) {
        return nd_fail(ND_ERR_DATA, "\"%s\" line %llu has more than %zu bytes; split the document",
                       file->path, (unsigned long long)c->reader.line, size);
    }
    return nd_fail(ND_ERR_DATA,
                   "a document of \"%s\" has more than %zu bytes, and its tokenizer cannot encode "
                   "it in parts; split the file, or separate its documents",
                   file->path, size);
}

/* Reads until there is a place to cut, and leaves what is behind it in `held`. */
static nd_status fill_block(crew *c, nd_bytes *text)
{
    reader *r = &c->reader;
    const size_t limit =
        c->job->files->list[r->file].rows ? ROW_BYTES_MAX : ND_ENCODE_TEXT_BYTES_MAX;
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
            return fail_long(c, limit);
        }
        wanted = 2 * text->count < limit ? 2 * text->count : limit;
    }
    ND_TRY(nd_bytes_add(&r->held, text->data + place, text->count - place));
    text->count = place;
    return ND_OK;
}

/* Fills the block, unless the reader is exhausted. */
static nd_status read_block(crew *c, nd_corpus_block *block)
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
        if (!r->stream) {
            ND_TRY(nd_text_stream_open(file->path, &r->stream));
            r->at_end = false;
            r->fresh = true;
            r->line = 1;
        }
        const bool first = r->fresh, whole = file->rows || c->job->rules->separator;
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
        r->fresh = false;
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
    block->number = r->number++;
    return ND_OK;
}

/* The threads. */

/* False: there is no block for this thread. A reader that fails has the next turn, and no rows. */
static bool take_block(worker *w, nd_status *status)
{
    crew *c = w->crew;
    reader *r = &c->reader;
    w->maker.bad.count = 0;
    pthread_mutex_lock(&c->read_lock);
    bool taken = !r->is_exhausted;
    if (taken) {
        w->maker.block.number = r->number;
        *status = read_block(c, &w->maker.block);
        taken = !r->is_exhausted;
        r->is_exhausted |= *status != ND_OK;
        atomic_store(&c->bytes, r->done + (r->stream ? nd_text_stream_consumed(r->stream) : 0));
    }
    pthread_mutex_unlock(&c->read_lock);
    return taken;
}

/* In the block's turn, with the lock held; `status`: of its piece. */
static nd_status write_piece(worker *w, nd_status status)
{
    crew *c = w->crew;
    const nd_corpus_piece *piece = &w->maker.piece;
    const int64_t bad = (int64_t)w->maker.bad.count, left = c->job->skip_bad - c->counts.bad;
    if (c->job->stop && atomic_load(c->job->stop)) {
        return nd_fail(ND_ERR_PREEMPTED, "stopped by a signal");
    }
    if (bad > left) {
        return nd_piece_fail_row(&w->maker, w->maker.bad.data[left]);
    }
    ND_TRY(status);
    c->counts.bad += bad;
    c->counts.documents += (int64_t)piece->ends.count;
    c->counts.tokens += (int64_t)piece->ids.count;
    for (size_t i = 0; i < piece->spans.count; i += 2) {
        c->counts.ignored += piece->spans.data[i + 1] - piece->spans.data[i];
    }
    return c->job->write(c->job->context, piece);
}

/* With the lock held. */
static void note_failure(crew *c)
{
    if (!c->failed) {
        c->failed = true;
        c->error = *nd_error_last();
    }
    nd_monitor_tell(&c->monitor);
}

static void work(void *context)
{
    worker *w = context;
    crew *c = w->crew;
    nd_status status = ND_OK;
    for (bool goes_on = true; goes_on && take_block(w, &status);) {
        status = status == ND_OK ? nd_piece_make(&w->maker) : status;
        nd_monitor_lock(&c->monitor);
        while (!c->failed && c->turn != w->maker.block.number) {
            nd_monitor_wait(&c->monitor, ND_CLOCK_NEVER);
        }
        if (!c->failed && write_piece(w, status) != ND_OK) {
            note_failure(c);
        }
        goes_on = !c->failed;
        c->turn++;
        nd_monitor_tell(&c->monitor);
        nd_monitor_unlock(&c->monitor);
    }
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
    w->maker.job = c->job;
    w->maker.chat = &c->chat;
    ND_TRY(nd_encoder_create(c->job->tokenizer, &options, &w->maker.encoder));
    return nd_thread_start(&w->thread, &c->monitor, "a thread that encodes text", work, w);
}

/* Waits until the thread has ended. */
static void watch(crew *c, worker *w)
{
    const nd_corpus_job *job = c->job;
    for (bool ended = false; !ended;) {
        const int64_t until = nd_clock_after(PROGRESS_MS * 1e-3);
        nd_monitor_lock(&c->monitor);
        while (!(ended = w->thread.ended) && nd_monitor_wait(&c->monitor, until)) {
        }
        nd_monitor_unlock(&c->monitor);
        if (job->progress) {
            job->progress(job->context, atomic_load(&c->bytes));
        }
    }
    nd_thread_join(&w->thread, INFINITY);
}

static void add_counts(nd_corpus_counts *to, const nd_piece_maker *m)
{
    const nd_encode_counts *text = nd_encoder_counts(m->encoder);
    to->empty += m->counts.empty;
    to->lone += m->counts.lone;
    to->doubled += m->counts.doubled;
    if (!to->stray[0]) {
        memcpy(to->stray, m->counts.stray, sizeof to->stray);
    }
    to->text.texts += text->texts;
    to->text.bytes += text->bytes;
    to->text.ids += text->ids;
    to->text.invalid += text->invalid;
    to->text.dropped += text->dropped;
    to->text.unknown += text->unknown;
    to->text.special += text->special;
}

static void fini(nd_piece_maker *m)
{
    nd_encoder_destroy(m->encoder);
    free(m->block.text.data);
    free(m->piece.ids.data);
    free(m->piece.ends.data);
    free(m->piece.spans.data);
    free(m->strings[0].data);
    free(m->strings[1].data);
    free(m->bad.data);
}

nd_status nd_corpus_encode(const nd_corpus_job *job, nd_corpus_counts *counts)
{
    const int threads = job->threads < THREADS_MAX ? job->threads : THREADS_MAX;
    crew c = {.job = job, .read_lock = PTHREAD_MUTEX_INITIALIZER, .monitor = ND_MONITOR_INIT};
    worker *workers;
    int started = 0;
    ND_TRY(nd_chat_find(job->tokenizer, &job->rules->chat, &c.chat));
    ND_TRY(ND_ALLOC(threads, &workers));
    while (started < threads && start(&c, &workers[started]) == ND_OK) {
        started++;
    }
    if (started < threads) {
        nd_monitor_lock(&c.monitor);
        note_failure(&c);
        nd_monitor_unlock(&c.monitor);
    }
    for (int i = 0; i < started; i++) {
        watch(&c, &workers[i]);
        add_counts(&c.counts, &workers[i].maker);
    }
    for (int i = 0; i < threads; i++) {
        fini(&workers[i].maker);
    }
    free(workers);
    nd_text_stream_close(c.reader.stream);
    free(c.reader.held.data);
    nd_monitor_fini(&c.monitor);
    pthread_mutex_destroy(&c.read_lock);
    if (c.failed) {
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
