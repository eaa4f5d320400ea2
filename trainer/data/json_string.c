// SPDX-License-Identifier: Apache-2.0
/* Strings in the text of a JSON object, found and decoded without parsing the object. */
#include "trainer/data/formats.h"

#include <string.h>

#include "runtime/base/text.h"

/* The number of "uXXXX" at p; -1 when that is not there. */
static int32_t unicode_at(const uint8_t *p, const uint8_t *end)
{
    int32_t code = 0;
    if (end - p < 5 || *p != 'u') {
        return -1;
    }
    for (int i = 1; i < 5; i++) {
        int digit = nd_hex_digit(p[i]);
        if (digit < 0) {
            return -1;
        }
        code = code * 16 + digit;
    }
    return code;
}

static int put_utf8(int32_t code, uint8_t out[4])
{
    if (code < 0x80) {
        out[0] = (uint8_t)code;
        return 1;
    }
    int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3; /* bytes after the first */
    static const uint8_t first[] = {0, 0xc0, 0xe0, 0xf0};
    out[0] = (uint8_t)(first[more] | code >> (6 * more));
    for (int i = 1; i <= more; i++) {
        out[i] = (uint8_t)(0x80 | (code >> (6 * (more - i)) & 0x3f));
    }
    return more + 1;
}

/* An escape, whose backslash is before *p. */
static int decode_escape(const uint8_t **p, const uint8_t *end, uint8_t out[4])
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *at = *p < end && **p ? strchr(from, **p) : NULL;
    if (at) {
        out[0] = (uint8_t)to[at - from];
        (*p)++;
        return 1;
    }
    int32_t code = unicode_at(*p, end), low;
    if (code < 0) {
        return 0;
    }
    *p += 5;
    if (code >= 0xd800 && code < 0xdc00) { /* the first half of a pair */
        low = *p < end && **p == '\\' ? unicode_at(*p + 1, end) : -1;
        if (low < 0xdc00 || low > 0xdfff) {
            return 0;
        }
        *p += 6;
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    return put_utf8(code, out);
}

int nd_json_string_decode(const uint8_t **p, const uint8_t *end, uint8_t out[4])
{
    if (*p >= end || **p == '"' || **p < 0x20) {
        return 0;
    }
    uint8_t c = *(*p)++;
    if (c == '\\') {
        return decode_escape(p, end, out);
    }
    out[0] = c;
    return 1;
}

static const uint8_t *skip_space(const uint8_t *p, const uint8_t *end)
{
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n')) {
        p++;
    }
    return p;
}

/* Behind the closing quote of a string that begins at p, after its opening one. */
static const uint8_t *skip_string(const uint8_t *p, const uint8_t *end)
{
    while (p < end && *p != '"') {
        p += *p == '\\' && end - p > 1 ? 2 : 1;
    }
    return p < end ? p + 1 : end;
}

/* Behind a value: up to the comma or brace that follows it in its object. */
static const uint8_t *skip_value(const uint8_t *p, const uint8_t *end)
{
    int64_t depth = 0;
    while (p < end) {
        uint8_t c = *p;
        if (depth == 0 && (c == ',' || c == '}')) {
            break;
        }
        depth += c == '{' || c == '[';
        depth -= c == '}' || c == ']';
        p = c == '"' ? skip_string(p + 1, end) : p + 1;
    }
    return p;
}

/* Whether the string at *p, after its opening quote, is `key`; moves *p behind it. */
static bool read_key(const uint8_t **p, const uint8_t *end, const char *key)
{
    const uint8_t *begin = *p;
    uint8_t bytes[4];
    bool equal = true;
    for (int n; (n = nd_json_string_decode(p, end, bytes)) > 0;) {
        for (int i = 0; i < n; i++) {
            equal = equal && *key && (uint8_t)*key == bytes[i];
            key += equal;
        }
    }
    *p = skip_string(begin, end);
    return equal && *key == '\0';
}

const uint8_t *nd_json_string_find(const uint8_t *p, const uint8_t *end, const char *key)
{
    p = skip_space(p, end);
    while (p < end && (*p == '{' || *p == ',')) {
        p = skip_space(p + 1, end);
        if (p >= end || *p != '"') {
            return NULL;
        }
        p++;
        bool found = read_key(&p, end, key);
        p = skip_space(p, end);
        p = skip_space(p < end ? p + 1 : end, end); /* the colon */
        if (found) {
            return p < end && *p == '"' ? p + 1 : NULL;
        }
        p = skip_value(p, end);
    }
    return NULL;
}
