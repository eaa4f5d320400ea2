// SPDX-License-Identifier: Apache-2.0
/*
 * The saved model: it loads onto any mesh with the same bytes, and Hugging Face transformers computes the run's validation loss
 * from it (scripts/check_model.py: within 1e-5 in FP32, 1e-2 in BF16). The latter needs a Python with torch and
 * transformers, named by ND_PEER_PYTHON.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/shell.h"
#include "tests/support/skip.h"

static tempdir dir;

static void setup(void)
{
    static const char model[] =
        "{\"model_type\": \"llama\", \"vocab_size\": 256, \"hidden_size\": 64, "
        "\"intermediate_size\": 144, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, "
        "\"num_key_value_heads\": 2, \"max_position_embeddings\": 8192, \"rope_theta\": 10000.0, "
        "\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0, "
        "\"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 64}}";
    static char text[20000];
    tempdir_make(&dir);
    for (size_t i = 0; i < sizeof text; i++) {
        text[i] = (char)('a' + (i * i / 3 + i / 7) % 26);
    }
    tempdir_write(&dir, "text.txt", text, sizeof text);
    tempdir_write(&dir, "valid.txt", text, 1299); /* blocks of 65: the last one is short */
    tempdir_write(&dir, "model.json", model, strlen(model));
}

static void teardown(void)
{
    shell_remove(&dir);
}

TestSuite(saved_model, .init = setup, .fini = teardown, .timeout = 240);

/* Trains into folder `out`; `flags` give at least the mesh and the length. */
static void train(const char *out, const char *precision, const char *flags)
{
    char command[2048];
    snprintf(command, sizeof command,
             ND_LAUNCH " --device cpu --set model.config=model.json --set data.path=text.txt "
                       "--precision %s --set output.dtype=%s --set optimizer.schedule=constant "
                       "--set output.save_model=true --set output.dir=%s %s",
             precision, precision, out, flags);
    shell(&dir, command);
}

static void check(const char *python, const char *precision)
{
    char command[1024];
    train(precision, precision,
          "--num-processes 4 --dp-shard-size 2 --tp-size 2 --sequence-length 64 --num-steps 20 "
          "--set data.validation_path=valid.txt");
    snprintf(command, sizeof command, "'%s' " ND_CHECK_MODEL " %s", python, precision);
    shell(&dir, command);
    cr_assert_not_null(strstr(shell_output, "in transformers: relative difference"), "%s",
                       shell_output);
}

Test(saved_model, has_the_same_validation_loss_in_transformers)
{
    const char *python = getenv("ND_PEER_PYTHON");
    if (!python) {
        skip_test("ND_PEER_PYTHON names no Python with torch and transformers");
    }
    check(python, "fp32");
    check(python, "bf16");
}

/* Saved again after a step of size 0, it has the same bytes. */
Test(saved_model, loads_onto_any_mesh)
{
    static const char *const meshes[] = {
        "--num-processes 1 --dp-shard-size 1",
        "--num-processes 4 --dp-shard-size 2 --tp-size 2",
        "--num-processes 8 --dp-shard-size 2 --cp-size 2 --tp-size 2",
    };
    train("one", "fp32", "--num-processes 2 --dp-shard-size 2 --sequence-length 64 --num-steps 5");
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        char command[2048];
        snprintf(command, sizeof command,
                 ND_LAUNCH
                 " --device cpu --model-path one/model --set data.path=text.txt "
                 "--sequence-length 64 --num-steps 1 --precision fp32 --set optimizer.name=sgd "
                 "--set optimizer.lr=1e-300 --set optimizer.min_lr=0 --set output.dtype=fp32 "
                 "--set output.dir=again %s && "
                 "cmp one/model/model.safetensors again/model/model.safetensors && rm -r again",
                 meshes[i]);
        shell(&dir, command);
    }
}
