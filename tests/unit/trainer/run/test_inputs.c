// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zstd.h>

#include "runtime/base/hash.h"
#include "tests/support/inputs.h"
#include "tests/support/shell.h"
#include "trainer/run/run.h"

static tempdir dir;
static nd_config config;
static nd_inputs inputs;
static nd_dataset *data;

static void begin(void)
{
    assert_ok(nd_config_init(&config));
    config.train.sequence_length = 3;
    inputs = (nd_inputs){.shape.vocab = 256};
}

TEMPDIR_SUITE(inputs_data, begin);

/* With the folder of the test in the places of the format. */
static const char *filled(const char *format)
{
    static char text[3 * PATH_MAX];
    snprintf(text, sizeof text, format, dir.path, dir.path);
    return text;
}

static nd_status open_sources(const char *format)
{
    return nd_inputs_open_sources(&config, &inputs, filled(format), &data);
}

static void set(char **key, const char *format)
{
    free(*key);
    *key = strdup(filled(format));
}

/* The data that were opened last have so many sources, 0: any number, and blocks that begin with
 * these letters, '?': any. Closes them. */
static void expect_blocks(const char *what, int sources, const char *letters)
{
    cr_expect_eq(nd_dataset_blocks(data), (int64_t)strlen(letters), "%s", what);
    cr_expect(sources == 0 || nd_dataset_sources(data) == sources, "%s", what);
    for (int64_t i = 0; letters[i] && i < nd_dataset_blocks(data); i++) {
        int32_t x[3], y[3];
        assert_ok(nd_dataset_block(data, i, &(nd_block){x, y}));
        cr_expect(letters[i] == '?' || x[0] == letters[i], "%s: block %d is of %c, not %c", what,
                  (int)i, (char)x[0], letters[i]);
    }
    nd_dataset_close(data);
}

static void expect_sources(const char *format, int sources, const char *letters)
{
    assert_ok(open_sources(format));
    expect_blocks(format, sources, letters);
}

Test(inputs_data, a_single_path_is_no_blend)
{
    static const char *const forms[] = {"%s/a.txt", "[%s/a.txt]", "0.5 %s/a.txt"};
    tempdir_write(&dir, "a.txt", "aaaaaaaa", 8);
    for (int i = 0; i < 3; i++) {
        assert_ok(open_sources(forms[i]));
        cr_assert_str_eq(nd_dataset_source_name(data, 0), "");
        expect_blocks(forms[i], 1, "aa");
    }
    config.data.invalid_utf8 = ND_CHOOSE_INVALID_REFUSE;
    assert_fails(open_sources("%s/a.txt"), ND_ERR_CONFIG, "data.invalid_utf8 is refuse, but \"");
    set(&config.data.document_separator, "x");
    assert_fails(open_sources("%s/a.txt"), ND_ERR_CONFIG, "data.document_separator is set, but \"");
}

Test(inputs_data, lists_folders_and_patterns)
{
    tempdir_write(&dir, "b.txt", "bbbbbbbb", 8);
    tempdir_write(&dir, "a.txt", "aaaa", 4);
    assert_ok(open_sources("[%s/b.txt, %s/a.txt]"));
    cr_assert_str_eq(nd_dataset_source_name(data, 1), "a");
    expect_blocks("a list", 2, "bba");
    static const char *const forms[] = {"%s", "%s/*.txt", "%s/"};
    tempdir_catch_stderr(&dir);   /* a file that is no text */
    for (int i = 0; i < 3; i++) { /* sorted by name */
        expect_sources(forms[i], 0, "abb");
    }
    shell(&dir, "grep -c '1 files of other kinds' stderr | grep -qx 2");
    expect_sources("0.25 %s 0.75 %s/b.txt", 2, "?????");
    assert_fails(open_sources("[%s/a.txt, %s/none.txt]"), ND_ERR_DATA, "none.txt");
}

/* Files by the names of JSON lines, compressed or not, a folder and a pattern of them, as bytes. */
Test(inputs_data, rows_as_bytes)
{
    static const char line[] = "{\"text\": \"aaaa\"}\n";
    static const char *const names[] = {"a.jsonl", "b.ndjson", "c.JSONL", "d.jsonl.gz",
                                        "e.ndjson.zst"};
    static const char *const forms[] = {"%s", "%s/*", "%s/"};
    char frame[128];
    tempdir caches;
    tempdir_make(&caches);
    set(&config.data.cache_dir, caches.path);
    for (int i = 0; i < 3; i++) {
        tempdir_write(&dir, names[i], line, sizeof line - 1);
    }
    shell(&dir, "gzip -qc a.jsonl >d.jsonl.gz");
    const size_t size = ZSTD_compress(frame, sizeof frame, line, sizeof line - 1, 3);
    cr_assert(!ZSTD_isError(size));
    tempdir_write(&dir, names[4], frame, size);
    for (int i = 0; i < 5; i++) {
        assert_ok(nd_inputs_open_data(&config, &inputs, tempdir_file(&dir, names[i]), &data));
        cr_expect_eq(nd_dataset_tokens(data), 4, "%s", names[i]);
        expect_blocks(names[i], 0, "a");
    }
    for (int i = 0; i < 3; i++) { /* one text */
        assert_ok(open_sources(forms[i]));
        cr_expect_eq(nd_dataset_tokens(data), 5 * 4, "%s", forms[i]);
        cr_expect_eq(nd_dataset_facts_of(data).documents, 5);
        cr_expect_eq(nd_dataset_sources(data), 1);
        nd_dataset_close(data);
    }
    /* With a text beside them each file is cut into blocks of its own. */
    tempdir_write(&dir, "f.txt", "ffff", 4);
    assert_ok(open_sources("%s"));
    cr_expect_eq(nd_dataset_tokens(data), 6 * 4);
    expect_blocks("with a text", 0, "?????f");
    /* With a key of its own a row is a text, whatever other keys it has. */
    static const char pair[] = "{\"prompt\": \"b\", \"completion\": \"cc\", \"body\": \"aaaa\"}\n";
    tempdir_write(&dir, "pair.jsonl", pair, sizeof pair - 1);
    expect_sources("%s/pair.jsonl", 1, "b");
    set(&config.data.json_key, "body");
    expect_sources("%s/pair.jsonl", 1, "a");
    set(&config.data.json_key, "");
    /* data.format decides, and the vocabulary is that of bytes. */
    config.data.format = ND_DATA_JSONL;
    assert_ok(nd_inputs_open_data(&config, &inputs,
                                  tempdir_write(&dir, "g.txt", line, sizeof line - 1), &data));
    cr_expect_eq(nd_dataset_tokens(data), 4);
    nd_dataset_close(data);
    inputs.shape.vocab = 300;
    assert_fails(nd_inputs_open_data(&config, &inputs, tempdir_file(&dir, "a.jsonl"), &data),
                 ND_ERR_CONFIG, "data.tokenizer is \"bytes\", which has 256 ids");
    tempdir_remove(&caches);
}

/* llm.c's .bin: magic 20240520, version 1, count, 256 numbers in all, then U16 ids. */
static void write_shard(const char *name, uint16_t id, uint16_t count)
{
    uint8_t bytes[1024 + 2 * 64] = {0};
    const uint32_t head[] = {20240520, 1, count};
    memcpy(bytes, head, sizeof head);
    for (uint16_t i = 0; i < count; i++) {
        memcpy(bytes + 1024 + 2 * i, &id, 2);
    }
    tempdir_write(&dir, name, bytes, 1024 + 2 * (size_t)count);
}

Test(inputs_data, token_shards_of_a_folder_are_one_source)
{
    write_shard("x_1.bin", 'y', 8);
    write_shard("x_0.bin", 'x', 4);
    tempdir_write(&dir, "readme.md", "zzzzzzzz", 8);
    set(&config.data.tokenizer, "file");
    static const char *const forms[] = {"%s", "%s/x_*.bin"};
    for (int i = 0; i < 2; i++) {
        assert_ok(open_sources(forms[i]));
        cr_assert_str_eq(nd_dataset_source_name(data, 0), "");
        cr_assert_eq(nd_dataset_source(data, 0), data);
        expect_blocks(forms[i], 1, "xyy");
    }
}

/* The default of a missing key is another token in most tokenizers. */
Test(inputs_data, a_default_end_of_text_ends_no_document)
{
    write_shard("x_0.bin", 'x', 8);
    set(&config.data.tokenizer, "file");
    config.data.documents = ND_DOCUMENTS_SEPARATE;
    inputs.shape.eos_id = 'x';
    inputs.shape.eos_is_default = true;
    assert_fails(open_sources("%s"), ND_ERR_CONFIG, "give the id that ends them");
    inputs.shape.eos_is_default = false;
    assert_ok(open_sources("%s"));
    nd_dataset_close(data);
}

/* A folder is listed: its name is no pattern that another folder matches. */
Test(inputs_data, names_of_folders_are_no_patterns)
{
    static const char *const names[] = {"x[0]", "x*", "x?"};
    char made[4][PATH_MAX], shard[4][16];
    for (int i = 0; i < 4; i++) { /* the last one matches them all */
        const char *name = i < 3 ? names[i] : "x0";
        snprintf(made[i], PATH_MAX, "%s", tempdir_file(&dir, name));
        snprintf(shard[i], sizeof shard[i], "%s/a.bin", name);
        cr_assert_eq(mkdir(made[i], 0700), 0);
        write_shard(shard[i], (uint16_t)('a' + i), 8);
    }
    set(&config.data.tokenizer, "file");
    for (int i = 0; i < 3; i++) {
        bool ids = false;
        assert_ok(nd_inputs_open_data(&config, &inputs, made[i], &data));
        expect_blocks(made[i], 0, (const char *[]){"aa", "bb", "cc"}[i]);
        assert_ok(nd_inputs_hold_ids(&config, made[i], &ids));
        cr_expect(ids, "%s", made[i]);
    }
}

/* By which ranks of different hosts are compared. */
Test(inputs_data, digests_are_those_of_the_model_and_of_all_data)
{
    char *text[2], hex[2][ND_HASH_HEX_MAX], lines[300];
    size_t size;
    nd_dataset **const both[] = {&inputs.data, &inputs.validation};
    for (int i = 0; i < 2; i++) {
        assert_ok(nd_inputs_open_data(
            &config, &inputs,
            tempdir_write(&dir, i ? "b.txt" : "a.txt", i ? "bbbbbbbb" : "aaaaaaaa", 8), both[i]));
        assert_ok(nd_dataset_digest(*both[i], hex[i]));
    }
    snprintf(lines, sizeof lines, "\n> data.path=%s\n> data.validation_path=%s\n", hex[0], hex[1]);
    for (int i = 0; i < 2; i++) {
        FILE *out = open_memstream(&text[i], &size);
        assert_ok(nd_inputs_print_digests(&inputs, "> ", '=', out));
        cr_assert_eq(fclose(out), 0);
        cr_expect_str_eq(strchr(text[i], '\n'), lines);
        inputs.shape.window_theta++;
    }
    cr_expect(strncmp(text[0], "> model.config=", 15) == 0 && strcmp(text[0], text[1]) != 0);
    free(text[0]);
    free(text[1]);
    nd_inputs_close(&inputs);
}

Test(inputs_data, a_validation_file_among_the_training_files_is_refused)
{
    static const struct {
        const char *training, *validation;
        bool good;
    } cases[] = {{"%s/data", "%s/data/v.txt", false},
                 {"[%s/a.txt, %s/data/*.txt]", "[%s/a.txt, %s/v.txt]", false},
                 {"%s/data/a*", "%s/data/v.txt", true},
                 {"%s/data", "%s/a.txt", true},
                 {"%s/a.txt", "%s/a.txt", true}}; /* a small trial, which says so itself */
    inputs_write_model(&dir, 32, 64, 1);
    shell(&dir, "mkdir data");
    tempdir_write(&dir, "a.txt", "aaaaaaaa", 8);
    tempdir_write(&dir, "data/a.txt", "aaaaaaaa", 8);
    tempdir_write(&dir, "data/v.txt", "vvvvvvvv", 8);
    shell(&dir, "ln data/v.txt v.txt");
    config.resolved_mesh = (nd_mesh){{1, 1, 1, 1, 1}};
    config.resolved = true;
    set(&config.model.config, "%s/model.json");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_inputs all = {0};
        set(&config.data.path, cases[i].training);
        set(&config.data.validation_path, cases[i].validation);
        const nd_status status = nd_inputs_open(&config, &all);
        cr_expect_eq(status, cases[i].good ? ND_OK : ND_ERR_CONFIG, "%zu: %s", i,
                     nd_error_last()->message);
        cr_expect(cases[i].good ||
                  strstr(nd_error_last()->message, "so it would be trained on too"));
        nd_inputs_close(&all);
    }
}

/* Which steps and validations without a label that counts are named before a run begins. */

enum { S = 3 };

static void begin_labels(void)
{
    begin();
    set(&config.data.cache_dir, "%s/caches");
    config.train.micro_batch_size = config.train.gradient_accumulation_steps = 1;
    config.resolved_mesh = (nd_mesh){{1, 1, 1, 1, 1}};
}

TEMPDIR_SUITE(labels, begin_labels);

/* One row: a prompt and a completion of so many bytes. */
static void write_row(const char *name, int prompt, int completion)
{
    FILE *f = fopen(tempdir_file(&dir, name), "w");
    cr_assert_not_null(f);
    fprintf(f, "{\"prompt\": \"%0*d\", \"completion\": \"%0*d\"}\n", prompt, 0, completion, 0);
    cr_assert_eq(fclose(f), 0);
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
    assert_ok(open_sources("[{path: %s/rows.jsonl, epochs: 2}]"));
    inputs.data = data;
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
    assert_ok(open_sources("[{path: %s/rows.jsonl, epochs: 1}]"));
    inputs.data = data;
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
    assert_ok(open_sources("%s/rows.jsonl"));
    inputs.data = data;
    assert_ok(open_sources("%s/rows.jsonl"));
    inputs.validation = data;
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
    assert_ok(open_sources("%s/text.txt"));
    inputs.data = data;
    assert_ok(open_sources("[{name: one, path: %s/a.jsonl}, {name: two, path: %s/b.jsonl}]"));
    inputs.validation = data;
    cr_assert_eq(nd_dataset_sources(inputs.validation), 2);
    config.train.validation_batches = BLOCKS;
    char *said = warnings(0, 0);
    cr_expect_not_null(strstr(said,
                              "no label counts in the 10000 sequences that a validation reads "
                              "of one; see to data.validation_path"),
                       "%s", said);
    cr_expect_null(strstr(said, "reads of two"), "%s", said);
}
