// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "tests/unit/trainer/mesh_ranks.h"
#include "tests/unit/trainer/text/text_cases.h"
#include "trainer/generate/choices.h"

/* Rules with the encoder of a tokenizer of the Llama 3 family; what was read by them. */
static nd_tokenizer *tokenizer;
static nd_encoder *encoder;
static nd_choice_rules rules;
static nd_questions q;

static void setup(void)
{
    const nd_encode_options options = {.special_in_text = ND_SPECIAL_PARSE};
    tokenizer = text_open("llama3");
    assert_ok(nd_encoder_create(tokenizer, &options, &encoder));
    rules = (nd_choice_rules){.encoder = encoder,
                              .vocab = nd_tokenizer_vocab_size(tokenizer),
                              .max_tokens = 1000,
                              .prefix = 7};
}

static void teardown(void)
{
    nd_questions_fini(&q);
    nd_encoder_destroy(encoder);
    nd_tokenizer_close(tokenizer);
}

TestSuite(choices, .init = setup, .fini = teardown);

static nd_status read_rows(const char *text)
{
    return nd_questions_read(&q, &rules, "rows.jsonl", text, strlen(text));
}

static void assert_ids(const nd_choice *c, const char *text)
{
    text_expect_ids(encoder, text, c->ids.data, c->ids.count);
}

static int64_t size_of(const char *text)
{
    const int32_t *ids;
    size_t count;
    assert_ok(nd_encode(encoder, text, strlen(text), &ids, &count));
    return (int64_t)count;
}

Test(choices, blanks_at_the_end_of_a_context_belong_to_the_continuation)
{
    assert_ok(
        read_rows("{\"context\": \"one two  \", \"choices\": [\"three\", \"f\xc3\xbcnf\"], "
                  "\"gold\": 1, \"id\": \"x\"}\n"
                  "{\"context\": \"one two\", \"delimiter\": \" \", \"choices\": "
                  "[\"three\"], \"gold\": 0}\n"
                  "{\"context\": \"\", \"choices\": [\"three\"], \"gold\": 0}\n"
                  "{\"context\": \"one two\\t\\n\\r\", \"choices\": [\"three\"], \"gold\": 0}\n"));
    cr_assert_eq(q.count, 4);
    const nd_choice *c = q.list[0].choices;
    assert_ids(&c[0], "one two  three");
    assert_ids(&c[1], "one two  f\xc3\xbcnf");
    cr_expect_eq(c[0].from, size_of("one two"));
    cr_expect_eq(c[1].from, size_of("one two"));
    cr_expect_eq(c[0].characters, 5);
    cr_expect_eq(c[1].characters, 4, "characters, not bytes");
    cr_expect_str_eq(q.list[0].name, "\"x\"");
    cr_expect_eq(q.list[0].gold, 1);
    assert_ids(&q.list[1].choices[0], "one two three");
    cr_expect_eq(q.list[1].choices[0].characters, 5, "the delimiter does not count");
    c = q.list[2].choices;
    cr_expect_eq(c->ids.data[0], 7);
    cr_expect_eq(c->from, 1);
    cr_expect_eq((int64_t)c->ids.count, 1 + size_of("three"));
    cr_expect_eq(q.list[3].choices[0].from, size_of("one two"), "other white space is blank too");
}

Test(choices, what_is_too_long_loses_its_beginning)
{
    const int64_t all = size_of("a b c d e f g h"), own = all - size_of("a b c d e f g");
    rules.max_tokens = 4;
    assert_ok(read_rows("{\"context\": \"a b c d e f g\", \"choices\": [\" h\", \" h i j k\"], "
                        "\"gold\": 0}"));
    const nd_choice *c = q.list[0].choices;
    const int32_t *ids;
    size_t count;
    assert_ok(nd_encode(encoder, "a b c d e f g h", 15, &ids, &count));
    cr_expect_eq(c[0].ids.count, 4);
    cr_expect_arr_eq(c[0].ids.data, ids + count - 4, 4 * sizeof *ids);
    cr_expect_eq(c[0].from, 4 - own);
    cr_expect_eq(c[1].ids.count, 4);
    cr_expect_eq(c[1].from, 1, "all that is left is the choice's");
    assert_ok(read_rows("{\"context\": \"a\", \"choices\": [\" b\"], \"gold\": 0}"));
    cr_expect_eq(q.longest, 4);
}

Test(choices, bad_rows_are_named_with_their_line)
{
    static const struct {
        const char *text, *words;
    } cases[] = {
        {"{\"context\": \"a\", \"choices\": [\" b\"], \"gold\": 0}\n{",
         "reading rows.jsonl, line 2"},
        {"[]", "\"context\""},
        {"{\"choices\": [\"b\"], \"gold\": 0}", "\"context\""},
        {"{\"context\": \"a\", \"choices\": [], \"gold\": 0}", "\"choices\""},
        {"{\"context\": \"a\", \"choices\": [1], \"gold\": 0}", "\"choices\""},
        {"{\"context\": \"a\", \"choices\": [\"b\"]}", "\"gold\" must be"},
        {"{\"context\": \"a\", \"choices\": [\"b\"], \"gold\": 1}", "from 0 to 0"},
        {"{\"context\": \"a\", \"choices\": [\"b\"], \"gold\": -1}", "from 0 to 0"},
        {"\n \t\n{\"context\": \"a\"}", "line 3"},
        {"{\"context\": \"a\", \"choices\": [\"b\"], \"gold\": 0, \"ids\": [1]}", "key \"ids\""},
        {"{\"context\": \"a\", \"choices\": [\"b\"], \"gold\": \"0\"}", "\"gold\" must be"},
        {"{\"context\": \"a\", \"choices\": [\"\"], \"gold\": 0}", "adds no token"},
        {"{\"context\": \"a\", \"choices\": [\"b\"], \"gold\": 0, \"delimiter\": 1}", "delimiter"},
        {"{\"context\": \"\", \"choices\": [\"b\"], \"gold\": 0}", "is empty"},
    };
    rules.prefix = -1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_fails(read_rows(cases[i].text), ND_ERR_DATA, cases[i].words);
    }
    rules.any_gold = true;
    assert_ok(read_rows("{\"context\": \"a\", \"choices\": [\" b\"]}"));
    cr_expect_eq(q.list[q.count - 1].gold, -1);
    assert_fails(read_rows("{\"context\": \"a\", \"choices\": [\" b\"], \"gold\": 1}"), ND_ERR_DATA,
                 "from 0 to 0");
}

Test(choices, tokens_that_the_model_lacks_are_refused)
{
    static const char row[] = "{\"context\": \"a\", \"choices\": [\" b\"], \"gold\": 0}";
    const int32_t *ids;
    size_t count;
    rules.vocab = 0;
    assert_ok(nd_encode(encoder, "a b", 3, &ids, &count));
    for (size_t i = 0; i < count; i++) {
        rules.vocab = ids[i] >= rules.vocab ? ids[i] + 1 : rules.vocab;
    }
    assert_ok(read_rows(row));
    cr_expect_eq(q.longest, (int64_t)count);
    rules.vocab--;
    assert_fails(read_rows(row), ND_ERR_DATA, "the model's vocab_size is");
}

/* An evaluation of thousands of rows does not end for one of them. */
Test(choices, rows_that_cannot_be_scored_are_left_out_and_counted)
{
    static const char good[] = "{\"context\": \"a\", \"choices\": [\" b\", \" c\"], \"gold\": 0}\n";
    char text[512];
    rules.prefix = -1;
    rules.leaves_out = true;
    snprintf(text, sizeof text, "%s%s%s%s", good,
             "{\"context\": \"a\", \"choices\": [\" b\", \"\"], \"gold\": 0, \"id\": 7}\n",
             "{\"context\": \"\", \"choices\": [\"b\"], \"gold\": 0}\n", good);
    assert_ok(read_rows(text));
    cr_assert_eq(nd_error_last()->status, ND_OK, "a row that is left out is no failure");
    cr_assert_eq(q.count, 4);
    cr_assert_eq(q.left_out, 2);
    cr_assert_not_null(strstr(q.list[1].left_out, "line 2"), "%s", q.list[1].left_out);
    cr_assert_not_null(strstr(q.list[1].left_out, "adds no token"), "%s", q.list[1].left_out);
    cr_assert(q.list[1].count == 0 && strcmp(q.list[1].name, "7") == 0);
    cr_assert_not_null(strstr(q.list[2].left_out, "is empty"), "%s", q.list[2].left_out);
    cr_assert(q.list[0].count == 2 && !q.list[0].left_out && q.list[3].count == 2);
    /* A row of another form is a fault of the file. */
    cr_assert_eq(read_rows("{\"context\": \"a\", \"choices\": [1], \"gold\": 0}"), ND_ERR_DATA);
}

/* Scores: sums of log probabilities, each given all before it. */

enum { V = 97, CONTEXT = 6, CHOICES = 3, TOKENS = 4 };

static nd_status score_body(nd_rank *rank, void *context)
{
    static const nd_generate_options sizes = {.batch = 4, .rows = 8, .capacity = 24};
    int32_t ids[CHOICES][CONTEXT + TOKENS];
    nd_choice choices[CHOICES] = {0};
    nd_question question = {.choices = choices, .count = CHOICES};
    nd_token_score scores[CONTEXT + TOKENS], all[CONTEXT + TOKENS];
    nd_generator *g = NULL;
    ND_TRY(mesh_generator_open(rank, &sizes, 5, &g));
    for (int c = 0; c < CHOICES; c++) {
        for (int i = 0; i < CONTEXT + TOKENS; i++) {
            ids[c][i] = (i < CONTEXT ? i * 7 + 2 : i * 5 + c * 13) % V;
        }
        choices[c] = (nd_choice){.ids = {.data = ids[c], .count = (size_t)(CONTEXT + c + 1)},
                                 .from = CONTEXT,
                                 .characters = 1 + c};
    }
    /* The last choice is the likeliest one, and the one before it ends as the likeliest does. */
    for (int c = 1; c < CHOICES; c++) {
        for (int i = c == 1 ? CONTEXT + 1 : CONTEXT; i < CONTEXT + c + 1; i++) {
            ND_TRY(nd_generator_score(g, ids[c], i + 1, i, all));
            ids[c][i] = all[0].greedy;
        }
    }
    ND_TRY(nd_question_score(g, &question, scores));
    for (int c = 0; c < CHOICES; c++) {
        double sum = 0;
        ND_TRY(nd_generator_score(g, ids[c], CONTEXT + c + 1, 1, all));
        for (int i = CONTEXT; i < CONTEXT + c + 1; i++) {
            sum += all[i - 1].log_probability;
        }
        ND_CHECK(sum == choices[c].score && sum < 0, "choice %d scores %.17g, not %.17g", c,
                 choices[c].score, sum);
        ND_CHECK(choices[c].greedy == (c == CHOICES - 1), "choice %d is greedy: %d", c,
                 choices[c].greedy);
    }
    return ND_OK;
}

Test(choices, scores_are_sums_of_log_probabilities)
{
    mesh_ranks job = mesh_ranks_of((nd_mesh){{1, 1, 1, 1, 1}}, 2, false, score_body, NULL);
    job.shape.rms_eps = 1e-5;
    cr_assert_eq(mesh_ranks_run(&job), ND_OK, "%s", nd_error_last()->message);
}

Test(choices, the_best_is_the_first_of_equal_ones)
{
    nd_choice choices[] = {{.score = -6, .characters = 2},
                           {.score = -4, .characters = 1},
                           {.score = -4, .characters = 1},
                           {.score = -8, .characters = 4}};
    const nd_question question = {.choices = choices, .count = 4};
    cr_expect_eq(nd_question_best(&question, false), 1);
    cr_expect_eq(nd_question_best(&question, true), 3, "-2 a character");
    /* Blanks of the context alone are tokens of a choice without a character. */
    choices[3] = (nd_choice){.score = -2};
    cr_expect_eq(nd_question_best(&question, true), 3);
}
