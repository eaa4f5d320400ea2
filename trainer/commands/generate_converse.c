// SPDX-License-Identifier: Apache-2.0
/*
 * `ndtrain generate --interactive`: each line of standard input is a prompt; with --chat it is the
 * next message of a user, and all messages so far are what the model reads. A line that cannot be
 * answered is reported, and the next one is read.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "trainer/commands/generate.h"
#include "trainer/text/unicode.h"

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
static nd_status encode(conversation *c, const char *line, size_t size, nd_generate_input *in)
{
    nd_generate_call rows = *c->options;
    char *row = NULL;
    if (!c->chat) {
        return nd_generate_encode(c->session, c->options, line, size, in);
    }
    rows.jsonl = true;
    if (nd_utf8_valid((const uint8_t *)line, size) != size) {
        return nd_fail(ND_ERR_DATA, "the message is not UTF-8");
    }
    ND_TRY(add_message(c, "user", line, size));
    nd_status status = row_of(c, &row);
    status = status == ND_OK ? nd_generate_encode(c->session, &rows, row, strlen(row), in) : status;
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
    nd_status status = size > 0 ? encode(c, line, size, &in) : ND_OK;
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
    nd_generate_input_fini(&in);
    return status;
}

nd_status nd_generate_converse(nd_session *s, const nd_generate_call *o)
{
    const int64_t context = nd_generate_context(s, o);
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
