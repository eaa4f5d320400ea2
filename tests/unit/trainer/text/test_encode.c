// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/hash.h"
#include "runtime/base/rng.h"
#include "tests/support/tempdir.h"
#include "tests/unit/trainer/text/text_cases.h"
#include "trainer/text/buffer.h"
#include "trainer/text/tokenizer.h"

#ifdef __SANITIZE_ADDRESS__ /* which slows a search down tenfold, and finds other faults */
enum { LONG_RUN = 1 << 17, SHORTER_RUN = 1 << 15 };
#else
enum { LONG_RUN = 1 << 20, SHORTER_RUN = 1 << 17 };
#endif

/* These are what a test has opened last, and the ids of the last text. */
static nd_tokenizer *tokenizer;
static nd_encoder *encoder;
static const int32_t *ids;
static size_t count;

static void close_all(void)
{
    nd_encoder_destroy(encoder);
    nd_tokenizer_close(tokenizer);
    encoder = NULL;
    tokenizer = NULL;
}

TestSuite(encode, .fini = close_all);

/* Opens an encoder with these options, and closes those before it. */
static void use(nd_tokenizer *opened, nd_encode_options options)
{
    nd_encoder_destroy(encoder);
    encoder = NULL;
    if (opened != tokenizer) {
        nd_tokenizer_close(tokenizer);
    }
    tokenizer = opened;
    assert_ok(nd_encoder_create(tokenizer, &options, &encoder));
}

static void encode_bytes(const char *text, size_t size)
{
    assert_ok(nd_encode(encoder, text, size, &ids, &count));
}

static void encode(const char *text)
{
    encode_bytes(text, strlen(text));
}

static void encode_fails(const char *text, const char *words)
{
    assert_fails(nd_encode(encoder, text, strlen(text), &ids, &count), ND_ERR_DATA, words);
}

/* Which leaves out what has no piece. */
static void use_as(nd_tokenizer *opened, nd_special_in_text special, bool post, size_t cache)
{
    use(opened, (nd_encode_options){.special_in_text = special,
                                    .post_process = post,
                                    .drop_unknown = true,
                                    .cache_bytes = cache});
}

/* Each case twice: the second time its words come from the cache. */
static void assert_cases(const char *family, const char *key, nd_special_in_text special, bool post,
                         size_t cache)
{
    use_as(text_open(family), special, post, cache);
    json_t *cases = text_cases(family);
    cr_assert_gt(json_array_size(cases), 40);
    for (size_t i = 0; i < 2 * json_array_size(cases); i++) {
        const json_t *one = json_array_get(cases, i % json_array_size(cases));
        text_assert_ids(family, encoder, json_object_get(one, "text"), json_object_get(one, key));
    }
    json_decref(cases);
}

Test(encode, ids_are_those_of_tokenizers)
{
    for (const char *const *family = text_families; *family; family++) {
        assert_cases(*family, "parse", ND_SPECIAL_PARSE, false, ND_ENCODE_CACHE_BYTES);
        assert_cases(*family, "post", ND_SPECIAL_PARSE, true, ND_ENCODE_CACHE_BYTES);
        assert_cases(*family, "as_text", ND_SPECIAL_TEXT, false, ND_ENCODE_CACHE_BYTES);
    }
}

Test(encode, ids_are_the_same_without_a_cache_and_with_a_tiny_one)
{
    for (const char *const *family = text_families; *family; family++) {
        assert_cases(*family, "parse", ND_SPECIAL_PARSE, false, 0);
        assert_cases(*family, "parse", ND_SPECIAL_PARSE, false, 256); /* four words */
    }
}

Test(encode, special_tokens_in_text_are_refused_on_request)
{
    use_as(text_open("llama3"), ND_SPECIAL_REFUSE, false, 0);
    encode_fails("a <|eot|>", "\"<|eot|>\" at byte 2");
    encode("a <|eo|> <think>"); /* this one is not special */
    cr_assert_eq(ids[count - 1], nd_tokenizer_find(tokenizer, "<think>", 7));
}

Test(encode, special_tokens_are_counted_in_every_mode)
{
    for (int mode = ND_SPECIAL_TEXT; mode <= ND_SPECIAL_PARSE; mode++) {
        use_as(text_open("llama3"), (nd_special_in_text)mode, true, 0);
        encode("<|eot|>a<|eot|>");
        cr_assert_eq(nd_encoder_counts(encoder)->special, 2);
        cr_assert_eq(nd_encoder_counts(encoder)->bytes, 15);
    }
}

static void expect_same_ids(const char *text, const char *other)
{
    static int32_t first[64];
    encode(text);
    cr_assert_leq(count, 64);
    memcpy(first, ids, count * sizeof *ids);
    text_expect_ids(encoder, other, first, count);
}

Test(encode, invalid_utf8_is_replaced_by_maximal_subparts_as_python_does)
{
    static const struct {
        const char *text, *replaced;
        int64_t invalid;
    } cases[] = {
        {"a\xff"
         "b",
         "a\xef\xbf\xbd"
         "b",
         1},
        {"\xe2\x82", "\xef\xbf\xbd", 1}, /* cut at the end */
        {"\xe2\x82"
         "a",
         "\xef\xbf\xbd"
         "a",
         1},
        {"\xf0\x9f\x98"
         "x\x80",
         "\xef\xbf\xbdx\xef\xbf\xbd", 2},
        {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", 3}, /* a surrogate */
        {"\xc0\xaf", "\xef\xbf\xbd\xef\xbf\xbd", 2},                 /* a long form */
        {"\xf4\x90\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", 4},
    };
    int64_t invalid = 0;
    use_as(text_open("llama3"), ND_SPECIAL_TEXT, false, 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        expect_same_ids(cases[i].text, cases[i].replaced);
        invalid += cases[i].invalid;
        cr_assert_eq(nd_encoder_counts(encoder)->invalid, invalid, "case %zu", i);
    }
    use(tokenizer, (nd_encode_options){.refuse_invalid = true});
    encode_fails("ab\xff", "not UTF-8 from byte 2 (0xff)");
}

Test(encode, a_character_without_a_piece_is_refused_or_dropped_and_counted)
{
    json_t *file = text_file("gpt2");
    json_t *vocab = json_object_get(json_object_get(file, "model"), "vocab");
    json_object_set_new(vocab, "replaced", json_copy(json_object_get(vocab, "z")));
    json_object_del(vocab, "z");
    json_array_clear(json_object_get(json_object_get(file, "model"), "merges"));
    nd_tokenizer *changed;
    assert_ok(text_parse(file, &changed));
    json_decref(file);
    use(changed, (nd_encode_options){0});
    encode_fails("lazy", "byte 0x7a");
    encode("lay");
    use_as(changed, ND_SPECIAL_TEXT, false, ND_ENCODE_CACHE_BYTES);
    for (int i = 1; i <= 3; i++) { /* the cache does not hide them */
        encode("lazy");
        cr_assert_eq(count, 3);
        cr_assert_eq(nd_encoder_counts(encoder)->dropped, i);
    }
}

/* A text that no pattern splits is cut into words where no merge joins characters. What is dropped,
 * unknown or a byte there is what `tokenizers` makes of the same files. */
typedef struct cut_case {
    const char *model; /* pieces with ids from 0 on, merges, and the rest */
    const char *text;
    int32_t ids[5];
    size_t count;
} cut_case;

#define DROPS "[\"a\",\"b\",\"ab\",\"\u2581\"]; [[\"a\",\"b\"]]; \"fuse_unk\": false"
#define UNKNOWN                                                                                    \
    "[\"<unk>\",\"a\",\"b\",\"ab\",\"\u2581\"]; [[\"a\",\"b\"]]; \"unk_token\": \"<unk>\""
#define SOME_BYTES                                                                                 \
    "[\"<unk>\",\"a\",\"<0x0A>\",\"<0x09>\",\"\u2581\"]; []; \"unk_token\": \"<unk>\", "           \
    "\"fuse_unk\": "                                                                               \
    "true, \"byte_fallback\": true"
#define JOINED_BYTE                                                                                \
    "[\"<unk>\",\"a\",\"<0x0A>\",\"<0x0A>a\",\"\u2581\"]; [[\"<0x0A>\",\"a\"]]; \"unk_token\": "   \
    "\"<unk>\", \"byte_fallback\": true"
#define JOINED_UNKNOWN                                                                             \
    "[\"<unk>\",\"a\",\"<unk>a\",\"\u2581\"]; [[\"<unk>\",\"a\"]]; \"unk_token\": \"<unk>\", "     \
    "\"fuse_unk\": true"
#define JOINED_MARK                                                                                \
    "[\"a\",\"b\",\"\u2581\",\"a\u2581\",\"a\u2581b\"]; "                                          \
    "[[\"a\",\"\u2581\"],[\"a\u2581\",\"b\"]]; "                                                   \
    "\"fuse_unk\": false"
#define FUSED UNKNOWN ", \"fuse_unk\": true"
#define MARK  "\xe2\x96\x81"

static const cut_case cut_cases[] = {
    {DROPS, "a?b", {2}, 1},
    {DROPS,
     "a\xc3\xa9"
     "b",
     {2},
     1},
    {DROPS, "b?a", {1, 0}, 2},
    {DROPS, "a?" MARK "b", {0, 3, 1}, 3},
    {UNKNOWN, "a??b", {1, 0, 0, 2}, 4},
    {FUSED, "a??b", {1, 0, 2}, 3},
    {FUSED, "?\xc3\xa9?", {0}, 1},
    {FUSED, "ab??" MARK "?", {3, 0, 4, 0}, 4},
    {FUSED, "??ab", {0, 3}, 2},
    {SOME_BYTES, "?\n\ta", {2, 3, 0, 1}, 4},
    {SOME_BYTES, "?\n" MARK, {2, 0, 4}, 3},
    {SOME_BYTES, "a\n\t?\n?", {1, 2, 3, 2, 0}, 5},
    {JOINED_BYTE, "\na", {3}, 1},
    {JOINED_BYTE, "a\na" MARK, {1, 3, 4}, 3},
    {JOINED_UNKNOWN, "?a", {2}, 1},
    {JOINED_UNKNOWN, "??a" MARK "a", {2, 3, 1}, 3},
    {JOINED_MARK, "a" MARK "b", {4}, 1},
    {JOINED_MARK, "a" MARK MARK "b", {3, 2, 1}, 3},
    {JOINED_MARK, "b" MARK "a", {1, 2, 0}, 3},
    {JOINED_MARK, "a?" MARK "b", {4}, 1},
};

/* "pieces; merges; the rest" as a tokenizer without a normalizer and a pattern. */
static nd_tokenizer *tokenizer_of(const char *model)
{
    const char *merges = strstr(model, "; ") + 2, *rest = strstr(merges, "; ") + 2;
    json_t *pieces = json_loadb(model, (size_t)(merges - 2 - model), 0, NULL);
    json_t *file = text_file("llama2"), *vocab = json_object(), *out;
    char text[2048];
    snprintf(text, sizeof text, "{\"type\": \"BPE\", \"merges\": %.*s, %s}",
             (int)(rest - 2 - merges), merges, rest);
    out = json_loads(text, 0, NULL);
    cr_assert(pieces && out, "%s", text);
    for (size_t i = 0; i < json_array_size(pieces); i++) {
        json_object_set_new(vocab, json_string_value(json_array_get(pieces, i)),
                            json_integer((json_int_t)i));
    }
    json_object_set_new(out, "vocab", vocab);
    json_object_set_new(file, "model", out);
    json_object_set_new(file, "added_tokens", json_array());
    json_object_set_new(file, "normalizer", json_null());
    json_object_set_new(file, "pre_tokenizer", json_null());
    json_object_set_new(file, "post_processor", json_null());
    nd_tokenizer *made;
    assert_ok(text_parse(file, &made));
    json_decref(file);
    json_decref(pieces);
    return made;
}

Test(encode, cuts_between_words_change_no_ids)
{
    for (size_t i = 0; i < sizeof cut_cases / sizeof cut_cases[0]; i++) {
        const cut_case *one = &cut_cases[i];
        use_as(tokenizer_of(one->model), ND_SPECIAL_TEXT, false, ND_ENCODE_CACHE_BYTES);
        encode(one->text);
        cr_assert_eq(count, one->count, "case %zu: %zu ids, not %zu", i, count, one->count);
        cr_assert_arr_eq(ids, one->ids, count * sizeof *ids, "case %zu", i);
    }
    use(tokenizer_of(DROPS), (nd_encode_options){0});
    encode_fails("a\xc3\xa9", "the character U+00E9");
}

/* Pieces of the letters a and b, and the pair that makes each, drawn. */
typedef struct drawn_model {
    char pieces[32][12]; /* a, b, then the merges' */
    int left[32], right[32];
    int count;
} drawn_model;

static nd_tokenizer *draw_model(uint64_t seed, drawn_model *m)
{
    char pieces[512] = "[\"a\",\"b\"", merges[600] = "[", model[1200];
    *m = (drawn_model){.pieces = {"a", "b"}, .count = 2};
    for (uint64_t i = 0; m->count < 26 && i < 400; i++) {
        const int left = (int)(nd_rng_u64(seed, 0, i) % (uint64_t)m->count);
        const int right = (int)(nd_rng_u64(seed, 1, i) % (uint64_t)m->count);
        char piece[12];
        snprintf(piece, sizeof piece, "%.5s%.5s", m->pieces[left], m->pieces[right]);
        bool is_new = strlen(piece) == strlen(m->pieces[left]) + strlen(m->pieces[right]);
        for (int j = 0; j < m->count; j++) {
            is_new = is_new && strcmp(piece, m->pieces[j]) != 0;
        }
        if (is_new) {
            size_t at = strlen(pieces), to = strlen(merges);
            memcpy(m->pieces[m->count], piece, sizeof piece);
            snprintf(pieces + at, sizeof pieces - at, ",\"%s\"", piece);
            snprintf(merges + to, sizeof merges - to, "%s[\"%s\",\"%s\"]", m->count > 2 ? "," : "",
                     m->pieces[left], m->pieces[right]);
            m->left[m->count] = left;
            m->right[m->count++] = right;
        }
    }
    snprintf(model, sizeof model, "%s]; %s]; \"fuse_unk\": false", pieces, merges);
    return tokenizer_of(model);
}

/* The definition: the leftmost pair of the first merge that is there, until none is. */
static size_t merge_plainly(const drawn_model *m, int32_t *word, size_t size)
{
    for (int p = 2; p < m->count; p++) {
        for (size_t i = 0; i + 1 < size; i++) {
            if (word[i] == m->left[p] && word[i + 1] == m->right[p]) {
                word[i] = p;
                memmove(word + i + 1, word + i + 2, (--size - i - 1) * sizeof *word);
                p = 1; /* anew, from the first merge on */
                break;
            }
        }
    }
    return size;
}

/* Words around the 32 characters of ND_SHORT_WORD, and far above them. */
Test(encode, long_words_have_the_ids_of_the_definition)
{
    static const size_t sizes[] = {31, 32, 33, 34, 40, 63, 65, 200};
    for (uint64_t seed = 0; seed < 40; seed++) {
        drawn_model m;
        use_as(draw_model(seed, &m), ND_SPECIAL_TEXT, false, 0);
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            char text[200];
            int32_t expected[200];
            for (size_t i = 0; i < sizes[s]; i++) {
                expected[i] = (int32_t)(nd_rng_u64(seed, 2 + s, i) % 2);
                text[i] = (char)('a' + expected[i]);
            }
            const size_t wanted = merge_plainly(&m, expected, sizes[s]);
            encode_bytes(text, sizes[s]);
            cr_assert_eq(count, wanted, "seed %d: %zu ids of %zu characters, not %zu", (int)seed,
                         count, sizes[s], wanted);
            cr_assert_arr_eq(ids, expected, count * sizeof *ids, "seed %d, %zu characters",
                             (int)seed, sizes[s]);
        }
    }
}

/* Quadratic time is 2^40 steps for the first two runs, minutes, and 2^34 for the others, which the
 * limit notices where several of them take it. */
Test(encode, long_runs_take_no_quadratic_time, .timeout = 280)
{
    static const char *const runs[] = {"a", " ",    "\n",  "\xe2\x96\x81", "1",
                                       "'", "<|eo", " \n", "\xff"};
    char *text = malloc(LONG_RUN);
    cr_assert_not_null(text);
    for (const char *const *family = text_families; *family; family++) {
        use_as(text_open(*family), ND_SPECIAL_PARSE, true, ND_ENCODE_CACHE_BYTES);
        for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
            size_t n = strlen(runs[i]);
            size_t size = (i < 2 ? LONG_RUN : SHORTER_RUN) / n * n;
            for (size_t at = 0; at < size; at += n) {
                memcpy(text + at, runs[i], n);
            }
            encode_bytes(text, size);
            cr_assert_gt(count, 0);
        }
    }
    free(text);
}

/* Other goldens mean other ids, and old token caches must not be used then. */
Test(text_encode, goldens_belong_to_a_version_of_the_code)
{
    static const char sum[] = "c0552b737cefe9133e5df5516d4c40ae4eb26e1924efc2f377a30b817867e03e";
    char pattern[PATH_MAX], hex[65];
    glob_t found;
    nd_bytes all = {0};
    snprintf(pattern, sizeof pattern, "%s/tests/unit/trainer/text/goldens/*.json",
             getenv("ND_SOURCE_ROOT"));
    cr_assert_eq(glob(pattern, 0, NULL, &found), 0);
    cr_assert_gt(found.gl_pathc, 20);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        assert_ok(nd_sha256_file(found.gl_pathv[i], hex));
        assert_ok(nd_bytes_add(&all, hex, sizeof hex));
    }
    globfree(&found);
    assert_ok(nd_sha256(all.data, all.count, hex));
    free(all.data);
    cr_expect(ND_TEXT_VERSION == 5 && strcmp(hex, sum) == 0,
              "the goldens or ND_TEXT_VERSION changed: a change that gives a text other ids raises "
              "ND_TEXT_VERSION (trainer/text/version.h); then put that and %s here",
              hex);
}
