// SPDX-License-Identifier: Apache-2.0
/* What a run writes and when it validates, of small runs on two workers. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "tests/support/inputs.h"
#include "tests/support/shell.h"
#include "tests/support/skip.h"

enum { S = 64 };

static tempdir dir;

static void setup(void)
{
    const char *text = inputs_write_text(&dir, 40 * (S + 1));
    tempdir_write(&dir, "block.txt", text, S + 1);
    inputs_write_model(&dir, 32, 64, 1);
}

TEMPDIR_SUITE(run, setup, .timeout = 120);

#define RUN                                                                                        \
    ND_LAUNCH                                                                                      \
    " --device cpu --num-processes 2 --dp-shard-size 2 --set model.config=model.json "             \
    "--sequence-length 64 --set optimizer.schedule=constant --set output.dir=out "

/* Values of "key": in metrics.jsonl, in order; how many there are. */
static int values_of(const char *key, double *values, int room)
{
    char line[4096], quoted[64];
    int n = 0;
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    FILE *f = fopen(tempdir_file(&dir, "out/metrics.jsonl"), "r");
    cr_assert_not_null(f);
    while (fgets(line, sizeof line, f)) {
        const char *at = strstr(line, quoted);
        if (at) {
            cr_assert_lt(n, room);
            values[n++] = strtod(at + strlen(quoted), NULL);
        }
    }
    fclose(f);
    return n;
}

/* One block for training and validation, weights that stay as they are: the two losses are the same
 * number. */
Test(run, validation_is_the_loss_of_its_data)
{
    double losses[2], validation[2];
    shell(&dir, RUN "--set data.path=block.txt --set data.validation_path=block.txt --num-steps 2 "
                    "--num-processes 1 --dp-shard-size 1 --precision fp32 "
                    "--set train.validation_interval=1 --set optimizer.lr=1e-300 "
                    "--set optimizer.weight_decay=0 --set output.save_model=false");
    cr_assert_eq(values_of("loss", losses, 2), 2);
    cr_assert_eq(values_of("validation_loss", validation, 2), 2);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(validation[i], losses[1], "%.17g, not %.17g", validation[i], losses[1]);
    }
}

/* A configuration with validation, data of one's own without: a run without validation, and bad
 * data are said. */
Test(run, other_data_go_without_the_usual_validation_file)
{
    static const char config[] = "data: {path: data/train.txt, validation_path: data/valid.txt}\n"
                                 "train: {validation_interval: 1}\noutput: {save_model: false}\n";
    double validation[1];
    tempdir_write(&dir, "c.yaml", config, sizeof config - 1);
    shell(&dir, RUN "--config-file c.yaml --num-steps 1 --data-path text.txt");
    says("no validation: data.validation_path names no file");
    cr_assert_eq(values_of("validation_loss", validation, 1), 0);
    shell_ends(&dir, 65, "rm -r out; " RUN "--config-file c.yaml --data-path missing.txt",
               "missing.txt");
    shell_ends(&dir, 65, RUN "--data-path text.txt --validation-path missing.txt");
}

/* Between limits of memory (KiB) that are too small for the run and those that leave room for
 * packed weights, the run goes without them, and says so. */
Test(run, says_that_packed_weights_are_not_kept)
{
    static const char train[] =
        ND_TRAIN " train --device cpu --set model.config=model.json --sequence-length 64 --set "
                 "optimizer.name=sgd --num-steps 1 --micro-batch-size 1 --set "
                 "train.gradient_accumulation_steps=4 --set output.save_model=false --data-path "
                 "text.txt --threads-per-worker 1 --set output.dir=out";
    bool says = false;
    inputs_write_model(&dir, 512, 1408, 4);
    shell(&dir, ND_TRAIN " --version");
    if (!strstr(shell_output, "products by ndtrain's")) {
        tempdir_remove(&dir);
        skip_test("products of this CPU keep no packed weights");
    }
    for (int limit = 160000; limit <= 400000 && !says; limit += 20000) {
        says = shell_run(&dir, shell_line("rm -rf out; ulimit -v %d; %s", limit, train)) == 0 &&
               strstr(shell_output, "packed weights of the blocks");
    }
    cr_assert(says, "with no limit:\n%s", shell_output);
    shell(&dir, shell_line("rm -rf out; %s", train));
    says_not("packed weights");
}

/* The seed of fresh weights is the model's. Of width 0, they find all bytes equally likely. */
Test(run, fresh_weights_have_the_seed_and_the_width_of_the_model)
{
    static const char *const seeds[] = {
        "train.seed=1 --set model.seed=8", "train.seed=2 --set model.seed=8",
        "train.seed=1 --set model.seed=9", "model.config=flat.json"};
    double losses[4];
    shell(&dir, "sed 's/}/, \"initializer_range\": 0}/' model.json > flat.json");
    for (int i = 0; i < 4; i++) {
        shell(&dir, shell_line("rm -rf out; " RUN "--data-path text.txt --num-steps 1 --precision "
                               "fp32 --save-model false --set data.shuffle_seed=3 --set %s",
                               seeds[i]));
        cr_assert_eq(values_of("loss", &losses[i], 1), 1);
    }
    cr_expect(losses[0] == losses[1] && losses[0] != losses[2], "%.17g, %.17g, %.17g", losses[0],
              losses[1], losses[2]);
    cr_expect_float_eq(losses[3], log(256), log(256) * 0x1p-22, "%.17g", losses[3]); /* in F32 */
}

Test(run, warns_of_more_threads_than_cpus)
{
    static const char *const flags[] = {"--threads-per-worker 2", "--threads-per-worker 1"};
    for (int i = 0; i < 2; i++) {
        shell(&dir, shell_line(
                        "rm -rf out; taskset -c $(taskset -cp $$ | sed 's/.*: //; s/[-,].*//') " RUN
                        "--num-steps 1 --data-path text.txt --set output.save_model=false %s",
                        flags[i]));
        bool warned = strstr(shell_output, "are 4 threads on 1 cpu, ") != NULL;
        cr_assert_eq(warned, i == 0, "%s", shell_output);
    }
}

/* The flags as they were typed; run.json writes one of them a line. */
Test(run, is_recorded_with_the_command_that_started_it)
{
    shell(&dir,
          RUN "--num-steps 1 --data-path=text.txt --set output.save_model=false --set output.dir=");
    shell(&dir, "cd runs/run-1 && grep '\"config_file\": null' run.json && "
                "sed -n '/\"command\"/,/]/p' run.json");
    says("ndlaunch\",\n", "\"--num-steps\",\n    \"1\"", "\"--data-path=text.txt\"",
         "\"output.dir=\"\n  ]");
}

/* 40 blocks of 65 tokens, of which a step of two workers takes 2, and the last run's takes 64. */
Test(run, says_how_often_it_reads_the_data)
{
    shell(&dir, RUN "--data-path text.txt --num-steps 10 --set output.save_model=false");
    says("2600 tokens, 40 blocks of 65; the run reads them 0.5 times");
    says_not("more data");
    says_not("MLP in");
    shell(&dir,
          "rm -r out; " RUN "--data-path text.txt --num-steps 1 --set output.save_model=false "
          "--set train.micro_batch_size=32 --tiled-mlp 2");
    says("MLP in 2 pieces of 1024 tokens\n",
         "a step takes 64 blocks, but the training data have 40");
}

/* FP8 health every third step, the slowest rank of every step, the data, and a trace without
 * validations. */
Test(run, records_what_its_report_shows)
{
    static const char *const words[] = {
        "\"slowest\":[[", "\"fp8_health.input.mlp.gate_proj.underflow\":{\"count\":2,",
        "\"tokenizer\":\"bytes\"", "\"first_step\":3,\"steps\":4,"};
    double slowest[8], fastest[8], rank[8], ms[8], speed[8], wire[8], sum = 0;
    const double begin = nd_clock_seconds();
    shell(&dir,
          RUN "--data-path text.txt --validation-path block.txt --num-steps 6 --precision fp8 "
              "--fp8-filter mlp --fp8-health-interval 3 --set train.validation_interval=3 "
              "--set output.save_model=false");
    const double whole = (nd_clock_seconds() - begin) * 1e3;
    cr_assert_eq(values_of("step_ms", ms, 8), 6);
    cr_assert_eq(values_of("tokens_per_second", speed, 8), 6);
    cr_assert_eq(values_of("slowest_ms", slowest, 8), 6);
    cr_assert_eq(values_of("fastest_ms", fastest, 8), 6);
    cr_assert_eq(values_of("slowest_rank", rank, 8), 6);
    cr_assert_eq(values_of("wire_bytes", wire, 8), 6);
    cr_expect(wire[1] > 0 && wire[1] == wire[4], "%g and %g bytes of a step", wire[1], wire[4]);
    for (int i = 0; i < 6; i++) {
        cr_assert(slowest[i] >= fastest[i] && fastest[i] > 0 && rank[i] >= 0 && rank[i] <= 1);
        cr_expect_geq(ms[i], fastest[i], "a step is longer than the work of its fastest rank");
        cr_expect_float_eq(speed[i] * ms[i] / 1e3, 2 * S, 1e-9 * S, "two samples a step");
        sum += ms[i];
    }
    cr_expect_leq(sum, whole, "steps of %g ms in a run of %g ms", sum, whole);
    shell(&dir, "test $(grep -c '\"fp8_health\":{\"input\":{\"mlp.gate_proj\":{\"underflow\":' "
                "out/metrics.jsonl) = 2 && grep -q '\"validation_ms\"' out/trace.json && "
                "grep -q '\"fp8_linears\": 3' out/run.json && "
                "grep -q '\"linears\": 7,' out/run.json && " ND_TRAIN " report out");
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        shell(&dir, shell_line("grep -qF '%s' out/report.html", words[i]));
    }
    shell(&dir, "sed -n 's/.*\"gemm_ms\": \\([0-9.]*\\).*/\\1/p' out/trace.json");
    const double gemm = strtod(shell_output, NULL);
    cr_expect(gemm > 0 && gemm < sum, "%g ms of products in steps of %g", gemm, sum);
}

/* Blocks of prompts alone: such a step makes no update, and such a validation no loss; neither ends
 * the run, which still learns from the other blocks and saves its model. */
Test(run, steps_and_validations_without_a_counted_label)
{
    double skipped[16], losses[16];
    FILE *f = fopen(tempdir_file(&dir, "sft.jsonl"), "w");
    cr_assert_not_null(f);
    for (int i = 0; i < 8; i++) {
        fprintf(f, "{\"prompt\": \"%0*d\", \"completion\": \"abcdefgh\"}\n", i % 2 ? 130 : 57, 0);
    }
    fclose(f);
    shell(&dir, RUN "--set data.path=sft.jsonl --set data.validation_path=sft.jsonl --num-steps 8 "
                    "--validation-batches 1 --validation-interval 8 --num-processes 1 "
                    "--dp-shard-size 1 --shuffle-seed 3 --nonfinite stop 2>&1");
    says("is skipped: none of its labels counts");
    const char *first = strstr(shell_output, "none of its labels");
    cr_expect(first && !strstr(first + 1, "none of its labels"), "it is said once:\n%s",
              shell_output);
    char *output = strdup(shell_output);
    int steps = values_of("loss", losses, 16);
    int without = values_of("skipped", skipped, 16);
    cr_expect(without > 0 && without < steps, "%d of %d", without, steps);
    shell(&dir, "test -f out/model/model.safetensors");
    /* Each of them was known before step 1, and ndtrain check knows them. */
    char said[256];
    shell(&dir,
          "grep '\"skipped\"' out/metrics.jsonl | sed -n 's/.*\"step\": *\\([0-9]*\\).*/\\1/;1p'");
    const int first_without = atoi(shell_output);
    if (without == 1) {
        snprintf(said, sizeof said, "step %d has no label that counts in the loss", first_without);
    } else {
        snprintf(said, sizeof said, "step %d and %d later ones have no label that counts",
                 first_without, without - 1);
    }
    const char *foretold = strstr(output, said);
    cr_expect(foretold && foretold < strstr(output, "none of its labels"),
              "no \"%s\" at the start:\n%s", said, output);
    free(output);
    shell(&dir, "rm -rf out; " ND_TRAIN " check --device cpu --model-config model.json "
                "--sequence-length 64 --data-path sft.jsonl --validation-path '' --num-steps 8 "
                "--shuffle-seed 3 --nonfinite stop --save-dir out 2>&1");
    says(said);
}

/* Rows that leave a part of their blocks empty, as one micro-batch or as two. */
Test(run, padding_is_a_part_of_all_tokens_of_a_step)
{
    static const char *const micros[] = {"--micro-batch-size 2",
                                         "--micro-batch-size 1 --gradient-accumulation-steps 2"};
    double padding[2] = {0, 0};
    shell(&dir, "for i in 1 2 3 4; do echo '{\"prompt\": \"0123456789\", \"completion\": "
                "\"abcdefghijklmnopqrstuvwxyz\"}'; done > sft.jsonl");
    for (int i = 0; i < 2; i++) {
        shell(&dir, shell_line(RUN "--set data.path=sft.jsonl --validation-path '' --num-steps 1 "
                                   "--num-processes 1 --dp-shard-size 1 --save-model false %s",
                               micros[i]));
        cr_assert_eq(values_of("padding", &padding[i], 1), 1);
        shell(&dir, "rm -r out");
    }
    cr_expect(padding[0] > 0.25 && padding[0] < 0.75 && padding[0] == padding[1], "%g and %g",
              padding[0], padding[1]);
}

/* As above, of a validation. It reads one batch, and nearly all are within the prompt of the only
 * row. */
Test(run, a_validation_without_a_counted_label_is_foretold)
{
    FILE *f = fopen(tempdir_file(&dir, "valid.jsonl"), "w");
    cr_assert_not_null(f);
    fprintf(f, "{\"prompt\": \"%0*d\", \"completion\": \"abcdefgh\"}\n", 2000, 0);
    fclose(f);
    shell(&dir, RUN "--set data.path=text.txt --set data.validation_path=valid.jsonl --num-steps 2 "
                    "--validation-batches 1 --num-processes 1 --dp-shard-size 1 2>&1");
    const char *foretold = strstr(shell_output, "sequences that a validation reads of");
    cr_expect(foretold && strstr(foretold, "step 1"), "%s", shell_output);
    shell(&dir, "test -f out/model/model.safetensors; rm -r out");
    shell(&dir, RUN "--set data.path=text.txt --set data.validation_path=valid.jsonl --num-steps 2 "
                    "--num-processes 1 --dp-shard-size 1 2>&1");
    says_not("sequences that a validation reads of");
}

Test(run, saves_the_weights_in_the_type_that_was_asked_for)
{
    static const char *const types[][2] = {{"fp32", "F32"}, {"bf16", "BF16"}};
    for (int i = 0; i < 2; i++) {
        shell(&dir,
              shell_line(
                  RUN
                  "--set data.path=text.txt --num-steps 1 --set output.dtype=%s && "
                  "head -c 200 out/model/model.safetensors | grep -a '\"dtype\":\"%s\"' && "
                  "test -s out/model/tokenizer.json && test -s out/model/config.json && rm -r out",
                  types[i][0], types[i][1]));
    }
}

/* Found before the first step, not when the model is to be saved. */
Test(run, a_disk_too_full_for_the_model_is_found_at_the_start)
{
    shell_needs_disk(&dir, "small");
    shell_ends(&dir, 73,
               "unshare -rm sh -c 'mount -t tmpfs -o size=64k none small && " RUN
               "--set data.path=text.txt --num-steps 1 --set output.dir=small/out; "
               "code=$?; test -e small/out/metrics.jsonl && exit 1; exit $code'",
               "the trained model");
}

/* It fills with lines of metrics.jsonl, and the run trains on. */
Test(run, a_disk_that_becomes_full_does_not_end_the_run)
{
    shell_needs_disk(&dir, "small");
    shell(&dir, "unshare -rm sh -c 'mount -t tmpfs -o size=64k none small && " RUN
                "--set data.path=text.txt --set data.validation_path= --num-steps 200 "
                "--set log.interval=100 --set output.save_model=false "
                "--set output.dir=small/out && cp small/out/metrics.jsonl small/out/run.json .'");
    says("step 200/200 ", "warning: metrics.jsonl loses records of this run");
    /* Where a short line fits the rest of the disk, it says how many. */
    cr_expect(strstr(shell_output, "metrics.jsonl is written again, without ") ||
                  strstr(shell_output, " records of this run did not go to metrics.jsonl"),
              "%s", shell_output);
    shell(&dir, "n=$(wc -l < metrics.jsonl) && test $n -gt 10 -a $n -lt 199 && "
                "! grep -v '}$' metrics.jsonl");
    shell(&dir, "! grep -q records_lost metrics.jsonl || " ND_TRAIN " report . | "
                "grep 'finished: all 200 steps'");
}

/* The prefetch thread finds pages gone while the run computes. */
Test(run, data_that_become_shorter_end_the_run_with_a_sentence)
{
    shell(&dir, "for i in $(seq 200); do cat text.txt; done > long.txt");
    shell_ends(&dir, 74,
               "(n=0; until grep -q loss out/metrics.jsonl 2>/dev/null || [ $n -ge 600 ]; "
               "do sleep 0.1; n=$((n+1)); done; truncate -s 1000 long.txt) & " RUN
               "--set data.path=long.txt --num-steps 1000000 --set log.interval=100 "
               "--set output.save_model=false",
               "became shorter while it was read");
}

/* The version or name behind "key": in run.json, up to the closing quote. */
static void value_in_record(const char *key, char *value, size_t capacity)
{
    shell(&dir, shell_line("sed -n 's/.*\"%s\": *\"\\([^\"]*\\)\".*/\\1/p' out/run.json", key));
    snprintf(value, capacity, "%.*s", (int)strcspn(shell_output, "\n"), shell_output);
    cr_assert_neq(value[0], '\0', "run.json has no %s", key);
}

static void version_lists(const char *name, const char *value)
{
    char line[512];
    snprintf(line, sizeof line, "\n  %-9s %s", name, value);
    says(line);
}

/* It would read files and make threads for nothing. */
Test(run, one_worker_does_not_open_ucx)
{
    char version[64];
    shell(&dir, RUN "--set data.path=text.txt --set data.validation_path= --num-steps 1 "
                    "--set output.save_model=false --num-processes 1 --dp-shard-size 1");
    value_in_record("UCX", version, sizeof version);
    cr_expect(strcmp(version, "not used") == 0 || strcmp(version, "none") == 0, "%s", version);
}

/* Both programs name the libraries that a run records, and so does its log what multiplies;
 * ndlaunch asks the worker program. */
Test(run, version_lists_what_a_run_uses)
{
    char libraries[3][64], isa[64], products[128], both[256], log_of_run[sizeof shell_output];
    static const char *const names[] = {"oneDNN", "UCX", "OpenSSL"};
    static const char *const commands[] = {ND_TRAIN " --version", ND_TRAIN " train --version",
                                           ND_LAUNCH " --version"};
    shell(&dir, RUN "--set data.path=text.txt --set data.validation_path= --num-steps 1 "
                    "--set output.save_model=false");
    memcpy(log_of_run, shell_output, sizeof log_of_run);
    for (int i = 0; i < 3; i++) {
        value_in_record(names[i], libraries[i], sizeof libraries[i]);
    }
    value_in_record("isa", isa, sizeof isa);
    value_in_record("products", products, sizeof products);
    snprintf(both, sizeof both, "%s; %s", isa, products);
    cr_assert_not_null(strstr(products, libraries[0]), "no %s in: %s", libraries[0], products);
    cr_assert_not_null(strstr(log_of_run, both), "no \"%s\" in:\n%s", both, log_of_run);
    for (int c = 0; c < 3; c++) {
        shell(&dir, commands[c]);
        says("ndtrain " ND_VERSION "\n");
        for (int i = 0; i < 3; i++) {
            version_lists(names[i], libraries[i]);
        }
        version_lists("CPU", both);
        version_lists("PMIx", ND_WITH_PMIX ? "" : "not built in");
        version_lists("CUDA", ND_WITH_CUDA ? "" : "not built in");
        version_lists("cuDNN", ND_WITH_CUDA ? "headers of 9." : "not built in");
        version_lists("NCCL", ND_WITH_CUDA ? "headers of 2." : "not built in");
        cr_assert_eq(strstr(shell_output, "kernels for sm_") != NULL, ND_WITH_CUDA, "%s",
                     shell_output);
    }
    shell(&dir, ND_LAUNCH " --version");
    cr_assert_eq(strncmp(shell_output, "ndlaunch " ND_VERSION "\n", strlen(ND_VERSION) + 10), 0);
    shell_ends(&dir, 2, "ND_WORKER=/none " ND_LAUNCH " --version", "ND_WORKER");
}

Test(run, a_run_folder_that_is_deleted_ends_the_run)
{
    shell_ends(&dir, 73,
               "(while test ! -s out/metrics.jsonl; do sleep 0.1; done; rm -r out) & " RUN
               "--set data.path=text.txt --num-steps 100000 "
               "--set log.interval=100000 --set output.save_model=false",
               "out/metrics.jsonl was deleted during the run");
}

/* Limits of file sizes: too little for the configuration that workers inherit, for shared memory,
 * and for the model, which is known before training. */
Test(run, a_limit_of_file_sizes_is_an_error_with_a_sentence)
{
    static const struct {
        const char *limit, *workers, *sentence;
    } cases[] = {
        {"0", "1", "cannot be handed down to the workers: File too large"},
        {"1", "1", "cannot be handed down to the workers: File too large"},
        {"40", "2 --save-model false", "shared memory between workers needs files of up to"},
        {"40", "1", "the trained model needs a file of"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        shell_ends(&dir, 73,
                   shell_line("ulimit -f %s; " RUN
                              "--set data.path=text.txt --num-steps 2 --dp-shard-size -1 "
                              "--num-processes %s",
                              cases[i].limit, cases[i].workers),
                   cases[i].sentence);
        shell(&dir, "rm -rf out");
    }
}

/* A disk that is full where standard output goes. */
Test(run, output_that_is_lost_is_an_error)
{
    static const char *const commands[] = {
        ND_TRAIN " plan --device cpu --set model.config=model.json --data-path text.txt "
                 "--sequence-length 64",
        ND_TRAIN " check --device cpu --set model.config=model.json --data-path text.txt "
                 "--sequence-length 64 --set output.dir=out",
        ND_TRAIN " --help",
        ND_TRAIN " version",
        ND_LAUNCH " --help",
    };
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        shell_ends(&dir, 73, shell_line("%s >/dev/full", commands[i]),
                   "standard output cannot be written: No space left");
    }
}

/* That each precision is timed, on the mesh that was asked for; not how long it takes. */
Test(run, bench_times_every_precision)
{
    shell(&dir,
          ND_LAUNCH " bench --layer --repeats 1 --device cpu --num-processes 2 --dp-shard-size 2 "
                    "--set model.config=model.json --sequence-length 64");
    says("\nbf16 ", "\nfp8 tensorwise ", "\nfp8 rowwise ", "\nfp8 rowwise_with_gw_hp ",
         "\nfp8 delayed ", "mesh 1 x 2 x 1 x 1 ", ", 128 tokens; ");
    shell(&dir, ND_TRAIN " bench --products --sizes 32x48x64,16x16x16 --device cpu --jsonl");
    says("\"m\":32,\"k\":48,\"n\":64,\"bf16_seconds\":", "\"delayed_seconds\":");
    /* Where operands are packed. */
    shell(&dir, "ND_CPU_ISA=amx_emulated " ND_TRAIN
                " bench --products --sizes 32x48x64 --device cpu --jsonl");
    says("\"tensorwise_seconds\":");
    /* A product is one of a micro-batch: it would take 4,096 times as long. */
    shell(&dir, "for n in 1 4096; do " ND_TRAIN " bench --products --sizes 32x48x64 --device cpu "
                "--jsonl --gradient-accumulation-steps $n; done | python3 -c 'import json, sys\n"
                "one, many = [json.loads(line)[\"bf16_seconds\"] for line in sys.stdin]\n"
                "sys.exit(many > 64 * one)'");
}

/* The lines of README: a file for eight workers gives the sizes of one of its ranks, which one
 * worker times. */
Test(run, bench_times_the_linears_of_a_file_for_several_workers)
{
    shell(&dir, "cd " ND_SOURCE " && " ND_TRAIN
                " bench --products --config-file configs/tp_hsdp.yaml --device cpu");
    says("a rank of mesh 2 x 2 x 1 x 2 ", "\n    512     256     128 ",
         "\n    512     256      64 ", "\n    512     128     256 ", "\n    512     256     352 ",
         "\n    512     352     256 ");
    shell(&dir, "cd " ND_SOURCE " && " ND_TRAIN
                " check bench --products --config-file configs/tp_hsdp.yaml --device cpu");
    shell(&dir, "cd " ND_SOURCE " && " ND_TRAIN " bench --products --sizes 16x16x16 --jsonl "
                "--config-file configs/tp_hsdp.yaml --device cpu");
    says("\"m\":16,\"k\":16,\"n\":16,");
    shell_ends(&dir, 2,
               "cd " ND_SOURCE " && " ND_TRAIN
               " bench --layer --config-file configs/tp_hsdp.yaml --device cpu",
               "start it with ndlaunch");
}

Test(run, bench_refuses_what_it_cannot_time)
{
    static const struct {
        const char *command, *sentence;
    } cases[] = {
        {ND_TRAIN " bench --device cpu", "give --products"},
        {ND_TRAIN " bench --products --sizes 32x40x64",
         "--sizes is \"32x40x64\"; it must be MxKxN"},
        {ND_TRAIN " bench --products --sizes 32x48", "--sizes is \"32x48\"; it must be MxKxN"},
        {ND_TRAIN " bench --products --sizes 16x16x16,0x16x16", "each a multiple of 16 up to"},
        {ND_TRAIN " bench --products --sizes 16x16x16777232", "a multiple of 16 up to 16777216"},
        {ND_TRAIN " bench --products --layer", "give --products"},
        {ND_TRAIN " bench --layer --sizes 32x32x32", "--sizes is for --products"},
        {ND_TRAIN " bench --products --repeats 3", "--repeats is for --layer"},
        {ND_LAUNCH " bench --products --sizes 32x32x32 --device cpu --num-processes 2",
         "--products times one worker, but this job has 2; start it with `ndtrain bench "
         "--products`"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        shell_ends(&dir, 2, cases[i].command, cases[i].sentence);
    }
}
