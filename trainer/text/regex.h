// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_REGEX_H
#define ND_TEXT_REGEX_H
/*
 * Patterns of pre-tokenizers that have no scanner in split.c: they cut a text where the package
 * `tokenizers` cuts it, with the engine that it uses, Oniguruma.
 *
 * A pattern comes from a file that nobody has checked, and Oniguruma can be stopped neither while
 * it compiles nor while it matches. So each regex has a thread of its own, and its user waits for
 * as long as the thread has taken less than a limit of processor time. A thread that takes more is
 * left behind, with copies of all that it reads, and the user gets ND_ERR_DATA with the pattern.
 *
 * A regex belongs to one thread.
 */
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct nd_regex nd_regex;

enum { ND_REGEX_PATTERN_BYTES_MAX = 4096 };
/* The limit of processor time: seconds for a pattern and for each text, ... */
#define ND_REGEX_SECONDS 3.0
/* ... and more for each byte of a text. A pattern of a model takes a twentieth of this. */
#define ND_REGEX_BYTE_SECONDS 5e-6

/* ND_ERR_DATA with the name of the file, the pattern, and what Oniguruma says about it. The name is
 * borrowed until the regex is destroyed. `seconds`: ND_REGEX_SECONDS but in tests. */
nd_status nd_regex_create(const char *pattern, size_t size, const char *name, double seconds,
                          nd_regex **out);
void nd_regex_destroy(nd_regex *regex); /* NULL is legal */
/* Cuts a text of valid UTF-8 into words: each match is a word, and so is what stands between two
 * matches. ND_ERR_DATA when that takes too long or too much memory. */
nd_status nd_regex_begin(nd_regex *regex, const uint8_t *text, size_t size);
/* The ends of up to `room` further words; returns their number. 0: there are no more, the last word
 * ended with the text. */
int nd_regex_words(nd_regex *regex, size_t *ends, int room);

#endif
