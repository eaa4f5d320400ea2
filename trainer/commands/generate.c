// SPDX-License-Identifier: Apache-2.0
/* `ndtrain generate`: continues prompts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/process.h"
#include "runtime/base/text.h"
#include "trainer/commands/session.h"
#include "trainer/corpus/row.h"
#include "trainer/text/unicode.h"

typedef struct generation {
    nd_session *session;
    nd_sampling sampling;
    nd_stops stops;
    bool jsonl;     /* the output, and the input unless it is --prompt */
    bool told_form; /* which chat form was found */
    nd_requests requests;
    nd_ids ends; /* ids that end a text */
    nd_generator *generator;
    int64_t batch;    /* of the generator */
    uint64_t first;   /* number of the first request, for the draws */
    json_t *messages; /* of a conversation, so far; NULL: it is none */
} generation;

static nd_status read_sampling(const nd_flag_value *v, nd_sampling *out)
{
    *out = (nd_sampling){.temperature = v[ND_GENERATE_TEMPERATURE].real,
                         .top_k = v[ND_GENERATE_TOP_K].whole,
                         .top_p = v[ND_GENERATE_TOP_P].real,
                         .min_p = v[ND_GENERATE_MIN_P].real};
    const char *idle = out->top_k > 0   ? "--top-k"
                       : out->top_p < 1 ? "--top-p"
                       : out->min_p > 0 ? "--min-p"
                                        : NULL;
    ND_TRY(nd_sampling_check(out));
    ND_REFUSE(out->temperature == 0 && idle,
              "%s has no effect at --temperature 0, the default, which takes the likeliest token; "
              "give --temperature 1 as well, or leave %s out",
              idle, idle);
    return ND_OK;
}

static nd_status read_flags(const nd_command_flags *line, generation *g)
{
    const nd_flag_value *v = line->values;
    const char *stop, *file = v[ND_GENERATE_PROMPT_FILE].text;
    const bool prompt = v[ND_GENERATE_PROMPT].given;
    for (int at = 0; (stop = nd_command_flags_next(line, ND_GENERATE_STOP, &at));) {
        ND_TRY(nd_stops_add(&g->stops, stop));
    }
    ND_REFUSE(prompt && file, "--prompt is one text; leave out --prompt-file, or --prompt");
    ND_REFUSE(
        v[ND_GENERATE_INTERACTIVE].given && (prompt || file),
        "--interactive reads prompts from the terminal; leave out --prompt and --prompt-file");
    ND_REFUSE(v[ND_GENERATE_CONTEXT].given && !v[ND_GENERATE_INTERACTIVE].given,
              "--context is the room of --interactive, and has no effect without it; the room "
              "follows from the prompt and --max-new-tokens");
    g->jsonl = v[ND_GENERATE_JSONL].given || (file && nd_is_name_of_rows(file));
    return read_sampling(v, &g->sampling);
}

static nd_status check_flags(const nd_command_flags *line)
{
    return read_flags(line, &(generation){0});
}

/* Tokens of a conversation at most. */
static int64_t context_of(const nd_session *s)
{
    return nd_min(s->flags[ND_GENERATE_CONTEXT].whole, s->model.shape.max_positions);
}

/* NULL: standard input. */
static const char *prompt_file(const nd_session *s)
{
    const char *file = s->flags[ND_GENERATE_PROMPT_FILE].text;
    return file && strcmp(file, "-") != 0 ? file : NULL;
}

/* Returns whether one of the rows has messages. */
static bool have_messages(const char *rows, size_t size)
{
    nd_row_field field = {.key = "messages"};
    nd_json_lines lines = {.next = rows, .left = size};
    size_t column;
    while (field.kind == ND_ROW_ABSENT && nd_json_lines_next(&lines)) {
        (void)nd_row_scan((const uint8_t *)lines.line, lines.size, &field, 1, &column);
    }
    return field.kind != ND_ROW_ABSENT;
}

/* The form that data.chat_format names, or else, with --chat or rows of `messages`, that the
 * tokenizer has the tokens for. */
static nd_status find_chat(const nd_session *s, bool messages, nd_chat *chat, bool *found)
{
    const nd_chat_choice named = s->config.data.chat_format;
    const bool asked = s->flags[ND_GENERATE_CHAT].given;
    nd_chat_rules rules;
    *found = s->tokenizer && (named != ND_CHOOSE_CHAT_NONE || asked || messages);
    if (!*found) {
        return asked ? nd_fail(ND_ERR_DATA, "--chat needs a tokenizer, and the model has none; "
                                            "name one with --tokenizer")
                     : ND_OK;
    }
    if (named != ND_CHOOSE_CHAT_NONE) {
        ND_TRY(nd_chat_rules_find(s->tokenizer_path, named, &rules));
        return nd_chat_find(s->tokenizer, &rules, chat);
    }
    return nd_chat_guess(s->tokenizer, s->tokenizer_path, chat)
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "the tokenizer has the tokens of no known chat form (llama3, chatml), "
                         "and no chat template that is known is beside it; %s",
                         asked ? "leave out --chat"
                               : "give rows with \"prompt\", not \"messages\"");
}

static void forget_requests(generation *g)
{
    nd_requests_fini(&g->requests);
    free(g->ends.data);
    g->ends = (nd_ids){0};
}

/* Makes the requests in the prompt or (rows) in JSON lines, on every rank alike. After a failure
 * too, its parts are the caller's. */
static nd_status encode(generation *g, bool rows, const char *text, size_t size)
{
    nd_session *s = g->session;
    const nd_flag_value *v = s->flags;
    const char *prompt = v[ND_GENERATE_PROMPT].text, *file = v[ND_GENERATE_PROMPT_FILE].text;
    const char *name = prompt ? "--prompt" : file ? file : "standard input";
    const bool interactive = v[ND_GENERATE_INTERACTIVE].given;
    const bool speaks = s->worker->rank.rank == 0 && !s->checks;
    const nd_encode_options prompts = {.special_in_text = ND_SPECIAL_PARSE, .post_process = true};
    const nd_encode_options messages = {.special_in_text = ND_SPECIAL_TEXT};
    nd_request_rules rules = {
        .vocab = s->model.shape.vocab,
        .begin = -1,
        .plain_as_user = v[ND_GENERATE_CHAT].given,
        .max_new = v[ND_GENERATE_MAX_NEW].whole,
        /* Nobody asked for a length: a text ends where the model has no more room. The lines of
         * --interactive share their --context. */
        .max_new_fits = !v[ND_GENERATE_MAX_NEW].given && !interactive,
        .max_tokens = interactive ? context_of(s) : s->model.shape.max_positions,
        .limit = interactive ? "--context" : "the model's max_position_embeddings"};
    nd_chat chat = {0};
    bool has_chat = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(find_chat(s, rows && have_messages(text, size), &chat, &has_chat));
    if (has_chat && speaks && !g->told_form) {
        nd_chat_rules_tell(&chat.rules);
        g->told_form = true;
    }
    if (s->tokenizer) {
        ND_TRY_OUT(nd_encoder_create(s->tokenizer, &prompts, &rules.prompts));
        ND_TRY_OUT(nd_encoder_create(s->tokenizer, &messages, &rules.messages));
        rules.begin = nd_session_beginning(rules.prompts);
    }
    rules.chat = has_chat ? &chat : NULL;
    if (!rows && !prompt && size > 0 && text[size - 1] == '\n') {
        size--; /* the end of a file's last line is not part of the prompt */
        size -= size > 0 && text[size - 1] == '\r';
    }
    ND_TRY_OUT(rows ? nd_requests_add_rows(&g->requests, &rules, name, text, size)
                    : nd_requests_add_text(&g->requests, &rules, name, size > 0 ? text : "", size));
    if (g->requests.twice_begun && speaks) {
        nd_log_warning("a prompt begins with the beginning of text twice: leave it out of the "
                       "text, as the tokenizer adds it");
    }
    if (!v[ND_GENERATE_IGNORE_EOS].given) {
        ND_TRY_OUT(nd_session_ends(s, &g->ends));
        ND_TRY_OUT(has_chat ? nd_ids_add(&g->ends, &chat.close, 1) : ND_OK);
    }
out:
    nd_encoder_destroy(rules.prompts);
    nd_encoder_destroy(rules.messages);
    return status;
}

static nd_status encode_all(void *context, const char *text, size_t size)
{
    generation *g = context;
    return encode(g, g->jsonl, text, size);
}

/* All of the input, whose requests are run at once. Ranks agree on the command line, and so on
 * --prompt. */
static nd_status read_requests(generation *g)
{
    nd_session *s = g->session;
    const bool reads = s->checks || s->worker->rank.rank == 0;
    const char *prompt = s->flags[ND_GENERATE_PROMPT].text, *file = prompt_file(s);
    char *text = NULL;
    size_t size = 0;
    if (prompt) {
        return encode(g, false, prompt, strlen(prompt));
    }
    if (!file) {
        if (reads && isatty(STDIN_FILENO)) {
            nd_log_info("reading the prompt from the terminal, up to the end of input (Ctrl-D)");
        }
        return nd_stdin_each(s, NULL, encode_all, g);
    }
    nd_status status =
        reads ? nd_fs_read(file, ND_STDIN_BYTES_MAX, ND_ERR_DATA, &text, &size) : ND_OK;
    status = nd_session_share(s, status, &text, &size);
    status = status == ND_OK ? encode_all(g, text, size) : status;
    free(text);
    return status;
}

/* Requests become texts, which are printed in the order of the requests. */

/* With several replicas: texts of each slot in a wave, after which results are exchanged. */
enum { WAVE = 4 };

typedef struct result {
    nd_text_out text;
    size_t shown; /* bytes of the text */
    bool ended;
} result;

typedef struct job {
    const generation *g;
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
    static const char *const finishes[ND_FINISH_COUNT] = {"none", "eos", "stop", "length"};
    const nd_request *q = &j->g->requests.list[i];
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
    nd_json_set(&row, "finish", json_string(finishes[s->finish]));
    nd_json_set(&row, "prompt_tokens", json_integer(s->prompt_count));
    nd_json_set(&row, "new_tokens", json_integer(s->count));
    for (int64_t k = 0; k < s->count; k++) {
        nd_json_append(&ids, json_integer(s->ids[k]));
    }
    nd_json_set(&row, "ids", ids);
    return nd_print_row(row);
}

/* The ids of a text that has no tokenizer, with spaces between them. */
static nd_status print_ids(const nd_sequence *s)
{
    enum { DIGITS = 12 };
    char *line = NULL;
    size_t at = 0;
    ND_TRY(ND_ALLOC(s->count * DIGITS + 1, &line));
    for (int64_t k = 0; k < s->count; k++) {
        at += (size_t)sprintf(line + at, k ? " %d" : "%d", s->ids[k]);
    }
    nd_status status = nd_print_line(line, at);
    free(line);
    return status;
}

/* The text that has not been shown as it came. */
static nd_status print_result(const job *j, size_t i)
{
    const result *r = &j->results[i];
    const nd_bytes *text = &r->text.text;
    if (j->g->jsonl) {
        return print_row(j, i);
    }
    const size_t left = text->count > r->shown ? text->count - r->shown : 0;
    return !r->text.decoder ? print_ids(&j->sequences[i])
                            : nd_print_line(left > 0 ? (char *)text->data + r->shown : "", left);
}

/* Results that are complete, in the order of the requests. */
static nd_status print_ready(job *j)
{
    nd_status status = ND_OK;
    while (status == ND_OK && j->printed < j->count && j->results[j->printed].ended) {
        const size_t i = j->printed++;
        status = j->first ? print_result(j, i) : ND_OK;
    }
    return status;
}

static nd_status add_token(job *j, size_t i, int32_t id)
{
    return nd_ids_hold(&j->g->ends, id) ? ND_OK : nd_text_out_push(&j->results[i].text, id);
}

static nd_status finish(job *j, size_t i)
{
    nd_text_out *text = &j->results[i].text;
    j->results[i].ended = true;
    ND_TRY(nd_text_out_end(text));
    if (text->stopped) { /* its end may have been the last bytes that waited for others */
        j->sequences[i].finish = ND_FINISH_STOP;
    }
    return ND_OK;
}

static nd_status on_token(void *context, int64_t sequence, int32_t id, bool *stop)
{
    job *j = context;
    const size_t i = j->begin + (size_t)sequence;
    result *r = &j->results[i];
    const nd_text_out *text = &r->text;
    ND_TRY(add_token(j, i, id));
    *stop = text->stopped;
    if (!j->streams || text->given <= r->shown) {
        return ND_OK;
    }
    fwrite(text->text.data + r->shown, 1, text->given - r->shown, stdout);
    r->shown = text->given;
    return nd_process_flush_output();
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
    const nd_generate_counts c = j->g->generator->counts;
    if (nd_session_word_is_due(j->g->session) && (!j->streams || c.new_tokens == 0)) {
        nd_log_info("%zu of %zu texts are printed; %lld prompt tokens and %lld new ones so far%s",
                    j->printed, j->count, (long long)c.prompt_tokens, (long long)c.new_tokens,
                    j->replicas == 1 ? "" : " on this replica");
    }
    return nd_session_ask_stop(j->g->session, ND_GROUP_TP, stop);
}

static nd_status prepare(job *j)
{
    const nd_requests *requests = &j->g->requests;
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
                                        .request = j->g->first + i,
                                        .ids = j->ids + tokens};
        tokens += q->max_new;
        ND_TRY(
            nd_text_out_init(&j->results[i].text, j->g->session->tokenizer, &j->g->stops, &q->ids));
    }
    return ND_OK;
}

/* Shares sequence i, which one replica (`own`) has generated, with the other replicas. */
static nd_status share_result(job *j, size_t i, bool own)
{
    nd_rank *r = &j->g->session->worker->rank;
    nd_sequence *s = &j->sequences[i];
    int64_t numbers[2] = {s->count, s->finish};
    ND_TRY(nd_shared_bytes(r, ND_GROUP_DP_REPLICATE, numbers, sizeof numbers, own));
    ND_TRY(nd_shared_bytes(r, ND_GROUP_DP_REPLICATE, s->ids, numbers[0] * (int64_t)sizeof *s->ids,
                           own));
    if (own) {
        return ND_OK;
    }
    s->count = numbers[0];
    s->finish = (nd_finish)numbers[1];
    for (int64_t k = 0; k < s->count; k++) {
        ND_TRY(add_token(j, i, s->ids[k]));
    }
    return finish(j, i);
}

/* Each replica runs an equal part of the requests [begin, end). */
static nd_status run_wave(job *j, size_t begin, size_t end)
{
    const generation *g = j->g;
    const size_t replica = (size_t)j->g->session->worker->rank.coord.at[ND_AXIS_DP_REPLICATE];
    const size_t first = begin + (end - begin) * replica / j->replicas;
    const size_t behind = begin + (end - begin) * (replica + 1) / j->replicas;
    const nd_stop_check check = {ask, j};
    const nd_generate_rules rules = {.sampling = g->sampling,
                                     .ends = &g->ends,
                                     .token = on_token,
                                     .end = on_end,
                                     .context = j,
                                     .check = &check};
    j->begin = first;
    nd_status status =
        nd_generator_run(g->generator, j->sequences + first, (int64_t)(behind - first), &rules);
    status = nd_session_end_wave(j->g->session, status);
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
    const nd_session *s = j->g->session;
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

/* Runs the requests and prints their results on rank 0. The text of the last one is appended to
 * *last, unless that is NULL, on every rank. Collective. */
static nd_status generate(const generation *g, nd_bytes *last)
{
    const nd_rank *r = &g->session->worker->rank;
    job j = {.g = g,
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

/* One call: all requests at once, with a cache for the longest. */

/* The counts of all replicas. The times are those of the one that took longest: replicas work at
 * once. Collective over all ranks, which have all done their part. */
static nd_status sum_counts(nd_rank *rank, nd_generate_counts *c)
{
    const nd_group_kind replicas = ND_GROUP_DP_REPLICATE;
    int64_t sums[] = {c->calls, c->prompt_tokens, c->new_tokens, c->decode_tokens};
    int64_t ns[] = {(int64_t)(c->prompt_seconds * 1e9), (int64_t)(c->decode_seconds * 1e9)};
    ND_TRY(nd_all_reduce(rank, replicas, sums, 4, ND_DTYPE_I64, ND_REDOP_SUM));
    ND_TRY(nd_all_reduce(rank, replicas, ns, 2, ND_DTYPE_I64, ND_REDOP_MAX));
    *c = (nd_generate_counts){.calls = sums[0],
                              .prompt_tokens = sums[1],
                              .new_tokens = sums[2],
                              .decode_tokens = sums[3],
                              .prompt_seconds = (double)ns[0] * 1e-9,
                              .decode_seconds = (double)ns[1] * 1e-9};
    return ND_OK;
}

/* ", 12.3 a second", or nothing: a prompt of one token is computed with new tokens, and has no time
 * of its own. */
static const char *rate_text(int64_t tokens, double seconds, const char *when, char text[64])
{
    text[0] = '\0';
    if (seconds > 0) {
        snprintf(text, 64, ", %.1f a second%s", (double)tokens / seconds, when);
    }
    return text;
}

static const char *plural(int64_t count)
{
    return count == 1 ? "" : "s";
}

static nd_status run_requests(generation *g)
{
    nd_session *s = g->session;
    const nd_rank *r = &s->worker->rank;
    const int64_t count = (int64_t)g->requests.count;
    const int64_t each = nd_ceil_div(count, r->mesh.size[ND_AXIS_DP_REPLICATE]);
    const int64_t capacity = nd_max(g->requests.longest, 2);
    g->batch = nd_min(s->flags[ND_GENERATE_BATCH].whole, each);
    const int64_t rows = nd_min(s->flags[ND_GENERATE_ROWS].whole, g->batch * capacity);
    const nd_generate_options sizes = {
        .batch = g->batch, .rows = nd_max(rows, g->batch), .capacity = capacity};
    ND_TRY(nd_session_generator(s, &sizes, &g->generator));
    const double begin = nd_clock_seconds();
    ND_TRY(generate(g, NULL));
    const double seconds = nd_clock_seconds() - begin;
    nd_generate_counts c = g->generator->counts;
    ND_TRY(sum_counts(&s->worker->rank, &c));
    if (r->rank == 0) {
        char new_rate[64], prompt_rate[64];
        nd_log_info(
            "%lld text%s in %.2f s: %lld new token%s%s; %lld prompt token%s%s; %lld call%s",
            (long long)count, plural(count), seconds, (long long)c.new_tokens, plural(c.new_tokens),
            rate_text(c.decode_tokens, c.decode_seconds, " while no prompt was computed", new_rate),
            (long long)c.prompt_tokens, plural(c.prompt_tokens),
            rate_text(c.prompt_tokens, c.prompt_seconds, "", prompt_rate), (long long)c.calls,
            plural(c.calls));
    }
    return ND_OK;
}

/*
 * --interactive: each line of standard input is a prompt; with --chat it is the next message of a
 * user, and all messages so far are what the model reads. A line that cannot be answered is
 * reported, and the next one is read.
 */

static nd_status add_message(generation *g, const char *role, const char *text, size_t size)
{
    json_t *message = json_object();
    nd_json_set(&message, "role", json_string(role));
    nd_json_set(&message, "content", json_stringn(text, size)); /* NULL: it is not UTF-8 */
    nd_json_append(&g->messages, message);
    return g->messages ? ND_OK : nd_fail_memory("a conversation");
}

/* The requests of a line: one, or none of an empty row. */
static nd_status encode_line(generation *g, const char *line, size_t size)
{
    if (!g->messages) {
        return encode(g, g->jsonl, line, size);
    }
    if (nd_utf8_valid((const uint8_t *)line, size) != size) {
        return nd_fail(ND_ERR_DATA, "the message is not UTF-8");
    }
    ND_TRY(add_message(g, "user", line, size));
    json_t *object = json_object();
    nd_json_set(&object, "messages", json_incref(g->messages));
    char *row = object ? nd_json_text(object, JSON_COMPACT) : NULL;
    json_decref(object);
    nd_status status = row ? encode(g, true, row, strlen(row)) : nd_fail_memory("a conversation");
    free(row);
    return status;
}

/* A conversation that is too long, or has a message that cannot be encoded, begins anew. */
static nd_status report(generation *g, nd_status status)
{
    const bool first = g->session->worker->rank.rank == 0;
    if (status != ND_ERR_DATA) {
        return status;
    }
    if (first) {
        nd_log_error("%s", nd_error_last()->message);
    }
    nd_error_clear();
    if (json_array_size(g->messages) > 1 && first) {
        nd_log_info("the conversation begins anew");
    }
    return g->messages && json_array_clear(g->messages) != 0 ? nd_fail_memory("a conversation")
                                                             : ND_OK;
}

static nd_status answer(void *context, const char *line, size_t size)
{
    generation *g = context;
    nd_bytes text = {0};
    bool answered = false;
    nd_status status = size > 0 ? encode_line(g, line, size) : ND_OK;
    if (status != ND_OK) {
        status = report(g, status);
    } else if (g->requests.count > 0) {
        status = generate(g, &text);
        answered = true;
        g->first++;
    }
    if (status == ND_OK && g->messages && answered) { /* an empty answer is a turn as well */
        status = add_message(g, "assistant", text.data ? (const char *)text.data : "", text.count);
    }
    free(text.data);
    forget_requests(g);
    return status;
}

static nd_status run_lines(generation *g)
{
    nd_session *s = g->session;
    const int64_t context = context_of(s);
    const nd_generate_options sizes = {
        .batch = 1, .rows = nd_min(s->flags[ND_GENERATE_ROWS].whole, context), .capacity = context};
    g->batch = 1;
    ND_TRY(nd_session_generator(s, &sizes, &g->generator));
    if (s->flags[ND_GENERATE_CHAT].given && !g->jsonl) {
        g->messages = json_array();
        ND_TRY(g->messages ? ND_OK : nd_fail_memory("a conversation"));
    }
    return nd_stdin_each(s, "> ", answer, g);
}

static nd_status run_generate(nd_session *s)
{
    generation g = {.session = s};
    nd_chat chat;
    bool has_chat;
    const bool interactive = s->flags[ND_GENERATE_INTERACTIVE].given;
    const bool given = s->flags[ND_GENERATE_PROMPT].given || prompt_file(s);
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_generate_check_job(&s->config, &s->model.shape, &s->config.resolved_mesh));
    ND_TRY_OUT(nd_session_agree(s));
    ND_TRY_OUT(interactive ? nd_session_check_single(s, "--interactive continues one text")
                           : ND_OK);
    ND_TRY_OUT(read_flags(s->call->line, &g));
    g.sampling.seed = (uint64_t)s->config.train.seed;
    if (s->checks && (!given || s->config.launch.node_rank > 0)) { /* rank 0 reads the prompt */
        status = find_chat(s, false, &chat, &has_chat);
    } else if (interactive) {
        status = run_lines(&g);
    } else {
        ND_TRY_OUT(read_requests(&g));
        status = s->checks || g.requests.count == 0 ? ND_OK : run_requests(&g);
    }
out:
    nd_generator_destroy(g.generator);
    forget_requests(&g);
    json_decref(g.messages);
    return status;
}

const nd_command nd_command_generate = {.id = ND_COMMAND_GENERATE,
                                        .trains = true,
                                        .begin = nd_session_begin,
                                        .run = nd_session_run,
                                        .decodes = true,
                                        .check_flags = check_flags,
                                        .use = run_generate,
                                        .model = ND_GENERATE_MODEL,
                                        .tokenizer = ND_GENERATE_TOKENIZER};
