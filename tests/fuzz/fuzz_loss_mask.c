// SPDX-License-Identifier: Apache-2.0
/*
 * A loss mask without its digest, which is made right first, or nothing would get past it. What is
 * accepted lies within the file and leaves out what it says.
 */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "tests/fuzz/fuzz.h"
#include "trainer/corpus/token_file.h"

enum { DIGEST = ND_LOSS_MASK_DIGEST_BYTES };

static void check(const uint8_t *file, size_t size)
{
    nd_loss_mask_view v;
    if (nd_loss_mask_parse(file, size, "x.mask", &v) != ND_OK) {
        return;
    }
    uint64_t ignored = 0, before = 0;
    ND_ASSERT(v.ignored < v.tokens || v.tokens == 0);
    ND_ASSERT((const char *)v.pairs + 16 * v.spans == v.digest);
    ND_ASSERT(v.digest + DIGEST == (const char *)file + size);
    for (uint64_t i = 0; i < v.spans; i++) {
        uint64_t span[2];
        memcpy(span, v.pairs + 16 * i, sizeof span);
        ND_ASSERT(before <= span[0] && span[0] < span[1] && span[1] <= v.tokens);
        ignored += span[1] - span[0];
        before = span[1];
    }
    ND_ASSERT(ignored == v.ignored);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char hex[DIGEST + 1];
    uint8_t *file = malloc(size + DIGEST);
    ND_ASSERT(file);
    if (size > 0) {
        memcpy(file, data, size);
    }
    check(file, size); /* as it is */
    if (size >= 16) {
        memcpy(file, "NDMASK\0\0\2\0\0\0\0\0\0", 16);
    }
    ND_ASSERT(nd_sha256(file, size, hex) == ND_OK);
    memcpy(file + size, hex, DIGEST);
    check(file, size + DIGEST);
    free(file);
    return 0;
}
