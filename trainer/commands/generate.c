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
#include "runtime/base/text.h"
#include "trainer/commands/session.h"
#include "trainer/corpus/row.h"
#include "trainer/text/unicode.h"

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

static nd_status read_flags(const nd_command_flags *line, nd_generation *g)
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
    return read_flags(line, &(nd_generation){0});
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

static void forget_requests(nd_generation *g)
{
    nd_requests_fini(&g->requests);
    free(g->ends.data);
    g->ends = (nd_ids){0};
}

/* Makes the requests in the prompt or (rows) in JSON lines, on every rank alike. After a failure
 * too, its parts are the caller's. */
static nd_status encode(nd_generation *g, bool rows, const char *text, size_t size)
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

/* All of the input, whose requests are run at once. */
static nd_status read_requests(nd_generation *g)
{
    nd_session *s = g->session;
    const bool reads = s->checks || s->worker->rank.rank == 0;
    const char *prompt = s->flags[ND_GENERATE_PROMPT].text, *file = prompt_file(s);
    char *text = NULL;
    size_t size = 0;
    nd_status status = ND_OK;
    if (prompt || file) {
        if (reads && prompt) {
            size = strlen(prompt);
            status = nd_fs_format(&text, "%s", prompt);
        } else if (reads) {
            status = nd_fs_read(file, ND_STDIN_BYTES_MAX, ND_ERR_DATA, &text, &size);
        }
        status = nd_session_share(s, status, &text, &size);
    } else {
        if (reads && isatty(STDIN_FILENO)) {
            nd_log_info("reading the prompt from the terminal, up to the end of input (Ctrl-D)");
        }
        status = nd_stdin_read(s, &text, &size);
    }
    status = status == ND_OK ? encode(g, g->jsonl && !prompt, text, size) : status;
    free(text);
    return status;
}

/* One call: all requests at once, with a cache for the longest. */

/* The counts of all replicas. The times are those of the one that took longest: replicas work at
 * once. Collective over all ranks, which have all done their part. */
static nd_status sum_counts(nd_session *session, nd_generate_counts *c)
{
    const nd_group_kind replicas = ND_GROUP_DP_REPLICATE;
    int64_t sums[] = {c->calls, c->prompt_tokens, c->new_tokens, c->decode_tokens};
    int64_t ns[] = {(int64_t)(c->prompt_seconds * 1e9), (int64_t)(c->decode_seconds * 1e9)};
    ND_TRY(nd_session_reduce(session, replicas, sums, 4, ND_REDOP_SUM));
    ND_TRY(nd_session_reduce(session, replicas, ns, 2, ND_REDOP_MAX));
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

static nd_status run_requests(nd_generation *g)
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
    ND_TRY(nd_generate_run(g, NULL));
    const double seconds = nd_clock_seconds() - begin;
    nd_generate_counts c = nd_generator_counts(g->generator);
    ND_TRY(sum_counts(s, &c));
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

static nd_status add_message(nd_generation *g, const char *role, const char *text, size_t size)
{
    json_t *message = json_object();
    nd_json_set(&message, "role", json_string(role));
    nd_json_set(&message, "content", json_stringn(text, size)); /* NULL: it is not UTF-8 */
    nd_json_append(&g->messages, message);
    return g->messages ? ND_OK : nd_fail_memory("a conversation");
}

/* The requests of a line: one, or none of an empty row. */
static nd_status encode_line(nd_generation *g, const char *line, size_t size)
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
static nd_status report(nd_generation *g, nd_status status)
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
    nd_generation *g = context;
    nd_bytes text = {0};
    nd_status status = size > 0 ? encode_line(g, line, size) : ND_OK;
    if (status != ND_OK) {
        status = report(g, status);
    } else if (g->requests.count > 0) {
        status = nd_generate_run(g, &text);
        g->first++;
    }
    if (status == ND_OK && g->messages && text.count > 0) {
        status = add_message(g, "assistant", (const char *)text.data, text.count);
    }
    free(text.data);
    forget_requests(g);
    return status;
}

static nd_status run_lines(nd_generation *g)
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
    return nd_stdin_each_line(s, "> ", answer, g);
}

static nd_status run(nd_session *s)
{
    nd_generation g = {.session = s};
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
                                        .use = run,
                                        .model = ND_GENERATE_MODEL,
                                        .tokenizer = ND_GENERATE_TOKENIZER};
