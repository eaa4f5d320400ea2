// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/chat.h"

#include <jansson.h>
#include <string.h>

#include "runtime/base/json.h"

static nd_status find(const nd_tokenizer *tokenizer, const char *name, int32_t *id)
{
    *id = nd_tokenizer_find(tokenizer, name, strlen(name));
    return *id >= 0
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "the tokenizer has no token %s, which this data.chat_format needs", name);
}

nd_status nd_chat_find(const nd_tokenizer *tokenizer, nd_chat_format format, nd_chat *out)
{
    *out = (nd_chat){.format = format, .begin = -1, .open = -1, .middle = -1, .close = -1};
    if (format == ND_CHAT_LLAMA3) {
        ND_TRY(find(tokenizer, "<|begin_of_text|>", &out->begin));
        ND_TRY(find(tokenizer, "<|start_header_id|>", &out->open));
        ND_TRY(find(tokenizer, "<|end_header_id|>", &out->middle));
        return find(tokenizer, "<|eot_id|>", &out->close);
    }
    if (format == ND_CHAT_CHATML) {
        ND_TRY(find(tokenizer, "<|im_start|>", &out->open));
        return find(tokenizer, "<|im_end|>", &out->close);
    }
    return ND_OK;
}

typedef struct chat_text {
    const nd_chat *chat;
    nd_encoder *encoder;
    nd_corpus_piece *piece;
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

/* Tokens from `begin` on do not count; continues the last span where they touch. */
static nd_status ignore_from(const chat_text *t, size_t begin)
{
    nd_ids *spans = &t->piece->spans;
    int32_t span[2] = {(int32_t)begin, (int32_t)t->piece->ids.count};
    if (spans->count > 0 && spans->data[spans->count - 1] == span[0]) {
        spans->data[spans->count - 1] = span[1];
        return ND_OK;
    }
    return nd_ids_add(spans, span, span[1] > span[0] ? 2 : 0);
}

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* What stands before the text of a message. */
static nd_status add_header(const chat_text *t, const char *role, size_t size)
{
    const bool llama3 = t->chat->format == ND_CHAT_LLAMA3;
    ND_TRY(add_token(t, t->chat->open));
    ND_TRY(add_text(t, role, size));
    ND_TRY(add_token(t, t->chat->middle));
    return add_text(t, llama3 ? "\n\n" : "\n", llama3 ? 2 : 1);
}

static nd_status add_message(const chat_text *t, const json_t *message)
{
    const json_t *role = json_object_get(message, "role");
    const json_t *content = json_object_get(message, "content");
    const nd_chat *chat = t->chat;
    const bool llama3 = chat->format == ND_CHAT_LLAMA3;
    if (!json_is_string(role) || !json_is_string(content)) {
        return nd_fail(ND_ERR_DATA, "a message lacks \"role\" or \"content\", or one of them is no "
                                    "string");
    }
    const char *text = json_string_value(content);
    size_t size = json_string_length(content), from = t->piece->ids.count;
    while (llama3 && size > 0 && is_space(*text)) {
        text++;
        size--;
    }
    while (llama3 && size > 0 && is_space(text[size - 1])) {
        size--;
    }
    ND_TRY(add_header(t, json_string_value(role), json_string_length(role)));
    if (strcmp(json_string_value(role), "assistant") == 0) {
        ND_TRY(ignore_from(t, from));
        from = t->piece->ids.count;
    }
    const bool counts = from == t->piece->ids.count;
    ND_TRY(add_text(t, text, size));
    ND_TRY(add_token(t, chat->close));
    from = counts ? t->piece->ids.count : from;
    ND_TRY(add_text(t, "\n", llama3 ? 0 : 1));
    return ignore_from(t, from);
}

nd_status nd_chat_add(const nd_chat *chat, nd_encoder *encoder, const uint8_t *json, size_t size,
                      nd_corpus_piece *piece, bool *empty)
{
    const chat_text t = {chat, encoder, piece};
    json_error_t error;
    json_t *list = json_loadb((const char *)json, size, JSON_ALLOW_NUL, &error);
    nd_status status = ND_OK;
    *empty = json_array_size(list) == 0;
    if (!list) {
        return nd_json_no_memory(&error)
                   ? nd_fail_memory("messages")
                   : nd_fail(ND_ERR_DATA, "\"messages\", column %d: %s", error.column, error.text);
    }
    if (!*empty) {
        size_t from = piece->ids.count;
        ND_TRY_OUT(add_token(&t, chat->begin));
        ND_TRY_OUT(ignore_from(&t, from));
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        ND_TRY_OUT(add_message(&t, json_array_get(list, i)));
    }
out:
    json_decref(list);
    return status;
}

nd_status nd_chat_prompt(const nd_chat *chat, nd_encoder *encoder, const char *json, size_t size,
                         nd_ids *ids)
{
    static const char role[] = "assistant";
    nd_corpus_piece piece = {.ids = *ids};
    const chat_text t = {chat, encoder, &piece};
    bool empty = false;
    nd_status status = nd_chat_add(chat, encoder, (const uint8_t *)json, size, &piece, &empty);
    if (status == ND_OK && empty) {
        status = nd_fail(ND_ERR_DATA, "\"messages\" is empty, or no list; give a list of messages "
                                      "with \"role\" and \"content\"");
    }
    status = status == ND_OK ? add_header(&t, role, sizeof role - 1) : status;
    *ids = piece.ids; /* where the array has grown, also after a failure */
    free(piece.spans.data);
    return status;
}
