// SPDX-License-Identifier: Apache-2.0
/*
 * `ndtrain eval`: the loss of a model on files of data, by the code and on the meshes of a
 * validation, or multiple choice as lm-evaluation-harness scores it.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/process.h"
#include "trainer/commands/session.h"

static nd_status check_flags(const nd_command_flags *line)
{
    const nd_flag_value *v = line->values;
    ND_REFUSE(v[ND_EVAL_DATA].given + v[ND_EVAL_REQUESTS].given + v[ND_EVAL_SERVE].given != 1,
              "give either files of --data, or a file of --requests, or --serve-stdin");
    return ND_OK;
}

static nd_status check_settings(const nd_session *s)
{
    const nd_config *config = &s->config;
    const nd_shape *shape = &s->model.shape;
    ND_REFUSE(config->train.precision == ND_PRECISION_FP8 && config->fp8.recipe == ND_FP8_DELAYED,
              "fp8.recipe is delayed, whose scales follow from training steps; evaluate with "
              "another recipe or precision");
    ND_REFUSE(config->train.sequence_length > shape->max_positions,
              "train.sequence_length is %lld, but the model's max_position_embeddings is %lld; use "
              "a shorter --sequence-length",
              (long long)config->train.sequence_length, (long long)shape->max_positions);
    return nd_shape_check_mesh(shape, &config->resolved_mesh, config->train.micro_batch_size,
                               config->train.sequence_length);
}

/* One of the data. */
typedef struct data_file {
    nd_session *session;
    const char *path;
    nd_dataset *data;    /* owned */
    bool ids_are_bytes;  /* each label is a byte of the text */
    int64_t done, calls; /* of the model */
} data_file;

/* Ids are bytes: each of the 256 tokens is the same as the byte tokenizer's. */
static nd_status has_byte_ids(const nd_tokenizer *tokenizer, bool *out)
{
    nd_tokenizer *bytes = NULL;
    *out = tokenizer && nd_tokenizer_vocab_size(tokenizer) == 256;
    if (!*out) {
        return ND_OK;
    }
    ND_TRY(nd_byte_tokenizer_create(&bytes));
    for (int32_t id = 0; id < 256 && *out; id++) {
        size_t size[2];
        const char *text[2] = {nd_tokenizer_token(tokenizer, id, &size[0]),
                               nd_tokenizer_token(bytes, id, &size[1])};
        *out = text[0] && text[1] && size[0] == size[1] && memcmp(text[0], text[1], size[0]) == 0;
    }
    nd_tokenizer_close(bytes);
    return ND_OK;
}

/* A file, a folder, a pattern, or the prefix that `ndtrain tokenize` wrote, as for data.path. */
static nd_status open_data(data_file *f)
{
    char *index = NULL;
    bool there = false;
    const nd_session *s = f->session;
    nd_config config = s->config; /* borrows its strings */
    nd_inputs inputs = {.shape = s->model.shape, .tokenizer = s->tokenizer_path};
    bool ids = false;
    ND_TRY(nd_fs_exists(f->path, &there));
    ND_TRY(there ? ND_OK : nd_corpus_is_several(f->path, &there));
    ND_TRY(nd_fs_format(&index, "%s.idx", f->path));
    nd_status status = there ? ND_OK : nd_fs_exists(index, &there);
    free(index);
    ND_TRY(status);
    if (!there) {
        return nd_fail(ND_ERR_DATA, "--data \"%s\" does not exist", f->path);
    }
    ND_TRY(nd_inputs_hold_ids(&config, f->path, &ids));
    /* Where ids are bytes, the byte tokenizer that a saved model has is not needed. */
    ND_TRY(!ids && s->model.shape.vocab == 256 ? has_byte_ids(s->tokenizer, &f->ids_are_bytes)
                                               : ND_OK);
    if (ids || f->ids_are_bytes) {
        config.data.tokenizer = ids ? "file" : "bytes";
        inputs.tokenizer = NULL;
    } else if (!s->tokenizer_path && s->tokenizer) {
        return nd_fail(ND_ERR_CONFIG,
                       "the tokenizer is bytes, which have 256 ids, but the model's vocab_size is "
                       "%lld; give a file of ids",
                       (long long)s->model.shape.vocab);
    } else if (!s->tokenizer_path) {
        return nd_fail(ND_ERR_DATA, "the model's folder has no tokenizer.json, so a text has no "
                                    "tokens; name one with --tokenizer, or give a file of ids");
    }
    return nd_inputs_open_data(&config, &inputs, f->path, &f->data);
}

/* Asked before each call of the model. */
static nd_status ask(void *context, bool *stop)
{
    data_file *f = context;
    if (nd_session_word_is_due(f->session)) {
        nd_log_info("%s: %lld of %lld calls of the model", f->path, (long long)f->done,
                    (long long)f->calls);
    }
    f->done++;
    return nd_session_ask_stop(f->session, ND_GROUP_WORLD, stop);
}

static nd_status fail_stopped(const data_file *f)
{
    return nd_fail(ND_ERR_PREEMPTED, "stopped by a signal in \"%s\"", f->path);
}

/* Bytes of the text of some ids. */
static nd_status text_bytes(nd_decoder *decoder, const int32_t *ids, int64_t count, int64_t *bytes)
{
    const char *text;
    size_t size, rest;
    ND_TRY(nd_decoder_push(decoder, ids, (size_t)count, &text, &size));
    ND_TRY(nd_decoder_end(decoder, &text, &rest));
    *bytes = (int64_t)(size + rest);
    return ND_OK;
}

/* Bytes of the text that the counted labels of a block add to what stands before them. ids: (S +
 * 1). An id that the tokenizer lacks has no text. */
static nd_status block_bytes(const nd_tokenizer *tokenizer, nd_decoder *decoder,
                             const int32_t *inputs, const int32_t *labels, int64_t S, int32_t *ids,
                             int64_t *bytes)
{
    size_t size;
    for (int64_t i = 0; i < S; i++) {
        int64_t count = 0, before = 0, all = 0;
        if (labels[i] == ND_LABEL_IGNORED) {
            continue;
        }
        if (nd_tokenizer_token(tokenizer, inputs[i], &size)) {
            ids[count++] = inputs[i];
            ND_TRY(text_bytes(decoder, ids, 1, &before));
        }
        for (; i < S && labels[i] != ND_LABEL_IGNORED; i++) {
            ids[count] = labels[i];
            count += nd_tokenizer_token(tokenizer, labels[i], &size) != NULL;
        }
        ND_TRY(text_bytes(decoder, ids, count, &all));
        *bytes += all - before;
    }
    return ND_OK;
}

/* Bytes of the text whose tokens are predicted. 0: there is no tokenizer to tell. Each rank counts
 * those of its blocks, so that none waits for another one's long work, and all ask after signals in
 * between. Collective. */
static nd_status count_bytes(const data_file *f, int64_t *bytes)
{
    enum { ROUND = 64 }; /* blocks of a rank */
    nd_session *s = f->session;
    nd_rank *r = &s->worker->rank;
    const int64_t S = s->config.train.sequence_length, blocks = nd_dataset_blocks(f->data);
    const int64_t round = (int64_t)ROUND * r->world_size;
    nd_decoder *decoder = NULL;
    int32_t *memory = NULL;
    nd_status status = ND_OK;
    *bytes = 0;
    if (!s->tokenizer) {
        return ND_OK;
    }
    status = nd_decoder_create(s->tokenizer, true, &decoder);
    if (status == ND_ERR_DATA) { /* the number of bytes is unknown, as without a tokenizer */
        nd_error_clear();
        return ND_OK;
    }
    ND_TRY_OUT(status);
    ND_TRY_OUT(ND_ALLOC(3 * S + 1, &memory));
    for (int64_t begin = 0; begin < blocks; begin += round) {
        const int64_t end = nd_min(begin + round, blocks);
        int32_t *inputs = memory, *labels = memory + S;
        bool stop = false;
        ND_TRY_OUT(nd_session_ask_stop(s, ND_GROUP_WORLD, &stop));
        ND_TRY_OUT(stop ? fail_stopped(f) : ND_OK);
        for (int64_t i = begin + r->rank; i < end; i += r->world_size) {
            ND_TRY_OUT(nd_dataset_block(f->data, i, &(nd_block){inputs, labels}));
            ND_TRY_OUT(block_bytes(s->tokenizer, decoder, inputs, labels, S, labels + S, bytes));
        }
    }
    status = nd_all_reduce(r, ND_GROUP_WORLD, bytes, 1, ND_DTYPE_I64, ND_REDOP_SUM);
out:
    nd_decoder_destroy(decoder);
    free(memory);
    return status;
}

/* bytes: of the text; 0: unknown. */
static nd_status print_loss(const data_file *f, int64_t bytes, double loss, int64_t tokens)
{
    const double bits = bytes > 0 ? loss / M_LN2 * (double)tokens / (double)bytes : 0;
    if (!f->session->flags[ND_EVAL_JSONL].given) {
        char per_byte[64] = "";
        snprintf(per_byte, sizeof per_byte, ", %.6f bits per byte", bits);
        printf("%s: loss %.6f, perplexity %.6g%s, %lld tokens\n", f->path, loss, exp(loss),
               bytes > 0 ? per_byte : "", (long long)tokens);
        return nd_process_flush_output();
    }
    json_t *row = json_object();
    nd_json_set(&row, "data", nd_json_string(f->path));
    nd_json_set(&row, "loss", json_real(loss));
    nd_json_set(&row, "perplexity", isfinite(exp(loss)) ? json_real(exp(loss)) : json_null());
    if (bytes > 0) {
        nd_json_set(&row, "bits_per_byte", json_real(bits));
    }
    nd_json_set(&row, "tokens", json_integer(tokens));
    nd_json_set(&row, "documents",
                nd_json_string(nd_dataset_is_separate(f->data) ? "separate" : "join"));
    return nd_print_row(row);
}

static nd_status evaluate_file(nd_session *s, nd_trainer *trainer, const char *path)
{
    nd_rank *r = &s->worker->rank;
    const nd_loader_options loading = nd_loader_options_of(r, true);
    data_file f = {.session = s, .path = path};
    const nd_stop_check check = {ask, &f};
    nd_loader *loader = NULL;
    double loss = 0;
    int64_t tokens = 0, bytes;
    nd_status status = ND_OK;
    ND_TRY_OUT(open_data(&f));
    ND_TRY_OUT(nd_loader_open(f.data, &loading, &loader));
    f.calls = nd_loader_validation_steps(f.data, &loading);
    if (r->rank == 0) {
        nd_log_info("%s: %lld blocks of %lld tokens; documents are %s (--documents)", path,
                    (long long)nd_dataset_blocks(f.data),
                    (long long)s->config.train.sequence_length,
                    nd_dataset_is_separate(f.data) ? "separate" : "joined");
    }
    ND_TRY_OUT(nd_trainer_evaluate(trainer, loader, f.calls, &check, &loss, &tokens));
    if (tokens == 0 && isnan(loss)) {
        status = nd_fail(ND_ERR_DATA, "\"%s\" has no label that counts", path);
    } else if (tokens == 0) {
        status = fail_stopped(&f);
    } else if (!isfinite(loss)) {
        status = nd_fail(ND_ERR_NUMERIC, "the loss on \"%s\" is %g", path, nd_positive_nan(loss));
    } else {
        bytes = tokens;
        ND_TRY_OUT(f.ids_are_bytes ? ND_OK : count_bytes(&f, &bytes));
        status = r->rank == 0 ? print_loss(&f, bytes, loss, tokens) : ND_OK;
    }
out:
    if (!loader || nd_loader_close(loader)) { /* else its thread still reads the data */
        nd_dataset_close(f.data);
    }
    return status;
}

static nd_status evaluate(nd_session *s)
{
    nd_trainer *trainer = NULL;
    const char *path;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_trainer_create_evaluator(&s->worker->rank, &trainer));
    ND_TRY_OUT(nd_session_check_memory(s, &trainer->plan));
    ND_TRY_OUT(nd_trainer_commit(trainer));
    ND_TRY_OUT(nd_model_files_load(&s->model, &trainer->model->fsdp));
    for (int at = 0; (path = nd_command_flags_next(s->call->line, ND_EVAL_DATA, &at));) {
        ND_TRY_OUT(evaluate_file(s, trainer, path));
    }
out:
    nd_trainer_destroy(trainer);
    return status;
}

/* Requests. */

/* Requests of each replica in a wave, after which all agree that they go on. */
enum { WAVE = 16 };

/* The scores that one replica has found reach the others. */
static nd_status share_scores(nd_session *s, nd_question *q, int owner)
{
    nd_rank *r = &s->worker->rank;
    const bool own = r->coord.at[ND_AXIS_DP_REPLICATE] == owner;
    for (int64_t i = 0; i < q->count; i++) {
        nd_choice *c = &q->choices[i];
        double values[2] = {c->score, c->greedy};
        ND_TRY(nd_shared_bytes(r, ND_GROUP_DP_REPLICATE, values, sizeof values, own));
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

/* Requests of standard input. What is no request is answered too, so that a program can go on. */
static nd_status answer(void *context, const char *line, size_t size)
{
    scoring *c = context;
    const bool first = c->session->worker->rank.rank == 0;
    nd_questions *questions = &c->questions;
    nd_status status = nd_questions_read(questions, &c->rules, "standard input", line, size);
    if (status == ND_OK && questions->count == 0) {
        status = nd_fail(ND_ERR_DATA, "standard input, line %lld: the line is empty",
                         (long long)c->rules.lines_read + 1);
    }
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

static nd_status eval_requests(nd_session *s)
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
        status = nd_stdin_each(s, "", answer, &c);
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

/* Blocks are as long as those of the run, unless a length is given. */
static nd_status take_run_length(nd_session *s)
{
    int64_t length = 0;
    if (!s->config.sequence_given) {
        ND_TRY(nd_model_files_run_length(&s->model, &length));
    }
    if (length > 0) {
        s->config.train.sequence_length = length;
        if (s->worker->rank.rank == 0 && !s->checks) {
            nd_log_info("blocks are as long as those of the model's run; --sequence-length sets "
                        "another length");
        }
    }
    return ND_OK;
}

static nd_status run_eval(nd_session *s)
{
    const char *path;
    if (!s->flags[ND_EVAL_DATA].given) {
        return eval_requests(s);
    }
    ND_TRY(take_run_length(s));
    ND_TRY(nd_session_agree(s));
    ND_TRY(check_settings(s));
    if (!s->checks) {
        return evaluate(s);
    }
    for (int at = 0; (path = nd_command_flags_next(s->call->line, ND_EVAL_DATA, &at));) {
        data_file f = {.session = s, .path = path};
        ND_TRY(open_data(&f));
        nd_dataset_close(f.data);
    }
    return ND_OK;
}

const nd_command nd_command_eval = {.id = ND_COMMAND_EVAL,
                                    .trains = true,
                                    .begin = nd_session_begin,
                                    .run = nd_session_run,
                                    .decodes = true,
                                    .check_flags = check_flags,
                                    .use = run_eval,
                                    .model = ND_EVAL_MODEL,
                                    .tokenizer = ND_EVAL_TOKENIZER};
