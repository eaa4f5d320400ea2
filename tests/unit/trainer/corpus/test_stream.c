// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>
#include <zstd.h>

#include "tests/support/tempdir.h"
#include "trainer/corpus/corpus.h"

static tempdir dir;

TEMPDIR_SUITE(stream, tempdir_leave_empty);

static const char part[] = "some text, some more text, and some text again; ";

/* One gzip member or zstd frame of these bytes; returns its size. */
static size_t compress_bytes(bool gzip, const void *bytes, size_t size, uint8_t *out, size_t room)
{
    if (!gzip) {
        const size_t count = ZSTD_compress(out, room, bytes, size, 3);
        cr_assert(!ZSTD_isError(count));
        return count;
    }
    z_stream z = {.next_in = (uint8_t *)bytes,
                  .avail_in = (unsigned)size,
                  .next_out = out,
                  .avail_out = (unsigned)room};
    cr_assert_eq(deflateInit2(&z, 9, Z_DEFLATED, 16 + 15, 9, Z_DEFAULT_STRATEGY), Z_OK);
    cr_assert_eq(deflate(&z, Z_FINISH), Z_STREAM_END);
    deflateEnd(&z);
    return room - z.avail_out;
}

/* That of `part`, many times; owned by the caller. */
static uint8_t *compress_parts(bool gzip, int times, size_t *size)
{
    size_t plain_size = (sizeof part - 1) * (size_t)times, room = plain_size + 1024;
    char *plain = malloc(plain_size + 1);
    uint8_t *out = malloc(room);
    cr_assert(plain && out);
    for (int i = 0; i < times; i++) {
        memcpy(plain + (size_t)i * (sizeof part - 1), part, sizeof part);
    }
    *size = compress_bytes(gzip, plain, plain_size, out, room);
    free(plain);
    return out;
}

/* Reads a file in pieces and counts its bytes, which must be those of `part`. */
static nd_status read_parts(const char *path, size_t piece, size_t *total)
{
    nd_text_stream *stream;
    char buffer[4096];
    size_t got = piece;
    *total = 0;
    ND_TRY(nd_text_stream_open(path, &stream));
    nd_status status = ND_OK;
    while (status == ND_OK && got == piece) {
        status = nd_text_stream_read(stream, buffer, piece, &got);
        for (size_t i = 0; status == ND_OK && i < got; i++) {
            cr_assert_eq(buffer[i], part[(*total + i) % (sizeof part - 1)]);
        }
        *total += got;
    }
    nd_text_stream_close(stream);
    return status;
}

Test(stream, members_and_frames_follow_one_another)
{
    for (int gzip = 0; gzip < 2; gzip++) {
        size_t size, total;
        uint8_t *one = compress_parts(gzip, 20000, &size);
        uint8_t *two = malloc(2 * size);
        cr_assert_not_null(two);
        memcpy(two, one, size);
        memcpy(two + size, one, size);
        const char *path = tempdir_write(&dir, "two", two, 2 * size);
        for (size_t piece = 1; piece <= 4096; piece = piece * 9 + 1) {
            assert_ok(read_parts(path, piece, &total));
            cr_expect_eq(total, 2 * 20000 * (sizeof part - 1));
        }
        free(two);
        free(one);
    }
}

Test(stream, zeros_may_pad_a_gzip_file)
{
    size_t size, total;
    uint8_t *one = compress_parts(true, 10, &size);
    one = realloc(one, size + 512);
    cr_assert_not_null(one);
    memset(one + size, 0, 512);
    assert_ok(read_parts(tempdir_write(&dir, "padded", one, size + 512), 100, &total));
    cr_expect_eq(total, 10 * (sizeof part - 1));
    memcpy(one + size, "rest", 4);
    assert_fails(read_parts(tempdir_write(&dir, "rest", one, size + 512), 100, &total), ND_ERR_DATA,
                 "damaged");
    free(one);
}

/* Wherever the file is cut, it is not taken for a whole one. */
Test(stream, a_cut_file_is_refused)
{
    for (int gzip = 0; gzip < 2; gzip++) {
        size_t size, total;
        uint8_t *one = compress_parts(gzip, 40, &size);
        for (size_t cut = 5; cut < size; cut++) {
            const char *path = tempdir_write(&dir, "cut", one, cut);
            assert_fails(read_parts(path, 64, &total), ND_ERR_DATA, "truncated");
        }
        if (gzip) { /* all of the text comes before the sums that are cut */
            assert_fails(read_parts(tempdir_file(&dir, "cut"), 4096, &total), ND_ERR_DATA,
                         "after 1920 bytes of text");
        }
        free(one);
    }
}

/* A skippable frame of so many bytes. */
static size_t put_skippable(uint8_t *out, int number, uint32_t size)
{
    const uint8_t magic[] = {(uint8_t)(0x50 + number), 0x2a, 0x4d, 0x18};
    memcpy(out, magic, sizeof magic);
    memcpy(out + 4, &size, sizeof size);
    memset(out + 8, 'x', size);
    return 8 + size;
}

/* Wherever they stand; pzstd writes one before each frame. */
Test(stream, skippable_frames_of_zstd_are_no_text)
{
    size_t size, total;
    uint8_t *one = compress_parts(false, 100, &size);
    uint8_t *all = malloc(2 * size + 100);
    cr_assert_not_null(all);
    for (int number = 0; number < 16; number++) {
        size_t n = put_skippable(all, number, (uint32_t)number);
        memcpy(all + n, one, size);
        n += size;
        n += put_skippable(all + n, 15 - number, 4);
        memcpy(all + n, one, size);
        n += size;
        assert_ok(read_parts(tempdir_write(&dir, "frames", all, n), 100, &total));
        cr_expect_eq(total, 2 * 100 * (sizeof part - 1));
    }
    const size_t n = put_skippable(all, 3, 20);
    assert_ok(read_parts(tempdir_write(&dir, "empty", all, n), 100, &total));
    cr_expect_eq(total, 0);
    for (size_t cut = 5; cut < n; cut++) {
        assert_fails(read_parts(tempdir_write(&dir, "cut", all, cut), 100, &total), ND_ERR_DATA,
                     "truncated");
    }
    free(all);
    free(one);
}

/* By their names they are compressed; as texts they would be empty, or rubbish. */
Test(stream, compressed_files_of_a_few_bytes_are_refused)
{
    static const char *const names[] = {"a.jsonl.gz", "a.txt.zst"};
    size_t total;
    for (size_t size = 0; size < 4; size++) {
        for (int i = 0; i < 2; i++) {
            const char *path = tempdir_write(&dir, names[i], "\x28\xb5\x2f", size);
            assert_fails(read_parts(path, 10, &total), ND_ERR_DATA, "too short for compressed");
        }
    }
    assert_ok(read_parts(tempdir_write(&dir, "gz", part, 2), 10, &total));
    assert_ok(read_parts(tempdir_write(&dir, "plain.gz", part, 4), 10, &total));
}

Test(stream, damage_is_found)
{
    size_t size, total;
    uint8_t *one = compress_parts(true, 400, &size);
    one[size - 6] ^= 1; /* the checksum of gzip */
    assert_fails(read_parts(tempdir_write(&dir, "sum", one, size), 64, &total), ND_ERR_DATA,
                 "damaged");
    free(one);
    const char window[] = "\x28\xb5\x2f\xfd\x00\x90\x01\x00\x00"; /* asks for 256 MiB */
    assert_fails(read_parts(tempdir_write(&dir, "window", window, sizeof window - 1), 64, &total),
                 ND_ERR_DATA, "window");
}

/* A file of zeros is refused before all `most` of them are read. */
static void assert_endless(const char *path, size_t most)
{
    static char buffer[1 << 20];
    size_t got = 1, total = 0;
    nd_text_stream *stream;
    nd_status status = ND_OK;
    assert_ok(nd_text_stream_open(path, &stream));
    while (status == ND_OK && got > 0) {
        status = nd_text_stream_read(stream, buffer, sizeof buffer, &got);
        total += got;
    }
    cr_expect_eq(status, ND_ERR_DATA);
    cr_expect_not_null(strstr(nd_error_last()->message, "expands more than"));
    cr_expect_lt(total, most);
    nd_text_stream_close(stream);
}

/* Members or frames of zeros, one after the other: each has at most a thousandth of its text. */
Test(stream, files_that_expand_without_end_are_refused)
{
    enum { MEMBER = 4 << 20, MEMBERS = 128, ROOM = 1 << 20 };
    static uint8_t zeros[MEMBER], out[ROOM];
    for (int gzip = 0; gzip < 2; gzip++) {
        const size_t size = compress_bytes(gzip, zeros, MEMBER, out, ROOM);
        cr_assert_lt(size * MEMBERS, ROOM);
        for (size_t i = 1; i < MEMBERS; i++) {
            memcpy(out + i * size, out, size);
        }
        assert_endless(tempdir_write(&dir, "bomb", out, size * MEMBERS), (size_t)MEMBER * MEMBERS);
    }
}

Test(stream, other_files_are_refused)
{
    nd_text_stream *stream;
    assert_fails(nd_text_stream_open(tempdir_file(&dir, "none"), &stream), ND_ERR_DATA,
                 "cannot open");
    assert_fails(nd_text_stream_open(dir.path, &stream), ND_ERR_DATA, "is a folder, not a file");
    cr_assert_eq(mkfifo(tempdir_file(&dir, "pipe"), 0600), 0);
    assert_fails(nd_text_stream_open(tempdir_file(&dir, "pipe"), &stream), ND_ERR_DATA,
                 "not a file");
    assert_fails(nd_text_stream_open(tempdir_write(&dir, "x", "PAR1....", 8), &stream), ND_ERR_DATA,
                 "a Parquet file");
}
