// SPDX-License-Identifier: Apache-2.0
/* Megatron files with a loss mask beside them. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/trainer/corpus/corpus_cases.h"
#include "tests/unit/trainer/data/data_cases.h"

enum { S = 7, IGNORED = ND_LABEL_IGNORED, VOCAB = 512, TOKENS = 40 };

static tempdir dir;
static char prefix[128];

static void setup(void)
{
    snprintf(prefix, sizeof prefix, "%s/p", dir.path);
}

TEMPDIR_SUITE(masked, setup);

/* Tokens 0 to 39 in documents of ten, with these spans. */
static void write_files(const int32_t *spans, size_t count)
{
    nd_corpus_piece piece = {0};
    for (int32_t i = 0, end; i < TOKENS; i++) {
        end = i + 1;
        assert_ok(nd_ids_add(&piece.ids, &i, 1));
        assert_ok(nd_ids_add(&piece.ends, &end, end % 10 == 0));
    }
    assert_ok(nd_ids_add(&piece.spans, spans, count));
    assert_ok(corpus_write(prefix, VOCAB, &piece, 1));
    corpus_piece_free(&piece);
}

static nd_status open_files(void)
{
    close_dataset();
    return nd_dataset_open(prefix, ND_DATA_AUTO, "file", VOCAB, S, &dataset);
}

/* Spans of one token, at both ends of blocks, over several blocks, and at the end of the file. */
static const int32_t spans[] = {0, 1, 3, 5, 7, 9, 12, 13, 15, 34, 39, 40};
enum { SPANS = sizeof spans / sizeof *spans };

static bool is_ignored(int32_t token)
{
    for (int i = 0; i < SPANS; i += 2) {
        if (token >= spans[i] && token < spans[i + 1]) {
            return true;
        }
    }
    return false;
}

Test(masked, labels_of_masked_tokens_are_ignored_and_inputs_stay)
{
    int64_t ignored = 0;
    write_files(spans, SPANS);
    assert_ok(open_files());
    for (int64_t b = 0; b < nd_dataset_blocks(dataset); b++) {
        int32_t x[S], y[S];
        assert_ok(nd_dataset_block(dataset, b, &(nd_block){x, y}));
        for (int32_t i = 0; i < S; i++) {
            int32_t token = (int32_t)b * (S + 1) + i;
            cr_expect_eq(x[i], token);
            cr_expect_eq(y[i], is_ignored(token + 1) ? IGNORED : token + 1, "label %d", token);
        }
    }
    assert_ok(nd_dataset_ignored(dataset, &ignored));
    cr_expect_eq(ignored, 1 + 2 + 2 + 1 + 19 + 1);
    write_files(NULL, 0);
    assert_ok(open_files());
    assert_ok(nd_dataset_ignored(dataset, &ignored));
    cr_expect_eq(ignored, 0);
}

Test(masked, digest_and_content_cover_the_mask)
{
    static const int32_t other[] = {0, 1, 3, 6};
    char digests[3][65], contents[3][33];
    for (int i = 0; i < 3; i++) {
        write_files(i == 1 ? other : spans, i == 2 ? 0 : 4);
        assert_ok(open_files());
        assert_ok(nd_dataset_digest(dataset, digests[i]));
        assert_ok(nd_dataset_content(dataset, contents[i]));
    }
    for (int i = 0; i < 3; i++) {
        cr_expect_str_neq(digests[i], digests[(i + 1) % 3]);
        cr_expect_str_neq(contents[i], contents[(i + 1) % 3]);
    }
}

/* The index comes to say that its second document begins after one token. */
Test(masked, boundaries_that_change_meanwhile_are_refused)
{
    const nd_document_rules rules = {.end_of_text = -1, .model_end = -1};
    int32_t x[S], y[S];
    write_files(spans, SPANS);
    assert_ok(open_files());
    assert_ok(nd_dataset_set_documents(dataset, &rules));
    corpus_set_byte(tempdir_file(&dir, "p.idx"), 34 + 4 * 4 + 8, 2);
    assert_fails(nd_dataset_block(dataset, 3, &(nd_block){x, y}), ND_ERR_DATA,
                 "changed since it was opened");
}

static void read_file(const char *name, nd_bytes *out)
{
    char *data;
    assert_ok(nd_fs_read(tempdir_file(&dir, name), 10000, ND_ERR_DATA, &data, &out->count));
    out->data = (uint8_t *)data;
}

/* Files with a mask of these bytes are refused. */
static void mask_fails(const uint8_t *data, size_t size, const char *words)
{
    tempdir_write(&dir, "p.mask", data, size);
    assert_fails(open_files(), ND_ERR_DATA, words);
}

Test(masked, a_mask_that_is_damaged_foreign_or_no_file_is_refused)
{
    nd_bytes mask = {0}, large = {0};
    write_files(spans, SPANS);
    read_file("p.mask", &mask);
    mask.data[110] ^= 1;
    mask_fails(mask.data, mask.count, "p.mask\" is damaged");
    mask.data[110] ^= 1;
    mask_fails(mask.data, mask.count - 1, "truncated");
    mask_fails(mask.data, 0, "truncated");
    /* A file that is too large for a mask of so many tokens is not read. */
    for (int i = 0; i < 20; i++) {
        assert_ok(nd_bytes_add(&large, mask.data, mask.count));
    }
    mask_fails(large.data, large.count, "check that it is the right file");
    /* Other documents of as many tokens: another index. */
    cr_assert_eq(unlink(tempdir_file(&dir, "p.mask")), 0);
    int32_t ids[TOKENS] = {0}, end = TOKENS;
    const nd_corpus_piece one = {.ids = {ids, TOKENS, 0}, .ends = {&end, 1, 0}};
    assert_ok(corpus_write(prefix, VOCAB, &one, 1));
    mask_fails(mask.data, mask.count, "another index");
    /* Other tokens in the same documents: the same index, and another .bin. */
    nd_bytes bin = {0};
    write_files(spans, SPANS);
    read_file("p.bin", &bin);
    bin.data[20] ^= 1;
    tempdir_write(&dir, "p.bin", bin.data, bin.count);
    assert_fails(open_files(), ND_ERR_DATA, "other tokens than those of");
    bin.data[20] ^= 1;
    tempdir_write(&dir, "p.bin", bin.data, bin.count);
    assert_ok(open_files());
    free(bin.data);
    /* A link to nowhere is no mask that is not there. */
    cr_assert_eq(unlink(tempdir_file(&dir, "p.mask")), 0);
    cr_assert_eq(symlink("nothing", tempdir_file(&dir, "p.mask")), 0);
    assert_fails(open_files(), ND_ERR_DATA, "cannot open");
    cr_assert_eq(unlink(tempdir_file(&dir, "p.mask")), 0);
    assert_ok(open_files());
    free(mask.data);
    free(large.data);
}

/* Those of its parts together. */
Test(masked, ignored_tokens_of_a_blend)
{
    nd_dataset_part parts[2] = {{.name = "a"}, {.name = "b"}};
    int64_t ignored = 0;
    for (int i = 0; i < 2; i++) {
        write_files(spans, i == 0 ? SPANS : 4);
        assert_ok(open_files());
        parts[i].data = dataset;
        dataset = NULL; /* the blend takes it over */
    }
    assert_ok(nd_dataset_blend(parts, 2, &dataset));
    assert_ok(nd_dataset_ignored(dataset, &ignored));
    cr_expect_eq(ignored, 26 + 3);
    close_dataset();
}
