// SPDX-License-Identifier: Apache-2.0
/*
 * Unicode normal form C (Unicode standard, annex 15), with the tables of the package tokenizers.
 *
 * A character that starts something and that nothing changes, is copied. Others are gathered with
 * the one before them into a run: it is decomposed, its marks are sorted by class with a stable
 * counting sort, and it is composed again. The time is linear, also for a run of marks alone.
 */
#include "trainer/text/parts.h"
#include "trainer/text/unicode.h"

#include "trainer/text/normal_form_table.inc"

enum {
    BLOCK_SHIFT = 7, /* 128 code points in 128 bytes */
    ACTIVE = 255,    /* a starter that joins what is before it, or a character that changes */
    PARTS_MAX = 4,
    HANGUL = 0xac00, /* syllables: leading consonant, vowel, trailing consonant or none */
    HANGUL_END = 0xd7a4,
    LEADING = 0x1100,
    VOWEL = 0x1161,
    BEFORE_TRAILING = 0x11a7,
    LEADINGS = 19,
    VOWELS = 21,
    TRAILINGS = 28 /* with none */
};

typedef struct normal_char {
    uint32_t code;
    uint32_t class; /* of a mark: 1 to NORMAL_FORM_CLASSES; else 0 */
} normal_char;

typedef struct run {
    normal_char *list, *sorted;
    size_t count, room, sorted_room;
} run;

static uint8_t class_of(uint32_t code)
{
    const uint32_t block = normal_form_blocks[code >> BLOCK_SHIFT];
    return normal_form_classes[(block << BLOCK_SHIFT) + (code & ((1 << BLOCK_SHIFT) - 1))];
}

static nd_status add_char(run *r, uint32_t code)
{
    void *place = r->list;
    nd_status status = nd_array_reserve(&place, &r->room, r->count + 1, sizeof *r->list);
    r->list = place;
    ND_TRY(status);
    const uint8_t class = class_of(code);
    r->list[r->count++] = (normal_char){code, class == ACTIVE ? 0 : class};
    return ND_OK;
}

/* Decomposition. */

static const uint32_t *find_parts(uint32_t code)
{
    size_t low = 0, high = sizeof normal_form_decompositions / sizeof *normal_form_decompositions;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (normal_form_decompositions[middle][0] < code) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    const uint32_t *row = normal_form_decompositions[low];
    return low < sizeof normal_form_decompositions / sizeof *normal_form_decompositions &&
                   row[0] == code
               ? row + 1
               : NULL;
}

static nd_status add_parts(run *r, uint32_t code)
{
    if (code >= HANGUL && code < HANGUL_END) {
        const uint32_t place = code - HANGUL, trailing = place % TRAILINGS;
        ND_TRY(add_char(r, LEADING + place / TRAILINGS / VOWELS));
        ND_TRY(add_char(r, VOWEL + place / TRAILINGS % VOWELS));
        return trailing ? add_char(r, BEFORE_TRAILING + trailing) : ND_OK;
    }
    const uint32_t *parts = find_parts(code);
    if (!parts) {
        return add_char(r, code);
    }
    for (int i = 0; i < PARTS_MAX && parts[i]; i++) {
        ND_TRY(add_char(r, parts[i]));
    }
    return ND_OK;
}

/* Marks in the order of their classes; those of one class stay in their order. */
static nd_status sort_marks(run *r, size_t begin, size_t end)
{
    size_t at[NORMAL_FORM_CLASSES + 2] = {0};
    void *place = r->sorted;
    nd_status status = nd_array_reserve(&place, &r->sorted_room, end - begin, sizeof *r->sorted);
    r->sorted = place;
    ND_TRY(status);
    for (size_t i = begin; i < end; i++) {
        at[r->list[i].class + 1]++;
    }
    for (int k = 1; k <= NORMAL_FORM_CLASSES; k++) {
        at[k + 1] += at[k];
    }
    for (size_t i = begin; i < end; i++) {
        r->sorted[at[r->list[i].class]++] = r->list[i];
    }
    memcpy(r->list + begin, r->sorted, (end - begin) * sizeof *r->list);
    return ND_OK;
}

static nd_status sort_all_marks(run *r)
{
    for (size_t begin = 0, end; begin < r->count; begin = end + 1) {
        bool sorted = true;
        for (end = begin; end < r->count && r->list[end].class > 0; end++) {
            sorted = sorted && (end == begin || r->list[end - 1].class <= r->list[end].class);
        }
        if (!sorted) {
            ND_TRY(sort_marks(r, begin, end));
        }
    }
    return ND_OK;
}

/* Composition. */

/* 0: the two stay two. */
static uint32_t find_composite(uint32_t first, uint32_t second)
{
    size_t low = 0, high = sizeof normal_form_compositions / sizeof *normal_form_compositions;
    if (first - LEADING < LEADINGS && second - VOWEL < VOWELS) {
        return HANGUL + ((first - LEADING) * VOWELS + second - VOWEL) * TRAILINGS;
    }
    if (first >= HANGUL && first < HANGUL_END && (first - HANGUL) % TRAILINGS == 0 &&
        second > BEFORE_TRAILING && second < BEFORE_TRAILING + TRAILINGS) {
        return first + second - BEFORE_TRAILING;
    }
    while (low < high) {
        size_t middle = (low + high) / 2;
        const uint32_t *row = normal_form_compositions[middle];
        if (row[0] == first && row[1] == second) {
            return row[2];
        }
        if (row[0] < first || (row[0] == first && row[1] < second)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return 0;
}

static void compose(run *r)
{
    size_t count = 0, starter = SIZE_MAX;
    int64_t before = -1; /* class of the character behind the starter; -1: there is none */
    for (size_t i = 0; i < r->count; i++) {
        const normal_char c = r->list[i];
        const uint32_t made =
            starter != SIZE_MAX && before < (int64_t)c.class ? find_composite(r->list[starter].code,
                                                                              c.code)
                                                             : 0;
        if (made) {
            r->list[starter].code = made;
            continue;
        }
        starter = c.class == 0 ? count : starter;
        before = c.class == 0 ? -1 : (int64_t)c.class;
        r->list[count++] = c;
    }
    r->count = count;
}

/* A text. */

static nd_status add_run(run *r, const uint8_t *text, size_t size, nd_bytes *out)
{
    r->count = 0;
    for (size_t at = 0; at < size;) {
        const nd_char c = nd_char_at(text + at);
        ND_TRY(add_parts(r, c.code));
        at += (size_t)c.bytes;
    }
    ND_TRY(sort_all_marks(r));
    compose(r);
    for (size_t i = 0; i < r->count; i++) {
        uint8_t bytes[4];
        ND_TRY(nd_bytes_add(out, bytes, (size_t)nd_utf8_put(bytes, r->list[i].code)));
    }
    return ND_OK;
}

/* The first character from `at` on that is not just copied, or the end; *begin is where its run
 * begins: with the character before it. */
static size_t find_run(const uint8_t *text, size_t size, size_t at, size_t *begin)
{
    *begin = at;
    while (at < size) {
        const nd_char c = nd_char_at(text + at);
        if (class_of(c.code) != 0) {
            return at;
        }
        *begin = at;
        at += (size_t)c.bytes;
    }
    *begin = size;
    return size;
}

static size_t run_end(const uint8_t *text, size_t size, size_t at)
{
    while (at < size) {
        const nd_char c = nd_char_at(text + at);
        if (class_of(c.code) == 0) {
            break;
        }
        at += (size_t)c.bytes;
    }
    return at;
}

nd_status nd_text_normal_form(const uint8_t *text, size_t size, nd_bytes *out)
{
    run r = {0};
    nd_status status = ND_OK;
    for (size_t done = 0, begin; status == ND_OK && done < size;) {
        size_t end = run_end(text, size, find_run(text, size, done, &begin));
        status = nd_bytes_add(out, text + done, begin - done);
        if (status == ND_OK && end > begin) {
            status = add_run(&r, text + begin, end - begin, out);
        }
        done = end;
    }
    free(r.list);
    free(r.sorted);
    return status;
}
