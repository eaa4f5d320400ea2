// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/trainer/text/text_cases.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/rng.h"

enum { IDS_MAX = 4096, TEXT_MAX = 1 << 16 };

const char *const text_families[] = {
    "gpt2",          "prefix",       "llama3",       "qwen2",        "qwen2_nfc", "digits",
    "llama2",        "llama2_early", "llama2_inner", "llama2_first", "metaspace", "unknown",
    "unknown_alone", "llama4",       "deepseek3",    "camel",        NULL};

static const char *path_of(const char *family, const char *suffix)
{
    static char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/tests/unit/trainer/text/goldens/%s%s", getenv("ND_SOURCE_ROOT"),
             family, suffix);
    return path;
}

const char *text_path(const char *family)
{
    return path_of(family, ".json");
}

nd_tokenizer *text_open(const char *family)
{
    nd_tokenizer *tokenizer;
    nd_status status = nd_tokenizer_open(text_path(family), &tokenizer);
    cr_assert_eq(status, ND_OK, "%s: %s", family, nd_error_last()->message);
    return tokenizer;
}

static json_t *load(const char *path)
{
    json_error_t error;
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, &error);
    cr_assert_not_null(root, "%s: %s", path, error.text);
    return root;
}

json_t *text_file(const char *family)
{
    return load(text_path(family));
}

json_t *text_cases(const char *family)
{
    return load(path_of(family, ".cases.json"));
}

nd_status text_parse(const json_t *file, nd_tokenizer **out)
{
    char *text = json_dumps(file, 0);
    cr_assert_not_null(text);
    nd_status status = nd_tokenizer_parse(text, strlen(text), "tokenizer.json", out);
    free(text);
    return status;
}

size_t text_random(uint64_t seed, bool runs, char *out, size_t room)
{
    static const char long_word[] = "internationalisation";
    /* U+1C89 is a letter since Unicode 16. */
    static const char *const atoms[] = {
        "a",      "z",      "A",      "Z",      "the",    long_word,   "@",      "[",      "`",
        "{",      "1",      "234",    "'s",     "'LL",    "'",         " ",      "  ",     "\n",
        "\r\n",   ".",      "!?",     "!/",     "\u00e9", "\u00c9",    "\u4f60", "\u0301", "\u00a0",
        "\u180e", "\u017f", "\u1c89", "\u3000", "\u2581", "\U0001f600"};
    size_t used = 0;
    for (uint64_t i = 0;; i++) {
        const char *atom = atoms[nd_rng_u64(seed, 1, i) % (sizeof atoms / sizeof *atoms)];
        const size_t size = strlen(atom);
        const uint64_t random = runs ? nd_rng_u64(seed, 2, i) % 64 : 63;
        for (uint64_t n = random == 0 ? 300 : random < 4 ? 5 : 1; n > 0; n--, used += size) {
            if (used + size > room) {
                return used;
            }
            memcpy(out + used, atom, size);
        }
    }
}

size_t text_ids(const json_t *list, int32_t *ids, size_t room)
{
    size_t count = json_array_size(list);
    cr_assert_leq(count, room);
    for (size_t i = 0; i < count; i++) {
        ids[i] = (int32_t)json_integer_value(json_array_get(list, i));
    }
    return count;
}

void text_assert_ids(const char *family, nd_encoder *encoder, const json_t *text,
                     const json_t *expected)
{
    const char *string = json_string_value(text);
    const int32_t *ids;
    int32_t wanted[IDS_MAX];
    size_t count, size = json_string_length(text), n = text_ids(expected, wanted, IDS_MAX);
    nd_status status = nd_encode(encoder, string, size, &ids, &count);
    cr_assert_eq(status, ND_OK, "%s, \"%s\": %s", family, string, nd_error_last()->message);
    for (size_t i = 0; i < count && i < n; i++) {
        cr_assert_eq(ids[i], wanted[i], "%s, \"%s\": id %zu is %d, not %d", family, string, i,
                     ids[i], wanted[i]);
    }
    cr_assert_eq(count, n, "%s, \"%s\": %zu ids, not %zu", family, string, count, n);
}

void text_expect_ids(nd_encoder *encoder, const char *text, const int32_t *ids, size_t count)
{
    const int32_t *expected;
    size_t n;
    nd_status status = nd_encode(encoder, text, strlen(text), &expected, &n);
    cr_assert_eq(status, ND_OK, "\"%s\": %s", text, nd_error_last()->message);
    cr_expect_eq(count, n, "\"%s\" has %zu ids, not %zu", text, n, count);
    cr_expect(count != n || memcmp(ids, expected, n * sizeof *ids) == 0, "\"%s\"", text);
}

const char *text_decode(nd_decoder *decoder, const int32_t *ids, size_t count, size_t piece,
                        size_t *size)
{
    static char text[TEXT_MAX];
    size_t at = 0;
    bool ended = false;
    for (size_t i = 0; !ended; i += piece) {
        const char *part;
        size_t n;
        ended = i >= count;
        nd_status status = ended
                               ? nd_decoder_end(decoder, &part, &n)
                               : nd_decoder_push(decoder, ids + i,
                                                 count - i < piece ? count - i : piece, &part, &n);
        cr_assert_eq(status, ND_OK, "%s", nd_error_last()->message);
        cr_assert_lt(at + n, sizeof text);
        memcpy(text + at, part, n);
        at += n;
    }
    text[at] = '\0';
    *size = at;
    return text;
}
