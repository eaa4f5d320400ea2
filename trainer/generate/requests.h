// SPDX-License-Identifier: Apache-2.0
#ifndef ND_GENERATE_REQUESTS_H
#define ND_GENERATE_REQUESTS_H
/*
 * Requests to a model: prompts to continue, from a text or from JSON lines, and the tokens that end
 * a text.
 *
 * A row of JSON lines has one of
 *   "prompt"    a text
 *   "messages"  a conversation, a list of {"role", "content"}, which the assistant continues
 *   "ids"       token ids, as they are
 * and may have "id", which is repeated with its result, and "max_new_tokens". Another key is an
 * error, since it asks for what nobody does. An empty line is no row.
 *
 * A plain prompt is encoded as `tokenizers` does it: with what the post-processor adds, and with
 * special tokens where the text has their writing. The text of a message is never searched for
 * special tokens.
 */
#include "trainer/corpus/chat.h"
#include "trainer/layout/layout.h"

typedef struct nd_request {
    nd_ids ids;        /* at least one; owned */
    char *name;        /* its "id" as JSON; owned; NULL: none */
    int64_t max_new;   /* of its row, or that of the rules */
    bool says_max_new; /* its row does */
} nd_request;

typedef struct nd_requests {
    nd_request *list; /* owned */
    size_t count, room;
    int64_t longest;  /* the most tokens of a request: prompt and new ones */
    bool twice_begun; /* some prompt begins with two tokens of the beginning of text */
} nd_requests;

typedef struct nd_request_rules {
    nd_encoder *prompts;  /* of plain prompts; NULL: the model has no tokenizer */
    nd_encoder *messages; /* of the texts of messages */
    const nd_chat *chat;  /* NULL: messages are an error */
    bool plain_as_user;   /* a plain prompt is the message of a user; needs `chat` */
    int64_t vocab;        /* of the model: greater ids are an error */
    int64_t begin;        /* token of the beginning of text; -1: none */
    int64_t max_new;      /* of rows that say nothing else */
    bool max_new_fits;    /* it is lowered to the room that a prompt leaves */
    int64_t max_tokens;   /* of a prompt with its new tokens */
    const char *limit;    /* what sets max_tokens: "the model's max_position_embeddings" */
} nd_request_rules;

/* One prompt. With rules->plain_as_user it is the message of a user. ND_ERR_DATA: not UTF-8, has no
 * token, has one that the model lacks, or is too long. `name` is for messages: "--prompt". */
nd_status nd_requests_add_text(nd_requests *requests, const nd_request_rules *rules,
                               const char *name, const char *text, size_t size);
/* The rows of JSON lines. ND_ERR_DATA names `name` and the line. */
nd_status nd_requests_add_rows(nd_requests *requests, const nd_request_rules *rules,
                               const char *name, const char *text, size_t size);
void nd_requests_fini(nd_requests *requests); /* an all-zero one is legal */

/* Adds the ids of eos_token_id, a number or a list, of generation_config.json, else of config.json.
 * `folder` NULL, or without these files: nothing is added. */
nd_status nd_ends_read(const char *folder, nd_ids *ends);

#endif
