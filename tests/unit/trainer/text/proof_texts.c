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

static const range words[RANGES] = {{'a', 'z'},   {'a', 'z'},     {'A', 'Z'},       {' ', ' '},
                                    {' ', ' '},   {'\'', '\''},   {'r', 't'},       {'l', 'm'},
                                    {0xdf, 0xff}, {0x17f, 0x17f}, {0x212a, 0x212a}, {'\n', '\n'}};
static const range numbers[RANGES] = {{'0', '9'},       {'0', '9'},         {'0', '9'},
                                      {' ', ' '},       {'.', '.'},         {0x660, 0x669},
                                      {0xb2, 0xb3},     {0xbc, 0xbe},       {0x2160, 0x216b},
                                      {0x2460, 0x2473}, {0x1d7ce, 0x1d7ff}, {'a', 'f'}};
static const range blanks[RANGES] = {{' ', ' '},       {' ', ' '},       {'\t', '\r'},
                                     {'\r', '\r'},     {'\n', '\n'},     {0x85, 0x85},
                                     {0xa0, 0xa0},     {0x2000, 0x200b}, {0x2028, 0x2029},
                                     {0x3000, 0x3000}, {'a', 'z'},       {0x180e, 0x180e}};
static const range signs[RANGES] = {{'!', '/'},       {':', '@'},       {'[', '`'},
                                    {'{', '~'},       {' ', ' '},       {'a', 'z'},
                                    {'\n', '\n'},     {0xa1, 0xbf},     {0x2010, 0x2044},
                                    {0x20a0, 0x20c0}, {0x2190, 0x21ff}, {0x2581, 0x2581}};
static const range marks[RANGES] = {{'a', 'z'},       {0x300, 0x345},   {0x316, 0x333},
                                    {0xc0, 0x17e},    {0x1e00, 0x1eff}, {0x1100, 0x1112},
                                    {0x1161, 0x1175}, {0x11a8, 0x11c2}, {0xac00, 0xd7a3},
                                    {0x915, 0x94d},   {0x9be, 0x9d7},   {0x3099, 0x309a}};
static const range scripts[RANGES] = {{0x4e00, 0x9fff},   {0x3040, 0x30ff},   {0xac00, 0xd7a3},
                                      {0x400, 0x4ff},     {0x370, 0x3ff},     {0x590, 0x5ff},
                                      {0x600, 0x6ff},     {0x900, 0x97f},     {0xe00, 0xe7f},
                                      {0x10330, 0x1034a}, {0x1f300, 0x1faff}, {' ', ' '}};
static const range points[RANGES] = {{0, POINTS_END - 1}, {0, POINTS_END - 1}, {0, 0x7f},
                                     {0x80, 0x7ff},       {0x800, 0xffff},     {0x10000, 0x1ffff},
                                     {' ', ' '},          {'a', 'z'},          {0xfe00, 0xfe0f},
                                     {0x200b, 0x200f},    {0xe0000, 0xe01ef},  {0xfff0, 0xffff}};
static const range *const ranges[] = {words, numbers, blanks, signs, marks, scripts, points};

/* Characters that not all of the packages that are compared know alike: those since Unicode 15,
 * which the oldest Oniguruma here does not have, those that tokenizers normalises by an older
 * Unicode, and U+1171E, whose category has changed. */
static const range newer[] = {
    {0x7fd, 0x7fd},     {0x897, 0x89f},     {0x8ca, 0x8d3},     {0x9fe, 0x9fe},
    {0xc3c, 0xc3c},     {0xcf3, 0xcf3},     {0xd3b, 0xd3c},     {0xeba, 0xeba},
    {0xece, 0xece},     {0x1715, 0x1715},   {0x1abf, 0x1ace},   {0x1b4e, 0x1b4f},
    {0x1b7f, 0x1b7f},   {0x1c89, 0x1c8a},   {0x1df6, 0x1dfa},   {0x2427, 0x2429},
    {0x2ffc, 0x2fff},   {0x31e4, 0x31ef},   {0xa7cb, 0xa7cd},   {0xa7da, 0xa7dc},
    {0xa82c, 0xa82c},   {0x105c0, 0x105f3}, {0x10d24, 0x10d27}, {0x10d40, 0x10d8f},
    {0x10eab, 0x10eac}, {0x10ec2, 0x10eff}, {0x10f46, 0x10f50}, {0x10f82, 0x10f85},
    {0x11070, 0x11070}, {0x1123f, 0x11241}, {0x1133b, 0x1133b}, {0x11380, 0x113e2},
    {0x1145e, 0x1145e}, {0x116d0, 0x116e3}, {0x1171e, 0x1171e}, {0x11839, 0x1183a},
    {0x1193d, 0x1193e}, {0x11943, 0x11943}, {0x119e0, 0x119e0}, {0x11a34, 0x11a34},
    {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11b00, 0x11bf9}, {0x11d42, 0x11d42},
    {0x11d44, 0x11d45}, {0x11d97, 0x11d97}, {0x11f00, 0x11f5a}, {0x1342f, 0x1342f},
    {0x13439, 0x143fa}, {0x16100, 0x16139}, {0x16d40, 0x16d79}, {0x16ff0, 0x16ff1},
    {0x18cff, 0x18cff}, {0x1b132, 0x1b132}, {0x1b155, 0x1b155}, {0x1cc00, 0x1ceb3},
    {0x1d2c0, 0x1d2d3}, {0x1df25, 0x1df2a}, {0x1e030, 0x1e08f}, {0x1e130, 0x1e136},
    {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef}, {0x1e4d0, 0x1e5ff}, {0x1f6dc, 0x1f6dc},
    {0x1f774, 0x1f77f}, {0x1f7d9, 0x1f7d9}, {0x1f8b2, 0x1f8c1}, {0x1fa75, 0x1fa77},
    {0x1fa87, 0x1fa8f}, {0x1faad, 0x1faaf}, {0x1fabb, 0x1fabf}, {0x1fac6, 0x1facf},
    {0x1fada, 0x1fadf}, {0x1fae8, 0x1fae9}, {0x1faf7, 0x1faf8}, {0x1fbcb, 0x1fbef},
    {0x2b739, 0x2b739}, {0x2ebf0, 0x2ee5d}, {0x31350, 0x323af}};

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

bool proof_is_newer(uint32_t p)
{
    for (size_t i = 0; i < sizeof newer / sizeof *newer; i++) {
        if (p <= newer[i].last) {
            return p >= newer[i].first;
        }
    }
    return false;
}

/* A character; 'n' in place of one that is not known everywhere. */
static void add_point(nd_bytes *out, uint32_t p)
{
    p = proof_is_newer(p) ? 'n' : p;
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

/* Before each code point with which some other one composes. U+11930, which does so since Unicode
 * 13, is not among them: tokenizers does not know that. */
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
        {0x114b0, 0x114b0}, {0x114ba, 0x114ba}, {0x114bd, 0x114bd}, {0x115af, 0x115af}};
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
    /* The first chunk holds all composed texts. */
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
