// SPDX-License-Identifier: Apache-2.0
/*
 * Text as a user trains on it: a run from JSON lines with a tokenizer gives the numbers, to the
 * last bit, of a run from the files that `ndtrain tokenize` writes, on several meshes. So does one
 * from prompts with completions, whose loss mask lies beside these files.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "tests/support/shell.h"

static tempdir dir;

#define GOLDENS ND_SOURCE "/tests/unit/trainer/text/goldens"

static void setup(void)
{
    static const char model[] =
        "{\"model_type\": \"llama\", \"vocab_size\": 512, \"hidden_size\": 32, "
        "\"intermediate_size\": 64, \"num_hidden_layers\": 1, \"num_attention_heads\": 4, "
        "\"num_key_value_heads\": 2, \"max_position_embeddings\": 8192}";
    static const char end[] = "{\"eos_token\": \"<|eot|>\"}";
    shell(&dir, "mkdir tok && cp " GOLDENS "/llama3.json tok/tokenizer.json");
    tempdir_write(&dir, "tok/tokenizer_config.json", end, strlen(end));
    tempdir_write(&dir, "tok/config.json", model, strlen(model));
    FILE *rows = fopen(tempdir_file(&dir, "a.jsonl"), "w");
    cr_assert_not_null(rows);
    for (int i = 0; i < 300; i++) {
        fprintf(rows,
                i % 3 == 1 ? "{\"prompt\": \"what is row %d?\", \"completion\": \" the %dth\\n\"}\n"
                           : "{\"text\": \"row %d of a text, it's the %dth\\n\"}\n",
                i, i * i % 97);
    }
    fclose(rows);
}

TEMPDIR_SUITE(tokenize, setup, .timeout = 240);

static void shell_fails(const tempdir *in, const char *command, int code)
{
    int got = shell_run(in, command);
    cr_assert_eq(got, code, "%s\nended with %d:\n%s", command, got, shell_output);
}

static void train(const char *out, const char *data, const char *tokenizer, const char *mesh)
{
    shell(&dir, shell_line(ND_LAUNCH
                           " --device cpu --set model.config=tok/config.json --precision fp32 "
                           "--data-path %s --tokenizer %s --cache-dir cache --sequence-length 32 "
                           "--num-steps 3 --set output.dir=%s %s",
                           data, tokenizer, out, mesh));
}

/* What the start of the run says of its training data. */
static long counted_tokens(long *all)
{
    long counted = 0;
    int read = 0;
    for (const char *p = shell_output; read != 2 && (p = strstr(p, "training data: ")); p++) {
        read = sscanf(p, "training data: %ld of %ld tokens count in the loss", &counted, all);
    }
    cr_assert_eq(read, 2, "%s", shell_output);
    return counted;
}

Test(tokenize, a_run_from_text_is_the_run_from_its_token_files)
{
    static const char *const meshes[] = {"--num-processes 1 --set output.save_model=true",
                                         "--num-processes 2 --dp-shard-size 2",
                                         "--num-processes 4 --tp-size 2 --cp-size 2"};
    shell(&dir, ND_TRAIN " tokenize --tokenizer tok --input a.jsonl --output-prefix pair "
                         "--append-eod --threads 2");
    says("documents                                 300", "tokens that count in loss",
         "pair.bin, .mask and .idx");
    for (int i = 0; i < 3; i++) {
        long counts[2], all[2];
        train("text", "a.jsonl", "model", meshes[i]);
        cr_expect_eq(strstr(shell_output, "encoding ") != NULL, i == 0, "%s", shell_output);
        counts[0] = counted_tokens(&all[0]); /* also where the cache was there */
        train("pair_run", "pair", "file", meshes[i]);
        counts[1] = counted_tokens(&all[1]);
        cr_expect_lt(counts[0], all[0]);
        cr_expect_eq(counts[0], counts[1]);
        cr_expect_eq(all[0], all[1]);
        shell(&dir, "for run in text pair_run; do sed 's/\"step_ms.*//' $run/metrics.jsonl "
                    ">$run.steps; done; cmp text.steps pair_run.steps && grep -c loss text.steps");
        if (i == 0) {
            shell(&dir, "cmp tok/tokenizer.json text/model/tokenizer.json && cmp "
                        "tok/tokenizer_config.json text/model/tokenizer_config.json");
        }
        shell(&dir, "rm -r text pair_run");
    }
    shell(&dir, "test $(ls cache/*.tokens | wc -l) = 1");
}

/* Of JSON lines that are read as bytes, and of sources that are told apart. */
Test(tokenize, a_run_says_how_many_tokens_count)
{
    long prompts = 0, all;
    for (int i = 1; i < 300; i += 3) {
        prompts += snprintf(NULL, 0, "what is row %d?", i);
    }
    shell(&dir, "sed 's/512/256/' tok/config.json >bytes.json && head -n 30 a.jsonl >b.jsonl && "
                "grep text a.jsonl >c.jsonl");
    train("bytes_run", "a.jsonl", "bytes",
          "--num-processes 1 --set model.config=bytes.json --validation-path b.jsonl");
    cr_expect_eq(counted_tokens(&all) + prompts, all, "%s", shell_output);
    says("validation data: ");
    train("blend_run", "'0.5 a.jsonl 0.5 c.jsonl'", "bytes",
          "--num-processes 1 --set model.config=bytes.json");
    says("source a: ", "source c: all tokens count in the loss");
}

/* The output does not depend on the threads, and what fails leaves no file. */
Test(tokenize, the_command)
{
    shell(
        &dir,
        "gzip -k a.jsonl && " ND_TRAIN
        " tokenize --tokenizer tok --input a.jsonl.gz --output-prefix one --threads 1 && " ND_TRAIN
        " tokenize --tokenizer tok --input a.jsonl --output-prefix two --threads 4 && cmp "
        "one.bin two.bin && cmp one.idx two.idx && cmp one.mask two.mask");
    shell_fails(&dir, ND_TRAIN " tokenize --tokenizer tok --input a.jsonl --output-prefix one", 73);
    says("is there already");
    shell_fails(&dir, ND_TRAIN " tokenize --tokenizer tok --input none --output-prefix x", 65);
    shell_fails(&dir, ND_TRAIN " tokenize --tokenizer none --input a.jsonl --output-prefix x", 2);
    shell_fails(&dir, ND_TRAIN " tokenize --tokenizer tok --inputs a.jsonl --output-prefix x", 2);
    says("did you mean --input?");
    shell_fails(&dir, ND_TRAIN " tokenize --tokenizer tok --input a.jsonl", 2);
    says("--output-prefix is missing: writes PREFIX");
    shell_fails(&dir, ND_TRAIN " tokenize --tokenizer tok --input a.jsonl --output-prefix tok/", 2);
    says("\"tok/\" is a folder");
    shell_fails(&dir, ND_TRAIN " tokenize --tokenizer tok --input --output-prefix x", 2);
    says("--input needs a value");
    shell(&dir, "printf '{\"text\": \"a\"}\\n{\"text\": 1}\\n' >bad.jsonl");
    shell_fails(&dir, ND_TRAIN " tokenize --tokenizer tok --input bad.jsonl --output-prefix x", 65);
    says("bad.jsonl\" line 2: \"text\" is not a string");
    shell_fails(&dir, ND_TRAIN " tokenize --tokenizer tok --input a.jsonl --output-prefix /proc/x",
                73);
    shell(&dir, "! ls | grep -E '^x|tmp'");
    shell(&dir,
          ND_TRAIN " tokenize --tokenizer tok --input bad.jsonl --output-prefix x --skip-bad=1");
}

/* What does not count in the loss is in the mask, and only there; damage of it stops a run. */
Test(tokenize, rows_with_prompts_and_messages_have_a_mask)
{
#define CHECK                                                                                      \
    ND_TRAIN " check --device cpu --model-config tok/config.json --sequence-length 32 "            \
             "--num-processes 1 --tokenizer file --data-path "
    shell(&dir,
          "grep text a.jsonl >text.jsonl && " ND_TRAIN
          " tokenize --tokenizer tok --input text.jsonl --output-prefix t && test ! -e t.mask "
          "&& touch t.mask");
    shell_fails(&dir, CHECK "t", 65);
    says("t.mask\" has 0 bytes");
    shell_fails(&dir, ND_TRAIN " tokenize --tokenizer tok --input a.jsonl --output-prefix t", 73);
    shell(&dir, ND_TRAIN " tokenize --tokenizer tok --input text.jsonl --output-prefix t "
                         "--overwrite && test ! -e t.mask");
    shell(&dir, ND_TRAIN " tokenize --tokenizer tok --input a.jsonl --output-prefix a && " CHECK
                         "a && cp a.mask t.mask");
    shell_fails(&dir, CHECK "t", 65);
    says("belongs to other token files");
    /* A key of one's own is the only one; its absence is told as before. */
    shell_fails(&dir,
                ND_TRAIN " tokenize --tokenizer tok --input a.jsonl --output-prefix k --json-key "
                         "text",
                65);
    says("line 2: \"text\" is missing");
    shell(&dir, "printf '{\"prompt\": \"a\", \"completion\": \"\"}\\n' >p.jsonl");
    shell_fails(&dir, ND_TRAIN " tokenize --tokenizer tok --input p.jsonl --output-prefix p", 65);
    says("counts in the loss");
    shell(&dir, "printf '{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\\n' >m.jsonl");
    shell_fails(&dir, ND_TRAIN " tokenize --tokenizer tok --input m.jsonl --output-prefix p", 65);
    says("(--chat-format)");
    shell(&dir, "! ls | grep -E '^[pk][.](bin|idx|mask)|tmp'");
}

/* A tokenizer with the tokens of turns, and rows of messages. */
static void write_chat(void)
{
    shell(&dir, "mkdir chat && sed 's/<|begin|>/<|im_start|>/g; s/<|eot|>/<|im_end|>/g' "
                "tok/tokenizer.json >chat/tokenizer.json && echo '{\"eos_token\": \"<|im_end|>\"}' "
                ">chat/tokenizer_config.json && for i in $(seq 60); do printf "
                "'{\"messages\": [{\"role\": \"user\", \"content\": \"what is %s?\"}, {\"role\": "
                "\"assistant\", \"content\": \"a number, %s\"}]}\\n' $i $i; done >m.jsonl");
}

/* Rows of messages, as a run encodes them. */
Test(tokenize, a_run_from_messages_is_the_run_from_its_token_files)
{
    write_chat();
    shell(&dir, ND_TRAIN " tokenize --tokenizer chat --input m.jsonl --output-prefix m "
                         "--chat-format chatml && test -s m.mask");
    shell_ends(&dir, 65,
               ND_TRAIN " tokenize --tokenizer chat --input m.jsonl "
                        "--output-prefix n --chat-format model",
               "is model, but there is no chat template beside");
    train("text", "m.jsonl", "chat", "--num-processes 1 --chat-format chatml");
    says("tokens count in the loss (");
    train("pair_run", "m", "file", "--num-processes 1");
    says("tokens count in the loss (");
    shell(&dir, "for run in text pair_run; do sed 's/\"step_ms.*//' $run/metrics.jsonl "
                ">$run.steps; done; cmp text.steps pair_run.steps && grep -c loss text.steps");
}

/* A model that is made of a checkpoint names the end of a turn, as that of the run does. */
Test(tokenize, a_checkpoint_of_messages_has_the_files_of_the_run)
{
    write_chat();
    shell(&dir, "echo '{\"eos_token\": \"[word]\"}' >chat/tokenizer_config.json");
    train("run", "m.jsonl", "chat",
          "--num-processes 1 --chat-format chatml --save-model true --checkpoint-frequency 1000 "
          "--set checkpoint.export_model=true");
    shell(&dir, "grep -q eos_token_id run/model/generation_config.json && "
                "mv run/checkpoint-*/ last && " ND_TRAIN " export last copy && "
                "diff -r run/model copy && for f in $(ls copy); do cmp copy/$f last/$f; done");
}

Test(tokenize, flags_of_the_command)
{
    shell(&dir,
          "printf 'one <|eot|>%%%%two' >t.txt && " ND_TRAIN
          " tokenize --tokenizer tok --input t.txt --output-prefix t --document-separator '%%' "
          "--special-in-text parse --append-eod");
    says("documents                                   2", "became tokens");
    shell(&dir, "printf '{\"body\": \"a\"}\\n' >b.jsonl && " ND_TRAIN
                " tokenize --tokenizer tok --input b.jsonl --output-prefix b --json-key body");
    says("documents                                   1");
    shell_fails(&dir,
                ND_TRAIN " tokenize --tokenizer tok --input t.txt --output-prefix u "
                         "--special-in-text refuse",
                65);
    says("special token \"<|eot|>\"");
}

/* Flags and names of flags that no other test gives; messages name those that help. */
Test(tokenize, more_flags_of_the_command)
{
#define TOKENIZE ND_TRAIN " tokenize --tokenizer tok --overwrite --output-prefix f --input "
    shell(&dir,
          "sed 's/\"truncation\":null/\"truncation\":{\"max_length\": 4}/' tok/tokenizer.json "
          ">cut.json && ! cmp -s cut.json tok/tokenizer.json && " ND_TRAIN
          " tokenize --tokenizer cut.json --output-prefix g --input a.jsonl");
    says("\"truncation\", which is ignored");
    shell(&dir, "printf 'a\\377b' >bad.txt && " TOKENIZE "bad.txt --invalid-utf8 replace");
    shell_fails(&dir, TOKENIZE "bad.txt --invalid-utf8 refuse", 65);
    says("--invalid-utf8 replace (data.invalid_utf8)");
    shell_fails(&dir, TOKENIZE "bad.txt --invalid-utf8 drop", 2);
    shell(&dir, "printf '<|eot|>' >s.txt");
    shell_fails(&dir, TOKENIZE "s.txt --special-in-text refuse", 65);
    says("data.special_in_text (--special-in-text)");
    shell(&dir, "printf '{\"b\": \"x\"}\\n' >b.json");
    shell_fails(&dir, TOKENIZE "b.json --format jsonl", 65);
    says("--json-key");
    shell(&dir, TOKENIZE
          "b.json --format jsonl --json-keys b --workers 2 && mv f.bin with.bin && " TOKENIZE
          "b.json --data-format=jsonl --json-keys=b --no-special-tokens --drop-unknown && "
          "test $(stat -c %s f.bin) -lt $(stat -c %s with.bin)");
    shell(&dir, "printf 'a\\n\\nb\\tc' >d.txt && " TOKENIZE
                "d.txt --document-separator '\\n\\n' && test $(stat -c %s f.idx) = 82 && " TOKENIZE
                "d.txt --document-separator='\\t'");
    says("documents                                   2");
}

/* In a run, as in the command before it: one bad row, a text under another key, a broken byte. */
Test(tokenize, keys_of_a_run_that_reads_rows)
{
#define CHECK_ROWS                                                                                 \
    ND_TRAIN " check --device cpu --model-config tok/config.json --sequence-length 8 "             \
             "--num-processes 1 --cache-dir keys --tokenizer tok --data-path rows.jsonl "
    shell(&dir, "for i in $(seq 20); do printf '{\"body\": \"some words\", \"prompt\": 1}\n'; done "
                ">rows.jsonl && printf '{\"body\": 1}\n{\"body\": \"a\377b\"}\n' >>rows.jsonl");
    shell_fails(&dir, CHECK_ROWS, 65);
    says("rows.jsonl\" line 1: ");
    shell_fails(&dir, CHECK_ROWS "--json-key body", 65);
    says("rows.jsonl\" line 21: \"body\" is not a string");
    shell(&dir, CHECK_ROWS "--json-key body --skip-bad 1 --log-level info");
    says("1 bad rows were left out");
    /* The cache of that run is not the one of a run that is stricter. */
    shell_fails(&dir, CHECK_ROWS "--json-key body --skip-bad 0", 65);
    shell_fails(&dir, CHECK_ROWS "--json-key body --skip-bad 1 --invalid-utf8 refuse", 65);
    says("line 22: ", "leaving out 1 other bad row");
    shell(&dir, "printf 'data: {json_key: body, skip_bad: 2, invalid_utf8: refuse}\n' >rows.yaml "
                "&& " CHECK_ROWS "--config-file rows.yaml --log-level info");
    says("2 bad rows were left out");
    /* The tokens are those of the command. */
    shell(&dir, TOKENIZE "rows.jsonl --json-key body --skip-bad 2 --invalid-utf8 refuse");
    says("bad lines                                   2");
}

/* Documents of a text file, in a run as in the command; another separator is another cache. */
Test(tokenize, separators_in_a_run)
{
#define CHECK_BYTES                                                                                \
    ND_TRAIN " check --device cpu --model-config bytes.json --sequence-length 8 "                  \
             "--num-processes 1 --cache-dir keys --log-level info --tokenizer bytes --data-path "
#define CHECK_TEXT                                                                                 \
    ND_TRAIN " check --device cpu --model-config tok/config.json --sequence-length 8 "             \
             "--num-processes 1 --cache-dir keys --log-level info --data-path d.txt "
    shell(&dir, "for i in $(seq 20); do printf 'some words\\tmore\\n\\n'; done >d.txt");
    shell(&dir, CHECK_TEXT "--tokenizer tok --document-separator '\\n\\n'");
    says("encoded \"d.txt\": 20 documents");
    shell(&dir, CHECK_TEXT "--tokenizer tok --document-separator '\\t'");
    says("encoded \"d.txt\": 21 documents");
    says_not("data.document_separator");
    shell(&dir, CHECK_TEXT "--tokenizer tok");
    says("encoded \"d.txt\": 1 document");
    shell(&dir, CHECK_TEXT "--tokenizer tok --document-separator '%%%%'");
    says("data.document_separator separates nothing");
    shell(&dir, CHECK_TEXT "--tokenizer tok --data-path a.jsonl --document-separator '\\t'");
    says("data.document_separator has no effect");
    shell(&dir, "printf %s 'data: {document_separator: \\n\\n}' >text.yaml && " CHECK_TEXT
                "--tokenizer tok --config-file text.yaml");
    says_not("encoded");
    shell_fails(&dir, CHECK_TEXT "--tokenizer bytes --document-separator '\\n\\n'", 2);
    says("\"d.txt\" is read as bytes, in which no document ends");
    /* A compressed text gives the bytes of the text, alone and in a folder. */
    shell(&dir, "sed s/512/256/ tok/config.json >bytes.json && mkdir z && gzip -c d.txt "
                ">z/d.txt.gz && " CHECK_BYTES "z/d.txt.gz");
    says("encoded \"z/d.txt.gz\": 1 document");
    shell(&dir, CHECK_BYTES "z");
}

/* What a run does not read, it says; ids and text in one place are two sources. */
Test(tokenize, a_folder_that_is_read_in_part)
{
#define CHECK_FOLDER                                                                               \
    ND_TRAIN " check --device cpu --model-config tok/config.json --sequence-length 32 "            \
             "--num-processes 1 --cache-dir cache --data-path "
    shell(&dir, "mkdir -p in/deeper && cp a.jsonl in && touch in/notes.md && " CHECK_FOLDER
                "in --tokenizer tok");
    says("1 files of other kinds and 1 folders in it are not read");
    shell(&dir, ND_TRAIN " tokenize --tokenizer tok --input in --output-prefix in/pair");
    says("folders within");
    shell_fails(&dir, CHECK_FOLDER "in --tokenizer tok", 65);
    says("\"in/pair.bin\", and others, as \"in/a.jsonl\"");
    shell_fails(&dir, CHECK_FOLDER "'in/*' --tokenizer file", 65);
    says("has token files");
    shell(&dir, CHECK_FOLDER "'in/pair*' --tokenizer file && rm in/a.jsonl && " CHECK_FOLDER
                             "in --tokenizer file");
    says("1 files of other kinds and 1 folders in it are not read");
    shell(&dir, "sed 's/512/256/' tok/config.json >bytes.json && mv in/pair.* . && cp a.jsonl "
                "in/rows.json");
    shell_fails(&dir, CHECK_FOLDER "in/rows.json --model-config bytes.json", 65);
    says("begins as JSON does");
    shell(&dir, CHECK_FOLDER "in/rows.json --model-config bytes.json --set data.format=jsonl");
}

/* A text of one's own, also with the line ends of Windows. */
Test(tokenize, prepare_data_from_a_file)
{
    shell(&dir, "mkdir -p own/scripts && cp " ND_SOURCE "/scripts/prepare_data own/scripts && "
                "for i in $(seq 40); do printf 'line %s\\r\\nmore\\r\\n\\r\\n' $i; done >t.txt && "
                "own/scripts/prepare_data --from t.txt");
    shell(&dir, "test $(grep -c line own/data/train.txt) = 38 && test $(grep -c line "
                "own/data/valid.txt) = 2 && grep -q 'line 20$' own/data/valid.txt");
    shell(&dir, "own/scripts/prepare_data --from a.jsonl && test $(wc -l <own/data/valid.jsonl) = "
                "15");
    says("ndtrain generate --model runs/own");
    says_not("--chat-format");
    shell(&dir, "for i in $(seq 20); do echo '{\"messages\": []}'; done >m.jsonl && "
                "own/scripts/prepare_data --force --from m.jsonl");
    says("data/valid.jsonl --chat-format model");
    shell_fails(&dir, "mkdir texts && own/scripts/prepare_data --from texts", 2);
    says("'texts' is a folder");
    shell_fails(&dir, "printf PAR1 >m.parquet && own/scripts/prepare_data --from m.parquet", 2);
    says("scripts/encode_rows.py");
}

/* What a configuration asks for and cannot have. */
Test(tokenize, errors_of_a_run)
{
#define RUN                                                                                        \
    ND_TRAIN " check --device cpu --data-path a.jsonl --cache-dir cache --sequence-length 32 "     \
             "--num-processes 1 "
    shell_fails(&dir, RUN "--model-config tok/config.json --tokenizer none", 2);
    says("data.tokenizer is \"none\"");
    shell(&dir, "mkdir alone && sed 's/512/256/' tok/config.json >alone/config.json");
    shell_fails(&dir, RUN "--model-config alone/config.json --tokenizer model", 2);
    says("has no tokenizer.json");
    shell_fails(&dir, RUN "--model-config alone/config.json --tokenizer tok", 2);
    says("vocab_size is 256");
    shell(&dir, "echo '{\"text\": 5}' >>a.jsonl");
    shell_fails(&dir, RUN "--model-config tok/config.json --tokenizer model", 65);
    says("a.jsonl\" line 301");
}
