// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_REGEX_H
#define ND_TEXT_REGEX_H
/*
 * Patterns of pre-tokenizers that have no scanner in split.c: they cut a text where the package
 * `tokenizers` cuts it. PCRE2 does the matching.
 *
 * `tokenizers` matches with Oniguruma, whose tables of characters and whose syntax are not those of
 * PCRE2, and both depend on the version that is installed. So PCRE2 never sees a character. All
 * characters fall into at most 255 kinds, which the pattern tells apart: by our own tables
 * (property_table.inc). A text becomes a string with one byte per character, its kind, and the
 * pattern a pattern of such bytes. regex_parse.c reads the pattern, and refuses by its name what is
 * not known to mean the same in both.
 *
 * The time is in proportion to the text. A match first sees only the next characters of the text,
 * and makes few tries. When these do not decide it, or where the pattern has repeats in repeats,
 * its steps are counted,
 * and a text may take a number of steps in proportion to its size. A pattern that looks far ahead
 * again and again, or that tries too many ways, ends in ND_ERR_DATA with the pattern and the place.
 *
 * A regex does not change after it was made; any number of threads may use one. A scan belongs to
 * one thread, and has all that PCRE2 needs but the kinds of a text, which grow with the longest.
 * PCRE2 compiles patterns to machine code where it can (JIT), and interprets them elsewhere, with
 * the same words.
 */
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct nd_regex nd_regex;
typedef struct nd_regex_scan nd_regex_scan;

/* For tests: what changes no word. */
typedef enum nd_regex_flags {
    ND_REGEX_INTERPRET = 1, /* no machine code */
    ND_REGEX_COUNT = 2,     /* count the steps of every match */
} nd_regex_flags;

/* ND_ERR_DATA with the name of the file, the pattern, and what is not supported in it. The name is
 * borrowed until the regex is destroyed. `flags`: 0 but in tests. */
nd_status nd_regex_create(const char *pattern, size_t size, const char *name, int flags,
                          nd_regex **out);
void nd_regex_destroy(nd_regex *regex); /* NULL is legal */

/* The regex is borrowed until the scan is destroyed. */
nd_status nd_regex_scan_create(const nd_regex *regex, nd_regex_scan **out);
void nd_regex_scan_destroy(nd_regex_scan *scan); /* NULL is legal */
/* Begins with another text of valid UTF-8, which is borrowed until the next one. */
nd_status nd_regex_begin(nd_regex_scan *scan, const uint8_t *text, size_t size);
/* The ends of up to `room` further words: each match is a word, and so is what stands between two
 * matches. *count 0: there are no more; the last one ended with the text. */
nd_status nd_regex_words(nd_regex_scan *scan, size_t *ends, int room, int *count);

#endif
