// SPDX-License-Identifier: Apache-2.0
/*
 * The programs as a user runs them, with device cuda over the doubles: eight processes under
 * ndlaunch, a saved model, and what is said when GPUs are missing. ND_HOSTCUDA is the folder of the
 * programs.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "tests/support/shell.h"

static tempdir dir;

static void setup(void)
{
    static const char model[] =
        "{\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": 64, "
        "\"intermediate_size\": 96, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, "
        "\"num_key_value_heads\": 2, \"max_position_embeddings\": 128}";
    static char text[20000];
    tempdir_make(&dir);
    for (size_t i = 0; i < sizeof text; i++) {
        text[i] = (char)('a' + (i * i / 3 + i / 7) % 26);
    }
    tempdir_write(&dir, "text.txt", text, sizeof text);
    tempdir_write(&dir, "model.json", model, strlen(model));
}

static void teardown(void)
{
    shell_remove(&dir);
}

TestSuite(processes_cuda, .init = setup, .fini = teardown, .timeout = 240);

#define RUN                                                                                        \
    ND_HOSTCUDA "/ndlaunch --set model.config=model.json --set data.path=text.txt "                \
                "--set data.tokenizer=bytes --sequence-length 64 --num-steps 3 "

static int run(const char *options, const char *out)
{
    char command[1024];
    snprintf(command, sizeof command, RUN "%s --set output.dir=%s", options, out);
    return shell_run(&dir, command);
}

/* Loss of the last step of a run's metrics. */
static double last_loss(const char *out)
{
    char command[256];
    snprintf(
        command, sizeof command,
        "grep '\"loss\"' %s/metrics.jsonl | tail -n 1 | sed 's/.*\"loss\":\\([0-9.]*\\).*/\\1/'",
        out);
    shell(&dir, command);
    return strtod(shell_output, NULL);
}

Test(processes_cuda, eight_processes_train_as_one_worker_on_the_cpu)
{
    int code =
        run("--device cpu --workers 1 --gradient-accumulation-steps 4 --precision bf16", "cpu");
    cr_assert_eq(code, 0, "%s", shell_output);
    code = run("--device cuda --workers 8 --dp-replicate-size 2 --dp-shard-size 2 --tp-size 2 "
               "--precision bf16",
               "gpu");
    cr_assert_eq(code, 0, "%s", shell_output);
    double cpu = last_loss("cpu"), gpu = last_loss("gpu");
    cr_expect(cpu > 1.0 && fabs(gpu - cpu) < cpu / 256.0, "loss %.6f on GPUs, %.6f on the CPU", gpu,
              cpu);
    shell(&dir,
          "test -s gpu/model/model.safetensors && grep -q '\"transport\": \"nccl\"' gpu/run.json");
}

Test(processes_cuda, fewer_gpus_than_workers_are_said_before_the_start)
{
    int code = run("--device cuda --workers 9 --dp-shard-size 9", "none");
    cr_expect_eq(code, 2, "%d: %s", code, shell_output);
    cr_expect(strstr(shell_output, "9 workers") && strstr(shell_output, "8 are visible"), "%s",
              shell_output);
}

Test(processes_cuda, a_plan_that_does_not_fit_says_what_is_free)
{
    int code = run("--device cuda --workers 1", "none; true"); /* the default memory suffices */
    cr_assert_eq(code, 0, "%s", shell_output);
    code =
        shell_run(&dir, "ND_DOUBLE_MEMORY=50 " RUN "--device cuda --workers 1 --set output.dir=x");
    cr_expect_eq(code, 71, "%d: %s", code, shell_output);
    cr_expect(strstr(shell_output, "of 0.05 GiB are free"), "%s", shell_output);
}
