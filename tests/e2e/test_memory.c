// SPDX-License-Identifier: Apache-2.0
/*
 * What a worker holds against its plan: RssAnon + RssShmem after two steps (trace.json) within 15 %
 * of planned_bytes (run.json) plus one constant of 150 MB for the libraries' own memory. The table
 * is printed.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "tests/support/shell.h"

static tempdir dir;

static double number_in(const char *file, const char *key)
{
    static char text[1 << 16];
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir.path, file);
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f, "%s", path);
    size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = '\0';
    fclose(f);
    const char *at = strstr(text, key);
    cr_assert_not_null(at, "no %s in %s", key, path);
    return strtod(strchr(at, ':') + 1, NULL);
}

/* Bytes of the worker of rank 0. */
typedef struct footprint {
    double plan, held, peak;
} footprint;

static footprint measure(const char *name, const char *flags)
{
    shell(&dir,
          shell_line("rm -rf out && " ND_LAUNCH
                     " --device cpu --set model.config=model.json --set data.path=text.txt "
                     "--sequence-length 1024 --num-steps 2 --set output.save_model=false --set "
                     "output.dir=out %s",
                     flags));
    footprint f = {.plan = number_in("out/run.json", "\"planned_bytes\""),
                   .held = number_in("out/trace.json", "\"resident_bytes\""),
                   .peak = number_in("out/metrics.jsonl", "\"peak_memory_bytes\"")};
    fprintf(stderr, "memory: %-28s plan %8.1f MB, held %8.1f MB, %+6.1f %%\n", name, f.plan * 1e-6,
            f.held * 1e-6, (f.held / f.plan - 1.0) * 100.0);
    return f;
}

static void check(const char *name, const char *flags)
{
    const double constant = 150e6;
    footprint f = measure(name, flags);
    cr_assert_leq(fabs(f.held - f.plan), 0.15 * f.plan + constant, "%s: plan %.1f MB, held %.1f MB",
                  name, f.plan * 1e-6, f.held * 1e-6);
}

static void write_inputs(int hidden, int ffn)
{
    static char text[40000], model[512];
    memset(text, 'x', sizeof text);
    tempdir_make(&dir);
    tempdir_write(&dir, "text.txt", text, sizeof text);
    snprintf(model, sizeof model,
             "{\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": %d, "
             "\"intermediate_size\": %d, \"num_hidden_layers\": 6, \"num_attention_heads\": 8, "
             "\"num_key_value_heads\": 4, \"max_position_embeddings\": 2048}",
             hidden, ffn);
    tempdir_write(&dir, "model.json", model, strlen(model));
}

Test(memory, a_worker_stays_within_its_plan, .timeout = 280)
{
    write_inputs(512, 1408);
    check("one worker", "--num-processes 1 --dp-shard-size 1");
    check("one worker, fp32", "--num-processes 1 --dp-shard-size 1 --precision fp32");
    check("fsdp 2", "--num-processes 2 --dp-shard-size 2");
    check("tp 2, selective recompute",
          "--num-processes 2 --dp-shard-size 1 --tp-size 2 --set parallel.recompute=selective");
    check("hsdp 2 x 2 x tp 2",
          "--num-processes 8 --dp-replicate-size 2 --dp-shard-size 2 --tp-size 2");
    check("cp 4, full recompute",
          "--num-processes 4 --dp-shard-size 1 --cp-size 4 --set parallel.recompute=full");
    check("cp 2, recompute of all but attention",
          "--num-processes 2 --dp-shard-size 1 --cp-size 2 --recompute all_but_attention");
    check("one worker, fp8", "--num-processes 1 --dp-shard-size 1 --precision fp8");
    check("fsdp 2 x tp 2, fp8 codes gathered",
          "--num-processes 4 --dp-shard-size 2 --tp-size 2 --precision fp8 --fp8-all-gather");
    tempdir_remove(&dir);
}

/*
 * 4,096 tokens of 6 layers with nothing recomputed: two thirds of the plan are activations. Each
 * layer keeps tokens (2 C + F) = 5.0 MB less than in BF16, 30 MB in all; codes and widened
 * operands of one product take half of that back. The plan says so, and so do the pages: what the
 * runs hold beside their plans (code, libraries' work space) is the same within 6 MB, so that a
 * product that allocates for itself shows (oneDNN's for matrices with gaps: 9 MB).
 */
Test(memory, fp8_holds_less_than_bf16_where_activations_are_most, .timeout = 280)
{
#define FOUR "--num-processes 1 --dp-shard-size 1 --micro-batch-size 4"
    static const struct {
        const char *name, *flags;
    } runs[] = {{"bf16, 4096 tokens", FOUR " --precision bf16"},
                {"fp8, 4096 tokens", FOUR " --precision fp8"},
                {"fp8, codes gathered", FOUR " --precision fp8 --fp8-all-gather"}};
    footprint of[3];
    write_inputs(256, 704);
    for (int i = 0; i < 3; i++) {
        of[i] = measure(runs[i].name, runs[i].flags);
    }
    for (int i = 1; i < 3; i++) {
        double planned = of[0].plan - of[i].plan, held = of[0].held - of[i].held;
        cr_expect_gt(planned, 15e6, "%s: plan %.1f MB", runs[i].name, of[i].plan * 1e-6);
        cr_expect_lt(fabs(held - planned), 6e6, "%s: %.1f MB less are planned, %.1f MB less held",
                     runs[i].name, planned * 1e-6, held * 1e-6);
        cr_expect_lt(of[i].peak, of[0].peak - 0.5 * planned, "%s: peak %.1f MB, bf16 %.1f MB",
                     runs[i].name, of[i].peak * 1e-6, of[0].peak * 1e-6);
    }
    tempdir_remove(&dir);
}
