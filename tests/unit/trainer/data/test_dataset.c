// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/skip.h"
#include "tests/unit/trainer/corpus/corpus_cases.h"
#include "tests/unit/trainer/data/data_cases.h"

enum { IGNORED = ND_LABEL_IGNORED };

static tempdir dir;

TEMPDIR_SUITE(dataset, tempdir_leave_empty);

static nd_status try_open(const char *path, nd_data_format format, const char *tokenizer,
                          int64_t vocab, int64_t sequence)
{
    bool ids, rows = false;
    close_dataset();
    assert_ok(nd_data_holds(path, format, &ids, &rows));
    return rows ? nd_dataset_open_text(path, format, corpus_request(&dir, NULL, vocab), sequence,
                                       &dataset)
                : nd_dataset_open(path, format, tokenizer, vocab, sequence, &dataset);
}

static nd_status open_text_of(const char *name, const char *text, int64_t sequence)
{
    const char *path = tempdir_write(&dir, name, text, strlen(text));
    return try_open(path, ND_DATA_AUTO, "bytes", 256, sequence);
}

static void assert_block(int64_t index, int64_t n, const int32_t *inputs, const int32_t *labels)
{
    int32_t x[64], y[64];
    assert_ok(nd_dataset_block(dataset, index, &(nd_block){x, y}));
    for (int64_t i = 0; i < n; i++) {
        cr_assert_eq(x[i], inputs[i], "input %ld is %d", (long)i, x[i]);
        cr_assert_eq(y[i], labels[i], "label %ld is %d", (long)i, y[i]);
    }
}

Test(dataset, text_is_cut_into_blocks_and_the_short_last_one_is_kept)
{
    assert_ok(open_text_of("a.txt", "abcdefgh\xff\x01z", 4));
    cr_assert_eq(nd_dataset_tokens(dataset), 11);
    cr_assert_eq(nd_dataset_blocks(dataset), 2); /* 5 + 5 + 1: one token alone has no label */
    cr_assert_str_eq(dataset->format->name, "text");
    assert_block(0, 4, (int32_t[]){'a', 'b', 'c', 'd'}, (int32_t[]){'b', 'c', 'd', 'e'});
    assert_block(1, 4, (int32_t[]){'f', 'g', 'h', 0xff}, (int32_t[]){'g', 'h', 0xff, 1});
    assert_ok(open_text_of("b.txt", "abcdefgh", 4));
    cr_assert_eq(nd_dataset_blocks(dataset), 2);
    assert_block(1, 4, (int32_t[]){'f', 'g', 'h', 0}, (int32_t[]){'g', 'h', IGNORED, IGNORED});
    assert_ok(open_text_of("c", "abcdefghi", 4)); /* no suffix: text; exactly S in the last */
    assert_block(1, 4, (int32_t[]){'f', 'g', 'h', 'i'}, (int32_t[]){'g', 'h', 'i', IGNORED});
}

Test(dataset, text_errors_say_what_to_do)
{
    assert_fails(try_open("", ND_DATA_AUTO, "bytes", 256, 4), ND_ERR_DATA, "set data.path");
    assert_fails(try_open(tempdir_file(&dir, "no.txt"), ND_DATA_AUTO, "bytes", 256, 4), ND_ERR_DATA,
                 "does not exist");
    assert_fails(try_open(dir.path, ND_DATA_AUTO, "bytes", 256, 4), ND_ERR_DATA, "is a folder");
    assert_fails(open_text_of("a.txt", "", 4), ND_ERR_DATA, "is empty");
    assert_fails(open_text_of("b.txt", "x", 4), ND_ERR_DATA, "a single token");
    const char *path = tempdir_write(&dir, "c.txt", "text", 4);
    assert_fails(try_open(path, ND_DATA_AUTO, "bytes", 32000, 4), ND_ERR_CONFIG,
                 "vocab_size is 32000");
    assert_fails(try_open(path, ND_DATA_AUTO, "file", 256, 4), ND_ERR_CONFIG, "holds no token ids");
}

Test(dataset, text_may_begin_with_a_byte_order_mark)
{
    assert_ok(open_text_of("a.txt",
                           "\xef\xbb\xbf"
                           "abc",
                           2));
    cr_assert_eq(nd_dataset_tokens(dataset), 3);
    assert_block(0, 2, (int32_t[]){'a', 'b'}, (int32_t[]){'b', 'c'});
    assert_fails(open_text_of("a.txt", "\xff\xfe\x61\x01", 2), ND_ERR_DATA, "iconv -f UTF-16");
}

Test(dataset, known_binary_files_are_no_text)
{
    static const char *const begin[][2] = {
        {"\x1f\x8b\x08\x01", "gzip"}, {"\x28\xb5\x2f\xfd", "zstd"},  {"\xfd\x37zXZ", "xz"},
        {"BZh91AY&SY", "bzip2"},      {"PK\x03\x04", "zip archive"}, {"ARROW1", "Arrow"},
        {"PAR1", "Parquet"},          {"%PDF-1.7", "PDF"},           {"\x89PNG\r\n", "PNG"},
        {"MMIDIDX", "Megatron index"}};
    for (size_t i = 0; i < sizeof begin / sizeof *begin; i++) {
        char text[64];
        memset(text, 'x', sizeof text);
        memcpy(text, begin[i][0], strlen(begin[i][0]));
        const char *path = tempdir_write(&dir, "a.txt", text, sizeof text);
        assert_fails(try_open(path, ND_DATA_TEXT, "bytes", 256, 4), ND_ERR_DATA, begin[i][1]);
    }
}

/* test_rows_of_bytes.c tests what is wrong with rows. */
Test(dataset, jsonl_needs_a_tokenizer_of_the_model)
{
    const char *path = tempdir_write(&dir, "b.jsonl", "{\"text\": \"abcdef\"}\n", 19);
    assert_fails(try_open(path, ND_DATA_AUTO, "bytes", 300, 4), ND_ERR_CONFIG, "vocab_size is 300");
    assert_fails(nd_dataset_open(path, ND_DATA_AUTO, "file", 300, 4, &dataset), ND_ERR_CONFIG,
                 "holds no token ids");
}

/* llm.c files. */

static const char *write_llmc(int32_t magic, int32_t version, int32_t announced, const void *ids,
                              size_t bytes)
{
    static uint8_t file[4096];
    int32_t header[256] = {magic, version, announced};
    memcpy(file, header, sizeof header);
    memcpy(file + sizeof header, ids, bytes);
    return tempdir_write(&dir, "a.bin", file, sizeof header + bytes);
}

Test(dataset, llmc_files_of_both_widths)
{
    const uint16_t narrow[] = {1, 2, 65535, 4, 5, 6};
    assert_ok(try_open(write_llmc(20240520, 1, 6, narrow, sizeof narrow), ND_DATA_AUTO, "file",
                       65536, 3));
    cr_assert_str_eq(dataset->format->name, "llmc");
    assert_block(0, 3, (int32_t[]){1, 2, 65535}, (int32_t[]){2, 65535, 4});
    assert_block(1, 3, (int32_t[]){5, 6, 0}, (int32_t[]){6, IGNORED, IGNORED});
    const uint32_t wide[] = {128000, 128255, 0};
    assert_ok(
        try_open(write_llmc(20240801, 7, 3, wide, sizeof wide), ND_DATA_LLMC, "file", 128256, 2));
    assert_block(0, 2, (int32_t[]){128000, 128255}, (int32_t[]){128255, 0});
}

Test(dataset, llmc_errors)
{
    const uint16_t ids[] = {1, 2, 3, 4};
    static const struct {
        int32_t magic, version, announced;
        size_t bytes;
        const char *words;
    } cases[] = {{20240520, 1, 5, sizeof ids, "announces 5 tokens"},
                 {20240520, 1, 3, sizeof ids, "announces 3 tokens"},
                 {20240520, 1, -4, sizeof ids, "announces -4 tokens"},
                 {20240520, 7, 4, sizeof ids, "version 7"},
                 {20240801, 1, 2, sizeof ids, "version 1"},
                 {5, 1, 4, sizeof ids, "begins with magic 5"},
                 {20240520, 1, 0, 0, "is empty"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *path =
            write_llmc(cases[i].magic, cases[i].version, cases[i].announced, ids, cases[i].bytes);
        assert_fails(
            try_open(path, cases[i].magic == 5 ? ND_DATA_LLMC : ND_DATA_AUTO, "file", 9, 3),
            ND_ERR_DATA, cases[i].words);
    }
    assert_fails(
        try_open(tempdir_write(&dir, "a.bin", ids, sizeof ids), ND_DATA_LLMC, "file", 9, 3),
        ND_ERR_DATA, "less than the 1024");
    assert_fails(try_open(write_llmc(20240520, 1, 4, ids, sizeof ids), ND_DATA_AUTO, "bytes", 9, 3),
                 ND_ERR_CONFIG, "set data.tokenizer to \"file\"");
    int32_t x[4], y[4];
    assert_ok(try_open(write_llmc(20240520, 1, 4, ids, sizeof ids), ND_DATA_AUTO, "file", 4, 3));
    assert_fails(nd_dataset_block(dataset, 0, &(nd_block){x, y}), ND_ERR_DATA,
                 "token 3 (byte 1030) has id 4, but the model's vocabulary ends at 3");
}

/* Megatron files. */

typedef struct idx_file {
    uint8_t data[1024];
    size_t size;
} idx_file;

static void put(idx_file *f, const void *p, size_t n)
{
    memcpy(f->data + f->size, p, n);
    f->size += n;
}

/* Three sequences of 3, 2 and 4 tokens in two documents. */
static idx_file make_idx(uint8_t code, int64_t width)
{
    idx_file f = {.size = 0};
    const int32_t lengths[] = {3, 2, 4};
    const int64_t pointers[] = {0, 3 * width, 5 * width}, documents[] = {0, 2, 3};
    const uint64_t version = 1, sequences = 3, boundaries = 3;
    put(&f, "MMIDIDX\0", 9);
    put(&f, &version, 8);
    put(&f, &code, 1);
    put(&f, &sequences, 8);
    put(&f, &boundaries, 8);
    put(&f, lengths, sizeof lengths);
    put(&f, pointers, sizeof pointers);
    put(&f, documents, sizeof documents);
    return f;
}

static const uint16_t nine[] = {10, 11, 12, 13, 14, 15, 16, 17, 18};

static nd_status open_pair(const idx_file *idx, const void *bin, size_t bytes)
{
    tempdir_write(&dir, "m.bin", bin, bytes);
    return try_open(tempdir_write(&dir, "m.idx", idx->data, idx->size), ND_DATA_MEGATRON, "file",
                    256, 4);
}

Test(dataset, megatron_pair_by_any_of_its_names)
{
    idx_file idx = make_idx(8, 2);
    tempdir_write(&dir, "m.bin", nine, sizeof nine);
    tempdir_write(&dir, "m.idx", idx.data, idx.size);
    const char *names[] = {"m", "m.bin", "m.idx"};
    for (int i = 0; i < 3; i++) {
        assert_ok(try_open(tempdir_file(&dir, names[i]), ND_DATA_AUTO, "file", 256, 4));
        cr_assert_str_eq(dataset->format->name, "megatron");
        cr_assert_eq(nd_dataset_tokens(dataset), 9);
        assert_block(0, 4, (int32_t[]){10, 11, 12, 13}, (int32_t[]){11, 12, 13, 14});
        assert_block(1, 4, (int32_t[]){15, 16, 17, 18}, (int32_t[]){16, 17, 18, IGNORED});
    }
    /* A text of that name, which has an index beside it. */
    assert_ok(try_open(tempdir_write(&dir, "m", "a text", 6), ND_DATA_AUTO, "bytes", 256, 4));
    cr_assert_str_eq(dataset->format->name, "text");
}

Test(dataset, megatron_token_types_and_modes)
{
    static const uint8_t types[][2] = {{1, 1}, {2, 1}, {3, 2}, {4, 4}, {8, 2}, {5, 8}};
    const int64_t far = (int64_t)1 << 40;
    idx_file idx;
    int32_t x[4], y[4];
    uint8_t bin[9 * 8];
    for (int t = 0; t < 6; t++) {
        const size_t width = types[t][1];
        idx = make_idx(types[t][0], types[t][1]);
        for (size_t i = 0; i < 9; i++) {
            const int64_t id = nine[i];
            memcpy(bin + i * width, &id, width);
        }
        if (t == 0) {
            put(&idx, "\0\1\0", 3); /* modes, one byte a sequence */
        }
        assert_ok(open_pair(&idx, bin, 9 * width));
        assert_block(1, 4, (int32_t[]){15, 16, 17, 18}, (int32_t[]){16, 17, 18, IGNORED});
    }
    memcpy(bin + 6 * 8, &far, 8); /* of the last type */
    assert_ok(open_pair(&idx, bin, sizeof bin));
    assert_fails(nd_dataset_block(dataset, 1, &(nd_block){x, y}), ND_ERR_DATA,
                 "token 6 (byte 48) has id 1099511627776");
    memset(bin + 8 * 4, 0xff, 4);
    idx = make_idx(4, 4);
    assert_ok(open_pair(&idx, bin, 9 * 4));
    assert_fails(nd_dataset_block(dataset, 1, &(nd_block){x, y}), ND_ERR_DATA,
                 "token 8 (byte 32) has the negative id -1");
}

/* The good index with one field changed. */
static nd_status open_with(size_t at, int64_t value, size_t bytes)
{
    idx_file idx = make_idx(8, 2);
    memcpy(idx.data + at, &value, bytes);
    return open_pair(&idx, nine, sizeof nine);
}

Test(dataset, megatron_index_that_disagrees_or_is_damaged)
{
    idx_file idx = make_idx(8, 2);
    assert_ok(open_pair(&idx, nine, sizeof nine));
    assert_fails(open_pair(&idx, nine, sizeof nine - 2), ND_ERR_DATA,
                 "truncated, or they are not a pair");
    assert_fails(open_pair(&idx, nine, sizeof nine - 1), ND_ERR_DATA, "has 17");
    assert_fails(open_pair(&idx, nine, 8), ND_ERR_DATA, "describes at least 10 bytes");
    assert_fails(open_with(0, 'X', 1), ND_ERR_DATA, "MMIDIDX");
    assert_fails(open_with(9, 2, 8), ND_ERR_DATA, "version 2");
    assert_fails(open_with(17, 7, 1), ND_ERR_DATA, "type code 7");
    assert_fails(open_with(17, 200, 1), ND_ERR_DATA, "type code 200");
    assert_fails(open_with(17, 4, 1), ND_ERR_DATA, "begins at byte 6 of the .bin, where 12");
    assert_fails(open_with(18, INT64_MAX, 8), ND_ERR_DATA, "does not match its");
    assert_fails(open_with(18, (int64_t)1 << 62, 8), ND_ERR_DATA, "does not match its");
    assert_fails(open_with(26, INT64_C(-1), 8), ND_ERR_DATA, "does not match its");
    assert_fails(open_with(34, -3, 4), ND_ERR_DATA, "has length -3");
    assert_fails(open_with(34, 4, 4), ND_ERR_DATA, "begins at byte 6");
    assert_fails(open_with(34 + 12 + 8, 4, 8), ND_ERR_DATA, "begins at byte 4");
    assert_fails(open_with(34 + 12 + 24, 1, 8), ND_ERR_DATA, "document boundary 0 is 1");
    assert_fails(open_with(34 + 12 + 24 + 8, 9, 8), ND_ERR_DATA, "document boundary 1 is 9");
    assert_fails(open_with(34 + 12 + 24 + 16, 2, 8), ND_ERR_DATA, "end at sequence 2");
    assert_fails(open_with(34 + 12 + 24 + 16, 1, 8), ND_ERR_DATA, "boundary 2 is 1 after 2");
    for (size_t size = 0; size < idx.size; size++) {
        idx_file cut = idx;
        cut.size = size;
        assert_fails(open_pair(&cut, nine, sizeof nine), ND_ERR_DATA, "truncated");
    }
    unlink(tempdir_file(&dir, "m.idx"));
    assert_fails(try_open(tempdir_file(&dir, "m.bin"), ND_DATA_AUTO, "file", 256, 4), ND_ERR_DATA,
                 "is missing");
    tempdir_write(&dir, "m.idx", idx.data, idx.size);
    unlink(tempdir_file(&dir, "m.bin"));
    assert_fails(try_open(tempdir_file(&dir, "m.idx"), ND_DATA_AUTO, "file", 256, 4), ND_ERR_DATA,
                 "m.bin\" does not exist");
    assert_fails(try_open(tempdir_file(&dir, "none"), ND_DATA_AUTO, "file", 256, 4), ND_ERR_DATA,
                 "none\" does not exist");
}

/* A document begins within a block, after 2^32 - 2 tokens: 16 GiB. */
Test(dataset, tokens_far_behind_in_a_file)
{
    const nd_document_rules separate = {ND_DOCUMENTS_SEPARATE, .end_of_text = -1, .model_end = -1};
    const int32_t lengths[] = {INT32_MAX, INT32_MAX}, last[] = {15, 16, 17, 18};
    const int64_t half = INT32_MAX, places[] = {4 * half, 8 * half}, index = 2 * half / 7;
    int32_t x[6], y[6], first_keys[6];
    nd_block block = {x, y, first_keys};
    idx_file idx = make_idx(4, 4);
    memcpy(idx.data + 34, lengths, sizeof lengths);
    memcpy(idx.data + 34 + 12 + 8, places, sizeof places);
    tempdir_write(&dir, "m.idx", idx.data, idx.size);
    const char *path = tempdir_write(&dir, "m.bin", "", 0);
    const int fd = open(path, O_WRONLY);
    signal(SIGXFSZ, SIG_IGN);
    const ssize_t wrote = pwrite(fd, last, sizeof last, places[1]);
    close(fd);
    if (wrote != sizeof last) {
        tempdir_remove(&dir);
        skip_test("no sparse file of 16 GiB can be written here");
    }
    for (int64_t vocab = 17; vocab <= 19; vocab += 2) {
        assert_ok(try_open(path, ND_DATA_AUTO, "file", vocab, 6));
        assert_ok(nd_dataset_set_documents(dataset, &separate));
        if (vocab == 17) {
            assert_fails(nd_dataset_block(dataset, index, &block), ND_ERR_DATA,
                         "token 4294967296 (byte 17179869184) has id 17");
        }
    }
    assert_ok(nd_dataset_block(dataset, index, &block));
    cr_expect_arr_eq(x, ((int32_t[]){0, 0, 15, 16, 17, 18}), sizeof x);
    cr_expect_arr_eq(y, ((int32_t[]){0, IGNORED, 16, 17, 18, IGNORED}), sizeof y);
    cr_expect_arr_eq(first_keys, ((int32_t[]){0, 0, 2, 2, 2, 2}), sizeof first_keys);
}

/* Digest. */

static void digest_of(const uint8_t *data, size_t size, char hex[65])
{
    assert_ok(try_open(tempdir_write(&dir, "d.txt", data, size), ND_DATA_TEXT, "bytes", 256, 4));
    assert_ok(nd_dataset_digest(dataset, hex));
}

Test(dataset, digest_sees_size_beginning_and_end_of_a_large_file_and_all_of_a_small_one)
{
    enum { LARGE = 1 << 20 };
    static uint8_t data[LARGE];
    char first[65], other[65];
    const size_t sizes[] = {1000, LARGE};
    for (int s = 0; s < 2; s++) {
        size_t size = sizes[s];
        digest_of(data, size, first);
        cr_assert_eq(strlen(first), 64);
        digest_of(data, size, other);
        cr_assert_str_eq(first, other);
        digest_of(data, size - 1, other);
        cr_assert_str_neq(first, other);
        const size_t places[] = {0, size - 1};
        for (int p = 0; p < 2; p++) {
            data[places[p]] = 1;
            digest_of(data, size, other);
            cr_assert_str_neq(first, other);
            data[places[p]] = 0;
        }
    }
}

static void expect_content(bool same, const char *before)
{
    char now[33];
    assert_ok(nd_dataset_content(dataset, now));
    cr_assert_eq(strlen(now), 32);
    cr_assert_eq(strcmp(before, now) == 0, same, "%s and %s", before, now);
}

/* nd_dataset_digest does not see a byte between its samples; nd_dataset_content does. */
Test(dataset, content_sees_each_byte_of_a_file_of_64_mib)
{
    enum { SMALL = 1 << 20, LARGE = (64 << 20) + 12345 };
    const struct {
        off_t size, changed;
    } cases[] = {{SMALL, 8000}, {LARGE - 12345, 40000001}, {LARGE, 0}, {LARGE, LARGE - 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char before[33], digests[2][65];
        const char *path = tempdir_write(&dir, "c.txt", "a", 1);
        cr_assert_eq(truncate(path, cases[i].size), 0);
        assert_ok(try_open(path, ND_DATA_TEXT, "bytes", 256, 4));
        assert_ok(nd_dataset_content(dataset, before));
        assert_ok(nd_dataset_digest(dataset, digests[0]));
        corpus_set_byte(path, cases[i].changed, 'x');
        assert_ok(nd_dataset_digest(dataset, digests[1]));
        cr_assert_eq(strcmp(digests[0], digests[1]) == 0, i < 2);
        assert_ok(try_open(path, ND_DATA_TEXT, "bytes", 256, 4));
        expect_content(false, before);
    }
}

Test(dataset, content_sees_the_index_of_megatron_data)
{
    char before[33];
    idx_file idx = make_idx(8, 2);
    assert_ok(open_pair(&idx, nine, sizeof nine));
    assert_ok(nd_dataset_content(dataset, before));
    assert_ok(open_pair(&idx, nine, sizeof nine));
    expect_content(true, before);
    assert_ok(open_with(34 + 12 + 24 + 8, 1, 8));
    expect_content(false, before);
}

Test(dataset, the_digest_of_a_file_that_became_shorter_is_an_error)
{
    static uint8_t text[1 << 20];
    char hex[65];
    memset(text, 'a', sizeof text);
    const char *path = tempdir_write(&dir, "a.txt", text, sizeof text);
    assert_ok(nd_dataset_open(path, ND_DATA_AUTO, "bytes", 256, 16, &dataset));
    cr_assert_eq(truncate(path, 1000), 0);
    assert_fails(nd_dataset_digest(dataset, hex), ND_ERR_IO, "became shorter");
    assert_fails(nd_dataset_content(dataset, hex), ND_ERR_IO, "became shorter");
}
