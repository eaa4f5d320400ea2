// SPDX-License-Identifier: Apache-2.0
/* The loss mask beside token files: its bytes, what is refused, and when it is written. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/base/hash.h"
#include "tests/support/tempdir.h"
#include "trainer/corpus/loss_mask.h"
#include "trainer/corpus/token_file.h"

enum { HEADER = ND_LOSS_MASK_HEADER_BYTES, DIGEST = ND_LOSS_MASK_DIGEST_BYTES };

static const char index_sha256[] =
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
static const char bin_sha256[] = "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210";
static const nd_loss_mask_pair pair = {"x.bin", "x.idx", 20, index_sha256, bin_sha256};

/* Spans 2-5 and 9-20 of 20 tokens. */
static void make(uint8_t **data, size_t *size)
{
    nd_loss_mask mask = {0};
    assert_ok(nd_loss_mask_add(&mask, 2, 4));
    assert_ok(nd_loss_mask_add(&mask, 4, 5)); /* adjacent: the same span */
    assert_ok(nd_loss_mask_add(&mask, 7, 7)); /* empty: none */
    assert_ok(nd_loss_mask_add(&mask, 9, 20));
    assert_ok(nd_loss_mask_make(&mask, &pair, data, size));
    free(mask.spans.data);
}

static nd_status parse(const uint8_t *data, size_t size, nd_loss_mask_view *out)
{
    return nd_loss_mask_parse(data, size, "x.mask", &pair, out);
}

Test(loss_mask, its_bytes)
{
    static const uint8_t numbers[] = {'N', 'D', 'M', 'A', 'S', 'K', 0, 0, 2, 0, 0, 0, 0, 0,
                                      0,   0,   20,  0,   0,   0,   0, 0, 0, 0, 2, 0, 0, 0,
                                      0,   0,   0,   0,   14,  0,   0, 0, 0, 0, 0, 0};
    static const uint64_t spans[] = {2, 5, 9, 20};
    uint8_t *data;
    size_t size;
    nd_loss_mask_view view;
    make(&data, &size);
    cr_assert_eq(size, HEADER + sizeof spans + DIGEST);
    cr_expect_eq(memcmp(data, numbers, sizeof numbers), 0);
    cr_expect_eq(memcmp(data + sizeof numbers, index_sha256, DIGEST), 0);
    cr_expect_eq(memcmp(data + sizeof numbers + DIGEST, bin_sha256, DIGEST), 0);
    cr_expect_eq(memcmp(data + HEADER, spans, sizeof spans), 0);
    char hex[65];
    assert_ok(nd_sha256(data, HEADER + sizeof spans, hex));
    cr_expect_eq(memcmp(data + HEADER + sizeof spans, hex, DIGEST), 0);
    assert_ok(parse(data, size, &view));
    cr_expect_eq(view.tokens, 20);
    cr_expect_eq(view.spans, 2);
    cr_expect_eq(view.ignored, 14);
    cr_expect_eq(memcmp(view.pairs, spans, sizeof spans), 0);
    cr_expect_eq(memcmp(view.digest, hex, DIGEST), 0);
    free(data);
}

Test(loss_mask, damage_of_any_byte_and_every_cut_are_refused)
{
    uint8_t *data;
    size_t size;
    nd_loss_mask_view view;
    make(&data, &size);
    for (size_t i = 0; i < size; i++) {
        data[i] ^= 0x20;
        cr_expect_eq(parse(data, size, &view), ND_ERR_DATA, "byte %zu", i);
        data[i] ^= 0x20;
    }
    for (size_t cut = 0; cut < size; cut++) {
        uint8_t *copy = malloc(cut + 1); /* so that the sanitizer sees each byte too far */
        cr_assert_not_null(copy);
        memcpy(copy, data, cut);
        assert_fails(parse(copy, cut, &view), ND_ERR_DATA, "truncated");
        free(copy);
    }
    data[0] = 'X';
    assert_fails(parse(data, size, &view), ND_ERR_DATA, "does not begin with NDMASK");
    data[0] = 'N';
    data[8] = 3;
    assert_fails(parse(data, size, &view), ND_ERR_DATA, "version 3");
    data[8] = 2;
    data[HEADER] ^= 1;
    assert_fails(parse(data, size, &view), ND_ERR_DATA, "is damaged");
    free(data);
}

Test(loss_mask, that_of_other_files_is_refused)
{
    static const char other[] = "f123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    uint8_t *data;
    size_t size;
    nd_loss_mask_view view;
    make(&data, &size);
    assert_fails(nd_loss_mask_parse(
                     data, size, "x.mask",
                     &(nd_loss_mask_pair){"x.bin", "x.idx", 21, index_sha256, bin_sha256}, &view),
                 ND_ERR_DATA, "is for 20 tokens, but \"x.bin\" has 21");
    assert_fails(nd_loss_mask_parse(data, size, "x.mask",
                                    &(nd_loss_mask_pair){"x.bin", "x.idx", 20, other, bin_sha256},
                                    &view),
                 ND_ERR_DATA, "another index than \"x.idx\"");
    assert_fails(nd_loss_mask_parse(data, size, "x.mask",
                                    &(nd_loss_mask_pair){"x.bin", "x.idx", 20, index_sha256, other},
                                    &view),
                 ND_ERR_DATA, "other tokens than those of \"x.bin\"");
    free(data);
}

/* A change of any byte of a small .bin is seen, and in a large one that of each piece. */
Test(loss_mask, the_digest_of_a_bin)
{
    enum { PIECE = 64 << 10, PIECES = 256, LARGE = PIECES * PIECE + 1000001 };
    const size_t sizes[] = {1000, PIECES * PIECE, LARGE};
    uint8_t *bin = calloc(LARGE, 1);
    cr_assert_not_null(bin);
    for (int s = 0; s < 3; s++) {
        const size_t size = sizes[s], last = size - PIECE, step = last / (PIECES - 1);
        const size_t small[] = {0, 1, 500, size / 2, size - 1};
        const size_t large[] = {0,          PIECE - 1, step,    7 * step + PIECE - 1,
                                254 * step, last,      size - 1};
        const size_t *places = s == 2 ? large : small;
        char first[65], other[65];
        assert_ok(nd_loss_mask_bin_sha256(bin, size, first));
        for (size_t i = 0; i < (s == 2 ? sizeof large : sizeof small) / sizeof *large; i++) {
            bin[places[i]] = 1;
            assert_ok(nd_loss_mask_bin_sha256(bin, size, other));
            cr_expect_str_neq(first, other, "byte %zu of %zu", places[i], size);
            bin[places[i]] = 0;
        }
        bin[PIECE] = 1; /* between the first two pieces of a large one */
        assert_ok(nd_loss_mask_bin_sha256(bin, size, other));
        cr_expect_eq(strcmp(first, other) == 0, s != 1, "%zu", size);
        bin[PIECE] = 0;
    }
    free(bin);
}

/* What a program writes that does not know the rules: the digest is right, the numbers are not. */
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
        uint8_t *data;
        char hex[65];
        size_t size;
        nd_loss_mask_view view;
        make(&data, &size);
        memcpy(data + 32, &cases[i].ignored, 8);
        memcpy(data + HEADER, cases[i].spans, sizeof cases[i].spans);
        assert_ok(nd_sha256(data, size - DIGEST, hex));
        memcpy(data + size - DIGEST, hex, DIGEST);
        assert_fails(parse(data, size, &view), ND_ERR_DATA, cases[i].words);
        free(data);
    }
}

/* The writer of token files. */

static tempdir dir;

static void setup(void)
{
    tempdir_make(&dir);
}

static void teardown(void)
{
    tempdir_remove(&dir);
}

TestSuite(masked_files, .init = setup, .fini = teardown);

/* Writes five tokens of two documents in two pieces, each with one of the spans if there is one. */
static nd_status write_files(int32_t spans[2][2], nd_status (*before_commit)(void))
{
    char prefix[128];
    nd_megatron_output out;
    nd_corpus_piece pieces[] = {
        {.ids = {(int32_t[]){1, 2, 3}, 3, 0}, .ends = {(int32_t[]){3}, 1, 0}},
        {.ids = {(int32_t[]){4, 5}, 2, 0}, .ends = {(int32_t[]){2}, 1, 0}}};
    for (int i = 0; i < 2 && spans; i++) {
        pieces[i].spans = (nd_ids){spans[i], 2, 0};
    }
    snprintf(prefix, sizeof prefix, "%s/p", dir.path);
    assert_ok(nd_megatron_output_open(prefix, 100, &out));
    assert_ok(nd_megatron_output_write(&out, &pieces[0]));
    assert_ok(nd_megatron_output_write(&out, &pieces[1]));
    nd_status status = before_commit ? before_commit() : ND_OK;
    status = status == ND_OK ? nd_megatron_output_commit(&out) : status;
    nd_megatron_output_fini(&out);
    return status;
}

Test(masked_files, have_a_mask_when_tokens_do_not_count)
{
    static int32_t spans[2][2] = {{2, 3}, {0, 1}}; /* of each piece; they touch at token 3 */
    static const uint64_t whole[] = {2, 4};
    char hex[65], bin_hex[65], *data, *idx;
    size_t size, idx_size;
    nd_loss_mask_view view;
    assert_ok(write_files(spans, NULL));
    assert_ok(nd_sha256((const uint16_t[]){1, 2, 3, 4, 5}, 10, bin_hex));
    assert_ok(nd_fs_read(tempdir_file(&dir, "p.mask"), 1000, ND_ERR_DATA, &data, &size));
    assert_ok(nd_fs_read(tempdir_file(&dir, "p.idx"), 1000, ND_ERR_DATA, &idx, &idx_size));
    assert_ok(nd_sha256(idx, idx_size, hex));
    assert_ok(nd_loss_mask_parse((uint8_t *)data, size, "p.mask",
                                 &(nd_loss_mask_pair){"p.bin", "p.idx", 5, hex, bin_hex}, &view));
    cr_expect_eq(view.spans, 1);
    cr_expect_eq(memcmp(view.pairs, whole, sizeof whole), 0);
    free(data);
    free(idx);
    /* A pair that counts all tokens has none: the old one would belong to other files. */
    assert_ok(write_files(NULL, NULL));
    cr_expect_not(tempdir_has_path(tempdir_file(&dir, "p.mask")));
    cr_expect(tempdir_has_path(tempdir_file(&dir, "p.idx")));
}

Test(masked_files, of_which_no_token_counts_are_not_written)
{
    static int32_t spans[2][2] = {{0, 3}, {0, 2}};
    assert_fails(write_files(spans, NULL), ND_ERR_DATA, "none of the 5 tokens counts");
    cr_expect_not(tempdir_has_path(tempdir_file(&dir, "p.bin")));
    cr_expect_not(tempdir_has_path(tempdir_file(&dir, "p.mask")));
}

/* A folder has the name of the mask. */
static nd_status block_mask(void)
{
    return mkdir(tempdir_file(&dir, "p.mask"), 0700) == 0 ? ND_OK : ND_ERR_INTERNAL;
}

Test(masked_files, appear_together_or_not_at_all)
{
    static int32_t spans[2][2] = {{2, 3}, {0, 1}};
    assert_fails(write_files(spans, block_mask), ND_ERR_CANTCREATE, "cannot be replaced");
    cr_expect_not(tempdir_has_path(tempdir_file(&dir, "p.bin")));
    cr_expect_not(tempdir_has_path(tempdir_file(&dir, "p.idx")));
    cr_assert_eq(rmdir(tempdir_file(&dir, "p.mask")), 0);
}
