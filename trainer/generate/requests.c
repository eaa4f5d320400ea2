// SPDX-License-Identifier: Apache-2.0
#include "trainer/generate/requests.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "runtime/base/math.h"
#include "trainer/text/unicode.h"

static nd_status check_utf8(const char *text, size_t size)
{
    size_t valid = nd_utf8_valid((const uint8_t *)text, size);
    return valid == size
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "the prompt is not UTF-8: byte %zu is 0x%02x; convert it to UTF-8",
                         valid + 1, (unsigned)(unsigned char)text[valid]);
}

/* Tokens of a prompt. */

static nd_status no_tokenizer(void)
{
    return nd_fail(ND_ERR_DATA,
                   "the model's folder has no tokenizer.json, so a text has no tokens; "
                   "name one with --tokenizer, or give rows with \"ids\"");
}

static nd_status encode_messages(const nd_request_rules *rules, const json_t *messages, nd_ids *ids)
{
    if (!rules->messages) {
        return no_tokenizer();
    }
    if (!rules->chat) {
        return nd_fail(ND_ERR_DATA,
                       "\"messages\" need a form; give --chat-format llama3 or chatml");
    }
    char *text = nd_json_text(messages, 0);
    if (!text) {
        return nd_fail_memory("messages");
    }
    nd_status status = nd_chat_prompt(rules->chat, rules->messages, text, strlen(text), ids);
    free(text);
    return status;
}

static nd_status encode_user(const nd_request_rules *rules, const char *text, size_t size,
                             nd_ids *ids)
{
    ND_TRY(check_utf8(text, size));
    json_t *list = json_array(), *message = json_object();
    nd_json_set(&message, "role", json_string("user"));
    nd_json_set(&message, "content", json_stringn(text, size));
    nd_json_append(&list, message);
    nd_status status = list ? encode_messages(rules, list, ids) : nd_fail_memory("a prompt");
    json_decref(list);
    return status;
}

static nd_status encode_prompt(const nd_request_rules *rules, const char *text, size_t size,
                               nd_ids *ids)
{
    const int32_t *encoded;
    size_t count;
    if (rules->plain_as_user || !rules->prompts) {
        return rules->plain_as_user ? encode_user(rules, text, size, ids) : no_tokenizer();
    }
    ND_TRY(check_utf8(text, size));
    ND_TRY(nd_encode(rules->prompts, text, size, &encoded, &count));
    return nd_ids_add(ids, encoded, count);
}

static nd_status copy_ids(const json_t *list, nd_ids *ids)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *value = json_array_get(list, i);
        json_int_t id = json_integer_value(value);
        if (!json_is_integer(value) || id < 0 || id > INT32_MAX) {
            return nd_fail(ND_ERR_DATA, "entry %zu of \"ids\" is not a token id", i + 1);
        }
        ND_TRY(nd_ids_add(ids, &(int32_t){(int32_t)id}, 1));
    }
    return ND_OK;
}

static nd_status check_ids(const nd_request_rules *rules, nd_ids *ids)
{
    if (ids->count == 0 && rules->begin >= 0) { /* an empty prompt: any text */
        ND_TRY(nd_ids_add(ids, &(int32_t){(int32_t)rules->begin}, 1));
    }
    if (ids->count == 0) {
        return nd_fail(ND_ERR_DATA, "the prompt is empty, and this model has no token of the "
                                    "beginning of a text; give at least one character");
    }
    for (size_t i = 0; i < ids->count; i++) {
        if (ids->data[i] >= rules->vocab) {
            return nd_fail(ND_ERR_DATA,
                           "token %zu of the prompt is %d, but the model's vocab_size is %lld; the "
                           "tokenizer is not the model's",
                           i + 1, ids->data[i], (long long)rules->vocab);
        }
    }
    return ND_OK;
}

static nd_status check_length(const nd_request_rules *rules, nd_request *request)
{
    const int64_t prompt = (int64_t)request->ids.count;
    if (rules->max_new_fits && !request->says_max_new && prompt < rules->max_tokens) {
        request->max_new = nd_min(request->max_new, rules->max_tokens - prompt);
    }
    if (prompt < rules->max_tokens && request->max_new <= rules->max_tokens - prompt) {
        return ND_OK;
    }
    if (prompt >= rules->max_tokens) { /* whatever the number of new ones */
        return nd_fail(ND_ERR_DATA,
                       "the prompt has %lld tokens, but %s is %lld, which leaves no room for a new "
                       "one; shorten the prompt",
                       (long long)prompt, rules->limit, (long long)rules->max_tokens);
    }
    return nd_fail(ND_ERR_DATA,
                   "prompt and new tokens need %lld + %lld positions, but %s is %lld; "
                   "shorten the prompt, or lower --max-new-tokens",
                   (long long)prompt, (long long)request->max_new, rules->limit,
                   (long long)rules->max_tokens);
}

/* Requests. */

/* Adds a request, or returns the `status` with which reading it failed. Takes over its ids and name
 * either way. */
static nd_status add_request(nd_requests *r, const nd_request_rules *rules, nd_request *request,
                             nd_status status)
{
    const nd_ids *ids = &request->ids;
    ND_TRY_OUT(status);
    ND_TRY_OUT(check_ids(rules, &request->ids));
    ND_TRY_OUT(check_length(rules, request));
    ND_TRY_OUT(ND_ARRAY_RESERVE(&r->list, &r->room, r->count + 1));
    int64_t tokens = (int64_t)ids->count + request->max_new;
    r->longest = tokens > r->longest ? tokens : r->longest;
    r->twice_begun |= rules->begin >= 0 && ids->count > 1 && ids->data[0] == rules->begin &&
                      ids->data[1] == rules->begin;
    r->list[r->count++] = *request;
    return ND_OK;
out:
    free(request->ids.data);
    free(request->name);
    return status;
}

nd_status nd_requests_add_text(nd_requests *requests, const nd_request_rules *rules,
                               const char *name, const char *text, size_t size)
{
    nd_request request = {.max_new = rules->max_new};
    nd_status status = encode_prompt(rules, text, size, &request.ids);
    status = add_request(requests, rules, &request, status);
    return status == ND_OK ? ND_OK : nd_fail_context(status, "reading %s", name);
}

static nd_status read_row(const json_t *row, const nd_request_rules *rules, nd_request *out)
{
    static const char *const keys[] = {"prompt", "messages", "ids", "id", "max_new_tokens", NULL};
    const json_t *prompt = json_object_get(row, "prompt"), *ids = json_object_get(row, "ids");
    const json_t *messages = json_object_get(row, "messages"), *name = json_object_get(row, "id");
    const json_t *most = json_object_get(row, "max_new_tokens");
    if (!json_is_object(row) || !prompt + !messages + !ids != 2) {
        return nd_fail(ND_ERR_DATA, "a row is an object with one of \"prompt\", \"messages\" and "
                                    "\"ids\"");
    }
    ND_TRY(nd_json_check_keys(row, keys,
                              "a row may have \"prompt\", \"messages\" or \"ids\", and \"id\" and "
                              "\"max_new_tokens\"; how tokens are drawn is for flags, as "
                              "--temperature"));
    if (most && (!json_is_integer(most) || json_integer_value(most) < 1)) {
        return nd_fail(ND_ERR_DATA, "\"max_new_tokens\" must be a whole number of at least 1");
    }
    out->max_new = most ? (int64_t)json_integer_value(most) : rules->max_new;
    out->says_max_new = most != NULL;
    if (name) {
        out->name = nd_json_text(name, JSON_ENCODE_ANY | JSON_COMPACT);
        ND_TRY(out->name ? ND_OK : nd_fail_memory("the \"id\" of a row"));
    }
    if (ids) {
        return json_is_array(ids) ? copy_ids(ids, &out->ids)
                                  : nd_fail(ND_ERR_DATA, "\"ids\" is not a list");
    }
    if (messages) {
        return json_is_array(messages) ? encode_messages(rules, messages, &out->ids)
                                       : nd_fail(ND_ERR_DATA, "\"messages\" is not a list");
    }
    const char *text = json_string_value(prompt);
    return text ? encode_prompt(rules, text, json_string_length(prompt), &out->ids)
                : nd_fail(ND_ERR_DATA, "\"prompt\" is not a string");
}

static nd_status add_row(nd_requests *requests, const nd_request_rules *rules, const char *line,
                         size_t size)
{
    nd_request request = {0};
    json_t *row;
    nd_status status =
        nd_json_parse(line, size, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, NULL, &row);
    status = status == ND_OK ? read_row(row, rules, &request) : status;
    json_decref(row);
    return add_request(requests, rules, &request, status);
}

nd_status nd_requests_add_rows(nd_requests *requests, const nd_request_rules *rules,
                               const char *name, const char *text, size_t size)
{
    nd_json_lines lines = {.next = text, .left = size};
    while (nd_json_lines_next(&lines)) {
        nd_status status = add_row(requests, rules, lines.line, lines.size);
        if (status != ND_OK) {
            return nd_fail_context(status, "reading %s, line %lld", name, (long long)lines.number);
        }
    }
    return ND_OK;
}

void nd_requests_fini(nd_requests *requests)
{
    for (size_t i = 0; i < requests->count; i++) {
        free(requests->list[i].ids.data);
        free(requests->list[i].name);
    }
    free(requests->list);
    *requests = (nd_requests){0};
}

/* End tokens. */

static nd_status add_ends(const char *name, const json_t *value, nd_ids *ends)
{
    size_t count = json_is_array(value) ? json_array_size(value) : 1;
    if (!value || json_is_null(value)) {
        return ND_OK;
    }
    for (size_t i = 0; i < count; i++) {
        const json_t *one = json_is_array(value) ? json_array_get(value, i) : value;
        json_int_t id = json_integer_value(one);
        if (!json_is_integer(one) || id < 0 || id > INT32_MAX) {
            return nd_fail(ND_ERR_DATA, "%s: eos_token_id must be a token id or a list of them",
                           name);
        }
        ND_TRY(nd_ids_add(ends, &(int32_t){(int32_t)id}, 1));
    }
    return ND_OK;
}

nd_status nd_ends_read(const char *folder, nd_ids *ends)
{
    static const char *const names[] = {"generation_config.json", "config.json"};
    const size_t before = ends->count;
    for (size_t i = 0; folder && i < 2 && ends->count == before; i++) {
        json_t *root = NULL;
        ND_TRY(nd_json_read(folder, names[i], 0, &root));
        nd_status status = add_ends(names[i], json_object_get(root, "eos_token_id"), ends);
        json_decref(root);
        ND_TRY(status == ND_OK ? status : nd_fail_context(status, "reading \"%s\"", folder));
    }
    return ND_OK;
}
