// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/parts.h"
#include "trainer/text/unicode.h"

enum { INERT_BELOW = 0x300 /* lower characters stay as they are, and none joins another */ };

/* The first character that normal form C may change, or that may join one before it. */
static size_t inert_end(const uint8_t *text, size_t size)
{
    for (size_t at = 0; at < size;) {
        if (text[at] < 0x80) {
            at++;
            continue;
        }
        nd_char c = nd_char_at(text + at);
        if (c.code >= INERT_BELOW) {
            return at;
        }
        at += (size_t)c.bytes;
    }
    return size;
}

/* Replaces a byte by at most 8 others, as a blank by its mark. Every byte is written as 8, and the
 * next one overwrites what is too much, so that no branch depends on where the hits are. */
static nd_status replace_byte(const nd_rewrite *step, const uint8_t *text, size_t size,
                              nd_bytes *out)
{
    const uint8_t from = (uint8_t)step->from[0];
    const size_t to_size = step->to_size;
    uint64_t to = 0;
    size_t hits = 0;
    memcpy(&to, step->to, to_size);
    for (size_t i = 0; i < size; i++) {
        hits += text[i] == from;
    }
    ND_TRY(nd_bytes_reserve(out, out->count + size + hits * to_size + sizeof to));
    uint8_t *p = out->data + out->count;
    for (size_t i = 0; i < size; i++) {
        const bool hit = text[i] == from;
        const uint64_t bytes = hit ? to : text[i]; /* little-endian: the first byte is the lowest */
        memcpy(p, &bytes, sizeof bytes);
        p += hit ? to_size : 1;
    }
    out->count = (size_t)(p - out->data);
    return ND_OK;
}

static nd_status replace_all(const nd_rewrite *step, const uint8_t *text, size_t size,
                             nd_bytes *out)
{
    const uint8_t *end = text + size;
    if (step->from_size == 1 && step->to_size <= sizeof(uint64_t)) {
        return replace_byte(step, text, size, out);
    }
    while (text < end) {
        const uint8_t *hit = memmem(text, (size_t)(end - text), step->from, step->from_size);
        ND_TRY(nd_bytes_add(out, text, (size_t)((hit ? hit : end) - text)));
        if (!hit) {
            break;
        }
        ND_TRY(nd_bytes_add(out, step->to, step->to_size));
        text = hit + step->from_size;
    }
    return ND_OK;
}

nd_status nd_text_rewrite(const nd_rewrite *steps, int count, const uint8_t *text, size_t size,
                          nd_bytes buffers[2], const uint8_t **out, size_t *out_size)
{
    for (int i = 0; i < count && size > 0; i++) {
        nd_bytes *to = text == buffers[0].data ? &buffers[1] : &buffers[0];
        to->count = 0;
        if (steps[i].compose) {
            if (inert_end(text, size) == size) {
                continue;
            }
            ND_TRY(nd_text_normal_form(text, size, to));
        } else if (steps[i].from) {
            ND_TRY(replace_all(&steps[i], text, size, to));
        } else {
            ND_TRY(nd_bytes_add(to, steps[i].to, steps[i].to_size));
            ND_TRY(nd_bytes_add(to, text, size));
        }
        text = to->data;
        size = to->count;
    }
    *out = text;
    *out_size = size;
    return ND_OK;
}
