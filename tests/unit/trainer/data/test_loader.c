// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/rng.h"
#include "tests/unit/trainer/corpus/corpus_cases.h"
#include "tests/unit/trainer/data/data_cases.h"

/* Text of N blocks whose bytes tell block and position: byte p of block k is (17 k + p) % 256. */
enum { S = 16, N = 23 };

static tempdir dir;

static nd_dataset *make_dataset(int64_t bytes)
{
    uint8_t text[N * (S + 1)];
    nd_dataset *made;
    for (size_t i = 0; i < sizeof text; i++) {
        text[i] = (uint8_t)i;
    }
    const char *path = tempdir_write(&dir, "a.txt", text, (size_t)bytes);
    assert_ok(nd_dataset_open(path, ND_DATA_AUTO, "bytes", 256, S, &made));
    return made;
}

static void setup(void)
{
    tempdir_make(&dir);
    use_dataset(make_dataset(N * (S + 1)));
}

static void teardown(void)
{
    close_dataset();
    tempdir_remove(&dir);
}

TestSuite(loader, .init = setup, .fini = teardown);

static nd_loader_options options_of(int dp_size, int dp_index, int cp_size, int cp_index)
{
    return (nd_loader_options){.deal = {S, cp_size, 1},
                               .micro_batch = 2,
                               .accumulation = 3,
                               .dp_size = dp_size,
                               .dp_index = dp_index,
                               .cp_index = cp_index,
                               .seed = 5};
}

/* The order that docs/formats.md describes, computed here from its formula. */
static int64_t expected_block(const nd_loader_options *o, int64_t step, int64_t micro, int64_t b)
{
    int64_t G = o->accumulation * o->dp_size * o->micro_batch;
    int64_t i = step * G + micro * o->dp_size * o->micro_batch + o->dp_index * o->micro_batch + b +
                o->samples_ahead;
    return (int64_t)nd_rng_permute((uint64_t)o->seed, (uint64_t)(i / N), N, (uint64_t)(i % N));
}

Test(loader, order_is_the_formula_for_every_data_rank_over_epochs)
{
    for (int r = 0; r < 3; r++) {
        nd_loader_options o = options_of(3, r, 1, 0);
        use_loader(dataset, &o);
        for (int64_t step = 0; step < 6; step++) { /* 6 x 18 samples: almost five epochs of 23 */
            next_batch();
            cr_assert_eq(batch.valid, 6 * S);
            for (int row = 0; row < 6; row++) {
                int64_t block = expected_block(&o, step, row / 2, row % 2);
                for (int p = 0; p < S; p++) {
                    cr_assert_eq(batch.inputs[row * S + p], (block * (S + 1) + p) % 256);
                    cr_assert_eq(batch.labels[row * S + p], (block * (S + 1) + p + 1) % 256);
                }
            }
        }
    }
}

Test(loader, starts_at_first_step_and_rewinds_to_it)
{
    nd_loader_options o = options_of(2, 1, 1, 0);
    o.first_step = 4;
    use_loader(dataset, &o);
    for (int round = 0; round < 3; round++) {
        for (int64_t step = 4; step < 7; step++) {
            next_batch();
            cr_assert_eq(batch.inputs[0], expected_block(&o, step, 0, 0) * (S + 1) % 256);
        }
        nd_loader_rewind(loader, NULL);
    }
}

/* The second step has an id that the model lacks. It is read ahead, and the first one is read again
 * after it. */
Test(loader, forgets_at_a_rewind_what_was_wrong_with_data_that_it_no_longer_reads)
{
    enum { IDS = 4 * (S + 1) };
    uint16_t ids[IDS] = {0};
    nd_loader_options o = options_of(1, 0, 1, 0);
    nd_dataset *made = NULL;
    ids[IDS - 1] = 300;
    assert_ok(nd_dataset_open(write_ids(&dir, ids, IDS), ND_DATA_AUTO, "file", 256, S, &made));
    use_dataset(made);
    o.validation = true;
    o.accumulation = 1;
    use_loader(dataset, &o);
    for (int round = 0; round < 3; round++) {
        next_batch();
        usleep(20000);
        nd_loader_rewind(loader, NULL);
    }
    next_batch();
    assert_fails(nd_loader_next(loader, &batch), ND_ERR_DATA, "has id 300");
}

/* After 5 steps of another size: 7 samples fewer, and 3 more, than 5 steps of this size have; and
 * the most that a checkpoint may tell. */
Test(loader, goes_on_behind_the_samples_that_were_seen)
{
    static const int64_t aheads[] = {-7, 3, ((int64_t)1 << 60) - 60};
    for (size_t a = 0; a < sizeof aheads / sizeof *aheads; a++) {
        nd_loader_options o = options_of(2, 1, 1, 0);
        o.first_step = 5;
        o.samples_ahead = aheads[a];
        use_loader(dataset, &o);
        for (int64_t step = 0; step < 3; step++) {
            next_batch();
            for (int row = 0; row < 6; row++) {
                int64_t block = expected_block(&o, 5 + step, row / 2, row % 2);
                cr_assert_eq(batch.inputs[row * S], block * (S + 1) % 256);
            }
        }
    }
}

/* Two epochs of 23 samples, in steps of 12, have 3 full steps; fewer, when samples are passed over.
 */
Test(loader, the_last_step_is_the_last_full_one)
{
    static const struct {
        int64_t first_step, ahead, steps, last;
    } cases[] = {{0, 0, 3, 3},  {0, 0, 9, 3},   {0, 0, 2, 2},  {2, 0, 3, 3},
                 {1, 10, 3, 3}, {1, 11, 3, 2},  {1, 35, 3, 1}, {3, 10, 3, 3},
                 {2, 90, 3, 2}, {2, -23, 9, 5}, {2, 0, 1, 1}};
    nd_dataset_part part = {.data = make_dataset(N * (S + 1)), .name = "", .epochs = 2};
    nd_dataset *blend;
    assert_ok(nd_dataset_blend(&part, 1, &blend));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_loader_options o = options_of(2, 1, 1, 0);
        o.first_step = cases[i].first_step;
        o.samples_ahead = cases[i].ahead;
        cr_expect_eq(nd_loader_last_step(blend, &o, cases[i].steps), cases[i].last, "%zu", i);
        cr_expect_eq(nd_loader_last_step(dataset, &o, cases[i].steps), cases[i].steps);
    }
    nd_dataset_close(blend);
}

Test(loader, context_parallel_ranks_hold_chunks_r_and_2cp_minus_1_minus_r)
{
    for (int cp = 2; cp <= 8; cp *= 2) {
        int chunk = S / (2 * cp), local = S / cp;
        for (int r = 0; r < cp; r++) {
            nd_loader_options o = options_of(1, 0, cp, r);
            use_loader(dataset, &o);
            next_batch();
            cr_assert_eq(batch.valid, 6 * local);
            for (int row = 0; row < 6; row++) {
                int64_t block = expected_block(&o, 0, row / 2, row % 2);
                for (int p = 0; p < local; p++) {
                    int at = p < chunk ? r * chunk + p : (2 * cp - 1 - r) * chunk + (p - chunk);
                    cr_assert_eq(batch.inputs[row * local + p], (block * (S + 1) + at) % 256);
                    cr_assert_eq(batch.labels[row * local + p], (block * (S + 1) + at + 1) % 256);
                    cr_assert_eq(batch.positions[(row % 2) * local + p], at);
                }
            }
        }
    }
}

Test(loader, validation_is_in_file_order_and_pads_with_uncounted_labels)
{
    use_dataset(make_dataset(7 * (S + 1) + 5)); /* eight blocks, the last with 4 labels */
    cr_assert_eq(nd_dataset_blocks(dataset), 8);
    nd_loader_options o = options_of(3, 0, 1, 0);
    o.accumulation = 1;
    o.validation = true;
    int64_t steps = nd_loader_validation_steps(dataset, &o);
    cr_assert_eq(steps, 2); /* six blocks a call */
    int64_t valid = 0;
    for (int round = 0; round < 2; round++) {
        for (int r = 0; r < 3; r++) {
            o.dp_index = r;
            use_loader(dataset, &o);
            for (int64_t step = 0; step < steps; step++) {
                next_batch();
                int64_t block = step * 6 + r * 2;
                if (block < 8) {
                    cr_assert_eq(batch.inputs[0], block * (S + 1) % 256);
                    valid += batch.valid;
                } else {
                    cr_assert_eq(batch.valid, 0);
                    cr_assert_eq(batch.labels[2 * S - 1], ND_LABEL_IGNORED);
                }
            }
        }
    }
    cr_assert_eq(valid, 2 * (7 * S + 4));
}

Test(loader, an_error_of_the_thread_is_the_error_of_the_step_that_needs_it)
{
    uint16_t ids[4 * (S + 1)] = {[2 * (S + 1) + 3] = 700}; /* in block 2 */
    const char *path = write_ids(&dir, ids, 4 * (S + 1));
    close_dataset();
    assert_ok(nd_dataset_open(path, ND_DATA_AUTO, "file", 300, S, &dataset));
    nd_loader_options o = options_of(1, 0, 1, 0);
    o.micro_batch = o.accumulation = 1;
    o.validation = true;
    use_loader(dataset, &o);
    next_batch();
    next_batch();
    for (int again = 0; again < 2; again++) {
        assert_fails(nd_loader_next(loader, &batch), ND_ERR_DATA,
                     "token 37 (byte 1098) has id 700");
    }
}

Test(loader, closes_at_any_time)
{
    for (int taken = 0; taken < 4; taken++) {
        nd_loader_options o = options_of(1, 0, 2, 1);
        use_loader(dataset, &o);
        for (int i = 0; i < taken; i++) {
            next_batch();
        }
    }
    nd_loader_close(NULL);
}

/* The prefetch thread reads pages that are gone: of a text, and of the cache of an encoded one. */
Test(loader, a_file_that_shrinks_while_it_is_read_is_an_error)
{
    static const char *const names[] = {"a.txt", "a.jsonl"};
    enum { BYTES = 4 << 20, LINE = 4096 };
    char *text = malloc(BYTES);
    for (int kind = 0; kind < 2; kind++) {
        close_dataset();
        memset(text, 'a', BYTES);
        for (size_t i = 0; kind == 1 && i < BYTES; i += LINE) {
            memcpy(text + i, "{\"text\": \"", 10);
            memcpy(text + i + LINE - 3, "\"}\n", 3);
        }
        const char *path = tempdir_write(&dir, names[kind], text, BYTES);
        if (kind == 0) {
            assert_ok(nd_dataset_open(path, ND_DATA_AUTO, "bytes", 256, S, &dataset));
        } else {
            assert_ok(nd_dataset_open_text(path, ND_DATA_AUTO, corpus_request(&dir, NULL, 256), S,
                                           &dataset));
            path = nd_dataset_facts_of(dataset).cache;
        }
        nd_loader_options o = options_of(1, 0, 1, 0);
        use_loader(dataset, &o);
        next_batch();
        cr_assert_eq(truncate(path, 1000), 0);
        nd_status status = ND_OK;
        for (int step = 0; step < 5 && status == ND_OK; step++) {
            status = nd_loader_next(loader, &batch);
        }
        cr_expect_eq(status, ND_ERR_IO, "%s", names[kind]);
        cr_expect_eq(nd_error_last()->cause, ND_CAUSE_LOCAL);
        cr_expect_not_null(strstr(nd_error_last()->message, "became shorter"), "%s",
                           nd_error_last()->message);
    }
    free(text);
}
