// SPDX-License-Identifier: Apache-2.0
/* `ndtrain plan` for real sizes: nothing is allocated, so any machine can plan any job. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "tests/support/shell.h"
#include "trainer/commands/gpu_rates.h"

static tempdir dir;

TEMPDIR_SUITE(plan, tempdir_leave_empty, .timeout = 240);

/* In the source tree: the shipped files name each other by paths from there. */
#define PLAN "cd " ND_SOURCE " && " ND_TRAIN " plan --config-file configs/"

/* The line " <name> <number> <unit>" of a part in GiB, as plans of this size are printed; -1 when
 * it is not there. */
static double part(const char *name)
{
    char line[128], unit[8];
    snprintf(line, sizeof line, "\n%s ", name);
    const char *at = strstr(shell_output, line);
    if (!at) {
        return -1.0;
    }
    double value = 0.0;
    cr_assert_eq(sscanf(at + strlen(line), "%lf %7s", &value, unit), 2);
    cr_assert_str_eq(unit, "GiB");
    return value;
}

/* Parts are lines with two spaces before them; what they are made of has four. Each number is
 * rounded to 0.001. */
static void parts_are_the_total(void)
{
    double sum = 0.0;
    int count = 0;
    const char *line = strstr(shell_output, "\nmemory plan of rank ");
    cr_assert_not_null(line, "%s", shell_output);
    for (line = strchr(line + 1, '\n'); line && strncmp(line, "\n  total", 8) != 0;
         line = strchr(line + 1, '\n')) {
        if (line[3] != ' ') {
            sum += strtod(line + 1 + strcspn(line + 1, "0123456789"), NULL);
            count++;
        }
    }
    cr_assert_geq(count, 6, "%d parts in:\n%s", count, shell_output);
    cr_assert_leq(fabs(sum - part("  total")), 0.0005 * (count + 1), "%g in:\n%s", sum,
                  shell_output);
}

static double after(const char *words)
{
    const char *at = strstr(shell_output, words);
    cr_assert_not_null(at, "no \"%s\" in:\n%s", words, shell_output);
    return strtod(at + strlen(words), NULL);
}

Test(plan, llama_8b_on_eight_workers)
{
    shell(&dir, PLAN "llama-3.1-8b/tp_hsdp.yaml --rank 5");
    says("mesh: 2 x 2 x 1 x 2 (dp_replicate x dp_shard x cp x tp), 8 workers", "groups of rank 5 ",
         "  tp                2 ranks 4, 5 ", "  dp_shard_cp       2 ranks 5, 7 ",
         "  dp_replicate      2 ranks 1, 5 ", "  model             4 ranks 4, 5, 6, 7 ",
         "model: 8030261248 parameters", "memory plan of rank 5");
    /* F32 shards of 8,030,261,248 parameters over dp_shard 2 x tp 2; the padding is below a
     * thousandth. */
    double gib = 8030261248.0 / 4 * 4 / (1 << 30);
    cr_assert_float_eq(part("    master weights") / gib, 1.0, 1e-3, "%s", shell_output);
    cr_assert_float_eq(part("  state") / (4 * gib), 1.0, 1e-3, "%s", shell_output);
    parts_are_the_total();
    says("\nfits one H100: ", "\nestimated step, all workers: H100 ");
    shell_ends(&dir, 1,
               PLAN "llama-3.1-8b/tp_hsdp.yaml --device cuda --num-processes 1 --dp-shard-size 1 "
                    "--dp-replicate-size 1 --tp-size 1",
               "\ndoes not fit one H100: ", "\nlongest sequence that fits one H100: none\n",
               " (dp_replicate x dp_shard x cp x tp), 1 worker; ", "error: the job does not fit; ");
    const char *error = strstr(shell_output, "\nerror: ");
    cr_expect(error && strchr(error + 1, '\n')[1] == '\0', "more behind it:\n%s", shell_output);
    cr_expect_eq(part("    NCCL, estimated"), -1.0, "one GPU has no peer");
    cr_expect_eq(part("    CUDA graphs, estimated"), -1.0, "they are off");
    shell(&dir, PLAN "llama-3.1-8b/tp_hsdp.yaml --device cuda --cuda-graphs true");
    /* tp, dp_replicate, dp_shard_cp twice, dp_cp, model and the world: 7 x 288 MiB. */
    cr_expect_float_eq(part("    NCCL, estimated"), 7 * 288.0 / 1024, 1e-3, "%s", shell_output);
    cr_expect_eq(part("    driver and libraries"), 1.0, "%s", shell_output);
    /* 32 layers of at least 4 products forward and 8 backward, and of 4 gathers or reductions over
     * tp that divide each: 20 times 64 KiB. */
    cr_expect_geq(part("    CUDA graphs, estimated"), 32 * 20.0 / 16384, "%s", shell_output);
    parts_are_the_total();
    /* Masters and two moments of 8 billion parameters, of which 8 ranks write an eighth each. */
    says_not("pinned");
    shell(&dir, PLAN "llama-3.1-8b/tp_hsdp.yaml --device cuda --checkpoint-frequency 100");
    says("\ncheckpoints: 11.22 GiB of pinned host memory a worker\n"
         "loading a checkpoint: 0.07 GiB of host memory a worker\n");
    shell(&dir, PLAN "tp_hsdp.yaml");
    says(" MiB\nfits this host: 8 workers of ");
}

/* The estimate of 8 workers on the CPUs of one has the products take as long as they do on that
 * one. */
Test(plan, workers_share_the_cpus)
{
    double rate[2];
    static const char *const flags[] = {"--num-processes 1 --threads-per-worker 1",
                                        "--num-processes 8 --threads-per-worker 1"};
    for (int i = 0; i < 2; i++) {
        shell(&dir,
              shell_line("cd " ND_SOURCE
                         " && taskset -c $(taskset -cp $$ | sed 's/.*: //; s/[-,].*//') " ND_TRAIN
                         " plan --device cpu --explain %s",
                         flags[i]));
        rate[i] = after("\n  CPU by ");
    }
    cr_assert_float_eq(rate[1] / rate[0], 1.0 / 8, 0.01, "%g and %g TFLOP/s", rate[0], rate[1]);
}

Test(plan, llama_405b_on_16384_workers)
{
    /* A plan starts nothing, so that its nodes need no place to meet. */
    shell(&dir, "cd " ND_SOURCE " && " ND_TRAIN " plan --nnodes 8 --nproc-per-node 8");
    says("mesh: ", ", 64 workers");
    shell_ends(&dir, 2, ND_TRAIN " check --nnodes 8 --nproc-per-node 8",
               "launch.rdzv_endpoint is empty, so the nodes cannot meet");
    shell(&dir, PLAN "llama-3.1-405b/tp_hsdp.yaml --num-processes 16384 --dp-replicate-size 32 "
                     "--rank 16383");
    says("mesh: 32 x 64 x 1 x 8 (dp_replicate x dp_shard x cp x tp), 16384 workers",
         "  tp                8 ranks 16376, 16377, 16378, 16379, ... 16383 ",
         "  dp_shard_cp      64 ranks 15879, 15887, 15895, 15903, ... 16383 ",
         "  dp_replicate     32 ranks 511, 1023, 1535, 2047, ... 16383 ",
         "  dp             2048 ranks 7, 15, 23, 31, ... 16383 ");
    double gib = 405853388800.0 / 512 * 4 / (1 << 30); /* dp_shard 64 x tp 8 */
    cr_assert_float_eq(part("    master weights") / gib, 1.0, 1e-3, "%s", shell_output);
    parts_are_the_total();
    says("estimated step, all workers: H100 ");
    shell_ends(&dir, 1,
               PLAN "llama-3.1-405b/tp_hsdp.yaml --num-processes 1024 "
                    "--dp-replicate-size 2 --device cpu --explain",
               "\ndoes not fit this host: 1024 workers of ");
}

/* Seconds of products in the estimate of a plan with these flags. */
static double product_seconds(const char *flags, const char *machine)
{
    char row[32];
    shell_run(&dir, shell_line(PLAN "llama-3.1-8b/fp8.yaml --explain --recompute none %s",
                               flags)); /* it need not fit */
    snprintf(row, sizeof row, "\n  %s: ", machine);
    return after(row);
}

Test(plan, fp8_products_take_half_the_time_on_a_gpu)
{
    double bf16 = product_seconds("--precision bf16", "H100");
    double fp8 = product_seconds("--precision fp8", "H100");
    cr_expect(fp8 > 0.5 * bf16 && fp8 < 0.75 * bf16, "%g and %g s", fp8, bf16);
    bf16 = product_seconds("--precision bf16 --device cpu", "CPU");
    fp8 = product_seconds("--precision fp8 --device cpu", "CPU");
    cr_expect_float_eq(fp8 / bf16, 1.0, 1e-3, "%g and %g s", fp8, bf16);
}

/* 6 FLOPs for each of 7.505e9 weights and token, 16 x 8192 tokens a worker; full recompute makes
 * the blocks' products but the last again. FP8 takes most of them. */
Test(plan, estimates_for_gpus_are_by_the_ops_of_a_step)
{
    static const char bf16[] =
        PLAN "llama-3.1-8b/fp8.yaml --device cuda --gradient-accumulation-steps 16 "
             "--precision bf16 --explain --recompute ";
    const double flops = 6 * 7.505 * 16 * 8.192; /* TFLOP */
    shell(&dir, shell_line("%snone", bf16));
    double plain = after("work of a worker: "), h100 = after("\n  H100: "),
           seconds = after("\n  H200: ");
    cr_expect_float_eq(plain / flops, 1.0, 2e-3, "%g and %g TFLOP", plain, flops);
    const double expected[] = {flops * 1e12 / nd_gpu_rates[0].bf16_flops,
                               flops * 1e12 / nd_gpu_rates[1].bf16_flops};
    cr_expect_float_eq(h100, expected[0], expected[0] * 2e-3);
    cr_expect_float_eq(seconds, expected[1], expected[1] * 2e-3);
    says("\nfits one H200: ", "no gaps between ops");
    shell(&dir, shell_line("%sfull", bf16));
    double full = after("work of a worker: ");
    cr_expect(full > 1.15 * plain && full < plain * 4 / 3, "%g and %g TFLOP", full, plain);
    shell(&dir, PLAN "llama-3.1-8b/fp8.yaml --device cuda --gradient-accumulation-steps 16 "
                     "--recompute none --explain");
    double left = after("work of a worker: "), fp8 = after(" in BF16, ");
    cr_expect_float_eq((left + fp8) / plain, 1.0, 2e-3, "%g and %g TFLOP", left, fp8);
    cr_expect_gt(fp8, 0.8 * plain);
}

/* The 8B configuration for eight GPUs keeps gathered weights, for which these have room. */
Test(plan, eight_gpus_of_80_gb_keep_gathered_weights)
{
    shell(&dir, PLAN "llama-3.1-8b/fp8.yaml --device cuda");
    double kept = part("  total");
    says("\nfits one H100: ");
    shell(&dir, PLAN "llama-3.1-8b/fp8.yaml --device cuda --reshard-after-forward true");
    cr_expect_gt(kept, part("  total"), "%s", shell_output);
}

/* Separate ones have first keys. The data are not opened, so auto is planned as join, which is
 * said of JSON lines. */
Test(plan, documents_are_those_that_are_given)
{
    static const char *const rules[] = {"join", "separate", "auto"};
    static const char words[] = "data.documents is auto, and planned as join; ";
    double batches[3];
    for (int i = 0; i < 3; i++) {
        shell(&dir, shell_line(PLAN "cp.yaml --data-path rows.jsonl --documents %s", rules[i]));
        batches[i] = after("\n    micro-batches: ids, labels, positions");
        cr_expect_eq(strstr(shell_output, words) != NULL, i == 2, "%s", shell_output);
    }
    cr_expect_gt(batches[1], batches[0]);
    cr_expect_eq(batches[2], batches[0]);
    shell(&dir, PLAN "cp.yaml --data-path text.txt --documents auto");
    says_not(words);
}

/* A run warns of them at its start. */
Test(plan, separate_documents_on_a_gpu_are_warned_of)
{
    static const char words[] = "warning: data.documents is separate, and the plain attention";
    shell(&dir, PLAN "cp.yaml --documents separate --device cuda");
    cr_expect_null(strstr(shell_output, words), "%s", shell_output);
    says("data.documents is separate: cuDNN computes its attention\n");
    shell(&dir, PLAN "cp.yaml --documents separate --device cuda --precision fp32");
    says(words);
    shell(&dir, PLAN "cp.yaml --documents separate --device cpu");
    says_not(words);
    shell(&dir, PLAN "cp.yaml --documents join --device cuda");
    says_not(words);
}

/* A step of microseconds has digits. */
Test(plan, steps_of_a_small_model_have_digits)
{
    static const char one[] = "{\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": "
                              "32, \"intermediate_size\": 64, \"num_hidden_layers\": 1, "
                              "\"num_attention_heads\": 4}";
    tempdir_write(&dir, "one.json", one, sizeof one - 1);
    shell(&dir, shell_line(ND_TRAIN " plan --device cuda --explain --sequence-length 32 --set "
                                    "model.config=%s/one.json",
                           dir.path));
    cr_expect_gt(after("\nestimated step, all workers: H100 "), 0);
    cr_expect_gt(after("\n  H100: "), 0);
    says_not(" 0 to ");
}

/* A sequence of that length fits, and the next one that the mesh takes does not. */
Test(plan, the_longest_sequence_that_fits)
{
    static const char command[] = PLAN "llama-3.1-8b/cp.yaml --recompute none --sequence-length ";
    const int unit = 8 * 2; /* two chunks a rank */
    shell(&dir, shell_line("%s128000", command));
    const int longest = (int)after("\nlongest sequence that fits one H100: ");
    says("\nlongest sequence that fits one H200: 131072 tokens, as many as the model has "
         "positions\n");
    cr_assert(longest > 0 && longest % unit == 0, "%s", shell_output);
    for (int more = 0; more < 2; more++) {
        shell(&dir, shell_line("%s%d", command, longest + more * unit));
        const double gib = after(more ? "\ndoes not fit one H100: " : "\nfits one H100: ");
        cr_expect(more ? gib > 79.6 : gib < 79.6, "%s", shell_output); /* by the digits shown */
        cr_expect_eq((int)after("\nlongest sequence that fits one H100: "), longest);
    }
}

Test(plan, a_rank_outside_of_the_mesh)
{
    shell_ends(&dir, 2, PLAN "llama-3.1-8b/tp_hsdp.yaml --rank 8",
               "--rank 8 is not in the mesh; use a rank from 0 to 7");
}

/* Longer ones would be computed in pieces, which this recipe refuses. */
Test(plan, a_longer_sequence_is_refused)
{
    static const char command[] = PLAN "cp.yaml --device cpu --precision fp8 --set "
                                       "fp8.recipe=tensorwise --tiled-mlp -1 --sequence-length ";
    const int unit = 8 * 16; /* rows of FP8 products a rank */
    shell(&dir, shell_line("%s2048", command));
    const int longest = (int)after("\nlongest sequence that fits this host: ");
    says(" tokens; a longer one is refused\n");
    shell(&dir, shell_line("%s%d", command, longest));
    shell_ends(
        &dir, 2, shell_line("%s%d", command, longest + unit),
        "parallel.tiled_mlp is -1, but fp8.recipe tensorwise has scales or sums that follow");
}

/* Behind " <name> " in a row of the table of other settings: GiB, and seconds of a step. */
static void row(const char *name, double *gib, double *seconds)
{
    char line[128];
    double percent;
    snprintf(line, sizeof line, "\n  %s ", name);
    const char *at = strstr(shell_output, line);
    cr_assert_not_null(at, "no %s in:\n%s", name, shell_output);
    cr_assert_eq(
        sscanf(at + strlen(line), "%lf GiB %lf %% %*s %lf to %*f s", gib, &percent, seconds), 3,
        "%s", at);
}

/* What --explain says of another setting is what the plan with that setting says. */
Test(plan, other_settings_are_planned_too)
{
    double own, gib, full, seconds;
    shell(&dir, PLAN "llama-3.1-8b/tp_hsdp.yaml --recompute none --explain");
    says("\nwhy:\n");
    row("as it is", &own, &seconds);
    cr_expect_float_eq(own, part("  total"), 2e-3, "%s", shell_output);
    row("parallel.recompute: full", &full, &seconds);
    cr_expect_lt(full, own);
    row("mesh.tp: 4, on 16 workers", &gib, &seconds);
    cr_expect_lt(gib, own);
    shell(&dir, PLAN "llama-3.1-8b/tp_hsdp.yaml --recompute full");
    cr_expect_float_eq(full, part("  total"), 2e-3, "%s", shell_output);
    shell(&dir, PLAN "llama-3.1-8b/tp_hsdp.yaml --recompute none");
    says_not("why:");
    shell_ends(&dir, 2, ND_TRAIN " check --explain", "--explain; it belongs to `ndtrain plan`");
}

/* Attention is most of a step of a long sequence. */
Test(plan, recompute_of_all_but_attention_lies_between_selective_and_full)
{
    static const char *const modes[] = {"as it is", "parallel.recompute: all_but_attention",
                                        "parallel.recompute: selective"};
    double gib[3], seconds[3];
    shell(&dir, PLAN "llama-3.1-8b/cp.yaml --recompute full --explain");
    for (int i = 0; i < 3; i++) {
        row(modes[i], &gib[i], &seconds[i]);
    }
    /* Two further tensors of (T, C) in BF16 and the lse for each block, 16,000 tokens a rank; full
     * has one of each that all blocks share. */
    double kept = 31.0 * 16000 * (2 * 4096 * 2 + 32 * 4) / 1073741824.0;
    cr_expect_float_eq(gib[1] - gib[0], kept, 2e-3, "%g and %g GiB", gib[1] - gib[0], kept);
    cr_expect_gt(gib[2], gib[1]);
    /* Again, per token and block: the products of q k v, and of gate and up, 2 FLOPs for each
     * weight; full also that of o, and two products of the scores. */
    const double weights = 4096.0 * (4096 + 2 * 1024 + 2 * 14336), o = 4096.0 * 4096;
    double work[3], attention = 0.0;
    for (int i = 0; i < 3; i++) {
        static const char *const values[] = {"full", "all_but_attention", "selective"};
        cr_expect(i == 0 || seconds[i] < seconds[i - 1], "%s", modes[i]);
        shell(&dir, shell_line(PLAN "llama-3.1-8b/cp.yaml --explain --recompute %s", values[i]));
        work[i] = after("work of a worker: ");
        attention = i == 0 ? after(" in F32, ") : attention;
    }
    const double got = (work[1] - work[2]) / (work[0] - work[2]), wanted = weights / (weights + o);
    cr_expect_float_eq(got, wanted, 2e-2, "%g and %g", got, wanted);
    shell(&dir, PLAN "llama-3.1-8b/cp.yaml --recompute all_but_attention --explain");
    /* Two products of scores forward, which full makes twice, and five backward. */
    cr_expect_float_eq(after(" in F32, ") / attention, 7.0 / 9.0, 2e-3, "%s", shell_output);
}

Test(plan, the_other_way_to_gather_keys_is_planned_where_cp_is_used)
{
    double own, ring, other, seconds;
    shell(&dir, PLAN "cp.yaml --sequence-length 128000 --explain");
    says("further workers are on further hosts like this one:\n");
    row("as it is", &own, &seconds);
    row("parallel.cp_comm: ring", &ring, &seconds);
    cr_expect_lt(ring, own);
    row("parallel.tiled_mlp: -1", &other, &seconds);
    cr_expect_lt(other, own);
    shell(&dir, PLAN "cp.yaml --sequence-length 128000 --cp-comm ring --explain");
    row("as it is", &other, &seconds);
    cr_expect_eq(other, ring);
    row("parallel.cp_comm: allgather", &other, &seconds);
    cr_expect_eq(other, own);
    shell(&dir, PLAN "llama-3.1-8b/cp.yaml --cp-comm auto --explain");
    says("attention over the 8 ranks of mesh.cp: ",
         ", the least as parallel.cp_comm auto asks; GB that", "\n  ulysses 2, then ring ");
    row("parallel.cp_comm: ulysses", &own, &seconds);
    shell(&dir, PLAN "tp_hsdp.yaml --explain");
    says_not("cp_comm");
}

/* The line behind " <name> " in the table of other settings. */
static void row_refuses(const char *name, const char *why)
{
    char line[128];
    snprintf(line, sizeof line, "\n  %s ", name);
    const char *at = strstr(shell_output, line);
    cr_assert_not_null(at, "no %s in:\n%s", name, shell_output);
    const char *end = strchr(at + 1, '\n');
    const char *said = strstr(at, why), *refused = strstr(at, "not possible: ");
    cr_expect(end && refused && refused < end && said && said < end, "no \"%s\" of %s in:\n%s", why,
              name, shell_output);
}

/* A setting that a run refuses at its start is a row with that sentence, not a plan. */
Test(plan, other_settings_that_cannot_be_say_why)
{
    double gib, seconds;
    shell(&dir, PLAN "llama-3.1-405b/tp_hsdp.yaml --explain");
    row("mesh.tp: 16, on 2048 workers", &gib, &seconds); /* two ranks have copies of a KV head */
    row("mesh.cp: 2, on 2048 workers", &gib, &seconds);
    shell(&dir, PLAN "tp_hsdp.yaml --tp-size 8 --dp-replicate-size 1 --dp-shard-size 1 --explain");
    says("  kv_copies         2 ranks 0, 1 ");
    row_refuses("mesh.tp: 16, on 16 workers",
                "the model's num_attention_heads is 8, which mesh.tp 16 does not divide");
    shell(&dir, PLAN "tp_hsdp.yaml --sequence-length 18 --explain");
    row_refuses("mesh.cp: 2, on 16 workers",
                "train.sequence_length 18 is not divisible by 2 x mesh.cp = 4");
    shell(&dir, PLAN "tp_hsdp.yaml --sequence-length 9 --micro-batch-size 2 --explain");
    row_refuses("train.micro_batch_size: 1, train.gradient_accumulation_steps: 2",
                "local tokens are not divisible by mesh.tp 2");
    shell(&dir, PLAN "tp_hsdp.yaml --precision fp8 --set fp8.filter='*' --sequence-length 16 "
                     "--explain");
    row_refuses("mesh.cp: 2, on 16 workers", "FP8 products need a number divisible by 16");
    shell_run(&dir, PLAN "tp_hsdp.yaml --num-processes 16777216 --dp-shard-size -1 --explain");
    row_refuses("mesh.dp_shard: 8388608, on 33554432 workers", "launch.workers is 33554432");
}

/* Every row of a shipped file's table has a plan or a reason. */
Test(plan, shipped_files_are_explained)
{
    static const char *const files[] = {"tp_hsdp.yaml",
                                        "cp.yaml",
                                        "llama-3.1-8b/cp.yaml",
                                        "llama-3.1-8b/fp8.yaml",
                                        "llama-3.1-8b/tp_hsdp.yaml",
                                        "llama-3.1-70b/tp_hsdp.yaml",
                                        "llama-3.1-405b/tp_hsdp.yaml",
                                        "bench/single.yaml",
                                        "bench/fsdp.yaml",
                                        "bench/hsdp_tp.yaml"};
    shell(&dir, "test $(find " ND_SOURCE "/configs -name '*.yaml' | wc -l) = 10");
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        shell(&dir, shell_line(PLAN "%s --explain", files[i]));
        const char *at = strstr(shell_output, "\n  as it is ");
        int rows = 0;
        for (at = at ? strchr(at + 1, '\n') : NULL; at && at[1]; at = strchr(at + 1, '\n')) {
            const char *end = strchr(at + 1, '\n');
            const char *good = strstr(at, " tokens/s\n"), *bad = strstr(at, " not possible: ");
            rows++;
            cr_expect(end && ((good && good < end) || (bad && bad < end)), "%s, row %d:\n%s",
                      files[i], rows, shell_output);
        }
        cr_expect_geq(rows, 6, "%s:\n%s", files[i], shell_output);
    }
}

/* The numbers of parameters of the published models. */
Test(plan, shapes_of_other_families)
{
    static const struct {
        const char *folder, *parameters;
    } models[] = {{"qwen3-8b", "8190735360"},
                  {"qwen3-32b", "32762123264"},
                  {"mistral-7b", "7248023552"},
                  {"phi-4", "14659507200"}};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        char command[512], line[64];
        snprintf(command, sizeof command,
                 PLAN "llama-3.1-8b/fp8.yaml --set model.config=configs/%s/config.json --set "
                      "train.sequence_length=4096 --set launch.workers=32 --set mesh.dp_shard=32",
                 models[i].folder);
        snprintf(line, sizeof line, "model: %s parameters", models[i].parameters);
        shell(&dir, command);
        says(line);
    }
}
