// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/printable.h"

#include <stdio.h>
#include <string.h>

int nd_utf8_decode(const char *text, size_t count, unsigned *code)
{
    static const unsigned char first_mask[] = {0x7f, 0x1f, 0x0f, 0x07};
    static const unsigned least[] = {0, 0x80, 0x800, 0x10000};
    const unsigned char *p = (const unsigned char *)text;
    int more = *p < 0x80    ? 0
               : *p > 0xf4  ? -1
               : *p >= 0xf0 ? 3
               : *p >= 0xe0 ? 2
               : *p >= 0xc2 ? 1
                            : -1;
    if (more < 0) {
        return -1;
    }
    unsigned value = *p & first_mask[more];
    for (int i = 1; i <= more; i++) {
        if ((size_t)i == count) {
            return 0;
        }
        if ((p[i] & 0xc0) != 0x80) {
            return -1;
        }
        value = value << 6 | (p[i] & 0x3f);
    }
    if (value < least[more] || value > 0x10ffff || (value >= 0xd800 && value < 0xe000)) {
        return -1;
    }
    *code = value;
    return more + 1;
}

bool nd_is_printable_code(unsigned code)
{
    bool control = code < 0x20 || (code >= 0x7f && code < 0xa0);
    bool line_end = code == 0x2028 || code == 0x2029;
    bool direction = (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
    bool no_character = code == 0xfeff || code == 0xfffe || code == 0xffff;
    return !control && !line_end && !direction && !no_character;
}

bool nd_is_printable(const char *text)
{
    unsigned code;
    while (*text) {
        int length = nd_utf8_decode(text, 4, &code); /* which ends at the text's NUL */
        if (length < 0 || !nd_is_printable_code(code)) {
            return false;
        }
        text += length;
    }
    return true;
}

void nd_escape(char *out, size_t size, const char *text, const char *keep)
{
    char form[16];
    size_t used = 0;
    while (*text) {
        unsigned code = (unsigned char)*text;
        int length = nd_utf8_decode(text, 4, &code);
        bool kept = length == 1 && strchr(keep, (int)code);
        if (length > 0 && (nd_is_printable_code(code) || kept)) {
            memcpy(form, text, (size_t)length);
            form[length] = '\0';
        } else if (length == 1 && (code == '\n' || code == '\t')) {
            snprintf(form, sizeof form, code == '\n' ? "\\n" : "\\t");
        } else {
            snprintf(form, sizeof form, length > 1 ? "\\u%04x" : "\\x%02x", code);
        }
        size_t bytes = strlen(form);
        if (used + bytes >= size) {
            break;
        }
        memcpy(out + used, form, bytes);
        used += bytes;
        text += length > 0 ? length : 1;
    }
    out[used] = '\0';
}
