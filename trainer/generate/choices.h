// SPDX-License-Identifier: Apache-2.0
#ifndef ND_GENERATE_CHOICES_H
#define ND_GENERATE_CHOICES_H
/*
 * Multiple choice as lm-evaluation-harness scores it (lm_eval/api/model.py, api/metrics.py): which
 * of several continuations of a context is likeliest.
 *
 * A row of JSON lines has "context", a text; "choices", a list of texts; "gold", the number of the
 * right one, from 0; and may have "delimiter", which stands before each choice, " " or "" if it is
 * not given, and "id". Another key is an error.
 *
 * Blanks at the end of the context move to the continuation. The tokens of context and
 * continuation together, less as many as the context alone has, are those of the continuation; the
 * score is the sum of their log probabilities. An empty context is one token, the beginning or the
 * end of a text. What is longer than the model allows loses its beginning.
 *
 *   acc        the choice with the greatest score is the right one
 *   acc_norm   the same of scores divided by the number of characters of the choice
 * When scores are equal, the first choice counts.
 */
#include "trainer/generate/generate.h"
#include "trainer/text/buffer.h"
#include "trainer/text/tokenizer.h"

typedef struct nd_choice {
    nd_ids ids;   /* of context and continuation; owned */
    int64_t from; /* the first token of the continuation, at least 1; 0: it has none */
    int64_t characters;
    double score; /* once it was scored */
    bool greedy;  /* each token of the continuation is the likeliest */
} nd_choice;

typedef struct nd_question {
    nd_choice *choices; /* [count], owned */
    int64_t count, gold;
    char *name;     /* its "id" as JSON; NULL: none; owned */
    char *left_out; /* why it cannot be scored and has no choices; NULL: it can; owned */
} nd_question;

typedef struct nd_questions {
    nd_question *list; /* owned */
    size_t count, room;
    size_t left_out; /* of count */
    int64_t longest; /* the most tokens of a choice */
} nd_questions;

typedef struct nd_choice_rules {
    nd_encoder *encoder; /* borrowed */
    nd_encoder *bare;    /* of choices behind an empty context: adds no token; NULL: encoder */
    int64_t vocab;
    int64_t max_tokens; /* of context and continuation together */
    bool any_gold;      /* "gold" may be missing: it is -1 then */
    int32_t prefix;     /* of an empty context; -1: such a row is an error */
    bool leaves_out;    /* a row with a choice of no token is kept without choices, not an error */
    int64_t lines_read; /* before the text: messages count on from them */
} nd_choice_rules;

/* ND_ERR_DATA names `name` and the line. */
nd_status nd_questions_read(nd_questions *questions, const nd_choice_rules *rules, const char *name,
                            const char *text, size_t size);
void nd_questions_fini(nd_questions *questions); /* an all-zero one is legal */

/* Fills the scores of one question. Collective over tp. scores: room for the longest choice. */
nd_status nd_question_score(nd_generator *generator, nd_question *question, nd_token_score *scores);
/* The choice with the greatest score; `norm`: per character. */
int64_t nd_question_best(const nd_question *question, bool norm);

#endif
