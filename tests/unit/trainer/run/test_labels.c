// SPDX-License-Identifier: Apache-2.0
/* Which steps and validations without a label that counts are named before a run begins. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "trainer/run/run.h"

enum { S = 3 };

static tempdir dir;
static nd_config config;
static nd_inputs inputs;

static void setup(void)
{
    tempdir_make(&dir);
    assert_ok(nd_config_init(&config));
    free(config.data.cache_dir);
    config.data.cache_dir = strdup(tempdir_file(&dir, "caches"));
    config.train.sequence_length = S;
    config.train.micro_batch_size = config.train.gradient_accumulation_steps = 1;
    config.resolved_mesh = (nd_mesh){{1, 1, 1, 1, 1}};
    inputs = (nd_inputs){.shape.vocab = 256};
}

static void teardown(void)
{
    nd_dataset_close(inputs.data);
    nd_dataset_close(inputs.validation);
    nd_config_fini(&config);
    tempdir_remove(&dir);
}

TestSuite(labels, .init = setup, .fini = teardown);

/* One row: a prompt and a completion of so many bytes. */
static void write_row(const char *name, int prompt, int completion)
{
    FILE *f = fopen(tempdir_file(&dir, name), "w");
    cr_assert_not_null(f);
    fprintf(f, "{\"prompt\": \"%0*d\", \"completion\": \"%0*d\"}\n", prompt, 0, completion, 0);
    cr_assert_eq(fclose(f), 0);
}

static void open_sources(const char *format, nd_dataset **out)
{
    char text[3 * PATH_MAX];
    snprintf(text, sizeof text, format, dir.path, dir.path);
    assert_ok(nd_inputs_open_sources(&config, &inputs, text, out));
}

/* Returns what is said of the steps after `begin`, with so many samples passed over; good until the
 * next call. */
static char *warnings(int64_t begin, int64_t ahead)
{
    tempdir_catch_stderr(&dir);
    assert_ok(nd_inputs_warn_of_labels(&config, &inputs, begin, ahead));
    return tempdir_said(&dir);
}

/* Every block has a label that counts; behind the last sample there is no step to tell of. */
Test(labels, steps_end_where_the_data_end)
{
    write_row("rows.jsonl", 1, 23);
    open_sources("[{path: %s/rows.jsonl, epochs: 2}]", &inputs.data);
    config.train.steps = nd_dataset_facts_of(inputs.data).samples;
    cr_assert_gt(config.train.steps, 4);
    cr_assert_lt(config.train.steps, 1000);
    for (int64_t ahead = 0; ahead <= 3; ahead += 3) {
        char *said = warnings(1, ahead);
        cr_expect_null(strstr(said, "no label"), "%lld passed over:\n%s", (long long)ahead, said);
    }
}

/* The first block alone has no label: the step that reads it comes as much earlier. */
Test(labels, steps_are_counted_behind_the_samples_that_were_passed_over)
{
    int first = 0;
    write_row("rows.jsonl", S + 2, 20);
    open_sources("[{path: %s/rows.jsonl, epochs: 1}]", &inputs.data);
    config.train.steps = nd_dataset_facts_of(inputs.data).samples;
    for (config.data.shuffle_seed = 0; first < 3; config.data.shuffle_seed += first < 3) {
        char *said = warnings(0, 0), *step = strstr(said, "step ");
        cr_assert(step && sscanf(step, "step %d has no label", &first) == 1, "%s", said);
    }
    for (int ahead = 1; ahead < 3; ahead++) {
        char wanted[64], *said = warnings(0, ahead);
        snprintf(wanted, sizeof wanted, "step %d has no label", first - ahead);
        cr_expect_not_null(strstr(said, wanted), "%d passed over, no \"%s\":\n%s", ahead, wanted,
                           said);
    }
}

/* The first block is prompt alone, and a batch of two has the second. */
Test(labels, a_validation_reads_batches_of_several_samples)
{
    config.data.documents = ND_DOCUMENTS_JOIN;
    write_row("rows.jsonl", S + 2, 20);
    open_sources("%s/rows.jsonl", &inputs.data);
    open_sources("%s/rows.jsonl", &inputs.validation);
    config.train.steps = 0;
    config.train.validation_batches = 1;
    for (int i = 0; i < 4; i++) { /* of two rows, or of two ranks */
        config.train.micro_batch_size = 1 + (i == 1);
        config.resolved_mesh.size[i == 2 ? ND_AXIS_DP_SHARD : ND_AXIS_DP_REPLICATE] = 1 + i / 2;
        char *said = warnings(0, 0);
        cr_expect_eq(strstr(said, "in the 1 sequences that a validation reads") != NULL, i == 0,
                     "%d: %s", i, said);
        config.resolved_mesh = (nd_mesh){{1, 1, 1, 1, 1}};
    }
}

/* All ranks wait while they are read. */
Test(labels, all_sets_share_one_limit)
{
    enum { TOKENS = 256, BLOCKS = 10000 }; /* of two sets more than the limit */
    tempdir_write(&dir, "text.txt", "aaaaaaaa", 8);
    config.train.sequence_length = TOKENS;
    write_row("a.jsonl", BLOCKS * (TOKENS + 1), 1);
    write_row("b.jsonl", BLOCKS * (TOKENS + 1), 1);
    open_sources("%s/text.txt", &inputs.data);
    open_sources("[{name: one, path: %s/a.jsonl}, {name: two, path: %s/b.jsonl}]",
                 &inputs.validation);
    cr_assert_eq(nd_dataset_sources(inputs.validation), 2);
    config.train.validation_batches = BLOCKS;
    char *said = warnings(0, 0);
    cr_expect_not_null(strstr(said,
                              "no label counts in the 10000 sequences that a validation reads "
                              "of one; see to data.validation_path"),
                       "%s", said);
    cr_expect_null(strstr(said, "reads of two"), "%s", said);
}
