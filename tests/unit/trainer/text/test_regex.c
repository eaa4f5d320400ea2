// SPDX-License-Identifier: Apache-2.0
#define PCRE2_CODE_UNIT_WIDTH 8
#include <criterion/criterion.h>
#include <dlfcn.h>
#include <pcre2.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/rng.h"
#include "tests/support/tempdir.h"
#include "trainer/text/parts.h"
#include "trainer/text/regex_parse.h"
#include "trainer/text/unicode.h"

enum { TEXT_MAX = 4096, WORDS = 1024, FLAGS = ND_REGEX_INTERPRET | ND_REGEX_COUNT };

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

static nd_regex *regex_of(const char *pattern, int flags)
{
    nd_regex *regex;
    assert_ok(nd_regex_create(pattern, strlen(pattern), "tokenizer.json", flags, &regex));
    return regex;
}

/* All words of a text, asked for `room` at a time. */
static nd_status words_of(nd_regex_scan *scan, const char *text, size_t size, int room,
                          size_t ends[WORDS], int *count)
{
    int n = 1;
    *count = 0;
    ND_TRY(nd_regex_begin(scan, (const uint8_t *)text, size));
    for (; n > 0; *count += n) {
        const int left = WORDS - *count;
        ND_TRY(nd_regex_words(scan, ends + *count, room < left ? room : left, &n));
    }
    return ND_OK;
}

/* The words with '|' between them. */
static void assert_words(const char *pattern, const char *text, const char *expected)
{
    for (int flags = 0; flags <= FLAGS; flags++) {
        nd_regex *regex = regex_of(pattern, flags);
        nd_regex_scan *scan;
        assert_ok(nd_regex_scan_create(regex, &scan));
        for (int room = 1; room < 4; room++) {
            char joined[TEXT_MAX] = "";
            size_t ends[WORDS], begin = 0, used = 0;
            int count;
            assert_ok(words_of(scan, text, strlen(text), room, ends, &count));
            for (int i = 0; i < count; begin = ends[i++]) {
                cr_assert_gt(ends[i], begin, "%s in %s", pattern, text);
                used += (size_t)snprintf(joined + used, sizeof joined - used, "%s%.*s",
                                         i > 0 ? "|" : "", (int)(ends[i] - begin), text + begin);
            }
            cr_expect_eq(begin, strlen(text));
            cr_expect_str_eq(joined, expected, "%s in %s, flags %d", pattern, text, flags);
        }
        nd_regex_scan_destroy(scan);
        nd_regex_destroy(regex);
    }
}

/* What the package tokenizers gives. U+212A is the sign for kelvin, U+017F a long s. */
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

/* A random text of characters of all classes, in long and short runs. */
static size_t random_text(uint64_t seed, char *out, size_t room)
{
    static const char *const atoms[] = {"a",
                                        "Z",
                                        "the",
                                        "1",
                                        "234",
                                        "'s",
                                        "'LL",
                                        "'",
                                        " ",
                                        "  ",
                                        "\n",
                                        "\r\n",
                                        ".",
                                        "!/",
                                        "\xc3\xa9",
                                        "\xc3\x89",
                                        "\xe4\xbd\xa0",
                                        "\xcc\x81",
                                        "\xc2\xa0",
                                        "\xe1\xa0\x8e",
                                        "\xc5\xbf",
                                        "\xe1\xb2\x89", /* a letter since Unicode 16 */
                                        "\xf0\x9f\x98\x80"};
    size_t used = 0;
    for (uint64_t i = 0;; i++) {
        const char *atom = atoms[nd_rng_u64(seed, 1, i) % (sizeof atoms / sizeof *atoms)];
        const uint64_t random = nd_rng_u64(seed, 2, i) % 64;
        for (uint64_t n = random == 0 ? 300 : random < 4 ? 5 : 1; n > 0; n--) {
            const size_t size = strlen(atom);
            if (used + size > room) {
                return used;
            }
            memcpy(out + used, atom, size);
            used += size;
        }
    }
}

/* The scanners of split.c and PCRE2 cut alike, by whatever way PCRE2 goes. */
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
    for (size_t p = 0; p < 4 * (sizeof pairs / sizeof *pairs); p++) {
        nd_regex *regex = regex_of(pairs[p / 4].pattern, (int)(p % 4));
        nd_regex_scan *scan;
        assert_ok(nd_regex_scan_create(regex, &scan));
        for (uint64_t seed = 0; seed < 40; seed++) {
            size_t ends[WORDS], expected[WORDS], at = 0;
            const size_t size = random_text(seed, text, seed < 20 ? 60 : WORDS);
            int count;
            assert_ok(words_of(scan, text, size, 7, ends, &count));
            const int n = nd_text_words(pairs[p / 4].splitter, (const uint8_t *)text, size, 0,
                                        expected, WORDS);
            for (int i = 0; i < count && i < n; at = ends[i++]) {
                cr_assert_eq(ends[i], expected[i], "%s: word %d of \"%.*s\" at %zu",
                             pairs[p / 4].pattern, i, (int)size, text, at);
            }
            cr_assert_eq(count, n);
        }
        nd_regex_scan_destroy(scan);
        nd_regex_destroy(regex);
    }
}

/* Whatever way PCRE2 goes, a pattern without a scanner too has the same words. */
Test(regex, every_way_to_match_finds_the_same_words)
{
    static const char *const patterns[] = {
        LLAMA4,
        "(?<=\\p{Ll})(?=\\p{Lu})|\\p{L}{2,40}?(?=\\p{M}|\\s)|(?:\\p{L}\\p{M}*)+|\\s+(?!\\S)",
        "(?<!1)[^\\s\\p{L}]+|\\p{Lu}", "(?:a|the){1,8}(?= )| +"};
    static char text[TEXT_MAX];
    for (size_t p = 0; p < sizeof patterns / sizeof *patterns; p++) {
        nd_regex *regexes[FLAGS + 1];
        nd_regex_scan *scans[FLAGS + 1];
        for (int flags = 0; flags <= FLAGS; flags++) {
            regexes[flags] = regex_of(patterns[p], flags);
            assert_ok(nd_regex_scan_create(regexes[flags], &scans[flags]));
        }
        for (uint64_t seed = 0; seed < 40; seed++) {
            size_t first[WORDS], ends[WORDS];
            const size_t size = random_text(seed + 100, text, seed < 20 ? 60 : WORDS);
            int count, n;
            assert_ok(words_of(scans[0], text, size, 64, first, &count));
            cr_assert_eq(first[count - 1], size);
            for (int flags = 1; flags <= FLAGS; flags++) {
                assert_ok(words_of(scans[flags], text, size, 64, ends, &n));
                cr_assert_eq(n, count, "%s, seed %d, flags %d", patterns[p], (int)seed, flags);
                cr_assert_arr_eq(ends, first, (size_t)n * sizeof *ends);
            }
        }
        for (int flags = 0; flags <= FLAGS; flags++) {
            nd_regex_scan_destroy(scans[flags]);
            nd_regex_destroy(regexes[flags]);
        }
    }
}

Test(regex, properties_are_those_of_the_scanners)
{
    static const struct {
        const char *property;
        nd_char_class class;
    } pairs[] = {{"L", ND_CHAR_LETTER}, {"N", ND_CHAR_NUMBER}, {NULL, ND_CHAR_SPACE}};
    nd_char_set *set;
    for (size_t i = 0; i < 3; i++) {
        assert_ok(ND_ALLOC(1, &set));
        cr_assert(pairs[i].property ? nd_char_set_add_property(set, pairs[i].property, 1, false)
                                    : nd_char_set_add_escape(set, 's', false));
        for (uint32_t code = 0; code < ND_CHAR_CODES; code++) {
            cr_assert_eq(nd_char_set_has(set, code), nd_char_class_of(code) == pairs[i].class,
                         "U+%04X", code);
        }
        free(set);
    }
}

Test(regex, what_is_not_supported_is_refused_by_name)
{
    static const char *const cases[][2] = {
        {"a\\b", "\"\\b\" at byte 1 is not a known escape"},
        {"^a", "\"^\" at byte 0 is not supported"},
        {"a$", "\"$\" at byte 1"},
        {"\\Aa", "\"\\A\" at byte 0"},
        {"(a)\\1", "\"\\1\" at byte 3"},
        {"\\X", "\"\\X\""},
        {"(?<n>a)", "\"(\" at byte 0 is not a supported group"},
        {"(?m:.)", "is not a supported group"},
        {"(?x: a)", "is not a supported group"},
        {"(?#a)", "is not a supported group"},
        {"(*FAIL)", "is not a supported group"},
        {"(a", "has no end"},
        {"a)", "\")\" at byte 1 closes no group"},
        {"[a", "a class has no end"},
        {"[]a]", "\"]\" at byte 1"},
        {"[^]", "\"]\" at byte 2"},
        {"[a&&]", "at byte 4"},
        {"[[:alpha:]]", "\"[\" at byte 1 is not supported in a class"},
        {"[a-c-e]", "\"-\" at byte 4 is not clear in a class"},
        {"[\\w-a]", "is not clear in a class"},
        {"[a-\\d]", "is no range"},
        {"[z-a]", "\"z-a\" at byte 1 is no range"},
        {"\\p{Klingon}", "\"\\p{Klingon}\" at byte 0 is not a known property"},
        {"\\p{Script=Han}", "is not a known property"},
        {"\\pL", "in braces"},
        {"\\p{L", "has no end"},
        {"\\xe4", "is no code point"},
        {"\\x{d800}", "is no code point"},
        {"\\x{110000}", "is no code point"},
        {"\\", "\"\\\" at byte 0 is not a known escape"},
        {"a{2}+", "\"{2}+\" at byte 1 is not supported"},
        {"a{2}?", "\"{2}?\" at byte 1 is not supported"},
        {"a{3,2}", "at byte 1 is no supported repeat"},
        {"a{1,1001}", "is no supported repeat"},
        {"a{x", "is no supported repeat"},
        {"a{,}", "is no supported repeat"},
        {"a+*", "repeats a repeat"},
        {"*a", "\"*\" at byte 0"},
        {"(?:a*)+", "repeats what may be empty"},
        {"(?=a)?", "repeats what may be empty"},
        {"(?i:ss)", "stands behind a character that it may be one with"},
        {"(?i:s(?:x|t))", "stands behind a character"},
        {"(?i:\xc3\xa9)", "is not supported where case is ignored"},
        {"(?i:\\p{Lu})", "is not supported where case is ignored"},
        {"(?<=a+)b", "\"(?<=a+)\" at byte 0 looks back over no fixed number of characters"},
        {"x(?<!(?:a|bc))b", "at byte 1 looks back over no fixed number"},
        {"(?<=ab{1,2}|c)b", "looks back over no fixed number"},
        {"(?<=(?:a{300}){300})b", "looks back over no fixed number"},
        {"((((((((((((((((a))))))))))))))))", "nested too deeply"},
    };
    nd_regex *regex;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_fails(nd_regex_create(cases[i][0], strlen(cases[i][0]), "x.json", 0, &regex),
                     ND_ERR_DATA, cases[i][1]);
        cr_expect_not_null(strstr(nd_error_last()->message, "\"x.json\": \"Split\" with the"));
    }
}

Test(regex, too_many_characters_are_refused)
{
    char pattern[5000] = "";
    nd_regex *regex;
    for (int i = 0; i < 70; i++) {
        snprintf(pattern + strlen(pattern), 8, "\\x%02x", i + 33);
    }
    assert_fails(nd_regex_create(pattern, strlen(pattern), "x.json", 0, &regex), ND_ERR_DATA,
                 "too many different characters");
    memset(pattern, 'a', sizeof pattern);
    assert_fails(nd_regex_create(pattern, sizeof pattern, "x.json", 0, &regex), ND_ERR_DATA,
                 "more than 4096 bytes");
}

static void assert_too_slow(const char *pattern, const char *unit, size_t times, const char *words)
{
    for (int flags = 0; flags <= FLAGS; flags++) {
        nd_regex *regex = regex_of(pattern, flags);
        nd_regex_scan *scan;
        size_t ends[WORDS], n = strlen(unit);
        int count = 1;
        char *text = malloc(n * times);
        nd_status status;
        cr_assert_not_null(text);
        for (size_t i = 0; i < times; i++) {
            memcpy(text + i * n, unit, n);
        }
        assert_ok(nd_regex_scan_create(regex, &scan));
        assert_ok(nd_regex_begin(scan, (const uint8_t *)text, n * times));
        do {
            status = nd_regex_words(scan, ends, WORDS, &count);
        } while (status == ND_OK && count > 0);
        cr_assert_eq(status, ND_ERR_DATA, "%s, flags %d: %d", pattern, flags, status);
        cr_assert_not_null(strstr(nd_error_last()->message, words), "%s", nd_error_last()->message);
        cr_assert_not_null(strstr(nd_error_last()->message, pattern));
        assert_ok(words_of(scan, "a b", 3, 9, ends, &count)); /* it can be used again */
        free(text);
        nd_regex_scan_destroy(scan);
        nd_regex_destroy(regex);
    }
}

/* Each would take time in proportion to the square of the text, or worse. */
Test(regex, slow_patterns_are_refused_with_the_place)
{
    assert_too_slow("\\s*x|\\s", " ", 1 << 17, "takes too many steps");
    assert_too_slow("a+b|a", "a", 1 << 17, "takes too many steps");
    assert_too_slow("(?:a+)+b|a", "a", 100, "takes too many steps");
    assert_too_slow("a*a*a*a*b|a", "a", 4000, "takes too many steps");
    assert_too_slow("(?:(?=[ab]*)[ab])+", "ab", 4000, "takes too many steps");
    /* Thousands of ways at a place, all within the few characters that a match sees at first. */
    assert_too_slow("a*a*a*b|[ac]", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaac", 2000,
                    "takes too many steps");
    assert_too_slow("a?a?a?a?a?a?a?a?a?a?a?a?[ab]{14}|[acd]", "aaaaaaaaaaaac", 4000,
                    "takes too many steps");
}

/* In place of the library's: tests see how often it is called. */
static atomic_long matches;

int pcre2_match_8(const pcre2_code *code, PCRE2_SPTR subject, PCRE2_SIZE length, PCRE2_SIZE start,
                  uint32_t options, pcre2_match_data *data, pcre2_match_context *context)
{
    typedef int function(const pcre2_code *, PCRE2_SPTR, PCRE2_SIZE, PCRE2_SIZE, uint32_t,
                         pcre2_match_data *, pcre2_match_context *);
    function *real;
    *(void **)&real = dlsym(RTLD_NEXT, "pcre2_match_8");
    cr_assert_not_null(real);
    atomic_fetch_add(&matches, 1);
    return real(code, subject, length, start, options, data, context);
}

/* Some places take more tries than a search makes. Those before it, where nothing begins, are not
 * searched again from each of them: a place is matched once, and a search goes over many. */
Test(regex, a_search_that_gave_up_does_not_begin_again_at_each_place)
{
    static const char pattern[] = "a*a*a*x", unit[] =
                                                 "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
                                                 "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
                                                 "aaaaaaaaaaaaaa";
    enum { UNIT = sizeof unit - 1, TIMES = 500, SIZE = UNIT * TIMES };
    char *text = malloc(SIZE);
    cr_assert_not_null(text);
    for (int i = 0; i < TIMES; i++) {
        memcpy(text + (size_t)i * UNIT, unit, UNIT);
    }
    nd_regex *regex = regex_of(pattern, 0);
    nd_regex_scan *scan;
    size_t end = 0;
    int count;
    assert_ok(nd_regex_scan_create(regex, &scan));
    assert_ok(nd_regex_begin(scan, (const uint8_t *)text, SIZE));
    atomic_store(&matches, 0);
    assert_ok(nd_regex_words(scan, &end, 1, &count));
    const long calls = atomic_load(&matches);
    cr_expect_eq(end, SIZE); /* one word: nothing matches */
    cr_expect_gt(calls, TIMES, "%ld: no search gave up", calls);
    cr_expect_leq(calls, SIZE + SIZE / 64, "%ld calls for %d places", calls, SIZE);
    nd_regex_scan_destroy(scan);
    nd_regex_destroy(regex);
    free(text);
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
    nd_regex *regex = regex_of(LLAMA4, 0);
    nd_regex_scan *scan;
    char *text = malloc(LONG);
    cr_assert_not_null(text);
    assert_ok(nd_regex_scan_create(regex, &scan));
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        const size_t n = strlen(units[i]), size = LONG / n * n;
        size_t ends[WORDS], end = 0;
        int count = 1;
        for (size_t at = 0; at < size; at += n) {
            memcpy(text + at, units[i], n);
        }
        assert_ok(nd_regex_begin(scan, (const uint8_t *)text, size));
        while (count > 0) {
            assert_ok(nd_regex_words(scan, ends, WORDS, &count));
            end = count > 0 ? ends[count - 1] : end;
        }
        cr_assert_eq(end, size);
    }
    free(text);
    nd_regex_scan_destroy(scan);
    nd_regex_destroy(regex);
}

typedef struct thread_case {
    const nd_regex *regex;
    const char *text;
    size_t size, ends[WORDS];
    int count;
} thread_case;

static void *find_words(void *argument)
{
    thread_case *one = argument;
    nd_regex_scan *scan;
    assert_ok(nd_regex_scan_create(one->regex, &scan));
    for (int i = 0; i < 50; i++) {
        assert_ok(words_of(scan, one->text, one->size, 64, one->ends, &one->count));
    }
    nd_regex_scan_destroy(scan);
    return NULL;
}

Test(regex, threads_share_a_regex)
{
    static char text[TEXT_MAX];
    static thread_case cases[4];
    pthread_t threads[4];
    nd_regex *regex = regex_of(LLAMA4, 0);
    const size_t size = random_text(7, text, WORDS);
    for (int i = 0; i < 4; i++) {
        cases[i] = (thread_case){.regex = regex, .text = text, .size = size};
        cr_assert_eq(pthread_create(&threads[i], NULL, find_words, &cases[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(pthread_join(threads[i], NULL), 0);
        cr_assert_eq(cases[i].count, cases[0].count);
        cr_assert_arr_eq(cases[i].ends, cases[0].ends, (size_t)cases[0].count * sizeof(size_t));
    }
    nd_regex_destroy(regex);
}
