// SPDX-License-Identifier: Apache-2.0
/* Characters, escapes and classes of a pattern. */
#include <stdarg.h>
#include <stdio.h>

#include "trainer/text/regex_parse.h"
#include "trainer/text/unicode.h"

enum { SHOWN_BYTES = 200 };

nd_status nd_regex_refuse(const char *name, const char *pattern, size_t size, const char *format,
                          ...)
{
    char why[256];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    return nd_fail(ND_ERR_DATA, "\"%s\": \"Split\" with the pattern %.*s is not supported: %s",
                   name, size < SHOWN_BYTES ? (int)size : SHOWN_BYTES, pattern, why);
}

/* The part of the pattern from `from` up to where the parser is, or one character. */
nd_status nd_regex_refuse_part(const nd_regex_parser *p, size_t from, const char *why)
{
    size_t end = p->at > from ? p->at : from + 1;
    while (end < p->size && (p->pattern[end] & 0xc0) == 0x80) {
        end++;
    }
    end = end < p->size ? end : p->size;
    return nd_regex_refuse(p->name, p->pattern, p->size, "\"%.*s\" at byte %zu %s",
                           (int)(end - from), p->pattern + from, from, why);
}

/* Reading. */

/* The next byte; 0 at the end. */
char nd_regex_peek(const nd_regex_parser *p)
{
    return p->at < p->size ? p->pattern[p->at] : '\0';
}

bool nd_regex_take(nd_regex_parser *p, const char *text)
{
    const size_t n = strlen(text);
    if (p->size - p->at < n || memcmp(p->pattern + p->at, text, n) != 0) {
        return false;
    }
    p->at += n;
    return true;
}

static uint32_t take_char(nd_regex_parser *p)
{
    const nd_char c = nd_char_at((const uint8_t *)p->pattern + p->at);
    p->at += (size_t)c.bytes;
    return c.code;
}

/* Escapes. */

/* A number of `digits` hexadecimal digits, or of 1 to 8 up to a '}' with digits 0. */
static nd_status take_hex(nd_regex_parser *p, size_t from, int digits, uint32_t *code)
{
    uint64_t value = 0;
    int n = 0;
    for (; n < (digits ? digits : 8); n++, p->at++) {
        const char c = nd_regex_peek(p);
        const bool decimal = c >= '0' && c <= '9';
        const char low = (char)(c | 0x20);
        if (!decimal && (low < 'a' || low > 'f')) {
            break;
        }
        value = 16 * value + (uint64_t)(decimal ? c - '0' : low - 'a' + 10);
    }
    const bool whole = digits ? n == digits : n > 0 && nd_regex_take(p, "}");
    const bool valid = value < ND_CHAR_CODES && (value < 0xd800 || value > 0xdfff);
    if (!whole || !valid || (digits == 2 && value >= 0x80)) {
        return nd_regex_refuse_part(p, from, "is no code point");
    }
    *code = (uint32_t)value;
    return ND_OK;
}

/* \p{Name}, \p{^Name}, \P{Name}, behind the letter. */
static nd_status add_property(nd_regex_parser *p, size_t from, bool others, nd_char_set *set)
{
    if (!nd_regex_take(p, "{")) {
        return nd_regex_refuse_part(p, from, "is not supported; write the property in braces");
    }
    others ^= nd_regex_take(p, "^");
    const char *name = p->pattern + p->at;
    const char *end = memchr(name, '}', p->size - p->at);
    if (!end) {
        return nd_regex_refuse_part(p, from, "has no end");
    }
    p->at += (size_t)(end - name) + 1;
    return nd_char_set_add_property(set, name, (size_t)(end - name), others)
               ? ND_OK
               : nd_regex_refuse_part(p, from, "is not a known property");
}

/* An escape from its backslash on: one character in *code, or else the set grows and *code is
 * ND_CHAR_CODES. */
static nd_status read_escape(nd_regex_parser *p, bool in_class, nd_char_set *set, uint32_t *code)
{
    static const char named[] = "tnrfvae", codes[] = "\t\n\r\f\v\a\x1b";
    const size_t from = p->at++;
    const char c = nd_regex_peek(p);
    const char *letter = c ? strchr(named, c) : NULL;
    *code = ND_CHAR_CODES;
    if (c == '\0' || (c & 0x80)) {
        return nd_regex_refuse_part(p, from, "is not a known escape");
    }
    p->at++;
    if (letter) {
        *code = (uint32_t)codes[letter - named];
        return ND_OK;
    }
    if (c == 'x' || c == 'u') {
        return take_hex(p, from, c == 'u' ? 4 : nd_regex_take(p, "{") ? 0 : 2, code);
    }
    const bool is_letter = (c | 0x20) >= 'a' && (c | 0x20) <= 'z';
    if (!is_letter && (c < '0' || c > '9')) {
        *code = (uint32_t)c;
        return ND_OK;
    }
    if (p->fold && c != 's' && c != 'd') {
        return nd_regex_refuse_part(p, from, "is not supported where case is ignored");
    }
    if (c == 'p' || c == 'P') {
        return add_property(p, from, c == 'P', set);
    }
    return nd_char_set_add_escape(set, c, in_class)
               ? ND_OK
               : nd_regex_refuse_part(p, from, "is not a known escape");
}

/* Classes. */

/* A character of a class, or what an escape adds to the set. */
nd_status nd_regex_read_char(nd_regex_parser *p, bool in_class, nd_char_set *set, uint32_t *code)
{
    const size_t from = p->at;
    if (nd_regex_peek(p) == '\\') {
        ND_TRY(read_escape(p, in_class, set, code));
    } else {
        *code = take_char(p);
    }
    return p->fold && *code >= 0x80 && *code < ND_CHAR_CODES
               ? nd_regex_refuse_part(p, from, "is not supported where case is ignored")
               : ND_OK;
}

/* A character, a range or an escape. `begins`: nothing of the class stands before it. */
static nd_status read_class_item(nd_regex_parser *p, nd_char_set *set, bool begins)
{
    const size_t from = p->at;
    const bool dash = nd_regex_peek(p) == '-';
    uint32_t low, high;
    ND_TRY(nd_regex_read_char(p, true, set, &low));
    if (dash && !begins && nd_regex_peek(p) != ']') {
        return nd_regex_refuse_part(p, from,
                                    "is not clear in a class; write \\- for the character");
    }
    if (low == ND_CHAR_CODES) {
        return ND_OK;
    }
    high = low;
    if (!dash && nd_regex_peek(p) == '-' && p->at + 1 < p->size && p->pattern[p->at + 1] != ']') {
        p->at++;
        if (strchr("[&-", nd_regex_peek(p))) {
            return nd_regex_refuse_part(p, from, "is not clear in a class");
        }
        ND_TRY(nd_regex_read_char(p, true, set, &high));
        if (high == ND_CHAR_CODES || high < low) {
            return nd_regex_refuse_part(p, from, "is no range");
        }
    }
    nd_char_set_add_range(set, low, high);
    return ND_OK;
}

/* A class in a class. */
static nd_status read_inner_class(nd_regex_parser *p, nd_char_set *set)
{
    nd_char_set *inner;
    const size_t from = p->at++;
    if (p->fold || nd_regex_peek(p) == ':') {
        return nd_regex_refuse_part(p, from, "is not supported in a class");
    }
    ND_TRY(ND_ALLOC(1, &inner));
    nd_status status = nd_regex_read_class(p, inner);
    nd_char_set_add(set, inner);
    free(inner);
    return status;
}

/* What stands up to an '&&' or to the closing bracket. */
static nd_status read_class_part(nd_regex_parser *p, nd_char_set *set, bool begins)
{
    for (bool empty = true; p->at < p->size; empty = false, begins = false) {
        const bool meets = p->size - p->at >= 2 && memcmp(p->pattern + p->at, "&&", 2) == 0;
        if (nd_regex_peek(p) == ']' || meets) {
            return empty || (meets && p->fold)
                       ? nd_regex_refuse_part(p, p->at, "is not supported at this place of a class")
                       : ND_OK;
        }
        ND_TRY(nd_regex_peek(p) == '[' ? read_inner_class(p, set)
                                       : read_class_item(p, set, begins));
    }
    return nd_regex_refuse(p->name, p->pattern, p->size, "a class has no end");
}

/* A class behind its opening bracket. The set is empty before. */
nd_status nd_regex_read_class(nd_regex_parser *p, nd_char_set *set)
{
    nd_char_set *kept;
    nd_status status;
    const bool others = nd_regex_take(p, "^");
    bool begins = true;
    if (++p->depth > ND_REGEX_DEPTH_MAX) {
        return nd_regex_refuse_part(p, p->at - 1, "is nested too deeply");
    }
    ND_TRY(ND_ALLOC(1, &kept));
    nd_char_set_invert(kept);
    do {
        memset(set, 0, sizeof *set);
        status = read_class_part(p, set, begins);
        nd_char_set_keep(kept, set);
        begins = false;
    } while (status == ND_OK && nd_regex_take(p, "&&"));
    memcpy(set, kept, sizeof *set);
    free(kept);
    p->at++;
    p->depth--;
    if (p->fold) {
        nd_char_set_fold(set);
    }
    if (others) {
        nd_char_set_invert(set);
    }
    return status;
}
