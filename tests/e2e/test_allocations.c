// SPDX-License-Identifier: Apache-2.0
/*
 * No allocation inside a step or a validation: a run of 12 makes exactly as many allocations of its
 * own as a run of 2, on every rank. Nor does a new token allocate. (The preflight's RANK is 0 too,
 * but rank 0 ends later and writes last.)
 */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/inputs.h"
#include "tests/support/shell.h"

static tempdir dir;

static void train(const char *mesh, int steps, const char *counts)
{
    shell(&dir,
          shell_line(
              "mkdir -p %s && rm -rf out && LD_PRELOAD=" ND_COUNTER " ND_COUNT_DIR=%s " ND_LAUNCH
              " --device cpu --set model.config=model.json --set data.path=text.txt "
              "--sequence-length 64 --num-steps %d "
              "--set optimizer.schedule=constant --set train.gradient_accumulation_steps=2 --set "
              "log.interval=1 "
              "--set data.validation_path=text.txt --set train.validation_interval=1 "
              "--set train.validation_batches=1 --set output.save_model=false --set output.dir=out "
              "--log-with tensorboard %s",
              counts, counts, steps, mesh));
}

static long count_of(const char *counts, int rank)
{
    char path[256];
    long count = -1;
    snprintf(path, sizeof path, "%s/%s/%d", dir.path, counts, rank);
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f, "%s", path);
    cr_assert_eq(fscanf(f, "%ld", &count), 1);
    fclose(f);
    return count;
}

/* Runs of few and of many of these things allocate alike. */
static void expect_equal(const char *mesh, int ranks, const char *more)
{
    for (int r = 0; r < ranks; r++) {
        long few = count_of("few", r), many = count_of("many", r);
        cr_assert_gt(few, 10, "rank %d: the counter counts", r);
        cr_assert_eq(many, few, "%s, rank %d: %ld allocations in %s", mesh, r, many - few, more);
    }
}

static void compare(const char *mesh, int ranks)
{
    train(mesh, 2, "few");
    train(mesh, 12, "many");
    expect_equal(mesh, ranks, "10 more steps");
    shell(&dir, "rm -rf few many out");
}

static void write_inputs(void)
{
    char text[20000];
    memset(text, 'x', sizeof text);
    tempdir_make(&dir);
    tempdir_write(&dir, "text.txt", text, sizeof text);
    for (size_t i = 0, length = 1; i < sizeof text; i += length, length = length * 7 % 41) {
        text[i] = '\n';
    }
    tempdir_write(&dir, "lines.txt", text, sizeof text);
    inputs_write_model(&dir, 32, 64, 2);
}

/* Three requests in two slots, without a tokenizer: a text would grow. */
static void generate(const char *mesh, int tokens, const char *counts)
{
    shell(&dir,
          shell_line(
              "mkdir -p %s && LD_PRELOAD=" ND_COUNTER " ND_COUNT_DIR=%s " ND_LAUNCH
              " generate --model out/model --prompt-file rows.jsonl --max-batch 2 --ignore-eos "
              "--max-new-tokens %d %s >%s/rows",
              counts, counts, tokens, mesh, counts));
    shell(&dir, shell_line("test $(grep -c '\"new_tokens\":%d,' %s/rows) -eq 3", tokens, counts));
}

Test(allocations, none_for_a_new_token, .timeout = 280)
{
    static const char rows[] = "{\"ids\": [1, 2, 3]}\n{\"ids\": [4, 5, 6]}\n{\"ids\": [7]}\n";
    static const char *const meshes[] = {"--num-processes 1", "--num-processes 2 --tp-size 2",
                                         "--num-processes 1 --temperature 1 --top-p 0.9"};
    write_inputs();
    tempdir_write(&dir, "rows.jsonl", rows, sizeof rows - 1);
    shell(&dir, ND_LAUNCH
          " --device cpu --set model.config=model.json --set data.path=text.txt "
          "--sequence-length 64 --num-steps 1 --num-processes 1 --output-dir out "
          "--set data.validation_path= && rm -f out/model/tokenizer.json out/model/SHA256SUMS");
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        generate(meshes[i], 8, "few");
        generate(meshes[i], 80, "many");
        expect_equal(meshes[i], 1 + (i == 1), "72 more tokens");
    }
    tempdir_remove(&dir);
}

Test(allocations, none_inside_a_step, .timeout = 280)
{
    write_inputs();
    compare("--num-processes 1 --dp-shard-size 1", 1);
    compare("--num-processes 4 --dp-shard-size 2 --tp-size 2", 4);
    compare("--num-processes 4 --dp-shard-size 2 --tp-size 2 --precision fp8 --fp8-all-gather "
            "--fp8-filter mlp --fp8-health-interval 1",
            4);
    compare("--num-processes 1 --dp-shard-size 1 --precision fp8 --fp8-recipe rowwise "
            "--fp8-health-interval 1",
            1);
    compare("--num-processes 2 --dp-shard-size 2 --precision fp8 --fp8-recipe delayed", 2);
    compare("--num-processes 4 --dp-replicate-size 2 --dp-shard-size 1 --cp-size 2 --set "
            "parallel.cp_comm=ring "
            "--set parallel.recompute=full --data-path '[{path: text.txt, weight: 2}, {path: "
            "text.txt, weight: 1}]' --validation-path '[text.txt, text.txt]'",
            4);
    compare("--num-processes 4 --cp-size 4 --sequence-length 128 --documents separate --data-path "
            "lines.txt --set data.end_of_text=10 --validation-path lines.txt",
            4);
    tempdir_remove(&dir);
}
