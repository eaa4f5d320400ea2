// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "tests/unit/trainer/text/text_cases.h"
#include "trainer/generate/requests.h"

/* Rules with the encoders of a tokenizer of the Llama 3 family. */
typedef struct rules_of {
    nd_tokenizer *tokenizer;
    nd_encoder *prompts, *messages;
    nd_request_rules rules;
} rules_of;

static void open_rules(rules_of *r)
{
    const nd_encode_options prompts = {.special_in_text = ND_SPECIAL_PARSE, .post_process = true};
    const nd_encode_options messages = {.special_in_text = ND_SPECIAL_TEXT};
    r->tokenizer = text_open("llama3");
    cr_assert_eq(nd_encoder_create(r->tokenizer, &prompts, &r->prompts), ND_OK);
    cr_assert_eq(nd_encoder_create(r->tokenizer, &messages, &r->messages), ND_OK);
    r->rules = (nd_request_rules){.prompts = r->prompts,
                                  .messages = r->messages,
                                  .vocab = nd_tokenizer_vocab_size(r->tokenizer),
                                  .begin = -1,
                                  .max_new = 16,
                                  .max_tokens = 64,
                                  .limit = "the model's limit"};
}

static void close_rules(rules_of *r)
{
    nd_encoder_destroy(r->prompts);
    nd_encoder_destroy(r->messages);
    nd_tokenizer_close(r->tokenizer);
}

static nd_status add_rows(const rules_of *r, const char *text, nd_requests *out)
{
    return nd_requests_add_rows(out, &r->rules, "rows.jsonl", text, strlen(text));
}

Test(requests, a_text_and_a_row_of_the_same_text_have_the_same_ids)
{
    rules_of r;
    nd_requests requests = {0};
    const int32_t *ids;
    size_t count;
    open_rules(&r);
    cr_assert_eq(nd_requests_add_text(&requests, &r.rules, "--prompt", "one two", 7), ND_OK, "%s",
                 nd_error_last()->message);
    cr_assert_eq(add_rows(&r,
                          "{\"prompt\": \"one two\", \"id\": {\"a\": 1}, \"max_new_tokens\": 3}"
                          "\n\n  \r\n{\"ids\": [5, 1, 0]}",
                          &requests),
                 ND_OK, "%s", nd_error_last()->message);
    cr_assert_eq(requests.count, 3);
    cr_assert_eq(nd_encode(r.prompts, "one two", 7, &ids, &count), ND_OK);
    for (int i = 0; i < 2; i++) {
        const nd_request *q = &requests.list[i];
        cr_expect(q->ids.count == count && memcmp(q->ids.data, ids, count * sizeof *ids) == 0);
    }
    cr_expect_null(requests.list[0].name);
    cr_expect_str_eq(requests.list[1].name, "{\"a\":1}");
    cr_expect_eq(requests.list[0].max_new, 16);
    cr_expect_eq(requests.list[1].max_new, 3);
    cr_expect_eq(requests.list[2].ids.count, 3);
    cr_expect_eq(requests.list[2].ids.data[0], 5);
    cr_expect_eq(requests.longest, (int64_t)(count > 3 ? count : 3) + 16);
    nd_requests_fini(&requests);
    close_rules(&r);
}

Test(requests, bad_rows_are_named_with_their_line)
{
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"{\"ids\": [1]}\n{\"prompt\": \"a\"", "line 2"},
        {"[]\n", "one of \"prompt\""},
        {"{}\n", "one of \"prompt\""},
        {"{\"prompt\": \"a\", \"ids\": [1]}\n", "one of \"prompt\""},
        {"{\"prompt\": 1}\n", "\"prompt\" is not a string"},
        {"{\"ids\": 1}\n", "\"ids\" is not a list"},
        {"{\"ids\": [1, \"a\"]}\n", "entry 2 of \"ids\""},
        {"{\"ids\": [-1]}\n", "entry 1 of \"ids\""},
        {"{\"ids\": [1000000]}\n", "the tokenizer is not the model's"},
        {"{\"ids\": []}\n", "the prompt is empty"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n", "--chat-format"},
        {"{\"messages\": 1}\n", "\"messages\" is not a list"},
        {"{\"prompt\": \"a\", \"max_new_tokens\": 0}\n", "\"max_new_tokens\""},
        {"{\"ids\": [1], \"max_new_tokens\": 64}\n", "need 1 + 64 positions"},
        {"{\"ids\": [1], \"max_new_tokens\": 63}\n{}\n", "line 2"}, /* the first one fits */
        {"{\"ids\": [1], \"max_new_tokens\": 9223372036854775807}\n", "is 64; shorten"},
        {"{\"prompt\": \"a\", \"prompt\": \"b\"}\n", "duplicate"},
        {"{\"prompt\": \"\xff\"}\n", "line 1"},
        {"{\"ids\": [1]}\n{\"ids\": [1], \"max_tokens\": 5}\n", "line 2"},
        {"{\"ids\": [1], \"max_new_token\": 5}\n", "did you mean \"max_new_tokens\"?"},
        {"{\"ids\": [1], \"temperature\": 1}\n", "unknown key \"temperature\"; a row may have "},
    };
    rules_of r;
    open_rules(&r);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_requests requests = {0};
        cr_expect_eq(add_rows(&r, cases[i].text, &requests), ND_ERR_DATA, "case %zu", i);
        cr_expect_not_null(strstr(nd_error_last()->message, cases[i].words), "case %zu: %s", i,
                           nd_error_last()->message);
        cr_expect_not_null(strstr(nd_error_last()->message, "rows.jsonl"), "case %zu", i);
        nd_requests_fini(&requests);
    }
    close_rules(&r);
}

Test(requests, texts_that_are_no_utf8_and_models_without_tokenizer_are_refused)
{
    rules_of r;
    nd_requests requests = {0};
    open_rules(&r);
    cr_expect_eq(nd_requests_add_text(&requests, &r.rules, "--prompt", "ab\xc3", 3), ND_ERR_DATA);
    cr_expect_not_null(strstr(nd_error_last()->message, "byte 3 is 0xc3"), "%s",
                       nd_error_last()->message);
    r.rules.prompts = r.rules.messages = NULL;
    cr_expect_eq(nd_requests_add_text(&requests, &r.rules, "--prompt", "a", 1), ND_ERR_DATA);
    cr_expect_not_null(strstr(nd_error_last()->message, "--tokenizer"), "%s",
                       nd_error_last()->message);
    cr_expect_eq(add_rows(&r, "{\"ids\": [1]}", &requests), ND_OK);
    nd_requests_fini(&requests);
    close_rules(&r);
}

static void write_json(tempdir *dir, const char *name, const char *text)
{
    tempdir_write(dir, name, text, strlen(text));
}

Test(requests, end_tokens_are_a_number_or_a_list)
{
    tempdir dir;
    nd_ids ends = {0};
    tempdir_make(&dir);
    const char *folder = dir.path;
    cr_assert_eq(nd_ends_read(NULL, &ends), ND_OK);
    cr_assert_eq(nd_ends_read(folder, &ends), ND_OK);
    cr_expect_eq(ends.count, 0);
    write_json(&dir, "config.json", "{\"eos_token_id\": 7}");
    cr_assert_eq(nd_ends_read(folder, &ends), ND_OK);
    cr_expect(ends.count == 1 && ends.data[0] == 7);
    ends.count = 0;
    write_json(&dir, "generation_config.json", "{\"eos_token_id\": [8, 9]}");
    cr_assert_eq(nd_ends_read(folder, &ends), ND_OK);
    cr_expect(ends.count == 2 && ends.data[0] == 8 && ends.data[1] == 9);
    ends.count = 0;
    write_json(&dir, "generation_config.json", "{\"eos_token_id\": null}");
    cr_assert_eq(nd_ends_read(folder, &ends), ND_OK);
    cr_expect(ends.count == 1 && ends.data[0] == 7);
    write_json(&dir, "generation_config.json", "{\"eos_token_id\": \"a\"}");
    cr_expect_eq(nd_ends_read(folder, &ends), ND_ERR_DATA);
    write_json(&dir, "generation_config.json", "{");
    cr_expect_eq(nd_ends_read(folder, &ends), ND_ERR_DATA);
    free(ends.data);
    tempdir_remove(&dir);
}
