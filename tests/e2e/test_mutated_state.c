// SPDX-License-Identifier: Apache-2.0
/* Changed files that the programs write: models, checkpoints, caches of tokens, records of runs. */
#include <criterion/criterion.h>
#include <glob.h>
#include <jansson.h>
#include <stdint.h>
#include <string.h>
#include <zlib.h>
#include <zstd.h>

#include "tests/e2e/mutate.h"
#include "tests/support/shell.h"

TestSuite(mutated_state, .init = mutate_setup, .fini = mutate_teardown);

#define SAVING                                                                                     \
    "train" MUTATE_INPUT MUTATE_TEXT                                                               \
    " --num-steps 1 --set output.dir=first --set output.save_model=true"
#define LOADING                                                                                    \
    "train --sequence-length 32 --device cpu --precision fp32 --set launch.threads_per_worker=1 "  \
    "--set data.validation_path= --log-level error --num-steps 1 --set output.dir=out "            \
    "--set output.save_model=false --set model.path=first/model" MUTATE_TEXT

Test(mutated_state, safetensors)
{
    mutate_run(SAVING);
    mutate("first/model/model.safetensors", LOADING " --set model.verify=false");
}

Test(mutated_state, checksums)
{
    mutate_run(SAVING);
    mutate("first/model/SHA256SUMS", LOADING);
}

/* The index of a model in several files, here of one. */
static void write_index(void)
{
    static mutate_file weights;
    uint64_t bytes;
    const char *name;
    json_t *tensor, *map = json_object();
    mutate_read("first/model/model.safetensors", &weights);
    memcpy(&bytes, weights.bytes, 8);
    json_t *header = json_loadb(weights.bytes + 8, bytes, 0, NULL);
    cr_assert(header && map);
    json_object_foreach(header, name, tensor)
    {
        if (strcmp(name, "__metadata__") != 0) {
            json_object_set_new(map, name, json_string("model-00001-of-00001.safetensors"));
        }
    }
    json_t *index = json_pack("{s:{s:i},s:o}", "metadata", "total_size", 0, "weight_map", map);
    cr_assert_eq(json_dump_file(
                     index, tempdir_file(mutate_dir(), "first/model/model.safetensors.index.json"),
                     JSON_INDENT(1)),
                 0);
    json_decref(index);
    json_decref(header);
}

Test(mutated_state, index_of_several_files)
{
    mutate_run(SAVING);
    write_index();
    shell(mutate_dir(), "cd first/model && mv model.safetensors model-00001-of-00001.safetensors");
    mutate("first/model/model.safetensors.index.json", LOADING " --set model.verify=false");
}

#define CHECKPOINTING                                                                              \
    "train" MUTATE_INPUT MUTATE_TEXT                                                               \
    " --num-steps 2 --set output.dir=first --set output.save_model=false "                         \
    "--checkpoint-frequency 1"

/* Resumed from a folder that is named, so that it is not set aside. */
Test(mutated_state, resumed_manifest)
{
    mutate_run(CHECKPOINTING);
    mutate("first/checkpoint-1/manifest.json",
           MUTATE_TRAIN MUTATE_TEXT " --resume-from-checkpoint first/checkpoint-1");
}

static char found[PATH_MAX];

/* The one file of the pattern, relative to the folder. */
static const char *find(const char *pattern)
{
    glob_t files;
    cr_assert_eq(glob(tempdir_file(mutate_dir(), pattern), 0, NULL, &files), 0, "%s", pattern);
    cr_assert_eq(files.gl_pathc, 1, "%s", pattern);
    snprintf(found, sizeof found, "%s", files.gl_pathv[0] + strlen(mutate_dir()->path) + 1);
    globfree(&files);
    return found;
}

static void damage_of_a_checkpoint(const char *pattern)
{
    mutate_run(CHECKPOINTING);
    mutate_saying(find(pattern), "ckpt verify first/checkpoint-1", "first/checkpoint-1: bad: ");
}

Test(mutated_state, manifest)
{
    damage_of_a_checkpoint("first/checkpoint-1/manifest.json");
}

Test(mutated_state, shard)
{
    damage_of_a_checkpoint("first/checkpoint-1/state/*.safetensors");
}

Test(mutated_state, hashes)
{
    damage_of_a_checkpoint("first/checkpoint-1/state/*.hashes");
}

/* A tokenizer with the control tokens of chatml, a model for it, and rows. */
static void write_texts(void)
{
    static const char *const controls[] = {"<|im_start|>", "<|im_end|>"};
    json_t *file =
        json_load_file(ND_SOURCE "/tests/unit/trainer/text/goldens/llama3.json", 0, NULL);
    cr_assert_not_null(file);
    json_object_del(file, "post_processor");
    for (size_t i = 0; i < 2; i++) {
        json_t *token = json_array_get(json_object_get(file, "added_tokens"), i);
        cr_assert_eq(json_object_set_new(token, "content", json_string(controls[i])), 0);
    }
    shell(mutate_dir(),
          "mkdir tok && sed -i 's/\"vocab_size\": 256/\"vocab_size\": 512/' model.json");
    cr_assert_eq(json_dump_file(file, tempdir_file(mutate_dir(), "tok/tokenizer.json"), 0), 0);
    json_decref(file);
    mutate_write("tok/tokenizer_config.json", "{\"eos_token\": \"<|im_end|>\"}");
    FILE *rows = fopen(tempdir_file(mutate_dir(), "rows.jsonl"), "we");
    FILE *chat = fopen(tempdir_file(mutate_dir(), "chat.jsonl"), "we");
    cr_assert(rows && chat);
    for (int i = 0; i < 12; i++) {
        fprintf(rows, "{\"text\": \"row %d of a text, \\u00e9, it's the %dth\\n\"}\n", i, i * i);
        fprintf(chat,
                "{\"messages\": [{\"role\": \"user\", \"content\": \"what is %d?\"}, {\"role\": "
                "\"assistant\", \"content\": \"it's a number\\n\"}]}\n",
                i);
    }
    cr_assert_eq(fclose(rows), 0);
    cr_assert_eq(fclose(chat), 0);
}

#define ENCODING                                                                                   \
    "train" MUTATE_INPUT " --num-steps 1 --set output.save_model=false --tokenizer tok "

Test(mutated_state, chat_rows)
{
    write_texts();
    mutate("chat.jsonl", ENCODING "--data-path chat.jsonl --chat-format chatml "
                                  "--cache-dir out/cache --set output.dir=out/out");
}

Test(mutated_state, token_cache)
{
    write_texts();
    mutate_run(ENCODING "--data-path rows.jsonl --cache-dir cache --set output.dir=first");
    mutate(find("cache/*.tokens"), ENCODING "--data-path rows.jsonl --cache-dir cache "
                                            "--set output.dir=out");
}

#define TOKENIZING "tokenize --tokenizer tok --threads 1 --output-prefix pair --overwrite --input "

Test(mutated_state, gzip)
{
    mutate_file *text = calloc(1, sizeof *text);
    write_texts();
    mutate_read("rows.jsonl", text);
    gzFile out = gzopen(tempdir_file(mutate_dir(), "rows.jsonl.gz"), "wb");
    cr_assert(out && gzwrite(out, text->bytes, (unsigned)text->size) == (int)text->size);
    cr_assert_eq(gzclose(out), Z_OK);
    free(text);
    mutate("rows.jsonl.gz", TOKENIZING "rows.jsonl.gz");
}

Test(mutated_state, zstd)
{
    mutate_file *text = calloc(2, sizeof *text);
    write_texts();
    mutate_read("rows.jsonl", text);
    size_t size = ZSTD_compress(text[1].bytes, sizeof text[1].bytes, text->bytes, text->size, 3);
    cr_assert(!ZSTD_isError(size));
    tempdir_write(mutate_dir(), "rows.jsonl.zst", text[1].bytes, size);
    free(text);
    mutate("rows.jsonl.zst", TOKENIZING "rows.jsonl.zst");
}

/* Files that generate, eval and report read. */

#define USING(command)                                                                             \
    command " --model first/model --log-level error --precision fp32 --threads-per-worker 1 "      \
            "--model-verify false "

Test(mutated_state, prompts)
{
    static const char rows[] =
        "{\"prompt\": \"ab cd\", \"id\": [7], \"max_new_tokens\": 3}\n"
        "{\"ids\": [101, 102, 0], \"id\": \"a\"}\n\n{\"prompt\": \"\\u00e9 x\"}\n";
    mutate_run(SAVING);
    mutate_write("prompts.jsonl", rows);
    mutate("prompts.jsonl", USING("generate") "--prompt-file prompts.jsonl "
                                              "--max-new-tokens 4");
}

Test(mutated_state, requests)
{
    static const char rows[] =
        "{\"context\": \"ab cd \", \"choices\": [\"ef\", \"xyzzy\"], \"gold\": 1, \"id\": 5}\n"
        "{\"context\": \"a\", \"delimiter\": \" \", \"choices\": [\"b c\", \"\\u00e9\"], "
        "\"gold\": 0}\n";
    mutate_run(SAVING);
    mutate_write("requests.jsonl", rows);
    mutate("requests.jsonl", USING("eval") "--requests requests.jsonl --jsonl");
}

Test(mutated_state, generation_config)
{
    static const char text[] =
        "{\"bos_token_id\": 1, \"eos_token_id\": [2, 200], \"temperature\": 0.6, \"top_p\": 0.9}";
    mutate_run(SAVING);
    mutate_write("first/model/generation_config.json", text);
    mutate("first/model/generation_config.json",
           USING("generate") "--prompt ab --max-new-tokens 3");
}

Test(mutated_state, tokenizer_of_a_model)
{
    mutate_run(SAVING);
    mutate("first/model/tokenizer.json", USING("generate") "--prompt ab --max-new-tokens 3");
}

static void report_of(const char *file)
{
    mutate_run(SAVING " --set log.interval=1");
    mutate(file, "report first -o report.html");
}

Test(mutated_state, record_of_a_run)
{
    report_of("first/run.json");
}

Test(mutated_state, metrics_of_a_run)
{
    report_of("first/metrics.jsonl");
}
