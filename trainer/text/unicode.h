// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_UNICODE_H
#define ND_TEXT_UNICODE_H
/* UTF-8, and the classes of characters that tokenizers split at, by the Unicode of the installed
 * utf8proc. Any number of threads may call these functions. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum nd_char_class {
    ND_CHAR_OTHER = 0,
    ND_CHAR_LETTER, /* \p{L} */
    ND_CHAR_NUMBER, /* \p{N} */
    ND_CHAR_SPACE,  /* \s */
} nd_char_class;

nd_char_class nd_char_class_of(uint32_t code);
bool nd_char_is_word(uint32_t code); /* \w */

/* One character of valid UTF-8. */
typedef struct nd_char {
    uint32_t code;
    int bytes; /* 1 to 4 */
} nd_char;

/* The character that begins at `p`, in valid UTF-8. */
nd_char nd_char_at(const uint8_t *p);
/* The character that ends before `p`, in valid UTF-8 with at least one character there. */
nd_char nd_char_before(const uint8_t *p);

/*
 * Bytes of the valid character at the start of these `size` > 0 bytes: 1 to 4. Negative: the
 * number of bytes, negated, that make one error (the maximal subpart of a character, as the
 * Unicode standard recommends to replace it by one U+FFFD). 0: the bytes end within a character
 * that is valid so far.
 */
int nd_utf8_next(const uint8_t *p, size_t size);
/* Bytes at the start that are valid UTF-8. */
size_t nd_utf8_valid(const uint8_t *p, size_t size);
/* Writes a code point; returns its number of bytes, 1 to 4. */
int nd_utf8_put(uint8_t *out, uint32_t code);

#endif
