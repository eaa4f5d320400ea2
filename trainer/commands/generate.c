// SPDX-License-Identifier: Apache-2.0
/* `ndtrain generate`: continues prompts. */
#include "trainer/commands/generate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/text.h"
#include "trainer/corpus/row.h"
#include "trainer/text/unicode.h"

/* Flags. */

enum { DEFAULT_MAX_NEW = 128, DEFAULT_CONTEXT = 4096 };

static nd_status check_effect(const nd_sampling *s)
{
    const char *idle = s->top_k > 0 ? "--top-k" : s->top_p < 1 ? "--top-p" : "--min-p";
    if (s->temperature > 0 || (s->top_k == 0 && s->top_p == 1 && s->min_p == 0)) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_CONFIG,
                   "%s has no effect at --temperature 0, the default, which takes the likeliest "
                   "token; give --temperature 1 as well, or leave %s out",
                   idle, idle);
}

static nd_status parse(const nd_command_flags *line, nd_generate_call *o)
{
    const nd_flag_value *v = line->values;
    const char *stop;
    *o = (nd_generate_call){.model = v[ND_GENERATE_MODEL].text,
                            .tokenizer = v[ND_GENERATE_TOKENIZER].text,
                            .prompt = v[ND_GENERATE_PROMPT].text,
                            .prompt_file = v[ND_GENERATE_PROMPT_FILE].text,
                            .jsonl = v[ND_GENERATE_JSONL].given,
                            .chat = v[ND_GENERATE_CHAT].given,
                            .ignore_eos = v[ND_GENERATE_IGNORE_EOS].given,
                            .interactive = v[ND_GENERATE_INTERACTIVE].given,
                            .max_new = v[ND_GENERATE_MAX_NEW].whole,
                            .batch = v[ND_GENERATE_BATCH].whole,
                            .rows = v[ND_GENERATE_ROWS].whole,
                            .context = v[ND_GENERATE_CONTEXT].whole,
                            .sampling = {.temperature = v[ND_GENERATE_TEMPERATURE].real,
                                         .top_k = v[ND_GENERATE_TOP_K].whole,
                                         .top_p = v[ND_GENERATE_TOP_P].real,
                                         .min_p = v[ND_GENERATE_MIN_P].real}};
    for (int at = 0; (stop = nd_command_flags_next(line, ND_GENERATE_STOP, &at));) {
        ND_TRY(nd_stops_add(&o->stops, stop));
    }
    if (o->max_new == 0) {
        o->max_new = DEFAULT_MAX_NEW;
        o->max_new_fits = !o->interactive; /* lines share their --context */
    }
    if (o->prompt && o->prompt_file) {
        return nd_fail(ND_ERR_CONFIG, "--prompt is one text; leave out --prompt-file, or --prompt");
    }
    if (o->interactive && (o->prompt || o->prompt_file)) {
        return nd_fail(ND_ERR_CONFIG, "--interactive reads prompts from the terminal; leave out "
                                      "--prompt and --prompt-file");
    }
    if (o->context > 0 && !o->interactive) {
        return nd_fail(ND_ERR_CONFIG, "--context is the room of --interactive, and has no effect "
                                      "without it; the room follows from the prompt and "
                                      "--max-new-tokens");
    }
    o->context = o->context > 0 ? o->context : DEFAULT_CONTEXT;
    o->jsonl |= o->prompt_file && nd_is_name_of_rows(o->prompt_file);
    ND_TRY(nd_sampling_check(&o->sampling));
    return check_effect(&o->sampling);
}

static nd_status check_flags(const nd_command_flags *line)
{
    nd_generate_call o;
    return parse(line, &o);
}

/* The prompts. */

static void input_fini(nd_generate_input *in)
{
    nd_requests_fini(&in->requests);
    free(in->ends.data);
    *in = (nd_generate_input){0};
}

/* Tokens of a conversation at most. */
static int64_t context_of(const nd_session *s, const nd_generate_call *o)
{
    return nd_min(o->context, s->model.shape.max_positions);
}

static nd_status read_file(const nd_generate_call *o, char **text, size_t *size)
{
    if (o->prompt) {
        *size = strlen(o->prompt);
        return nd_fs_format(text, "%s", o->prompt);
    }
    return nd_fs_read(o->prompt_file, ND_STDIN_BYTES_MAX, ND_ERR_DATA, text, size);
}

/* Whether the prompts come from standard input. */
static bool reads_standard_input(const nd_generate_call *o)
{
    return !o->prompt && (!o->prompt_file || strcmp(o->prompt_file, "-") == 0);
}

static nd_status read_input(nd_session *s, const nd_generate_call *o, char **text, size_t *size)
{
    const bool reads = s->worker->rank.rank == 0;
    if (reads_standard_input(o)) {
        if (reads && isatty(STDIN_FILENO)) {
            nd_log_info("reading the prompt from the terminal, up to the end of input (Ctrl-D)");
        }
        return nd_stdin_read(s, text, size);
    }
    return nd_session_share(s, reads ? read_file(o, text, size) : ND_OK, text, size);
}

static const char *input_name(const nd_generate_call *o)
{
    return o->prompt ? "--prompt" : o->prompt_file ? o->prompt_file : "standard input";
}

/* Whether one of the rows has messages. */
static bool have_messages(const char *rows, size_t size)
{
    nd_row_field field = {.key = "messages"};
    for (size_t at = 0, n, column; at < size && field.kind == ND_ROW_ABSENT; at += n + 1) {
        const char *end = memchr(rows + at, '\n', size - at);
        n = end ? (size_t)(end - rows) - at : size - at;
        (void)nd_row_scan((const uint8_t *)rows + at, n, &field, 1, &column);
    }
    return field.kind != ND_ROW_ABSENT;
}

/* The form that data.chat_format names, or else, with --chat or rows of `messages`, that the
 * tokenizer has the tokens for. */
static nd_status find_chat(nd_session *s, const nd_generate_call *o, bool messages, nd_chat *chat,
                           bool *found)
{
    const nd_chat_choice named = s->config->data.chat_format;
    nd_chat_rules rules;
    *found = s->tokenizer && (named != ND_CHOOSE_CHAT_NONE || o->chat || messages);
    if (!*found) {
        return o->chat ? nd_fail(ND_ERR_DATA, "--chat needs a tokenizer, and the model has none; "
                                              "name one with --tokenizer")
                       : ND_OK;
    }
    if (named != ND_CHOOSE_CHAT_NONE) {
        ND_TRY(nd_chat_rules_find(s->tokenizer_path, named, &rules));
        ND_TRY(nd_chat_find(s->tokenizer, &rules, chat));
    } else if (!nd_chat_guess(s->tokenizer, s->tokenizer_path, chat)) {
        return nd_fail(
            ND_ERR_DATA,
            "the tokenizer has the tokens of no known chat form (llama3, chatml), and no "
            "chat template that is known is beside it; %s",
            o->chat ? "leave out --chat" : "give rows with \"prompt\", not \"messages\"");
    }
    if (!s->checks && !s->form_said && s->worker->identity.rank == 0) {
        nd_chat_rules_tell(&chat->rules);
    }
    s->form_said = !s->checks;
    return ND_OK;
}

/* The token that the post-processor puts before a text, if any: -1. */
static int64_t beginning(nd_encoder *encoder)
{
    const int32_t *ids;
    size_t count;
    return nd_encode(encoder, "", 0, &ids, &count) == ND_OK && count > 0 ? ids[0] : -1;
}

/* The requests in the prompt or the rows, on every rank alike. After a failure too, its parts are
 * the caller's. */
static nd_status encode(nd_session *s, const nd_generate_call *o, const char *text, size_t size,
                        nd_generate_input *in)
{
    const nd_encode_options prompts = {.special_in_text = ND_SPECIAL_PARSE, .post_process = true};
    const nd_encode_options messages = {.special_in_text = ND_SPECIAL_TEXT};
    nd_request_rules rules = {
        .vocab = s->model.shape.vocab,
        .begin = -1,
        .max_new = o->max_new,
        .max_new_fits = o->max_new_fits,
        .max_tokens = o->interactive ? context_of(s, o) : s->model.shape.max_positions,
        .limit = o->interactive ? "--context" : "the model's max_position_embeddings"};
    nd_encoder *encoders[2] = {NULL, NULL};
    nd_chat chat = {0};
    bool has_chat = false;
    nd_status status = ND_OK;
    const bool rows = o->jsonl && !o->prompt;
    ND_TRY_OUT(find_chat(s, o, rows && have_messages(text, size), &chat, &has_chat));
    if (s->tokenizer) {
        ND_TRY_OUT(nd_encoder_create(s->tokenizer, &prompts, &encoders[0]));
        ND_TRY_OUT(nd_encoder_create(s->tokenizer, &messages, &encoders[1]));
        rules.begin = beginning(encoders[0]);
    }
    rules.prompts = encoders[0];
    rules.messages = encoders[1];
    rules.chat = has_chat ? &chat : NULL;
    rules.plain_as_user = o->chat;
    if (!rows && !o->prompt && size > 0 && text[size - 1] == '\n') {
        size--; /* the end of a file's last line is not part of the prompt */
        size -= size > 0 && text[size - 1] == '\r';
    }
    ND_TRY_OUT(rows ? nd_requests_add_rows(&in->requests, &rules, input_name(o), text, size)
                    : nd_requests_add_text(&in->requests, &rules, input_name(o),
                                           size > 0 ? text : "", size));
    if (in->requests.twice_begun && s->worker->rank.rank == 0 && !s->checks) {
        nd_log_warning("a prompt begins with the beginning of text twice: leave it out of the "
                       "text, as the tokenizer adds it");
    }
    if (!o->ignore_eos) {
        ND_TRY_OUT(nd_session_ends(s, &in->ends));
        ND_TRY_OUT(has_chat ? nd_ids_add(&in->ends, &chat.close, 1) : ND_OK);
    }
out:
    nd_encoder_destroy(encoders[0]);
    nd_encoder_destroy(encoders[1]);
    return status;
}

static nd_status check_input(nd_session *s, const nd_generate_call *o)
{
    nd_generate_input in = {0};
    nd_chat chat = {0};
    char *text = NULL;
    size_t size = 0;
    bool has_chat = false;
    if (reads_standard_input(o) || s->config->launch.node_rank > 0) {
        return find_chat(s, o, false, &chat, &has_chat);
    }
    nd_status status = read_file(o, &text, &size);
    status = status == ND_OK ? encode(s, o, text, size, &in) : status;
    free(text);
    input_fini(&in);
    return status;
}

/* Work. */

/* Of all replicas. The times are those of the one that took longest: replicas work at once.
 * Collective over all ranks, which have all done their part. */
static nd_status sum_counts(nd_session *session, nd_generate_counts *c)
{
    nd_rank *r = &session->worker->rank;
    nd_comm *replicas = r->groups.by_kind[ND_GROUP_DP_REPLICATE];
    int64_t sums[] = {c->calls, c->prompt_tokens, c->new_tokens, c->decode_tokens};
    int64_t ns[] = {(int64_t)(c->prompt_seconds * 1e9), (int64_t)(c->decode_seconds * 1e9)};
    ND_TRY(nd_comm_all_reduce(replicas, &r->stream, sums, 4, ND_DTYPE_I64, ND_REDOP_SUM, NULL));
    ND_TRY(nd_comm_all_reduce(replicas, &r->stream, ns, 2, ND_DTYPE_I64, ND_REDOP_MAX, NULL));
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

static void log_speed(const nd_generate_counts *c, size_t texts, double seconds)
{
    char new_rate[64], prompt_rate[64];
    nd_log_info(
        "%zu text%s in %.2f s: %lld new token%s%s; %lld prompt token%s%s; %lld call%s", texts,
        plural((int64_t)texts), seconds, (long long)c->new_tokens, plural(c->new_tokens),
        rate_text(c->decode_tokens, c->decode_seconds, " while no prompt was computed", new_rate),
        (long long)c->prompt_tokens, plural(c->prompt_tokens),
        rate_text(c->prompt_tokens, c->prompt_seconds, "", prompt_rate), (long long)c->calls,
        plural(c->calls));
}

/* All requests at once, with a cache for the longest. */
static nd_status run_requests(nd_session *session, const nd_generate_call *o,
                              const nd_generate_input *in)
{
    const nd_rank *r = &session->worker->rank;
    const size_t count = in->requests.count;
    const int64_t each = nd_ceil_div((int64_t)count, r->mesh.size[ND_AXIS_DP_REPLICATE]);
    const int64_t batch = nd_min(o->batch, each), capacity = nd_max(in->requests.longest, 2);
    const nd_generate_options sizes = {.batch = batch,
                                       .rows = nd_max(nd_min(o->rows, batch * capacity), batch),
                                       .capacity = capacity};
    nd_generator *generator = NULL;
    ND_TRY(nd_session_generator(session, &sizes, &generator));
    const nd_generate_task task = {
        .session = session, .options = o, .in = in, .generator = generator, .batch = batch};
    const double begin = nd_clock_seconds();
    nd_status status = nd_generate_run(&task, NULL);
    const double seconds = nd_clock_seconds() - begin;
    nd_generate_counts counts = nd_generator_counts(generator);
    status = status == ND_OK ? sum_counts(session, &counts) : status;
    if (status == ND_OK && r->rank == 0) {
        log_speed(&counts, count, seconds);
    }
    nd_generator_destroy(generator);
    return status;
}

static nd_status read_and_run(nd_session *session, const nd_generate_call *o)
{
    nd_generate_input in = {0};
    char *text = NULL;
    size_t size = 0;
    nd_status status = read_input(session, o, &text, &size);
    status = status == ND_OK ? encode(session, o, text, size, &in) : status;
    free(text);
    if (status == ND_OK && in.requests.count > 0) {
        status = run_requests(session, o, &in);
    }
    input_fini(&in);
    return status;
}

/*
 * --interactive: each line of standard input is a prompt; with --chat it is the next message of a
 * user, and all messages so far are what the model reads. A line that cannot be answered is
 * reported, and the next one is read.
 */

typedef struct conversation {
    nd_session *session;
    const nd_generate_call *options;
    nd_generator *generator;
    bool chat;        /* of lines; JSON lines hold their own messages */
    json_t *messages; /* so far; NULL without `chat` */
    uint64_t turn;
} conversation;

static nd_status add_message(conversation *c, const char *role, const char *text, size_t size)
{
    json_t *message = json_object();
    nd_json_set(&message, "role", json_string(role));
    nd_json_set(&message, "content", json_stringn(text, size)); /* NULL: it is not UTF-8 */
    nd_json_append(&c->messages, message);
    return c->messages ? ND_OK : nd_fail_memory("a conversation");
}

/* The messages as a row of JSON lines. */
static nd_status row_of(const conversation *c, char **out)
{
    json_t *row = json_object();
    nd_json_set(&row, "messages", json_incref(c->messages));
    *out = row ? nd_json_text(row, JSON_COMPACT) : NULL;
    json_decref(row);
    return *out ? ND_OK : nd_fail_memory("a conversation");
}

/* The requests of a line: one, or none of an empty row. */
static nd_status encode_line(conversation *c, const char *line, size_t size, nd_generate_input *in)
{
    nd_generate_call rows = *c->options;
    char *row = NULL;
    if (!c->chat) {
        return encode(c->session, c->options, line, size, in);
    }
    rows.jsonl = true;
    if (nd_utf8_valid((const uint8_t *)line, size) != size) {
        return nd_fail(ND_ERR_DATA, "the message is not UTF-8");
    }
    ND_TRY(add_message(c, "user", line, size));
    nd_status status = row_of(c, &row);
    status = status == ND_OK ? encode(c->session, &rows, row, strlen(row), in) : status;
    free(row);
    return status;
}

/* A conversation that is too long, or has a message that cannot be encoded, begins anew. */
static nd_status report(conversation *c, nd_status status)
{
    const bool first = c->session->worker->rank.rank == 0;
    if (status != ND_ERR_DATA) {
        return status;
    }
    if (first) {
        nd_log_error("%s", nd_error_last()->message);
    }
    nd_error_clear();
    if (c->chat && json_array_size(c->messages) > 1 && first) {
        nd_log_info("the conversation begins anew");
    }
    return c->chat && json_array_clear(c->messages) != 0 ? nd_fail_memory("a conversation") : ND_OK;
}

static nd_status answer(void *context, const char *line, size_t size)
{
    conversation *c = context;
    nd_generate_input in = {0};
    nd_bytes text = {0};
    nd_status status = size > 0 ? encode_line(c, line, size, &in) : ND_OK;
    if (status != ND_OK) {
        status = report(c, status);
    } else if (in.requests.count > 0) {
        const nd_generate_task task = {.session = c->session,
                                       .options = c->options,
                                       .in = &in,
                                       .generator = c->generator,
                                       .batch = 1,
                                       .first = c->turn++};
        status = nd_generate_run(&task, &text);
    }
    if (status == ND_OK && c->chat && text.count > 0) {
        status = add_message(c, "assistant", (const char *)text.data, text.count);
    }
    free(text.data);
    input_fini(&in);
    return status;
}

static nd_status run_lines(nd_session *s, const nd_generate_call *o)
{
    const int64_t context = context_of(s, o);
    const nd_generate_options sizes = {
        .batch = 1, .rows = nd_min(o->rows, context), .capacity = context};
    conversation c = {.session = s, .options = o, .chat = o->chat && !o->jsonl};
    ND_TRY(nd_session_check_single(&s->worker->rank.mesh, "--interactive continues one text"));
    if (c.chat) {
        c.messages = json_array();
        ND_TRY(c.messages ? ND_OK : nd_fail_memory("a conversation"));
    }
    nd_status status = nd_session_generator(s, &sizes, &c.generator);
    status = status == ND_OK ? nd_stdin_each_line(s, "> ", answer, &c) : status;
    nd_generator_destroy(c.generator);
    json_decref(c.messages);
    return status;
}

/* The command. */

static nd_status run(const nd_command_call *call)
{
    nd_session session = {0};
    nd_generate_call o;
    nd_status status = ND_OK;
    ND_TRY_OUT(parse(call->line, &o));
    o.sampling.seed = (uint64_t)call->config->train.seed;
    ND_TRY_OUT(nd_session_open(&session, call, o.model, o.tokenizer));
    ND_TRY_OUT(nd_session_agree(&session, call));
    status = o.interactive ? run_lines(&session, &o) : read_and_run(&session, &o);
out:
    nd_session_close(&session);
    return status;
}

static nd_status check_use(nd_session *s, const void *context)
{
    ND_TRY(nd_generate_check_job(s->config, &s->model.shape, &s->config->resolved_mesh));
    return check_input(s, context);
}

static nd_status check(const nd_command_call *call)
{
    nd_generate_call o;
    ND_TRY(parse(call->line, &o));
    return nd_session_check(call, o.model, o.tokenizer, check_use, &o);
}

const nd_command nd_command_generate = {.id = ND_COMMAND_GENERATE,
                                        .trains = true,
                                        .begin = nd_session_begin,
                                        .run = run,
                                        .check = check,
                                        .decodes = true,
                                        .check_flags = check_flags};
