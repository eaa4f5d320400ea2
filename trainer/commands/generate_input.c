// SPDX-License-Identifier: Apache-2.0
/* The prompts of `ndtrain generate`. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "trainer/commands/generate.h"
#include "trainer/corpus/row.h"

/* Up to its end: a pipe has no size. */
static nd_status read_standard_input(nd_session *s, char **text, size_t *size)
{
    nd_stdin input = {0};
    if (s->worker->rank.rank == 0 && isatty(STDIN_FILENO)) {
        nd_log_info("reading the prompt from the terminal, up to the end of input (Ctrl-D)");
    }
    nd_status status = nd_stdin_wait(&input, s, false);
    if (status != ND_OK) {
        nd_stdin_fini(&input);
        return status;
    }
    *text = (char *)input.bytes.data; /* NULL without any */
    *size = input.bytes.count;
    return nd_session_share(s, ND_OK, text, size);
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

nd_status nd_generate_read(nd_session *s, const nd_generate_call *o, char **text, size_t *size)
{
    const bool reads = s->worker->rank.rank == 0;
    if (reads_standard_input(o)) {
        return read_standard_input(s, text, size);
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

nd_status nd_generate_encode(nd_session *s, const nd_generate_call *o, const char *text,
                             size_t size, nd_generate_input *in)
{
    const nd_encode_options prompts = {.special_in_text = ND_SPECIAL_PARSE, .post_process = true};
    const nd_encode_options messages = {.special_in_text = ND_SPECIAL_TEXT};
    nd_request_rules rules = {
        .vocab = s->model.shape.vocab,
        .begin = -1,
        .max_new = o->max_new,
        .max_new_fits = o->max_new_fits,
        .max_tokens = o->interactive ? nd_generate_context(s, o) : s->model.shape.max_positions,
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

nd_status nd_generate_check_input(nd_session *s, const nd_generate_call *o)
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
    status = status == ND_OK ? nd_generate_encode(s, o, text, size, &in) : status;
    free(text);
    nd_generate_input_fini(&in);
    return status;
}

void nd_generate_input_fini(nd_generate_input *in)
{
    nd_requests_fini(&in->requests);
    free(in->ends.data);
    *in = (nd_generate_input){0};
}

int64_t nd_generate_context(const nd_session *s, const nd_generate_call *o)
{
    return nd_min(o->context, s->model.shape.max_positions);
}
