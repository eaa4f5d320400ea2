// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/printable.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* Each character that nd_is_printable takes. */
static bool is_printable_code(unsigned code)
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
        if (length < 0 || !is_printable_code(code)) {
            return false;
        }
        text += length;
    }
    return true;
}

/* Copies a character of `length` bytes, or writes it as text; -1: one byte that is no character.
 * Returns how many bytes `out` got, at most ND_SHOWN_GROWTH, beside a NUL. */
static size_t put_unit(char *out, const char *bytes, int length, unsigned code, bool passes)
{
    if (length > 0 && (passes || is_printable_code(code))) {
        memcpy(out, bytes, (size_t)length);
        return (size_t)length;
    }
    return (size_t)sprintf(out, length > 1 ? "\\u%04x" : "\\x%02x", code);
}

void nd_escape(char *out, size_t size, const char *text, const char *keep)
{
    char form[16];
    size_t used = 0;
    while (*text) {
        unsigned code = (unsigned char)*text;
        int length = nd_utf8_decode(text, 4, &code);
        bool kept = length == 1 && strchr(keep, (int)code);
        bool named = length == 1 && !kept && (code == '\n' || code == '\t');
        size_t bytes = named ? (size_t)sprintf(form, code == '\n' ? "\\n" : "\\t")
                             : put_unit(form, text, length, code, kept);
        if (used + bytes >= size) {
            break;
        }
        memcpy(out + used, form, bytes);
        used += bytes;
        text += length > 0 ? length : 1;
    }
    out[used] = '\0';
}

/* The one sequence that passes: the progress bar erases the rest of its line with it. */
static const char erase[] = "\033[K";

/* The number of held bytes that are the next unit: the sequence, a character, or a byte that is
 * part of neither. 0: it depends on the bytes that follow. */
static int unit_length(const nd_shown *shown, unsigned *code)
{
    size_t count = (size_t)shown->count, whole = sizeof erase - 1;
    *code = (unsigned char)shown->held[0];
    if (shown->held[0] == erase[0] && !shown->text_only) {
        bool begins = memcmp(shown->held, erase, count < whole ? count : whole) == 0;
        return !begins ? 1 : count < whole ? 0 : (int)whole;
    }
    return nd_utf8_decode(shown->held, count, code);
}

/* Shows what is held as far as it is decided, or all of it. */
static size_t release(nd_shown *shown, bool all, char *out)
{
    size_t used = 0;
    while (shown->count > 0) {
        unsigned code;
        int length = unit_length(shown, &code);
        if (length == 0 && !all) {
            break;
        }
        bool passes = shown->held[0] == erase[0]
                          ? length > 1
                          : code == '\n' || code == '\t' || (code == '\r' && !shown->text_only);
        used += put_unit(out + used, shown->held, length == 0 ? -1 : length, code, passes);
        int gone = length > 0 ? length : 1;
        shown->count -= gone;
        memmove(shown->held, shown->held + gone, (size_t)shown->count);
    }
    return used;
}

size_t nd_shown_filter(nd_shown *shown, const char *bytes, size_t count, char *out)
{
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        shown->held[shown->count++] = bytes[i];
        used += release(shown, false, out + used);
    }
    return bytes ? used : release(shown, true, out);
}

/* Standard output. */

static nd_shown standard_output = {.text_only = true};

bool nd_stdout_write(const char *bytes, size_t count)
{
    while (count > 0) {
        ssize_t n = write(STDOUT_FILENO, bytes, count);
        if (n < 0 && errno == EAGAIN) { /* another process made it so; it waits as others do */
            poll(&(struct pollfd){.fd = STDOUT_FILENO, .events = POLLOUT}, 1, -1);
            continue;
        }
        if (n == 0 || (n < 0 && errno != EINTR)) {
            return false;
        }
        bytes += n > 0 ? n : 0;
        count -= n > 0 ? (size_t)n : 0;
    }
    return true;
}

static ssize_t write_shown(void *cookie, const char *bytes, size_t count)
{
    enum { PART = 1024 };
    char text[ND_SHOWN_GROWTH * PART + ND_SHOWN_HELD];
    for (size_t at = 0; at < count; at += PART) {
        const size_t part = count - at < PART ? count - at : PART;
        if (!nd_stdout_write(text, nd_shown_filter(cookie, bytes + at, part, text))) {
            return 0; /* the stream has an error then */
        }
    }
    return (ssize_t)count;
}

static void flush_rest(void)
{
    char rest[ND_SHOWN_HELD];
    fflush(stdout);
    (void)nd_stdout_write(rest, nd_shown_filter(&standard_output, NULL, 0, rest));
}

void nd_shown_guard_terminal(void)
{
    const cookie_io_functions_t functions = {.write = write_shown};
    FILE *guarded = isatty(STDOUT_FILENO) ? fopencookie(&standard_output, "w", functions) : NULL;
    if (guarded && atexit(flush_rest) == 0) {
        setvbuf(guarded, NULL, _IOLBF, BUFSIZ);
        stdout = guarded;
    }
}
