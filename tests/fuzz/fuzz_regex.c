// SPDX-License-Identifier: Apache-2.0
/*
 * Patterns of pre-tokenizers: a pattern up to the first zero byte, then a text. What the parser
 * accepts cuts the text into words that cover it, and interpreted or counted matches find the same
 * ones.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/text/regex.h"
#include "trainer/text/unicode.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { TEXT_MAX = 4096, FLAGS = ND_REGEX_INTERPRET | ND_REGEX_COUNT };

/* Ends of all words; -1: the pattern is too slow for the text. */
static int find_words(const nd_regex *regex, const uint8_t *text, size_t size,
                      size_t ends[TEXT_MAX])
{
    nd_regex_scan *scan;
    int count = 0, n = 1;
    ND_ASSERT(nd_regex_scan_create(regex, &scan) == ND_OK);
    nd_status status = nd_regex_begin(scan, text, size);
    while (status == ND_OK && n > 0) {
        status =
            nd_regex_words(scan, ends + count, TEXT_MAX - count < 7 ? TEXT_MAX - count : 7, &n);
        count += status == ND_OK ? n : 0;
    }
    nd_regex_scan_destroy(scan);
    ND_ASSERT(status == ND_OK || status == ND_ERR_DATA);
    return status == ND_OK ? count : -1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static size_t first[TEXT_MAX], ends[TEXT_MAX];
    const uint8_t *zero = memchr(data, 0, size);
    const size_t pattern = zero ? (size_t)(zero - data) : size;
    const uint8_t *text = zero ? zero + 1 : data + size;
    int count = -1;
    if (nd_utf8_valid(data, pattern) < pattern) {
        return 0;
    }
    size -= (size_t)(text - data);
    size = nd_utf8_valid(text, size < TEXT_MAX ? size : TEXT_MAX);
    const int other = 1 + (int)(size % FLAGS); /* one other way to match: to make a regex is slow */
    for (int flags = 0; flags <= other; flags += other) {
        nd_regex *regex;
        if (nd_regex_create((const char *)data, pattern, "input", flags, &regex) != ND_OK) {
            ND_ASSERT(flags == 0); /* flags change nothing */
            return 0;
        }
        const int n = find_words(regex, text, size, flags == 0 ? first : ends);
        nd_regex_destroy(regex);
        ND_ASSERT(n <= 0 || (flags == 0 ? first : ends)[n - 1] == size);
        if (flags > 0 && n >= 0 && count >= 0) {
            ND_ASSERT(n == count && memcmp(first, ends, (size_t)n * sizeof *ends) == 0);
        }
        count = flags == 0 ? n : count;
    }
    return 0;
}
