// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_REGEX_PARSE_H
#define ND_TEXT_REGEX_PARSE_H
/* For the files regex*.c alone: sets of characters, and patterns read into sets and the syntax of
 * PCRE2. */
#include <stdbool.h>

#include "trainer/text/buffer.h"

/* Sets of characters: a bit for each code point. */

enum {
    ND_CHAR_CODES = 0x110000,
    ND_CHAR_SET_WORDS = ND_CHAR_CODES / 64,
    ND_CHAR_SETS_MAX = 64, /* of one pattern */
    ND_CHAR_KINDS_MAX = 255
};

typedef struct nd_char_set {
    uint64_t words[ND_CHAR_SET_WORDS];
} nd_char_set;

bool nd_char_set_has(const nd_char_set *set, uint32_t code);
void nd_char_set_add_range(nd_char_set *set, uint32_t first, uint32_t last);
void nd_char_set_add(nd_char_set *set, const nd_char_set *other);
void nd_char_set_keep(nd_char_set *set, const nd_char_set *other); /* only what the other has too */
void nd_char_set_invert(nd_char_set *set);
/* Adds the other case of ASCII letters, and what else folds to one: U+017F and U+212A. */
void nd_char_set_fold(nd_char_set *set);
/* Adds what `\p{name}` means in Oniguruma, or all others; case, blanks, '-' and '_' do not count.
 * False: the name is not known. */
bool nd_char_set_add_property(nd_char_set *set, const char *name, size_t size, bool others);
/* The same for the letter of an escape: one of d s w h, or, for all others, D S W H. `in_class`: it
 * stands in a class, which changes \w. */
bool nd_char_set_add_escape(nd_char_set *set, char letter, bool in_class);

/*
 * Kinds, from 1 on: two characters are of one kind when they are in the same sets. `kinds` has
 * ND_CHAR_CODES elements; bit s of members[k] says whether kind k + 1 is in set s. Returns the
 * number of kinds, or 0 when there are more than ND_CHAR_KINDS_MAX.
 */
int nd_char_sets_kinds(nd_char_set *const *sets, int count, uint8_t *kinds,
                       uint64_t members[ND_CHAR_KINDS_MAX]);

/* A pattern in PCRE2's syntax, but for the sets: the byte ND_REGEX_SET + s stands for set s. */
enum { ND_REGEX_SET = 0x80 };

typedef struct nd_regex_source {
    nd_bytes program;
    nd_char_set *sets[ND_CHAR_SETS_MAX]; /* all different */
    int set_count;
    int items;  /* sets in the program: what one place of a text may be tried with */
    bool plain; /* few repeats without end follow one another, and none is in another: matching a
                   short text takes few steps */
} nd_regex_source;

/* A pattern that is being read. */

enum { ND_REGEX_DEPTH_MAX = 16 };

typedef struct nd_regex_parser {
    const char *name; /* of the file */
    const char *pattern;
    size_t size, at;
    nd_regex_source *out;
    int depth;  /* of groups and classes in one another */
    bool fold;  /* case is ignored */
    bool joins; /* the character before may be the first of two that fold to one, as "ss" does */
} nd_regex_parser;

/* The next byte; 0 at the end. */
char nd_regex_peek(const nd_regex_parser *p);
/* Whether this text comes next, which is then read. */
bool nd_regex_take(nd_regex_parser *p, const char *text);
/* A character or an escape: one character in *code, or else the set grows and *code is
 * ND_CHAR_CODES. */
nd_status nd_regex_read_char(nd_regex_parser *p, bool in_class, nd_char_set *set, uint32_t *code);
/* A class behind its opening bracket. The set is empty before. */
nd_status nd_regex_read_class(nd_regex_parser *p, nd_char_set *set);
/* "\"%s\": \"Split\" with the pattern %s is not supported", and why. */
nd_status nd_regex_refuse(const char *name, const char *pattern, size_t size, const char *format,
                          ...) __attribute__((format(printf, 4, 5)));
/* The same for the part of the pattern from `from` to where the parser is, or one character. */
nd_status nd_regex_refuse_part(const nd_regex_parser *p, size_t from, const char *why);

/* Reads a pattern of Oniguruma's default syntax. ND_ERR_DATA says what is not supported. */
nd_status nd_regex_parse(const char *pattern, size_t size, const char *name, nd_regex_source *out);
void nd_regex_source_fini(nd_regex_source *source);

#endif
