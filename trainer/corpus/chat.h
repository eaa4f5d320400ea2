// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CORPUS_CHAT_H
#define ND_CORPUS_CHAT_H
/*
 * Messages with roles as one sequence of ids. The text of an assistant's message and the token that
 * ends it count in the loss, unless the message has "weight": 0; nothing else does.
 *
 *   llama3   begin of text, then for each message: <|start_header_id|> role <|end_header_id|>, two
 *            newlines, the text without white space around it (Python's strip), <|eot_id|>
 *   chatml   for each message: <|im_start|> role, newline, the text, <|im_end|>, newline
 *
 * What stands between two control tokens is encoded as one text, as it is when the rendered whole
 * is encoded: in chatml a text that begins with a newline has it in one token with the one before
 * it, where the tokenizer has such a token. A token that has both counts.
 *
 * The template of a model may add to its form a first system turn, or a text before that of a given
 * one, which do not count.
 */
#include "trainer/corpus/corpus.h"

/* Bits of nd_chat_template.does. */
enum {
    ND_OWN_TOOLS = 1, /* writes what tools say in a way of its own: such roles are refused */
    ND_BEGINS = 2,    /* begins a text with <|begin_of_text|>, or else <s>, also in ChatML */
    ND_THINKS = 4     /* the last message, an assistant's that answers a user, has an empty block
                         <think> before its text, whose first newlines go */
};

/* What a model's own chat template does beside its form. */
struct nd_chat_template {
    const char *sha256; /* of its text */
    nd_chat_format format;
    const char *system; /* text of the first turn where a conversation begins with another; NULL:
                           there is none */
    const char *prefix; /* of the text of a first system turn; NULL: none */
    unsigned does;
};

/* The form that a value of data.chat_format names; ND_CHAT_NONE where it is none, or NULL. */
nd_chat_format nd_chat_format_of(const char *name);

/* The text of the chat template in a model folder: chat_template.jinja, else chat_template of
 * tokenizer_config.json, of several the one named "default". *out: NULL where there is none; owned
 * by the caller. */
nd_status nd_chat_template_read(const char *folder, char **out);
/* What the template beside a tokenizer does. *out: NULL where it does nothing beside the form,
 * where there is none, or where it is *foreign: not known, or of another form. `tokenizer` NULL:
 * none. */
nd_status nd_chat_template_find(const char *tokenizer, nd_chat_format format,
                                const nd_chat_template **out, bool *foreign);
void nd_chat_warn_of_foreign(nd_chat_format format);

typedef struct nd_chat {
    nd_chat_format format;
    const nd_tokenizer *tokenizer;    /* borrowed */
    int32_t begin;                    /* of a text; -1: none */
    int32_t open, middle, close;      /* around role and text; middle -1: none */
    const nd_chat_template *template; /* NULL: the form as it stands */
} nd_chat;

/* ND_ERR_DATA names a control token that the tokenizer lacks. */
nd_status nd_chat_find(const nd_tokenizer *tokenizer, nd_chat_format format, nd_chat *out);
/* Appends the messages of a JSON array to the piece, with spans; `empty` when there are none. The
 * JSON is that of rows (row.h); counts->lone grows as there, and counts->stray is set if it is "".
 * ND_ERR_DATA says what is wrong. */
nd_status nd_chat_add(const nd_chat *chat, nd_encoder *encoder, const uint8_t *json, size_t size,
                      nd_corpus_piece *piece, nd_corpus_counts *counts, bool *empty);
/* What a model continues: appends the messages of a JSON array as above, then the beginning of an
 * assistant's message, up to its text. ND_ERR_DATA says what is wrong with them; also when there
 * are none. */
nd_status nd_chat_prompt(const nd_chat *chat, nd_encoder *encoder, const char *json, size_t size,
                         nd_ids *ids);

#endif
