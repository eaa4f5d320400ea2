// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/chat.h"

#include <stdlib.h>
#include <string.h>

#include "trainer/corpus/row.h"
#include "trainer/text/parts.h"
#include "trainer/text/unicode.h"

enum { FORM_TEXT_MAX = 512 };

/* The first token that the form by name needs and the tokenizer lacks; NULL: it has all. */
static const char *missing_token(const nd_tokenizer *tokenizer, ptrdiff_t form)
{
    static const char *const needed[][5] = {
        {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
        {"<|im_start|>", "<|im_end|>"}};
    const char *const *name = needed[form];
    while (*name && nd_tokenizer_find(tokenizer, *name, strlen(*name)) >= 0) {
        name++;
    }
    return *name;
}

/* Text of a form into `out`, with what its marks stand for. */
static void expand(const nd_chat_rules *rules, const char *text, const char *role, char *out)
{
    const char *const marks[][2] = {{"{role}", role}, {"{bos}", rules->bos}, {"{eos}", rules->eos}};
    size_t at = 0;
    while (*text && at + sizeof rules->bos < FORM_TEXT_MAX) {
        size_t i = 0;
        while (i < 3 && strncmp(text, marks[i][0], strlen(marks[i][0])) != 0) {
            i++;
        }
        if (i == 3) {
            out[at++] = *text++;
            continue;
        }
        at += (size_t)sprintf(out + at, "%s", marks[i][1]);
        text += strlen(marks[i][0]);
    }
    out[at] = '\0';
}

/* Bytes of the closing of an answer that count: up to the white space behind its token. */
static size_t counted_bytes(const char *close)
{
    size_t size = strlen(close);
    while (size > 0 && (close[size - 1] == '\n' || close[size - 1] == ' ')) {
        size--;
    }
    return size;
}

nd_status nd_chat_find(const nd_tokenizer *tokenizer, const nd_chat_rules *rules, nd_chat *out)
{
    char text[FORM_TEXT_MAX] = "";
    *out = (nd_chat){.rules = *rules, .tokenizer = tokenizer, .close = -1};
    if (!rules->template) {
        return ND_OK;
    }
    const ptrdiff_t form = rules->template->form - nd_chat_forms;
    const char *close = rules->template->form->turns[ND_CHAT_ASSISTANT].close;
    if (!rules->eos[0] && strstr(close, "{eos}")) {
        return nd_fail(ND_ERR_DATA,
                       "tokenizer_config.json beside the tokenizer names no eos_token, which its "
                       "chat template writes; add \"eos_token\" there");
    }
    const char *missing = form < 2 ? missing_token(tokenizer, form) : NULL, *token = text;
    expand(rules, close, "", text);
    text[counted_bytes(text)] = '\0';
    token += strspn(text, " ");
    out->close = nd_tokenizer_find(tokenizer, token, strlen(token));
    missing = !missing && out->close < 0 ? token : missing;
    return !missing ? ND_OK
                    : nd_fail(ND_ERR_DATA,
                              "the tokenizer has no token %s, which this data.chat_format needs; "
                              "name one that has it with data.tokenizer (--tokenizer), or give "
                              "another --chat-format",
                              missing);
}

bool nd_chat_guess(const nd_tokenizer *tokenizer, const char *path, nd_chat *out)
{
    static const nd_chat_choice choices[] = {ND_CHOOSE_CHAT_MODEL, ND_CHOOSE_CHAT_LLAMA3,
                                             ND_CHOOSE_CHAT_CHATML};
    bool found = false;
    for (size_t i = 0; i < sizeof choices / sizeof *choices && !found; i++) {
        nd_chat_rules rules;
        found = nd_chat_rules_find(path, choices[i], &rules) == ND_OK &&
                nd_chat_find(tokenizer, &rules, out) == ND_OK;
    }
    nd_error_clear();
    return found;
}

typedef struct chat_text {
    const nd_chat *chat;
    nd_encoder *encoder;
    nd_corpus_piece *piece;
    nd_corpus_counts *counts;
    nd_bytes strings[2]; /* role and content of a message, where they are unescaped */
    nd_bytes body;       /* what has no ids yet: all behind the last token of the form */
    size_t quiet;        /* bytes of the body that do not count; then all count */
    bool counting;       /* what is added now counts */
    bool swallows;       /* the last token takes the white space behind it */
    int64_t messages, turns;
    bool answers; /* a user has spoken */
} chat_text;

static nd_status add_bytes(chat_text *t, const void *bytes, size_t size)
{
    ND_TRY(nd_bytes_add(&t->body, bytes, size));
    t->quiet = t->counting ? t->quiet : t->body.count;
    return ND_OK;
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

/* Bytes of the white space character that a text begins with; 0: none. To str.strip of Python four
 * separators of files and records are white space too. */
static size_t space_at(const uint8_t *text, size_t size, bool python)
{
    const int n = size > 0 ? nd_utf8_next(text, size) : 0;
    const uint32_t code = n > 0 ? nd_char_at(text).code : 'x';
    const bool space = nd_char_class_of(code) == ND_CHAR_SPACE;
    return space || (python && code >= 0x1c && code <= 0x1f) ? (size_t)n : 0;
}

static void strip(const uint8_t **text, size_t *size)
{
    for (size_t n; (n = space_at(*text, *size, true)) > 0; *size -= n) {
        *text += n;
    }
    for (size_t n = 1; *size > 0 && n > 0; *size -= n) {
        const uint8_t *end = *text + *size;
        n = 1;
        while (n < 4 && n < *size && (end[-(ptrdiff_t)n] & 0xc0) == 0x80) {
            n++;
        }
        n = space_at(end - n, n, true) == n ? n : 0;
    }
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

/* How many of the ids from `from` on have nothing that counts, which stands behind the first
 * `size` bytes of the text: those whose bytes are the first ones of the tokens that the text before
 * it has alone. The newlines there may be other tokens beside the content, or one with the newlines
 * that it begins with. */
static nd_status count_before(const chat_text *t, size_t from, const char *text, size_t size,
                              size_t *out)
{
    const nd_encode_counts counts = *nd_encoder_counts(t->encoder);
    const nd_ids *all = &t->piece->ids;
    const int32_t *ids;
    size_t count;
    ND_TRY(nd_encode_part(t->encoder, text, size, false, false, &ids, &count));
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

/* The ids of the body. */
static nd_status flush(chat_text *t)
{
    const size_t from = t->piece->ids.count;
    const uint8_t *text = t->body.data;
    const int32_t *ids;
    size_t size = t->body.count, count, before;
    for (size_t n; t->swallows && (n = space_at(text, size, false)) > 0; size -= n) {
        text += n;
    }
    const size_t taken = t->body.count - size, quiet = t->quiet > taken ? t->quiet - taken : 0;
    t->body.count = t->quiet = 0;
    t->swallows = false;
    if (size == 0) {
        return ND_OK;
    }
    ND_TRY(nd_encode_part(t->encoder, (const char *)text, size, false, false, &ids, &count));
    ND_TRY(nd_ids_add(&t->piece->ids, ids, count));
    before = count;
    if (quiet < size) {
        ND_TRY(count_before(t, from, (const char *)text, quiet, &before));
    }
    return ignore(t, from, from + before);
}

static nd_status add_token(chat_text *t, int32_t id)
{
    const nd_tokenizer *tokenizer = t->chat->tokenizer;
    ND_TRY(flush(t));
    for (int i = 0; i < tokenizer->added_count; i++) {
        t->swallows |= tokenizer->added[i].id == id && tokenizer->added[i].rstrip;
    }
    ND_TRY(nd_ids_add(&t->piece->ids, &id, 1));
    return t->counting ? ND_OK : ignore(t, t->piece->ids.count - 1, t->piece->ids.count);
}

/* Bytes of the special token that a text of a form begins with, and its id; 0: none. It stands in
 * brackets, or is one that the tokenizer's configuration names. */
static size_t token_at(const nd_chat *chat, const char *text, int32_t *id)
{
    const char *const named[] = {chat->rules.bos, chat->rules.eos};
    const char *end = *text == '<' || *text == '[' ? strpbrk(text, ">]") : NULL;
    size_t size = end ? (size_t)(end - text) + 1 : 0;
    for (int i = 0; i < 2; i++) {
        const size_t n = strlen(named[i]);
        size = n > size && strncmp(text, named[i], n) == 0 ? n : size;
    }
    *id = size > 0 ? nd_tokenizer_find(chat->tokenizer, text, size) : -1;
    return *id >= 0 && nd_tokenizer_is_special(chat->tokenizer, *id) ? size : 0;
}

/* Text of a form, at most its first `size` bytes. */
static nd_status add_form(chat_text *t, const char *form, size_t size, const char *role)
{
    char some[FORM_TEXT_MAX], text[FORM_TEXT_MAX];
    snprintf(some, sizeof some, "%.*s", size < sizeof some ? (int)size : (int)sizeof some, form);
    expand(&t->chat->rules, some, role, text);
    for (const char *p = text; *p;) {
        int32_t id;
        const size_t token = token_at(t->chat, p, &id);
        ND_TRY(token > 0 ? add_token(t, id) : add_bytes(t, p, 1));
        p += token > 0 ? token : 1;
    }
    return ND_OK;
}

static bool does(const nd_chat *chat, unsigned bit)
{
    return chat->rules.template->does & bit;
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
static nd_status read_message(chat_text *t, const uint8_t *json, size_t size,
                              const uint8_t *text[2], size_t text_size[2], bool *counts)
{
    nd_row_field fields[] = {{.key = "role"},
                             {.key = "content"},
                             {.key = "tool_calls"},
                             {.key = "function_call"},
                             {.key = "reasoning_content"},
                             {.key = "weight"},
                             {.key = NULL}};
    size_t column;
    const char *fault = nd_row_scan(json, size, fields, 7, &column);
    ND_TRY(fault ? ND_OK : check_calls(fields + 2, 3));
    ND_TRY(fault ? ND_OK : read_weight(&fields[5], counts));
    if (fault || fields[0].kind != ND_ROW_STRING || fields[1].kind != ND_ROW_STRING) {
        return nd_fail(ND_ERR_DATA, "a message lacks \"role\" or \"content\", or one of them is no "
                                    "string");
    }
    for (int i = 0; i < 2; i++) {
        ND_TRY(nd_row_text(&fields[i], &t->strings[i], &text[i], &text_size[i], &t->counts->lone));
    }
    if (fields[6].kind == ND_ROW_STRING && !t->counts->stray[0]) {
        snprintf(t->counts->stray, sizeof t->counts->stray, "%.*s",
                 (int)(fields[6].size < 47 ? fields[6].size : 47), (const char *)fields[6].begin);
    }
    return ND_OK;
}

static const char *const role_names[] = {"system", "user", "assistant", "tool", "ipython"};

/* Its number, or -1. */
static int role_of(const uint8_t *role, size_t size)
{
    int i = sizeof role_names / sizeof *role_names;
    do {
        i--;
    } while (i >= 0 && (size != strlen(role_names[i]) || memcmp(role, role_names[i], size) != 0));
    return i;
}

static nd_status fail_role(const uint8_t *role, size_t size)
{
    return nd_fail(ND_ERR_DATA,
                   "a message has the role \"%.*s\"; it must be system, user, assistant, tool or "
                   "ipython",
                   (int)(size < 64 ? size : 64), (const char *)role);
}

/* Whether the form takes a message of this role in this place. */
static nd_status check_place(const chat_text *t, int role)
{
    const nd_chat_form *form = t->chat->rules.template->form;
    const bool any = strstr(form->turns[ND_CHAT_USER].open, "{role}");
    const bool first_system = role == ND_CHAT_SYSTEM && t->messages == 0;
    if (role >= ND_CHAT_TOOL ? any && !does(t->chat, ND_OWN_TOOLS)
        : first_system       ? form->turns[ND_CHAT_SYSTEM].open != NULL
                             : any || role == ND_CHAT_USER + t->turns % 2) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_DATA,
                   "a message has the role \"%s\" where the chat template beside the tokenizer "
                   "takes none, or writes it in a way of its own; %s",
                   role_names[role],
                   first_system ? "put its text into that of the first user"
                                : "let a user and an assistant take turns, or write it with that "
                                  "template, as scripts/encode_rows.py does");
}

static nd_status add_turn(chat_text *t, int role, bool last, bool counts, const uint8_t *text,
                          size_t size)
{
    static const char thought[] = "<think>\n\n</think>\n\n";
    const nd_chat_template *own = t->chat->rules.template;
    const int kind = role < ND_CHAT_TOOL ? role : ND_CHAT_USER;
    const char *name = role_names[role], *close = own->form->turns[kind].close;
    const size_t counted = counts ? counted_bytes(close) : 0;
    ND_TRY(add_form(t, own->form->turns[kind].open, SIZE_MAX, name));
    if (role == ND_CHAT_SYSTEM && t->messages == 0 && own->prefix) {
        ND_TRY(add_bytes(t, own->prefix, strlen(own->prefix)));
    }
    if (strchr(own->form->trims, "sua"[kind])) {
        strip(&text, &size);
    }
    if (role == ND_CHAT_ASSISTANT && last && t->answers && does(t->chat, ND_THINKS)) {
        for (; size > 0 && *text == '\n'; size--) {
            text++;
        }
        ND_TRY(add_bytes(t, thought, sizeof thought - 1));
    }
    t->counting = counts;
    ND_TRY(add_bytes(t, text, size));
    ND_TRY(add_form(t, close, counted, name));
    t->counting = false;
    return add_form(t, close + counted, SIZE_MAX, name);
}

static nd_status add_message(chat_text *t, bool last, const uint8_t *json, size_t json_size)
{
    const nd_chat_template *own = t->chat->rules.template;
    const uint8_t *text[2];
    size_t size[2];
    bool counts = false;
    ND_TRY(read_message(t, json, json_size, text, size, &counts));
    const int role = role_of(text[0], size[0]);
    ND_TRY(role < 0 ? fail_role(text[0], size[0]) : check_place(t, role));
    const bool first = t->messages == 0, first_system = first && role == ND_CHAT_SYSTEM;
    if (role == ND_CHAT_ASSISTANT && does(t->chat, ND_MOVES_THOUGHTS) &&
        memmem(text[1], size[1], "</think>", 8)) {
        return nd_fail(ND_ERR_DATA, "a message of the assistant holds </think>, which the chat "
                                    "template beside the tokenizer moves; write it with that "
                                    "template, as scripts/encode_rows.py does");
    }
    if (first && !first_system && (own->system || own->prefix)) {
        const char *system = own->system ? own->system : "";
        ND_TRY(add_turn(t, ND_CHAT_SYSTEM, false, false, (const uint8_t *)system, strlen(system)));
    }
    ND_TRY(add_turn(t, role, last, counts && role == ND_CHAT_ASSISTANT, text[1], size[1]));
    t->messages++;
    t->turns += !first_system;
    t->answers |= role == ND_CHAT_USER;
    return ND_OK;
}

/* The opening of an answer, or what ends a conversation. */
static nd_status add_end(chat_text *t, bool prompts)
{
    const nd_chat_form *form = t->chat->rules.template->form;
    const char *prompt = form->prompt ? form->prompt : form->turns[ND_CHAT_ASSISTANT].open;
    ND_TRY(add_form(t, prompts ? prompt : form->end, SIZE_MAX, role_names[ND_CHAT_ASSISTANT]));
    return flush(t);
}

static nd_status add_messages(chat_text *t, const uint8_t *json, size_t size, bool prompts,
                              bool *empty)
{
    const nd_chat_template *own = t->chat->rules.template;
    const uint8_t *message, *next;
    size_t message_size, next_size, at = 0;
    const char *fault = nd_row_next(json, size, &at, &message, &message_size);
    const char *begin = does(t->chat, ND_BEGINS) ? "{bos}" : own->form->begin;
    *empty = !fault && !message;
    if (!fault && message) {
        ND_TRY(add_form(t, begin, SIZE_MAX, ""));
    }
    while (!fault && message) {
        fault = nd_row_next(json, size, &at, &next, &next_size);
        ND_TRY(fault ? ND_OK : add_message(t, !next, message, message_size));
        message = next;
        message_size = next_size;
    }
    return fault    ? nd_fail(ND_ERR_DATA, "\"messages\": %s", fault)
           : *empty ? ND_OK
                    : add_end(t, prompts);
}

static nd_status add_chat(chat_text *t, const uint8_t *json, size_t size, bool prompts, bool *empty)
{
    const nd_status status = add_messages(t, json, size, prompts, empty);
    free(t->strings[0].data);
    free(t->strings[1].data);
    free(t->body.data);
    return status;
}

nd_status nd_chat_add(const nd_chat *chat, nd_encoder *encoder, const uint8_t *json, size_t size,
                      nd_corpus_piece *piece, nd_corpus_counts *counts, bool *empty)
{
    chat_text t = {.chat = chat, .encoder = encoder, .piece = piece, .counts = counts};
    return add_chat(&t, json, size, false, empty);
}

nd_status nd_chat_prompt(const nd_chat *chat, nd_encoder *encoder, const char *json, size_t size,
                         nd_ids *ids)
{
    nd_corpus_piece piece = {.ids = *ids};
    nd_corpus_counts counts = {0};
    chat_text t = {.chat = chat, .encoder = encoder, .piece = &piece, .counts = &counts};
    bool empty = false;
    nd_status status = add_chat(&t, (const uint8_t *)json, size, true, &empty);
    if (status == ND_OK && empty) {
        status = nd_fail(ND_ERR_DATA, "\"messages\" is empty, or no list; give a list of messages "
                                      "with \"role\" and \"content\"");
    }
    *ids = piece.ids; /* where the array has grown, also after a failure */
    free(piece.spans.data);
    return status;
}
