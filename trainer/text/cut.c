// SPDX-License-Identifier: Apache-2.0
/* Finds places where a long text may be cut, for work in pieces. */
#include "trainer/text/parts.h"
#include "trainer/text/unicode.h"

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

/* Composition does not cross white space: nothing joins a character before it, and the first
 * character of a part stays a beginning. */
static bool has_rewrites(const nd_tokenizer *t)
{
    int other = 0;
    for (int i = 0; i < t->rewrite_count; i++) {
        other += !t->rewrites[i].compose;
    }
    return other > 0;
}

nd_text_cut nd_tokenizer_cut(const nd_tokenizer *t)
{
    int gpt2 = 0, llama3 = 0, other = 0;
    for (int i = 0; i < t->splitter_count; i++) {
        gpt2 += t->splitters[i] == ND_SPLIT_GPT2;
        llama3 += t->splitters[i] == ND_SPLIT_LLAMA3 || t->splitters[i] == ND_SPLIT_QWEN2;
        other += t->splitters[i] == ND_SPLIT_MARKS || t->splitters[i] == ND_SPLIT_REGEX;
    }
    if (other > 0 || (gpt2 > 0) == (llama3 > 0) || t->prefix_blank || has_rewrites(t) ||
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

size_t nd_text_cut_find(nd_text_cut cut, const char *text, size_t size)
{
    const uint8_t *p = (const uint8_t *)text;
    for (size_t at = size; cut != ND_CUT_NOWHERE && at-- > 1;) {
        if (cut == ND_CUT_AFTER_NEWLINE) {
            if (p[at - 1] == '\n' && ink_begins(p, size, at)) {
                return at;
            }
        } else if (p[at] < 0x80 && nd_char_class_of(p[at]) == ND_CHAR_SPACE && ink_ends(p, at)) {
            return at;
        }
    }
    return 0;
}
