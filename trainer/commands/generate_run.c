// SPDX-License-Identifier: Apache-2.0
/* Requests become texts, which are printed in the order of the requests. */
#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/process.h"
#include "trainer/commands/session.h"

/* With several replicas: texts of each slot in a wave, after which results are exchanged. */
enum { WAVE = 4 };

typedef struct result {
    nd_text_out text;
    size_t shown; /* bytes of the text */
    bool ended;
} result;

typedef struct job {
    const nd_generation *generation;
    nd_session *session;
    size_t count;           /* of requests */
    nd_sequence *sequences; /* [count] */
    result *results;        /* [count] */
    int32_t *ids;           /* of the new tokens of all */
    size_t printed;         /* results */
    size_t begin;           /* the first request of this replica's part of the wave */
    size_t replicas;
    bool first;   /* rank 0, which prints */
    bool streams; /* one text, printed as it comes */
} job;

static nd_status print_row(const job *j, size_t i)
{
    const nd_request *q = &j->generation->requests.list[i];
    const result *r = &j->results[i];
    const nd_sequence *s = &j->sequences[i];
    json_t *row = json_object(), *ids = json_array();
    nd_json_set(&row, "index", json_integer((json_int_t)i));
    if (q->name) {
        nd_json_set(&row, "id", json_loads(q->name, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL));
    }
    if (r->text.decoder) {
        const nd_bytes *text = &r->text.text; /* without any, it has no memory */
        nd_json_set(&row, "text",
                    json_stringn(text->count > 0 ? (const char *)text->data : "", text->count));
    }
    nd_json_set(&row, "finish", json_string(nd_finish_name(s->finish)));
    nd_json_set(&row, "prompt_tokens", json_integer(s->prompt_count));
    nd_json_set(&row, "new_tokens", json_integer(s->count));
    for (int64_t k = 0; k < s->count; k++) {
        nd_json_append(&ids, json_integer(s->ids[k]));
    }
    nd_json_set(&row, "ids", ids);
    return nd_print_row(row);
}

static nd_status print_text(job *j, size_t i)
{
    result *r = &j->results[i];
    const nd_bytes *text = &r->text.text;
    if (text->count > r->shown) {
        fwrite(text->data + r->shown, 1, text->count - r->shown, stdout);
        r->shown = text->count;
    }
    return nd_process_flush_output();
}

static nd_status print_result(job *j, size_t i)
{
    const nd_sequence *s = &j->sequences[i];
    if (j->generation->jsonl) {
        return print_row(j, i);
    }
    if (j->results[i].text.decoder) {
        ND_TRY(print_text(j, i));
    }
    for (int64_t k = 0; k < s->count && !j->results[i].text.decoder; k++) {
        printf(k ? " %d" : "%d", s->ids[k]);
    }
    putchar('\n');
    return nd_process_flush_output();
}

/* Results that are complete, in the order of the requests. */
static nd_status print_ready(job *j)
{
    nd_status status = ND_OK;
    while (status == ND_OK && j->printed < j->count && j->results[j->printed].ended) {
        const size_t i = j->printed++;
        if (j->first) {
            nd_session_row_begin();
            status = print_result(j, i);
            nd_session_row_end();
        }
    }
    return status;
}

static nd_status add_token(job *j, size_t i, int32_t id, bool *stop)
{
    return nd_ids_hold(&j->generation->ends, id) ? ND_OK
                                                 : nd_text_out_push(&j->results[i].text, id, stop);
}

static nd_status finish(job *j, size_t i)
{
    j->results[i].ended = true;
    return nd_text_out_end(&j->results[i].text);
}

static nd_status on_token(void *context, int64_t sequence, int32_t id, bool *stop)
{
    job *j = context;
    const size_t i = j->begin + (size_t)sequence;
    ND_TRY(add_token(j, i, id, stop));
    return j->streams && j->results[i].text.decoder ? print_text(j, i) : ND_OK;
}

static nd_status on_end(void *context, int64_t sequence)
{
    job *j = context;
    ND_TRY(finish(j, j->begin + (size_t)sequence));
    return j->replicas == 1 ? print_ready(j) : ND_OK;
}

/* Asked before each call of the model. A text that is printed as it comes says more. */
static nd_status ask(void *context, bool *stop)
{
    job *j = context;
    const nd_generate_counts c = nd_generator_counts(j->generation->generator);
    if (nd_session_word_is_due(j->session) && (!j->streams || c.new_tokens == 0)) {
        nd_log_info("%zu of %zu texts are printed; %lld prompt tokens and %lld new ones so far%s",
                    j->printed, j->count, (long long)c.prompt_tokens, (long long)c.new_tokens,
                    j->replicas == 1 ? "" : " on this replica");
    }
    return nd_session_ask_stop(j->session, ND_GROUP_TP, stop);
}

static nd_status prepare(job *j)
{
    const nd_requests *requests = &j->generation->requests;
    int64_t tokens = 0;
    ND_TRY(ND_ALLOC(j->count, &j->results));
    ND_TRY(ND_ALLOC(j->count, &j->sequences));
    for (size_t i = 0; i < j->count; i++) {
        tokens += requests->list[i].max_new;
    }
    ND_TRY(ND_ALLOC(tokens, &j->ids));
    tokens = 0;
    for (size_t i = 0; i < j->count; i++) {
        const nd_request *q = &requests->list[i];
        j->sequences[i] = (nd_sequence){.prompt = q->ids.data,
                                        .prompt_count = (int64_t)q->ids.count,
                                        .max_new = q->max_new,
                                        .request = j->generation->first + i,
                                        .ids = j->ids + tokens};
        tokens += q->max_new;
        ND_TRY(nd_text_out_init(&j->results[i].text, j->session->tokenizer, &j->generation->stops,
                                &q->ids));
    }
    return ND_OK;
}

/* What one replica has generated reaches the others. */
static nd_status share_result(job *j, size_t i, bool own)
{
    nd_sequence *s = &j->sequences[i];
    int64_t numbers[2] = {s->count, s->finish};
    ND_TRY(nd_session_broadcast(j->session, ND_GROUP_DP_REPLICATE, numbers, sizeof numbers, own));
    ND_TRY(nd_session_broadcast(j->session, ND_GROUP_DP_REPLICATE, s->ids,
                                numbers[0] * (int64_t)sizeof *s->ids, own));
    if (own) {
        return ND_OK;
    }
    s->count = numbers[0];
    s->finish = (nd_finish)numbers[1];
    for (int64_t k = 0; k < s->count; k++) {
        bool stop = false;
        ND_TRY(add_token(j, i, s->ids[k], &stop));
    }
    return finish(j, i);
}

/* Each replica runs an equal part of the requests [begin, end). */
static nd_status run_wave(job *j, size_t begin, size_t end)
{
    const nd_generation *g = j->generation;
    const size_t replica = (size_t)j->session->worker->rank.coord.at[ND_AXIS_DP_REPLICATE];
    const size_t first = begin + (end - begin) * replica / j->replicas;
    const size_t behind = begin + (end - begin) * (replica + 1) / j->replicas;
    const nd_stop_check check = {ask, j};
    const nd_generate_rules rules = {.sampling = g->sampling,
                                     .ends = g->ends.data,
                                     .end_count = (int)g->ends.count,
                                     .token = on_token,
                                     .end = on_end,
                                     .context = j,
                                     .check = &check};
    j->begin = first;
    nd_status status =
        nd_generator_run(g->generator, j->sequences + first, (int64_t)(behind - first), &rules);
    status = nd_session_end_wave(j->session, status);
    if (status == ND_ERR_PREEMPTED && j->replicas > 1) {
        /* Each replica has the numbers of its part of a wave alone, and results of a wave that was
         * stopped are not exchanged. */
        return nd_fail(status, "stopped by a signal; %zu of %zu texts are complete", j->printed,
                       j->count);
    }
    ND_TRY(status);
    for (size_t i = begin; i < end && j->replicas > 1; i++) {
        ND_TRY(share_result(j, i, i >= first && i < behind));
    }
    return print_ready(j);
}

/* An instruct model often ends at once where a prompt is not written as a user's turn. */
static void warn_of_empty(const job *j)
{
    const nd_session *s = j->session;
    size_t empty = 0;
    nd_chat chat;
    for (size_t i = 0; i < j->printed; i++) {
        empty += j->sequences[i].finish == ND_FINISH_EOS && j->sequences[i].count == 1;
    }
    if (empty > 0 && j->first) {
        const bool knows_turns = s->tokenizer && !s->flags[ND_GENERATE_CHAT].given &&
                                 nd_chat_guess(s->tokenizer, s->tokenizer_path, &chat);
        nd_log_warning("%zu of %zu texts are empty, as the model's end token came first%s", empty,
                       j->printed,
                       knows_turns ? "; --chat writes a prompt as a user's turn, which instruct "
                                     "models expect"
                                   : "");
    }
}

nd_status nd_generate_run(const nd_generation *g, nd_bytes *last)
{
    const nd_rank *r = &g->session->worker->rank;
    job j = {.generation = g,
             .session = g->session,
             .count = g->requests.count,
             .replicas = (size_t)r->mesh.size[ND_AXIS_DP_REPLICATE],
             .first = r->rank == 0,
             .streams = !g->jsonl && r->rank == 0};
    const size_t wave = j.replicas > 1 ? WAVE * (size_t)g->batch * j.replicas : j.count;
    nd_status status = ND_OK;
    ND_TRY_OUT(prepare(&j));
    for (size_t i = 0; i < j.count; i += wave) {
        ND_TRY_OUT(run_wave(&j, i, i + wave < j.count ? i + wave : j.count));
    }
    if (last) {
        const nd_bytes *text = &j.results[j.count - 1].text.text;
        ND_TRY_OUT(nd_bytes_add(last, text->data, text->count));
    }
    warn_of_empty(&j);
out:
    for (size_t i = 0; j.results && i < j.count; i++) {
        nd_text_out_fini(&j.results[i].text);
    }
    free(j.results);
    free(j.sequences);
    free(j.ids);
    return status;
}
