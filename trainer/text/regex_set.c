// SPDX-License-Identifier: Apache-2.0
/* Sets of characters, by the tables of Oniguruma as `tokenizers` has it. */
#include "trainer/text/regex_parse.h"

#include "trainer/text/property_table.inc"

enum { CATEGORY_BITS = 31, CATEGORY_SHIFT = 5, NAME_MAX_BYTES = 32 };

bool nd_char_set_has(const nd_char_set *set, uint32_t code)
{
    return set->words[code / 64] >> code % 64 & 1;
}

void nd_char_set_add_range(nd_char_set *set, uint32_t first, uint32_t last)
{
    for (uint32_t code = first; code <= last;) {
        if (code % 64 == 0 && last - code >= 63) {
            set->words[code / 64] = UINT64_MAX;
            code += 64;
        } else {
            set->words[code / 64] |= UINT64_C(1) << code % 64;
            code++;
        }
    }
}

void nd_char_set_add(nd_char_set *set, const nd_char_set *other)
{
    for (int i = 0; i < ND_CHAR_SET_WORDS; i++) {
        set->words[i] |= other->words[i];
    }
}

void nd_char_set_keep(nd_char_set *set, const nd_char_set *other)
{
    for (int i = 0; i < ND_CHAR_SET_WORDS; i++) {
        set->words[i] &= other->words[i];
    }
}

void nd_char_set_invert(nd_char_set *set)
{
    for (int i = 0; i < ND_CHAR_SET_WORDS; i++) {
        set->words[i] = ~set->words[i];
    }
}

void nd_char_set_fold(nd_char_set *set)
{
    for (uint32_t low = 'a'; low <= 'z'; low++) {
        const uint32_t high = low - 'a' + 'A';
        const uint32_t third = low == 's' ? 0x17f : low == 'k' ? 0x212a : low;
        if (nd_char_set_has(set, low) || nd_char_set_has(set, high)) {
            nd_char_set_add_range(set, low, low);
            nd_char_set_add_range(set, high, high);
            nd_char_set_add_range(set, third, third);
        }
    }
}

/* Properties. */

/* Code points of the categories whose bits are set in `mask`, or all others. */
static void add_categories(nd_char_set *set, uint32_t mask, bool others)
{
    const size_t count = sizeof category_runs / sizeof *category_runs;
    for (size_t i = 0; i < count; i++) {
        const uint32_t first = category_runs[i] >> CATEGORY_SHIFT;
        uint32_t next = ND_CHAR_CODES;
        if (i + 1 < count) {
            next = category_runs[i + 1] >> CATEGORY_SHIFT;
        }
        if ((mask >> (category_runs[i] & CATEGORY_BITS) & 1) != others) {
            nd_char_set_add_range(set, first, next - 1);
        }
    }
}

/* Sorted ranges, or what is between them. */
static void add_ranges(nd_char_set *set, const uint32_t (*ranges)[2], size_t count, bool others)
{
    uint32_t free = 0; /* behind the last range */
    for (size_t i = 0; i < count; i++) {
        if (!others) {
            nd_char_set_add_range(set, ranges[i][0], ranges[i][1]);
        } else if (ranges[i][0] > free) {
            nd_char_set_add_range(set, free, ranges[i][0] - 1);
        }
        free = ranges[i][1] + 1;
    }
    if (others && free < ND_CHAR_CODES) {
        nd_char_set_add_range(set, free, ND_CHAR_CODES - 1);
    }
}

/* Categories whose short names begin with these letters; one or two of them. */
static uint32_t categories_of(const char *letters)
{
    const size_t size = strlen(letters);
    uint32_t mask = 0;
    for (size_t i = 0; size > 0 && size <= 2 && i < sizeof category_names / sizeof *category_names;
         i++) {
        const char *name = category_names[i];
        if (name[0] - 'A' + 'a' == letters[0] && (size == 1 || name[1] == letters[1])) {
            mask |= UINT32_C(1) << i;
        }
    }
    return mask;
}

/* The name in lower case without blanks, '-' and '_'; false: it is too long or not ASCII. */
static bool plain_name(const char *name, size_t size, char out[NAME_MAX_BYTES])
{
    size_t used = 0;
    for (size_t i = 0; i < size; i++) {
        const char c = name[i];
        if (c == ' ' || c == '-' || c == '_') {
            continue;
        }
        const bool upper = c >= 'A' && c <= 'Z';
        if ((!upper && (c < 'a' || c > 'z')) || used + 1 == NAME_MAX_BYTES) {
            return false;
        }
        out[used++] = upper ? (char)(c - 'A' + 'a') : c;
    }
    out[used] = '\0';
    return true;
}

bool nd_char_set_add_property(nd_char_set *set, const char *name, size_t size, bool others)
{
    static const char *const longer[][2] = {
        {"letter", "l"},    {"mark", "m"},   {"number", "n"},           {"punctuation", "p"},
        {"separator", "z"}, {"symbol", "s"}, {"uppercaseletter", "lu"}, {"lowercaseletter", "ll"}};
    char plain[NAME_MAX_BYTES];
    if (!plain_name(name, size, plain)) {
        return false;
    }
    for (size_t i = 0; i < sizeof longer / sizeof *longer; i++) {
        if (strcmp(plain, longer[i][0]) == 0) {
            strcpy(plain, longer[i][1]);
        }
    }
    const uint32_t mask = categories_of(plain);
    if (mask) {
        add_categories(set, mask, others);
        return true;
    }
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++) {
        if (strcmp(plain, scripts[i].name) == 0) {
            add_ranges(set, scripts[i].ranges, scripts[i].count, others);
            return true;
        }
    }
    return false;
}

/* For Oniguruma the signs U+00B2, B3, B9, BC, BD and BE are of \w, but not where that stands in a
 * class. */
static void add_word_characters(nd_char_set *set, bool others, bool in_class)
{
    enum { SIGNS_WORD = 0xb2 / 64 };
    const uint64_t signs = UINT64_C(0x720c) << 48;
    const uint64_t before = set->words[SIGNS_WORD];
    add_ranges(set, word_characters, sizeof word_characters / sizeof *word_characters, others);
    if (in_class && others) {
        set->words[SIGNS_WORD] |= signs;
    } else if (in_class) {
        set->words[SIGNS_WORD] &= ~signs | before;
    }
}

bool nd_char_set_add_escape(nd_char_set *set, char letter, bool in_class)
{
    static const uint32_t spaces[][2] = {
        {0x9, 0xd},       {0x20, 0x20},     {0x85, 0x85},     {0xa0, 0xa0},     {0x1680, 0x1680},
        {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}};
    static const uint32_t hex[][2] = {{'0', '9'}, {'A', 'F'}, {'a', 'f'}};
    const bool others = letter >= 'A' && letter <= 'Z';
    switch (others ? letter - 'A' + 'a' : letter) {
    case 'd':
        add_categories(set, categories_of("nd"), others);
        return true;
    case 's':
        add_ranges(set, spaces, sizeof spaces / sizeof *spaces, others);
        return true;
    case 'w':
        add_word_characters(set, others, in_class);
        return true;
    case 'h':
        add_ranges(set, hex, sizeof hex / sizeof *hex, others);
        return true;
    default:
        return false;
    }
}

/* Kinds. */

typedef struct kind_list {
    uint64_t *members;
    int count;
} kind_list;

/* The kind of characters that are in these sets; 0: there are too many. */
static uint8_t kind_of(kind_list *list, uint64_t member)
{
    int i = 0;
    while (i < list->count && list->members[i] != member) {
        i++;
    }
    if (i == ND_CHAR_KINDS_MAX) {
        return 0;
    }
    if (i == list->count) {
        list->members[list->count++] = member;
    }
    return (uint8_t)(i + 1);
}

int nd_char_sets_kinds(nd_char_set *const *sets, int count, uint8_t *kinds,
                       uint64_t members[ND_CHAR_KINDS_MAX])
{
    kind_list list = {members, 0};
    for (int w = 0; w < ND_CHAR_SET_WORDS; w++) {
        uint64_t first = 0; /* of the first of 64 characters */
        bool same = true;
        for (int s = 0; s < count; s++) {
            const uint64_t word = sets[s]->words[w];
            same = same && (word == 0 || word == UINT64_MAX);
            first |= (word & 1) << s;
        }
        for (int bit = 0; bit < (same ? 1 : 64); bit++) {
            uint64_t member = first;
            for (int s = 0; !same && s < count; s++) {
                const uint64_t in = sets[s]->words[w] >> bit & 1;
                member = (member & ~(UINT64_C(1) << s)) | in << s;
            }
            kinds[64 * w + bit] = kind_of(&list, member);
            if (kinds[64 * w + bit] == 0) {
                return 0;
            }
        }
        if (same) {
            memset(kinds + 64 * w, kinds[64 * w], 64);
        }
    }
    return list.count;
}
