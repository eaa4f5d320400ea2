// SPDX-License-Identifier: Apache-2.0
/*
 * `ndtrain generate` and `ndtrain eval` as a user runs them: the same text from wherever a model
 * is kept, in any batch and on any mesh; the loss of the run's own validation; and, with a Python
 * with torch and transformers in ND_PEER_PYTHON, the ids and scores of transformers.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "tests/support/inputs.h"
#include "tests/support/patience.h"
#include "tests/support/peer.h"
#include "tests/support/port.h"
#include "tests/support/shell.h"
#include "tests/support/skip.h"

static tempdir dir;

static void setup(void)
{
    const char *text = inputs_write_text(&dir, INPUTS_TEXT_MAX);
    tempdir_write(&dir, "valid.txt", text, 1299); /* blocks of 65: the last one is short */
    inputs_write_model(&dir, 64, 144, 2);
}

TEMPDIR_SUITE(generate, setup, .timeout = 240);

#define TRAIN                                                                                      \
    ND_LAUNCH                                                                                      \
    " --device cpu --data-path text.txt --validation-path valid.txt --precision fp32 "             \
    "--sequence-length 64 --lr 1e-2 --set output.dtype=fp32 --set output.save_model=true "
#define GENERATE ND_TRAIN " generate --precision fp32 --threads-per-worker 2 "
#define EVAL     ND_TRAIN " eval --precision fp32 --threads-per-worker 2 "

static void train(void)
{
    shell(&dir, TRAIN "--model-config model.json --num-steps 8 --checkpoint-interval 4 "
                      "--output-dir run");
}

Test(generate, has_the_same_text_from_wherever_a_model_is_kept)
{
    train();
    shell(&dir, GENERATE "--model run/model --prompt 'ab cd' --max-new-tokens 40 2>log >a && "
                         "test $(wc -c <a) -gt 20 && grep -q ' new tokens, ' log");
    shell(&dir, GENERATE "--model run --prompt 'ab cd' --max-new-tokens 40 2>log | cmp - a");
    shell(&dir, GENERATE "--model run/checkpoint-8/ --prompt 'ab cd' --max-new-tokens 40 2>log | "
                         "cmp - a");
    shell(&dir, "mv run/model kept && " GENERATE
                "--model run --prompt 'ab cd' --max-new-tokens 40 2>log | cmp - a");
    shell(&dir, "echo 'ab cd' >prompt && " GENERATE
                "--model kept --prompt-file prompt --max-new-tokens=40 2>log | cmp - a");
    shell(&dir, "printf 'ab cd\\r\\n' >prompt && " GENERATE
                "--model kept --prompt-file prompt --max-new-tokens=40 2>log | cmp - a");
    shell(&dir, "echo 'ab cd' | " GENERATE "--model kept --max_new_tokens 40 2>log | cmp - a");
    shell(&dir, "echo '{\"prompt\": \"ab cd\", \"id\": [7]}' | " GENERATE
                "--model kept --jsonl --max-new-tokens 40 2>log");
    says("{\"index\":0,\"id\":[7],\"text\":\"",
         "\"finish\":\"length\",\"prompt_tokens\":5,\"new_tokens\":40,\"ids\":[");
    shell(&dir, GENERATE "--model kept --jsonl --prompt 'ab cd' --max-new-tokens 40 2>log");
    says("\"finish\":\"length\",\"prompt_tokens\":5,\"new_tokens\":40,\"ids\":[");
}

/* The text of the weights in training is that of the model that is saved then, on any mesh, and the
 * run does not know of it: its losses and its weights keep their bits. */
Test(generate, samples_of_a_run_are_texts_of_its_model)
{
    static const char *const meshes[] = {
        "--num-processes 1 --micro-batch-size 2",
        "--num-processes 4 --dp-shard-size 2 --tp-size 2",
        "--num-processes 4 --dp-replicate-size 2 --cp-size 2",
    };
    static const char all[] = "--model-config model.json --num-steps 40 --eval-steps 20";
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        shell(&dir,
              shell_line(
                  "rm -rf run plain; " TRAIN "%s %s --output-dir run --sample-tokens 12 "
                  "--sample-prompt 'ab cd\\n\"e\\nfgh ij kl' && " TRAIN "%s %s "
                  "--output-dir plain && cmp run/model/model.safetensors "
                  "plain/model/model.safetensors && grep -c '\"event\":\"sample\",\"step\":20,' "
                  "run/metrics.jsonl | grep -qx 3",
                  all, meshes[i], all, meshes[i]));
        says("sample after step 40: \"ab cd\" goes on \"");
        shell(&dir, "sed -n 's/\"step_ms\".*//;s/\"wire_bytes\".*//;/\"loss\"/p' run/metrics.jsonl "
                    ">a; sed -n 's/\"step_ms\".*//;s/\"wire_bytes\".*//;/\"loss\"/p' "
                    "plain/metrics.jsonl | cmp - a && test $(wc -l <a) -eq 40");
        shell(&dir, "for p in 'ab cd' '\"e' 'fgh ij kl'; do printf '{\"prompt\": \"%s\"}\\n' "
                    "\"$(echo \"$p\" | sed 's/\"/\\\\\"/')\"; done >rows; " GENERATE
                    "--model run/model --prompt-file rows --jsonl --max-new-tokens 12 2>log | "
                    "sed 's/.*\"text\":\\(\".*\"\\),\"finish.*/\\1/' >texts; "
                    "sed -n 's/.*\"sample\",\"step\":40,.*\"text\":\\(.*\\)}/\\1/p' "
                    "run/metrics.jsonl | diff - texts && test $(wc -l <texts) -eq 3");
    }
    shell(&dir, ND_TRAIN
          " report run && grep -q '\"step\":40,\"prompt\":\"ab cd\",\"text\":' run/report.html");
    shell_ends(&dir, 2,
               TRAIN "--model-config model.json --sample-prompt x "
                     "--set data.validation_path=",
               "give --validation-path");
    shell_ends(
        &dir, 65,
        TRAIN "--model-config model.json --sample-prompt "
              "$(printf '%070d' 0)",
        "train.sequence_length is 64, which leaves no room for a new one; shorten the prompt (");
}

/* The model names no end of text, but the one that is saved has that of the tokenizer. */
Test(generate, samples_end_where_the_saved_model_does)
{
    static const char tokenizer[] =
        "{\"version\":\"1.0\",\"added_tokens\":[{\"id\":2,\"content\":\"<|endoftext|>\","
        "\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,"
        "\"special\":true}],\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
        "\"trim_offsets\":true,\"use_regex\":true},\"decoder\":{\"type\":\"ByteLevel\","
        "\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":true},\"model\":{\"type\":"
        "\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[]}}";
    tempdir_write(&dir, "tokenizer.json", tokenizer, sizeof tokenizer - 1);
    shell(&dir,
          "for i in $(seq 300); do echo '{\"text\":\"ab\"}'; done >ab.jsonl && "
          "sed '0,/{/s//{\"eos_token_id\": null,/' model.json >endless.json && " ND_LAUNCH
          " --device cpu --data-path ab.jsonl --validation-path ab.jsonl --precision fp32 "
          "--sequence-length 64 --lr 1e-2 --model-config endless.json --num-steps 20 "
          "--tokenizer tokenizer.json --sample-prompt a --sample-tokens 8 --save-model false");
    says("sample after step 20: \"a\" goes on \"b\"\n");
}

/* Two ranks as torchrun starts them. */
#define RANKS                                                                                      \
    "for r in 1 0; do RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 "                      \
    "MASTER_ADDR=127.0.0.1 MASTER_PORT=%d " GENERATE "--model run/model --prompt-file "            \
    "rows.jsonl --num-processes 2 --threads-per-worker 1 %s >out$r 2>log$r & "                     \
    "pids=\"$pids $!\"; done; for p in $pids; do wait $p || { cat log0 log1; exit 1; }; done; "    \
    "test ! -s out1 && cmp out0 expected"

static void write_rows(int count)
{
    char rows[8192];
    int n = 0;
    for (int i = 0; i < count; i++) {
        n += snprintf(rows + n, sizeof rows - (size_t)n, "{\"ids\": [%d", i % 256);
        for (int k = 0; k < i % 13; k++) {
            n += snprintf(rows + n, sizeof rows - (size_t)n, ", %d", 'a' + (i * 7 + k * k) % 26);
        }
        n += snprintf(rows + n, sizeof rows - (size_t)n, "]}\n");
    }
    tempdir_write(&dir, "rows.jsonl", rows, (size_t)n);
}

/* Greedily and drawn: one worker and ranks that share a tensor, each with batches that hold one
 * text, some, and nearly all; replicas of such ranks; and ranks that torchrun starts. */
static void assert_same_everywhere(const char *sampling)
{
    static const char *const batches[] = {"--max-batch 1", "--max-batch 7 --prefill-chunk 9",
                                          "--max-batch 32 --prefill-chunk 100"};
    char both[256];
    shell(&dir,
          shell_line(GENERATE "--model run/model --prompt-file rows.jsonl --max-new-tokens 16 %s "
                              "2>log >expected && test $(wc -l <expected) -eq 40",
                     sampling));
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        shell(&dir,
              shell_line(GENERATE
                         "--model run/model --prompt-file rows.jsonl --max-new-tokens 16 %s %s "
                         "2>log | cmp - expected",
                         sampling, batches[i]));
        for (int tp = 2; tp <= 4; tp *= 2) {
            shell(&dir, shell_line(ND_LAUNCH
                                   " generate --precision fp32 --model run/model --prompt-file "
                                   "rows.jsonl --max-new-tokens 16 --num-processes %d --tp-size %d "
                                   "--threads-per-worker 1 %s %s 2>log | cmp - expected",
                                   tp, tp, sampling, batches[i]));
        }
    }
    shell(&dir,
          shell_line(ND_LAUNCH
                     " generate --precision fp32 --model run/model --prompt-file rows.jsonl "
                     "--max-new-tokens 16 --num-processes 4 --tp-size 2 --threads-per-worker 1 "
                     "--max-batch 9 %s 2>log | cmp - expected",
                     sampling));
    for (int tp = 1; tp <= 2; tp++) {
        snprintf(both, sizeof both, "--max-new-tokens 16 --tp-size %d --max-batch 5 %s", tp,
                 sampling);
        shell(&dir, shell_line(RANKS, port_reserve(), both));
    }
}

Test(generate, has_the_same_text_in_any_batch_and_on_any_mesh)
{
    shell(&dir, "sed -i 's/heads\": 4/heads\": 8/' model.json"); /* of KV heads 2: copies at tp 4 */
    train();
    write_rows(40);
    assert_same_everywhere("");
    assert_same_everywhere("--temperature 0.8 --top-p 0.9 --seed 5");
}

/* Of the same sizes, on two hosts: what one computes would not fit the other's. */
Test(generate, ranks_with_other_models_are_refused)
{
    static const char *const changes[] = {
        "s/LlamaFor/MistralFor/; s/\"llama\"/\"mistral\", \"sliding_window\": 11/",
        "s/10000.0/10001.0/"};
    train();
    shell(&dir, "mkdir 0 1 && cp -r run/model 0/m && rm 0/m/SHA256SUMS && cp -r 0/m 1/m");
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        shell(&dir,
              shell_line(
                  "sed -i '%s' 1/m/config.json && ! cmp -s 0/m/config.json 1/m/config.json && "
                  "pids=; for r in 1 0; do (cd $r && RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 "
                  "LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=%d exec " GENERATE
                  "--model m --prompt a --num-processes 2 --threads-per-worker 1 >out 2>log) & "
                  "pids=\"$pids $!\"; done; for p in $pids; do wait $p; test $? -eq 2 || "
                  "{ cat 0/log 1/log; exit 1; }; done; cat 1/log; "
                  "cp 0/m/config.json 1/m/",
                  changes[i], port_reserve()));
        says("the nodes have different configurations: ", "rank 1 (");
    }
}

Test(generate, stops_before_a_stop_text)
{
    char text[256], expected[256];
    train();
    shell(&dir, GENERATE "--model run --prompt x --max-new-tokens 60 2>log");
    snprintf(text, sizeof text, "%.255s", shell_output);
    cr_assert_gt(strlen(text), 20);
    const char stop[3] = {text[12], text[13], '\0'}; /* letters: the model has seen no others */
    cr_assert(stop[0] >= 'a' && stop[0] <= 'z' && stop[1] >= 'a' && stop[1] <= 'z', "%s", text);
    snprintf(expected, sizeof expected, "%.*s\n", (int)(strstr(text, stop) - text), text);
    shell(&dir,
          shell_line(GENERATE
                     "--model run --prompt x --max-new-tokens 60 --stop '<|no|>' --stop '%s' 2>log",
                     stop));
    cr_expect_str_eq(shell_output, expected);
    shell(&dir, shell_line("echo '{\"prompt\": \"x\"}' | " GENERATE
                           "--model run --jsonl --max-new-tokens 60 --stop '%s' 2>log",
                           stop));
    says("\"finish\":\"stop\"");
}

Test(generate, says_what_is_wrong)
{
    static const struct {
        int code;
        const char *command, *words;
    } cases[] = {
        {2, GENERATE "--prompt a", "--model is missing"},
        {65, GENERATE "--model no/such --prompt a", "no/such"},
        {65, GENERATE "--model ./rum --prompt a", "does not exist; did you mean ./run?"},
        {65, GENERATE "--model run/modle --prompt a", "does not exist; did you mean run/model?"},
        {65, GENERATE "--model text.txt --prompt a", "is a file"},
        {65, GENERATE "--model . --prompt a", "is no model"},
        {2, GENERATE "--model run --prompt a --temperature -1", "--temperature is -1"},
        {2, GENERATE "--model run --prompt a --top-p 0", "--top-p is 0"},
        {2, GENERATE "--model run --prompt a --max-new-tokens 0", "--max-new-tokens"},
        {2, GENERATE "--model run --prompt a --stop ''", "--stop is empty"},
        {2, GENERATE "--model run --prompt a --prompt-file b", "--prompt is one text"},
        {2, GENERATE "--model run --prompt a --top-p 0.5", "--top-p has no effect"},
        {2, GENERATE "--model run --prompt a --max-new-token 3", "did you mean --max-new-tokens?"},
        {2, GENERATE "--model run --prompt a --precison bf16", "did you mean --precision?"},
        {2, EVAL "--model run --date valid.txt", "did you mean --data?"},
        {2, GENERATE "--model run --prompt a --no-such-flag-at-all",
         "ndtrain generate --help lists those of the command"},
        {2, GENERATE "--model run --prompt a --cp-size 2", "workers"},
        {2, GENERATE "--model run --prompt a --prompt b", "--prompt is given twice"},
        {2, GENERATE "--model run --prompt a --context 9",
         "--context is the room of --interactive"},
        {2, GENERATE "--model run --prompt a --max_tokens=3", "--max_tokens: new tokens are"},
        {2, GENERATE "--model run --prompt a --do-sample", "--do-sample: a --temperature above 0"},
        {2, GENERATE "--model run --prompt a --batch-size 3", "--batch-size: texts of a replica"},
        {2, GENERATE "--model run --prompt a --lr 3", "--lr: it is about training"},
        {65, GENERATE "--model run --prompt ''", "the prompt is empty"},
        {65, GENERATE "--model run --prompt \"$(printf 'a\\377')\"", "byte 2 is 0xff"},
        {65, GENERATE "--model run --prompt a --max-new-tokens 200",
         "max_position_embeddings is 128"},
        {65, "echo >>kept/config.json; " GENERATE "--model kept --prompt a", "config.json"},
        {65, "rm -f kept/tokenizer.json; " GENERATE "--model kept --prompt a --model-verify false",
         "--tokenizer"},
        {65, GENERATE "--model run --prompt a --chat", "no known chat form"},
        {65, "echo '{\"prompt\": 1}' | " GENERATE "--model run --jsonl", "line 1"},
        {2, EVAL "--model run", "either files of --data"},
        {65, EVAL "--model run --data no/such --sequence-length 64", "does not exist"},
        {2, EVAL "--model run --data valid.txt --sequence-length 1000",
         "max_position_embeddings is 128"},
        {65,
         "echo '{\"context\": \"a\", \"choices\": [\"b\"]}' >r.jsonl; " EVAL
         "--model run --requests r.jsonl",
         "\"gold\" must be"},
    };
    train();
    shell(&dir, "cp -r run/model kept");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        shell_ends(&dir, cases[i].code, cases[i].command, cases[i].words);
    }
}

/* Found before a worker starts: one line, and no screen of a failed job. */
Test(generate, ndlaunch_says_what_is_wrong)
{
    static const struct {
        int code;
        const char *command, *words;
    } cases[] = {
        {0, ND_TRAIN " check generate --model run --prompt a", "are good"},
        {0, ND_TRAIN " check eval --model run --data valid.txt", "are good"},
        {65, ND_TRAIN " check generate --model run --prompt-file no/such", "no/such"},
        {65, ND_TRAIN " check eval --model run --data no/such", "does not exist"},
        {65, ND_TRAIN " check eval --model run --requests no/such", "no/such"},
        {2, ND_TRAIN " check generate --model run --prompt a --num-processes 3 --tp-size 3",
         "num_attention_heads is 4, which mesh.tp 3 does not divide"},
        {2, ND_LAUNCH " generate --model run --prompt a --tp-size 3",
         "each tensor-parallel rank holds an equal part; give --tp-size 1, 2 or 4"},
        {2, ND_LAUNCH " generate --model run --prompt a --cp-size 2", "is split by tp only"},
        {2, ND_LAUNCH " eval --model run --data valid.txt --tp-size 3", "--tp-size 1, 2 or 4"},
        {2, ND_LAUNCH " eval --model run --serve-stdin --tp-size 3", "--tp-size 1, 2 or 4"},
        {2, ND_LAUNCH " eval --model run --serve-stdin --num-processes 2", "one request at a time"},
        {2, ND_LAUNCH " bench --layer --model-config model.json --sequence-length 64 --tp-size 3",
         "--tp-size 1, 2 or 4"},
        {65, ND_LAUNCH " generate --model run --prompt-file no/such", "no/such"},
        {65, ND_LAUNCH " generate --model run --prompt a --chat", "no known chat form"},
        {65, ND_LAUNCH " generate --model run --prompt ''", "the prompt is empty"},
        {65, ND_LAUNCH " eval --model run --data no/such", "does not exist"},
        {65, ND_LAUNCH " eval --model run --requests no/such", "no/such"},
        {65, "echo '{}' >bad.jsonl; " ND_LAUNCH " eval --model run --requests bad.jsonl",
         "bad.jsonl"},
        {2, ND_LAUNCH " eval --model run --data valid.txt --sequence-length 1000",
         "max_position_embeddings is 128"},
        {2, ND_LAUNCH " generate --prompt a", "--model is missing"},
        {2, ND_LAUNCH " eval --model run", "either files of --data"},
        {65, ND_LAUNCH " generate --model no/such --prompt a --num-processes 2", "no/such"},
        {2, ND_LAUNCH " generate --model run --prompt a --max-new-tokens x", "--max-new-tokens"},
        {65,
         "f=run/model/model.safetensors; printf '\\001' | dd of=$f bs=1 conv=notrunc status=none "
         "seek=$(($(wc -c <$f) - 1)); " ND_LAUNCH
         " eval --model run --data valid.txt --sequence-length 64",
         "model.safetensors"},
        {65, GENERATE "--model run --prompt a", "model.safetensors"},
        {0, GENERATE "--model run --prompt a --max-new-tokens 2 --model-verify false", ""},
    };
    train();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        shell_ends(&dir, cases[i].code, cases[i].command, cases[i].words);
        says_not("failed first");
    }
}

static double number_behind(const char *text, const char *key)
{
    const char *at = strstr(text, key);
    cr_assert_not_null(at, "no %s in:\n%s", key, text);
    return strtod(at + strlen(key), NULL);
}

Test(generate, computes_in_fp8)
{
    train();
    write_rows(5);
    shell(&dir, GENERATE "--model run --prompt-file rows.jsonl --max-new-tokens 20 --precision fp8 "
                         "2>log");
    says("\"index\":4,");
    shell(&dir, ND_LAUNCH " generate --model run --prompt-file rows.jsonl --max-new-tokens 20 "
                          "--precision fp8 --fp8-recipe rowwise --num-processes 2 2>log");
    says("\"index\":4,");
    shell_ends(&dir, 2,
               GENERATE "--model run --prompt a --max-new-tokens 9 --precision fp8 "
                        "--fp8-recipe delayed",
               "--fp8-recipe rowwise");
}

Test(generate, eval_leaves_out_what_cannot_be_scored)
{
    static const char rows[] = "{\"context\": \"ab\", \"choices\": [\"ef\"], \"gold\": 0}\n"
                               "{\"context\": \"ab\", \"choices\": [\"\"], \"gold\": 0}\n";
    train();
    tempdir_write(&dir, "rows.jsonl", rows, sizeof rows - 1);
    shell(&dir, EVAL "--model run --requests rows.jsonl --jsonl 2>log >scores");
    shell(&dir, "grep -q '1 of 2 requests cannot be scored, and are left out.*line 2' log");
    shell(&dir, "sed -n 2p scores | grep -q '\"left_out\": *\".*adds no token'");
    shell(&dir, "sed -n 3p scores | grep '\"count\": *1' | grep -q '\"left_out\": *1'");
    shell_ends(&dir, 65,
               "sed -n 2p rows.jsonl >none.jsonl; " EVAL "--model run --requests none.jsonl",
               "no request can be scored");
}

/* Line after line, each answered before the next is written, with the scores of a file; a context
 * that is used again is not computed again. */
Test(generate, eval_serves_requests)
{
    static const char rows[] =
        "{\"context\": \"ab cd \", \"choices\": [\"ef\", \"xyzzy\"], \"gold\": 1}\n"
        "{\"context\": \"ab cd \", \"choices\": [\"q\"], \"gold\": 0}\n";
    train();
    tempdir_write(&dir, "rows.jsonl", rows, sizeof rows - 1);
    shell(&dir, EVAL "--model run --requests rows.jsonl --jsonl 2>log | head -n 2 >expected");
    shell(&dir, EVAL "--model run --serve-stdin <rows.jsonl 2>log | cmp - expected");
    shell(&dir, ND_LAUNCH " eval --precision fp32 --model run --serve-stdin --num-processes 2 "
                          "--tp-size 2 <rows.jsonl 2>log >out && test $(wc -l <out) -eq 2");
    shell(&dir,
          "printf '{\"choices\": [\"b\"]}\\n{\"context\": \"a\", \"choices\": [\"b\"]}\\n\\n7\\n' "
          "| " EVAL "--model run --serve-stdin 2>log");
    says("{\"error\":\"a row is an object with ", "(while reading standard input, line 1)\"}\n",
         "{\"index\":0,\"log_likelihoods\":[-", "(while reading standard input, line 4)\"}\n");
}

/* A bad line is reported, and the next one is read; each line draws numbers of its own. */
Test(generate, reads_line_after_line)
{
    train();
    shell(&dir, GENERATE "--model run --prompt 'ab cd' --max-new-tokens 9 2>log >a && " GENERATE
                         "--model run --prompt 'x' --max-new-tokens 9 2>log >>a");
    shell(&dir, "printf 'ab cd\n\n\377\nx' | " GENERATE
                "--model run --interactive --max-new-tokens 9 2>log | cmp - a");
    shell(&dir, "grep -q 'byte 1 is 0xff' log");
    shell(&dir, "printf 'ab cd\nx\n' | " ND_LAUNCH
                " generate --precision fp32 --model run --interactive --max-new-tokens 9 "
                "--num-processes 2 --tp-size 2 2>log | cmp - a");
    /* Its threads spin longer than those of one of several workers. */
    shell(&dir, "mkfifo lines; " GENERATE "--model run --interactive <lines >text 2>log & pid=$!; "
                "exec 3>lines; i=0; "
                "until tr '\\0' '\\n' </proc/$pid/environ | grep -x GOMP_SPINCOUNT=20000; do "
                "i=$((i + 1)); test $i -lt 1000 || exit 1; sleep 0.01; done; exec 3>&-; wait $pid");
    shell_ends(&dir, 0, "echo a | " GENERATE "--model run --interactive --context 20",
               "--context is 20; shorten the prompt");
    shell_ends(&dir, 2, GENERATE "--model run --interactive --prompt a",
               "--interactive reads prompts");
}

/* A number of new tokens that nobody asked for is what the model has room for; one that was asked
 * for must fit. */
Test(generate, new_tokens_fit_the_model_unless_they_are_asked_for)
{
    train();
    shell(&dir, GENERATE "--model run --prompt 'ab cd' --jsonl --ignore-eos 2>log");
    says("\"finish\":\"length\",\"prompt_tokens\":5,\"new_tokens\":123,");
    shell_ends(&dir, 65, GENERATE "--model run --prompt 'ab cd' --max-new-tokens 124",
               "prompt and new tokens need 5 + 124 positions");
    shell_ends(&dir, 65,
               "echo '{\"prompt\": \"ab\", \"max_new_tokens\": 127}' | " GENERATE
               "--model run --jsonl",
               "need 2 + 127 positions");
}

/* Text is printed while it is made: what follows a signal is not. Without that, all 90,000 tokens
 * of this text would stand in the pipe before its reader sends the signal. */
Test(generate, text_comes_while_it_is_made)
{
    shell(&dir, "sed -i 's/embeddings\": 128/embeddings\": 100000/' model.json");
    train();
    shell(&dir, "mkfifo text; " GENERATE "--model run --prompt a --max-new-tokens 90000 "
                "--ignore-eos 2>log >text & pid=$!; "
                "{ head -c 20; kill -TERM $pid; cat; } <text >seen; "
                "wait $pid; test $? -ne 0 && test $(wc -c <seen) -ge 20 && "
                "test $(wc -c <seen) -lt 60000");
}

/* --chat makes of a prompt the turns of the form, with the control tokens of the tokenizer. */
Test(generate, a_chat_is_written_in_its_form)
{
    static const char call[] =
        GENERATE "--model run --jsonl --max-new-tokens 9 --ignore-eos 2>log %s";
    static const char row[] = "{\"prompt\": \"<|im_start|>user\\nhi you<|im_end|>\\n"
                              "<|im_start|>assistant\\n\"}\n";
    static const char end[] = "{\"eos_token\": \"<|im_end|>\"}";
    shell(&dir, "mkdir tok && sed 's/<|begin|>/<|im_start|>/g; s/<|eot|>/<|im_end|>/g' " ND_SOURCE
                "/tests/unit/trainer/text/goldens/qwen2.json >tok/tokenizer.json && "
                "sed -i 's/vocab_size\": 256/vocab_size\": 512/' model.json");
    tempdir_write(&dir, "tok/tokenizer_config.json", end, sizeof end - 1);
    shell(&dir,
          TRAIN "--model-config model.json --set data.tokenizer=tok/tokenizer.json --set "
                "data.cache_dir=cache --num-steps 2 --checkpoint-frequency 1 --output-dir run");
    tempdir_write(&dir, "rows.jsonl", row, sizeof row - 1);
    shell(&dir, shell_line(call, "--prompt-file rows.jsonl >plain"));
    shell(&dir, shell_line(call, "--chat --prompt 'hi you' >chat"));
    shell(&dir, "grep -q 'chat form: chatml' log && cmp chat plain");
    shell(&dir,
          "echo '{\"messages\": [{\"role\": \"user\", \"content\": \"hi you\"}]}' >rows.jsonl");
    shell(&dir, shell_line(call, "--prompt-file rows.jsonl >messages"));
    shell(&dir, "grep -q 'chat form: chatml' log && cmp messages plain");
    shell(&dir, "grep -q '\"eos_token_id\": [0-9]' run/model/config.json");
    shell(&dir,
          "mv run/model elsewhere"); /* a run that has not ended: its tokenizer is where it was */
    shell(&dir, GENERATE "--model run --chat --prompt 'hi you' --max-new-tokens 9 2>log");
    shell(&dir, "grep -q 'chat form: chatml' log && mv tok lost");
    cr_expect_neq(shell_run(&dir, GENERATE "--model run --chat --prompt 'hi you'"), 0);
    says("the run's tokenizer \"tok/tokenizer.json\" is not found from here");
    shell(&dir, "cp -r lost tok && echo >>tok/tokenizer.json");
    shell_ends(&dir, 65, GENERATE "--model run --chat --prompt 'hi you'",
               "is not the tokenizer that the run of this checkpoint had (digest ");
    shell(&dir,
          GENERATE "--model run --chat --prompt 'hi you' --max-new-tokens 9 --tokenizer lost");
}

/* The end of text that a run appends ends what its model generates, unless config.json names one:
 * in the saved model and in the checkpoint. */
Test(generate, the_end_of_text_of_a_run_is_that_of_its_model)
{
    static const char end[] = "{\"eos_token\": \"<|eot|>\"}"; /* 420 */
    static const struct {
        const char *key, *flags;
        int saved;
    } cases[] = {{"", "", 420},
                 {"", "--set data.append_eod=false", 2},
                 {"\"eos_token_id\": 2, ", "", 2},
                 {"\"eos_token_id\": null, ", "", 420}};
    char words[64];
    shell(&dir, "mkdir tok && cp " ND_SOURCE
                "/tests/unit/trainer/text/goldens/qwen2.json tok/tokenizer.json");
    tempdir_write(&dir, "tok/tokenizer_config.json", end, sizeof end - 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        shell(&dir,
              shell_line(
                  "rm -rf run; sed 's/\"vocab_size\": 256/%s\"vocab_size\": 512/' model.json "
                  ">own.json; " TRAIN "--model-config own.json --set data.tokenizer=tok "
                  "--set data.cache_dir=cache --num-steps 2 --checkpoint-frequency 2 --output-dir "
                  "run %s",
                  cases[i].key, cases[i].flags));
        shell(&dir, "grep eos_token_id run/model/config.json");
        snprintf(words, sizeof words, "\"eos_token_id\": %d,", cases[i].saved);
        says(words);
    }
    shell(&dir,
          "rm -rf run && sed 's/vocab_size\": 256/vocab_size\": 512/' model.json >own.json; " TRAIN
          "--model-config own.json --set data.tokenizer=tok --set data.cache_dir=cache "
          "--num-steps 2 --checkpoint-frequency 2 --output-dir run && " ND_TRAIN
          " export run/checkpoint-2 out && grep eos_token_id out/config.json");
    says("\"eos_token_id\": 420,");
}

/* A text that is empty since the model ended at once is told; it is not a fault. */
Test(generate, an_end_token_that_comes_first_is_told)
{
    train();
    shell(&dir, "cp -r run/model all && seq -s, 0 255 | sed 's/.*/{\"eos_token_id\": [&]}/' "
                ">all/generation_config.json");
    shell(&dir, GENERATE "--model all --prompt 'ab cd' 2>&1");
    says("1 of 1 texts are empty, as the model's end token came first");
    says_not("--chat");
    shell(&dir, GENERATE "--model all --prompt 'ab cd' --ignore-eos --max-new-tokens 2 2>&1");
    says_not("are empty");
}

/* What ndlaunch passes on: the command's own flags, standard input, and a failure's code. */
Test(generate, ndlaunch_starts_its_workers)
{
    train();
    shell(&dir, GENERATE "--model run --prompt 'ab cd' --max-new-tokens 9 2>log >a");
    shell(&dir, "echo 'ab cd' | " ND_LAUNCH " generate --model=run --max_new_tokens 9 "
                "--precision fp32 --num-processes 2 --tp-size 2 2>log | cmp - a");
    shell(&dir, EVAL "--model run --data valid.txt --sequence-length 64 2>log >a");
    shell(&dir, ND_LAUNCH " eval --model run --data valid.txt --sequence-length 64 --precision "
                          "fp32 --num-processes 2 --dp-shard-size 1 --tp-size 2 2>log >b");
    shell(&dir, "cut -c 1-20 a >c && cut -c 1-20 b | cmp - c"); /* "valid.txt: loss 5.54" */
    shell_ends(&dir, 2,
               ND_LAUNCH " generate --model run --prompt a --top-p 2 "
                         "--num-processes 2",
               "--top-p is 2");
    says_not("failed first");
    shell(&dir, ND_LAUNCH " generate --help");
    says("usage: ndtrain generate", "--max-new-tokens N");
}

/* The speed of what no call was measured for is not said. */
Test(generate, the_last_line_has_only_what_was_measured)
{
    train();
    shell(&dir, GENERATE "--model run --prompt a --max-new-tokens 4 --ignore-eos 2>&1 >text");
    says(": 4 new tokens, ", " a second while no prompt was computed; 1 prompt token; 4 calls\n");
    shell(&dir, GENERATE "--model run --prompt 'ab cd' --max-new-tokens 1 2>&1 >text");
    says(": 1 new token; 5 prompt tokens, ", " a second; 1 call\n");
}

/* Replicas share the texts, and the last line counts what all have done: what one worker does. */
Test(generate, the_last_line_counts_all_replicas)
{
    static const char *const meshes[] = {"--num-processes 2", "--num-processes 4 --tp-size 2"};
    train();
    write_rows(21); /* with i % 13 + 1 tokens each: 91 + 36 */
    shell(&dir, GENERATE "--model run/model --prompt-file rows.jsonl --max-new-tokens 5 "
                         "--ignore-eos 2>&1 >text");
    says("21 texts in ", ": 105 new tokens, ", "; 127 prompt tokens, ");
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        shell(&dir,
              shell_line(ND_LAUNCH
                         " generate --precision fp32 --model run/model --prompt-file rows.jsonl "
                         "--max-new-tokens 5 --ignore-eos --threads-per-worker 1 --max-batch 2 "
                         "%s 2>&1 >other && cmp text other",
                         meshes[i]));
        says("21 texts in ", ": 105 new tokens, ", "; 127 prompt tokens, ");
    }
}

/* A block that takes minutes ends soon after a signal, on one worker and on several. */
Test(generate, eval_ends_within_a_call_of_the_model)
{
    static const char *const programs[] = {ND_TRAIN " eval", ND_LAUNCH " eval --num-processes 2 "
                                                                       "--tp-size 2"};
    static const char *const signals[] = {"TERM", "INT"};
    char command[1024];
    shell(&dir, "for i in 1 2 3 4 5 6 7; do cat text.txt; done >long.txt");
    shell(&dir, "sed -i 's/\"max_position_embeddings\": 128/\"max_position_embeddings\": 200000/' "
                "model.json");
    train();
    for (int i = 0; i < 2; i++) {
        const double begin = nd_clock_seconds();
        snprintf(
            command, sizeof command,
            "%s --precision fp32 --model run --data long.txt --sequence-length 131072 "
            "--threads-per-worker 1 >out 2>log & p=$!; while kill -0 $p && ! grep -q 'blocks of' "
            "log; do sleep 0.05; done; sleep 0.1; kill -%s $p; wait $p; code=$?; cat log; test ! "
            "-s out && exit $code",
            programs[i], signals[i]);
        shell_ends(&dir, 75, command, "stopped by a signal");
        cr_expect_lt(nd_clock_seconds() - begin, patience(PATIENCE_SECONDS), "%s", command);
    }
}

/* The reader takes one byte, sends the signal, and the rest of the long row after the time in which
 * a worker ends: the row is whole, since its end is waited for. */
Test(generate, ends_behind_the_row_that_it_prints)
{
    train();
    shell(&dir,
          "mkfifo rows; awk 'BEGIN { s = \"x\"; while (length(s) < 300000) s = s s; "
          "print \"{\\\"ids\\\": [97], \\\"id\\\": \\\"\" s \"\\\"}\" }' >long.jsonl; " GENERATE
          "--model run --jsonl --prompt-file long.jsonl --max-new-tokens 1 >rows 2>log & p=$!; "
          "{ head -c 1 >out; kill -TERM $p; sleep 1.2; cat >>out; } <rows; wait $p; "
          "test $? -eq 75 && grep -q 'stopped by a signal$' log && test $(wc -l <out) -eq 1 "
          "&& test $(wc -c <out) -gt 300000 || { cat log; exit 1; }");
}

/* Two replicas as torchrun starts them, to which a signal comes once the condition holds. Replica 0
 * has little to do and waits for replica 1. */
#define STOPPED                                                                                    \
    "pids=; for r in 0 1; do RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 "               \
    "MASTER_ADDR=127.0.0.1 MASTER_PORT=%d %s --model run --num-processes 2 --threads-per-worker "  \
    "1 >out$r 2>log$r & pids=\"$pids $!\"; done; while kill -0 $pids && ! { %s; }; do sleep "      \
    "0.02; done; sleep %s; kill -TERM $pids; for p in $pids; do wait $p; test $? -eq 75 || { cat " \
    "log0 log1; exit 1; }; done; grep -q 'stopped by a signal' log0 && grep -q 'stopped by a "     \
    "signal' log1"
/* Both handle TERM. */
#define HANDLED                                                                                    \
    "test $(for p in $pids; do grep -E 'SigCgt:.*[4-7c-f][0-9a-f]{3}$' /proc/$p/status; done | "   \
    "wc -l) -eq 2"

Test(generate, a_stop_ends_all_replicas)
{
    char command[3000];
    shell(&dir, "sed -i 's/\"max_position_embeddings\": 128/\"max_position_embeddings\": 200000/' "
                "model.json");
    train();
    shell(&dir,
          "for i in 1 2 3 4 5 6 7 8 9; do echo '{\"ids\": [97], \"max_new_tokens\": 1}'; done "
          ">rows.jsonl; echo '{\"ids\": [98], \"max_new_tokens\": 60000}' >>rows.jsonl");
    snprintf(command, sizeof command, STOPPED, port_reserve(),
             GENERATE "--prompt-file rows.jsonl --jsonl --max-batch 1 --ignore-eos",
             "test $(wc -l <out0) -eq 8", "0.1"); /* the first wave; long is the second one */
    shell(&dir, command);
    shell(&dir, "for r in 0 1; do grep -q 'stopped by a signal; 8 of 10 texts are complete' log$r "
                "|| { cat log$r; exit 1; }; done");
    shell(&dir, "awk 'BEGIN { for (i = 0; i < 600; i++) { s = \"ab\"; if (i % 2) { s = i; while "
                "(length(s) < 4000) s = s \" abcdefg\" } print \"{\\\"context\\\": \\\"\" s "
                "\"\\\", \\\"choices\\\": [\\\"c\\\"], \\\"gold\\\": 0}\" } }' >choices.jsonl");
    shell(&dir, shell_line(STOPPED, port_reserve(), EVAL "--requests choices.jsonl", HANDLED, "1"));
}

/* valid.txt as a file of ids: the bytes of its text are those that the tokenizer makes of them. */
static void write_ids(void)
{
    static uint32_t words[256 + 1299] = {20240801, 7, 1299};
    const char *text = inputs_write_text(&dir, INPUTS_TEXT_MAX);
    for (int i = 0; i < 1299; i++) {
        words[256 + i] = (unsigned char)text[i];
    }
    tempdir_write(&dir, "valid.bin", words, sizeof words);
}

/* The same code and the same order of sums. */
Test(generate, eval_has_the_loss_of_the_validation)
{
    train();
    shell(&dir, "grep validation_loss run/metrics.jsonl | tail -n 1");
    double loss = number_behind(shell_output, "\"validation_loss\":");
    double tokens = number_behind(shell_output, "\"validation_tokens\":");
    shell(&dir, EVAL "--model run/model --data valid.txt --data text.txt --sequence-length 64 "
                     "--jsonl 2>log");
    cr_expect_float_eq(number_behind(shell_output, "\"loss\":"), loss, 1e-6 * loss);
    cr_expect_float_eq(number_behind(shell_output, "\"bits_per_byte\":"), loss / M_LN2,
                       1e-6 * loss);
    cr_expect_float_eq(number_behind(shell_output, "\"perplexity\":"), exp(loss), 1e-5 * exp(loss));
    cr_expect_eq(number_behind(shell_output, "\"tokens\":"), tokens);
    says("\"data\":\"text.txt\"");
    shell(&dir, EVAL "--model run --data valid.txt --jsonl 2>log && grep -q 'of 64 tokens' log");
    cr_expect_float_eq(number_behind(shell_output, "\"loss\":"), loss, 1e-6 * loss);
    shell(&dir,
          ND_LAUNCH " eval --precision fp32 --model run/checkpoint-8 --data valid.txt --jsonl "
                    "2>log && grep -q 'as long as those of the model' log");
    cr_expect_float_eq(number_behind(shell_output, "\"loss\":"), loss, 1e-6 * loss);
    write_ids();
    shell(&dir, EVAL "--model run/model --data valid.bin --sequence-length 64 --jsonl 2>log");
    cr_expect_float_eq(number_behind(shell_output, "\"loss\":"), loss, 1e-6 * loss);
    cr_expect_float_eq(number_behind(shell_output, "\"bits_per_byte\":"), loss / M_LN2,
                       1e-6 * loss);
    /* Each rank counts the bytes of its blocks. */
    shell(&dir, ND_LAUNCH " eval --precision fp32 --model run/model --data valid.bin --data "
                          "valid.txt --sequence-length 64 --num-processes 2 --jsonl 2>log");
    const double own = number_behind(shell_output, "\"loss\":");
    cr_expect_float_eq(number_behind(shell_output, "\"bits_per_byte\":"), own / M_LN2, 1e-12 * own);
    says("\"data\":\"valid.txt\"");
    /* Folders and patterns, as data.path takes them. */
    shell(&dir, "mkdir texts ids && cp valid.txt texts && cp valid.bin ids && " EVAL
                "--model run/model --data texts --data ids --data 'ids/*.bin' --sequence-length 64 "
                "--jsonl 2>log >all && test $(wc -l <all) = 3 && "
                "sed 's/\"data\":\"[^\"]*\"//' all | uniq");
    cr_expect_float_eq(number_behind(shell_output, "\"loss\":"), loss, 1e-6 * loss);
    cr_expect_eq(strchr(shell_output, '\n'), strrchr(shell_output, '\n'), "%s", shell_output);
    shell(&dir, ND_TRAIN " tokenize --tokenizer run/model --input valid.txt --output-prefix pair "
                         ">log 2>&1 && " EVAL
                         "--model run/model --data pair --tokenizer file --jsonl 2>log");
    cr_expect_float_eq(number_behind(shell_output, "\"loss\":"), loss, 1e-6 * loss);
    says_not("bits_per_byte");
    shell(&dir, EVAL "--model run/checkpoint-8 --data valid.txt --sequence-length 64 2>log");
    says("valid.txt: loss ", " bits per byte, ");
}

/* Weights, moments, FP8 histories and the order of the data are those of a run without. */
Test(generate, a_validation_changes_nothing)
{
    static const char *const runs[] = {"with --set train.validation_interval=2",
                                       "without --validation-path ''"};
    for (int i = 0; i < 2; i++) {
        shell(
            &dir,
            shell_line(TRAIN
                       "--model-config model.json --precision fp8 --fp8-recipe delayed --num-steps "
                       "4 --checkpoint-interval 3 --output-dir %s",
                       runs[i]));
    }
    shell(&dir, "test $(grep -c validation_loss with/metrics.jsonl) -ge 2");
    shell(&dir, "for d in with without; do grep -o '\"loss\":[^,]*' $d/metrics.jsonl >$d/losses; "
                "done; test $(wc -l <with/losses) -eq 4 && cmp with/losses without/losses");
    shell(&dir,
          "cd with && n=0 && for f in model/*.safetensors checkpoint-3/state/*.safetensors; do "
          "cmp $f ../without/$f || exit 1; n=$((n + 1)); done; test $n -ge 2");
}

/* Three models: grouped heads; tied embeddings and an odd vocabulary; another head size. */
static const char *const models[] = {
    "\"vocab_size\": 256, \"hidden_size\": 64, \"intermediate_size\": 144, "
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
    "\"rope_theta\": 10000.0, \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0, "
    "\"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, "
    "\"original_max_position_embeddings\": 64}",
    "\"vocab_size\": 331, \"hidden_size\": 48, \"intermediate_size\": 96, "
    "\"num_hidden_layers\": 3, \"num_attention_heads\": 4, \"num_key_value_heads\": 4, "
    "\"tie_word_embeddings\": true",
    "\"vocab_size\": 300, \"hidden_size\": 64, \"intermediate_size\": 128, "
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 1, "
    "\"head_dim\": 32"};

/* 40 requests of three choices, on contexts of up to 100 letters. */
static void write_requests(void)
{
    char rows[40 * 200];
    int n = 0;
    for (int i = 0; i < 40; i++) {
        char context[101];
        const int size = 5 + i * 95 / 39;
        for (int k = 0; k < size; k++) {
            context[k] = (char)('a' + (i * 5 + k * k / 3) % 26);
        }
        n += snprintf(rows + n, sizeof rows - (size_t)n,
                      "{\"context\": \"%.*s\", \"choices\": [\"%c\", \"%cq\", \"%ca\"], "
                      "\"gold\": 0}\n",
                      size, context, 'a' + i % 26, 'a' + i % 7, 'z' - i % 11);
    }
    tempdir_write(&dir, "many.jsonl", rows, (size_t)n);
}

Test(generate, has_the_ids_and_scores_of_transformers)
{
    static const char requests[] =
        "{\"context\": \"ab cd \", \"choices\": [\"ef\", \"xyzzy\", \"q\"], \"gold\": 1}\n"
        "{\"context\": \"a\", \"delimiter\": \" \", \"choices\": [\"b c\", \"bb\"], \"gold\": 0}\n"
        "{\"context\": \"the\", \"choices\": [\"m\", \"mm\", \"mmm\", \"n\"], \"gold\": 3}\n";
    const char *python = peer_python("torch transformers");
    char model[1024], command[2048];
    if (!python) {
        tempdir_remove(&dir);
        skip_test("ND_PEER_PYTHON names no Python with torch and transformers");
    }
    write_rows(50);
    write_requests();
    tempdir_write(&dir, "requests.jsonl", requests, sizeof requests - 1);
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        int n = snprintf(model, sizeof model,
                         "{\"model_type\": \"llama\", \"max_position_embeddings\": 512, %s}",
                         models[i]);
        tempdir_write(&dir, "model.json", model, (size_t)n);
        /* Ids of the larger vocabularies come from no text: the weights are fresh. */
        snprintf(command, sizeof command,
                 TRAIN "--model-config model.json --num-steps %d --output-dir run%zu %s",
                 i == 0 ? 8 : 1, i,
                 i == 0 ? ""
                        : "--data-path tokens.bin --validation-path '' --set "
                          "data.tokenizer=file");
        if (i == 1) {
            uint32_t words[256 + 4096] = {20240801, 7, 4096};
            for (uint32_t k = 0; k < 4096; k++) {
                words[256 + k] = k * k / 3 % 300;
            }
            tempdir_write(&dir, "tokens.bin", words, sizeof words);
        }
        shell(&dir, command);
        shell(&dir, shell_line(GENERATE
                               "--model run%zu/model --prompt-file rows.jsonl --jsonl --ignore-eos "
                               "--max-new-tokens 24 --max-batch 16 2>log >results%zu.jsonl",
                               i, i));
    }
    shell(&dir, EVAL "--model run0/model --requests requests.jsonl --jsonl 2>log >scores.jsonl");
    shell(&dir, ND_TRAIN " eval --precision bf16 --threads-per-worker 2 --model run0/model "
                         "--requests many.jsonl --jsonl 2>log >many_scores.jsonl");
    shell(&dir, shell_line(
                    "OMP_NUM_THREADS=1 '%s' " ND_CHECK_GENERATE
                    " greedy run0/model rows.jsonl results0.jsonl greedy run1/model rows.jsonl "
                    "results1.jsonl greedy run2/model rows.jsonl results2.jsonl choices run0/model "
                    "requests.jsonl scores.jsonl bf16 run0/model many.jsonl many_scores.jsonl",
                    python));
    says("50 prompts, 1200 ids equal to those of transformers",
         "3 requests scored as by transformers", "120 log-likelihoods in BF16 are off by ",
         " of the bound of their roundings");
}

/* Its own scores of the same rows, and ours through its interface for models. */
Test(generate, has_the_scores_of_lm_eval)
{
    const char *python = peer_python("torch transformers lm_eval");
    if (!python) {
        tempdir_remove(&dir);
        skip_test("ND_PEER_PYTHON names no Python with lm_eval (pip install lm_eval accelerate)");
    }
    train();
    write_requests();
    shell(&dir, "head -n 12 many.jsonl >few.jsonl && " EVAL
                "--model run/model --requests few.jsonl --jsonl 2>log >scores.jsonl");
    shell(&dir, shell_line("OMP_NUM_THREADS=1 '%s' " ND_CHECK_LM_EVAL
                           " run/model few.jsonl scores.jsonl " ND_TRAIN,
                           python));
    says("12 rows have the scores of lm_eval");
}
