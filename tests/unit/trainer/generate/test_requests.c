// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "tests/unit/trainer/text/text_cases.h"
#include "trainer/generate/requests.h"

static tempdir dir;

/* Rules with the encoders of a tokenizer of the Llama 3 family; what was added by them. */
static nd_tokenizer *tokenizer;
static nd_encoder *prompts, *messages;
static nd_request_rules rules;
static nd_requests requests;

static void setup(void)
{
    const nd_encode_options parse = {.special_in_text = ND_SPECIAL_PARSE, .post_process = true};
    const nd_encode_options text = {.special_in_text = ND_SPECIAL_TEXT};
    tempdir_make(&dir);
    tokenizer = text_open("llama3");
    assert_ok(nd_encoder_create(tokenizer, &parse, &prompts));
    assert_ok(nd_encoder_create(tokenizer, &text, &messages));
    rules = (nd_request_rules){.prompts = prompts,
                               .messages = messages,
                               .vocab = nd_tokenizer_vocab_size(tokenizer),
                               .begin = -1,
                               .max_new = 16,
                               .max_tokens = 64,
                               .limit = "the model's limit"};
}

static void teardown(void)
{
    nd_requests_fini(&requests);
    nd_encoder_destroy(prompts);
    nd_encoder_destroy(messages);
    nd_tokenizer_close(tokenizer);
    tempdir_remove(&dir);
}

TestSuite(requests, .init = setup, .fini = teardown);

static nd_status add_rows(const char *text)
{
    return nd_requests_add_rows(&requests, &rules, "rows.jsonl", text, strlen(text));
}

static nd_status add_text(const char *text)
{
    return nd_requests_add_text(&requests, &rules, "--prompt", text, strlen(text));
}

Test(requests, a_text_and_a_row_of_the_same_text_have_the_same_ids)
{
    assert_ok(add_text("one two"));
    assert_ok(add_rows("{\"prompt\": \"one two\", \"id\": {\"a\": 1}, \"max_new_tokens\": 3}"
                       "\n\n  \r\n{\"ids\": [5, 1, 0]}\n{\"ids\": [5]}"));
    cr_assert_eq(requests.count, 4);
    const size_t count = requests.list[0].ids.count;
    for (int i = 0; i < 2; i++) {
        const nd_ids *ids = &requests.list[i].ids;
        text_expect_ids(prompts, "one two", ids->data, ids->count);
    }
    cr_expect_null(requests.list[0].name);
    cr_expect_str_eq(requests.list[1].name, "{\"a\":1}");
    cr_expect_eq(requests.list[0].max_new, 16);
    cr_expect_eq(requests.list[1].max_new, 3);
    cr_expect_eq(requests.list[2].ids.count, 3);
    cr_expect_eq(requests.list[2].ids.data[0], 5);
    cr_expect_eq(requests.longest, (int64_t)(count > 3 ? count : 3) + 16);
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
        {"{\"ids\": [4294967297]}\n", "entry 1 of \"ids\""}, /* 1 in 32 bits */
        {"{\"ids\": [299]}\n{\"ids\": [1, 300]}\n", "token 2 of the prompt is 300"},
        {"\n \t\r\n{}\n", "line 3"},
        {"{\"ids\": [1000000]}\n", "the tokenizer is not the model's"},
        {"{\"ids\": []}\n", "the prompt is empty"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n", "--chat-format"},
        {"{\"messages\": 1}\n", "\"messages\" is not a list"},
        {"{\"prompt\": \"a\", \"max_new_tokens\": 0}\n", "\"max_new_tokens\""},
        {"{\"ids\": [1], \"max_new_tokens\": 64}\n", "need 1 + 64 positions"},
        {"{\"ids\": [1], \"max_new_tokens\": 63}\n{}\n", "line 2"}, /* the first one fits */
        {"{\"ids\": [1], \"max_new_tokens\": 9223372036854775807}\n", "is 64; shorten"},
        {"{\"prompt\": \"a\", \"prompt\": \"b\"}\n", "column 24: duplicate"},
        {"{\"prompt\": \"\xff\"}\n", "line 1"},
        {"{\"ids\": [1]}\n{\"ids\": [1], \"max_tokens\": 5}\n", "line 2"},
        {"{\"ids\": [1], \"max_new_token\": 5}\n", "did you mean \"max_new_tokens\"?"},
        {"{\"ids\": [1], \"temperature\": 1}\n", "unknown key \"temperature\"; a row may have "},
    };
    rules.vocab = 300;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_fails(add_rows(cases[i].text), ND_ERR_DATA, cases[i].words);
        cr_expect_not_null(strstr(nd_error_last()->message, "rows.jsonl"), "case %zu", i);
    }
}

Test(requests, texts_that_are_no_utf8_and_models_without_tokenizer_are_refused)
{
    assert_fails(add_text("ab\xc3"), ND_ERR_DATA, "byte 3 is 0xc3");
    rules.plain_as_user = true;
    assert_fails(add_text("ab\xc3"), ND_ERR_DATA, "byte 3 is 0xc3");
    assert_fails(add_text("ab"), ND_ERR_DATA, "--chat-format");
    rules.plain_as_user = false;
    rules.prompts = rules.messages = NULL;
    assert_fails(add_text("a"), ND_ERR_DATA, "--tokenizer");
    assert_fails(add_rows("{\"messages\": []}"), ND_ERR_DATA, "--tokenizer");
    assert_ok(add_rows("{\"ids\": [1]}"));
}

/* A number of new tokens that nobody asked for is lowered where a prompt leaves less room. */
Test(requests, new_tokens_that_nobody_asked_for_fit_behind_the_prompt)
{
    static const int64_t cases[][2] = {{1, 16}, {48, 16}, {49, 15}, {63, 1}, {64, 0}};
    rules.max_new_fits = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[256] = "{\"ids\": [1";
        for (int64_t n = 1; n < cases[i][0]; n++) {
            strcat(text, ",1");
        }
        cr_expect_eq(add_rows(strcat(text, "]}")) == ND_OK, cases[i][1] > 0, "case %zu", i);
        cr_expect(cases[i][1] == 0 || requests.list[i].max_new == cases[i][1], "case %zu", i);
    }
}

/* Its token may be 0. It stands for an empty prompt, and two of them are told. */
Test(requests, the_beginning_of_a_text_is_counted)
{
    rules.begin = 0;
    assert_ok(add_rows("{\"ids\": []}\n{\"ids\": [0]}\n{\"ids\": [0, 1]}\n{\"ids\": [1, 0, 0]}"));
    cr_expect(requests.list[0].ids.count == 1 && requests.list[0].ids.data[0] == 0);
    cr_expect_not(requests.twice_begun);
    assert_ok(add_rows("{\"ids\": [0, 0]}\n{\"ids\": [1]}"));
    cr_expect(requests.twice_begun);
}

/* Adds the ends that a file with this text names. */
static nd_status read_ends(const char *name, const char *text, nd_ids *ends)
{
    tempdir_write(&dir, name, text, strlen(text));
    ends->count = 0;
    return nd_ends_read(dir.path, ends);
}

Test(requests, end_tokens_are_a_number_or_a_list)
{
    nd_ids ends = {0};
    assert_ok(nd_ends_read(NULL, &ends));
    assert_ok(nd_ends_read(dir.path, &ends));
    cr_expect_eq(ends.count, 0);
    assert_ok(read_ends("config.json", "{\"eos_token_id\": 7}", &ends));
    cr_expect(ends.count == 1 && ends.data[0] == 7);
    assert_ok(read_ends("generation_config.json", "{\"eos_token_id\": [8, 9]}", &ends));
    cr_expect(ends.count == 2 && ends.data[0] == 8 && ends.data[1] == 9);
    assert_ok(read_ends("generation_config.json", "{\"eos_token_id\": null}", &ends));
    cr_expect(ends.count == 1 && ends.data[0] == 7);
    static const char *const bad[] = {"\"a\"", "-1", "[7, -1]", "4294967303", "[7, null]"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[64];
        snprintf(text, sizeof text, "{\"eos_token_id\": %s}", bad[i]);
        cr_expect_eq(read_ends("generation_config.json", text, &ends), ND_ERR_DATA, "%s", bad[i]);
    }
    cr_expect_eq(read_ends("generation_config.json", "{", &ends), ND_ERR_DATA);
    free(ends.data);
}
