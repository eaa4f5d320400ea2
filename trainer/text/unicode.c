// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/unicode.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <utf8proc.h>

enum { CODES = 0x110000, CLASS_BITS = 3, IN_WORDS = 4 };

/* Two code points a byte, the lower one in the lower half. Made at the first use, then constant. */
static uint8_t classes[CODES / 2];
static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_bool made;

static nd_char_class class_of(uint32_t code, utf8proc_category_t category)
{
    if (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) {
        return ND_CHAR_LETTER;
    }
    if (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO) {
        return ND_CHAR_NUMBER;
    }
    const bool separates = category >= UTF8PROC_CATEGORY_ZS && category <= UTF8PROC_CATEGORY_ZP;
    return separates || (code >= '\t' && code <= '\r') || code == 0x85 ? ND_CHAR_SPACE
                                                                       : ND_CHAR_OTHER;
}

/* Alphabetic, marks, decimal numbers, connectors and joiners (Unicode's technical standard 18). Of
 * the alphabetic characters, only letters in circles and squares have another category. */
static bool is_word(uint32_t code, utf8proc_category_t category)
{
    const bool enclosed =
        (code >= 0x24b6 && code <= 0x24e9) || (code >= 0x1f130 && code <= 0x1f149) ||
        (code >= 0x1f150 && code <= 0x1f169) || (code >= 0x1f170 && code <= 0x1f189);
    return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_NL) ||
           category == UTF8PROC_CATEGORY_PC || enclosed || code == 0x200c || code == 0x200d;
}

static void make_classes(void)
{
    for (uint32_t code = 0; code < CODES; code++) {
        const utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)code);
        const unsigned bits =
            (unsigned)class_of(code, category) | (is_word(code, category) ? IN_WORDS : 0);
        classes[code / 2] |= (uint8_t)(bits << 4 * (code % 2));
    }
    made = true;
}

static unsigned bits_of(uint32_t code)
{
    if (!atomic_load_explicit(&made, memory_order_acquire)) {
        pthread_once(&once, make_classes);
    }
    return code < CODES ? classes[code / 2] >> 4 * (code % 2) & 15 : 0;
}

nd_char_class nd_char_class_of(uint32_t code)
{
    return (nd_char_class)(bits_of(code) & CLASS_BITS);
}

bool nd_char_is_word(uint32_t code)
{
    return bits_of(code) & IN_WORDS;
}

nd_char nd_char_at(const uint8_t *p)
{
    if (p[0] < 0x80) {
        return (nd_char){p[0], 1};
    }
    if (p[0] < 0xe0) {
        return (nd_char){(p[0] & 0x1fu) << 6 | (p[1] & 0x3fu), 2};
    }
    if (p[0] < 0xf0) {
        return (nd_char){(p[0] & 0x0fu) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu), 3};
    }
    return (nd_char){
        (p[0] & 0x07u) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu), 4};
}

nd_char nd_char_before(const uint8_t *p)
{
    do {
        p--;
    } while ((*p & 0xc0) == 0x80);
    return nd_char_at(p);
}

int nd_utf8_next(const uint8_t *p, size_t size)
{
    /* The second byte is limited further, so that there are no long forms, surrogates or codes
     * above U+10FFFF (Unicode standard, table 3-7). */
    uint8_t low = 0x80, high = 0xbf;
    int bytes;
    if (p[0] < 0x80) {
        return 1;
    } else if (p[0] >= 0xc2 && p[0] <= 0xdf) {
        bytes = 2;
    } else if (p[0] >= 0xe0 && p[0] <= 0xef) {
        bytes = 3;
        low = p[0] == 0xe0 ? 0xa0 : low;
        high = p[0] == 0xed ? 0x9f : high;
    } else if (p[0] >= 0xf0 && p[0] <= 0xf4) {
        bytes = 4;
        low = p[0] == 0xf0 ? 0x90 : low;
        high = p[0] == 0xf4 ? 0x8f : high;
    } else {
        return -1;
    }
    for (int i = 1; i < bytes; i++) {
        if ((size_t)i == size) {
            return 0;
        }
        if (p[i] < low || p[i] > high) {
            return -i;
        }
        low = 0x80;
        high = 0xbf;
    }
    return bytes;
}

size_t nd_utf8_valid(const uint8_t *p, size_t size)
{
    size_t at = 0;
    while (at < size) {
        uint64_t eight;
        if (size - at >= sizeof eight) {
            memcpy(&eight, p + at, sizeof eight);
            if (!(eight & 0x8080808080808080u)) {
                at += sizeof eight;
                continue;
            }
        }
        int n = nd_utf8_next(p + at, size - at);
        if (n <= 0) {
            break;
        }
        at += (size_t)n;
    }
    return at;
}

int nd_utf8_put(uint8_t *out, uint32_t code)
{
    if (code < 0x80) {
        out[0] = (uint8_t)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (uint8_t)(0xc0 | code >> 6);
        out[1] = (uint8_t)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (uint8_t)(0xe0 | code >> 12);
        out[1] = (uint8_t)(0x80 | (code >> 6 & 0x3f));
        out[2] = (uint8_t)(0x80 | (code & 0x3f));
        return 3;
    }
    out[0] = (uint8_t)(0xf0 | code >> 18);
    out[1] = (uint8_t)(0x80 | (code >> 12 & 0x3f));
    out[2] = (uint8_t)(0x80 | (code >> 6 & 0x3f));
    out[3] = (uint8_t)(0x80 | (code & 0x3f));
    return 4;
}
