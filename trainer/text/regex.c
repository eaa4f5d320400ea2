// SPDX-License-Identifier: Apache-2.0
/* Patterns over kinds of characters, matched by PCRE2; the contract is in regex.h. */
#include "trainer/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>

#include "trainer/text/regex_parse.h"
#include "trainer/text/unicode.h"

enum {
    NEAR = 128,           /* characters that a match sees at first */
    WIDER = 4,            /* how many times more it sees each time that these do not decide it */
    NEAR_TRIES = 1 << 8,  /* at one place, of a match that sees NEAR characters: they are not
                             counted, and one that needs more is */
    STEPS_FREE = 1 << 18, /* a text may take so many steps, */
    STEPS_EACH = 256,     /* for each of its characters so many more, */
    STEPS_ITEM = 4,       /* and for each character and item of the pattern so many */
    HEAP_KIB = 128 << 10, /* memory of a match without machine code, */
    STACK_MIN = 32 << 10, /* and with it */
    STACK_MAX = 16 << 20,
    PROGRAM_MAX = 64 << 10 /* about PCRE2's own limit of a compiled pattern */
};

struct nd_regex {
    const char *name;    /* of the file; borrowed */
    char *pattern;       /* for messages */
    uint8_t *kinds;      /* [ND_CHAR_CODES] */
    int items;           /* what one place may be tried with */
    pcre2_code *search;  /* finds the next match; NULL: each match has to be counted */
    pcre2_code *attempt; /* matches at one place; calls count_steps before each item */
};

struct nd_regex_scan {
    const nd_regex *regex;
    pcre2_match_data *match;
    pcre2_match_context *near, *counted; /* for search and for attempt */
    pcre2_jit_stack *stack;
    const uint8_t *text;
    size_t size;
    nd_bytes kinds;            /* of the characters of the text */
    size_t at, bytes;          /* where the next word begins, in characters and in bytes */
    size_t alone;              /* places before this one are tried one by one, and counted */
    uint64_t steps, steps_max; /* of matches in this text */
    size_t place;              /* of the last step */
};

/* The pattern. */

/* A set as a class of kinds. One without kinds matches nothing. */
static nd_status add_kinds(nd_bytes *out, const uint64_t *members, int count, int set)
{
    char text[16];
    bool some = false;
    for (int k = 0, end; k < count; k = end) {
        end = k + 1;
        if (!(members[k] >> set & 1)) {
            continue;
        }
        while (end < count && (members[end] >> set & 1)) {
            end++;
        }
        int n = end == k + 1 ? snprintf(text, sizeof text, "\\x%02x", (unsigned)k + 1)
                             : snprintf(text, sizeof text, "\\x%02x-\\x%02x", (unsigned)k + 1,
                                        (unsigned)end);
        ND_TRY(nd_bytes_add(out, "[", !some));
        ND_TRY(nd_bytes_add(out, text, (size_t)n));
        some = true;
    }
    return some ? nd_bytes_add(out, "]", 1) : nd_bytes_add(out, "(?:(?!))", 8);
}

/* The program of a source with classes of kinds for its sets. */
static nd_status write_program(const nd_regex_source *source, const uint64_t *members, int count,
                               nd_bytes *out)
{
    for (size_t i = 0; i < source->program.count; i++) {
        const uint8_t byte = source->program.data[i];
        ND_TRY(byte < ND_REGEX_SET ? nd_bytes_add(out, &byte, 1)
                                   : add_kinds(out, members, count, byte - ND_REGEX_SET));
    }
    return ND_OK;
}

static nd_status compile(const nd_regex *regex, const nd_bytes *program, uint32_t options, bool jit,
                         pcre2_code **out)
{
    int error;
    PCRE2_SIZE place;
    PCRE2_UCHAR words[128];
    /* An empty program has no place in memory, which PCRE2 10.42 takes for an error. */
    *out = pcre2_compile(program->count > 0 ? program->data : (const uint8_t *)"", program->count,
                         PCRE2_NEVER_UTF | PCRE2_NEVER_UCP | PCRE2_NO_AUTO_CAPTURE | options,
                         &error, &place, NULL);
    if (!*out && error == PCRE2_ERROR_HEAP_FAILED) {
        return nd_fail_memory("the pattern of a tokenizer");
    }
    if (!*out) {
        pcre2_get_error_message(error, words, sizeof words);
        return nd_regex_refuse(regex->name, regex->pattern, strlen(regex->pattern), "%s",
                               (const char *)words);
    }
    if (jit) { /* where there is no JIT, or no memory that may be executed, PCRE2 interprets */
        pcre2_jit_compile(*out, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);
    }
    return ND_OK;
}

static nd_status compile_source(nd_regex *regex, const nd_regex_source *source, int flags)
{
    uint64_t members[ND_CHAR_KINDS_MAX];
    nd_bytes program = {0};
    const bool jit = !(flags & ND_REGEX_INTERPRET);
    const size_t size = strlen(regex->pattern);
    const int count = nd_char_sets_kinds(source->sets, source->set_count, regex->kinds, members);
    if (count == 0) {
        return nd_regex_refuse(regex->name, regex->pattern, size,
                               "it tells more than %d kinds of characters apart",
                               ND_CHAR_KINDS_MAX);
    }
    nd_status status = write_program(source, members, count, &program);
    if (status == ND_OK && program.count > PROGRAM_MAX) {
        status = nd_regex_refuse(regex->name, regex->pattern, size, "it is too long");
    }
    if (status == ND_OK && source->plain && !(flags & ND_REGEX_COUNT)) {
        status = compile(regex, &program, 0, jit, &regex->search);
    }
    if (status == ND_OK) {
        status =
            compile(regex, &program, PCRE2_ANCHORED | PCRE2_AUTO_CALLOUT, jit, &regex->attempt);
    }
    free(program.data);
    return status;
}

nd_status nd_regex_create(const char *pattern, size_t size, const char *name, int flags,
                          nd_regex **out)
{
    nd_regex_source source;
    nd_regex *regex;
    ND_TRY(nd_regex_parse(pattern, size, name, &source));
    nd_status status = ND_ALLOC(1, &regex);
    if (status != ND_OK) {
        nd_regex_source_fini(&source);
        return status;
    }
    regex->name = name;
    regex->items = source.items;
    status = ND_ALLOC(size + 1, &regex->pattern);
    if (status == ND_OK) {
        memcpy(regex->pattern, pattern, size);
        status = ND_ALLOC(ND_CHAR_CODES, &regex->kinds);
    }
    if (status == ND_OK) {
        status = compile_source(regex, &source, flags);
    }
    nd_regex_source_fini(&source);
    if (status != ND_OK) {
        nd_regex_destroy(regex);
        return status;
    }
    *out = regex;
    return ND_OK;
}

void nd_regex_destroy(nd_regex *regex)
{
    if (!regex) {
        return;
    }
    pcre2_code_free(regex->search);
    pcre2_code_free(regex->attempt);
    free(regex->kinds);
    free(regex->pattern);
    free(regex);
}

/* Scans. */

/* Called before each item of the pattern, with the place that the match has reached. */
static int count_steps(pcre2_callout_block *block, void *data)
{
    nd_regex_scan *scan = data;
    const size_t place = block->current_position;
    scan->steps += 1 + (place > scan->place ? place - scan->place : scan->place - place);
    scan->place = place;
    return scan->steps > scan->steps_max ? PCRE2_ERROR_CALLOUT : 0;
}

nd_status nd_regex_scan_create(const nd_regex *regex, nd_regex_scan **out)
{
    nd_regex_scan *scan;
    ND_TRY(ND_ALLOC(1, &scan));
    scan->regex = regex;
    scan->match = pcre2_match_data_create(1, NULL);
    scan->near = pcre2_match_context_create(NULL);
    scan->counted = pcre2_match_context_create(NULL);
    scan->stack = pcre2_jit_stack_create(STACK_MIN, STACK_MAX, NULL);
    uint32_t jit = 0;
    pcre2_config(PCRE2_CONFIG_JIT, &jit);
    if (!scan->match || !scan->near || !scan->counted || (jit && !scan->stack)) {
        nd_regex_scan_destroy(scan);
        return nd_fail_memory("matching the pattern of a tokenizer");
    }
    pcre2_set_match_limit(scan->near, NEAR_TRIES);
    pcre2_set_match_limit(scan->counted, UINT32_MAX);
    pcre2_set_depth_limit(scan->counted, UINT32_MAX);
    pcre2_set_heap_limit(scan->near, HEAP_KIB);
    pcre2_set_heap_limit(scan->counted, HEAP_KIB);
    pcre2_set_callout(scan->counted, count_steps, scan);
    pcre2_jit_stack_assign(scan->near, NULL, scan->stack);
    pcre2_jit_stack_assign(scan->counted, NULL, scan->stack);
    *out = scan;
    return ND_OK;
}

void nd_regex_scan_destroy(nd_regex_scan *scan)
{
    if (!scan) {
        return;
    }
    pcre2_match_data_free(scan->match);
    pcre2_match_context_free(scan->near);
    pcre2_match_context_free(scan->counted);
    pcre2_jit_stack_free(scan->stack);
    free(scan->kinds.data);
    free(scan);
}

nd_status nd_regex_begin(nd_regex_scan *scan, const uint8_t *text, size_t size)
{
    const uint8_t *kinds = scan->regex->kinds;
    void *place = scan->kinds.data;
    nd_status status = nd_array_reserve(&place, &scan->kinds.room, size, 1);
    scan->kinds.data = place;
    scan->kinds.count = 0;
    scan->at = scan->bytes = scan->alone = 0;
    scan->text = text;
    scan->size = size;
    ND_TRY(status);
    for (size_t at = 0; at < size;) {
        const nd_char c = nd_char_at(text + at);
        scan->kinds.data[scan->kinds.count++] = kinds[c.code];
        at += (size_t)c.bytes;
    }
    scan->steps = 0;
    scan->steps_max =
        STEPS_FREE + scan->kinds.count * (uint64_t)(STEPS_EACH + STEPS_ITEM * scan->regex->items);
    return ND_OK;
}

/* Matches. Places are counted in characters. */

/* Where a character begins; none before the next word. */
static size_t byte_of(const nd_regex_scan *scan, size_t place)
{
    size_t byte = scan->bytes;
    if (scan->kinds.count == scan->size) { /* all are ASCII */
        return place;
    }
    for (size_t at = scan->at; at < place; at++) {
        byte += (size_t)nd_char_at(scan->text + byte).bytes;
    }
    return byte;
}

static nd_status fail_at(const nd_regex_scan *scan, size_t place, const char *why)
{
    return nd_fail(ND_ERR_DATA, "\"%s\": the pattern %.200s %s at byte %zu of a text",
                   scan->regex->name, scan->regex->pattern, why, byte_of(scan, place));
}

/* How far a match that begins at `at` may see. */
static size_t end_of(const nd_regex_scan *scan, size_t at, size_t window)
{
    return scan->kinds.count - at > window ? at + window : scan->kinds.count;
}

/* Before the end of the text, PCRE2_ERROR_PARTIAL says that the answer depends on what is behind
 * `end`. What stands before `at` is there for a look back. */
static int match(const nd_regex_scan *scan, const pcre2_code *code, pcre2_match_context *context,
                 size_t at, size_t end)
{
    const uint32_t options = end < scan->kinds.count ? PCRE2_PARTIAL_HARD : 0;
    return pcre2_match(code, scan->kinds.data, end, at, options, scan->match, context);
}

typedef struct found {
    bool any;
    size_t begin, end;
} found;

static found found_match(const nd_regex_scan *scan)
{
    const size_t *place = pcre2_get_ovector_pointer(scan->match);
    return (found){true, place[0], place[1]};
}

/* Tries the place `at` alone. */
static nd_status try_here(nd_regex_scan *scan, size_t at, found *out)
{
    int result = PCRE2_ERROR_PARTIAL;
    for (size_t window = NEAR; result == PCRE2_ERROR_PARTIAL; window *= WIDER) {
        const size_t end = end_of(scan, at, window);
        scan->steps += window > NEAR ? end - at : 0;
        if (scan->steps > scan->steps_max) {
            return fail_at(scan, at, "takes too many steps");
        }
        scan->place = at;
        result = match(scan, scan->regex->attempt, scan->counted, at, end);
    }
    if (result > 0) {
        *out = found_match(scan);
        return ND_OK;
    }
    if (result == PCRE2_ERROR_NOMATCH) {
        return ND_OK;
    }
    if (result == PCRE2_ERROR_NOMEMORY) {
        return nd_fail_memory("matching the pattern of a tokenizer");
    }
    if (result == PCRE2_ERROR_CALLOUT || result == PCRE2_ERROR_MATCHLIMIT) {
        return fail_at(scan, at, "takes too many steps");
    }
    if (result == PCRE2_ERROR_JIT_STACKLIMIT || result == PCRE2_ERROR_HEAPLIMIT ||
        result == PCRE2_ERROR_DEPTHLIMIT) {
        return fail_at(scan, at, "needs too much memory");
    }
    return nd_fail(ND_ERR_INTERNAL, "PCRE2 gave %d for the pattern %.200s", result,
                   scan->regex->pattern);
}

/*
 * Searches from *at on with few characters in sight. True: *at is where the search goes on, or the
 * match was found. False: the place *at has to be tried alone.
 *
 * A search that gave up at some place has made up to NEAR_TRIES at each place before that, for
 * nothing: the next one begins where it could see no farther, so that no place pays twice.
 */
static bool search_near(nd_regex_scan *scan, size_t *at, found *out)
{
    const size_t end = end_of(scan, *at, NEAR);
    const int result = match(scan, scan->regex->search, scan->near, *at, end);
    if (result > 0 && found_match(scan).begin < end) {
        *out = found_match(scan);
        return true;
    }
    if (result > 0 || result == PCRE2_ERROR_NOMATCH) { /* a match at `end` is found from there */
        *at = end;
        return true;
    }
    if (result == PCRE2_ERROR_PARTIAL && found_match(scan).begin > *at) {
        *at = found_match(scan).begin; /* nothing begins before it */
        return true;
    }
    scan->alone = result == PCRE2_ERROR_PARTIAL ? *at + 1 : end;
    return false;
}

/* The first match that begins at `at` or behind it, but before the end of the text. */
static nd_status find(nd_regex_scan *scan, size_t at, found *out)
{
    *out = (found){0};
    while (at < scan->kinds.count && !out->any) {
        if (scan->regex->search && at >= scan->alone && search_near(scan, &at, out)) {
            continue;
        }
        ND_TRY(try_here(scan, at, out));
        at++;
    }
    return ND_OK;
}

/* The next word ends at `place`. */
static size_t end_word(nd_regex_scan *scan, size_t place)
{
    scan->bytes = byte_of(scan, place);
    scan->at = place;
    return scan->bytes;
}

nd_status nd_regex_words(nd_regex_scan *scan, size_t *ends, int room, int *count)
{
    int n = 0;
    while (n < room && scan->at < scan->kinds.count) {
        size_t from = scan->at;
        found f;
        do { /* an empty match where a word begins ends none */
            ND_TRY(find(scan, from++, &f));
        } while (f.any && f.end <= scan->at);
        const size_t begin = f.any ? f.begin : scan->kinds.count;
        if (begin > scan->at) {
            ends[n++] = end_word(scan, begin);
        }
        if (f.any && f.end > scan->at && n < room) {
            ends[n++] = end_word(scan, f.end);
        }
    }
    *count = n;
    return ND_OK;
}
