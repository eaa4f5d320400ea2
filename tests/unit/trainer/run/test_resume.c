// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/shell.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/run/state.h"

static nd_resume found;

/* A text of this many x; its path. */
static const char *write_text(const char *name, size_t size)
{
    static char text[1 << 20];
    memset(text, 'x', size);
    return tempdir_write(&fake_run, name, text, size);
}

/* As rank 0 searches, in the folder `run` (output.dir). below: only checkpoints before that step;
 * -1: any. begun: the folder of the job, which starts again; "": it does not. */
static nd_status find_for(const char *run, const char *resume, int64_t below, const char *begun)
{
    nd_config config = {
        .source = "", .output.dir = (char *)run, .checkpoint.resume = (char *)resume};
    const nd_resume_search search = {
        .config = &config, .run_folder = begun, .below = below, .sets_aside = true};
    return nd_resume_find(&search, &found);
}

static nd_status find(const char *run, const char *resume)
{
    return find_for(run, resume, -1, "");
}

static void save_some(int64_t first, int64_t last)
{
    for (int64_t step = first; step <= last; step++) {
        fake_write_small(step);
    }
}

static void damage(int64_t step)
{
    fake_file(printed("checkpoint-%lld/manifest.json", (long long)step), "{");
}

Test(resume, from_an_older_checkpoint_sets_the_later_ones_aside)
{
    save_some(3, 6);
    damage(6);
    fake_folder("checkpoint-100"); /* another program's */
    assert_ok(find(fake_run.path, "4"));
    assert_ok(nd_resume_set_later_aside(&found));
    cr_assert(fake_exists("checkpoint-3") && fake_exists("checkpoint-4") &&
              fake_exists("checkpoint-100"));
    cr_assert(fake_exists("checkpoint-5.old/manifest.json") && !fake_exists("checkpoint-5"));
    cr_assert(fake_exists("checkpoint-6.bad") && !fake_exists("checkpoint-6"));
    assert_ok(find(fake_run.path, "latest"));
    cr_assert_eq(found.step, 4);
}

Test(resume, from_one_that_was_set_aside_puts_its_successor_aside)
{
    fake_write_small(6);
    assert_ok(nd_checkpoint_set_aside(fake_run.path, 6, "old", NULL));
    save_some(5, 6);
    fake_file("metrics.jsonl", "x");
    assert_ok(find(printed("%s/.", fake_run.path), fake_path("checkpoint-6.old")));
    cr_assert(nd_resume_is_own(&found));
    assert_ok(nd_resume_set_later_aside(&found));
    cr_assert(fake_exists("checkpoint-5") && fake_exists("checkpoint-6.old/manifest.json"));
    cr_assert(fake_exists("checkpoint-6.old-2/manifest.json") && !fake_exists("checkpoint-6"));
}

Test(resume, changes_nothing_in_the_folder_of_another_run)
{
    save_some(3, 5);
    fake_file("metrics.jsonl", "x");
    damage(5);
    assert_ok(find("/nonexistent/fork", fake_run.path));
    cr_assert_eq(found.step, 4);
    cr_assert_not(nd_resume_is_own(&found));
    assert_ok(find("/nonexistent/fork", fake_path("checkpoint-3")));
    assert_ok(nd_resume_set_later_aside(&found));
    cr_assert(fake_exists("checkpoint-4") && fake_exists("checkpoint-5"));
    /* Nor where checkpoints lie without their run; the run that goes on here does. */
    shell(&fake_run, "mv metrics.jsonl elsewhere");
    assert_ok(find("", fake_path("checkpoint-3")));
    cr_assert(found.found && !found.continues && !found.searched && !found.run[0]);
    shell(&fake_run, "mv elsewhere metrics.jsonl");
    assert_ok(find("", fake_run.path));
    cr_assert(nd_resume_is_own(&found));
    cr_assert(fake_exists("checkpoint-5.bad") && !fake_exists("checkpoint-5"));
}

/* After damage was found in a shard, the search goes on below; also in the folder of another run,
 * where nothing is renamed. */
Test(resume, goes_on_below_a_checkpoint_whose_shard_is_damaged)
{
    save_some(3, 5);
    for (int64_t below = 5; below > 3; below--) {
        assert_ok(find_for("/nonexistent/fork", fake_run.path, below, ""));
        cr_assert_eq(found.step, below - 1);
        cr_assert(found.searched && !nd_resume_is_own(&found));
    }
    bool older = find_for("/nonexistent/fork", fake_run.path, 3, "") == ND_OK;
    cr_assert(!older || !found.found, "step %lld", (long long)found.step);
    cr_assert(fake_exists("checkpoint-3") && fake_exists("checkpoint-4") &&
              fake_exists("checkpoint-5"));
}

/* Before its first checkpoint a job begins again where it was told to; then it goes on in its own
 * folder, and changes nothing in the other one, whose name begins with the name of its own. */
Test(resume, a_restart_begins_again_where_the_job_began)
{
    const char *own = printed("%s/run", fake_run.path), *other = printed("%s/run-1", fake_run.path);
    const char *third = printed("%s/checkpoint-3", other);
    save_some(3, 5);
    shell(&fake_run, "mkdir run run-1 && mv checkpoint-[34] run-1 && touch run-1/metrics.jsonl");
    for (int i = 0; i < 2; i++) {
        assert_ok(find_for(own, i ? other : third, -1, own));
        cr_assert(found.found && found.continues && !nd_resume_is_own(&found));
        cr_assert(found.step == 3 + i && strcmp(found.run, own) == 0);
    }
    assert_ok(find_for(own, "auto", -1, own));
    cr_assert(!found.found && found.continues && strcmp(found.run, own) == 0);
    fake_move("checkpoint-5", "run/checkpoint-5");
    assert_ok(find_for(own, third, -1, own));
    cr_assert(found.step == 5 && nd_resume_is_own(&found));
}

Test(resume, names_what_is_not_there)
{
    assert_fails(find("/nonexistent/run", "latest"), ND_ERR_DATA,
                 "there is no folder /nonexistent/run");
    assert_fails(find("/nonexistent/run", "7"), ND_ERR_DATA, "there is no folder /nonexistent/run");
    assert_fails(find(fake_run.path, "7b"), ND_ERR_DATA, "is 7b, but there is no such folder");
    assert_ok(find("/nonexistent/run", "auto"));
    cr_assert_not(found.found);
    save_some(1, 10); /* of which the newest eight are named */
    assert_fails(find(fake_run.path, "11"), ND_ERR_DATA,
                 "has no checkpoint-11; the newest there are: checkpoint-3, checkpoint-4, "
                 "checkpoint-5, checkpoint-6, checkpoint-7, checkpoint-8, checkpoint-9, "
                 "checkpoint-10");
}

Test(resume, names_a_checkpoint_of_another_program)
{
    fake_folder("checkpoint-500");
    fake_file("checkpoint-500/config.json", "{}");
    fake_file("checkpoint-500/model.safetensors", "x");
    assert_fails(find(fake_run.path, "500"), ND_ERR_DATA,
                 "checkpoint-500 is no checkpoint of ndtrain; to begin with its weights");
    assert_fails(find(fake_run.path, "latest"), ND_ERR_DATA, "(there: checkpoint-500)");
    cr_assert_null(strstr(nd_error_last()->message, "auto"));
    fake_file("run.json", "{}");  /* a run that ended before its first checkpoint */
    for (int i = 0; i < 2; i++) { /* metrics.jsonl alone shows it too */
        assert_fails(find(fake_run.path, "latest"), ND_ERR_DATA,
                     "or give auto to begin this run again");
        assert_ok(find(fake_run.path, "auto"));
        cr_assert(!found.found && found.continues);
        shell(&fake_run, i ? "true" : "mv run.json metrics.jsonl");
    }
    assert_fails(find("/nonexistent/new", fake_path("checkpoint-500")), ND_ERR_DATA,
                 "give it as --model-path");
}

Test(resume, names_the_damaged_checkpoint_to_examine)
{
    save_some(9, 10);
    damage(9);
    damage(10);
    assert_fails(find(fake_run.path, "latest"), ND_ERR_DATA,
                 printed("ndtrain ckpt verify %s/checkpoint-10.bad`", fake_run.path));
    cr_assert_null(strstr(nd_error_last()->message, "what else is there"));
    fake_folder("checkpoint-7"); /* without a manifest */
    assert_fails(find(fake_run.path, "latest"), ND_ERR_DATA, "what else is there: checkpoint-7; `");
}

/* A checkpoint may be moved to another disk, with a link in its place. */
Test(resume, a_link_to_a_checkpoint_is_one)
{
    static const char *const words[] = {"latest", "auto", "6"};
    char target[PATH_MAX];
    fake_write_small(4);
    save_some(6, 7);
    shell(&fake_run, "mv checkpoint-7 later && ln -s later checkpoint-7");
    shell(&fake_run, "mv checkpoint-6 big && ln -s big checkpoint-6");
    assert_ok(find(fake_run.path, "6"));
    assert_ok(nd_resume_set_later_aside(&found));
    cr_assert(fake_exists("checkpoint-7.old/manifest.json") && fake_exists("later") &&
              !fake_exists("checkpoint-7"));
    for (int i = 0; i < 3; i++) {
        assert_ok(find(fake_run.path, words[i]));
        cr_assert(found.step == 6 && nd_resume_is_own(&found));
    }
    assert_ok(find("/nonexistent/fork", fake_path("checkpoint-6")));
    cr_assert(found.found && found.step == 6 && !found.continues);
    nd_fs_remove_tree(fake_path("big")); /* a disk that is not mounted */
    for (int i = 0; i < 3; i++) {
        assert_fails(find(fake_run.path, words[i]), ND_ERR_DATA,
                     "checkpoint-6 is a link that leads");
    }
    assert_ok(find(fake_run.path, "4"));
    assert_ok(nd_resume_set_later_aside(&found));
    cr_assert_eq(readlink(fake_path("checkpoint-6.old"), target, sizeof target), 3);
}

Test(resume, allows_only_keys_that_are_compared)
{
    static const char *const words[][2] = {
        {"data.path,optimizer.nam",
         "names optimizer.nam, which allows nothing (did you mean optimizer.name?)"},
        {"optimizer.schedul", "(did you mean optimizer.schedule?)"},
        {"samples_per_stop", "(did you mean samples_per_step?)"}};
    nd_inputs inputs = {0};
    nd_config config = {.source = "", .output.dir = fake_run.path, .launch.node_rank = 1};
    config.checkpoint.resume = (char *)"";
    for (int i = 0; i < 3; i++) {
        config.checkpoint.allow = (char *)words[i][0];
        assert_fails(nd_resume_preflight(&config, &inputs), ND_ERR_CONFIG, words[i][1]);
    }
    config.checkpoint.allow =
        (char *)"data.path,data.tokenizer,data.shuffle_seed,data.documents,data.positions,"
                "data.long_rows,data.end_of_text,samples_per_step,train.sequence_length,"
                "train.precision,model.seed,optimizer.name,optimizer.lr,fp8.recipe";
    assert_ok(nd_resume_preflight(&config, &inputs));
}

static nd_status keep_event(void *self, const nd_run_event *e)
{
    snprintf(self, 200, "%lld %s %s %g %g %g", (long long)e->step, e->path ? e->path : "",
             e->reason, e->seconds, e->blocked_seconds, (double)e->bytes);
    return ND_OK;
}

/* A full disk may get room again; a state that differs between replicas stays so. */
Test(resume, a_save_that_is_wrong_three_times_ends_the_run)
{
    nd_config config = {.train.steps = 100};
    nd_worker worker = {.rank.config = &config};
    nd_trainer trainer = {.position.step = 9};
    nd_run run = {.worker = &worker, .config = &config, .trainer = &trainer, .dir = (char *)"out"};
    char said[200] = "";
    nd_sinks_add(&run.sinks, (nd_sink){.self = said, .event = keep_event});
    strcpy(run.place.path, "/all/out");
    const nd_save_report wrong = {.ended = true, .step = 9, .is_wrong = true, .why = "they differ"};
    const nd_save_report full = {.ended = true, .step = 9, .why = "the disk is full"};
    const nd_save_report good = {true, true, 9, "interval", 0.5, 2, 77};
    const nd_save_report *order[] = {&wrong, &wrong, &full, &full,  &full,
                                     &wrong, &wrong, &good, &wrong, &wrong};
    for (size_t i = 0; i < sizeof order / sizeof *order; i++) {
        assert_ok(nd_run_saving_report(&run, order[i]));
        cr_expect_str_eq(said, i == 7               ? "9 out/checkpoint-9 interval 2 0.5 77"
                               : order[i] == &wrong ? "9  they differ 0 0 0"
                                                    : "9  the disk is full 0 0 0");
    }
    cr_expect_str_eq(run.resume.source, "/all/out/checkpoint-9");
    cr_expect(run.resume.step == 9 && run.resume.searched && nd_resume_is_own(&run.resume));
    assert_fails(nd_run_saving_report(&run, &wrong), ND_ERR_IO,
                 "the checkpoint of step 9, the third in a row, is not saved: they differ");
}

/* The run that goes on, and the checkpoint that it goes on from. */
static nd_config config;
static nd_inputs inputs;
static nd_manifest manifest;
static char *first_tokenizer, *first_allow;

static void begin(void)
{
    fake_setup();
    inputs = (nd_inputs){.shape = fake_shape(true)};
    assert_ok(nd_config_init(&config));
    first_tokenizer = config.data.tokenizer;
    first_allow = config.checkpoint.allow;
    config.data.tokenizer = (char *)"bytes";
    config.train.steps = 100;
    config.resolved_mesh = fake_one;
}

static void end(void)
{
    config.data.tokenizer = first_tokenizer;
    config.checkpoint.allow = first_allow;
    nd_manifest_fini(&manifest);
    nd_dataset_close(inputs.data);
    nd_config_fini(&config);
    fake_teardown();
}

TestSuite(resume, .init = begin, .fini = end);

/* The next case begins with a folder and a configuration of its own. */
static void begin_again(void)
{
    end();
    begin();
}

/* The checkpoint is one of this run, after step 6. */
static void save_run(void)
{
    manifest = fake_manifest(&inputs.shape, &fake_one, 1, 6, false);
    json_decref(manifest.identity);
    assert_ok(nd_resume_identity(&config, &inputs, &manifest.identity));
}

/* The run reads the bytes of this file from now on. */
static void read_text(const char *name)
{
    nd_dataset_close(inputs.data);
    assert_ok(nd_dataset_open(fake_path(name), ND_DATA_AUTO, "bytes", 256, 32, &inputs.data));
}

/* The sentence of the error has only the first difference. */
static void expect_one(void)
{
    cr_assert_null(strstr(nd_error_last()->message, "all that"), "%s", nd_error_last()->message);
}

/* nd_resume_check of a run with this tokenizer.json, NULL: with the bytes of the text. */
static nd_status check(const char *tokenizer, const char *allow)
{
    config.data.tokenizer = (char *)(tokenizer ? tokenizer : "bytes");
    config.checkpoint.allow = (char *)allow;
    inputs.tokenizer = (char *)tokenizer;
    return nd_resume_check(&config, &inputs, "checkpoint-6", &manifest, false);
}

#define REFUSED(tokenizer, allow, words) assert_fails(check(tokenizer, allow), ND_ERR_CONFIG, words)

static void set(const char *key, const char *value)
{
    const char *text =
        printed("%.*s: {%s: %s}", (int)strcspn(key, "."), key, strchr(key, '.') + 1, value);
    assert_ok(nd_config_read_text(&config, text, strlen(text), "a test"));
}

/* A run with another value needs the key in --resume-allow; with the old one it needs nothing. */
static void expect_setting(const char *key, const char *old, const char *other)
{
    set(key, other);
    REFUSED(NULL, "", printed("made with %s %s, and this run has %s; use", key, old, other));
    assert_ok(check(NULL, key));
    set(key, old);
    assert_ok(check(NULL, ""));
}

static void store_setting(void *context, const char *key, const char *value, bool job)
{
    json_object_set_new(manifest.config, key, json_string(value));
}

/* A start that may go on says so many lines, and these words. */
static void expect_said(int lines, const char *words)
{
    tempdir_catch_stderr(&fake_run);
    assert_ok(nd_resume_check(&config, &inputs, "checkpoint-6", &manifest, true));
    const char *said = tempdir_said(&fake_run);
    cr_expect_eq(times_in(said, "resume: "), lines, "%s", said);
    cr_expect_not_null(strstr(said, words), "no \"%s\" in:\n%s", words, said);
}

/* The samples of a step, and data that differ where few samples of their content do not see it. */
Test(resume, another_batch_and_other_data_need_a_word)
{
    static char text[1 << 20];
    memset(text, 'x', sizeof text);
    text[8000] = 'y';
    tempdir_write(&fake_run, "other", text, sizeof text);
    text[0] = 'y';
    tempdir_write(&fake_run, "shorter", text, sizeof text / 2);
    write_text("text", sizeof text);
    config.train.micro_batch_size = 4;
    config.train.gradient_accumulation_steps = 2;
    read_text("text");
    save_run();
    config.train.gradient_accumulation_steps = 3;
    REFUSED(NULL, "data.path", "made with 8 samples a step, and this run has 12");
    REFUSED(NULL, "",
            "for instance with --gradient-accumulation-steps 2, or allow the change with "
            "--resume-allow samples_per_step");
    assert_ok(check(NULL, "samples_per_step"));
    config.train.sequence_length++;
    config.data.shuffle_seed++;
    REFUSED(NULL, "",
            "--resume-allow samples_per_step; to allow all that differs, give --resume-allow "
            "samples_per_step,data.shuffle_seed,train.sequence_length");
    REFUSED(NULL, "samples_per_step,data.shuffle_seed",
            "or allow the change with --resume-allow train.sequence_length");
    expect_one();
    config.data.shuffle_seed--;
    config.train.sequence_length--;
    config.train.gradient_accumulation_steps = 2;
    read_text("shorter");
    REFUSED(NULL, "", "made with other training data (digest ");
    expect_one(); /* both of its digests differ, which one word allows */
    read_text("other");
    REFUSED(NULL, "samples_per_step", "made with other training data (digest ");
    store_setting(NULL, "data.path", "[a, b]", true);
    REFUSED(NULL, "", "made with data.path [a, b] (digest ");
    assert_ok(check(NULL, "data.path"));
    read_text("text");
    expect_setting("data.positions", "restart", "running");
    expect_setting("data.long_rows", "cut", "drop");
    expect_setting("data.end_of_text", "-1", "3");
    expect_setting("optimizer.name", "adamw", "sgd");
}

/* A setting counts that changes what is learned, and does not follow from another one. */
Test(resume, settings_count_where_they_have_an_effect)
{
    static const struct {
        const char *both[2], *key, *other; /* both: what is set in the two runs */
        bool counts;
    } cases[] = {{{"train.precision", "bf16"}, "fp8.recipe", "delayed", false},
                 {{"train.precision", "fp8"}, "fp8.recipe", "delayed", true},
                 {{"train.precision", "fp8"}, "fp8.health_interval", "5", false},
                 {{"optimizer.warmup_ratio", "0"}, "optimizer.warmup_steps", "5", true},
                 {{"optimizer.warmup_ratio", "0.5"}, "optimizer.warmup_steps", "5", false},
                 {{"optimizer.warmup_ratio", "0.5"}, "optimizer.warmup_ratio", "0.25", true},
                 {{"train.precision", "fp8"}, "model.seed", "9", true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin_again();
        write_text("text", 300);
        set(cases[i].both[0], cases[i].both[1]);
        read_text("text");
        save_run();
        assert_ok(nd_config_each(&config, store_setting, NULL));
        set(cases[i].key, cases[i].other);
        cr_expect_eq(check(NULL, ""), cases[i].counts ? ND_ERR_CONFIG : ND_OK, "%zu", i);
        cr_expect_eq(check(NULL, cases[i].key), ND_OK, "%zu", i);
    }
}

/* Each change of what is computed, once, and none of where the run stands and what it writes. */
Test(resume, says_what_has_changed)
{
    static const char *const changes[][2] = {
        {"train.steps", "50"},           {"optimizer.lr", "0.5"},
        {"log.trackers", "tensorboard"}, {"checkpoint.export_model", "false"},
        {"launch.max_restarts", "2"},    {"output.save_model", "false"},
        {"train.sample_prompt", "x"}};
    static const char *const lines[] = {"train.steps was 100 and is 50, which also bends the learn",
                                        "optimizer.lr was 0.0003 and is 0.5\n",
                                        "data.path has another content (digest ",
                                        "train.sample_prompt was empty and is x\n",
                                        "from here on checkpoints hold no Hugging Face model"};
    write_text("text", 3000);
    write_text("other", 2000); /* both of its digests differ */
    set("checkpoint.interval", "2");
    set("checkpoint.export_model", "true");
    read_text("text");
    save_run();
    assert_ok(nd_config_each(&config, store_setting, NULL));
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        set(changes[i][0], changes[i][1]);
    }
    read_text("other");
    config.checkpoint.allow = (char *)"data.path,optimizer.lr";
    for (int i = 0; i < 5; i++) {
        expect_said(5, lines[i]);
    }
}

/* The rule for documents of the training data counts, whatever that of a validation is. A mix of
 * data with both rules has neither. */
Test(resume, documents_are_those_of_the_training_data)
{
    static const nd_document_rules separate = {
        .rule = ND_DOCUMENTS_SEPARATE, .end_of_text = 'y', .model_end = -1};
    const char *path = fake_file("text", "xxxyxxxyxxxyxxxyxxxyxxxyxxxyxxxyxxxy");
    nd_dataset_part parts[] = {{.name = "x"}, {.name = "y"}};
    nd_dataset *some, *all, **const list[] = {&inputs.data, &all, &parts[0].data, &parts[1].data};
    config.data.documents = ND_DOCUMENTS_SEPARATE; /* of a validation */
    for (int i = 0; i < 4; i++) {
        assert_ok(nd_dataset_open(path, ND_DATA_TEXT, "bytes", 256, 8, list[i]));
        assert_ok(i % 2 ? nd_dataset_set_documents(*list[i], &separate) : ND_OK);
    }
    assert_ok(nd_dataset_blend(parts, 2, &some));
    save_run();
    assert_ok(check(NULL, ""));
    nd_dataset_close(inputs.data);
    inputs.data = all;
    REFUSED(NULL, "", "made with data.documents join, and this run has separate");
    nd_dataset_close(inputs.data);
    inputs.data = some;
    REFUSED(NULL, "data.path", "made with data.documents join, and this run has auto");
}

/* A mix of two texts, and its order. */
static nd_dataset *mixed(double first, double second)
{
    nd_dataset_part parts[] = {{.name = "x", .weight = first}, {.name = "y", .weight = second}};
    nd_dataset *blend;
    for (int j = 0; j < 2; j++) {
        assert_ok(nd_dataset_open(write_text(parts[j].name, 3000), ND_DATA_TEXT, "bytes", 256, 32,
                                  &parts[j].data));
    }
    assert_ok(nd_dataset_blend(parts, 2, &blend));
    return blend;
}

/* Takes a pair away, as if an earlier program had written the others; *value: of it, or "". */
static void take_pair(json_t *pairs, const char *key, char value[64])
{
    const char *text = nd_manifest_find(pairs, key);
    snprintf(value, 64, "%s", text ? text : "");
    json_object_del(pairs, key);
}

/* Earlier programs rounded weights to 65,536 parts, so that theirs may have another order. */
Test(resume, a_mix_whose_order_has_changed_needs_a_word)
{
    static const struct {
        double weights[2];
        const char *period; /* NULL: the order is that of earlier programs */
    } cases[] = {{{0.7, 0.3}, NULL},
                 {{1, 65535}, NULL},
                 {{1, 65536}, "65537"},
                 {{0.123456, 0.876544}, NULL}, /* 1,929 and 13,696 of 15,625 */
                 {{0.123457, 0.876543}, "1000000"},
                 {{1, 3.14159265358979}, "1048576"}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        begin_again();
        char period[64];
        inputs.data = mixed(cases[c].weights[0], cases[c].weights[1]);
        save_run();
        assert_ok(check(NULL, ""));
        take_pair(manifest.identity, "data.path period", period);
        cr_assert_str_eq(period, cases[c].period ? cases[c].period : "");
        if (cases[c].period) {
            REFUSED(NULL, "",
                    printed("checkpoint-6 was made with data.path period 65536, and this run "
                            "has %s; ",
                            cases[c].period));
            assert_ok(check(NULL, "data.path"));
        } else {
            assert_ok(check(NULL, ""));
        }
    }
}

static nd_dataset *open_rows(const char *rows)
{
    static const nd_corpus_rules corpus = {.json_key = "text", .pairs = true};
    const nd_token_cache_request request = {
        .job = {.rules = &corpus, .threads = 1}, .folder = fake_run.path, .vocab = 256};
    nd_dataset *out;
    assert_ok(nd_dataset_open_text(fake_file("a.jsonl", rows), ND_DATA_AUTO, request, 8, &out));
    return out;
}

/* Earlier programs laid rows with prompts into blocks in the order of the file. */
Test(resume, rows_that_were_packed_otherwise_need_a_word)
{
    static const char rows[] = "{\"prompt\": \"abc\", \"completion\": \"de\"}\n"
                               "{\"prompt\": \"f\", \"completion\": \"ghi\"}\n";
    const nd_document_rules rules = {.end_of_text = -1, .model_end = -1};
    for (int mix = 0; mix < 2; mix++) {
        begin_again();
        nd_dataset_part parts[] = {{.name = "x"}, {.name = "y"}};
        char value[64];
        parts[0].data = open_rows(rows);
        parts[1].data = open_rows(rows); /* stays joined */
        assert_ok(nd_dataset_set_documents(parts[0].data, &rules));
        assert_ok(mix ? nd_dataset_blend(parts, 2, &inputs.data) : ND_OK);
        inputs.data = mix ? inputs.data : parts[0].data;
        save_run();
        assert_ok(check(NULL, ""));
        take_pair(manifest.identity, "data.path packing", value);
        REFUSED(NULL, "",
                "checkpoint-6 was made with data.path packing in the order of the file, and "
                "this run has the longest first; go on with the ndtrain that made it, or "
                "allow the change with --resume-allow data.path");
        assert_ok(check(NULL, "data.path"));
        expect_said(2, "resume: data.path packing was in the order of the file and is the longest "
                       "first, as --resume-allow permits");
        config.train.steps = 6; /* with no step left the order is over */
        assert_ok(check(NULL, ""));
        config.train.steps = 100;
        /* Those of joined documents had no such order. */
        take_pair(manifest.identity, "data.documents", value);
        assert_ok(check(NULL, "data.documents"));
        nd_dataset_close(parts[1].data); /* unless the mix has it */
    }
}

/* The data have 31,775 blocks, of which 48 were seen in 6 steps. */
Test(resume, another_batch_keeps_the_end_of_the_epochs)
{
    config.train.micro_batch_size = 4;
    config.train.gradient_accumulation_steps = 2;
    nd_dataset_part part = {.name = "", .epochs = 0.01};
    assert_ok(
        nd_dataset_open(write_text("text", 1 << 20), ND_DATA_AUTO, "bytes", 256, 32, &part.data));
    assert_ok(nd_dataset_blend(&part, 1, &inputs.data));
    cr_assert_eq(nd_dataset_facts_of(inputs.data).samples, 318);
    /* A start that may go on, and finds nothing to go on from, has the samples of a fresh one. */
    nd_config fresh = config;
    fresh.checkpoint.resume = (char *)"auto";
    fresh.output.dir = (char *)"/nonexistent/run";
    fresh.launch.node_rank = 1; /* no other check */
    for (fresh.train.steps = 39; fresh.train.steps < 41; fresh.train.steps++) {
        cr_expect_eq(nd_resume_preflight(&fresh, &inputs),
                     fresh.train.steps > 39 ? ND_ERR_CONFIG : ND_OK);
    }
    save_run();
    /* As many samples a step: what was passed over after a failure is left out at the end. */
    config.train.steps = 39;
    manifest.samples_seen = 64;
    assert_ok(check(NULL, ""));
    manifest.samples_seen = 48;
    /* 270 samples are left: 67 steps of 4, or 22 of 12. */
    static const struct {
        int64_t accumulation, last;
        const char *words;
    } cases[] = {{1, 73, "over after step 73;"}, {3, 28, "over after step 28;"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        config.train.gradient_accumulation_steps = cases[i].accumulation;
        config.train.steps = cases[i].last;
        assert_ok(check(NULL, "samples_per_step"));
        config.train.steps++;
        REFUSED(NULL, "samples_per_step", cases[i].words);
    }
    /* train.epochs of the 318 samples is 27 steps of 12. */
    config.train.epochs = 1;
    config.train.steps = 27;
    REFUSED(NULL, "samples_per_step",
            "has seen 48 samples in 6 steps, and a step of this run has 12, so that "
            "train.epochs 1");
    REFUSED(NULL, "samples_per_step", "give --num-steps 28 in its place");
    manifest.samples_seen = 331; /* no step is left */
    REFUSED(NULL, "samples_per_step", "give --num-steps 6 in its place");
    manifest.samples_seen = 48;
    config.train.gradient_accumulation_steps = 2; /* in a start after that one */
    config.train.steps = 39;
    assert_ok(check(NULL, ""));
    manifest.samples_seen = 47;
    REFUSED(NULL, "", "give --num-steps 39 in its place");
    /* A text does not end there: 31,726 of 31,775 blocks are left, a part of a step. */
    read_text("text");
    config.train.gradient_accumulation_steps = 3;
    manifest.samples_seen = 49;
    REFUSED(NULL, "samples_per_step,data.path", "give --num-steps 2650 in its place");
}

Test(resume, compares_tokenizers_by_their_content)
{
    const char *a = printed("%s", fake_file("a.json", "{1}"));
    const char *moved = printed("%s", fake_file("moved.json", "{1}"));
    const char *other = printed("%s", fake_file("other.json", "{2}"));
    write_text("text", 300);
    read_text("text");
    config.data.tokenizer = inputs.tokenizer = (char *)a;
    save_run();
    assert_ok(check(moved, ""));
    REFUSED(other, "", "made with another tokenizer.json (digest ");
    assert_ok(check(other, "data.tokenizer"));
    REFUSED(NULL, "", "a.json, and this run has bytes");
    /* A checkpoint of an earlier program has no digest. */
    nd_manifest_fini(&manifest);
    config.data.tokenizer = (char *)a;
    inputs.tokenizer = NULL;
    save_run();
    assert_ok(check(a, ""));
    REFUSED(moved, "", "moved.json; use the same value");
}
