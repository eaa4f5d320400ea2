// SPDX-License-Identifier: Apache-2.0
/*
 * Patterns of pre-tokenizers: a pattern up to the first zero byte, then a text. What Oniguruma
 * compiles cuts the text into words that cover it, or is given up with a message.
 */
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "trainer/text/regex.h"
#include "trainer/text/unicode.h"

enum { TEXT_MAX = 4096 };

static void find_words(nd_regex *regex, const uint8_t *text, size_t size)
{
    size_t ends[7], end = 0;
    const nd_status status = nd_regex_begin(regex, text, size);
    ND_ASSERT(status == ND_OK || status == ND_ERR_DATA);
    if (status != ND_OK) {
        return;
    }
    for (int n; (n = nd_regex_words(regex, ends, 7)) > 0;) {
        for (int i = 0; i < n; end = ends[i++]) {
            ND_ASSERT(ends[i] > end);
        }
    }
    ND_ASSERT(end == size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *zero = memchr(data, 0, size);
    const size_t pattern = zero ? (size_t)(zero - data) : size;
    const uint8_t *text = zero ? zero + 1 : data + size;
    nd_regex *regex;
    if (nd_utf8_valid(data, pattern) < pattern ||
        nd_regex_create((const char *)data, pattern, "input", 0.5, &regex) != ND_OK) {
        return 0;
    }
    size -= (size_t)(text - data);
    find_words(regex, text, nd_utf8_valid(text, size < TEXT_MAX ? size : TEXT_MAX));
    nd_regex_destroy(regex);
    return 0;
}
