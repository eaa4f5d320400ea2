// SPDX-License-Identifier: Apache-2.0
#include "trainer/text/parts.h"

#ifdef __SSE2__
#include <emmintrin.h>

enum { LANE = 16 };

/* The kinds of the bytes of a block, a bit for each byte. Bytes of no kind are punctuation. */
typedef struct masks {
    uint64_t letters, numbers, blanks, newlines; /* newlines are blanks, too */
    uint64_t space, apostrophe, other;           /* ' ', '\'', and no ASCII */
} masks;

static inline __m128i all(int byte)
{
    return _mm_set1_epi8((char)byte);
}

static inline uint64_t bits(__m128i bytes, int shift)
{
    return (uint64_t)(uint32_t)_mm_movemask_epi8(bytes) << shift;
}

/* The bytes from `low` on, `count` of them: as signed bytes, they become the lowest ones. */
static inline __m128i in_range(__m128i bytes, int low, int count)
{
    return _mm_cmplt_epi8(_mm_add_epi8(bytes, all(0x80 - low)), all(0x80 + count));
}

static masks look(const uint8_t *p)
{
    masks m = {0};
    for (int shift = 0; shift < ND_SPLIT_BLOCK; shift += LANE) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(p + shift));
        const __m128i space = _mm_cmpeq_epi8(bytes, all(' '));
        const __m128i lines =
            _mm_or_si128(_mm_cmpeq_epi8(bytes, all('\n')), _mm_cmpeq_epi8(bytes, all('\r')));
        m.letters |= bits(in_range(_mm_or_si128(bytes, all(0x20)), 'a', 26), shift);
        m.numbers |= bits(in_range(bytes, '0', 10), shift);
        m.blanks |= bits(_mm_or_si128(space, in_range(bytes, '\t', 5)), shift);
        m.newlines |= bits(lines, shift);
        m.space |= bits(space, shift);
        m.apostrophe |= bits(_mm_cmpeq_epi8(bytes, all('\'')), shift);
        m.other |= bits(bytes, shift);
    }
    return m;
}

/* The runs whose first bits are in `begin`. */
static inline uint64_t run_from(uint64_t begin, uint64_t run)
{
    return run & ~(run + begin);
}

static uint64_t number_begins(uint64_t numbers, int digits)
{
    uint64_t begins = numbers & ~(numbers << 1);
    if (digits == 1) {
        return numbers;
    }
    const uint64_t three = numbers & numbers << 1 & numbers << 2; /* here and at the two before */
    for (uint64_t more = begins; more; begins |= more) {
        more = more << 3 & numbers & three << 1;
    }
    return begins;
}

/* The bits below the first one that is set; all when none is. */
static inline uint64_t below(uint64_t mask)
{
    return (mask & -mask) - 1;
}

/* The bits up to the last one that is set. */
static inline uint64_t up_to(uint64_t mask)
{
    return mask ? UINT64_MAX >> __builtin_clzll(mask) : 0;
}

uint64_t nd_split_block(const uint8_t *p, int digits)
{
    const masks m = look(p);
    const uint64_t marks = ~(m.letters | m.numbers | m.blanks | m.other);
    /* " ?[^\s\p{L}\p{N}]+[\r\n]*": a space and newlines belong to punctuation. */
    const uint64_t mark_begins = marks & ~(marks << 1) & ~(m.space << 1);
    const uint64_t taken = run_from(m.newlines & marks << 1, m.newlines);
    /* "[^\r\n\p{L}\p{N}]?\p{L}+": letters take a blank or a mark that is not of a word before. */
    const uint64_t letter_begins = m.letters & (m.numbers | m.newlines | (marks & ~mark_begins))
                                                   << 1;
    /* "\s*[\r\n]+|\s+(?!\S)|\s+": a run of blanks ends a word with its last newline, and leaves its
     * last blank to what follows. */
    const uint64_t blanks = m.blanks & ~taken, plain = blanks & ~m.newlines;
    const uint64_t behind_lines = plain & (blanks & m.newlines) << 1;
    const uint64_t blank_begins =
        (blanks & ~(blanks << 1)) | behind_lines | (plain & ~(m.blanks >> 1));
    const uint64_t begins =
        mark_begins | letter_begins | blank_begins | number_begins(m.numbers, digits);

    /* The masks cease to tell where a character is not ASCII, and at blanks before it or before the
     * end of the block; */
    uint64_t known = below(m.other);
    known &= up_to(known & ~blanks);
    /* at blanks between newlines; */
    const uint64_t between = (plain + behind_lines) & ~plain & m.newlines;
    known &= between ? below(behind_lines) : UINT64_MAX;
    /* and behind an apostrophe before letters, which may be "'s" and another word. */
    const uint64_t cut = m.apostrophe & mark_begins & m.letters >> 1 & m.letters >> 2;
    known &= cut ? cut ^ (cut - 1) : UINT64_MAX;
    return begins & known & ~UINT64_C(1);
}

#else

uint64_t nd_split_block(const uint8_t *p, int digits)
{
    return 0;
}

#endif
