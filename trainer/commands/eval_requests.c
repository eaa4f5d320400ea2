// SPDX-License-Identifier: Apache-2.0
/* `ndtrain eval --requests`: multiple choice as lm-evaluation-harness scores it. */
#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/process.h"
#include "trainer/commands/session.h"

/* Requests of each replica in a wave, after which all agree that they go on. */
enum { WAVE = 16 };

/* The scores that one replica has found reach the others. */
static nd_status share_scores(nd_session *s, nd_question *q, int owner)
{
    const bool own = s->worker->rank.coord.at[ND_AXIS_DP_REPLICATE] == owner;
    for (int64_t i = 0; i < q->count; i++) {
        nd_choice *c = &q->choices[i];
        double values[2] = {c->score, c->greedy};
        ND_TRY(nd_session_broadcast(s, ND_GROUP_DP_REPLICATE, values, sizeof values, own));
        c->score = values[0];
        c->greedy = values[1] != 0;
    }
    return ND_OK;
}

static nd_status print_question(const nd_question *q, size_t index)
{
    json_t *row = json_object();
    nd_json_set(&row, "index", json_integer((json_int_t)index));
    if (q->name) {
        nd_json_set(&row, "id", json_loads(q->name, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL));
    }
    if (q->left_out) {
        nd_json_set(&row, "left_out", nd_json_string(q->left_out));
        return nd_print_row(row);
    }
    json_t *scores = json_array(), *greedy = json_array();
    for (int64_t i = 0; i < q->count; i++) {
        nd_json_append(&scores, json_real(q->choices[i].score));
        nd_json_append(&greedy, json_boolean(q->choices[i].greedy));
    }
    nd_json_set(&row, "log_likelihoods", scores);
    nd_json_set(&row, "greedy", greedy);
    if (q->gold >= 0) {
        nd_json_set(&row, "acc", json_integer(nd_question_best(q, false) == q->gold));
        nd_json_set(&row, "acc_norm", json_integer(nd_question_best(q, true) == q->gold));
    }
    return nd_print_row(row);
}

static nd_status print_summary(const nd_session *s, const nd_questions *questions)
{
    const size_t scored = questions->count - questions->left_out;
    const char *name = s->flags[ND_EVAL_REQUESTS].text;
    double right = 0, right_norm = 0, count = (double)scored;
    for (size_t i = 0; i < questions->count; i++) {
        right += nd_question_best(&questions->list[i], false) == questions->list[i].gold;
        right_norm += nd_question_best(&questions->list[i], true) == questions->list[i].gold;
    }
    if (!s->flags[ND_EVAL_JSONL].given) {
        printf("%s: acc %.6f, acc_norm %.6f, %zu requests\n", name, right / count,
               right_norm / count, scored);
        return nd_process_flush_output();
    }
    return nd_print_row(json_pack("{s:o, s:f, s:f, s:I, s:I}", "requests", nd_json_string(name),
                                  "acc", right / count, "acc_norm", right_norm / count, "count",
                                  (json_int_t)scored, "left_out", (json_int_t)questions->left_out));
}

/* Requests, how they are read, and what scores them. */
typedef struct scoring {
    nd_session *session;
    nd_encoder *plain, *special; /* without and with what the post-processor adds */
    nd_choice_rules rules;
    nd_questions questions; /* of the file, or of the last line */
    nd_generator *generator;
    nd_token_score *scores; /* [the longest question] */
    size_t answered;        /* of standard input */
} scoring;

static nd_status open_reader(scoring *c)
{
    const nd_session *s = c->session;
    nd_encode_options options = {.special_in_text = ND_SPECIAL_PARSE};
    nd_ids ends = {0};
    if (!s->tokenizer) {
        return nd_fail(ND_ERR_DATA, "the model's folder has no tokenizer.json, so a text has no "
                                    "tokens; name one with --tokenizer");
    }
    ND_TRY(nd_encoder_create(s->tokenizer, &options, &c->plain));
    options.post_process = true;
    ND_TRY(nd_encoder_create(s->tokenizer, &options, &c->special));
    c->rules = (nd_choice_rules){.vocab = s->model.shape.vocab,
                                 .max_tokens = s->model.shape.max_positions + 1};
    c->rules.encoder = s->flags[ND_EVAL_ADD_SPECIAL].given ? c->special : c->plain;
    c->rules.bare = c->plain;
    /* An empty context is the beginning of a text, or else its end. */
    c->rules.prefix = nd_session_beginning(c->special);
    if (c->rules.prefix >= 0) {
        return ND_OK;
    }
    nd_status status = nd_session_ends(s, &ends);
    c->rules.prefix = status == ND_OK && ends.count > 0 ? ends.data[0] : -1;
    free(ends.data);
    return status;
}

static nd_status open_generator(scoring *c, int64_t capacity)
{
    const int64_t rows = nd_min(c->session->flags[ND_EVAL_ROWS].whole, capacity);
    const nd_generate_options sizes = {
        .batch = nd_min(64, rows), .rows = rows, .capacity = capacity};
    ND_TRY(nd_session_generator(c->session, &sizes, &c->generator));
    return ND_ALLOC(capacity + 1, &c->scores);
}

/* Requests of a file. */

static nd_status check_left_out(const scoring *c, const char *name)
{
    const nd_questions *questions = &c->questions;
    size_t first = 0;
    if (questions->count == 0) {
        return nd_fail(ND_ERR_DATA, "\"%s\" has no request", name);
    }
    while (first < questions->count && !questions->list[first].left_out) {
        first++;
    }
    if (questions->left_out == questions->count) {
        return nd_fail(ND_ERR_DATA, "no request can be scored; %s", questions->list[0].left_out);
    }
    if (questions->left_out > 0 && c->session->worker->rank.rank == 0) {
        nd_log_warning("%zu of %zu requests cannot be scored, and are left out; the first: %s",
                       questions->left_out, questions->count, questions->list[first].left_out);
    }
    return ND_OK;
}

static nd_status read_questions(scoring *c)
{
    nd_session *s = c->session;
    const char *name = s->flags[ND_EVAL_REQUESTS].text;
    char *text = NULL;
    size_t size = 0;
    nd_status status = s->worker->rank.rank == 0
                           ? nd_fs_read(name, ND_STDIN_BYTES_MAX, ND_ERR_DATA, &text, &size)
                           : ND_OK;
    ND_TRY_OUT(nd_session_share(s, status, &text, &size));
    c->rules.leaves_out = true;
    ND_TRY_OUT(nd_questions_read(&c->questions, &c->rules, name, text, size));
    status = check_left_out(c, name);
out:
    free(text);
    return status;
}

/* This replica's part of the questions [begin, end). */
static nd_status score_wave(const scoring *c, size_t begin, size_t end)
{
    const nd_rank *r = &c->session->worker->rank;
    const size_t replicas = (size_t)r->mesh.size[ND_AXIS_DP_REPLICATE];
    for (size_t i = begin; i < end; i++) {
        bool stop = false;
        ND_TRY(nd_session_ask_stop(c->session, ND_GROUP_TP, &stop));
        if (stop) {
            return nd_fail(ND_ERR_PREEMPTED, "stopped by a signal after %zu requests", i);
        }
        if (nd_session_word_is_due(c->session)) {
            nd_log_info("%zu of %zu requests", i, c->questions.count);
        }
        if ((int)(i % replicas) == r->coord.at[ND_AXIS_DP_REPLICATE]) {
            ND_TRY(nd_question_score(c->generator, &c->questions.list[i], c->scores));
        }
    }
    return ND_OK;
}

static nd_status score_all(scoring *c)
{
    nd_session *s = c->session;
    const nd_rank *r = &s->worker->rank;
    const int replicas = r->mesh.size[ND_AXIS_DP_REPLICATE];
    const size_t count = c->questions.count;
    const size_t wave = replicas > 1 ? WAVE * (size_t)replicas : count;
    ND_TRY(open_generator(c, nd_max(c->questions.longest - 1, 2)));
    for (size_t i = 0; i < count; i += wave) {
        nd_status status = score_wave(c, i, i + wave < count ? i + wave : count);
        ND_TRY(nd_session_end_wave(s, status));
    }
    for (size_t i = 0; i < count; i++) {
        ND_TRY(share_scores(s, &c->questions.list[i], (int)(i % (size_t)replicas)));
        if (s->flags[ND_EVAL_JSONL].given && r->rank == 0) {
            ND_TRY(print_question(&c->questions.list[i], i));
        }
    }
    return r->rank == 0 ? print_summary(s, &c->questions) : ND_OK;
}

/* Requests of standard input. A line that is no request gets an answer too, so that a program can
 * go on. */
static nd_status answer(void *context, const char *line, size_t size)
{
    scoring *c = context;
    const bool first = c->session->worker->rank.rank == 0;
    nd_questions *questions = &c->questions;
    nd_status status = nd_questions_read(questions, &c->rules, "standard input", line, size);
    if (status == ND_ERR_DATA) {
        json_t *row = first ? json_object() : NULL;
        nd_json_set(&row, "error", nd_json_string(nd_error_last()->message));
        nd_error_clear();
        status = first ? nd_print_row(row) : ND_OK;
    }
    for (size_t i = 0; i < questions->count && status == ND_OK; i++) {
        status = nd_question_score(c->generator, &questions->list[i], c->scores);
        if (status == ND_OK && first) {
            status = print_question(&questions->list[i], c->answered);
        }
        c->answered++;
    }
    nd_questions_fini(questions);
    c->rules.lines_read++;
    return status;
}

nd_status nd_eval_requests(nd_session *s)
{
    scoring c = {.session = s};
    const bool serves = s->flags[ND_EVAL_SERVE].given;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_generate_check_job(&s->config, &s->model.shape, &s->config.resolved_mesh));
    ND_TRY_OUT(nd_session_agree(s));
    ND_TRY_OUT(serves ? nd_session_check_single(s, "--serve-stdin scores one request") : ND_OK);
    ND_TRY_OUT(open_reader(&c));
    if (!serves && (!s->checks || s->config.launch.node_rank == 0)) { /* rank 0 reads them */
        ND_TRY_OUT(read_questions(&c));
    }
    if (s->checks) {
        goto out;
    }
    if (serves) {
        const int64_t context =
            nd_min(s->flags[ND_EVAL_CONTEXT].whole, s->model.shape.max_positions);
        c.rules.max_tokens = context + 1;
        c.rules.any_gold = true;
        ND_TRY_OUT(open_generator(&c, context));
        status = nd_stdin_each_line(s, "", answer, &c);
    } else {
        status = score_all(&c);
    }
out:
    nd_questions_fini(&c.questions);
    nd_generator_destroy(c.generator);
    free(c.scores);
    nd_encoder_destroy(c.plain);
    nd_encoder_destroy(c.special);
    return status;
}
