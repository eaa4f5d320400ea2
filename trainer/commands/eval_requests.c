// SPDX-License-Identifier: Apache-2.0
/* `ndtrain eval --requests`: multiple choice as lm-evaluation-harness scores it. */
#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/process.h"
#include "trainer/commands/generate.h"

/* Requests of each replica in a wave, after which all agree that they go on. */
enum { WAVE = 16 };

/* The scores that one replica has found reach the others. */
static nd_status share_scores(nd_session *s, nd_question *q, int owner)
{
    const bool own = s->worker->rank.coord.at[ND_AXIS_DP_REPLICATE] == owner;
    for (int64_t i = 0; i < q->count; i++) {
        nd_choice *c = &q->choices[i];
        double values[2] = {c->score, c->greedy};
        ND_TRY(nd_session_broadcast(s, ND_GROUP_DP_REPLICATE, values, sizeof values, owner, own));
        c->score = values[0];
        c->greedy = values[1] != 0;
    }
    return ND_OK;
}

static nd_status print_question(const nd_question *q, size_t index)
{
    json_t *row = json_object(), *scores = json_array(), *greedy = json_array();
    nd_json_set(&row, "index", json_integer((json_int_t)index));
    if (q->name) {
        nd_json_set(&row, "id", json_loads(q->name, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL));
    }
    for (int64_t i = 0; i < q->count; i++) {
        nd_json_append(&scores, json_real(q->choices[i].score));
        nd_json_append(&greedy, json_boolean(q->choices[i].greedy));
    }
    if (q->left_out) {
        json_decref(scores);
        json_decref(greedy);
        nd_json_set(&row, "left_out", nd_json_string(q->left_out));
        return nd_print_row(row);
    }
    nd_json_set(&row, "log_likelihoods", scores);
    nd_json_set(&row, "greedy", greedy);
    if (q->gold >= 0) {
        nd_json_set(&row, "acc", json_integer(nd_question_best(q, false) == q->gold));
        nd_json_set(&row, "acc_norm", json_integer(nd_question_best(q, true) == q->gold));
    }
    return nd_print_row(row);
}

static nd_status print_summary(const nd_eval_call *o, const nd_questions *questions)
{
    const size_t scored = questions->count - questions->left_out;
    double right = 0, right_norm = 0, count = (double)scored;
    for (size_t i = 0; i < questions->count; i++) {
        right += nd_question_best(&questions->list[i], false) == questions->list[i].gold;
        right_norm += nd_question_best(&questions->list[i], true) == questions->list[i].gold;
    }
    if (!o->jsonl) {
        printf("%s: acc %.6f, acc_norm %.6f, %zu requests\n", o->requests, right / count,
               right_norm / count, scored);
        return nd_process_flush_output();
    }
    json_t *row = json_object();
    nd_json_set(&row, "requests", nd_json_string(o->requests));
    nd_json_set(&row, "acc", json_real(right / count));
    nd_json_set(&row, "acc_norm", json_real(right_norm / count));
    nd_json_set(&row, "count", json_integer((json_int_t)scored));
    nd_json_set(&row, "left_out", json_integer((json_int_t)questions->left_out));
    return nd_print_row(row);
}

typedef struct scoring {
    nd_session *session;
    nd_questions *questions;
    nd_generator *generator;
    nd_token_score *scores; /* [the longest question] */
} scoring;

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
            nd_log_info("%zu of %zu requests", i, c->questions->count);
        }
        if ((int)(i % replicas) == r->coord.at[ND_AXIS_DP_REPLICATE]) {
            ND_TRY(nd_question_score(c->generator, &c->questions->list[i], c->scores));
        }
    }
    return ND_OK;
}

static nd_status score_all(nd_session *s, const nd_eval_call *o, nd_questions *questions)
{
    const nd_rank *r = &s->worker->rank;
    const int replicas = r->mesh.size[ND_AXIS_DP_REPLICATE];
    const int64_t capacity = nd_max(questions->longest - 1, 2), rows = nd_min(o->rows, capacity);
    const nd_generate_options sizes = {
        .batch = nd_min(64, rows), .rows = rows, .capacity = capacity};
    const size_t count = questions->count, wave = replicas > 1 ? WAVE * (size_t)replicas : count;
    scoring c = {.session = s, .questions = questions};
    nd_status status = ND_OK;
    ND_TRY_OUT(ND_ALLOC(questions->longest, &c.scores));
    ND_TRY_OUT(nd_session_generator(s, &sizes, &c.generator));
    for (size_t i = 0; i < count; i += wave) {
        status = score_wave(&c, i, i + wave < count ? i + wave : count);
        ND_TRY_OUT(nd_session_end_wave(s, status));
    }
    for (size_t i = 0; i < count; i++) {
        ND_TRY_OUT(share_scores(s, &questions->list[i], (int)(i % (size_t)replicas)));
        if (o->jsonl && r->rank == 0) {
            ND_TRY_OUT(print_question(&questions->list[i], i));
        }
    }
    status = r->rank == 0 ? print_summary(o, questions) : ND_OK;
out:
    nd_generator_destroy(c.generator);
    free(c.scores);
    return status;
}

/* The token of an empty context: the beginning of a text, or else its end. */
static nd_status find_prefix(const nd_session *s, nd_encoder *with_special, int32_t *prefix)
{
    const int32_t *ids;
    size_t count;
    nd_ids ends = {0};
    *prefix = -1;
    ND_TRY(nd_encode(with_special, "", 0, &ids, &count));
    if (count > 0) {
        *prefix = ids[0];
        return ND_OK;
    }
    nd_status status = nd_session_ends(s, &ends);
    if (status == ND_OK && ends.count > 0) {
        *prefix = ends.data[0];
    }
    free(ends.data);
    return status;
}

/* The encoders of contexts and choices, and the rules that use them. */
typedef struct reader {
    nd_encoder *encoder, *with_special, *bare;
    nd_choice_rules rules;
} reader;

static nd_status open_reader(const nd_session *s, const nd_eval_call *o, reader *r)
{
    const nd_encode_options plain = {.special_in_text = ND_SPECIAL_PARSE,
                                     .post_process = o->add_special};
    const nd_encode_options special = {.special_in_text = ND_SPECIAL_PARSE, .post_process = true};
    const nd_encode_options bare = {.special_in_text = ND_SPECIAL_PARSE};
    r->rules = (nd_choice_rules){.vocab = s->model.shape.vocab,
                                 .max_tokens = s->model.shape.max_positions + 1};
    if (!s->tokenizer) {
        return nd_fail(ND_ERR_DATA, "the model's folder has no tokenizer.json, so a text has no "
                                    "tokens; name one with --tokenizer");
    }
    ND_TRY(nd_encoder_create(s->tokenizer, &plain, &r->encoder));
    ND_TRY(nd_encoder_create(s->tokenizer, &special, &r->with_special));
    ND_TRY(nd_encoder_create(s->tokenizer, &bare, &r->bare));
    r->rules.encoder = r->encoder;
    r->rules.bare = r->bare;
    return find_prefix(s, r->with_special, &r->rules.prefix);
}

static void close_reader(reader *r)
{
    nd_encoder_destroy(r->encoder);
    nd_encoder_destroy(r->with_special);
    nd_encoder_destroy(r->bare);
}

static nd_status check_left_out(const nd_session *s, const nd_eval_call *o,
                                const nd_questions *questions)
{
    size_t first = 0;
    if (questions->count == 0) {
        return nd_fail(ND_ERR_DATA, "\"%s\" has no request", o->requests);
    }
    while (first < questions->count && !questions->list[first].left_out) {
        first++;
    }
    if (questions->left_out == questions->count) {
        return nd_fail(ND_ERR_DATA, "no request can be scored; %s", questions->list[0].left_out);
    }
    if (questions->left_out > 0 && s->worker->rank.rank == 0) {
        nd_log_warning("%zu of %zu requests cannot be scored, and are left out; the first: %s",
                       questions->left_out, questions->count, questions->list[first].left_out);
    }
    return ND_OK;
}

static nd_status read_questions(nd_session *s, const nd_eval_call *o, nd_questions *questions)
{
    reader r = {0};
    char *text = NULL;
    size_t size = 0;
    nd_status status = ND_OK;
    ND_TRY_OUT(open_reader(s, o, &r));
    status = s->worker->rank.rank == 0
                 ? nd_fs_read(o->requests, ND_STDIN_BYTES_MAX, ND_ERR_DATA, &text, &size)
                 : ND_OK;
    if (s->checks) {
        ND_TRY_OUT(status);
    } else {
        ND_TRY_OUT(nd_session_share(s, status, &text, &size));
    }
    r.rules.leaves_out = true;
    ND_TRY_OUT(nd_questions_read(questions, &r.rules, o->requests, text, size));
    status = check_left_out(s, o, questions);
out:
    close_reader(&r);
    free(text);
    return status;
}

nd_status nd_eval_requests(nd_session *s, const nd_eval_call *o)
{
    nd_questions questions = {0};
    nd_status status = read_questions(s, o, &questions);
    status = status == ND_OK ? score_all(s, o, &questions) : status;
    nd_questions_fini(&questions);
    return status;
}

static const char serves_one[] = "--serve-stdin scores one request";

nd_status nd_eval_check_requests(nd_session *s, const nd_eval_call *o)
{
    nd_questions questions = {0};
    reader r = {0};
    nd_status status = ND_OK;
    if (o->serve) {
        ND_TRY(nd_session_check_single(&s->config->resolved_mesh, serves_one));
    }
    if (o->requests && s->config->launch.node_rank == 0) { /* rank 0 reads them */
        status = read_questions(s, o, &questions);
    } else {
        status = open_reader(s, o, &r);
    }
    nd_questions_fini(&questions);
    close_reader(&r);
    return status;
}

/* Requests of standard input. */

typedef struct server {
    nd_session *session;
    nd_generator *generator;
    nd_token_score *scores;
    reader reader;
    size_t answered;
} server;

/* A line that is no request gets an answer too, so that a program can go on. */
static nd_status answer_error(const server *v)
{
    json_t *row = json_object();
    nd_json_set(&row, "error", nd_json_string(nd_error_last()->message));
    nd_error_clear();
    if (v->session->worker->rank.rank > 0) {
        json_decref(row);
        return ND_OK;
    }
    return nd_print_row(row);
}

static nd_status answer(void *context, const char *line, size_t size)
{
    server *v = context;
    nd_questions questions = {0};
    nd_status status =
        nd_questions_read(&questions, &v->reader.rules, "standard input", line, size);
    if (status == ND_ERR_DATA) {
        status = answer_error(v);
    }
    for (size_t i = 0; i < questions.count && status == ND_OK; i++) {
        status = nd_question_score(v->generator, &questions.list[i], v->scores);
        if (status == ND_OK && v->session->worker->rank.rank == 0) {
            status = print_question(&questions.list[i], v->answered);
        }
        v->answered++;
    }
    nd_questions_fini(&questions);
    v->reader.rules.lines_read++;
    return status;
}

nd_status nd_eval_serve(nd_session *s, const nd_eval_call *o)
{
    const int64_t context = nd_min(o->context, s->model.shape.max_positions);
    const int64_t rows = nd_min(o->rows, context);
    const nd_generate_options sizes = {
        .batch = nd_min(64, rows), .rows = rows, .capacity = context};
    server v = {.session = s};
    nd_status status = ND_OK;
    ND_TRY(nd_session_check_single(&s->worker->rank.mesh, serves_one));
    ND_TRY_OUT(open_reader(s, o, &v.reader));
    v.reader.rules.max_tokens = context + 1;
    v.reader.rules.any_gold = true;
    ND_TRY_OUT(nd_session_generator(s, &sizes, &v.generator));
    ND_TRY_OUT(ND_ALLOC(context + 1, &v.scores));
    status = nd_stdin_each_line(s, "", answer, &v);
out:
    nd_generator_destroy(v.generator);
    free(v.scores);
    close_reader(&v.reader);
    return status;
}
