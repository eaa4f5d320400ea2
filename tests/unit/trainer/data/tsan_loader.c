// SPDX-License-Identifier: Apache-2.0
/*
 * The prefetch thread under ThreadSanitizer: steps, rewinds, an error of the thread, closing early.
 * A plain executable, since Criterion does not run under TSan.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "trainer/data/data.h"

enum { S = 64, BLOCKS = 50, VOCAB = 256 };

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #cond,                          \
                    nd_error_last()->message);                                                     \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static int64_t run_steps(nd_loader *loader, int steps)
{
    int64_t sum = 0;
    for (int i = 0; i < steps; i++) {
        nd_step_batch batch;
        CHECK(nd_loader_next(loader, &batch) == ND_OK);
        for (int k = 0; k < 2 * 3 * S / 2;
             k++) { /* reads what the thread wrote, while it fills the other slot */
            sum += batch.inputs[k] + batch.labels[k];
        }
    }
    return sum;
}

int main(void)
{
    char path[] = "/tmp/nd_tsan_XXXXXX";
    int fd = mkstemp(path);
    char text[BLOCKS * (S + 1)];
    for (size_t i = 0; i < sizeof text; i++) {
        text[i] = (char)(i * 7);
    }
    CHECK(fd >= 0 && write(fd, text, sizeof text) == (ssize_t)sizeof text);
    nd_dataset *dataset = NULL;
    CHECK(nd_dataset_open(path, ND_DATA_TEXT, "bytes", VOCAB, S, &dataset) == ND_OK);
    nd_loader_options options = {.deal = {S, 2, 1},
                                 .micro_batch = 2,
                                 .accumulation = 3,
                                 .dp_size = 2,
                                 .cp_index = 1,
                                 .seed = 3};
    for (int round = 0; round < 20; round++) {
        nd_loader *loader = NULL;
        CHECK(nd_loader_open(dataset, &options, &loader) == ND_OK);
        int64_t first = run_steps(loader, 5);
        nd_loader_rewind(loader, NULL);
        CHECK(run_steps(loader, 5) == first);
        run_steps(loader, round % 4);
        nd_loader_rewind(loader, NULL);
        nd_loader_close(loader);
    }
    nd_dataset_close(dataset);
    close(fd);
    unlink(path);
    puts("tsan_loader: ok");
    return 0;
}
