// SPDX-License-Identifier: Apache-2.0
/* The hash file of a writer: what the reader accepts is written again with the same bytes. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/checkpoint/hashes.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    nd_hashes hashes = {0};
    if (nd_hashes_parse(data, size, "input", &hashes) == ND_OK) {
        uint8_t *again = NULL;
        size_t bytes = 0;
        for (int i = 0; i < hashes.count; i++) {
            ND_ASSERT(nd_name_is_plain(hashes.files[i].name));
            ND_ASSERT(nd_hashes_find(&hashes, hashes.files[i].name) == &hashes.files[i]);
        }
        ND_ASSERT(nd_hashes_format(&hashes, &again, &bytes) == ND_OK);
        nd_hashes_fini(&hashes);
        nd_hashes second = {0};
        ND_ASSERT(bytes == size && nd_hashes_parse(again, bytes, "again", &second) == ND_OK);
        nd_hashes_fini(&second);
        free(again);
    }
    return 0;
}
