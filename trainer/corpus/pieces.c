// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/pieces.h"

#include "trainer/corpus/row.h"

static nd_status add_ids(nd_piece_maker *m, const uint8_t *text, size_t size, bool begins,
                         bool ends)
{
    const int32_t *ids;
    size_t count;
    ND_TRY(nd_encode_part(m->encoder, (const char *)text, size, begins, ends, &ids, &count));
    if (begins && m->job->rules->add_special) {
        m->counts.doubled += nd_tokenizer_begins_twice(m->job->tokenizer, ids, count);
    }
    return nd_ids_add(&m->piece.ids, ids, count);
}

/* The ids of a chat have their own end, and so have those that end with the end of text, which the
 * text or the tokenizer's post-processor has given them. */
static nd_status end_document(nd_piece_maker *m, bool chat)
{
    const int32_t eod = m->job->eod;
    const nd_ids *ids = &m->piece.ids;
    const bool ended = ids->count > 0 && ids->data[ids->count - 1] == eod;
    ND_TRY(nd_ids_add(&m->piece.ids, &eod, eod >= 0 && !chat && !ended));
    int32_t end = (int32_t)m->piece.ids.count;
    return nd_ids_add(&m->piece.ends, &end, 1);
}

/* A text, or a prompt, which does not count in the loss, and its completion. */
static nd_status add_texts(nd_piece_maker *m, const nd_row_field *fields, int count)
{
    const uint8_t *text[2];
    size_t size[2] = {0};
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
        ND_TRY(nd_row_text(&fields[i], &m->strings[i], &text[i], &size[i], &m->counts.lone));
    }
    if (size[0] + size[1] == 0) {
        m->counts.empty++;
        return ND_OK;
    }
    for (int i = 0; i < count; i++) {
        int32_t span[2] = {(int32_t)m->piece.ids.count};
        ND_TRY(add_ids(m, text[i], size[i], i == 0, i == count - 1));
        span[1] = (int32_t)m->piece.ids.count;
        ND_TRY(nd_ids_add(&m->piece.spans, span, i < count - 1 && span[1] > span[0] ? 2 : 0));
    }
    return end_document(m, false);
}

static nd_status add_messages(nd_piece_maker *m, const nd_row_field *field,
                              const nd_row_field *tools)
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
    ND_TRY(nd_chat_add(m->chat, m->encoder, field->begin, field->size, false, &m->piece, &m->counts,
                       &empty));
    m->counts.empty += empty;
    return empty ? ND_OK : end_document(m, true);
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

/* A row may have other keys than those that it is encoded from: with data.chat_format, messages go
 * before a text or prompt that was made of them. */
static nd_status add_row(nd_piece_maker *m, const uint8_t *row, size_t size)
{
    const nd_corpus_rules *rules = m->job->rules;
    nd_row_field fields[FIELDS] = {{.key = rules->json_key}, {.key = "prompt"},
                                   {.key = "completion"},    {.key = "messages"},
                                   {.key = "tools"},         {.key = "conversations"}};
    const char *fault = nd_row_scan(row, size, fields, rules->pairs ? FIELDS : 1, &m->column);
    if (fault) {
        return nd_fail(ND_ERR_DATA, "%s", fault);
    }
    m->column = 0;
    bool has[FIELDS];
    for (int i = 0; i < FIELDS; i++) {
        has[i] = fields[i].kind != ND_ROW_ABSENT;
    }
    const bool text = has[FIELD_TEXT], pair = has[FIELD_PROMPT] || has[FIELD_COMPLETION];
    if (has[FIELD_MESSAGES] && m->chat->rules.template) {
        return add_messages(m, &fields[FIELD_MESSAGES], &fields[FIELD_TOOLS]);
    }
    if (text && pair) {
        return nd_fail(ND_ERR_DATA,
                       "it has a text and also \"prompt\" or \"completion\"; leave one form out%s",
                       strcmp(rules->json_key, "text") == 0
                           ? ", or take the text with --json-key (data.json_key)"
                           : "");
    }
    if (has[FIELD_MESSAGES] && !text && !(has[FIELD_PROMPT] && has[FIELD_COMPLETION])) {
        return nd_fail(ND_ERR_DATA,
                       "it has \"messages\"%s; set data.chat_format to llama3, chatml or model "
                       "(--chat-format)",
                       pair ? ", and only one of \"prompt\" and \"completion\"" : "");
    }
    if (!pair && !text && has[FIELD_CONVERSATIONS]) {
        return nd_fail(ND_ERR_DATA,
                       "it has \"conversations\"; rename this key to \"messages\", \"from\" to "
                       "\"role\", \"value\" to \"content\", and the roles human and gpt to user "
                       "and assistant");
    }
    return pair ? add_texts(m, &fields[FIELD_PROMPT], 2) : add_texts(m, &fields[FIELD_TEXT], 1);
}

/* The same; after an error the piece and all counts are as they were. */
static nd_status try_row(nd_piece_maker *m, const uint8_t *row, size_t size)
{
    const nd_corpus_piece before = m->piece;
    const nd_corpus_counts counts = m->counts;
    const nd_encode_counts text = *nd_encoder_counts(m->encoder);
    /* A chat goes on with the last span when its own first one is adjacent. */
    const int32_t last = before.spans.count > 0 ? before.spans.data[before.spans.count - 1] : 0;
    nd_status status = add_row(m, row, size);
    if (status != ND_OK) {
        nd_encoder_set_counts(m->encoder, &text);
        m->piece.ids.count = before.ids.count;
        m->piece.ends.count = before.ends.count;
        m->piece.spans.count = before.spans.count;
        if (before.spans.count > 0) {
            m->piece.spans.data[before.spans.count - 1] = last;
        }
        m->counts = counts;
    }
    return status;
}

/* Bytes of the row that begins at `at`. */
static size_t row_size(const nd_bytes *text, size_t at)
{
    const uint8_t *row = text->data + at, *newline = memchr(row, '\n', text->count - at);
    return newline ? (size_t)(newline - row) : text->count - at;
}

static nd_status add_rows(nd_piece_maker *m)
{
    const nd_bytes *text = &m->block.text;
    for (size_t at = 0, n, blank = 0; at < text->count; at += n + 1, blank = 0) {
        const uint8_t *row = text->data + at;
        n = row_size(text, at);
        while (blank < n && (row[blank] == ' ' || row[blank] == '\t' || row[blank] == '\r')) {
            blank++;
        }
        nd_status status = blank < n ? try_row(m, row, n) : ND_OK;
        if (status == ND_ERR_DATA) {
            const int32_t place = (int32_t)at;
            ND_TRY(nd_ids_add(&m->bad, &place, 1));
            if ((int64_t)m->bad.count > m->job->skip_bad) {
                return ND_OK;
            }
        } else {
            ND_TRY(status);
        }
    }
    return ND_OK;
}

/* The error was not kept, so the row is read again. */
nd_status nd_piece_fail_row(nd_piece_maker *m, int32_t place)
{
    const nd_bytes *text = &m->block.text;
    const int64_t skip = m->job->skip_bad;
    uint64_t line = m->block.line;
    char column[32] = "";
    ND_ASSERT(place >= 0 && (size_t)place < text->count);
    for (int32_t i = 0; i < place; i++) {
        line += text->data[i] == '\n';
    }
    nd_status status = try_row(m, text->data + place, row_size(text, (size_t)place));
    ND_ASSERT(status != ND_OK);
    const nd_error error = *nd_error_last();
    if (m->column > 0) {
        snprintf(column, sizeof column, ", column %zu", m->column);
    }
    nd_fail(status, "\"%s\" line %llu%s: %s", m->block.file->path, (unsigned long long)line, column,
            error.message);
    return skip == 0
               ? status
               : nd_fail_context(status,
                                 "leaving out %lld other bad row%s, as many as may be left out",
                                 (long long)skip, skip == 1 ? "" : "s");
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

static nd_status add_documents(nd_piece_maker *m)
{
    const nd_corpus_rules *rules = m->job->rules;
    const nd_bytes *text = &m->block.text;
    if (!rules->separator) {
        ND_TRY(add_ids(m, text->data, text->count, m->block.begins, m->block.ends));
        return m->block.ends ? end_document(m, false) : ND_OK;
    }
    for (size_t at = 0, n; at < text->count; at += n + rules->separator_size) {
        const uint8_t *p = text->data + at;
        const uint8_t *end = memmem(p, text->count - at, rules->separator, rules->separator_size);
        n = end ? (size_t)(end - p) : text->count - at;
        if (n == 0) {
            m->counts.empty++;
            continue;
        }
        ND_TRY(add_ids(m, p, n, true, true));
        ND_TRY(end_document(m, false));
    }
    return ND_OK;
}

nd_status nd_piece_make(nd_piece_maker *m)
{
    m->piece.ids.count = m->piece.ends.count = m->piece.spans.count = m->bad.count = 0;
    nd_status status = m->block.file->rows ? add_rows(m) : add_documents(m);
    return status == ND_OK
               ? status
               : nd_fail_context(status, "encoding \"%s\" from line %llu on", m->block.file->path,
                                 (unsigned long long)m->block.line);
}
