// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "trainer/corpus/row.h"

/* The text under "text", with the halves of surrogate pairs; NULL when the line is bad. */
static const char *text_of(const char *line, size_t *size, int64_t *lone)
{
    static nd_bytes buffer;
    nd_row_field field = {.key = "text"};
    size_t column;
    *lone = 0;
    if (nd_row_scan((const uint8_t *)line, strlen(line), &field, 1, &column) ||
        field.kind != ND_ROW_STRING) {
        return NULL;
    }
    assert_ok(nd_row_text(&field, &buffer, lone));
    *size = field.size;
    return (const char *)field.begin;
}

static const struct {
    const char *line, *text;
    int lone;
} good[] = {
    {"{\"text\":\"abc\"}", "abc", 0},
    {" { \"a\" : [1, {\"text\": \"no\"}, -0.5e+3] , \"text\" : \"yes\" } \r", "yes", 0},
    {"{\"text\":1,\"text\":\"first\",\"text\":\"last\"}", "last", 0},
    {"{\"te\\u0078t\":\"\"}", "", 0},
    {"{\"text\":\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\ud83d\\ude00\"}",
     "\"\\/\b\f\n\r\t\xc3\xa9\xf0\x9f\x98\x80", 0},
    {"{\"text\":\"\\ud83d!\\ude00\\ud83d\\ud83d\\ude00\"}",
     "\xef\xbf\xbd!\xef\xbf\xbd\xef\xbf\xbd\xf0\x9f\x98\x80", 3},
    {"{\"x\":NaN,\"y\":-Infinity,\"z\":[Infinity,true,false,null],\"text\":\"0123456789\xff\"}",
     "0123456789\xff", 0},
    {"{\"\":{},\"b\":[],\"c\":[[[]]],\"text\":\"long enough for whole words: \\n\"}",
     "long enough for whole words: \n", 0},
};

Test(row, strings_of_good_lines)
{
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        size_t size;
        int64_t lone;
        const char *text = text_of(good[i].line, &size, &lone);
        cr_assert_not_null(text, "%s", good[i].line);
        cr_expect(size == strlen(good[i].text) && memcmp(text, good[i].text, size) == 0, "%s",
                  good[i].line);
        cr_expect_eq(lone, good[i].lone, "%s", good[i].line);
    }
}

static const struct {
    const char *line, *words;
    size_t column;
} bad[] = {
    {"", "no JSON object", 1},
    {"[1]", "a JSON array; one object a line is needed", 1},
    {"{", "key", 2},
    {"{\"text\"", "colon", 8},
    {"{\"text\":", "within a value", 9},
    {"{\"text\":\"abc", "does not end", 13},
    {"{\"text\":\"abc\"", "closing brace", 14},
    {"{\"text\":\"abc\"} x", "behind the object", 16},
    {"{\"text\":\"abc\"}{}", "behind the object", 15},
    {"{\"text\":\"a\tb\"}", "control character", 11},
    {"{\"text\":\"\\x\"}", "bad escape", 10},
    {"{\"text\":\"\\u12g4\"}", "bad escape", 10},
    {"{\"text\":\"\\u12", "bad escape", 10},
    {"{\"a\":01}", "bad number", 8},
    {"{\"a\":1.}", "bad number", 8},
    {"{\"a\":1e}", "bad number", 8},
    {"{\"a\":-}", "bad number", 7},
    {"{\"a\":tru}", "value", 6},
    {"{\"a\":[1,]}", "value", 9},
    {"{\"a\":[1 2]}", "comma", 9},
    {"{\"a\":{\"b\":1]}", "comma", 12},
    {"{\"a\":1,}", "key", 8},
    {"{a:1}", "key", 2},
};

Test(row, bad_lines_have_a_reason_and_a_column)
{
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        nd_row_field field = {.key = "text"};
        size_t column = 0;
        const char *fault =
            nd_row_scan((const uint8_t *)bad[i].line, strlen(bad[i].line), &field, 1, &column);
        cr_assert_not_null(fault, "%s", bad[i].line);
        cr_expect_not_null(strstr(fault, bad[i].words), "%s: %s", bad[i].line, fault);
        cr_expect_eq(column, bad[i].column, "%s: %zu", bad[i].line, column);
    }
}

Test(row, depth_is_limited)
{
    static char line[2 * ND_ROW_DEPTH_MAX + 16];
    for (size_t depth = ND_ROW_DEPTH_MAX; depth <= ND_ROW_DEPTH_MAX + 1; depth++) {
        nd_row_field field = {.key = "text"};
        size_t column;
        memcpy(line, "{\"a\":", 5);
        memset(line + 5, '[', depth);
        memset(line + 5 + depth, ']', depth);
        line[5 + 2 * depth] = '}';
        const char *fault = nd_row_scan((uint8_t *)line, 6 + 2 * depth, &field, 1, &column);
        cr_expect(depth > ND_ROW_DEPTH_MAX ? fault && strstr(fault, "nested") : !fault, "%s",
                  fault);
    }
}

/* The end of a string is found at any byte of a word, not only at its first. */
Test(row, ends_of_strings_at_every_offset)
{
    for (int n = 0; n < 40; n++) {
        char line[64];
        size_t size;
        int64_t lone;
        snprintf(line, sizeof line, "{\"text\":\"%.*s\"}", n,
                 "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz");
        cr_assert_not_null(text_of(line, &size, &lone));
        cr_expect_eq(size, (size_t)n);
        line[9] = '\x01';
        cr_expect(n == 0 || !text_of(line, &size, &lone));
    }
}

/* The elements with a bar behind each, and what is wrong at the end. */
static void assert_list(const char *list, const char *elements, const char *fault)
{
    char found[256] = "";
    const char *wrong;
    nd_row_field element;
    size_t at = 0;
    while (!(wrong = nd_row_next((const uint8_t *)list, strlen(list), &at, &element)) &&
           element.kind != ND_ROW_ABSENT) {
        snprintf(found + strlen(found), sizeof found - strlen(found), "%.*s|", (int)element.size,
                 (const char *)element.begin);
    }
    cr_expect_str_eq(found, elements, "%s: %s", list, found);
    cr_expect_str_eq(wrong ? wrong : "", fault, "%s", list);
}

Test(row, elements_of_a_list)
{
    assert_list("[]", "", "");
    assert_list(" [ ] ", "", "");
    assert_list("[1, {\"a\": [2, \"]\"]} ,[] ]", "1|{\"a\": [2, \"]\"]}|[]|", "");
    assert_list("[\"a\"] ", "a|", "");
    assert_list("", "", "it is no list");
    assert_list("{}", "", "it is no list");
    assert_list("[", "", "the line ends within a value");
    assert_list("[,]", "", "a value is expected");
    assert_list("[1,]", "1|", "a value is expected");
    assert_list("[1 2]", "1|", "a comma or a closing bracket is expected");
    assert_list("[1", "1|", "a comma or a closing bracket is expected");
    assert_list("[1] 2", "1|", "something stands behind the list");
    assert_list("[] 2", "", "something stands behind the list");
}
