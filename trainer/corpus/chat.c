// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/chat.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/suggest.h"
#include "trainer/corpus/row.h"
#include "trainer/text/unicode.h"

nd_chat_format nd_chat_format_of(const char *name)
{
    const bool llama3 = name && strcmp(name, "llama3") == 0;
    return llama3                                ? ND_CHAT_LLAMA3
           : name && strcmp(name, "chatml") == 0 ? ND_CHAT_CHATML
                                                 : ND_CHAT_NONE;
}

static nd_status find(const nd_tokenizer *tokenizer, nd_chat_format format, const char *name,
                      int32_t *id)
{
    const bool llama3 = format == ND_CHAT_LLAMA3;
    const char *sign = llama3 ? "<|im_start|>" : "<|start_header_id|>"; /* of the other form */
    *id = nd_tokenizer_find(tokenizer, name, strlen(name));
    if (*id >= 0) {
        return ND_OK;
    }
    const bool other = nd_tokenizer_find(tokenizer, sign, strlen(sign)) >= 0;
    return nd_fail(ND_ERR_DATA,
                   "the tokenizer has no token %s, which this data.chat_format needs%s", name,
                   !other   ? "; name one that has it with data.tokenizer (--tokenizer)"
                   : llama3 ? ", but those of ChatML; give --chat-format chatml"
                            : ", but those of Llama 3; give --chat-format llama3");
}

nd_status nd_chat_find(const nd_tokenizer *tokenizer, nd_chat_format format, nd_chat *out)
{
    *out = (nd_chat){.format = format,
                     .tokenizer = tokenizer,
                     .begin = -1,
                     .open = -1,
                     .middle = -1,
                     .close = -1};
    if (format == ND_CHAT_LLAMA3) {
        ND_TRY(find(tokenizer, format, "<|begin_of_text|>", &out->begin));
        ND_TRY(find(tokenizer, format, "<|start_header_id|>", &out->open));
        ND_TRY(find(tokenizer, format, "<|end_header_id|>", &out->middle));
        return find(tokenizer, format, "<|eot_id|>", &out->close);
    }
    if (format == ND_CHAT_CHATML) {
        ND_TRY(find(tokenizer, format, "<|im_start|>", &out->open));
        return find(tokenizer, format, "<|im_end|>", &out->close);
    }
    return ND_OK;
}

typedef struct chat_text {
    const nd_chat *chat;
    nd_encoder *encoder;
    nd_corpus_piece *piece;
    nd_bytes *strings; /* [2]: role and content of a message, where they are unescaped */
    nd_bytes *body;    /* what stands between the control tokens around a content */
    nd_corpus_counts *counts;
} chat_text;

static nd_status add_token(const chat_text *t, int32_t id)
{
    return nd_ids_add(&t->piece->ids, &id, id >= 0);
}

static nd_status add_text(const chat_text *t, const char *text, size_t size)
{
    const int32_t *ids;
    size_t count;
    ND_TRY(nd_encode_part(t->encoder, text, size, false, false, &ids, &count));
    return nd_ids_add(&t->piece->ids, ids, count);
}

/* Tokens from `begin` to `end` do not count; continues the last span where they touch. */
static nd_status ignore(const chat_text *t, size_t begin, size_t end)
{
    nd_ids *spans = &t->piece->spans;
    int32_t span[2] = {(int32_t)begin, (int32_t)end};
    if (spans->count > 0 && spans->data[spans->count - 1] == span[0]) {
        spans->data[spans->count - 1] = span[1];
        return ND_OK;
    }
    return nd_ids_add(spans, span, span[1] > span[0] ? 2 : 0);
}

/* What str.strip of Python takes away: white space, and four separators of files and records. */
static bool is_space(const uint8_t *p, size_t size)
{
    if (nd_utf8_next(p, size) != (int)size) {
        return false;
    }
    const uint32_t code = nd_char_at(p).code;
    return nd_char_class_of(code) == ND_CHAR_SPACE || (code >= 0x1c && code <= 0x1f);
}

static void strip(const uint8_t **text, size_t *size)
{
    for (int n = 1; *size > 0 && n > 0;) {
        n = nd_utf8_next(*text, *size);
        n = n > 0 && is_space(*text, (size_t)n) ? n : 0;
        *text += n;
        *size -= (size_t)n;
    }
    for (size_t n = 1; *size > 0 && n > 0; *size -= n) {
        const uint8_t *end = *text + *size;
        n = 1;
        while (n < 4 && n < *size && (end[-(ptrdiff_t)n] & 0xc0) == 0x80) {
            n++;
        }
        n = is_space(end - n, n) ? n : 0;
    }
}

/* The ids of a message up to the last control token before its content. The body begins with what
 * stands between the two. */
static nd_status begin_message(const chat_text *t, const char *role, size_t size)
{
    t->body->count = 0;
    ND_TRY(add_token(t, t->chat->open));
    if (t->chat->format == ND_CHAT_LLAMA3) {
        ND_TRY(add_text(t, role, size));
        ND_TRY(add_token(t, t->chat->middle));
        return nd_bytes_add(t->body, "\n\n", 2);
    }
    ND_TRY(nd_bytes_add(t->body, role, size));
    return nd_bytes_add(t->body, "\n", 1);
}

static nd_status add_body(const chat_text *t)
{
    return add_text(t, (const char *)t->body->data, t->body->count);
}

/* Bytes of tokens, one after the other. */
typedef struct token_bytes {
    const nd_tokenizer *tokenizer;
    const int32_t *ids;
    size_t count, size;
    const char *left; /* of the last token that was begun */
} token_bytes;

/* The tokens go on with these bytes, which are passed over. */
static bool pass_over(token_bytes *b, const char *bytes, size_t size)
{
    while (size > 0) {
        for (; b->size == 0 && b->count > 0; b->count--) {
            b->left = nd_tokenizer_token(b->tokenizer, *b->ids++, &b->size);
        }
        const size_t n = size < b->size ? size : b->size;
        if (n == 0 || memcmp(bytes, b->left, n) != 0) {
            return false;
        }
        bytes += n;
        b->left += n;
        b->size -= n;
        size -= n;
    }
    return true;
}

/* How many of the ids from `from` on have nothing of the content, which stands behind the first
 * `size` bytes of the body: those whose bytes are the first ones of the tokens that the text before
 * it has alone. The newlines there may be other tokens beside the content, or one with the newlines
 * that it begins with. */
static nd_status count_before(const chat_text *t, size_t from, size_t size, size_t *out)
{
    const nd_encode_counts counts = *nd_encoder_counts(t->encoder);
    const nd_ids *all = &t->piece->ids;
    const int32_t *ids;
    size_t count;
    ND_TRY(
        nd_encode_part(t->encoder, (const char *)t->body->data, size, false, false, &ids, &count));
    nd_encoder_set_counts(t->encoder, &counts);
    token_bytes alone = {.tokenizer = t->chat->tokenizer, .ids = ids, .count = count};
    for (*out = 0; from + *out < all->count; (*out)++) {
        size_t token_size;
        const char *token =
            nd_tokenizer_token(alone.tokenizer, all->data[from + *out], &token_size);
        if (!pass_over(&alone, token, token_size)) {
            break;
        }
    }
    return ND_OK;
}

static bool does(const nd_chat *chat, unsigned bit)
{
    return chat->template && (chat->template->does & bit);
}

/* What the forms by name do not write; a null or an empty list says that there is none. */
static nd_status check_calls(const nd_row_field *fields, int count)
{
    for (int i = 0; i < count; i++) {
        if (!nd_row_is_empty(&fields[i])) {
            return nd_fail(ND_ERR_DATA,
                           "a message has \"%s\", which data.chat_format (--chat-format) does not "
                           "write; write it with the chat template of the tokenizer, as "
                           "scripts/encode_rows.py does",
                           fields[i].key);
        }
    }
    return ND_OK;
}

/* "weight" of a message: 0 leaves its turn out of the loss, as in OpenAI's and Mistral's files. */
static nd_status read_weight(const nd_row_field *field, bool *counts)
{
    char text[4] = "";
    snprintf(text, sizeof text, "%.*s", field->size < 4 ? (int)field->size : 0,
             field->kind == ND_ROW_OTHER ? (const char *)field->begin : "");
    *counts = nd_row_is_empty(field) || strcmp(text, "1") == 0 || strcmp(text, "1.0") == 0;
    if (!*counts && strcmp(text, "0") != 0 && strcmp(text, "0.0") != 0) {
        return nd_fail(ND_ERR_DATA, "\"weight\" of a message is %.*s; it must be 0 or 1",
                       (int)(field->size < 40 ? field->size : 40), (const char *)field->begin);
    }
    return ND_OK;
}

/* The strings of a message, lent from the JSON or from the buffers. */
static nd_status read_message(const chat_text *t, const uint8_t *json, size_t size,
                              const uint8_t *text[2], size_t text_size[2], bool *counts)
{
    nd_row_field fields[] = {{.key = "role"},
                             {.key = "content"},
                             {.key = "tool_calls"},
                             {.key = "function_call"},
                             {.key = "weight"},
                             {.key = NULL},
                             {.key = "reasoning_content"}};
    const bool thinks = does(t->chat, ND_THINKS); /* else it is a key like any other */
    size_t column;
    const char *fault = nd_row_scan(json, size, fields, 6, &column);
    ND_TRY(fault ? ND_OK : check_calls(fields + 2, 2));
    ND_TRY(fault ? ND_OK : read_weight(&fields[4], counts));
    if (!fault && thinks) {
        (void)nd_row_scan(json, size, &fields[6], 1, &column);
        ND_TRY(check_calls(&fields[6], 1));
    }
    if (fault || fields[0].kind != ND_ROW_STRING || fields[1].kind != ND_ROW_STRING) {
        return nd_fail(ND_ERR_DATA, "a message lacks \"role\" or \"content\", or one of them is no "
                                    "string");
    }
    for (int i = 0; i < 2; i++) {
        ND_TRY(nd_row_text(&fields[i], &t->strings[i], &text[i], &text_size[i], &t->counts->lone));
    }
    if (fields[5].kind == ND_ROW_STRING && !t->counts->stray[0]) {
        snprintf(t->counts->stray, sizeof t->counts->stray, "%.*s",
                 (int)(fields[5].size < 47 ? fields[5].size : 47), (const char *)fields[5].begin);
    }
    return ND_OK;
}

static bool is_system(const uint8_t *role, size_t size)
{
    return size == 6 && memcmp(role, "system", 6) == 0;
}

static const char *prefix_of(const nd_chat *chat, const uint8_t *role, size_t size)
{
    return chat->template && is_system(role, size) ? chat->template->prefix : NULL;
}

/* The system turn of a template, where the first message is of another role. */
static nd_status add_own_system(const chat_text *t, const uint8_t *role, size_t size)
{
    const nd_chat_template *own = t->chat->template;
    const size_t from = t->piece->ids.count;
    if (!own || !own->system || is_system(role, size)) {
        return ND_OK;
    }
    ND_TRY(begin_message(t, "system", 6));
    ND_TRY(nd_bytes_add(t->body, own->prefix, own->prefix ? strlen(own->prefix) : 0));
    ND_TRY(nd_bytes_add(t->body, own->system, strlen(own->system)));
    ND_TRY(add_body(t));
    ND_TRY(add_token(t, t->chat->close));
    ND_TRY(add_text(t, "\n", t->chat->format == ND_CHAT_LLAMA3 ? 0 : 1));
    return ignore(t, from, t->piece->ids.count);
}

static nd_status check_role(const nd_chat *chat, const uint8_t *role, size_t size)
{
    static const char *const known[] = {"system", "user", "assistant", "tool", "ipython"};
    enum { KNOWN = sizeof known / sizeof *known, TOOL = 3 };
    char name[64];
    int i = 0;
    nd_suggest search;
    snprintf(name, sizeof name, "%.*s", (int)(size < sizeof name ? size : sizeof name - 1),
             (const char *)role);
    nd_suggest_init(&search, name);
    while (i < KNOWN && (size != strlen(known[i]) || memcmp(role, known[i], size) != 0)) {
        nd_suggest_offer(&search, known[i++]);
    }
    if (i == KNOWN) {
        return nd_fail(ND_ERR_DATA,
                       "a message has the role \"%s\", which is none of system, user, assistant, "
                       "tool and ipython; %s%s%s",
                       name, search.best ? "did you mean " : "give it one of these",
                       search.best ? search.best : "", search.best ? "?" : "");
    }
    const bool tool = i >= TOOL;
    return !tool || !does(chat, ND_OWN_TOOLS)
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "a message has the role \"%.*s\", which the chat template beside the "
                         "tokenizer writes in a way of its own; write it with that template, as "
                         "scripts/encode_rows.py does",
                         (int)size, (const char *)role);
}

/* The token that a text begins with; -1: none. */
static int32_t begin_of(const nd_chat *chat)
{
    const int32_t llama3 = nd_tokenizer_find(chat->tokenizer, "<|begin_of_text|>", 17);
    return !does(chat, ND_BEGINS) ? chat->begin
           : llama3 >= 0          ? llama3
                                  : nd_tokenizer_find(chat->tokenizer, "<s>", 3);
}

/* What a template that thinks writes before the last answer. A block of the text's own would be
 * taken out of it. */
static nd_status add_thought(const chat_text *t, const uint8_t **text, size_t *size)
{
    static const char empty[] = "<think>\n\n</think>\n\n";
    for (; *size > 0 && **text == '\n'; --*size) {
        ++*text;
    }
    return nd_bytes_add(t->body, empty, sizeof empty - 1);
}

/* Where a message stands. */
typedef struct message_place {
    bool first, last, answers; /* answers: a user's stands before it */
} message_place;

static nd_status add_message(const chat_text *t, message_place *at, const uint8_t *json,
                             size_t json_size)
{
    static const char assistant[] = "assistant";
    const nd_chat *chat = t->chat;
    const bool llama3 = chat->format == ND_CHAT_LLAMA3;
    const uint8_t *text[2];
    size_t size[2];
    bool counts = false;
    ND_TRY(read_message(t, json, json_size, text, size, &counts));
    ND_TRY(check_role(chat, text[0], size[0]));
    ND_TRY(at->first ? add_own_system(t, text[0], size[0]) : ND_OK);
    size_t from = t->piece->ids.count;
    if (llama3) {
        strip(&text[1], &size[1]);
    }
    ND_TRY(begin_message(t, (const char *)text[0], size[0]));
    const char *prefix = at->first ? prefix_of(chat, text[0], size[0]) : NULL;
    ND_TRY(nd_bytes_add(t->body, prefix, prefix ? strlen(prefix) : 0));
    const bool answer = size[0] == sizeof assistant - 1 && !memcmp(text[0], assistant, size[0]);
    counts &= answer;
    if (answer && does(chat, ND_THINKS)) {
        ND_TRY(memmem(text[1], size[1], "</think>", 8)
                   ? nd_fail(ND_ERR_DATA,
                             "a message of the assistant holds </think>, which the chat "
                             "template beside the tokenizer moves; write it with that "
                             "template, as scripts/encode_rows.py does")
                   : ND_OK);
        ND_TRY(at->last && at->answers ? add_thought(t, &text[1], &size[1]) : ND_OK);
    }
    const size_t header = t->body->count, body = t->piece->ids.count;
    ND_TRY(nd_bytes_add(t->body, text[1], size[1]));
    ND_TRY(add_body(t));
    if (counts) {
        size_t before;
        ND_TRY(count_before(t, body, header, &before));
        ND_TRY(ignore(t, from, body + before));
    }
    at->first = false;
    at->answers |= size[0] == 4 && memcmp(text[0], "user", 4) == 0;
    ND_TRY(add_token(t, chat->close));
    from = counts ? t->piece->ids.count : from; /* what does not count goes on here */
    ND_TRY(add_text(t, "\n", llama3 ? 0 : 1));
    return ignore(t, from, t->piece->ids.count);
}

static nd_status add_messages(const chat_text *t, const uint8_t *json, size_t size, bool *empty)
{
    const uint8_t *message, *next;
    size_t message_size, next_size, at = 0;
    message_place place = {.first = true};
    const char *fault = nd_row_next(json, size, &at, &message, &message_size);
    *empty = !fault && !message;
    while (!fault && message) {
        fault = nd_row_next(json, size, &at, &next, &next_size);
        place.last = !next;
        if (place.first) {
            size_t from = t->piece->ids.count;
            ND_TRY(add_token(t, begin_of(t->chat)));
            ND_TRY(ignore(t, from, t->piece->ids.count));
        }
        ND_TRY(fault ? ND_OK : add_message(t, &place, message, message_size));
        message = next;
        message_size = next_size;
    }
    return fault ? nd_fail(ND_ERR_DATA, "\"messages\": %s", fault) : ND_OK;
}

nd_status nd_chat_add(const nd_chat *chat, nd_encoder *encoder, const uint8_t *json, size_t size,
                      nd_corpus_piece *piece, nd_corpus_counts *counts, bool *empty)
{
    nd_bytes strings[2] = {{0}}, body = {0};
    const chat_text t = {chat, encoder, piece, strings, &body, counts};
    nd_status status = add_messages(&t, json, size, empty);
    free(strings[0].data);
    free(strings[1].data);
    free(body.data);
    return status;
}

nd_status nd_chat_prompt(const nd_chat *chat, nd_encoder *encoder, const char *json, size_t size,
                         nd_ids *ids)
{
    static const char role[] = "assistant";
    nd_corpus_piece piece = {.ids = *ids};
    nd_bytes body = {0};
    const chat_text t = {.chat = chat, .encoder = encoder, .piece = &piece, .body = &body};
    nd_corpus_counts counts = {0};
    bool empty = false;
    nd_status status =
        nd_chat_add(chat, encoder, (const uint8_t *)json, size, &piece, &counts, &empty);
    if (status == ND_OK && empty) {
        status = nd_fail(ND_ERR_DATA, "\"messages\" is empty, or no list; give a list of messages "
                                      "with \"role\" and \"content\"");
    }
    status = status == ND_OK ? begin_message(&t, role, sizeof role - 1) : status;
    status = status == ND_OK ? add_body(&t) : status;
    *ids = piece.ids; /* where the array has grown, also after a failure */
    free(body.data);
    free(piece.spans.data);
    return status;
}
