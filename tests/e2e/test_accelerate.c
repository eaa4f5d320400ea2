// SPDX-License-Identifier: Apache-2.0
/* accelerate's own configuration files, as they are, through --config-file: three steps of a tiny
 * model. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/shell.h"

static tempdir dir;

static void setup(void)
{
    static const char model[] =
        "{\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": 32, "
        "\"intermediate_size\": 72, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, "
        "\"num_key_value_heads\": 2, \"max_position_embeddings\": 128}";
    char text[8000];
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

TestSuite(accelerate, .init = setup, .fini = teardown, .timeout = 120);

/* The file says workers, mesh, precision and recompute; flags say model, data and length, which it
 * has no keys for. */
static void trains(const char *file, const char *mesh, const char *recompute)
{
    char command[2048];
    snprintf(command, sizeof command,
             ND_LAUNCH " --config-file " ND_FIXTURES "/%s --device cpu --model-config model.json "
                       "--data-path text.txt --sequence-length 64 --num-steps 3 "
                       "--save-dir out --save-model=false",
             file);
    shell(&dir, command);
    cr_assert_not_null(strstr(shell_output, mesh), "no \"%s\" in:\n%s", mesh, shell_output);
    shell(&dir, "grep -c '\"loss\":[0-9]' out/metrics.jsonl");
    cr_assert_str_eq(shell_output, "3\n");
    shell(&dir, "tr -d ' \\n' <out/run.json");
    cr_assert_not_null(strstr(shell_output, recompute), "no %s in:\n%s", recompute, shell_output);
    cr_assert_not_null(strstr(shell_output, "\"train.precision\":\"bf16\""), "%s", shell_output);
}

Test(accelerate, tp_hsdp_yaml)
{
    trains("accelerate_tp_hsdp.yaml", "8 workers, mesh 2 x 2 x 1 x 2",
           "\"parallel.recompute\":\"none\"");
}

Test(accelerate, cp_yaml)
{
    trains("accelerate_cp.yaml", "8 workers, mesh 1 x 1 x 8 x 1",
           "\"parallel.recompute\":\"full\"");
}
