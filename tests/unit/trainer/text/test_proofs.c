// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "tests/support/tempdir.h"
#include "tests/unit/trainer/text/proof_texts.h"
#include "trainer/text/tokenizer.h"

enum { DIGEST = 16 }; /* of the 64 hexadecimal digits of SHA-256 */

/* Every so many chunks of an alphabet are compared: those of code points have others in each chunk,
 * and the suite tokenizers_all has more of the random ones. */
#ifdef __SANITIZE_ADDRESS__
enum { STEP = PROOF_CHUNKS, STEP_OF_POINTS = PROOF_CHUNKS };
#else
enum { STEP = 4, STEP_OF_POINTS = 1 };
#endif

static void encode_chunk(nd_encoder *encoder, const nd_bytes *records, nd_bytes *ids)
{
    for (size_t at = 0; at < records->count;) {
        uint32_t size;
        const int32_t *some;
        size_t count;
        memcpy(&size, records->data + at, sizeof size);
        at += sizeof size;
        assert_ok(nd_encode(encoder, (const char *)records->data + at, size, &some, &count));
        at += size;
        const uint32_t n = (uint32_t)count;
        assert_ok(nd_bytes_add(ids, &n, sizeof n));
        assert_ok(nd_bytes_add(ids, some, count * sizeof *some));
    }
}

/* The digest of the texts themselves where `tokenizer` is NULL, else of their ids: first those of
 * special tokens as tokens, then, where the texts have some, as text. */
static void digest_chunk(const nd_tokenizer *tokenizer, int alphabet, int chunk, char hex[65])
{
    nd_bytes records = {0}, ids = {0};
    proof_chunk(alphabet, chunk, &records);
    const int modes = tokenizer ? 1 + proof_has_special(alphabet) : 0;
    for (int text = 0; text < modes; text++) {
        const nd_encode_options options = {.special_in_text =
                                               text ? ND_SPECIAL_TEXT : ND_SPECIAL_PARSE,
                                           .drop_unknown = true,
                                           .cache_bytes = 1 << 20};
        nd_encoder *encoder;
        assert_ok(nd_encoder_create(tokenizer, &options, &encoder));
        encode_chunk(encoder, &records, &ids);
        nd_encoder_destroy(encoder);
    }
    const nd_bytes *all = tokenizer ? &ids : &records;
    assert_ok(nd_sha256(all->data, all->count, hex));
    hex[DIGEST] = '\0';
    free(records.data);
    free(ids.data);
}

/* The path of a tokenizer.json: a golden, or one that ND_TEXT_FILES names. False: there is none. */
static bool find_file(const char *name, char path[PATH_MAX])
{
    if (strncmp(name, "real_", 5) != 0) {
        snprintf(path, PATH_MAX, "%s/tests/unit/trainer/text/goldens/%s.json",
                 getenv("ND_SOURCE_ROOT"), name);
        return true;
    }
    const char *files = getenv("ND_TEXT_FILES");
    char *list = strdup(files ? files : ""), *rest = list, end[PATH_MAX];
    bool found = false;
    cr_assert_not_null(list);
    snprintf(end, sizeof end, "/%s.json", name);
    for (char *one; !found && (one = strsep(&rest, ":"));) {
        const size_t n = strlen(one), m = strlen(end);
        found = n >= m && n < PATH_MAX && strcmp(one + n - m, end) == 0;
        snprintf(path, PATH_MAX, "%s", found ? one : "");
    }
    free(list);
    return found;
}

/* The digests of a line, one for each chunk. Returns how many were compared. */
static int compare_line(const char *name, int alphabet, const nd_tokenizer *tokenizer, char *rest)
{
    const int step = proof_has_special(alphabet) ? STEP : STEP_OF_POINTS;
    char *expected, hex[65];
    int chunk = 0;
    for (; (expected = strtok_r(NULL, " \n", &rest)); chunk++) {
        if (chunk % step != 0) {
            continue;
        }
        digest_chunk(tokenizer, alphabet, chunk, hex);
        cr_expect_str_eq(hex, expected,
                         "%s: chunk %d of \"%s\" has the digest %s, not %s; compare it with the "
                         "package: scripts/goldens/proofs.py TEXT_TOOL --only %s",
                         name, chunk, proof_alphabets[alphabet], hex, expected, name);
    }
    cr_expect_eq(chunk, proof_chunks(alphabet), "%s has %d digests of \"%s\"", name, chunk,
                 proof_alphabets[alphabet]);
    return chunk;
}

static int alphabet_of(const char *name)
{
    int i = 0;
    while (proof_alphabets[i] && strcmp(proof_alphabets[i], name) != 0) {
        i++;
    }
    cr_assert_not_null(proof_alphabets[i], "proofs.txt names the alphabet %s", name);
    return i;
}

/* A file's line begins its digests, with the SHA-256 of the tokenizer.json. */
static nd_tokenizer *open_file(const char *name, const char *sha256)
{
    char path[PATH_MAX], hex[65];
    nd_tokenizer *tokenizer;
    if (!find_file(name, path)) {
        fprintf(stderr, "skipped: digests of %s: ND_TEXT_FILES has no %s.json\n", name, name);
        return NULL;
    }
    assert_ok(nd_sha256_file(path, hex));
    cr_assert_str_eq(hex, sha256, "%s is not the file that proofs.txt was made with", path);
    assert_ok(nd_tokenizer_open(path, &tokenizer));
    return tokenizer;
}

/* The lines of every second tokenizer, beginning with number `first`; with the first one those of
 * the texts. Returns how many digests were compared. */
static int compare_files(int first)
{
    char path[PATH_MAX], *line = NULL;
    size_t room = 0;
    int compared = 0, number = -1;
    nd_tokenizer *tokenizer = NULL;
    snprintf(path, sizeof path, "%s/tests/unit/trainer/text/proofs.txt", getenv("ND_SOURCE_ROOT"));
    FILE *file = fopen(path, "r");
    cr_assert_not_null(file, "%s", path);
    while (getline(&line, &room, file) > 0) {
        char *rest, *name = strtok_r(line, " \n", &rest), *key = strtok_r(NULL, " \n", &rest);
        if (!key || name[0] == '#') {
            continue;
        }
        if (strcmp(key, "file") == 0) {
            nd_tokenizer_close(tokenizer);
            tokenizer = NULL;
            if (++number % 2 == first) {
                tokenizer = open_file(name, strtok_r(NULL, " \n", &rest));
            }
        } else if (strcmp(name, "texts") == 0 && first == 0) {
            compared += compare_line(name, alphabet_of(key), NULL, rest);
        } else if (tokenizer) {
            compared += compare_line(name, alphabet_of(key), tokenizer, rest);
        }
    }
    nd_tokenizer_close(tokenizer);
    fclose(file);
    free(line);
    return compared;
}

/* Each of the 16 goldens has 10 alphabets; one of the first half has no repeats. Two of it, and one
 * of the other half, also have all code points, alone and between letters, and runs. */
enum { RANDOM = 10 * PROOF_CHUNKS, POINTS = 2 * PROOF_CHUNKS + 4, OF_TEXTS = RANDOM + 29 };

Test(proofs, digests_of_ids_are_those_of_tokenizers, .timeout = 280)
{
    cr_expect_geq(compare_files(0), OF_TEXTS + 8 * RANDOM - PROOF_CHUNKS + 2 * POINTS);
}

Test(proofs, digests_of_ids_are_those_of_tokenizers_for_every_second_one, .timeout = 280)
{
    cr_expect_geq(compare_files(1), 8 * RANDOM + POINTS + 1);
}
