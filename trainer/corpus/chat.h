// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CORPUS_CHAT_H
#define ND_CORPUS_CHAT_H
/*
 * Messages with roles as one sequence of ids. The text of an assistant's message and the token that
 * ends it count in the loss, unless the message has "weight": 0; nothing else does.
 *
 * A form says what stands around a message. Two have names:
 *
 *   llama3   begin of text, then for each message: <|start_header_id|> role <|end_header_id|>, two
 *            newlines, the text without white space around it (Python's strip), <|eot_id|>
 *   chatml   for each message: <|im_start|> role, newline, the text, <|im_end|>, newline
 *
 * The chat template of a model, known by its text, has one of these or another form, and may add to
 * it: a first system turn, or a text before that of a given one, which do not count. In a form that
 * does not write the name of the role, a user and an assistant take turns, and nobody else speaks.
 *
 * What stands between two special tokens of the form is encoded as one text, as it is when the
 * rendered whole is encoded: in chatml a text that begins with a newline has it in one token with
 * the one before it, where the tokenizer has such a token. A token that has both counts.
 */
#include "trainer/corpus/corpus.h"

/* In all texts {role} is the name of the role, {bos} and {eos} are tokens of the tokenizer's
 * configuration, and special tokens of the tokenizer are those. */
typedef struct nd_chat_form {
    const char *begin;
    const char *user_open, *user_close; /* around what all but the assistant say */
    const char *open, *close;           /* around what the assistant says */
    const char *prompt; /* what an assistant goes on behind; NULL: the opening of its turn */
    const char *end;    /* behind the last turn where no assistant goes on */
    bool strips;        /* texts lose white space around them */
} nd_chat_form;

/* llama3, chatml, those without a name, and one of zeros. */
extern const nd_chat_form nd_chat_forms[];

/* Bits of nd_chat_template.does. */
enum {
    ND_OWN_TOOLS = 1, /* writes what tools say in a way of its own: such roles are refused */
    ND_THINKS = 2,    /* the last message, an assistant's that answers a user, has an empty block
                         <think> before its text, whose first newlines go; a text with </think>,
                         which is moved, is refused */
};

/* A chat template of a model: its form, and what the template adds to the form. */
struct nd_chat_template {
    const char *sha256; /* of its text; "": a form by name */
    const nd_chat_form *form;
    const char *system; /* text of the first turn where a conversation begins with another; NULL:
                           there is none */
    const char *prefix; /* of the text of a first system turn; NULL: none */
    unsigned does;
};

/* The text of the chat template in a model folder: chat_template.jinja, else chat_template of
 * tokenizer_config.json, of several the one named "default". *out: NULL where there is none; owned
 * by the caller. */
nd_status nd_chat_template_read(const char *folder, char **out);

/* Finds what a value of data.chat_format means beside a tokenizer (NULL: bytes): a form by name,
 * with what the tokenizer's template adds if it has that form, or that template. ND_ERR_DATA: the
 * template of the model is asked for, and there is none that is known. */
nd_status nd_chat_rules_find(const char *tokenizer, nd_chat_choice choice, nd_chat_rules *out);
/* Logs how messages are written. */
void nd_chat_rules_tell(const nd_chat_rules *rules);

typedef struct nd_chat {
    nd_chat_rules rules;
    const nd_tokenizer *tokenizer; /* borrowed */
    int32_t close;                 /* ends an answer */
} nd_chat;

/* ND_ERR_DATA names a control token that the tokenizer lacks. Rules without a template: no error,
 * and the chat writes nothing. */
nd_status nd_chat_find(const nd_tokenizer *tokenizer, const nd_chat_rules *rules, nd_chat *out);
/* The chat of a model by its files: the template beside the tokenizer if it is known, else a form
 * by name whose tokens the tokenizer has. False: there is none. */
bool nd_chat_guess(const nd_tokenizer *tokenizer, const char *path, nd_chat *out);
/* Appends the messages of a JSON array to the piece, with spans; `empty` when there are none.
 * `prompts`: with the beginning of an assistant's message behind them, up to its text. The JSON is
 * that of rows (row.h); counts->lone grows as there, and counts->stray is set if it is "".
 * ND_ERR_DATA says what is wrong. */
nd_status nd_chat_add(const nd_chat *chat, nd_encoder *encoder, const uint8_t *json, size_t size,
                      bool prompts, nd_corpus_piece *piece, nd_corpus_counts *counts, bool *empty);
/* Appends what a model continues, messages that prompt. ND_ERR_DATA also when there are none. */
nd_status nd_chat_prompt(const nd_chat *chat, nd_encoder *encoder, const char *json, size_t size,
                         nd_ids *ids);

#endif
