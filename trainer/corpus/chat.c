// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/chat.h"

#include <stdlib.h>
#include <string.h>

#include "trainer/corpus/row.h"
#include "trainer/text/parts.h"
#include "trainer/text/unicode.h"

enum { FORM_TEXT_MAX = 512 };

/* Text of a form into `out`, with what its marks stand for. */
static void expand(const nd_chat_rules *rules, const char *text, const char *role, char *out)
{
    for (size_t room = FORM_TEXT_MAX; *text && room > sizeof rules->bos;) {
        const char *mark = strncmp(text, "{role}", 6) == 0  ? role
                           : strncmp(text, "{bos}", 5) == 0 ? rules->bos
                           : strncmp(text, "{eos}", 5) == 0 ? rules->eos
                                                            : NULL;
        const int n = mark ? sprintf(out, "%s", mark) : sprintf(out, "%c", *text);
        text += mark ? strcspn(text, "}") + 1 : 1;
        out += n;
        room -= (size_t)n;
    }
    *out = '\0';
}

nd_status nd_chat_find(const nd_tokenizer *tokenizer, const nd_chat_rules *rules, nd_chat *out)
{
    static const char *const needed[3][3] = {
        {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"}, {"<|im_start|>"}};
    char text[FORM_TEXT_MAX], *token = text;
    const char *missing = NULL;
    *out = (nd_chat){.rules = *rules, .tokenizer = tokenizer, .close = -1};
    if (!rules->template) {
        return ND_OK;
    }
    const nd_chat_form *form = rules->template->form;
    if (!rules->eos[0] && strstr(form->close, "{eos}")) {
        return nd_fail(ND_ERR_DATA,
                       "tokenizer_config.json beside the tokenizer names no eos_token, which its "
                       "chat template writes; add \"eos_token\" there");
    }
    expand(rules, form->close, "", text);
    token += strspn(token, " ");
    token[strcspn(token, " \n")] = '\0';
    const int known = form == nd_chat_forms ? 0 : form == nd_chat_forms + 1 ? 1 : 2;
    for (int i = 0; i < 4 && !missing; i++) {
        const char *name = i == 3 ? token : needed[known][i];
        out->close = name ? nd_tokenizer_find(tokenizer, name, strlen(name)) : 0;
        missing = out->close < 0 ? name : NULL;
    }
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
    bool swallows;       /* the last token takes the white space behind it */
    int64_t messages;
    bool answers; /* a user has spoken */
} chat_text;

static nd_status add_bytes(chat_text *t, const void *bytes, size_t size, bool counts)
{
    ND_TRY(nd_bytes_add(&t->body, bytes, size));
    t->quiet = counts ? t->quiet : t->body.count;
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

/* The ids of the body. What does not count has as many bytes of tokens as where it stands alone.
 * Its last newlines may be other tokens beside the content, or one with those that the content
 * begins with, which counts. */
static nd_status flush(chat_text *t)
{
    const nd_tokenizer *tokenizer = t->chat->tokenizer;
    const size_t from = t->piece->ids.count;
    const uint8_t *text = t->body.data;
    const int32_t *ids;
    size_t size = t->body.count, count, before, bytes = 0, n;
    while (t->swallows && (n = space_at(text, size, false)) > 0) {
        text += n;
        size -= n;
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
        const nd_encode_counts counts = *nd_encoder_counts(t->encoder);
        ND_TRY(nd_encode_part(t->encoder, (const char *)text, quiet, false, false, &ids, &count));
        nd_encoder_set_counts(t->encoder, &counts);
        for (size_t i = 0; i < count; i++, bytes += n) {
            (void)nd_tokenizer_token(tokenizer, ids[i], &n);
        }
        for (before = 0; from + before < t->piece->ids.count; before++, bytes -= n) {
            (void)nd_tokenizer_token(tokenizer, t->piece->ids.data[from + before], &n);
            if (n > bytes) {
                break;
            }
        }
    }
    return ignore(t, from, from + before);
}

static nd_status add_token(chat_text *t, int32_t id, bool counts)
{
    const nd_tokenizer *tokenizer = t->chat->tokenizer;
    ND_TRY(flush(t));
    for (int i = 0; i < tokenizer->added_count; i++) {
        t->swallows |= tokenizer->added[i].id == id && tokenizer->added[i].rstrip;
    }
    ND_TRY(nd_ids_add(&t->piece->ids, &id, 1));
    return counts ? ND_OK : ignore(t, t->piece->ids.count - 1, t->piece->ids.count);
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

/* Text of a form. What counts of it ends with its last token. */
static nd_status add_form(chat_text *t, const char *form, const char *role, bool counts)
{
    char text[FORM_TEXT_MAX];
    expand(&t->chat->rules, form, role, text);
    for (const char *p = text; *p;) {
        int32_t id;
        const size_t token = token_at(t->chat, p, &id);
        counts = counts && p[strspn(p, " \n")];
        ND_TRY(token > 0 ? add_token(t, id, counts) : add_bytes(t, p, 1, counts));
        p += token > 0 ? token : 1;
    }
    return ND_OK;
}

/* "weight" of a message: 0 leaves its turn out of the loss, as in OpenAI's and Mistral's files. */
static nd_status read_weight(const nd_row_field *field, bool *counts)
{
    char text[4] = "";
    snprintf(text, sizeof text, "%.*s", field->size < 4 ? (int)field->size : 0,
             field->kind == ND_ROW_OTHER ? (const char *)field->begin : "");
    *counts = field->empty || strcmp(text, "1") == 0 || strcmp(text, "1.0") == 0;
    if (!*counts && strcmp(text, "0") != 0 && strcmp(text, "0.0") != 0) {
        return nd_fail(ND_ERR_DATA, "\"weight\" of a message is %.*s; it must be 0 or 1",
                       (int)(field->size < 40 ? field->size : 40), (const char *)field->begin);
    }
    return ND_OK;
}

/* The role and the content of a message, lent from the JSON or from the buffers. */
static nd_status read_message(chat_text *t, const uint8_t *json, size_t size, nd_row_field said[2],
                              bool *counts)
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
    for (int i = 2; i < 5 && !fault; i++) { /* a null or an empty list says that there is none */
        if (!fields[i].empty) {
            return nd_fail(ND_ERR_DATA,
                           "a message has \"%s\", which data.chat_format (--chat-format) does not "
                           "write; write it with the chat template of the tokenizer, as "
                           "scripts/encode_rows.py does",
                           fields[i].key);
        }
    }
    ND_TRY(fault ? ND_OK : read_weight(&fields[5], counts));
    if (fault || fields[0].kind != ND_ROW_STRING || fields[1].kind != ND_ROW_STRING) {
        return nd_fail(ND_ERR_DATA, "a message lacks \"role\" or \"content\", or one of them is no "
                                    "string");
    }
    for (int i = 0; i < 2; i++) {
        said[i] = fields[i];
        ND_TRY(nd_row_text(&said[i], &t->strings[i], &t->counts->lone));
    }
    if (fields[6].kind == ND_ROW_STRING && !t->counts->stray[0]) {
        snprintf(t->counts->stray, sizeof t->counts->stray, "%.*s",
                 (int)(fields[6].size < 47 ? fields[6].size : 47), (const char *)fields[6].begin);
    }
    return ND_OK;
}

enum { SYSTEM, USER, ASSISTANT, TOOL, IPYTHON, ROLES };
static const char *const role_names[ROLES] = {"system", "user", "assistant", "tool", "ipython"};

/* The role of a message, if the form takes it in this place. */
static nd_status find_role(const chat_text *t, const uint8_t *text, size_t size, int *role)
{
    const nd_chat_template *own = t->chat->rules.template;
    int i = 0;
    while (i < ROLES && (size != strlen(role_names[i]) || memcmp(text, role_names[i], size) != 0)) {
        i++;
    }
    *role = i;
    if (i == ROLES) {
        return nd_fail(ND_ERR_DATA,
                       "a message has the role \"%.*s\"; it must be system, user, assistant, tool "
                       "or ipython",
                       (int)(size < 64 ? size : 64), (const char *)text);
    }
    if (strstr(own->form->user_open, "{role}") ? *role < TOOL || !(own->does & ND_OWN_TOOLS)
                                               : *role == USER + t->messages % 2) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_DATA,
                   "a message has the role \"%s\" where the chat template beside the tokenizer "
                   "takes none, or writes it in a way of its own; %s",
                   role_names[*role],
                   *role == SYSTEM && t->messages == 0
                       ? "put its text into that of the first user"
                       : "let a user and an assistant take turns, or write it with that "
                         "template, as scripts/encode_rows.py does");
}

static nd_status add_turn(chat_text *t, int role, bool thinks, bool counts, const uint8_t *text,
                          size_t size)
{
    static const char thought[] = "<think>\n\n</think>\n\n";
    const nd_chat_template *own = t->chat->rules.template;
    const bool answer = role == ASSISTANT;
    ND_TRY(add_form(t, answer ? own->form->open : own->form->user_open, role_names[role], false));
    if (role == SYSTEM && t->messages == 0 && own->prefix) {
        ND_TRY(add_bytes(t, own->prefix, strlen(own->prefix), false));
    }
    if (own->form->strips) {
        strip(&text, &size);
    }
    for (; thinks && size > 0 && *text == '\n'; size--) {
        text++;
    }
    ND_TRY(add_bytes(t, thought, thinks ? sizeof thought - 1 : 0, false));
    ND_TRY(add_bytes(t, text, size, counts));
    return add_form(t, answer ? own->form->close : own->form->user_close, role_names[role], counts);
}

static nd_status add_message(chat_text *t, bool last, const uint8_t *json, size_t json_size)
{
    const nd_chat_template *own = t->chat->rules.template;
    nd_row_field said[2];
    bool counts = false;
    int role;
    ND_TRY(read_message(t, json, json_size, said, &counts));
    ND_TRY(find_role(t, said[0].begin, said[0].size, &role));
    const uint8_t *text = said[1].begin;
    const size_t size = said[1].size;
    const bool answer = role == ASSISTANT, thinks = answer && own->does & ND_THINKS;
    if (thinks && memmem(text, size, "</think>", 8)) {
        return nd_fail(ND_ERR_DATA, "a message of the assistant holds </think>, which the chat "
                                    "template beside the tokenizer moves; write it with that "
                                    "template, as scripts/encode_rows.py does");
    }
    if (t->messages == 0 && role != SYSTEM && own->system) {
        ND_TRY(
            add_turn(t, SYSTEM, false, false, (const uint8_t *)own->system, strlen(own->system)));
    }
    ND_TRY(add_turn(t, role, thinks && last && t->answers, counts && answer, text, size));
    t->messages++;
    t->answers |= role == USER;
    return ND_OK;
}

nd_status nd_chat_add(const nd_chat *chat, nd_encoder *encoder, const uint8_t *json, size_t size,
                      bool prompts, nd_corpus_piece *piece, nd_corpus_counts *counts, bool *empty)
{
    const nd_chat_form *form = chat->rules.template->form;
    const char *prompt = form->prompt ? form->prompt : form->open;
    chat_text t = {.chat = chat, .encoder = encoder, .piece = piece, .counts = counts};
    nd_row_field message, next;
    size_t at = 0;
    const char *fault = nd_row_next(json, size, &at, &message);
    nd_status status = ND_OK;
    *empty = !fault && message.kind == ND_ROW_ABSENT;
    ND_TRY_OUT(fault || *empty ? ND_OK : add_form(&t, form->begin, "", false));
    for (; !fault && message.kind != ND_ROW_ABSENT; message = next) {
        fault = nd_row_next(json, size, &at, &next);
        const bool last = next.kind == ND_ROW_ABSENT;
        ND_TRY_OUT(fault ? ND_OK : add_message(&t, last, message.begin, message.size));
    }
    ND_TRY_OUT(fault    ? nd_fail(ND_ERR_DATA, "\"messages\": %s", fault)
               : *empty ? ND_OK
                        : add_form(&t, prompts ? prompt : form->end, role_names[ASSISTANT], false));
    status = flush(&t);
out:
    free(t.strings[0].data);
    free(t.strings[1].data);
    free(t.body.data);
    return status;
}

nd_status nd_chat_prompt(const nd_chat *chat, nd_encoder *encoder, const char *json, size_t size,
                         nd_ids *ids)
{
    nd_corpus_piece piece = {.ids = *ids};
    nd_corpus_counts counts = {0};
    bool empty = false;
    nd_status status =
        nd_chat_add(chat, encoder, (const uint8_t *)json, size, true, &piece, &counts, &empty);
    if (status == ND_OK && empty) {
        status = nd_fail(ND_ERR_DATA, "\"messages\" is empty, or no list; give a list of messages "
                                      "with \"role\" and \"content\"");
    }
    *ids = piece.ids; /* where the array has grown, also after a failure */
    free(piece.spans.data);
    return status;
}
