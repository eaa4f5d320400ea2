// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "tests/unit/trainer/text/text_cases.h"
#include "trainer/text/parts.h"
#include "trainer/text/unicode.h"

enum { TEXT_MAX = 4096, WORDS = 1024 };

#define GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define LLAMA3                                                                                     \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "                     \
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define LLAMA3_SHORT                                                                               \
    "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}| "                           \
    "?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"
#define UPPER  "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER  "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define ENDING "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#define LLAMA4                                                                                     \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" ENDING "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER  \
    "*" ENDING "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static nd_regex *regex_of(const char *pattern)
{
    nd_regex *regex;
    assert_ok(
        nd_regex_create(pattern, strlen(pattern), "tokenizer.json", ND_REGEX_SECONDS, &regex));
    return regex;
}

/* All words of a text, asked for `room` at a time. */
static int words_of(nd_regex *regex, const char *text, size_t size, int room, size_t ends[WORDS])
{
    int count = 0;
    assert_ok(nd_regex_begin(regex, (const uint8_t *)text, size));
    for (int n = 1; n > 0; count += n) {
        const int left = WORDS - count;
        n = nd_regex_words(regex, ends + count, room < left ? room : left);
    }
    return count;
}

/* The words with '|' between them. */
static void assert_words(const char *pattern, const char *text, const char *expected)
{
    nd_regex *regex = regex_of(pattern);
    for (int room = 1; room < 4; room++) {
        char joined[TEXT_MAX] = "";
        size_t ends[WORDS], begin = 0, used = 0;
        const int count = words_of(regex, text, strlen(text), room, ends);
        for (int i = 0; i < count; begin = ends[i++]) {
            cr_assert_gt(ends[i], begin, "%s in %s", pattern, text);
            used += (size_t)snprintf(joined + used, sizeof joined - used, "%s%.*s",
                                     i > 0 ? "|" : "", (int)(ends[i] - begin), text + begin);
        }
        cr_expect_eq(begin, strlen(text));
        cr_expect_str_eq(joined, expected, "%s in %s", pattern, text);
    }
    nd_regex_destroy(regex);
}

/* The words are those of the package tokenizers. U+212A is the sign for kelvin, U+017F a long s. */
Test(regex, words_are_those_of_tokenizers)
{
    static const char *const cases[][3] = {
        {"(?i:k+)", "akK\xe2\x84\xaax", "a|kK\xe2\x84\xaa|x"},
        {"(?i:'s|'t|'re)", "'S 'T 'Re '\xc5\xbf", "'S| |'T| |'Re| |'\xc5\xbf"},
        {"(?i:[^k]+)",
         "a\xe2\x84\xaak"
         "b",
         "a|\xe2\x84\xaak|b"},
        {"(?i:[a-z]+)", "1a\xc5\xbf\xe2\x84\xaa.\xc3\x9f", "1|a\xc5\xbf\xe2\x84\xaa|.\xc3\x9f"},
        {"ab(?i)c|de", "abC abDE DE abde", "abC| |abDE| DE |abde"},
        {"(?i)ab|(?-i)cd", "AB cd CD", "AB| |cd| CD"},
        {"a?+ab|b", "aab ab", "aab| a|b"},
        {"a++.|a", "aaab aa", "aaab| |a|a"},
        {"\\p{Lu}??\\p{Ll}+?", "ABcdE", "A|Bc|d|E"},
        {"(?<!a)b+", "ab bb", "ab |bb"},
        {"(?<=(?:a|b){2}|c[^d])x", "abx cdx cex x", "ab|x| cdx ce|x| x"},
        {"(?<=a|bc|def)x", "ax bcx defx fx", "a|x| bc|x| def|x| fx"},
        {"(?<=\\n)", "a\nb\n\nc", "a\n|b\n|\n|c"},
        {"(?<=\\p{Ll})(?=\\p{Lu})", "camelCaseText", "camel|Case|Text"},
        {"(?=[A-Z])", "helloWorldFoo", "hello|World|Foo"},
        {"(?!a)", "ab", "a|b"},
        {"", "abc", "a|b|c"},
        {"|a", "ab", "a|b"},
        {"a|", "ab", "a|b"},
        {"x*", "axxb", "a|xx|b"},
        {"x{2,3}?|y{,2}z", "xxxxx yyyz", "xx|xx|x y|yyz"},
        {"\\d{2,}?", "12345", "12|34|5"},
        {"(?:ab){2,}", "ababab", "ababab"},
        {"[ab]{2}[bc]{1,2}", "aabbccab", "aabb|ccab"},
        {"[\\p{L}&&[^aeiou]]+", "beautiful", "b|eau|t|i|f|u|l"},
        {"[a-w&&[^c-g]z]+", "abcdefghz", "ab|cdefg|h|z"},
        {"[a-z&&[^c-e]&&b-y]+", "abcdefyz", "a|b|cde|fy|z"},
        {"[^a-c&&b-d]+", "abcde", "a|bc|de"},
        {"[^[a-c]x]+", "axbdez", "axb|dez"},
        {"[^(\\s|[.,!?])]+", "a(b.c d", "a|(|b|.|c| |d"},
        {"[a-c\\-x]+", "a-x-d", "a-x-|d"},
        {"[a-]+", "a-b", "a-|b"},
        {"[\\]\\-\\[]+", "a]-[", "a|]-["},
        {"(?>a+|ab)b", "aab ab", "aab| |ab"},
        {"(?>ab|a)b", "abb ab", "abb| ab"},
        {"(a|ab)(c|bcd)", "abcd ac", "abcd| |ac"},
        {"(?:a|b)*?c", "abc ac", "abc| |ac"},
        {"(?:(?:a+)b?)+", "aabab c", "aabab| c"},
        {"(?:\\p{L}\\p{M}*)+", "e\xcc\x81 b\xcc\x81", "e\xcc\x81| |b\xcc\x81"},
        {"\\w+|[^\\w\\s]+", "don't stop_it \xc2\xbd\xc2\xb2!",
         "don|'|t| |stop_it| |\xc2\xbd\xc2\xb2|!"},
        {"[^\\w\\s]+|\\w", "a\xc2\xbd\xc2\xb2!", "a|\xc2\xbd\xc2\xb2!"},
        {"[\\w\xc2\xbd]+|[\\W]+", "a\xc2\xbd\xc2\xb2!", "a\xc2\xbd|\xc2\xb2!"},
        {"\\h+|\\H", "0fgZ", "0f|g|Z"},
        {".+", "a\nb\rc", "a|\n|b\rc"},
        {"\\P{L}+|\\p{^L}", "ab12!c", "ab|12!|c"},
        {"[^\\P{L}a]+", "abca1", "a|bc|a1"},
        {"\\p{Punctuation}+|\\p{ S_ymbol}+", "a+b!=c,(d)$", "a|+|b|!|=|c|,(|d|)|$"},
        {"\\p{Han}+|\\p{Hiragana}", "\xe6\xbc\xa2\xe5\xad\x97\xe3\x81\x8b\xe3\x82\xab",
         "\xe6\xbc\xa2\xe5\xad\x97|\xe3\x81\x8b|\xe3\x82\xab"},
        {"[\\x{4e00}-\\u9fa5]+",
         "a\xe4\xbd\xa0\xe5\xa5\xbd"
         "b",
         "a|\xe4\xbd\xa0\xe5\xa5\xbd|b"},
        {"\\x41\\t|\\%", "A\tA%", "A\t|A|%"},
        {"\\s+", "a\xe1\xa0\x8e b\xc2\x85", "a\xe1\xa0\x8e| |b|\xc2\x85"}, /* U+180E is none */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_words(cases[i][0], cases[i][1], cases[i][2]);
    }
}

/* The scanners of split.c and Oniguruma cut alike. */
Test(regex, scanners_and_patterns_find_the_same_words)
{
    static const struct {
        const char *pattern;
        nd_splitter splitter;
    } pairs[] = {{GPT2, ND_SPLIT_GPT2},
                 {LLAMA3, ND_SPLIT_LLAMA3},
                 {LLAMA3_SHORT, ND_SPLIT_LLAMA3},
                 {"\\p{N}+", ND_SPLIT_DIGITS},
                 {"\\p{N}", ND_SPLIT_EACH_DIGIT}};
    static char text[TEXT_MAX];
    for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++) {
        nd_regex *regex = regex_of(pairs[p].pattern);
        for (uint64_t seed = 0; seed < 40; seed++) {
            size_t ends[WORDS], expected[WORDS], at = 0;
            const size_t size = text_random(seed, true, text, seed < 20 ? 60 : WORDS);
            const int count = words_of(regex, text, size, 7, ends);
            const int n =
                nd_text_words(pairs[p].splitter, (const uint8_t *)text, size, 0, expected, WORDS);
            for (int i = 0; i < count && i < n; at = ends[i++]) {
                cr_assert_eq(ends[i], expected[i], "%s: word %d of \"%.*s\" at %zu",
                             pairs[p].pattern, i, (int)size, text, at);
            }
            cr_assert_eq(count, n);
        }
        nd_regex_destroy(regex);
    }
}

Test(regex, what_oniguruma_does_not_know_is_refused_with_its_words)
{
    static const char *const cases[][2] = {
        {"(a", "end pattern with unmatched parenthesis"},
        {"a)", "unmatched close parenthesis"},
        {"[a", "premature end of char-class"},
        {"[z-a]", "empty range in char class"},
        {"\\p{Klingon}", "invalid character property name {Klingon}"},
        {"*a", "target of repeat operator is not specified"},
        {"\\", "end pattern at escape"},
        {"(a)\\2", "invalid backref number"},
    };
    static char pattern[ND_REGEX_PATTERN_BYTES_MAX + 1];
    nd_regex *regex;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_fails(
            nd_regex_create(cases[i][0], strlen(cases[i][0]), "x.json", ND_REGEX_SECONDS, &regex),
            ND_ERR_DATA, cases[i][1]);
        cr_expect_not_null(strstr(nd_error_last()->message, "\"x.json\": the pattern "));
        cr_expect_not_null(strstr(nd_error_last()->message, cases[i][0]));
    }
    memset(pattern, '(', sizeof pattern);
    assert_fails(nd_regex_create(pattern, 300, "x.json", ND_REGEX_SECONDS, &regex), ND_ERR_DATA,
                 "depth");
    memset(pattern, 'a', sizeof pattern);
    assert_fails(nd_regex_create(pattern, sizeof pattern, "x.json", ND_REGEX_SECONDS, &regex),
                 ND_ERR_DATA, "more than 4096 bytes");
}

/* A text of `times` units is refused with these words. The regex can be used again, unless its
 * thread was left behind. */
static void assert_refused(const char *pattern, const char *unit, size_t times, const char *words)
{
    const size_t n = strlen(unit);
    char *text = malloc(n * times);
    nd_regex *regex;
    cr_assert_not_null(text);
    for (size_t i = 0; i < times; i++) {
        memcpy(text + i * n, unit, n);
    }
    assert_ok(nd_regex_create(pattern, strlen(pattern), "x.json", 0.1, &regex));
    assert_fails(nd_regex_begin(regex, (const uint8_t *)text, n * times), ND_ERR_DATA, words);
    const bool left = strstr(nd_error_last()->message, "takes too long") != NULL;
    cr_expect_not_null(strstr(nd_error_last()->message, pattern));
    free(text); /* the thread has its own */
    const nd_status again = nd_regex_begin(regex, (const uint8_t *)"a b", 3);
    cr_expect_eq(again, left ? ND_ERR_DATA : ND_OK, "%s: %d", pattern, again);
    nd_regex_destroy(regex);
}

/* Each would take minutes or years. Some only scan, without a step back that Oniguruma counts; some
 * are one match, and some are many. */
Test(regex, no_pattern_hangs)
{
    assert_refused("(?:a+b?)+c|a", "a", 100, "takes too ");
    assert_refused("a*a*a*a*b|a", "a", 4000, "takes too ");
    assert_refused("(?:(?=[^x]*+)[ab])+", "ab", 1 << 15, "takes too long");
    assert_refused("(?:[^x]*x|.)+", "ab", 1 << 15, "takes too long");
    assert_refused("[^x]*x|.", "ab", 1 << 15, "takes too long");
    assert_refused("(a*)\\1b|a", "a", 1 << 15, "takes too ");
}

/* Each nest of groups calls the first group of the next one, which the compiler follows: for this
 * pattern it takes more than 1 MiB of stack. */
Test(regex, calls_of_nested_groups_fit_the_stack)
{
    enum { NESTS = 12, DEPTH = 60, PARTS = 2 * DEPTH + 1 };
    char pattern[ND_REGEX_PATTERN_BYTES_MAX];
    int n = 0;
    nd_regex *regex;
    for (int i = 0; i < NESTS * PARTS; i++) {
        const int nest = i / PARTS + 1, at = i % PARTS;
        n += at < DEPTH      ? sprintf(pattern + n, "(a|b")
             : at > DEPTH    ? sprintf(pattern + n, ")")
             : nest == NESTS ? sprintf(pattern + n, "a")
                             : sprintf(pattern + n, "\\g<%d>", nest * DEPTH + 1);
    }
    assert_ok(nd_regex_create(pattern, (size_t)n, "x.json", 10, &regex));
    nd_regex_destroy(regex);
}

/* Only places to come back to take memory, and there are at most so many. */
Test(regex, a_match_takes_limited_memory)
{
    assert_refused("(?:a|.)*|b", "a", 1 << 23, "needs too much memory for a text");
}

/* A megabyte, or an eighth of one, in one word, and in words of one character. */
Test(regex, long_words_take_no_quadratic_time, .timeout = 280)
{
    static const char *const units[] = {"a", "A", "aB", " ", "\n", "'", "1", " a", "\xcc\x81"};
#ifdef __SANITIZE_ADDRESS__ /* which slows a search down tenfold, and finds other faults */
    enum { LONG = 1 << 17 };
#else
    enum { LONG = 1 << 20 };
#endif
    nd_regex *regex = regex_of(LLAMA4);
    char *text = malloc(LONG);
    cr_assert_not_null(text);
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        const size_t n = strlen(units[i]), size = LONG / n * n;
        size_t ends[WORDS], end = 0;
        for (size_t at = 0; at < size; at += n) {
            memcpy(text + at, units[i], n);
        }
        assert_ok(nd_regex_begin(regex, (const uint8_t *)text, size));
        for (int count; (count = nd_regex_words(regex, ends, WORDS)) > 0;) {
            end = ends[count - 1];
        }
        cr_assert_eq(end, size);
    }
    free(text);
    nd_regex_destroy(regex);
}
