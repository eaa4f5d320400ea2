// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/rng.h"
#include "tests/unit/trainer/corpus/corpus_cases.h"
#include "tests/unit/trainer/data/data_cases.h"

/* Source j is a text of the letter 'a' + j alone, of BLOCKS[j] whole blocks. */
enum { S = 7, SOURCES = 3 };
static const int64_t BLOCKS[SOURCES] = {5, 11, 5};

static nd_dataset_part part(int j, double weight, double epochs)
{
    tempdir dir;
    char text[64 * (S + 1)];
    tempdir_make(&dir);
    memset(text, 'a' + j, sizeof text);
    nd_dataset_part out = {
        .name = (const char *[]){"x", "y", "z"}[j], .weight = weight, .epochs = epochs};
    assert_ok(nd_dataset_open(tempdir_write(&dir, "a.txt", text, (size_t)BLOCKS[j] * (S + 1)),
                              ND_DATA_TEXT, "bytes", 256, S, &out.data));
    tempdir_remove(&dir);
    return out;
}

TestSuite(blend, .fini = close_dataset);

static nd_dataset *blend_of(double a, double b, double c, const double *epochs)
{
    const double weights[] = {a, b, c};
    nd_dataset_part parts[SOURCES];
    nd_dataset *blend;
    for (int j = 0; j < SOURCES; j++) {
        parts[j] = part(j, weights[j], epochs ? epochs[j] : 0);
    }
    assert_ok(nd_dataset_blend(parts, SOURCES, &blend));
    return blend;
}

static char letter(const nd_dataset *blend, int64_t block)
{
    int32_t x[S], y[S];
    assert_ok(nd_dataset_block(blend, block, &(nd_block){x, y}));
    cr_assert_eq(x[0], y[S - 1]);
    return (char)x[0];
}

static void use_blend(double a, double b, double c, const double *epochs)
{
    use_dataset(blend_of(a, b, c, epochs));
}

Test(blend, blocks_are_those_of_the_sources_in_a_row)
{
    use_blend(1, 1, 1, NULL);
    cr_assert_eq(nd_dataset_blocks(dataset), 21);
    cr_assert_eq(nd_dataset_tokens(dataset), 21 * (S + 1));
    cr_assert_eq(nd_dataset_sources(dataset), 3);
    cr_assert_str_eq(nd_dataset_source_name(dataset, 1), "y");
    cr_assert_eq(nd_dataset_blocks(nd_dataset_source(dataset, 1)), 11);
    for (int64_t b = 0; b < 21; b++) {
        int j = b < 5 ? 0 : b < 16 ? 1 : 2;
        cr_assert_eq(nd_blend_part_of(dataset->blend, b), j);
        cr_assert_eq(letter(dataset, b), 'a' + j);
    }
}

/* As those of the files of a folder. */
Test(blend, parts_without_names_are_one_source)
{
    nd_dataset_part parts[] = {part(0, 0, 0), part(1, 0, 0)};
    int64_t counts[1];
    parts[0].name = parts[1].name = "";
    assert_ok(nd_dataset_blend(parts, 2, &dataset));
    cr_assert_eq(nd_dataset_sources(dataset), 1);
    cr_assert_str_eq(nd_dataset_source_name(dataset, 0), "");
    cr_assert_eq(nd_dataset_source(dataset, 0), dataset);
    nd_dataset_count_samples(dataset, 9, counts);
    cr_assert_eq(counts[0], 9);
    cr_assert_eq(letter(dataset, 15), 'b');
    cr_assert_eq(nd_dataset_facts_of(dataset).documents, -1);
    cr_expect_not_null(strstr(nd_dataset_facts_of(dataset).path, "a.txt and 1 more"));
}

Test(blend, without_weights_an_epoch_reads_every_block_once)
{
    use_blend(0, 0, 0, NULL);
    cr_assert_eq(nd_dataset_facts_of(dataset).epoch, 21);
    cr_assert_eq(nd_dataset_facts_of(dataset).samples, INT64_MAX);
    for (int64_t epoch = 0; epoch < 2; epoch++) {
        bool read[21] = {false};
        for (int64_t i = 0; i < 21; i++) {
            int64_t block = nd_dataset_sample(dataset, 9, epoch * 21 + i);
            cr_assert(!read[block]);
            read[block] = true;
        }
    }
    int64_t counts[SOURCES];
    for (int64_t samples = 0; samples <= 50; samples++) {
        const bool exact = nd_dataset_count_samples(dataset, samples, counts);
        cr_expect_eq(exact, samples % 21 == 0);
        cr_expect_eq(counts[0] + counts[1] + counts[2], samples, "%ld samples", (long)samples);
    }
    cr_expect(nd_dataset_count_samples(dataset, 42, counts));
    cr_expect(counts[0] == 10 && counts[1] == 22 && counts[2] == 10, "each block twice");
}

/* Each source is read in an order of its own, each block once in its epoch. */
Test(blend, weights_choose_the_source_and_a_permutation_its_block)
{
    use_blend(2, 1, 1, NULL);
    int64_t had[SOURCES] = {0}, order[SOURCES][64];
    for (int64_t i = 0; i < 60; i++) {
        int64_t block = nd_dataset_sample(dataset, 9, i);
        int j = nd_blend_part_of(dataset->blend, block);
        order[j][had[j]++] = block - (j == 0 ? 0 : j == 1 ? 5 : 16);
    }
    cr_assert_eq(had[0], 30);
    cr_assert_eq(had[1], 15);
    for (int j = 0; j < SOURCES; j++) {
        for (int64_t first = 0; first + BLOCKS[j] <= had[j]; first += BLOCKS[j]) {
            bool read[16] = {false};
            for (int64_t k = first; k < first + BLOCKS[j]; k++) {
                cr_assert(!read[order[j][k]]);
                read[order[j][k]] = true;
            }
        }
    }
    cr_assert(memcmp(order[0], order[2], 15 * sizeof *order[0]) != 0);
}

Test(blend, limited_sources_end_and_the_rest_has_no_labels)
{
    use_blend(0, 0, 0, (double[]){1, 0.5, 2});
    cr_assert_eq(nd_dataset_facts_of(dataset).samples, 5 + 6 + 10);
    cr_assert_eq(nd_dataset_facts_of(dataset).epoch, 21);
    cr_assert_eq(nd_dataset_sample(dataset, 9, 21), 21);
    nd_loader_options o = {
        .deal = {S, 1, 1}, .micro_batch = 4, .accumulation = 3, .dp_size = 1, .first_step = 1};
    use_loader(dataset, &o);
    next_batch();
    cr_assert_eq(batch.valid, 9 * S); /* of 24 samples 21 are there */
    next_batch();
    cr_assert_eq(batch.valid, 0);
    use_blend(0, 0, 0, (double[]){1, 0.5, 3}); /* an epoch is what all give together */
    cr_expect_eq(nd_dataset_facts_of(dataset).epoch, 5 + 6 + 15);
}

/* A validation of several sets has one loader, which reads each set from its beginning. */
Test(blend, a_validation_reads_its_sets_one_by_one)
{
    use_blend(0, 0, 0, NULL);
    nd_loader_options o = {
        .deal = {S, 1, 1}, .micro_batch = 2, .accumulation = 1, .dp_size = 1, .validation = true};
    use_loader(nd_dataset_source(dataset, 0), &o);
    for (int turn = 0; turn < 6; turn++) {
        const nd_dataset *set = nd_dataset_source(dataset, turn % SOURCES);
        int64_t valid = 0, steps = nd_loader_validation_steps(set, &o);
        nd_loader_rewind(loader, set);
        cr_assert_eq(steps, (BLOCKS[turn % SOURCES] + 1) / 2);
        for (int64_t i = 0; i < steps; i++) {
            next_batch();
            cr_assert_eq(batch.inputs[0], 'a' + turn % SOURCES);
            valid += batch.valid;
        }
        cr_assert_eq(valid, BLOCKS[turn % SOURCES] * S);
    }
}

/* The model tells the losses of sources apart by these fields of a batch. */
Test(blend, a_step_says_where_its_samples_come_from)
{
    use_blend(2, 1, 1, NULL);
    nd_loader_options o = {
        .deal = {S, 1, 1}, .micro_batch = 2, .accumulation = 4, .dp_size = 1, .seed = 3};
    use_loader(dataset, &o);
    for (int step = 0; step < 3; step++) {
        int64_t valid[SOURCES] = {0};
        next_batch();
        for (int row = 0; row < 8; row++) {
            cr_assert_eq(batch.inputs[row * S], 'a' + batch.sources[row]);
            valid[batch.sources[row]] += S;
        }
        cr_assert_eq(memcmp(valid, batch.source_valid, sizeof valid), 0);
    }
    use_loader(nd_dataset_source(dataset, 0), &o);
    next_batch();
    cr_assert(!batch.sources && !batch.source_valid);
}

/* FILES sparse files of this size, of which the last but one has an 'x' at `changed`, as sources of
 * a blend in a blend; -1: none has. */
enum { FILES = 32 };
static nd_dataset *open_files(tempdir *dir, off_t size, off_t changed)
{
    nd_dataset_part parts[FILES];
    nd_dataset *blend;
    for (int j = 0; j < FILES; j++) {
        char name[16];
        parts[j] = (nd_dataset_part){.name = ""};
        snprintf(name, sizeof name, "%d.txt", j);
        const char *path = tempdir_write(dir, name, "a", 1);
        cr_assert_eq(truncate(path, size), 0);
        if (j == FILES - 2 && changed >= 0) {
            corpus_set_byte(path, changed, 'x');
        }
        assert_ok(nd_dataset_open(path, ND_DATA_TEXT, "bytes", 256, S, &parts[j].data));
    }
    assert_ok(nd_dataset_blend(parts, FILES - 1, &blend));
    nd_dataset_part two[] = {{.name = "", .data = blend}, parts[FILES - 1]};
    assert_ok(nd_dataset_blend(two, 2, &blend));
    return blend;
}

/* 64 MiB and 16 MiB are shared by 32 files: of 10 MiB each 40 samples of 64 KiB are read. */
Test(blend, content_is_shared_by_the_files)
{
    enum { MIB = 1 << 20, LARGE = 10 * MIB, SPAN = (LARGE - 65536) / 39 };
    static const struct {
        off_t size, changed;
        bool seen;
    } cases[] = {{LARGE, 0, true},
                 {LARGE, LARGE - 1, true},
                 {LARGE, 7 * SPAN + 65535, true},
                 {LARGE, 7 * SPAN + 65536, false},
                 {LARGE, 8 * SPAN, true},
                 {MIB, 700001, true}}; /* 32 MiB together */
    tempdir dir;
    tempdir_make(&dir);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char before[33], now[33];
        nd_dataset *blend = open_files(&dir, cases[i].size, -1);
        assert_ok(nd_dataset_content(blend, before));
        nd_dataset *changed = open_files(&dir, cases[i].size, cases[i].changed);
        assert_ok(nd_dataset_content(changed, now));
        cr_expect_eq(strcmp(before, now) != 0, cases[i].seen, "%zu", i);
        cr_expect_eq(strlen(now), 32);
        assert_ok(nd_dataset_content(blend, now)); /* kept: its files were written meanwhile */
        cr_expect_str_eq(before, now);
        nd_dataset_close(blend);
        nd_dataset_close(changed);
    }
    tempdir_remove(&dir);
}

Test(blend, digest_covers_every_source_and_its_weight)
{
    nd_dataset_part parts[] = {part(0, 1, 0), part(1, 1, 0)};
    nd_dataset *two;
    assert_ok(nd_dataset_blend(parts, 2, &two));
    nd_dataset *const blends[] = {blend_of(1, 1, 1, NULL),
                                  blend_of(1, 1, 1, NULL),
                                  blend_of(1, 2, 1, NULL),
                                  blend_of(0, 0, 0, NULL),
                                  blend_of(1, 1, 1, (double[]){0, 0, 3}),
                                  two};
    char hex[6][65], contents[6][33];
    for (int i = 0; i < 6; i++) {
        assert_ok(nd_dataset_digest(blends[i], hex[i]));
        assert_ok(nd_dataset_content(blends[i], contents[i]));
        cr_assert_eq(strlen(contents[i]), 32);
        cr_assert_eq(strcmp(hex[i], hex[0]) == 0, i < 2, "blend %d", i);
        nd_dataset_close(blends[i]);
    }
    cr_assert_str_neq(contents[0], contents[2]);
}
