// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_DATA_CASES_H
#define ND_TESTS_DATA_CASES_H
/* These are what a test has opened last, and a loader of it. The next one closes it. */
#include "tests/support/tempdir.h"
#include "trainer/data/dataset.h"

static nd_dataset *dataset;
static nd_loader *loader;
static nd_step_batch batch; /* the last one that the loader gave */

static inline void close_loader(void)
{
    cr_assert(nd_loader_close(loader));
    loader = NULL;
}

/* Takes the place of the one before, whose loader is closed too. */
static inline void use_dataset(nd_dataset *opened)
{
    close_loader();
    nd_dataset_close(dataset);
    dataset = opened;
}

/* A test calls it at its end. */
static inline void close_dataset(void)
{
    use_dataset(NULL);
}

static inline void use_loader(const nd_dataset *data, const nd_loader_options *options)
{
    close_loader();
    assert_ok(nd_loader_open(data, options, &loader));
}

static inline void next_batch(void)
{
    assert_ok(nd_loader_next(loader, &batch));
}

/* An llm.c file of 16-bit ids; its path is valid until the next file of the folder. */
static inline const char *write_ids(tempdir *dir, const uint16_t *ids, int32_t count)
{
    uint8_t file[4096];
    const int32_t header[256] = {20240520, 1, count};
    const size_t bytes = (size_t)count * sizeof *ids;
    cr_assert_leq(sizeof header + bytes, sizeof file);
    memcpy(file, header, sizeof header);
    memcpy(file + sizeof header, ids, bytes);
    return tempdir_write(dir, "ids.bin", file, sizeof header + bytes);
}

#endif
