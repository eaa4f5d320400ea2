// SPDX-License-Identifier: Apache-2.0
#include "trainer/generate/choices.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/math.h"

/* Tokens. */

static bool is_blank(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static nd_status encode(const nd_choice_rules *rules, nd_encoder *encoder, const char *text,
                        size_t size, nd_ids *out)
{
    const int32_t *ids;
    size_t count;
    ND_TRY(nd_encode(encoder, text, size, &ids, &count));
    for (size_t i = 0; i < count; i++) {
        if (ids[i] >= rules->vocab) {
            return nd_fail(ND_ERR_DATA,
                           "a text has the token %d, but the model's vocab_size is %lld; the "
                           "tokenizer is not the model's",
                           ids[i], (long long)rules->vocab);
        }
    }
    return nd_ids_add(out, ids, count);
}

/* `whole` is context and continuation; the first `context` bytes are the context without the blanks
 * at its end. */
static nd_status encode_choice(const nd_choice_rules *rules, const nd_bytes *whole, size_t context,
                               nd_choice *out)
{
    nd_ids alone = {0};
    const char *text = (const char *)whole->data;
    out->from = 0;
    if (context == 0) {
        if (rules->prefix < 0) {
            return nd_fail(ND_ERR_DATA, "\"context\" is empty, and the model has no token of the "
                                        "beginning or the end of a text to stand for it");
        }
        ND_TRY(nd_ids_add(&out->ids, &rules->prefix, 1));
        out->from = 1;
        ND_TRY(encode(rules, rules->bare ? rules->bare : rules->encoder, text, whole->count,
                      &out->ids));
    } else {
        nd_status status = encode(rules, rules->encoder, text, context, &alone);
        out->from = nd_max((int64_t)alone.count, 1);
        free(alone.data);
        ND_TRY(status);
        ND_TRY(encode(rules, rules->encoder, text, whole->count, &out->ids));
    }
    if (out->from >= (int64_t)out->ids.count) {
        out->from = 0;
        return nd_fail(ND_ERR_DATA,
                       "a choice adds no token to the context; it must not be empty, nor "
                       "become one token with the context: separate them by a blank");
    }
    /* Leaves the last max_tokens. */
    int64_t over = (int64_t)out->ids.count - rules->max_tokens;
    if (over > 0) {
        memmove(out->ids.data, out->ids.data + over,
                (size_t)rules->max_tokens * sizeof *out->ids.data);
        out->ids.count = (size_t)rules->max_tokens;
        out->from = out->from > over ? out->from - over : 0;
    }
    out->from = out->from < 1 ? 1 : out->from; /* the first token follows on none */
    return ND_OK;
}

/* Rows. */

static nd_status read_choice(const nd_choice_rules *rules, const json_t *row, const json_t *choice,
                             nd_choice *out)
{
    const json_t *context = json_object_get(row, "context");
    const json_t *delimiter = json_object_get(row, "delimiter");
    const char *text = json_string_value(context);
    size_t size = json_string_length(context), kept = size;
    nd_bytes whole = {0};
    nd_status status = ND_OK;
    if (!json_is_string(choice)) {
        return nd_fail(ND_ERR_DATA, "an entry of \"choices\" is not a string");
    }
    while (kept > 0 && is_blank(text[kept - 1])) {
        kept--;
    }
    ND_TRY_OUT(nd_bytes_add(&whole, text, size));
    ND_TRY_OUT(nd_bytes_add(&whole, json_string_value(delimiter), json_string_length(delimiter)));
    const size_t begin = whole.count;
    ND_TRY_OUT(nd_bytes_add(&whole, json_string_value(choice), json_string_length(choice)));
    for (size_t i = begin; i < whole.count; i++) { /* of valid UTF-8, as all JSON */
        out->characters += (whole.data[i] & 0xc0) != 0x80;
    }
    status = encode_choice(rules, &whole, kept, out);
out:
    free(whole.data);
    return status;
}

/* *scorable: false where the row is as it must be, but a choice has no token. */
static nd_status read_row(const nd_choice_rules *rules, const json_t *row, nd_question *out,
                          bool *scorable)
{
    static const char *const keys[] = {"context", "choices", "gold", "delimiter", "id", NULL};
    const json_t *choices = json_object_get(row, "choices"), *gold = json_object_get(row, "gold");
    const json_t *delimiter = json_object_get(row, "delimiter");
    const json_t *name = json_object_get(row, "id");
    if (!json_is_string(json_object_get(row, "context")) || json_array_size(choices) < 1) {
        return nd_fail(ND_ERR_DATA, "a row is an object with \"context\", a text, and \"choices\", "
                                    "a list of texts");
    }
    ND_TRY(nd_json_check_keys(row, keys,
                              "a row has \"context\", \"choices\" and \"gold\", and may have "
                              "\"delimiter\" and \"id\""));
    if (delimiter && !json_is_string(delimiter)) {
        return nd_fail(ND_ERR_DATA, "\"delimiter\" is not a string");
    }
    int64_t count = (int64_t)json_array_size(choices);
    out->gold = gold ? json_integer_value(gold) : -1;
    if ((gold || !rules->any_gold) &&
        (!json_is_integer(gold) || out->gold < 0 || out->gold >= count)) {
        return nd_fail(ND_ERR_DATA,
                       "\"gold\" must be the number of the right choice, from 0 to %lld",
                       (long long)count - 1);
    }
    if (name) {
        out->name = nd_json_text(name, JSON_ENCODE_ANY | JSON_COMPACT);
        ND_TRY(out->name ? ND_OK : nd_fail_memory("the \"id\" of a row"));
    }
    ND_TRY(ND_ALLOC(count, &out->choices));
    for (; out->count < count; out->count++) {
        nd_choice *c = &out->choices[out->count];
        c->from = 1;
        nd_status status = read_choice(rules, row, json_array_get(choices, (size_t)out->count), c);
        if (status != ND_OK) {
            *scorable = status != ND_ERR_DATA || c->from > 0;
            free(c->ids.data);
            return status;
        }
    }
    return ND_OK;
}

static void drop_choices(nd_question *q)
{
    for (int64_t i = 0; i < q->count; i++) {
        free(q->choices[i].ids.data);
    }
    q->count = 0;
}

static void question_fini(nd_question *q)
{
    drop_choices(q);
    free(q->choices);
    free(q->name);
    free(q->left_out);
}

static nd_status add_line(nd_questions *questions, const nd_choice_rules *rules, const char *name,
                          const nd_json_lines *lines)
{
    nd_question question = {0};
    json_t *row;
    bool scorable = true;
    nd_status status = nd_json_parse(lines->line, lines->size,
                                     JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, NULL, &row);
    status = status == ND_OK ? read_row(rules, row, &question, &scorable) : status;
    json_decref(row);
    if (status != ND_OK) {
        status = nd_fail_context(status, "reading %s, line %lld", name, (long long)lines->number);
    }
    if (!scorable && rules->leaves_out) {
        drop_choices(&question);
        question.gold = -1;
        ND_TRY_OUT(nd_fs_format(&question.left_out, "%s", nd_error_last()->message));
        nd_error_clear();
    } else {
        ND_TRY_OUT(status);
    }
    ND_TRY_OUT(ND_ARRAY_RESERVE(&questions->list, &questions->room, questions->count + 1));
    for (int64_t i = 0; i < question.count; i++) {
        questions->longest = nd_max(questions->longest, (int64_t)question.choices[i].ids.count);
    }
    questions->left_out += question.left_out != NULL;
    questions->list[questions->count++] = question;
    question = (nd_question){0};
out:
    question_fini(&question);
    return status;
}

nd_status nd_questions_read(nd_questions *questions, const nd_choice_rules *rules, const char *name,
                            const char *text, size_t size)
{
    nd_json_lines lines = {.next = text, .left = size, .number = rules->lines_read};
    while (nd_json_lines_next(&lines)) {
        ND_TRY(add_line(questions, rules, name, &lines));
    }
    return ND_OK;
}

void nd_questions_fini(nd_questions *questions)
{
    for (size_t i = 0; i < questions->count; i++) {
        question_fini(&questions->list[i]);
    }
    free(questions->list);
    *questions = (nd_questions){0};
}

/* Scores. */

nd_status nd_question_score(nd_generator *generator, nd_question *question, nd_token_score *scores)
{
    for (int64_t i = 0; i < question->count; i++) {
        nd_choice *c = &question->choices[i];
        const int64_t count = (int64_t)c->ids.count;
        ND_TRY(nd_generator_score(generator, c->ids.data, count, c->from, scores));
        c->score = 0;
        c->greedy = true;
        for (int64_t k = c->from; k < count; k++) {
            const nd_token_score *s = &scores[k - c->from];
            c->score += s->log_probability;
            c->greedy &= s->greedy == c->ids.data[k];
        }
    }
    return ND_OK;
}

static double value_of(const nd_choice *c, bool norm)
{
    return norm ? c->score / (double)(c->characters > 0 ? c->characters : 1) : c->score;
}

int64_t nd_question_best(const nd_question *question, bool norm)
{
    int64_t best = 0;
    for (int64_t i = 1; i < question->count; i++) {
        if (value_of(&question->choices[i], norm) > value_of(&question->choices[best], norm)) {
            best = i;
        }
    }
    return best;
}
