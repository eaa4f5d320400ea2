// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/trainer/text/proof_texts.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/status.h"

/* Code points that are equally likely; a text takes some from one range, then from another. */
typedef struct range {
    uint32_t first, last;
} range;

enum { RANGES = 12, POINTS_END = 0x110000 };

const char *const proof_alphabets[] = {"words",  "numbers",  "blanks",  "signs", "marks", "scripts",
                                       "points", "tokens",   "repeats", "bytes", "alone", "letters",
                                       "marked", "composed", "runs",    NULL};
enum { TOKENS = 7, REPEATS, BYTES, ALONE, LETTERS, MARKED, COMPOSED, RUNS };

static const range ranges[][RANGES] = {
    {{'a', 'z'},
     {'a', 'z'},
     {'A', 'Z'},
     {' ', ' '},
     {' ', ' '},
     {'\'', '\''},
     {'r', 't'},
     {'l', 'm'},
     {0xdf, 0xff},
     {0x17f, 0x17f},
     {0x212a, 0x212a},
     {'\n', '\n'}},
    {{'0', '9'},
     {'0', '9'},
     {'0', '9'},
     {' ', ' '},
     {'.', '.'},
     {0x660, 0x669},
     {0xb2, 0xb3},
     {0xbc, 0xbe},
     {0x2160, 0x216b},
     {0x2460, 0x2473},
     {0x1d7ce, 0x1d7ff},
     {'a', 'f'}},
    {{' ', ' '},
     {' ', ' '},
     {'\t', '\r'},
     {'\r', '\r'},
     {'\n', '\n'},
     {0x85, 0x85},
     {0xa0, 0xa0},
     {0x2000, 0x200b},
     {0x2028, 0x2029},
     {0x3000, 0x3000},
     {'a', 'z'},
     {0x180e, 0x180e}},
    {{'!', '/'},
     {':', '@'},
     {'[', '`'},
     {'{', '~'},
     {' ', ' '},
     {'a', 'z'},
     {'\n', '\n'},
     {0xa1, 0xbf},
     {0x2010, 0x2044},
     {0x20a0, 0x20c0},
     {0x2190, 0x21ff},
     {0x2581, 0x2581}},
    {{'a', 'z'},
     {0x300, 0x345},
     {0x316, 0x333},
     {0xc0, 0x17e},
     {0x1e00, 0x1eff},
     {0x1100, 0x1112},
     {0x1161, 0x1175},
     {0x11a8, 0x11c2},
     {0xac00, 0xd7a3},
     {0x915, 0x94d},
     {0x9be, 0x9d7},
     {0x3099, 0x309a}},
    {{0x4e00, 0x9fff},
     {0x3040, 0x30ff},
     {0xac00, 0xd7a3},
     {0x400, 0x4ff},
     {0x370, 0x3ff},
     {0x590, 0x5ff},
     {0x600, 0x6ff},
     {0x900, 0x97f},
     {0xe00, 0xe7f},
     {0x10330, 0x1034a},
     {0x1f300, 0x1faff},
     {' ', ' '}},
    {{0, POINTS_END - 1},
     {0, POINTS_END - 1},
     {0, 0x7f},
     {0x80, 0x7ff},
     {0x800, 0xffff},
     {0x10000, 0x1ffff},
     {' ', ' '},
     {'a', 'z'},
     {0xfe00, 0xfe0f},
     {0x200b, 0x200f},
     {0xe0000, 0xe01ef},
     {0xfff0, 0xffff}},
};

/* The added tokens of the goldens and of models that people use. */
static const char *const tokens[] = {"<|eot|>",
                                     "<|begin|>",
                                     "<think>",
                                     "</think>",
                                     "[word]",
                                     "[left]",
                                     "[right]",
                                     "[both]",
                                     "tool",
                                     "<<both>>",
                                     "<s>",
                                     "</s>",
                                     "<unk>",
                                     "<|endoftext|>",
                                     "<|begin_of_text|>",
                                     "<|end_of_text|>",
                                     "<|eot_id|>",
                                     "<|start_header_id|>",
                                     "<|reserved_special_token_10|>",
                                     "<|im_start|>"};

/* splitmix64 */
static uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint32_t below(uint64_t *state, uint32_t n)
{
    return (uint32_t)((draw(state) >> 32) * n >> 32);
}

static void add(nd_bytes *out, const void *data, size_t size)
{
    if (nd_bytes_add(out, data, size) != ND_OK) {
        abort();
    }
}

static void add_point(nd_bytes *out, uint32_t p)
{
    uint8_t b[4];
    size_t n = p < 0x80 ? 1 : p < 0x800 ? 2 : p < 0x10000 ? 3 : 4;
    for (size_t i = n; i-- > 1; p >>= 6) {
        b[i] = (uint8_t)(0x80 | (p & 63));
    }
    static const uint8_t lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    b[0] = (uint8_t)(lead[n] | p);
    add(out, b, n);
}

/* Up to `most` characters of one range. */
static void add_part(nd_bytes *out, uint64_t *state, int alphabet, uint32_t most)
{
    const range r = ranges[alphabet][below(state, RANGES)];
    for (uint32_t n = 1 + below(state, most); n > 0; n--) {
        uint32_t p = r.first + below(state, r.last - r.first + 1);
        add_point(out, p >= 0xd800 && p < 0xe000 ? p - 0x800 : p);
    }
}

static void add_token(nd_bytes *out, uint64_t *state)
{
    const char *token = tokens[below(state, sizeof tokens / sizeof *tokens)];
    uint32_t size = (uint32_t)strlen(token);
    add(out, token, below(state, 3) == 0 ? 1 + below(state, size) : size);
}

/* A part again and again, about as often as a vector has bytes, or some thousand times. */
static void add_repeats(nd_bytes *out, uint64_t *state)
{
    nd_bytes part = {0};
    add_part(&part, state, (int)below(state, TOKENS), 2);
    for (uint32_t n = below(state, 50) == 0 ? 3000 : 25 + below(state, 45); n > 0; n--) {
        add(out, part.data, part.count);
    }
    free(part.data);
}

static void add_bytes(nd_bytes *out, uint64_t *state)
{
    for (uint32_t n = 1 + below(state, 8); n > 0; n--) {
        const uint8_t byte = (uint8_t)below(state, 256);
        add(out, &byte, 1);
    }
}

static void add_text(nd_bytes *out, uint64_t *state, int alphabet)
{
    for (uint32_t n = 1 + below(state, 12); n > 0; n--) {
        if (alphabet == REPEATS) {
            add_repeats(out, state);
        } else if (alphabet < TOKENS) {
            add_part(out, state, alphabet, below(state, 16) == 0 ? 60 : 6);
        } else if (below(state, 2) == 0) {
            (alphabet == TOKENS ? add_token : add_bytes)(out, state);
        } else {
            add_part(out, state, (int)below(state, TOKENS), 6);
        }
    }
}

static void add_record(nd_bytes *records, const nd_bytes *text)
{
    const uint32_t size = (uint32_t)text->count;
    add(records, &size, sizeof size);
    add(records, text->data, text->count);
}

static void add_string(nd_bytes *out, const char *text)
{
    add(out, text, strlen(text));
}

/* U+0301 and U+0323 are of two classes; U+09C7 composes with one that is no mark. */
static void add_marked(nd_bytes *text, uint32_t p)
{
    static const struct {
        const char *before, *behind;
    } lines[] = {{"", "\u0301\u0323\n"}, {"a\u0301", "\u0323\n"}, {"\u09c7", "\u0301"}};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        add_string(text, lines[i].before);
        add_point(text, p);
        add_string(text, lines[i].behind);
    }
}

/* Before each code point with which some other one composes. */
static void add_composed(nd_bytes *text, uint32_t p)
{
    static const range second[] = {
        {0x300, 0x304},     {0x306, 0x30c},     {0x30f, 0x30f},     {0x311, 0x314},
        {0x31b, 0x31b},     {0x323, 0x328},     {0x32d, 0x32e},     {0x330, 0x331},
        {0x338, 0x338},     {0x342, 0x342},     {0x345, 0x345},     {0x653, 0x655},
        {0x93c, 0x93c},     {0x9be, 0x9be},     {0x9d7, 0x9d7},     {0xb3e, 0xb3e},
        {0xb56, 0xb57},     {0xbbe, 0xbbe},     {0xbd7, 0xbd7},     {0xc56, 0xc56},
        {0xcc2, 0xcc2},     {0xcd5, 0xcd6},     {0xd3e, 0xd3e},     {0xd57, 0xd57},
        {0xdca, 0xdca},     {0xdcf, 0xdcf},     {0xddf, 0xddf},     {0x102e, 0x102e},
        {0x1161, 0x1162},   {0x11a8, 0x11a9},   {0x1b35, 0x1b35},   {0x3099, 0x309a},
        {0x110ba, 0x110ba}, {0x11127, 0x11127}, {0x1133e, 0x1133e}, {0x11357, 0x11357},
        {0x114b0, 0x114b0}, {0x114ba, 0x114ba}, {0x114bd, 0x114bd}, {0x115af, 0x115af},
        {0x11930, 0x11930}};
    if (p >= 0x3400 && (p < 0x11000 || p > 0x11fff)) {
        return;
    }
    for (size_t i = 0; i < sizeof second / sizeof *second; i++) {
        for (uint32_t s = second[i].first; s <= second[i].last; s++) {
            add_point(text, p);
            add_point(text, s);
        }
    }
}

static void add_points(nd_bytes *records, int alphabet, int chunk)
{
    const uint32_t each = POINTS_END / PROOF_CHUNKS;
    nd_bytes text = {0};
    for (uint32_t p = (uint32_t)chunk * each; p < ((uint32_t)chunk + 1) * each; p++) {
        if (p >= 0xd800 && p < 0xe000) {
            continue;
        }
        text.count = 0;
        if (alphabet == MARKED) {
            add_marked(&text, p);
        } else if (alphabet == COMPOSED) {
            add_composed(&text, p);
        } else {
            add_string(&text, alphabet == LETTERS ? "a" : "");
            add_point(&text, p);
            add_string(&text, alphabet == LETTERS ? "b" : "");
        }
        if (text.count > 0) {
            add_record(records, &text);
        }
    }
    free(text.data);
}

static const char *const runs[] = {"a", " ", "\n", "\u4f60"};
enum { RUN_COUNT = sizeof runs / sizeof *runs, RUN_BYTES = 1 << 20 };

static void add_run(nd_bytes *records, const char *part)
{
    nd_bytes text = {0};
    while (text.count < RUN_BYTES) {
        add_string(&text, part);
    }
    add_record(records, &text);
    free(text.data);
}

int proof_chunks(int alphabet)
{
    /* What is composed is in the first chunk. */
    return alphabet == RUNS ? RUN_COUNT : alphabet == COMPOSED ? 1 : PROOF_CHUNKS;
}

bool proof_has_special(int alphabet)
{
    return alphabet < ALONE;
}

void proof_chunk(int alphabet, int chunk, nd_bytes *records)
{
    if (alphabet >= ALONE) {
        if (alphabet == RUNS) {
            add_run(records, runs[chunk]);
        } else {
            add_points(records, alphabet, chunk);
        }
        return;
    }
    uint64_t state = (uint64_t)alphabet << 32 | (uint32_t)chunk;
    nd_bytes text = {0};
    for (size_t begin = records->count; records->count < begin + PROOF_CHUNK_BYTES;) {
        text.count = 0;
        add_text(&text, &state, alphabet);
        add_record(records, &text);
    }
    free(text.data);
}
