// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/unicode.h"

#include <string.h>

#include "trainer/text/unicode_table.inc"

enum {
    BLOCK_SHIFT = 7, /* 128 code points in 64 bytes */
    BLOCK_BYTES = 64,
    CLASS_BITS = 3,
    WORD_BIT = 4,
    LAST_CODE = 0x10ffff
};

static unsigned bits_of(uint32_t code)
{
    if (code > LAST_CODE) {
        return 0;
    }
    const uint8_t *block = unicode_classes + unicode_blocks[code >> BLOCK_SHIFT] * BLOCK_BYTES;
    uint8_t two = block[(code & ((1 << BLOCK_SHIFT) - 1)) >> 1];
    return code & 1 ? two >> 4 : two & 15;
}

nd_char_class nd_char_class_of(uint32_t code)
{
    return (nd_char_class)(bits_of(code) & CLASS_BITS);
}

bool nd_char_is_word(uint32_t code)
{
    return bits_of(code) & WORD_BIT;
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
