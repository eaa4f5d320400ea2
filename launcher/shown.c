// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <string.h>

#include "launcher/launcher.h"

/* The one sequence that passes: the progress bar erases the rest of its line with it. */
static const char erase[] = "\033[K";

/* Whether the byte continues what is held, which then either waits for more or is complete. */
static bool continues(const nd_shown *shown, unsigned char byte)
{
    return shown->held[0] == erase[0] ? byte == (unsigned char)erase[shown->count]
                                      : byte >= 0x80 && byte < 0xa0;
}

static bool is_control(unsigned char byte)
{
    return (byte < 0x20 && byte != '\n' && byte != '\r' && byte != '\t') || byte == 0x7f;
}

/* The held bytes turn out to be no sequence that passes; an escape becomes text. */
static size_t release(nd_shown *shown, char *out)
{
    size_t used = 0;
    for (int i = 0; i < shown->count; i++) {
        unsigned char byte = (unsigned char)shown->held[i];
        used += is_control(byte) ? (size_t)sprintf(out + used, "\\x%02x", byte)
                                 : (size_t)sprintf(out + used, "%c", byte);
    }
    shown->count = 0;
    return used;
}

static size_t complete(nd_shown *shown, unsigned char byte, char *out)
{
    shown->count = 0;
    if (shown->held[0] != erase[0]) {
        return (size_t)sprintf(out, "\\u%04x", byte); /* C1 controls: C2 80 to C2 9F in UTF-8 */
    }
    memcpy(out, erase, sizeof erase - 1);
    return sizeof erase - 1;
}

size_t nd_shown_filter(nd_shown *shown, const char *bytes, size_t count, char *out)
{
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        unsigned char byte = (unsigned char)bytes[i];
        bool last = shown->count > 0 &&
                    (shown->held[0] != erase[0] || shown->count == (int)sizeof erase - 2);
        if (shown->count > 0 && continues(shown, byte) && last) {
            used += complete(shown, byte, out + used);
            continue;
        }
        if (shown->count > 0 && !continues(shown, byte)) {
            used += release(shown, out + used);
        }
        if (shown->count > 0 || byte == (unsigned char)erase[0] || byte == 0xc2) {
            shown->held[shown->count++] = (char)byte;
        } else if (is_control(byte)) {
            used += (size_t)sprintf(out + used, "\\x%02x", byte);
        } else {
            out[used++] = (char)byte;
        }
    }
    return used;
}

size_t nd_shown_end(nd_shown *shown, char *out)
{
    return release(shown, out);
}
