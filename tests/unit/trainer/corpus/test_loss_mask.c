// SPDX-License-Identifier: Apache-2.0
/* The loss mask beside token files: its bytes, what is refused, and when it is written. */
#include <criterion/criterion.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/hash.h"
#include "tests/unit/trainer/corpus/corpus_cases.h"
#include "trainer/corpus/token_file.h"

enum { HEADER = ND_LOSS_MASK_HEADER_BYTES, DIGEST = ND_LOSS_MASK_DIGEST_BYTES, BIN_AT = 104 };

static tempdir dir;
static char bin[PATH_MAX], idx[PATH_MAX];

static nd_bytes file; /* of spans 2-5, which are adjacent ones, and 9-20 of 20 tokens */
static nd_loss_mask_view view;

static void setup(void)
{
    const nd_u64s spans = {(uint64_t[]){2, 4, 4, 5, 9, 20}, 6, 0};
    snprintf(bin, sizeof bin, "%s", tempdir_write(&dir, "p.bin", "tokens", 6));
    snprintf(idx, sizeof idx, "%s", tempdir_write(&dir, "p.idx", "index", 5));
    assert_ok(nd_loss_mask_make(&spans, bin, idx, 20, &file));
}

TEMPDIR_SUITE(loss_mask, setup);

static nd_status parse(const uint8_t *data, size_t size)
{
    return nd_loss_mask_parse(data, size, "x.mask", &view);
}

Test(loss_mask, its_bytes)
{
    static const uint8_t numbers[] = {'N', 'D', 'M', 'A', 'S', 'K', 0, 0, 2, 0, 0, 0, 0, 0,
                                      0,   0,   20,  0,   0,   0,   0, 0, 0, 0, 2, 0, 0, 0,
                                      0,   0,   0,   0,   14,  0,   0, 0, 0, 0, 0, 0};
    static const uint64_t spans[] = {2, 5, 9, 20};
    char hex[65];
    cr_assert_eq(file.count, HEADER + sizeof spans + DIGEST);
    cr_expect_eq(memcmp(file.data, numbers, sizeof numbers), 0);
    assert_ok(nd_sha256("index", 5, hex));
    cr_expect_eq(memcmp(file.data + sizeof numbers, hex, DIGEST), 0);
    assert_ok(nd_sha256("tokens", 6, hex));
    cr_expect_eq(memcmp(file.data + BIN_AT, hex, DIGEST), 0);
    cr_expect_eq(memcmp(file.data + HEADER, spans, sizeof spans), 0);
    assert_ok(nd_sha256(file.data, HEADER + sizeof spans, hex));
    cr_expect_eq(memcmp(file.data + HEADER + sizeof spans, hex, DIGEST), 0);
    assert_ok(parse(file.data, file.count));
    cr_expect(view.tokens == 20 && view.spans == 2 && view.ignored == 14);
    cr_expect_eq(memcmp(view.pairs, spans, sizeof spans), 0);
    cr_expect_eq(memcmp(view.digest, hex, DIGEST), 0);
}

Test(loss_mask, damage_of_any_byte_and_every_cut_are_refused)
{
    static const struct {
        size_t place;
        uint8_t byte;
        const char *words;
    } cases[] = {
        {0, 'X', "does not begin with NDMASK"}, {8, 3, "version 3"}, {HEADER, 3, "is damaged"}};
    for (size_t i = 0; i < file.count; i++) {
        file.data[i] ^= 0x20;
        cr_expect_eq(parse(file.data, file.count), ND_ERR_DATA, "byte %zu", i);
        file.data[i] ^= 0x20;
    }
    for (size_t cut = 0; cut < file.count; cut++) {
        uint8_t *copy = malloc(cut + 1); /* so that the sanitizer sees each byte too far */
        cr_assert_not_null(copy);
        memcpy(copy, file.data, cut);
        assert_fails(parse(copy, cut), ND_ERR_DATA, "truncated");
        free(copy);
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const uint8_t before = file.data[cases[i].place];
        file.data[cases[i].place] = cases[i].byte;
        assert_fails(parse(file.data, file.count), ND_ERR_DATA, cases[i].words);
        file.data[cases[i].place] = before;
    }
}

/* Those of another index and of other tokens are refused in test_masked.c. */
Test(loss_mask, that_of_another_number_of_tokens_is_refused)
{
    uint8_t *data = NULL;
    const char *path = tempdir_write(&dir, "p.mask", file.data, file.count);
    assert_fails(nd_loss_mask_read(path, bin, idx, 21, &data, &view), ND_ERR_DATA,
                 "is for 20 tokens, but");
    free(data);
}

/* A program that does not know the rules writes this: the digest is right, the numbers are not. */
Test(loss_mask, spans_that_cannot_be_are_refused)
{
    static const struct {
        uint64_t spans[4], ignored;
        const char *words;
    } cases[] = {{{2, 5, 4, 20}, 19, "span 1 is 4 to 20 behind 5"},
                 {{2, 2, 9, 20}, 11, "span 0 is 2 to 2"},
                 {{5, 2, 9, 20}, 8, "span 0 is 5 to 2"},
                 {{2, 5, 9, 21}, 15, "span 1 is 9 to 21"},
                 {{2, UINT64_MAX, 9, 20}, 15, "span 0 is"},
                 {{2, 5, 9, 20}, 15, "states 15 tokens in its spans, which have 14"},
                 {{0, 5, 5, 20}, 20, "none of the 20 tokens counts in the loss"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t *digest = file.data + file.count - DIGEST;
        char hex[65];
        memcpy(file.data + 32, &cases[i].ignored, 8);
        memcpy(file.data + HEADER, cases[i].spans, sizeof cases[i].spans);
        assert_ok(nd_sha256(file.data, file.count - DIGEST, hex));
        memcpy(digest, hex, DIGEST);
        assert_fails(parse(file.data, file.count), ND_ERR_DATA, cases[i].words);
    }
}

/* The writer of token files. */

TEMPDIR_SUITE(masked_files, setup);

/* Gets the digest of the tokens from a mask that is made for them. */
static void hash_bin(char hex[DIGEST])
{
    const nd_u64s none = {0};
    file.count = 0;
    assert_ok(nd_loss_mask_make(&none, bin, idx, 20, &file));
    memcpy(hex, file.data + BIN_AT, DIGEST);
}

/* A change of any byte of a small .bin is seen, and in a large one that of each piece. */
Test(masked_files, the_digest_of_a_bin)
{
    enum { PIECE = 64 << 10, PIECES = 256, LARGE = PIECES * PIECE + 1000001 };
    const size_t sizes[] = {1000, PIECES * PIECE, LARGE};
    unlink(bin); /* all of it is zeros then */
    for (int s = 0; s < 3; s++) {
        const size_t size = sizes[s], last = size - PIECE, step = last / (PIECES - 1);
        const size_t small[] = {0, 1, 500, size / 2, size - 1};
        const size_t large[] = {0,          PIECE - 1, step,    7 * step + PIECE - 1,
                                254 * step, last,      size - 1};
        const size_t *places = s == 2 ? large : small;
        char first[DIGEST], other[DIGEST];
        corpus_set_byte(bin, (off_t)size - 1, 0);
        hash_bin(first);
        for (size_t i = 0; i < (s == 2 ? sizeof large : sizeof small) / sizeof *large; i++) {
            corpus_set_byte(bin, (off_t)places[i], 1);
            hash_bin(other);
            cr_expect(memcmp(first, other, DIGEST) != 0, "byte %zu of %zu", places[i], size);
            corpus_set_byte(bin, (off_t)places[i], 0);
        }
        hash_bin(other);
        cr_expect_arr_eq(first, other, DIGEST, "%zu", size);
        if (s > 0) { /* between the first two pieces of a large one */
            corpus_set_byte(bin, PIECE, 1);
            hash_bin(other);
            cr_expect_eq(memcmp(first, other, DIGEST) == 0, s == 2, "%zu", size);
            corpus_set_byte(bin, PIECE, 0);
        }
    }
}

/* Writes five tokens of two documents in two pieces, each with one of the spans if there is one. */
static nd_status write_files(int32_t spans[2][2])
{
    char prefix[128];
    nd_corpus_piece pieces[] = {
        {.ids = {(int32_t[]){1, 2, 3}, 3, 0}, .ends = {(int32_t[]){3}, 1, 0}},
        {.ids = {(int32_t[]){4, 5}, 2, 0}, .ends = {(int32_t[]){2}, 1, 0}}};
    for (int i = 0; i < 2 && spans; i++) {
        pieces[i].spans = (nd_ids){spans[i], 2, 0};
    }
    snprintf(prefix, sizeof prefix, "%s/p", dir.path);
    return corpus_write(prefix, 100, pieces, 2);
}

Test(masked_files, have_a_mask_when_tokens_do_not_count)
{
    static int32_t spans[2][2] = {{2, 3}, {0, 1}}; /* of each piece; they touch at token 3 */
    static const uint64_t whole[] = {2, 4};
    uint8_t *data = NULL;
    assert_ok(write_files(spans));
    assert_ok(nd_loss_mask_read(tempdir_file(&dir, "p.mask"), bin, idx, 5, &data, &view));
    cr_assert_eq(view.spans, 1);
    cr_expect_eq(memcmp(view.pairs, whole, sizeof whole), 0);
    free(data);
    /* A pair that counts all tokens has none: the old one would belong to other files. */
    assert_ok(write_files(NULL));
    cr_expect_not(tempdir_has_path(tempdir_file(&dir, "p.mask")));
    cr_expect(tempdir_has_path(idx));
}

Test(masked_files, appear_together_or_not_at_all)
{
    static int32_t spans[2][2] = {{2, 3}, {0, 1}};
    cr_assert(unlink(bin) == 0 && unlink(idx) == 0);
    /* A folder has the name of the mask. */
    cr_assert_eq(mkdir(tempdir_file(&dir, "p.mask"), 0700), 0);
    assert_fails(write_files(spans), ND_ERR_CANTCREATE, "cannot be replaced");
    cr_expect_not(tempdir_has_path(bin));
    cr_expect_not(tempdir_has_path(idx));
    cr_assert_eq(rmdir(tempdir_file(&dir, "p.mask")), 0);
}
