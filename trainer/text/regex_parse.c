// SPDX-License-Identifier: Apache-2.0
/*
 * Reads a pattern as Oniguruma does (the file doc/RE of its sources has the syntax), and writes it
 * for PCRE2. Understood: characters, classes with '&&' and classes in classes, properties, groups,
 * look-around, alternatives, and repeats. Refused is what the two read differently, or what no
 * pre-tokenizer has: anchors, back-references, names, repeats of what may be empty.
 */
#include <stdio.h>

#include "trainer/text/regex_parse.h"

enum {
    SIZE_MAX_BYTES = 4096,
    REPEAT_MAX = 1000,
    SHORT_REPEAT = 16, /* more characters than this count as a repeat without end */
    PLAIN_LOOPS = 2,
    MANY_LOOPS = 100,
    LENGTH_MAX = 65535 /* PCRE2's own limit of a look-behind */
};

/* What a part of the pattern may match. */
typedef struct part {
    bool empty; /* nothing */
    bool looks; /* it is a look-around */
    int loops;  /* repeats without end that follow one another */
    int length; /* characters; -1: not always as many, or more than LENGTH_MAX */
    bool even;  /* each alternative alone has always as many */
} part;

static nd_status put(nd_regex_parser *p, const char *text)
{
    return nd_bytes_add(&p->out->program, text, strlen(text));
}

static bool has_any(const nd_char_set *set, const char *letters)
{
    for (; *letters; letters++) {
        if (nd_char_set_has(set, (uint32_t)*letters)) {
            return true;
        }
    }
    return false;
}

/* Writes a set, which is taken over and freed where it is not kept. */
static nd_status put_set(nd_regex_parser *p, size_t from, nd_char_set *set)
{
    nd_regex_source *out = p->out;
    const bool second = p->fold && has_any(set, "stfil");
    const bool joined = p->joins && second;
    int s = 0;
    p->joins = p->fold && has_any(set, "sf");
    while (s < out->set_count && memcmp(out->sets[s], set, sizeof *set) != 0) {
        s++;
    }
    if (s == out->set_count && s < ND_CHAR_SETS_MAX) {
        out->sets[out->set_count++] = set;
    } else {
        free(set);
    }
    if (joined) {
        return nd_regex_refuse_part(
            p, from, "stands behind a character that it may be one with where case is ignored");
    }
    if (s == ND_CHAR_SETS_MAX) {
        return nd_regex_refuse_part(p, from, "is one of too many different characters and classes");
    }
    const uint8_t byte = (uint8_t)(ND_REGEX_SET + s);
    out->items++;
    return nd_bytes_add(&out->program, &byte, 1);
}

/* Parts. */

static nd_status read_alternatives(nd_regex_parser *p, part *out);

/* A class, an escape, a dot or a character: one set. */
static nd_status read_set(nd_regex_parser *p)
{
    const size_t from = p->at;
    nd_char_set *set;
    nd_status status = ND_OK;
    uint32_t code = ND_CHAR_CODES;
    ND_TRY(ND_ALLOC(1, &set));
    if (nd_regex_take(p, "[")) {
        status = nd_regex_read_class(p, set);
    } else if (nd_regex_take(p, ".")) {
        nd_char_set_add_range(set, '\n', '\n');
        nd_char_set_invert(set);
    } else {
        status = nd_regex_read_char(p, false, set, &code);
    }
    if (status != ND_OK) {
        free(set);
        return status;
    }
    if (code < ND_CHAR_CODES) {
        nd_char_set_add_range(set, code, code);
    }
    if (p->fold && code < ND_CHAR_CODES) {
        nd_char_set_fold(set);
    }
    return put_set(p, from, set);
}

/* What stands in a group behind its opening, up to its end. */
static nd_status read_inner(nd_regex_parser *p, size_t from, const char *opening, bool fold,
                            part *out)
{
    const bool before = p->fold;
    ND_TRY(put(p, opening));
    p->fold = fold;
    ND_TRY(read_alternatives(p, out));
    p->fold = before;
    ND_TRY(put(p, ")"));
    return nd_regex_take(p, ")") ? ND_OK : nd_regex_refuse_part(p, from, "has no end");
}

/* (?i), which holds up to the end of the group that it stands in, with all alternatives there. */
static nd_status read_rest(nd_regex_parser *p, bool fold, part *out)
{
    const bool before = p->fold;
    ND_TRY(put(p, "(?:"));
    p->fold = fold;
    ND_TRY(read_alternatives(p, out));
    p->fold = before;
    return put(p, ")");
}

static nd_status read_group(nd_regex_parser *p, part *out)
{
    static const char *const openings[] = {"(?:", "(?>", "(?=", "(?!", "(?<=", "(?<!"};
    const size_t from = p->at;
    for (int i = 0; i < 6; i++) {
        if (nd_regex_take(p, openings[i])) {
            ND_TRY(read_inner(p, from, openings[i], p->fold, out));
            if (i >= 4 && !out->even) { /* what PCRE2 can do from 10.43 on */
                return nd_regex_refuse_part(p, from,
                                            "looks back over no fixed number of "
                                            "characters, which is not supported");
            }
            out->looks = i >= 2;
            out->empty |= out->looks;
            out->length = out->looks ? 0 : out->length;
            return ND_OK;
        }
    }
    if (nd_regex_take(p, "(?i:")) {
        return read_inner(p, from, "(?:", true, out);
    }
    if (nd_regex_take(p, "(?-i:")) {
        return read_inner(p, from, "(?:", false, out);
    }
    if (nd_regex_take(p, "(?i)")) {
        return read_rest(p, true, out);
    }
    if (nd_regex_take(p, "(?-i)")) {
        return read_rest(p, false, out);
    }
    p->at++;
    return nd_regex_peek(p) == '?' || nd_regex_peek(p) == '*'
               ? nd_regex_refuse_part(p, from, "is not a supported group")
               : read_inner(p, from, "(?:", p->fold, out);
}

static nd_status read_part(nd_regex_parser *p, part *out)
{
    *out = (part){.length = 1};
    if (nd_regex_peek(p) == '(') {
        return read_group(p, out);
    }
    if (p->at < p->size && strchr("*+?{^$", nd_regex_peek(p)) && nd_regex_peek(p)) {
        return nd_regex_refuse_part(p, p->at, "is not supported at this place");
    }
    return read_set(p);
}

/* Repeats. */

typedef struct repeat {
    int low, high; /* high -1: no end */
    bool counted;  /* with braces */
} repeat;

/* A number up to REPEAT_MAX; -1: there is none, or it is greater. */
static int take_number(nd_regex_parser *p)
{
    int value = -1;
    for (char c = nd_regex_peek(p); c >= '0' && c <= '9' && value <= REPEAT_MAX;
         c = nd_regex_peek(p)) {
        value = 10 * (value < 0 ? 0 : value) + c - '0';
        p->at++;
    }
    return value <= REPEAT_MAX ? value : -1;
}

/* {n}, {n,}, {n,m} and {,m} */
static nd_status read_counts(nd_regex_parser *p, size_t from, repeat *out)
{
    const bool open = nd_regex_peek(p) == ',';
    out->low = open ? 0 : take_number(p);
    out->high = out->low;
    if (nd_regex_take(p, ",")) {
        out->high = nd_regex_peek(p) == '}' ? -1 : take_number(p);
        out->counted = open && out->high < 0; /* {,} */
    }
    const bool valid = out->low >= 0 && !out->counted && nd_regex_take(p, "}") &&
                       (out->high < 0 ? p->pattern[p->at - 2] == ',' : out->high >= out->low);
    out->counted = true;
    return valid ? ND_OK
                 : nd_regex_refuse_part(p, from, "is no supported repeat (at most 1000 times)");
}

static int add_lengths(int a, int b)
{
    return a < 0 || b < 0 || a + b > LENGTH_MAX ? -1 : a + b;
}

/* What a repeat makes of a part. */
static void repeat_part(const repeat *r, part *out)
{
    const bool loops = r->high < 0 || r->high > SHORT_REPEAT;
    if (out->loops > 0 && (r->high < 0 || r->high > 1)) {
        out->loops = MANY_LOOPS;
    }
    out->loops += loops;
    out->empty |= r->low == 0;
    out->length =
        out->length >= 0 && r->low == r->high && (int64_t)out->length * r->low <= LENGTH_MAX
            ? out->length * r->low
            : -1;
}

/* The repeat behind a part, if there is one. */
static nd_status read_repeat(nd_regex_parser *p, part *out)
{
    const size_t from = p->at;
    char text[32];
    repeat r = {0};
    if (nd_regex_take(p, "{")) {
        ND_TRY(read_counts(p, from, &r));
    } else if (nd_regex_take(p, "?")) {
        r = (repeat){0, 1, false};
    } else if (nd_regex_take(p, "*")) {
        r = (repeat){0, -1, false};
    } else if (nd_regex_take(p, "+")) {
        r = (repeat){1, -1, false};
    } else {
        return ND_OK;
    }
    /* Oniguruma takes {n}? for an option and {n,m}+ for a repeat of a repeat. */
    const bool lazy = nd_regex_take(p, "?"), possessive = !lazy && nd_regex_take(p, "+");
    if (r.counted && (possessive || (lazy && r.low == r.high))) {
        return nd_regex_refuse_part(p, from, "is not supported");
    }
    if (p->at < p->size && strchr("*+?{", nd_regex_peek(p)) && nd_regex_peek(p)) {
        p->at++;
        return nd_regex_refuse_part(p, from, "is not supported; it repeats a repeat");
    }
    if (out->empty || out->looks) {
        return nd_regex_refuse_part(p, from, "is not supported; it repeats what may be empty");
    }
    repeat_part(&r, out);
    if (r.high < 0) {
        snprintf(text, sizeof text, "{%d,}", r.low);
    } else {
        snprintf(text, sizeof text, "{%d,%d}", r.low, r.high);
    }
    ND_TRY(put(p, text));
    return put(p, lazy ? "?" : possessive ? "+" : "");
}

/* Sequences. */

static nd_status read_sequence(nd_regex_parser *p, part *out)
{
    *out = (part){.empty = true};
    while (p->at < p->size && nd_regex_peek(p) != '|' && nd_regex_peek(p) != ')') {
        const bool joins = p->joins;
        part one;
        ND_TRY(read_part(p, &one));
        ND_TRY(read_repeat(p, &one));
        p->joins |= joins && one.empty;
        out->empty = out->empty && one.empty;
        out->loops = out->loops + one.loops < MANY_LOOPS ? out->loops + one.loops : MANY_LOOPS;
        out->length = add_lengths(out->length, one.length);
    }
    return ND_OK;
}

/* Up to the end of a group or of the pattern. */
static nd_status read_alternatives(nd_regex_parser *p, part *out)
{
    const bool before = p->joins;
    bool behind = false;
    *out = (part){.even = true};
    if (++p->depth > ND_REGEX_DEPTH_MAX) {
        return nd_regex_refuse_part(p, p->at - 1, "is nested too deeply");
    }
    for (bool more = true, first = true; more; first = false) {
        part one;
        p->joins = before;
        ND_TRY(read_sequence(p, &one));
        out->length = first || out->length == one.length ? one.length : -1;
        out->even = out->even && one.length >= 0;
        behind |= p->joins;
        out->empty |= one.empty;
        out->loops = out->loops > one.loops ? out->loops : one.loops;
        more = nd_regex_take(p, "|");
        ND_TRY(more ? put(p, "|") : ND_OK);
    }
    p->joins = behind;
    p->depth--;
    return ND_OK;
}

nd_status nd_regex_parse(const char *pattern, size_t size, const char *name, nd_regex_source *out)
{
    nd_regex_parser p = {.name = name, .pattern = pattern, .size = size, .out = out};
    part all;
    *out = (nd_regex_source){0};
    if (size > SIZE_MAX_BYTES) {
        return nd_regex_refuse(name, pattern, size, "it has more than %d bytes", SIZE_MAX_BYTES);
    }
    nd_status status = read_alternatives(&p, &all);
    if (status == ND_OK && p.at < size) {
        status = nd_regex_refuse_part(&p, p.at, "closes no group");
    }
    if (status != ND_OK) {
        nd_regex_source_fini(out);
        return status;
    }
    out->plain = all.loops <= PLAIN_LOOPS;
    return ND_OK;
}

void nd_regex_source_fini(nd_regex_source *source)
{
    for (int i = 0; i < source->set_count; i++) {
        free(source->sets[i]);
    }
    free(source->program.data);
    *source = (nd_regex_source){0};
}
