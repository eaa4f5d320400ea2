// SPDX-License-Identifier: Apache-2.0
/* JSON lines whose tokens are bytes: what is read from rows, byte by byte, and what is said of bad
 * ones. The same reader serves every tokenizer. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/corpus/corpus_cases.h"

static tempdir dir;
static nd_tokenizer *bytes;
static corpus_result result; /* of the last encoding */

static void setup(void)
{
    tempdir_make(&dir);
    assert_ok(nd_byte_tokenizer_create(&bytes));
}

static void teardown(void)
{
    corpus_free(&result);
    nd_tokenizer_close(bytes);
    tempdir_remove(&dir);
}

TestSuite(rows_of_bytes, .init = setup, .fini = teardown);

static nd_status encode(const char *text, size_t size, int64_t skip_bad)
{
    const nd_corpus_job job = {.tokenizer = bytes, .skip_bad = skip_bad, .threads = 2};
    return corpus_encode_path(tempdir_write(&dir, "a.jsonl", text, size), job, &result);
}

typedef struct good_rows {
    const char *rows;
    const char *text;
    size_t text_size; /* 0: up to the NUL */
    int64_t documents, empty, invalid, lone;
    int32_t prompt; /* the tokens at the beginning that do not count */
} good_rows;

Test(rows_of_bytes, give_their_texts_and_counts)
{
    static const good_rows cases[] = {
        {"{\"text\": \"ab\"}\n{\"text\": \"c\\u00e9\\ud83d\\ude00\\n\"}",
         "abc\xc3\xa9\xf0\x9f\x98\x80\n", 0, 2, 0, 0, 0},
        {"{\"text\": \"first\", \"text\": \"last\"}\n", "last", 0, 1, 0, 0, 0},
        {"{\"text\": 1, \"te\\u0078t\": \"last\"}\n", "last", 0, 1, 0, 0, 0},
        {"{\"n\": NaN, \"m\": [Infinity, -Infinity, 1e999, 12345678901234567890], \"text\": "
         "\"a\"}\n",
         "a", 0, 1, 0, 0, 0},
        {"{\"text\": \"a\\ud800b\\udc00\"}\n",
         "a\xef\xbf\xbd"
         "b\xef\xbf\xbd",
         0, 1, 0, 0, 2},
        {"{\"text\": \"a\xff\xc3(\xe2\x82\"}\n", "a\xef\xbf\xbd\xef\xbf\xbd(\xef\xbf\xbd", 0, 1, 0,
         3, 0},
        {"\xef\xbb\xbf{\"text\": \"a\"}\r\n\r\n \t\n{\"text\": \"\"}\r\n{\"text\": \"b\"}\r\n",
         "ab", 0, 2, 1, 0, 0},
        {"{\"text\": \"a\\u0000b\"}\n", "a\0b", 3, 1, 0, 0, 0},
        {"{\"prompt\": \"pq\", \"completion\": \"c\"}\n{\"prompt\": \"\", \"completion\": \"\"}\n",
         "pqc", 0, 1, 1, 0, 0, 2},
        {"{\"messages\": [], \"text\": \"a\", \"meta\": {\"text\": \"no\"}}\n", "a", 0, 1, 0, 0, 0},
        {"{\"conversations\": [], \"text\": \"a\"}\n", "a", 0, 1, 0, 0, 0},
        {"{\"messages\": [], \"prompt\": \"p\", \"completion\": \"c\", \"conversations\": []}\n",
         "pc", 0, 1, 0, 0, 0, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const good_rows *c = &cases[i];
        const size_t text_size = c->text_size ? c->text_size : strlen(c->text);
        assert_ok(encode(c->rows, strlen(c->rows), 0));
        cr_assert_eq(result.ids.count, text_size, "%zu: %zu", i, result.ids.count);
        for (size_t t = 0; t < text_size; t++) {
            cr_assert_eq(result.ids.data[t], (uint8_t)c->text[t]);
        }
        cr_expect_eq(result.counts.documents, c->documents, "%zu", i);
        cr_expect_eq(result.counts.empty, c->empty, "%zu", i);
        cr_expect_eq(result.counts.text.invalid, c->invalid, "%zu", i);
        cr_expect_eq(result.counts.lone, c->lone, "%zu", i);
        cr_assert_eq(result.spans.count, c->prompt ? 2 : 0, "%zu", i);
        cr_expect(!c->prompt || (result.spans.data[0] == 0 && result.spans.data[1] == c->prompt));
    }
}

Test(rows_of_bytes, are_refused_with_file_and_line)
{
    static const struct {
        const char *row, *words;
    } bad[] = {
        {"{\"text\": \"b\"", "line 2, column 13: a comma or a closing brace is expected"},
        {"{\"text\": 5}", "line 2: \"text\" is not a string"},
        {"{\"text\": null}", "line 2: \"text\" is not a string"},
        {"{\"title\": \"x\"}", "--skip-bad N (data.skip_bad)"},
        {"{\"prompt\": \"x\"}", "line 2: \"completion\" is missing"},
        {"{\"completion\": \"x\"}", "line 2: \"prompt\" is missing"},
        {"{\"text\": \"x\", \"completion\": \"y\"}", "line 2: it has a text and also"},
        {"[1]", "line 2, column 1: it is a JSON array"},
        {"{\"conversations\": []}", "line 2: it has \"conversations\"; rename this key to"},
        {"{\"messages\": []}", "line 2: it has \"messages\"; set data.chat_format"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char rows[256];
        const int n = snprintf(rows, sizeof rows, "{\"text\": \"good\"}\r\n%s\n{\"text\": \"z\"}\n",
                               bad[i].row);
        assert_fails(encode(rows, (size_t)n, 0), ND_ERR_DATA, bad[i].words);
        cr_expect_not_null(strstr(nd_error_last()->message, "a.jsonl\" line 2"));
        /* One bad line may be left out, and no second one. */
        assert_ok(encode(rows, (size_t)n, 1));
        cr_expect_eq(result.counts.bad, 1);
        cr_expect_eq(result.counts.documents, 2);
    }
}

/* One of 16 MB is one word for the merges, of which there are none. */
Test(rows_of_bytes, may_be_long)
{
    enum { LONG = 16 << 20 };
    static const char begin[] = "{\"text\": \"", end[] = "\"}\n{\"text\": \"b\"}\n";
    const size_t size = sizeof begin - 1 + LONG + sizeof end - 1;
    char *rows = malloc(size);
    cr_assert_not_null(rows);
    memcpy(rows, begin, sizeof begin - 1);
    memset(rows + sizeof begin - 1, 'a', LONG);
    memcpy(rows + sizeof begin - 1 + LONG, end, sizeof end - 1);
    assert_ok(encode(rows, size, 0));
    cr_expect_eq(result.ids.count, LONG + 1);
    cr_expect_eq(result.counts.documents, 2);
    cr_expect_eq(result.ids.data[LONG - 1], 'a');
    cr_expect_eq(result.ids.data[LONG], 'b');
    free(rows);
}
