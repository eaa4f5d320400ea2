// SPDX-License-Identifier: Apache-2.0
/*
 * The patterns that cut text into words before the merges, as scanners by class of character.
 * Each alternative of a pattern stands beside the code that does it. A scanner looks at each
 * character a small number of times, also in long runs of white space.
 */
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "trainer/text/parts.h"
#include "trainer/text/unicode.h"

/* The text from `at` on. */
typedef struct reader {
    const uint8_t *text;
    size_t size;
} reader;

#ifdef __SSE2__
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

/*
 * A word begins at `p`, with ND_SPLIT_BLOCK bytes behind it. The result has a bit for each byte but
 * the first at which a word begins, up to some place in the block, and none from there on; 0 also
 * where there are no vector instructions. `digits`: how many make a word at most, 3 or 1.
 */
static uint64_t classify_block(const uint8_t *p, int digits)
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

/* Moves over ASCII letters, sixteen bytes at a time, while sixteen are left. */
static size_t skip_letters(const reader *r, size_t at)
{
    for (; r->size - at >= LANE; at += LANE) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)(r->text + at));
        const uint64_t letters = bits(in_range(_mm_or_si128(bytes, all(0x20)), 'a', 26), 0);
        if (letters != 0xffff) {
            return at + (size_t)__builtin_ctzll(~letters);
        }
    }
    return at;
}

#else

static uint64_t classify_block(const uint8_t *p, int digits)
{
    return 0;
}

static size_t skip_letters(const reader *r, size_t at)
{
    return at;
}

#endif

typedef struct symbol {
    uint32_t code;
    size_t bytes; /* 0: the end of the text */
    nd_char_class kind;
} symbol;

/* nd_char_class of ASCII as digits, for the common case. */
static const char ascii_classes[] = "0000000003333300"
                                    "0000000000000000"
                                    "3000000000000000"
                                    "2222222222000000"
                                    "0111111111111111"
                                    "1111111111100000"
                                    "0111111111111111"
                                    "1111111111100000";

static symbol symbol_at(const reader *r, size_t at)
{
    if (at >= r->size) {
        return (symbol){0};
    }
    uint8_t byte = r->text[at];
    if (byte < 0x80) {
        return (symbol){byte, 1, (nd_char_class)(ascii_classes[byte] - '0')};
    }
    nd_char c = nd_char_at(r->text + at);
    return (symbol){c.code, (size_t)c.bytes, nd_char_class_of(c.code)};
}

/* Returns the end of the run of characters of this class that begins at `at`. */
static size_t run_end(const reader *r, size_t at, nd_char_class kind)
{
    at = kind == ND_CHAR_LETTER ? skip_letters(r, at) : at;
    for (symbol s = symbol_at(r, at); s.bytes > 0 && s.kind == kind; s = symbol_at(r, at)) {
        at += s.bytes;
    }
    return at;
}

static bool is_newline(uint32_t code)
{
    return code == '\r' || code == '\n';
}

static size_t newlines_end(const reader *r, size_t at)
{
    while (at < r->size && is_newline(r->text[at])) {
        at++;
    }
    return at;
}

/* '(s|t|re|ve|m|ll|d) behind the apostrophe at `at`: where it ends, or 0. U+017F is a long s, which
 * a pattern that ignores case takes for one. */
static size_t contraction_end(const reader *r, size_t at, bool ignore_case)
{
    static const char *const endings[] = {"s", "t", "re", "ve", "m", "ll", "d"};
    const uint8_t *p = r->text + at + 1;
    size_t left = r->size - at - 1;
    if (ignore_case && left >= 2 && p[0] == 0xc5 && p[1] == 0xbf) {
        return at + 3;
    }
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
        size_t n = strlen(endings[i]), same = 0;
        while (same < n && same < left) {
            uint8_t byte = p[same];
            if (ignore_case && byte >= 'A' && byte <= 'Z') {
                byte = (uint8_t)(byte - 'A' + 'a');
            }
            if (byte != (uint8_t)endings[i][same]) {
                break;
            }
            same++;
        }
        if (same == n) {
            return at + 1 + n;
        }
    }
    return 0;
}

/* \s+(?!\S)|\s+ from `at` to the end of the run at `end`: all but the last blank when something
 * follows. */
static size_t blanks_end(const reader *r, size_t at, size_t end)
{
    if (end == r->size) {
        return end;
    }
    size_t last = end - (size_t)nd_char_before(r->text + end).bytes;
    return last > at ? last : end;
}

/* 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static size_t gpt2_end(const reader *r, size_t at)
{
    symbol first = symbol_at(r, at);
    if (first.code == '\'') {
        size_t end = contraction_end(r, at, false);
        if (end > 0) {
            return end;
        }
    }
    symbol next = first.code == ' ' ? symbol_at(r, at + 1) : first;
    if (next.bytes > 0 && next.kind != ND_CHAR_SPACE) {
        return run_end(r, first.code == ' ' ? at + 1 : at, next.kind);
    }
    return blanks_end(r, at, run_end(r, at, ND_CHAR_SPACE));
}

/* \s*[\r\n]+|\s+(?!\S)|\s+ */
static size_t llama3_blanks_end(const reader *r, size_t at)
{
    size_t end = run_end(r, at, ND_CHAR_SPACE);
    for (size_t last = end; last > at; last--) {
        if (is_newline(r->text[last - 1])) {
            return last;
        }
    }
    return blanks_end(r, at, end);
}

/* (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|
 * \s*[\r\n]+|\s+(?!\S)|\s+ */
static size_t llama3_end(const reader *r, size_t at, int digits)
{
    symbol first = symbol_at(r, at);
    if (first.code == '\'') {
        size_t end = contraction_end(r, at, true);
        if (end > 0) {
            return end;
        }
    }
    if (first.kind == ND_CHAR_LETTER) {
        return run_end(r, at, ND_CHAR_LETTER);
    }
    if (first.kind == ND_CHAR_NUMBER) {
        for (symbol s = first; digits > 0 && s.bytes > 0 && s.kind == ND_CHAR_NUMBER; digits--) {
            at += s.bytes;
            s = symbol_at(r, at);
        }
        return at;
    }
    symbol next = symbol_at(r, at + first.bytes);
    if (!is_newline(first.code) && next.bytes > 0 && next.kind == ND_CHAR_LETTER) {
        return run_end(r, at + first.bytes, ND_CHAR_LETTER);
    }
    if (first.kind == ND_CHAR_OTHER) {
        return newlines_end(r, run_end(r, at, ND_CHAR_OTHER));
    }
    if (first.code == ' ' && next.bytes > 0 && next.kind == ND_CHAR_OTHER) {
        return newlines_end(r, run_end(r, at + 1, ND_CHAR_OTHER));
    }
    return llama3_blanks_end(r, at);
}

/* Numbers one by one or in runs, and what stands between them. */
static size_t digits_end(const reader *r, size_t at, bool each)
{
    symbol s = symbol_at(r, at);
    if (s.kind == ND_CHAR_NUMBER) {
        return each ? at + s.bytes : run_end(r, at, ND_CHAR_NUMBER);
    }
    while (s.bytes > 0 && s.kind != ND_CHAR_NUMBER) {
        at += s.bytes;
        s = symbol_at(r, at);
    }
    return at;
}

static size_t marks_end(const reader *r, size_t at)
{
    const uint8_t *from = r->text + at + nd_char_at(r->text + at).bytes, *end = r->text + r->size;
    const uint8_t *mark = memmem(from, (size_t)(end - from), ND_TEXT_MARK, ND_TEXT_MARK_BYTES);
    return (size_t)((mark ? mark : end) - r->text);
}

static size_t word_end(const reader *r, nd_splitter splitter, size_t at)
{
    size_t end = r->size;
    switch (splitter) {
    case ND_SPLIT_GPT2:
        end = gpt2_end(r, at);
        break;
    case ND_SPLIT_LLAMA3:
        end = llama3_end(r, at, 3);
        break;
    case ND_SPLIT_QWEN2:
        end = llama3_end(r, at, 1);
        break;
    case ND_SPLIT_EACH_DIGIT:
        end = digits_end(r, at, true);
        break;
    case ND_SPLIT_DIGITS:
        end = digits_end(r, at, false);
        break;
    case ND_SPLIT_MARKS:
        end = marks_end(r, at);
        break;
    case ND_SPLIT_REGEX: /* has a scan of its own */
        break;
    }
    return end;
}

int nd_text_words(nd_splitter splitter, const uint8_t *text, size_t size, size_t at, size_t *ends,
                  int room)
{
    const bool blocks = splitter == ND_SPLIT_LLAMA3 || splitter == ND_SPLIT_QWEN2;
    const reader r = {text, size};
    int count = 0;
    while (count < room && at < size) {
        const size_t block = at;
        uint64_t begins = 0;
        if (blocks && size - at >= ND_SPLIT_BLOCK) {
            begins = classify_block(text + at, splitter == ND_SPLIT_LLAMA3 ? 3 : 1);
        }
        if (!begins) {
            at = word_end(&r, splitter, at);
            ends[count++] = at;
        }
        for (; begins && count < room; begins &= begins - 1) {
            at = block + (size_t)__builtin_ctzll(begins);
            ends[count++] = at;
        }
    }
    return count;
}

/* Places where a long text may be cut, for work in pieces. */

static bool has_space(const uint8_t *text, size_t size)
{
    for (size_t at = 0; at < size;) {
        nd_char c = nd_char_at(text + at);
        if (nd_char_class_of(c.code) == ND_CHAR_SPACE) {
            return true;
        }
        at += (size_t)c.bytes;
    }
    return false;
}

/* A cut must not lie within an added token or the white space that it swallows. */
static bool added_tokens_allow(const nd_tokenizer *t)
{
    for (int i = 0; i < t->added_count; i++) {
        const nd_added *added = &t->added[i];
        if (added->lstrip || added->rstrip || has_space(added->pattern, added->size)) {
            return false;
        }
    }
    return true;
}

nd_cut nd_text_find_cut(const nd_tokenizer *t)
{
    int gpt2 = 0, llama3 = 0, other = 0;
    for (int i = 0; i < t->splitter_count; i++) {
        gpt2 += t->splitters[i] == ND_SPLIT_GPT2;
        llama3 += t->splitters[i] == ND_SPLIT_LLAMA3 || t->splitters[i] == ND_SPLIT_QWEN2;
        other += t->splitters[i] == ND_SPLIT_MARKS || t->splitters[i] == ND_SPLIT_REGEX;
    }
    /* Composition does not cross white space: nothing joins a character before it, and the first
     * character of a part stays a beginning. */
    for (int i = 0; i < t->rewrite_count; i++) {
        other += !t->rewrites[i].compose;
    }
    if (other > 0 || (gpt2 > 0) == (llama3 > 0) || t->prefix_blank ||
        t->metaspace != ND_METASPACE_NONE || !added_tokens_allow(t)) {
        return ND_CUT_NOWHERE;
    }
    /* GPT-2's words never hold white space behind something else. Llama 3's may: newlines belong to
     * the punctuation before them; but there a run of white space ends a word with its last
     * newline. */
    return gpt2 > 0 ? ND_CUT_BEFORE_BLANKS : ND_CUT_AFTER_NEWLINE;
}

/* True when a whole character that is no white space begins at `at`. */
static bool ink_begins(const uint8_t *text, size_t size, size_t at)
{
    return at < size && nd_utf8_next(text + at, size - at) > 0 &&
           nd_char_class_of(nd_char_at(text + at).code) != ND_CHAR_SPACE;
}

/* True when a whole character that is no white space ends at `at`. */
static bool ink_ends(const uint8_t *text, size_t at)
{
    size_t begin = at;
    do {
        begin--;
    } while (begin > 0 && at - begin < 4 && (text[begin] & 0xc0) == 0x80);
    return nd_utf8_next(text + begin, at - begin) == (int)(at - begin) &&
           nd_char_class_of(nd_char_at(text + begin).code) != ND_CHAR_SPACE;
}

size_t nd_text_cut(const nd_tokenizer *tokenizer, const char *text, size_t size)
{
    const uint8_t *p = (const uint8_t *)text;
    for (size_t at = size; tokenizer->cut != ND_CUT_NOWHERE && at-- > 1;) {
        if (tokenizer->cut == ND_CUT_AFTER_NEWLINE) {
            if (p[at - 1] == '\n' && ink_begins(p, size, at)) {
                return at;
            }
        } else if (p[at] < 0x80 && nd_char_class_of(p[at]) == ND_CHAR_SPACE && ink_ends(p, at)) {
            return at;
        }
    }
    return 0;
}
