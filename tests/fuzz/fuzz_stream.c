// SPDX-License-Identifier: Apache-2.0
/* A compressed file: it is read or refused, and the size of the pieces it is read in changes
 * nothing. */
#include <stdio.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "trainer/corpus/corpus.h"

enum { LIMIT = 8 << 20 };

static nd_status read_all(const char *path, size_t piece, uint64_t *hash, size_t *total)
{
    static uint8_t buffer[1 << 16];
    nd_text_stream *stream;
    size_t got = piece;
    *total = 0;
    *hash = 0;
    ND_TRY(nd_text_stream_open(path, &stream));
    nd_status status = ND_OK;
    while (status == ND_OK && got == piece && *total < LIMIT) {
        status = nd_text_stream_read(stream, buffer, piece, &got);
        for (size_t i = 0; status == ND_OK && i < got; i++) {
            *hash = *hash * 31 + buffer[i];
        }
        *total += status == ND_OK ? got : 0;
    }
    nd_text_stream_close(stream);
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int fd;
    const char *path = fuzz_file(data, size, &fd);
    uint64_t whole, pieces;
    size_t whole_size, pieces_size;
    nd_status first = read_all(path, 1 << 16, &whole, &whole_size);
    nd_status second = read_all(path, 61, &pieces, &pieces_size);
    if (whole_size < LIMIT && pieces_size < LIMIT) {
        ND_ASSERT(first == second);
        ND_ASSERT(first != ND_OK || (whole == pieces && whole_size == pieces_size));
    }
    return 0;
}
