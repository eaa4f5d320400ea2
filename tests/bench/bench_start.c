// SPDX-License-Identifier: Apache-2.0
/*
 * How long a worker takes from opening its training data to the first batch that is ready:
 *   nd_bench_start DATA SEQUENCE [TOKENIZER.JSON CACHE_DIR]
 * DATA are token files, or with a tokenizer text that is in the cache (which is encoded when it is
 * not there). Prints one JSON object: seconds to open, for the digest that nodes compare, and until
 * the batch of 8 samples is there.
 */
#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/clock.h"
#include "trainer/data/data.h"

enum { VOCAB = 1 << 22, BATCH = 8 };

static nd_status open_data(char **argv, int argc, nd_dataset **out)
{
    const int64_t sequence = atoll(argv[2]);
    const nd_corpus_rules rules = {.add_special = true, .json_key = "text", .pairs = true};
    const nd_token_cache_request request = {
        .job = {.rules = &rules, .threads = nd_corpus_threads()},
        .tokenizer = argc > 4 ? argv[3] : NULL,
        .folder = argc > 4 ? argv[4] : NULL,
        .vocab = VOCAB};
    return argc > 4 ? nd_dataset_open_text(argv[1], ND_DATA_AUTO, request, sequence, out)
                    : nd_dataset_open(argv[1], ND_DATA_AUTO, "file", VOCAB, sequence, out);
}

static nd_status run(char **argv, int argc)
{
    nd_dataset *data = NULL;
    nd_loader *loader = NULL;
    nd_step_batch batch;
    char hex[65], content[33];
    const double begin = nd_clock_seconds();
    nd_status status = ND_OK;
    ND_TRY_OUT(open_data(argv, argc, &data));
    const double opened = nd_clock_seconds();
    ND_TRY_OUT(nd_dataset_digest(data, hex));
    ND_TRY_OUT(nd_dataset_content(data, content));
    const double compared = nd_clock_seconds();
    const nd_loader_options options = {.deal = {atoll(argv[2]), 1, 1},
                                       .micro_batch = BATCH,
                                       .accumulation = 1,
                                       .dp_size = 1,
                                       .seed = 42};
    ND_TRY_OUT(nd_loader_open(data, &options, &loader));
    ND_TRY_OUT(nd_loader_next(loader, &batch));
    const double end = nd_clock_seconds();
    printf(
        "{\"open\": %.4f, \"digests\": %.4f, \"batch\": %.4f, \"start\": %.4f, \"tokens\": %lld}\n",
        opened - begin, compared - opened, end - compared, end - begin,
        (long long)nd_dataset_tokens(data));
out:
    if (!loader || nd_loader_close(loader)) {
        nd_dataset_close(data);
    }
    return status;
}

int main(int argc, char **argv)
{
    if (argc != 3 && argc != 5) {
        fprintf(stderr, "usage: nd_bench_start DATA SEQUENCE [TOKENIZER.JSON CACHE_DIR]\n");
        return (int)ND_ERR_CONFIG;
    }
    nd_status status = run(argv, argc);
    if (status != ND_OK) {
        fprintf(stderr, "nd_bench_start: %s\n", nd_error_last()->message);
    }
    return (int)status;
}
