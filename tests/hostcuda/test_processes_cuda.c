// SPDX-License-Identifier: Apache-2.0
/*
 * The programs as a user runs them, with device cuda over the doubles: eight processes under
 * ndlaunch, a saved model, and what is said when GPUs are missing. ND_HOSTCUDA is the folder of the
 * programs.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/inputs.h"
#include "tests/support/shell.h"

static tempdir dir;

static void setup(void)
{
    inputs_write_text(&dir, INPUTS_TEXT_MAX);
    inputs_write_model(&dir, 64, 96, 2);
}

TEMPDIR_SUITE(processes_cuda, setup, .timeout = 240);

#define RUN                                                                                        \
    ND_HOSTCUDA "/ndlaunch --set model.config=model.json --set data.path=text.txt "                \
                "--set data.tokenizer=bytes --sequence-length 64 --num-steps 3 "

static int run(const char *options, const char *out)
{
    return shell_run(&dir, shell_line(RUN "%s --set output.dir=%s", options, out));
}

static void trains(const char *options, const char *out)
{
    cr_assert_eq(run(options, out), 0, "%s", shell_output);
}

static void expect_ended(int code, int expected, const char *a, const char *b)
{
    cr_expect_eq(code, expected, "%d: %s", code, shell_output);
    says(a, b);
}

/* Loss of the last step of a run's metrics. */
static double last_loss(const char *out)
{
    shell(&dir, shell_line("grep '\"loss\"' %s/metrics.jsonl | tail -n 1 | "
                           "sed 's/.*\"loss\":\\([0-9.]*\\).*/\\1/'",
                           out));
    return strtod(shell_output, NULL);
}

Test(processes_cuda, eight_processes_train_as_one_worker_on_the_cpu)
{
    trains("--device cpu --workers 1 --gradient-accumulation-steps 4 --precision bf16", "cpu");
    trains("--device cuda --workers 8 --dp-replicate-size 2 --dp-shard-size 2 --tp-size 2 "
           "--precision bf16",
           "gpu");
    double cpu = last_loss("cpu"), gpu = last_loss("gpu");
    cr_expect(cpu > 1.0 && fabs(gpu - cpu) < cpu / 256.0, "loss %.6f on GPUs, %.6f on the CPU", gpu,
              cpu);
    shell(&dir,
          "test -s gpu/model/model.safetensors && grep -q '\"transport\": \"nccl\"' gpu/run.json");
}

Test(processes_cuda, fewer_gpus_than_workers_are_said_before_the_start)
{
    expect_ended(run("--device cuda --workers 9 --dp-shard-size 9", "none"), 2, "9 workers",
                 "8 are visible");
}

/* NCCL is estimated at 288 MiB for the groups of these two ranks. */
Test(processes_cuda, what_comes_after_the_plan_is_an_estimate_and_a_warning)
{
    static const char two[] = "--device cuda --workers 2 --tp-size 2 --set output.dir=";
    shell(&dir, shell_line("ND_DOUBLE_MEMORY=200 " RUN "%sfits", two));
    says("kernels, NCCL and CUDA graphs will take about");
    shell_ends(&dir, 71, shell_line("ND_DOUBLE_MEMORY=50 " RUN "%snot", two),
               "of 0.05 GiB are free", "kernels, NCCL and CUDA graphs still need about");
}

/* A variable that CUDA or NCCL reads once is set before its first call, unless the user set it. */
Test(processes_cuda, queues_loading_and_interface_are_set_before_the_first_call)
{
    static const struct {
        const char *variables, *options, *notes;
    } runs[] = {
        {"", "--workers 2 --dp-shard-size 2",
         "cuda CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=unset\n"
         "nccl NCCL_SOCKET_IFNAME==lo\n"},
        {"", "--workers 1 --cuda-graphs",
         "cuda CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER\n"},
        {"CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_MODULE_LOADING=LAZY NCCL_SOCKET_IFNAME=eth7",
         "--workers 1 --cuda-graphs --nccl-alone",
         "cuda CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_MODULE_LOADING=LAZY\n"
         "nccl NCCL_SOCKET_IFNAME=eth7\n"},
    };
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        shell(&dir, shell_line("ND_DOUBLE_NOTES=notes%zu %s " RUN
                               "--device cuda %s --set output.dir=noted%zu",
                               i, runs[i].variables, runs[i].options, i));
        shell(&dir, shell_line("sort -u notes%zu", i));
        cr_expect_str_eq(shell_output, runs[i].notes, "%s", runs[i].options);
    }
}

/* Products use those of the double's 132 multiprocessors that kernels.comm_blocks leaves, where
 * weights are gathered; or as many as kernels.product_processors says. */
Test(processes_cuda, products_leave_processors_to_collectives)
{
    static const struct {
        const char *options, *processors;
    } runs[] = {
        {"--dp-shard-size 2 --comm-blocks 16", "116\n"},
        {"--tp-size 2 --comm-blocks 16", "0\n"},
        {"--dp-shard-size 2 --comm-blocks 16 --product-processors 100", "100\n"},
    };
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        char options[256], out[32];
        snprintf(options, sizeof options, "--device cuda --workers 2 --autotune %s",
                 runs[i].options);
        snprintf(out, sizeof out, "divided%zu", i);
        trains(options, out);
        shell(&dir,
              shell_line(
                  "grep -o '\"processors\": *[0-9]*' %s/run.json | grep -o '[0-9]*$' | sort -u",
                  out));
        cr_expect_str_eq(shell_output, runs[i].processors, "%s", runs[i].options);
    }
    expect_ended(run("--device cuda --workers 1 --product-processors 133", "refused"), 2,
                 "kernels.product_processors is 133", "");
}

/* Each kind of product is named once, by one rank; the losses are those of vectors of scales. */
Test(processes_cuda, products_without_vectors_of_scales_are_said_once)
{
    static const char two[] = "--device cuda --workers 2 --dp-shard-size 2 --precision fp8 "
                              "--fp8-recipe rowwise --gradient-accumulation-steps 2";
    unsetenv("ND_DOUBLE_LT_VECTORS");
    trains(two, "vectors");
    says_not("takes no scales");
    const double with = last_loss("vectors");
    static const char *const when[] = {"heuristic", "product", "product-f32"};
    for (size_t i = 0; i < sizeof when / sizeof *when; i++) {
        char out[32];
        snprintf(out, sizeof out, "without%zu", i);
        shell(&dir, shell_line("ND_DOUBLE_LT_VECTORS=%s " RUN "%s --set output.dir=%s >log 2>&1",
                               when[i], two, out));
        const double without = last_loss(out);
        cr_expect(with > 1.0 && fabs(without - with) < with / 256.0, "%s: loss %.6f, not %.6f",
                  when[i], without, with);
        shell(&dir, "sed -n 's/.*takes no scales.* products of \\([^(]*\\) (.*/\\1/p' log | sort");
        cr_expect_str_eq(shell_output,
                         i == 2 ? "f8_e4m3 and f8_e4m3 in f32\n"
                                : "f8_e4m3 and f8_e4m3 added to bf16\n"
                                  "f8_e4m3 and f8_e4m3 in bf16\nf8_e4m3 and f8_e4m3 in f32\n");
    }
}

static void write_windows(int window)
{
    char text[512];
    int length =
        snprintf(text, sizeof text,
                 "{\"model_type\": \"mistral\", \"vocab_size\": 256, \"hidden_size\": 64, "
                 "\"intermediate_size\": 96, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, "
                 "\"num_key_value_heads\": 2, \"sliding_window\": %d}",
                 window);
    tempdir_write(&dir, "windows.json", text, (size_t)length);
}

static void write_rows(void)
{
    char rows[8192];
    size_t used = 0;
    for (int row = 0; row < 40; row++) {
        used += (size_t)snprintf(rows + used, sizeof rows - used, "{\"text\": \"");
        for (int i = 0; i < 3 + row * 37 % 150; i++) {
            rows[used++] = (char)('a' + (row + i * i) % 26);
        }
        used += (size_t)snprintf(rows + used, sizeof rows - used, "\"}\n");
    }
    tempdir_write(&dir, "rows.jsonl", rows, used);
}

/* By cuDNN, or by the plain kernels, which is said. */
Test(processes_cuda, separate_documents_train_as_on_the_cpu)
{
    static const char *const jobs[] = {
        "--precision bf16 --documents separate --sequence-length 128 --set data.path=rows.jsonl",
        "--precision bf16 --documents separate --sequence-length 128 --set data.path=rows.jsonl "
        "--set model.config=windows.json",
    };
    static const struct {
        const char *environment, *options, *said;
        bool windows;
    } forms[] = {
        {"", "--workers 1", NULL},
        {"", "--workers 1 --cuda-graphs", NULL},
        {"", "--workers 2 --cp-size 2 --cp-comm ulysses", NULL},
        {"", "--workers 2 --cp-size 2 --cp-comm allgather", NULL},
        {"", "--workers 4 --cp-size 4 --cp-comm allgather", NULL},
        {"", "--workers 2 --cp-size 2 --cp-comm ring", NULL},
        {"", "--workers 2 --cp-size 2 --cp-comm ring --cuda-graphs", "four places of a rank"},
        {"", "--workers 2 --cp-size 2 --cp-comm allgather --cuda-graphs", "four places of a rank"},
        {"", "--workers 1 --deterministic", "the plain attention kernels"},
        {"ND_DOUBLE_WRONG_DOCUMENTS=1 ", "--workers 1", "separate documents wrongly on this GPU"},
        {"", "--workers 1", NULL, true},
        {"", "--workers 2 --cp-size 2 --cp-comm allgather", NULL, true},
        {"", "--workers 2 --cp-size 2 --cp-comm ring", "the plain attention kernels", true},
    };
    char options[512];
    double cpus[2];
    write_rows();
    write_windows(40);
    for (int i = 0; i < 2; i++) {
        snprintf(options, sizeof options, "--device cpu --workers 1 %s", jobs[i]);
        trains(options, i ? "cpu1" : "cpu0");
        cpus[i] = last_loss(i ? "cpu1" : "cpu0");
    }
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        char out[16];
        snprintf(out, sizeof out, "gpu%zu", i);
        shell(&dir,
              shell_line("%s" RUN "--device cuda %s %s --set output.dir=%s", forms[i].environment,
                         forms[i].options, jobs[forms[i].windows], out));
        cr_expect(forms[i].said ? strstr(shell_output, forms[i].said) != NULL
                                : !strstr(shell_output, "plain"),
                  "%s: %s", forms[i].options, shell_output);
        const double gpu = last_loss(out), cpu = cpus[forms[i].windows];
        cr_expect(cpu > 1.0 && fabs(gpu - cpu) < cpu / 256.0, "%s: loss %.6f, %.6f on the CPU",
                  forms[i].options, gpu, cpu);
    }
}

/* A ring has blocks that are no whole band under their diagonal; gathered keys have not, and the
 * plain kernels compute single rows whether there is a window or not. */
Test(processes_cuda, windows_in_plain_kernels_are_said_once)
{
    write_windows(3);
    for (int form = 0; form < 4; form++) {
        static const char *const forms[] = {"allgather", "allgather --set train.sequence_length=4",
                                            "ring", "ring --deterministic"};
        const bool ring = form > 1, both = form > 2;
        char options[256], out[16];
        snprintf(options, sizeof options,
                 "--device cuda --workers 2 --cp-size 2 --precision bf16 --set "
                 "model.config=windows.json --cp-comm %s",
                 forms[form]);
        snprintf(out, sizeof out, "out%d", form);
        trains(options, out);
        const char *said = strstr(shell_output, "cuDNN does not take the model's sliding_window");
        cr_expect_eq(said != NULL, ring, "%s", shell_output);
        cr_expect(!said || !strstr(said + 1, "cuDNN does not take"), "%s", shell_output);
        cr_expect(!said || strstr(said, "blocks of a ring"), "%s", shell_output);
        cr_expect(!said || strstr(said, "allgather or ulysses is faster"), "%s", shell_output);
        cr_expect_eq(said && strstr(said, "train.deterministic"), both, "%s", shell_output);
    }
}

static double planned_bytes(const char *memory)
{
    shell(&dir, shell_line("ND_DOUBLE_MEMORY=%s " RUN "--device cuda --workers 1 --precision bf16 "
                           "--set output.dir=out%s",
                           memory, memory));
    shell(&dir,
          shell_line("sed -n 's/.*\"planned_bytes\": *\\([0-9.e+]*\\).*/\\1/p' out%s/run.json",
                     memory));
    return strtod(shell_output, NULL);
}

/* A copy of all weights is kept where it leaves 256 MiB for the code of kernels, and 1 GiB. */
Test(processes_cuda, a_copy_of_all_weights_leaves_room)
{
    inputs_write_model(&dir, 64, 96, 5);
    double copied = planned_bytes("1500"), cast = planned_bytes("1250");
    cr_expect(cast > 0.0 && cast < copied, "%.0f bytes with a copy, %.0f without", copied, cast);
}

/* auto: the CPU, with a reason where there is a driver; cuda: an error. */
Test(processes_cuda, auto_says_why_it_takes_the_cpu)
{
    static const struct {
        const char *machine, *why;
    } machines[] = {
        {"ND_DOUBLE_DRIVER=12040", "supports CUDA 12.4 and this program was built with"},
        {"ND_DOUBLE_DEVICES=-2", "system not yet initialized"},
        {"ND_DOUBLE_DEVICES=0", "the driver sees none"},
        {"ND_DOUBLE_DEVICES=-1", NULL},
    };
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        shell(&dir,
              shell_line("%s " RUN "--workers 2 --set output.dir=auto%zu", machines[i].machine, i));
        const char *line = strstr(shell_output, "device auto takes the CPU: ");
        cr_expect_eq(line != NULL, machines[i].why != NULL, "%s", shell_output);
        if (line) {
            cr_expect(strstr(line, machines[i].why) && !strstr(line + 1, "device auto takes"), "%s",
                      shell_output);
        }
        shell_ends(&dir, 2,
                   shell_line("%s " RUN "--device cuda --workers 2 --set output.dir=x",
                              machines[i].machine));
    }
}

#define EIGHT                                                                                      \
    "--device cuda --workers 8 --dp-replicate-size 2 --dp-shard-size 2 --tp-size 2 --precision "   \
    "fp8 "

/* The double's second algorithm takes a third of the first one's time, and FP8 half of BF16's: as
 * in test_tune.c. */
Test(processes_cuda, autotune_is_printed_recorded_and_replayed)
{
    setenv("ND_DOUBLE_LT_TIMES", "3,1,2", 1);
    setenv("ND_DOUBLE_LT_FP8", "0.5", 1);
    trains(EIGHT "--autotune", "tuned");
    says("forms of products, timed in", "q_proj k_proj v_proj: bf16; a step takes",
         "bf16: FP8 takes longer here (autotune)");
    const char *said = strstr(shell_output, "  o_proj: fp8; a step takes ");
    double fp8 = 0, bf16 = 0;
    cr_assert_eq(said ? sscanf(said, "%*s fp8; a step takes %lf ms of them in fp8, in bf16 %lf ms",
                               &fp8, &bf16)
                      : 0,
                 2, "%s", shell_output);
    cr_expect(fp8 > 0.4 * bf16 && fp8 < 0.6 * bf16, "%g ms in FP8, %g in BF16", fp8, bf16);
    said = strstr(shell_output, "autotune: ");
    int forms = 0, others = 0;
    cr_assert_eq(said ? sscanf(said, "autotune: %d forms %*[^;]; %d of them", &forms, &others) : 0,
                 2, "%s", shell_output);
    cr_expect(forms > 5 && others == forms, "%d of %d are by the second algorithm", others, forms);
    cr_expect_not(strstr(shell_output, "not among its choices"), "%s", shell_output);
    setenv("ND_DOUBLE_LT_TIMES", "1,2,3", 1); /* would choose otherwise */
    trains(EIGHT "--autotune-from tuned/run.json", "again");
    says("forms of products as tuned/run.json has them, nothing timed");
    cr_expect_not(strstr(shell_output, "not among its choices"), "%s", shell_output);
    shell(&dir, "grep -q '\"replayed_from\": \"tuned/run.json\"' again/run.json && "
                "sed 's/,\"step_ms\".*//' tuned/metrics.jsonl > a && "
                "sed 's/,\"step_ms\".*//' again/metrics.jsonl > b && cmp a b && "
                "cmp tuned/model/model.safetensors again/model/model.safetensors && "
                "sed -n '/\"products\"/,$p' tuned/run.json > a && "
                "sed -n '/\"products\"/,$p' again/run.json > b && test -s a && cmp a b");
}

Test(processes_cuda, autotune_that_cannot_be_is_said_before_the_start)
{
    expect_ended(run("--device cpu --workers 1 --autotune", "x"), 2, "kernels.autotune is true",
                 "--device cuda");
    expect_ended(run("--device cuda --workers 1 --autotune --deterministic", "x"), 2,
                 "train.deterministic", "kernels.autotune_from: RUN/run.json");
    expect_ended(run("--device cuda --workers 1 --autotune-from x.json", "x"), 65, "x.json",
                 "kernels.autotune_from");
    expect_ended(run("--device cuda --workers 1 --autotune-from model.json", "x"), 65,
                 "has no record of autotune", "model.json");
    trains("--device cuda --workers 1 --autotune", "one");
    trains("--device cuda --workers 1 --deterministic --autotune-from one/run.json", "d");
    expect_ended(run("--device cuda --workers 2 --tp-size 2 --autotune-from one/run.json", "x"), 2,
                 "mesh.tp 1", "this run has 2");
    setenv("ND_DOUBLE_CUBLASLT", "130200", 1);
    expect_ended(run("--device cuda --workers 1 --autotune-from one/run.json", "x"), 2,
                 "cublaslt 130100", "with 130200");
}

/* A run that does not fit is refused before a minute of timing, and one that fits in FP8 or BF16
 * alone is timed. */
Test(processes_cuda, autotune_looks_at_memory_first)
{
    for (int fp8 = 0; fp8 < 2; fp8++) {
        shell_ends(&dir, 71,
                   shell_line("ND_DOUBLE_MEMORY=50 " RUN "--device cuda --workers 1 --autotune "
                              "--precision %s --set output.dir=x",
                              fp8 ? "fp8" : "bf16"),
                   "whatever autotune chooses", "of 0.05 GiB are free");
        cr_expect_not(strstr(shell_output, "forms of products"), "%s", shell_output);
    }
    trains("--device cuda --workers 1 --autotune --precision fp8", "fits");
    says("forms of products, timed in");
}

/* With ND_DOUBLE_ORDERED attention's backward is refused where it is not deterministic. */
Test(processes_cuda, deterministic_is_what_attention_is_told)
{
    setenv("ND_DOUBLE_ORDERED", "1", 1);
    trains("--device cuda --workers 1 --precision bf16 --deterministic", "d");
    expect_ended(run("--device cuda --workers 1 --precision bf16", "u"), 1, "not deterministic",
                 "attention");
}

/* The rank that differs gives the reason, and the others end with it. */
Test(processes_cuda, a_gpu_unlike_the_one_that_was_timed_refuses)
{
    setenv("ND_DOUBLE_OTHER", "2", 1);
    expect_ended(run("--device cuda --workers 4 --autotune", "x"), 2, "rank 2 failed first",
                 "rank 2 has \"double of another GPU\"");
}

/* A saved model, requests for texts, and requests for scores. */
static void make_model_to_use(void)
{
    static const char prompts[] =
        "{\"prompt\": \"abc\"}\n{\"prompt\": \"the letters of a longer prompt, in "
        "several calls\", \"max_new_tokens\": 9}\n{\"prompt\": \"q\"}\n";
    static const char scores[] =
        "{\"context\": \"abcdef\", \"choices\": [\"gh\", \"xyz\"], \"gold\": "
        "0}\n{\"context\": \"pq\", \"choices\": [\"a\", \"rst\"], \"gold\": 1}\n";
    trains("--device cpu --workers 1 --precision fp32 --set optimizer.lr=0.01 "
           "--checkpointing-steps 3",
           "made");
    tempdir_write(&dir, "prompts.jsonl", prompts, sizeof prompts - 1);
    tempdir_write(&dir, "scores.jsonl", scores, sizeof scores - 1);
}

#define TEXTS_IN "generate --prompt-file prompts.jsonl --max-new-tokens 12 --prefill-chunk "
#define TEXTS    TEXTS_IN "16 "

/* Standard output of a program with device cuda is that of ndtrain on the CPU. */
static void expect_same_output(const char *gpu, const char *cpu)
{
    shell(&dir, shell_line("%s >got.txt", gpu));
    shell(&dir, shell_line(ND_HOSTCUDA "/ndtrain %s --device cpu >want.txt", cpu));
    shell(&dir, "test -s want.txt");
    shell(&dir, "diff want.txt got.txt");
}

Test(processes_cuda, texts_and_scores_are_those_of_the_cpu)
{
    make_model_to_use();
    expect_same_output(ND_HOSTCUDA "/ndtrain " TEXTS "--model made/model --precision fp32 "
                                   "--device cuda",
                       TEXTS "--model made/model --precision fp32");
    expect_same_output(ND_HOSTCUDA "/ndlaunch " TEXTS "--model made/checkpoint-3 --precision fp32 "
                                   "--device cuda --num-processes 4 --tp-size 2",
                       TEXTS "--model made/model --precision fp32");
    expect_same_output(ND_HOSTCUDA "/ndtrain eval --requests scores.jsonl --model made/model "
                                   "--precision fp32 --device cuda",
                       "eval --requests scores.jsonl --model made/model --precision fp32");
    shell(&dir, ND_HOSTCUDA "/ndtrain eval --serve-stdin --model made/model --precision bf16 "
                            "--device cuda <scores.jsonl >served.txt && "
                            "test $(grep -c log_likelihoods served.txt) = 2");
    shell(&dir, ND_HOSTCUDA "/ndlaunch eval --serve-stdin --model made/model --precision fp32 "
                            "--device cuda --num-processes 2 --tp-size 2 <scores.jsonl >served.txt "
                            "&& test $(grep -c log_likelihoods served.txt) = 2");
}

/* The log-likelihoods of all choices, in order; how many. */
static int read_scores(const char *options, double *scores, int most)
{
    int count = 0;
    shell(&dir, shell_line(ND_HOSTCUDA
                           "/ndtrain eval --requests scores.jsonl --jsonl --model made/model "
                           "--precision fp8 %s 2>log | grep -o '\"log_likelihoods\":\\[[^]]*' | "
                           "tr ',' '\n' | sed 's/.*\\[//'",
                           options));
    for (char *at = shell_output, *end; count < most; at = end) {
        scores[count] = strtod(at, &end);
        if (end == at) {
            break;
        }
        count++;
    }
    return count;
}

/*
 * In FP8 a GPU's products have padded rows, which no scale sees. Scores are those of the CPU within
 * test_mesh_cuda.c's bound of a loss, 2^-8 of it, for each token: rows whose scales were off by the
 * padding are far above. With a scale for each row a text does not depend on those beside it, nor
 * on how its prompt was cut.
 */
Test(processes_cuda, fp8_texts_and_scores_are_those_of_the_cpu)
{
    static const char *const recipes[] = {"tensorwise", "rowwise", "rowwise_with_gw_hp"};
    enum { MOST = 8, CHOICES = 4 };
    double gpu[MOST], cpu[MOST];
    make_model_to_use();
    for (size_t r = 0; r < sizeof recipes / sizeof *recipes; r++) {
        char options[128];
        snprintf(options, sizeof options, "--fp8-recipe %s --device cpu", recipes[r]);
        cr_assert_eq(read_scores(options, cpu, MOST), CHOICES, "%s", shell_output);
        snprintf(options, sizeof options, "--fp8-recipe %s --device cuda", recipes[r]);
        cr_assert_eq(read_scores(options, gpu, MOST), CHOICES, "%s", shell_output);
        for (int i = 0; i < CHOICES; i++) {
            cr_expect(fabs(gpu[i] - cpu[i]) <= fabs(cpu[i]) / 256,
                      "%s: log-likelihood %d is %.7f, on the CPU %.7f", recipes[r], i, gpu[i],
                      cpu[i]);
        }
    }
    shell(&dir, ND_HOSTCUDA "/ndtrain " TEXTS "--model made/model --precision fp8 --fp8-recipe "
                            "rowwise --device cuda --max-batch 3 >together.txt");
    shell(&dir, ND_HOSTCUDA "/ndtrain " TEXTS_IN "5 --model made/model --precision fp8 "
                            "--fp8-recipe rowwise --device cuda --max-batch 1 >alone.txt");
    shell(&dir, "test -s alone.txt && diff alone.txt together.txt");
    shell(&dir, ND_HOSTCUDA "/ndlaunch " TEXTS "--model made/checkpoint-3 --precision fp8 "
                            "--device cuda --num-processes 2 --tp-size 2 >split.txt && "
                            "test $(wc -l <split.txt) = 3");
}

Test(processes_cuda, a_generator_says_what_a_gpu_cannot_do)
{
    inputs_write_model(&dir, 128, 512, 4); /* libraries take 48 MiB, and it more than 2 */
    make_model_to_use();
    shell_ends(&dir, 71,
               "ND_DOUBLE_MEMORY=50 " ND_HOSTCUDA "/ndtrain " TEXTS
               "--model made/model --device cuda",
               "of 0.05 GiB are free", "--max-batch");
}
