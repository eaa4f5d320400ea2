// SPDX-License-Identifier: Apache-2.0
/*
 * How fast one thread turns a text into ids: nd_bench_text TOKENIZER.JSON TEXT [CACHE_BYTES].
 * Prints one JSON object: MB/s of CPU time with an empty cache (cold) and the best of three further
 * passes (warm). The text is encoded in pieces of 64 KiB, cut where ids do not change.
 */
#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/fs.h"
#include "tests/bench/measure.h"
#include "trainer/text/tokenizer.h"

enum { PIECE = 64 << 10, PASSES = 4, TEXT_BYTES_MAX = 1 << 30 };

static nd_status encode(nd_encoder *encoder, const nd_tokenizer *tokenizer, const char *text,
                        size_t size, size_t *total)
{
    *total = 0;
    for (size_t at = 0, n; at < size; at += n) {
        const int32_t *ids;
        size_t count;
        n = size - at;
        if (n > PIECE) {
            const size_t place = nd_text_cut(tokenizer, text + at, PIECE);
            n = place ? place : n;
        }
        ND_TRY(nd_encode(encoder, text + at, n, &ids, &count));
        *total += count;
    }
    return ND_OK;
}

static nd_status run(const char *tokenizer_path, const char *text_path, size_t cache_bytes)
{
    const nd_encode_options options = {.drop_unknown = true, .cache_bytes = cache_bytes};
    nd_tokenizer *tokenizer = NULL;
    nd_encoder *encoder = NULL;
    char *text = NULL;
    size_t size = 0, total = 0;
    double cold = 0, warm = 0, begin = nd_bench_cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_tokenizer_open(tokenizer_path, &tokenizer));
    double load = nd_bench_cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - begin;
    ND_TRY_OUT(nd_fs_read(text_path, TEXT_BYTES_MAX, ND_ERR_DATA, &text, &size));
    ND_TRY_OUT(nd_encoder_create(tokenizer, &options, &encoder));
    for (int pass = 0; pass < PASSES; pass++) {
        begin = nd_bench_cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
        ND_TRY_OUT(encode(encoder, tokenizer, text, size, &total));
        double speed =
            (double)size * 1e-6 / (nd_bench_cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - begin);
        cold = pass == 0 ? speed : cold;
        warm = pass > 0 && speed > warm ? speed : warm;
    }
    printf("{\"load_seconds\": %.3f, \"cold\": %.1f, \"warm\": %.1f, \"ids\": %zu}\n", load, cold,
           warm, total);
out:
    free(text);
    nd_encoder_destroy(encoder);
    nd_tokenizer_close(tokenizer);
    return status;
}

int main(int argc, char **argv)
{
    size_t cache_bytes = argc > 3 ? (size_t)atol(argv[3]) : ND_ENCODE_CACHE_BYTES;
    if (argc < 3) {
        fprintf(stderr, "usage: nd_bench_text TOKENIZER.JSON TEXT [CACHE_BYTES]\n");
        return (int)ND_ERR_CONFIG;
    }
    nd_status status = run(argv[1], argv[2], cache_bytes);
    if (status != ND_OK) {
        fprintf(stderr, "nd_bench_text: %s\n", nd_error_last()->message);
    }
    return (int)status;
}
