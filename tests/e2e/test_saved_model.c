// SPDX-License-Identifier: Apache-2.0
/*
 * The saved model: it loads onto any mesh with the same bytes, and Hugging Face transformers
 * computes the run's validation loss from it (scripts/check_model.py: within 1e-5 in FP32, 1e-2 in
 * BF16). The latter needs a Python with torch and transformers, named by ND_PEER_PYTHON.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/inputs.h"
#include "tests/support/peer.h"
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
    const char *text = inputs_write_text(&dir, INPUTS_TEXT_MAX);
    tempdir_write(&dir, "valid.txt", text, 1299); /* blocks of 65: the last one is short */
    tempdir_write(&dir, "model.json", model, strlen(model));
}

TEMPDIR_SUITE(saved_model, setup, .timeout = 240);

/* Trains into folder `out`; `flags` give at least the mesh and the length. */
static void train(const char *out, const char *precision, const char *flags)
{
    shell(&dir, shell_line(ND_LAUNCH
                           " --device cpu --set model.config=model.json --set data.path=text.txt "
                           "--precision %s --set output.dtype=%s --set optimizer.schedule=constant "
                           "--set output.save_model=true --set output.dir=%s %s",
                           precision, precision, out, flags));
}

/* JSON lines, whose tokens are in a cache, with prompts, which do not count. */
static void write_rows(void)
{
    FILE *f = fopen(tempdir_file(&dir, "valid.jsonl"), "w");
    cr_assert_not_null(f);
    for (int i = 0; i < 40; i++) {
        fprintf(f, "{\"prompt\": \"%d and %d\", \"completion\": \" make %d\"}\n", i, i, 2 * i);
    }
    fclose(f);
}

static void check(const char *python, const char *precision, const char *validation)
{
    char flags[256];
    snprintf(flags, sizeof flags,
             "--num-processes 4 --dp-shard-size 2 --tp-size 2 --sequence-length 64 --num-steps 20 "
             "--set data.validation_path=%s",
             validation);
    train(precision, precision, flags);
    shell(&dir, shell_line("'%s' " ND_CHECK_MODEL " %s && rm -r %s", python, precision, precision));
    says("in transformers: relative difference");
}

Test(saved_model, check_model_finds_the_labels_of_the_run)
{
    static const char *const validations[] = {"valid.txt", "valid.jsonl"};
    write_rows();
    for (int i = 0; i < 2; i++) {
        char flags[128];
        snprintf(flags, sizeof flags,
                 "--num-processes 1 --sequence-length 64 --num-steps 1 "
                 "--set data.validation_path=%s",
                 validations[i]);
        train("labels", "fp32", flags);
        shell(&dir,
              shell_line(
                  "cd $(dirname " ND_CHECK_MODEL ") && python3 -c \"import check_model as c, os, "
                  "pathlib; os.chdir('%s'); config, row, cache = c.settings_and_validation("
                  "pathlib.Path('labels')); print('labels', sum(l != c.IGNORED for _, labels in "
                  "c.pairs_of(config, cache) for l in labels) - row['validation_tokens'])\" && "
                  "rm -r %s/labels",
                  dir.path, dir.path));
        says("labels 0\n");
    }
}

Test(saved_model, has_the_same_validation_loss_in_transformers)
{
    const char *python = peer_python("torch transformers");
    if (!python) {
        tempdir_remove(&dir);
        skip_test("ND_PEER_PYTHON names no Python with torch and transformers");
    }
    write_rows();
    check(python, "fp32", "valid.txt");
    check(python, "fp32", "valid.jsonl");
    check(python, "bf16", "valid.txt");
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
        shell(&dir,
              shell_line(
                  ND_LAUNCH
                  " --device cpu --model-path one/model --set data.path=text.txt "
                  "--sequence-length 64 --num-steps 1 --precision fp32 --set optimizer.name=sgd "
                  "--set optimizer.lr=1e-300 --set optimizer.min_lr=0 --set output.dtype=fp32 "
                  "--set output.dir=again %s && "
                  "cmp one/model/model.safetensors again/model/model.safetensors && rm -r again",
                  meshes[i]));
    }
}

/* A model with a tokenizer of its own: ids below 300, so the byte tokenizer is not written. */
Test(saved_model, takes_along_the_tokenizer_of_the_model_it_goes_on_from)
{
    static const char *const names[] = {"tokenizer.json",
                                        "tokenizer_config.json",
                                        "special_tokens_map.json",
                                        "tokenizer.model",
                                        "vocab.json",
                                        "merges.txt",
                                        "added_tokens.json",
                                        "chat_template.jinja",
                                        "chat_template.json",
                                        "generation_config.json"};
    const size_t count = sizeof names / sizeof *names;
    uint32_t words[256 + 4096] = {20240801, 7, 4096};
    for (uint32_t i = 0; i < 4096; i++) {
        words[256 + i] = i * i / 3 % 300;
    }
    tempdir_write(&dir, "tokens.bin", words, sizeof words);
    shell(&dir, "sed -i 's/: 256,/: 300,/' model.json");
#define TOKENS                                                                                     \
    ND_LAUNCH " --device cpu --set data.path=tokens.bin --set data.tokenizer=file "                \
              "--sequence-length 64 --num-steps 1 "
    shell(&dir, TOKENS "--model-config model.json --set output.dir=one && test ! -e "
                       "one/model/tokenizer.json");
    for (size_t i = 0; i < count; i++) {
        char path[128];
        snprintf(path, sizeof path, "one/model/%s", names[i]);
        tempdir_write(&dir, path, names[i], strlen(names[i]));
    }
    shell(&dir, "mkdir blobs && mv one/model/vocab.json blobs/ && ln -s ../../blobs/vocab.json "
                "one/model/vocab.json; chmod a-w one/model/*");
    shell(&dir, TOKENS "--model-path one/model --set output.dir=two --checkpoint-frequency 1 "
                       "--checkpoint-export-model true");
    for (size_t i = 0; i < count; i++) {
        shell(&dir, shell_line("for to in model checkpoint-1; do test ! -L two/$to/%s && "
                               "cmp one/model/%s two/$to/%s || exit 1; done",
                               names[i], names[i], names[i]));
    }
}

/* With the byte tokenizer only what is not the tokenizer's. */
Test(saved_model, has_the_byte_tokenizer_where_the_data_are_bytes)
{
    train("one", "bf16", "--sequence-length 64 --num-steps 1");
    shell(&dir, "cd one/model && cp tokenizer.json ../good.json && echo other >tokenizer.json && "
                "echo other >merges.txt && echo other >generation_config.json && rm SHA256SUMS");
    shell(&dir,
          ND_LAUNCH " --device cpu --model-path one/model --data-path text.txt "
                    "--sequence-length 64 --num-steps 1 --set output.dir=two && "
                    "cmp one/good.json two/model/tokenizer.json && "
                    "cmp one/model/generation_config.json two/model/generation_config.json && "
                    "test ! -e two/model/merges.txt");
    /* Ids of a file may be those of any tokenizer. */
    shell(&dir,
          ND_TRAIN " tokenize --tokenizer bytes --input text.txt --output-prefix ids && " ND_LAUNCH
                   " --device cpu --model-config model.json --data-path ids --tokenizer file "
                   "--sequence-length 64 --num-steps 1 --checkpoint-frequency 1 "
                   "--checkpoint-export-model true --set output.dir=of-ids && "
                   "! ls of-ids/*/tokenizer.json && ls of-ids/*/config.json");
}

/* A bit of the weights flips after they were saved: a run that goes on from them says so. */
Test(saved_model, is_verified_by_its_checksums)
{
#define GO_ON                                                                                      \
    ND_LAUNCH " --device cpu --model-path one/model --set data.path=text.txt --num-steps 1 "       \
              "--sequence-length 64 --set output.save_model=false --set output.dir=again "
    train("one", "fp32", "--num-processes 2 --dp-shard-size 2 --sequence-length 64 --num-steps 1");
    shell(&dir, "cd one/model && sha256sum --check --strict --quiet SHA256SUMS");
    shell(&dir, GO_ON "&& rm -r again");
    says("model: 4 files match SHA256SUMS of one/model");
    FILE *f = fopen(tempdir_file(&dir, "one/model/model.safetensors"), "r+b");
    cr_assert_not_null(f);
    cr_assert_eq(fseek(f, -1000, SEEK_END), 0);
    int byte = fgetc(f);
    cr_assert_eq(fseek(f, -1000, SEEK_END), 0);
    cr_assert_eq(fputc(byte ^ 1, f), byte ^ 1);
    cr_assert_eq(fclose(f), 0);
    shell_ends(&dir, 65, GO_ON, "model.safetensors\" is not the file that SHA256SUMS");
    shell_ends(&dir, 65,
               "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 "
               "MASTER_ADDR=127.0.0.1 MASTER_PORT=1 " ND_TRAIN
               " train --device cpu --model-path one/model --num-steps 1 "
               "--set data.path=text.txt --sequence-length 64");
    shell(&dir, GO_ON "--set model.verify=false && rm -r again");
    says_not("SHA256SUMS");
    shell(&dir, "rm one/model/SHA256SUMS && " GO_ON);
    says("one/model has no SHA256SUMS");
}
