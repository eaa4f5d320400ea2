// SPDX-License-Identifier: Apache-2.0
/*
 * A loss mask: the first byte of the input is the number of tokens of the .bin, the rest is the
 * mask without its digest. The digest, and those of the pair, are made right first, or nothing
 * would get past them. What is accepted lies within the file and leaves out what it says.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "trainer/corpus/token_file.h"

enum { INDEX_AT = 40, BIN_AT = 104, DIGEST = ND_LOSS_MASK_DIGEST_BYTES };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const uint8_t *file, size_t size, uint64_t tokens)
{
    char index_sha256[DIGEST + 1] = "";
    memset(index_sha256, '0', DIGEST);
    const nd_loss_mask_pair pair = {"x.bin", "x.idx", tokens, index_sha256, index_sha256};
    nd_loss_mask_view v;
    if (nd_loss_mask_parse(file, size, "x.mask", &pair, &v) != ND_OK) {
        return;
    }
    uint64_t ignored = 0, before = 0;
    ND_ASSERT(v.tokens == tokens && (v.ignored < tokens || tokens == 0));
    ND_ASSERT((const char *)v.pairs + 16 * v.spans == v.digest);
    ND_ASSERT(v.digest + DIGEST == (const char *)file + size);
    for (uint64_t i = 0; i < v.spans; i++) {
        uint64_t span[2];
        memcpy(span, v.pairs + 16 * i, sizeof span);
        ND_ASSERT(before <= span[0] && span[0] < span[1] && span[1] <= tokens);
        ignored += span[1] - span[0];
        before = span[1];
    }
    ND_ASSERT(ignored == v.ignored);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) {
        return 0;
    }
    const size_t rest = size - 1;
    char hex[DIGEST + 1];
    uint8_t *file = malloc(rest + DIGEST);
    ND_ASSERT(file);
    memcpy(file, data + 1, rest);
    check(file, rest, data[0]); /* as it is */
    if (rest >= BIN_AT + DIGEST) {
        memset(file + INDEX_AT, '0', DIGEST);
        memset(file + BIN_AT, '0', DIGEST);
        memcpy(file, "NDMASK\0\0\2\0\0\0\0\0\0", 16);
    }
    ND_ASSERT(nd_sha256(file, rest, hex) == ND_OK);
    memcpy(file + rest, hex, DIGEST);
    check(file, rest + DIGEST, data[0]);
    free(file);
    return 0;
}
