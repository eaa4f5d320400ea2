// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/scan.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

const char *nd_scan_number(const char *text, const char *end, double *out)
{
    static const double powers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                    1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                    1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    const char *p = text;
    bool negative = p < end && *p == '-';
    uint64_t digits = 0;
    int scale = 0, kept = 0;
    p += negative;
    const char *first = p;
    for (bool fraction = false; p < end; p++) {
        if (*p == '.' && !fraction && p > first) {
            fraction = true;
            continue;
        }
        if (*p < '0' || *p > '9') {
            break;
        }
        if (kept < 18) { /* further digits are below the precision of a double */
            digits = digits * 10 + (uint64_t)(*p - '0');
            kept += digits > 0;
            scale -= fraction;
        } else {
            scale += !fraction;
        }
    }
    if (p == first || p[-1] == '.') {
        return NULL;
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
        int exponent = 0;
        bool down = ++p < end && *p == '-';
        p += p < end && (*p == '-' || *p == '+');
        const char *begin = p;
        for (; p < end && *p >= '0' && *p <= '9'; p++) {
            exponent = exponent < 10000 ? exponent * 10 + (*p - '0') : exponent;
        }
        if (p == begin) {
            return NULL;
        }
        scale += down ? -exponent : exponent;
    }
    double value = (double)digits;
    if (scale < -22 || scale > 22) { /* in two steps, so that subnormal results are not lost */
        value = value * pow(10, scale / 2) * pow(10, scale - scale / 2);
    } else {
        value = scale < 0 ? value / powers[-scale] : value * powers[scale];
    }
    *out = negative ? -value : value;
    return p;
}

const char *nd_scan_blanks(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r')) {
        p++;
    }
    return p;
}

/* From behind the opening quote to behind the closing one. */
static const char *skip_string(const char *p, const char *end)
{
    for (; p < end && *p != '"'; p++) {
        p += *p == '\\';
    }
    return p < end ? p + 1 : NULL;
}

const char *nd_scan_value(const char *p, const char *end)
{
    int depth = 0;
    while (p < end) {
        char c = *p++;
        if (c == '"') {
            p = skip_string(p, end);
            if (!p) {
                return NULL;
            }
        }
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        if (depth < 0) {
            return NULL;
        }
        bool ends = p >= end || *p == ',' || *p == '}' || *p == ']';
        if (depth == 0 && ends) {
            return p;
        }
    }
    return NULL;
}

bool nd_scan_has(const char *p, const char *end, const char *word, size_t length)
{
    return (size_t)(end - p) >= length && memcmp(p, word, length) == 0;
}

const char *nd_scan_amount(const char *p, const char *end, double *out)
{
    if (p < end && *p == 'n') {
        *out = NAN;
        return nd_scan_has(p, end, "null", 4) ? p + 4 : NULL;
    }
    return nd_scan_number(p, end, out);
}

/* The key whose name begins at p and the quote behind it; -1: none. The one at `guess` first. */
static int find_key(const nd_scan_object *o, int guess, const char *p, const char *end)
{
    for (int i = 0; i < o->key_count; i++) {
        int k = guess + i < o->key_count ? guess + i : guess + i - o->key_count;
        const nd_scan_key *key = &o->keys[k];
        if ((size_t)(end - p) > key->length && p[key->length] == '"' &&
            memcmp(p, key->name, key->length) == 0) {
            return k;
        }
    }
    return -1;
}

const char *nd_scan_members(const nd_scan_object *o, const char *p, const char *end)
{
    int guess = 0;
    if (p >= end || *p != '{') {
        return NULL;
    }
    p = nd_scan_blanks(p + 1, end);
    if (p < end && *p == '}') {
        return p + 1;
    }
    while (p < end && *p == '"') {
        int k = find_key(o, guess, p + 1, end);
        nd_scan_member member = {k < 0 ? -1 : o->keys[k].meaning, p + 1, 0};
        p = k >= 0 ? p + 2 + o->keys[k].length : skip_string(p + 1, end);
        if (!p) {
            return NULL;
        }
        member.length = (size_t)(p - 1 - member.name);
        p = nd_scan_blanks(p, end);
        if (p >= end || *p != ':') {
            return NULL;
        }
        p = o->read(o->context, &member, nd_scan_blanks(p + 1, end), end);
        p = p ? nd_scan_blanks(p, end) : NULL;
        if (!p || p >= end || (*p != ',' && *p != '}')) {
            return NULL;
        }
        if (*p == '}') {
            return p + 1;
        }
        p = nd_scan_blanks(p + 1, end);
        guess = k >= 0 && k + 1 < o->key_count ? k + 1 : 0;
    }
    return NULL;
}
