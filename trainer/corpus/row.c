// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/row.h"

#include <string.h>

#include "runtime/base/text.h"
#include "trainer/text/unicode.h"

enum { KEY_BYTES_MAX = 64, UNICODE_ESCAPE_BYTES = 6 /* \u0041 */ };

typedef struct scan {
    const uint8_t *p, *end;
    const char *fault; /* NULL: none yet */
} scan;

static bool fail(scan *s, const char *fault)
{
    s->fault = fault;
    return false;
}

/* The next byte that is not white space; 0 at the end, which no value begins with. */
static uint8_t peek(scan *s)
{
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\t' || *s->p == '\r' || *s->p == '\n')) {
        s->p++;
    }
    return s->p < s->end ? *s->p : 0;
}

/* The code of "\uXXXX" at p; -1 when that is not there. */
static int32_t unicode_at(const uint8_t *p, const uint8_t *end)
{
    int32_t code = 0;
    if (end - p < UNICODE_ESCAPE_BYTES || p[0] != '\\' || p[1] != 'u') {
        return -1;
    }
    for (int i = 2; i < UNICODE_ESCAPE_BYTES; i++) {
        int digit = nd_hex_digit(p[i]);
        if (digit < 0) {
            return -1;
        }
        code = code * 16 + digit;
    }
    return code;
}

/* The first quote, backslash or control character. In each byte of eight, the high bit is set where
 * the byte is below a limit of at most 0x80; bytes above the first such one may be wrong. */
static const uint8_t *plain_end(const uint8_t *p, const uint8_t *end)
{
    const uint64_t ones = 0x0101010101010101u, high = ones << 7;
    for (uint64_t eight, hits; end - p >= 8; p += 8) {
        memcpy(&eight, p, sizeof eight);
        const uint64_t quotes = eight ^ ones * '"', slashes = eight ^ ones * '\\';
        hits = (((eight - ones * 0x20) & ~eight) | ((quotes - ones) & ~quotes) |
                ((slashes - ones) & ~slashes)) &
               high;
        if (hits) {
            return p + (__builtin_ctzll(hits) >> 3);
        }
    }
    while (p < end && *p >= 0x20 && *p != '"' && *p != '\\') {
        p++;
    }
    return p;
}

/* From an opening quote to behind the closing one. */
static bool scan_string(scan *s, nd_row_field *out)
{
    const uint8_t *begin = ++s->p;
    bool escaped = false;
    for (;;) {
        s->p = plain_end(s->p, s->end);
        if (s->p == s->end) {
            return fail(s, "a string does not end");
        }
        if (*s->p == '"') {
            break;
        }
        if (*s->p != '\\') {
            return fail(s, "a control character in a string must be escaped");
        }
        escaped = true;
        bool is_short =
            s->end - s->p >= 2 && s->p[1] != '\0' && strchr("\"\\/bfnrt", s->p[1]) != NULL;
        if (!is_short && unicode_at(s->p, s->end) < 0) {
            return fail(s, "a bad escape in a string");
        }
        s->p += is_short ? 2 : UNICODE_ESCAPE_BYTES;
    }
    out->kind = ND_ROW_STRING;
    out->begin = begin;
    out->size = (size_t)(s->p - begin);
    out->escaped = escaped;
    out->empty = out->size == 0;
    s->p++;
    return true;
}

static bool scan_digits(scan *s)
{
    const uint8_t *begin = s->p;
    while (s->p < s->end && *s->p >= '0' && *s->p <= '9') {
        s->p++;
    }
    return s->p > begin;
}

static bool scan_word(scan *s, const char *word)
{
    size_t size = strlen(word);
    if ((size_t)(s->end - s->p) < size || memcmp(s->p, word, size) != 0) {
        return false;
    }
    s->p += size;
    return true;
}

static bool scan_number(scan *s)
{
    s->p += *s->p == '-';
    if (scan_word(s, "Infinity")) {
        return true;
    }
    const uint8_t *begin = s->p;
    bool good = scan_digits(s) && (*begin != '0' || s->p - begin == 1);
    if (good && s->p < s->end && *s->p == '.') {
        s->p++;
        good = scan_digits(s);
    }
    if (good && s->p < s->end && (*s->p | 0x20) == 'e') {
        s->p++;
        s->p += s->p < s->end && (*s->p == '+' || *s->p == '-');
        good = scan_digits(s);
    }
    return good || fail(s, "a bad number");
}

static bool scan_members(scan *s, uint8_t close, int depth, nd_row_field *fields, int count);

/* Any value, with what is in it; fills all of *out but its key. */
static bool scan_value(scan *s, int depth, nd_row_field *out)
{
    const uint8_t c = peek(s);
    out->kind = c == '[' ? ND_ROW_ARRAY : ND_ROW_OTHER;
    out->begin = s->p;
    out->escaped = out->empty = false;
    if (c == '"') {
        return scan_string(s, out);
    }
    if (s->p == s->end) {
        return fail(s, "the line ends within a value");
    }
    if (c == '{' || c == '[') {
        const uint8_t close = c == '{' ? '}' : ']';
        if (depth == ND_ROW_DEPTH_MAX) {
            return fail(s, "values are nested too deeply");
        }
        s->p++;
        out->empty = peek(s) == close;
        if (!scan_members(s, close, depth + 1, NULL, 0)) {
            return false;
        }
    } else if (c == '-' || (c >= '0' && c <= '9')) {
        if (!scan_number(s)) {
            return false;
        }
    } else {
        out->empty = scan_word(s, "null");
        if (!out->empty && !scan_word(s, "true") && !scan_word(s, "false") &&
            !scan_word(s, "NaN") && !scan_word(s, "Infinity")) {
            return fail(s, "a value is expected");
        }
    }
    out->size = (size_t)(s->p - out->begin);
    return true;
}

/* Decodes a string that scan_string has accepted; the text is not longer than its writing. */
static size_t unescape(const uint8_t *p, const uint8_t *end, uint8_t *out, int64_t *lone)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const uint8_t *begin = out;
    for (;;) {
        const uint8_t *slash = memchr(p, '\\', (size_t)(end - p));
        const size_t n = (size_t)((slash ? slash : end) - p);
        memcpy(out, p, n);
        out += n;
        if (!slash) {
            return (size_t)(out - begin);
        }
        p = slash;
        int32_t code = unicode_at(p, end);
        if (code < 0) {
            *out++ = (uint8_t)to[strchr(from, p[1]) - from];
            p += 2;
            continue;
        }
        p += UNICODE_ESCAPE_BYTES;
        if (code >= 0xd800 && code < 0xe000) {
            const int32_t low = code < 0xdc00 ? unicode_at(p, end) : -1;
            const bool pair = low >= 0xdc00 && low < 0xe000;
            p += pair ? UNICODE_ESCAPE_BYTES : 0;
            code = pair ? 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00) : 0xfffd;
            *lone += !pair;
        }
        out += nd_utf8_put(out, (uint32_t)code);
    }
}

static bool is_key(const nd_row_field *found, const char *key)
{
    uint8_t text[KEY_BYTES_MAX * UNICODE_ESCAPE_BYTES];
    int64_t lone = 0;
    const uint8_t *bytes = found->begin;
    size_t size = found->size;
    if (found->escaped && size <= sizeof text) {
        size = unescape(bytes, bytes + size, text, &lone);
        bytes = text;
    }
    return size == strlen(key) && memcmp(bytes, key, size) == 0;
}

/* A key, its colon and its value, which fills the field of this key if there is one. */
static bool scan_member(scan *s, int depth, nd_row_field *fields, int count)
{
    nd_row_field key = {0}, value;
    int i = 0;
    if (peek(s) != '"') {
        return fail(s, "a key in quotes is expected");
    }
    if (!scan_string(s, &key)) {
        return false;
    }
    if (peek(s) != ':') {
        return fail(s, "a colon is expected");
    }
    s->p++;
    if (!scan_value(s, depth, &value)) {
        return false;
    }
    while (i < count && fields[i].key && !is_key(&key, fields[i].key)) {
        i++;
    }
    if (i < count && (fields[i].key || fields[i].kind == ND_ROW_ABSENT)) {
        value.key = fields[i].key;
        fields[i] = value.key ? value : key;
    }
    return true;
}

/* Scans a list or an object, from behind its opening bracket to behind the closing one. */
static bool scan_members(scan *s, uint8_t close, int depth, nd_row_field *fields, int count)
{
    bool more = peek(s) != close;
    s->p += !more;
    while (more) {
        nd_row_field element;
        if (close == '}' ? !scan_member(s, depth, fields, count)
                         : !scan_value(s, depth, &element)) {
            return false;
        }
        const uint8_t c = peek(s);
        if (c != ',' && c != close) {
            return fail(s, close == '}' ? "a comma or a closing brace is expected"
                                        : "a comma or a closing bracket is expected");
        }
        s->p++;
        more = c == ',';
    }
    return true;
}

const char *nd_row_scan(const uint8_t *line, size_t size, nd_row_field *fields, int count,
                        size_t *column)
{
    scan s = {.p = line, .end = line + size};
    for (int i = 0; i < count; i++) {
        fields[i].kind = ND_ROW_ABSENT;
        fields[i].empty = true;
    }
    if (peek(&s) != '{') {
        s.fault = peek(&s) == '[' ? "it is a JSON array; one object a line is needed"
                                  : "it is no JSON object";
    } else {
        s.p++;
        if (scan_members(&s, '}', 0, fields, count)) {
            (void)peek(&s);
            s.fault = s.p < s.end ? "something stands behind the object" : NULL;
        }
    }
    *column = (size_t)(s.p - line) + 1;
    return s.fault;
}

const char *nd_row_next(const uint8_t *list, size_t size, size_t *at, nd_row_field *element)
{
    scan s = {.p = list + *at, .end = list + size};
    const bool first = *at == 0;
    const uint8_t c = peek(&s);
    *element = (nd_row_field){0};
    if (first ? c != '[' : c != ',' && c != ']') {
        return first ? "it is no list" : "a comma or a closing bracket is expected";
    }
    s.p++;
    if (c == ']' || (first && peek(&s) == ']')) {
        s.p += first;
        (void)peek(&s);
        return s.p == s.end ? NULL : "something stands behind the list";
    }
    (void)scan_value(&s, 0, element);
    *at = (size_t)(s.p - list);
    return s.fault;
}

nd_status nd_row_text(nd_row_field *field, nd_bytes *buffer, int64_t *lone)
{
    if (field->escaped) {
        ND_TRY(nd_bytes_reserve(buffer, field->size));
        field->size = unescape(field->begin, field->begin + field->size, buffer->data, lone);
        field->begin = buffer->data;
        field->escaped = false;
    }
    return ND_OK;
}
