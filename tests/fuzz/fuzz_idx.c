// SPDX-License-Identifier: Apache-2.0
/*
 * A Megatron index: the first eight bytes of the input are the size of the .bin, the rest is the
 * .idx. What is accepted must describe exactly that many bytes.
 */
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "trainer/data/dataset.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t bin_bytes;
    if (size < sizeof bin_bytes) {
        return 0;
    }
    memcpy(&bin_bytes, data, sizeof bin_bytes);
    size -= sizeof bin_bytes;
    uint8_t *idx =
        malloc(size); /* its own block, so that the address sanitizer sees each byte too far */
    memcpy(idx, data + sizeof bin_bytes, size);
    nd_index index = {0};
    if (nd_index_parse(idx, size, bin_bytes, "x.idx", "x.bin", &index) == ND_OK) {
        ND_ASSERT(bin_bytes % index.type.width == 0);
    }
    free(idx);
    return 0;
}
