// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "tests/support/tempdir.h"
#include "trainer/checkpoint/hashes.h"

/* Bytes of a file of three chunks, the last one short. */
enum { FILE_BYTES = 2 * ND_CHUNK_BYTES + 12345 };

static uint8_t *make_bytes(void)
{
    uint8_t *data = malloc(FILE_BYTES);
    for (size_t i = 0; i < FILE_BYTES; i++) {
        data[i] = (uint8_t)(i * i >> 7);
    }
    return data;
}

/* Added in pieces of any size, chunks have the digests that they have alone. */
static void check_chunks(nd_checksum kind)
{
    uint8_t *data = make_bytes(), alone[ND_HASH_MAX];
    nd_hash *whole = NULL;
    static const size_t pieces[] = {1, 4096, ND_CHUNK_BYTES - 1, ND_CHUNK_BYTES + 7, FILE_BYTES};
    assert_ok(nd_chunk_hash_create(kind, &whole));
    for (size_t p = 0; p < sizeof pieces / sizeof *pieces; p++) {
        nd_chunk_hasher *hasher = NULL;
        nd_hashed_file file = {0};
        assert_ok(nd_chunk_hasher_create(kind, FILE_BYTES, &hasher));
        for (size_t at = 0; at < FILE_BYTES;) {
            size_t n = FILE_BYTES - at < pieces[p] ? FILE_BYTES - at : pieces[p];
            n = p == 0 && at > 5 ? FILE_BYTES - at : n;
            assert_ok(nd_chunk_hasher_add(hasher, data + at, n));
            at += n;
        }
        assert_ok(nd_chunk_hasher_finish(hasher, &file));
        nd_chunk_hasher_destroy(hasher);
        cr_assert_eq(file.chunks, 3);
        for (int64_t c = 0; c < 3; c++) {
            size_t begin = (size_t)c * ND_CHUNK_BYTES;
            size_t n = FILE_BYTES - begin < ND_CHUNK_BYTES ? FILE_BYTES - begin : ND_CHUNK_BYTES;
            assert_ok(nd_hash_begin(whole));
            assert_ok(nd_hash_add(whole, data + begin, n));
            assert_ok(nd_hash_end(whole, alone));
            cr_assert_arr_eq(file.digests + c * nd_checksum_chunk_bytes(kind), alone,
                             (size_t)nd_checksum_chunk_bytes(kind));
        }
        free(file.digests);
    }
    nd_hash_destroy(whole);
    free(data);
}

Test(hashes, chunks_have_the_same_digest_however_they_are_added)
{
    check_chunks(ND_CHECKSUM_XXH3);
    check_chunks(ND_CHECKSUM_SHA256);
}

Test(hashes, digests_are_those_of_the_public_functions)
{
    char text[ND_DIGEST_TEXT_MAX], hex[65];
    assert_ok(nd_digest_text(ND_CHECKSUM_XXH3, "", 0, text));
    cr_assert_str_eq(text, "xxh3:99aa06d3014798d86001c324468d497f"); /* of xxhsum -H2 */
    assert_ok(nd_digest_text(ND_CHECKSUM_SHA256, "abc", 3, text));
    assert_ok(nd_sha256("abc", 3, hex));
    cr_assert_str_eq(text + 7, hex);
    cr_assert(nd_digest_text_is_valid(text));
    cr_assert_not(nd_digest_text_is_valid("xxh3:99aa06d3014798d86001c324468d497"));
    cr_assert_not(nd_digest_text_is_valid("xxh3:99aa06d3014798d86001c324468d497G"));
    cr_assert_not(nd_digest_text_is_valid("md5:99aa06d3014798d86001c324468d497f"));
}

static nd_hashes make_hashes(nd_checksum kind)
{
    nd_hashes hashes = {.kind = kind, .count = 2};
    const uint64_t bytes[2] = {1, ND_CHUNK_BYTES + 1};
    for (int i = 0; i < 2; i++) {
        nd_hashed_file *file = &hashes.files[i];
        snprintf(file->name, sizeof file->name, "file-%d", i);
        file->bytes = bytes[i];
        file->chunks = i + 1;
        size_t n = (size_t)file->chunks * (size_t)nd_checksum_chunk_bytes(kind);
        file->digests = malloc(n);
        memset(file->digests, 17 * (i + 1), n);
    }
    return hashes;
}

Test(hashes, a_hash_file_is_read_back_and_every_cut_is_refused)
{
    for (int kind = 0; kind < ND_CHECKSUM_COUNT; kind++) {
        nd_hashes hashes = make_hashes(kind), got = {0};
        uint8_t *data = NULL;
        size_t bytes = 0;
        assert_ok(nd_hashes_format(&hashes, &data, &bytes));
        assert_ok(nd_hashes_parse(data, bytes, "f", &got));
        cr_assert(got.kind == hashes.kind && got.count == 2);
        const nd_hashed_file *file = nd_hashes_find(&got, "file-1");
        cr_assert_not_null(file);
        cr_assert(file->bytes == ND_CHUNK_BYTES + 1 && file->chunks == 2);
        cr_assert_eq(file->digests[0], 34);
        cr_assert_null(nd_hashes_find(&got, "file-2"));
        nd_hashes_fini(&got);
        for (size_t cut = 0; cut < bytes; cut++) {
            cr_assert_eq(nd_hashes_parse(data, cut, "f", &got), ND_ERR_DATA, "cut at %zu", cut);
        }
        data = realloc(data, bytes + 1);
        data[bytes] = 0;
        assert_fails(nd_hashes_parse(data, bytes + 1, "f", &got), ND_ERR_DATA, "appended");
        free(data);
        nd_hashes_fini(&hashes);
    }
}

Test(hashes, refuses_names_and_counts_that_cannot_be)
{
    static const struct {
        size_t at;
        const char *bytes;
        const char *words;
    } bad[] = {
        {0, "X", "first bytes"},
        {8, "\2", "version 2"},
        {12, "\7", "kind of checksum"},
        {16, "\11", "kind of checksum"},
        {20, "\21", "more files"},
        {24, "../x", "plain file name"},
        {24, ".", "plain file name"},
        {24, "a/b", "plain file name"},
        {24, "file-1", "name twice"},
        {24 + 80 + 3, "\1", "number of chunks"},
        {24 + 88, "\2", "number of chunks"},
        {24 + 80 + 7, "\377", "number of chunks"},
    };
    nd_hashes hashes = make_hashes(ND_CHECKSUM_XXH3), got = {0};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        uint8_t *data = NULL;
        size_t bytes = 0;
        assert_ok(nd_hashes_format(&hashes, &data, &bytes));
        memcpy(data + bad[i].at, bad[i].bytes, strlen(bad[i].bytes));
        assert_fails(nd_hashes_parse(data, bytes, "f", &got), ND_ERR_DATA, bad[i].words);
        free(data);
    }
    nd_hashes_fini(&hashes);
}
