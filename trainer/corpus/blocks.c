// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/blocks.h"

#include <string.h>

void nd_block_reader_init(nd_block_reader *reader, const nd_corpus_job *job)
{
    *reader = (nd_block_reader){.job = job, .cut = nd_tokenizer_cut(job->tokenizer)};
}

void nd_block_reader_fini(nd_block_reader *reader)
{
    nd_text_stream_close(reader->stream);
    free(reader->held.data);
    *reader = (nd_block_reader){0};
}

uint64_t nd_block_reader_bytes(const nd_block_reader *reader)
{
    return reader->done + (reader->stream ? nd_text_stream_consumed(reader->stream) : 0);
}

/* Appends up to `size` bytes of the file. */
static nd_status read_more(nd_block_reader *r, nd_bytes *text, size_t size)
{
    size_t got = 0;
    ND_TRY(nd_bytes_reserve(text, text->count + size));
    ND_TRY(nd_text_stream_read(r->stream, text->data + text->count, size, &got));
    text->count += got;
    r->at_end = got < size;
    return ND_OK;
}

/* The end of the last separator; 0: there is none. The first `searched` bytes hold none. */
static size_t last_separator(const nd_corpus_rules *rules, const nd_bytes *text, size_t searched)
{
    const size_t n = rules->separator_size;
    size_t at = searched > n ? searched - n : 0, last = 0;
    while (at < text->count) {
        const uint8_t *p = memmem(text->data + at, text->count - at, rules->separator, n);
        if (!p) {
            break;
        }
        at = last = (size_t)(p - text->data) + n;
    }
    return last;
}

/* Where the block ends; 0: more must be read. */
static size_t cut_place(const nd_block_reader *r, const nd_bytes *text, size_t searched)
{
    const nd_corpus_rules *rules = r->job->rules;
    if (r->job->files->list[r->file].rows) {
        const uint8_t *newline = memrchr(text->data, '\n', text->count);
        return newline ? (size_t)(newline - text->data) + 1 : 0;
    }
    return rules->separator ? last_separator(rules, text, searched)
                            : nd_text_cut_find(r->cut, (const char *)text->data, text->count);
}

static nd_status fail_long(const nd_block_reader *r, size_t size)
{
    const nd_corpus_file *file = &r->job->files->list[r->file];
    if (file->rows) {
        return nd_fail(ND_ERR_DATA, "\"%s\" line %llu has more than %zu bytes; split the document",
                       file->path, (unsigned long long)r->line, size);
    }
    return nd_fail(ND_ERR_DATA,
                   "a document of \"%s\" has more than %zu bytes, and its tokenizer cannot encode "
                   "it in parts; split the file, or separate its documents",
                   file->path, size);
}

/* Reads until there is a place to cut, and leaves what is behind it in `held`. */
static nd_status fill_block(nd_block_reader *r, nd_corpus_block *block)
{
    nd_bytes *text = &block->text;
    size_t wanted = r->job->block_bytes ? r->job->block_bytes : ND_BLOCK_BYTES;
    const size_t limit =
        r->job->files->list[r->file].rows ? ND_BLOCK_ROW_BYTES_MAX : ND_ENCODE_TEXT_BYTES_MAX;
    size_t place = 0;
    text->count = 0;
    ND_TRY(nd_bytes_add(text, r->held.data, r->held.count));
    r->held.count = 0;
    while (place == 0) {
        size_t searched = text->count;
        if (!r->at_end) {
            ND_TRY(read_more(r, text, wanted > text->count ? wanted - text->count : wanted));
        }
        place = r->at_end ? text->count : cut_place(r, text, searched);
        if (place == 0 && r->at_end) {
            break;
        }
        if (place == 0 && text->count >= limit) {
            return fail_long(r, limit);
        }
        wanted = place ? wanted : 2 * text->count < limit ? 2 * text->count : limit;
    }
    ND_TRY(nd_bytes_add(&r->held, text->data + place, text->count - place));
    text->count = place;
    return ND_OK;
}

nd_status nd_block_reader_next(nd_block_reader *r, nd_corpus_block *block, bool *end)
{
    const nd_corpus_files *files = r->job->files;
    *end = false;
    for (;;) {
        if (!r->stream && r->file == files->count) {
            *end = true;
            return ND_OK;
        }
        if (!r->stream) {
            ND_TRY(nd_text_stream_open(files->list[r->file].path, &r->stream));
            r->held.count = 0;
            r->at_end = false;
            r->fresh = true;
            r->line = 1;
        }
        if (r->at_end && r->held.count == 0) {
            nd_text_stream_close(r->stream);
            r->stream = NULL;
            r->done += files->list[r->file++].bytes;
            continue;
        }
        ND_TRY(fill_block(r, block));
        const bool first = r->fresh;
        r->fresh = false;
        ND_TRY(first ? nd_text_check_encoding(files->list[r->file].path, block->text.data,
                                              block->text.count)
                     : ND_OK);
        if (first && block->text.count >= 3 && memcmp(block->text.data, "\xef\xbb\xbf", 3) == 0) {
            block->text.count -= 3; /* a byte order mark is not text */
            memmove(block->text.data, block->text.data + 3, block->text.count);
        }
        if (block->text.count == 0) {
            continue;
        }
        block->file = &files->list[r->file];
        bool whole = block->file->rows || r->job->rules->separator;
        block->begins = whole || first;
        block->ends = whole || (r->at_end && r->held.count == 0);
        block->line = r->line;
        block->number = r->number++;
        for (size_t i = 0; i < block->text.count; i++) {
            r->line += block->text.data[i] == '\n';
        }
        return ND_OK;
    }
}
