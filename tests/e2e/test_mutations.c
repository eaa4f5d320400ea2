// SPDX-License-Identifier: Apache-2.0
/* Changed files that a user writes: configurations, models' sizes, data and tokenizers. */
#include <criterion/criterion.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/e2e/mutate.h"
#include "trainer/corpus/token_file.h"

TestSuite(mutations, .init = mutate_setup, .fini = mutate_teardown);

Test(mutations, native_yaml)
{
    mutate_write("c.yaml",
                 "# a comment\nmodel:\n  config: model.json\n  seed: 7\ndata:\n"
                 "  path: text.txt\n  validation_path: ''\n  shuffle_seed: 3\ntrain:\n"
                 "  steps: 3\n  sequence_length: 32\n  micro_batch_size: 2\n"
                 "  gradient_accumulation_steps: 1\n  precision: bf16\noptimizer:\n"
                 "  lr: 1e-3\n  betas: [0.9, 0.95]\n  schedule: cosine\n  warmup_steps: 1\n"
                 "mesh: {dp_shard: -1, tp: 1}\nlaunch:\n  device: cpu\n");
    mutate("c.yaml", "check --config-file c.yaml");
}

Test(mutations, accelerates_yaml)
{
    mutate_write("a.yaml",
                 "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\n"
                 "fsdp_config:\n  fsdp_reshard_after_forward: true\n  fsdp_version: 2\n"
                 "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 1\n"
                 "parallelism_config:\n  parallelism_config_dp_shard_size: 1\n"
                 "  parallelism_config_tp_size: 1\nrdzv_backend: static\nuse_cpu: true\n");
    mutate("a.yaml", "check --config-file a.yaml" MUTATE_INPUT MUTATE_TEXT);
}

Test(mutations, model_config)
{
    mutate("model.json", "check" MUTATE_INPUT MUTATE_TEXT);
}

Test(mutations, text)
{
    mutate("text.txt", MUTATE_TRAIN MUTATE_TEXT);
}

Test(mutations, jsonl)
{
    char rows[4096];
    size_t used = 0;
    for (int i = 0; i < 16; i++) {
        used +=
            (size_t)snprintf(rows + used, sizeof rows - used,
                             i % 3 ? "{\"text\": \"row %d of \\u00e9\\n some text\", \"n\": 1}\n"
                                   : "{\"prompt\": \"what is %d\", \"completion\": \"a number "
                                     "that is not\"}\n",
                             i);
    }
    tempdir_write(mutate_dir(), "rows.jsonl", rows, used);
    mutate("rows.jsonl", MUTATE_TRAIN " --data-path rows.jsonl --cache-dir cache");
}

Test(mutations, llmc)
{
    uint16_t words[512 + 400] = {0};
    const uint32_t header[3] = {20240520, 1, 400};
    memcpy(words, header, sizeof header);
    for (int i = 0; i < 400; i++) {
        words[512 + i] = (uint16_t)(i * 7 % 256);
    }
    tempdir_write(mutate_dir(), "tokens.bin", words, sizeof words);
    mutate("tokens.bin", MUTATE_TRAIN " --set data.path=tokens.bin --set data.format=llmc "
                                      "--set data.tokenizer=file");
}

static void write_megatron(void)
{
    uint8_t idx[34 + 8 + 16 + 24] = {0}, bin[800] = {0};
    const uint64_t one = 1, sequences = 2, documents = 3, pointers[2] = {0, 400},
                   ends[3] = {0, 1, 2};
    const int32_t lengths[2] = {200, 200};
    memcpy(idx, "MMIDIDX\0\0", 9);
    memcpy(idx + 9, &one, 8);
    idx[17] = 8; /* unsigned 16-bit tokens */
    memcpy(idx + 18, &sequences, 8);
    memcpy(idx + 26, &documents, 8);
    memcpy(idx + 34, lengths, sizeof lengths);
    memcpy(idx + 42, pointers, sizeof pointers);
    memcpy(idx + 58, ends, sizeof ends);
    tempdir_write(mutate_dir(), "corpus.idx", idx, sizeof idx);
    tempdir_write(mutate_dir(), "corpus.bin", bin, sizeof bin);
}

#define CORPUS                                                                                     \
    MUTATE_TRAIN " --set data.path=corpus --set data.format=megatron --set data.tokenizer=file"

Test(mutations, megatron_index)
{
    write_megatron();
    mutate("corpus.idx", CORPUS);
}

Test(mutations, megatron_tokens)
{
    write_megatron();
    mutate("corpus.bin", CORPUS);
}

Test(mutations, loss_mask)
{
    char bin[PATH_MAX];
    nd_u64s spans = {0};
    nd_bytes file = {0};
    write_megatron();
    snprintf(bin, sizeof bin, "%s", tempdir_file(mutate_dir(), "corpus.bin"));
    for (uint64_t at = 0; at < 400; at += 50) {
        cr_assert_eq(nd_u64s_add(&spans, at), ND_OK);
        cr_assert_eq(nd_u64s_add(&spans, at + 20), ND_OK);
    }
    cr_assert_eq(
        nd_loss_mask_make(&spans, bin, tempdir_file(mutate_dir(), "corpus.idx"), 400, &file),
        ND_OK);
    tempdir_write(mutate_dir(), "corpus.mask", file.data, file.count);
    free(spans.data);
    free(file.data);
    mutate("corpus.mask", CORPUS);
}

#define BYTE_LEVEL                                                                                 \
    "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, "              \
    "\"use_regex\": true}"
#define SPLIT                                                                                      \
    "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {\"Regex\": " \
    "\"(?<=\\\\p{Ll})(?=\\\\p{Lu})|[\\\\p{L}&&[^q\\\\x{71}]]+?|(?i:'s|k)|\\\\d{1,3}|(?>\\\\s+)(?!" \
    "\\\\S)\"}, "                                                                                  \
    "\"behavior\": \"Isolated\", \"invert\": false}, " BYTE_LEVEL "]}"

static void mutate_tokenizer(const char *pre_tokenizer)
{
    char text[2048];
    snprintf(text, sizeof text,
             "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \"added_tokens\": "
             "[{\"id\": 4, \"content\": \"<s>\", \"single_word\": false, \"lstrip\": false, "
             "\"rstrip\": false, \"normalized\": false, \"special\": true}], \"normalizer\": "
             "null, \"pre_tokenizer\": %s, \"post_processor\": null, "
             "\"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, "
             "\"trim_offsets\": true, \"use_regex\": true}, \"model\": {\"type\": \"BPE\", "
             "\"dropout\": null, \"unk_token\": null, \"continuing_subword_prefix\": null, "
             "\"end_of_word_suffix\": null, \"fuse_unk\": false, \"byte_fallback\": false, "
             "\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2, \"aba\": 3}, \"merges\": [\"a b\", "
             "\"ab a\"]}}",
             pre_tokenizer);
    mutate_write("tokenizer.json", text);
    mutate_write("letters.txt", "aBc  ab's 123\n\n");
    mutate("tokenizer.json", "tokenize --tokenizer tokenizer.json --input letters.txt --threads 1 "
                             "--drop-unknown --output-prefix pair --overwrite");
}

Test(mutations, tokenizer)
{
    mutate_tokenizer(BYTE_LEVEL);
}

Test(mutations, tokenizer_with_a_pattern)
{
    mutate_tokenizer(SPLIT);
}
