// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <utf8proc.h>

#include "trainer/text/parts.h"
#include "trainer/text/unicode.h"

/*
 * Unicode normal form C (Unicode standard, annex 15), by utf8proc.
 *
 * A character that nothing changes is copied. Others are gathered with the one before them into a
 * run, which utf8proc takes apart and puts together again. Between the two, marks are sorted by
 * class here: utf8proc sorts by exchanges, which takes hours for a megabyte of marks.
 */
enum { CODES = 0x110000, PARTS_MAX = 8, CLASSES = 256 };
enum { VOWEL = 0x1161, VOWELS_END = 0x1176, TRAILING = 0x11a8, TRAILINGS_END = 0x11c3 };

typedef struct run {
    int32_t *list, *sorted;
    size_t count, room, sorted_room;
} run;

/* A bit for each character that is a mark, changes alone, or may join the one before it. Made at
 * the first use, then constant. */
static uint8_t active[CODES / 8];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void set_active(int32_t code)
{
    active[code / 8] |= (uint8_t)(1 << code % 8);
}

static bool is_active(uint32_t code)
{
    return active[code / 8] >> code % 8 & 1;
}

static size_t take_apart(int32_t code, int32_t parts[PARTS_MAX])
{
    int bound = 0;
    const utf8proc_ssize_t n =
        utf8proc_decompose_char(code, parts, PARTS_MAX, UTF8PROC_DECOMPOSE, &bound);
    ND_ASSERT(n >= 0 && n <= PARTS_MAX);
    return (size_t)n;
}

static size_t compose(int32_t *list, size_t count)
{
    const utf8proc_ssize_t n =
        utf8proc_normalize_utf32(list, (utf8proc_ssize_t)count, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    ND_ASSERT(n >= 0);
    return (size_t)n;
}

static void make_active(void)
{
    for (int32_t code = 0; code < CODES; code++) {
        const utf8proc_property_t *property = utf8proc_get_property(code);
        if (property->combining_class) {
            set_active(code);
        }
        if (property->decomp_type || property->decomp_seqindex == UINT16_MAX) {
            continue;
        }
        int32_t parts[PARTS_MAX];
        const size_t count = take_apart(code, parts);
        for (size_t i = 1; i < count; i++) {
            set_active(parts[i]);
        }
        if (compose(parts, count) != 1 || parts[0] != code) {
            set_active(code);
        }
    }
    for (int32_t code = VOWEL; code < TRAILINGS_END; code++) {
        if (code < VOWELS_END || code >= TRAILING) {
            set_active(code); /* joins the part of a Hangul syllable before it */
        }
    }
}

/* Marks in the order of their classes; those of one class stay in their order. */
static nd_status sort_marks(run *r, size_t begin, size_t end)
{
    size_t at[CLASSES + 1] = {0};
    ND_TRY(ND_ARRAY_RESERVE(&r->sorted, &r->sorted_room, end - begin));
    for (size_t i = begin; i < end; i++) {
        at[utf8proc_get_property(r->list[i])->combining_class + 1]++;
    }
    for (int k = 0; k < CLASSES; k++) {
        at[k + 1] += at[k];
    }
    for (size_t i = begin; i < end; i++) {
        r->sorted[at[utf8proc_get_property(r->list[i])->combining_class]++] = r->list[i];
    }
    memcpy(r->list + begin, r->sorted, (end - begin) * sizeof *r->list);
    return ND_OK;
}

static nd_status sort_all_marks(run *r)
{
    size_t begin = 0; /* of the marks at hand */
    int before = 0;
    bool sorted = true;
    for (size_t i = 0; i <= r->count; i++) {
        const int class = i < r->count ? utf8proc_get_property(r->list[i])->combining_class : 0;
        if (class > 0) {
            sorted = sorted && before <= class;
            before = class;
            continue;
        }
        if (!sorted) {
            ND_TRY(sort_marks(r, begin, i));
        }
        begin = i + 1;
        before = 0;
        sorted = true;
    }
    return ND_OK;
}

static nd_status add_run(run *r, const uint8_t *text, size_t size, nd_bytes *out)
{
    r->count = 0;
    for (size_t at = 0; at < size;) {
        const nd_char c = nd_char_at(text + at);
        ND_TRY(ND_ARRAY_RESERVE(&r->list, &r->room, r->count + PARTS_MAX));
        r->count += take_apart((int32_t)c.code, r->list + r->count);
        at += (size_t)c.bytes;
    }
    ND_TRY(sort_all_marks(r));
    r->count = compose(r->list, r->count);
    for (size_t i = 0; i < r->count; i++) {
        uint8_t bytes[4];
        ND_TRY(nd_bytes_add(out, bytes, (size_t)nd_utf8_put(bytes, (uint32_t)r->list[i])));
    }
    return ND_OK;
}

/* The first active character from `at` on, or the end; *begin is where its run begins: with the
 * character before it. */
static size_t find_run(const uint8_t *text, size_t size, size_t at, size_t *begin)
{
    *begin = at;
    while (at < size) {
        const nd_char c = nd_char_at(text + at);
        if (is_active(c.code)) {
            return at;
        }
        *begin = at;
        at += (size_t)c.bytes;
    }
    *begin = size;
    return size;
}

nd_status nd_text_normal_form(const uint8_t *text, size_t size, nd_bytes *out)
{
    run r = {0};
    nd_status status = ND_OK;
    pthread_once(&once, make_active);
    for (size_t done = 0, begin; done < size;) {
        size_t end = find_run(text, size, done, &begin);
        while (end < size && is_active(nd_char_at(text + end).code)) {
            end += (size_t)nd_char_at(text + end).bytes;
        }
        ND_TRY_OUT(nd_bytes_add(out, text + done, begin - done));
        ND_TRY_OUT(end > begin ? add_run(&r, text + begin, end - begin, out) : ND_OK);
        done = end;
    }
out:
    free(r.list);
    free(r.sorted);
    return status;
}

/* The steps of a normalizer. */

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
