// SPDX-License-Identifier: Apache-2.0
/*
 * `ndtrain ckpt` as a user runs it: what it prints, its exit codes, and that bad input changes
 * nothing. The run folder "run" has checkpoints 10 (dp_shard 2 x tp 2), 20 (dp_replicate 2) and 30
 * (one rank) of the same weights and moments.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/inputs.h"
#include "tests/support/peer.h"
#include "tests/support/shell.h"
#include "tests/support/skip.h"

static tempdir dir;

#define WRITE  ND_CHECKPOINT_TOOL " write run "
#define CKPT   ND_TRAIN " ckpt "
#define EXPORT ND_TRAIN " export "

static void setup(void)
{
    shell(&dir, "mkdir run && " WRITE "10 untied 1 2 1 2 && " WRITE "20 untied 2 1 1 1 && " WRITE
                "30 untied 1 1 1 1");
}

TEMPDIR_SUITE(ckpt, setup, .timeout = 120);

/* The command ends with this code and says the words, in one line when it fails. */
static void ends(int code, const char *command, const char *words)
{
    shell_ends(&dir, code, command, words);
    if (code == 2 || code == 73) {
        cr_assert_eq(strchr(shell_output, '\n'), shell_output + strlen(shell_output) - 1, "%s",
                     shell_output);
    }
}

/* The same, and no file below the folder has come, gone or changed. */
static void refused(int code, const char *command, const char *words)
{
#define SNAPSHOT                                                                                   \
    "find . -type f ! -name before ! -name after -exec sha256sum {} + | sort; "                    \
    "find . -type d -o -type l | sort"
    shell(&dir, "{ " SNAPSHOT "; } >before");
    ends(code, command, words);
    char printed[sizeof shell_output];
    memcpy(printed, shell_output, sizeof printed);
    cr_assert_eq(shell_run(&dir, "{ " SNAPSHOT "; } >after; cmp before after"), 0,
                 "%s changed something:\n%s", command, shell_output);
    memcpy(shell_output, printed, sizeof printed);
}

/* Flips a byte of the data of checkpoint `step`, which one rank wrote. */
static void damage(const char *step)
{
    shell(&dir,
          shell_line("printf 'x' | dd of=run/checkpoint-%s/state/shard-00001-model-00001-of-00001."
                     "safetensors bs=1 seek=40001 conv=notrunc status=none",
                     step));
}

Test(ckpt, ls)
{
    shell(&dir, "cp -r run/checkpoint-10 run/checkpoint-10.bad && mkdir run/.tmp-checkpoint-40-id "
                "run/checkpoint-50 && rm run/checkpoint-30/state/*.hashes && " CKPT "ls run");
    says("run:\n", "checkpoint-10         good ", "checkpoint-10.bad     .bad ",
         "2026-01-31T12:00:00Z", "dp_shard 2, tp 2 ", "interval ", "            1000\n",
         ".tmp-checkpoint-40-id temporary ", "checkpoint-50         no manifest ",
         "checkpoint-30         incomplete ", "shard-00001.hashes");
    shell(&dir, CKPT "ls run/checkpoint-20/");
    says("checkpoint-20      good ");
    says_not("checkpoint-10");
    shell(&dir, "mkdir runs && mv run runs/a-1 && mkdir runs/a-2 && " CKPT "ls");
    says("runs/a-1:\n");
    says_not("a-2");
    shell(&dir, CKPT "ls runs/a-2");
    says("runs/a-2: no checkpoints\n");
    ends(65, "mkdir empty; cd empty; " CKPT "ls", "there are no checkpoints");
}

Test(ckpt, ls_prints_json_lines)
{
    shell(&dir, "mkdir run/checkpoint-50 && " CKPT "ls run --json >lines && wc -l <lines && "
                "sed -n 1p lines && sed -n 4p lines");
    says("4\n{\"run\":\"run\",\"folder\":\"checkpoint-10\",\"step\":10,\"state\":\"good\","
         "\"why\":null,\"bytes\":",
         "\"mesh\":{\"pp\":1,\"dp_replicate\":1,\"dp_shard\":2,\"cp\":1,\"tp\":2},"
         "\"reason\":\"interval\",\"tokens_seen\":1000,\"samples_seen\":80,\"has_model\":false}\n",
         "\"folder\":\"checkpoint-50\",\"step\":50,\"state\":\"no manifest\"", "\"mesh\":null");
}

Test(ckpt, verify)
{
    shell(&dir, CKPT "verify run/checkpoint-10");
    says("run/checkpoint-10: good, ", " GB/s)\n");
    damage("20");
    refused(65, CKPT "verify run", "run/checkpoint-10: good, ");
    says("run/checkpoint-20: bad: ",
         "shard-00001-model-00001-of-00001.safetensors\" is damaged: bytes 0 to ",
         "run/checkpoint-30: good, ");
    shell(&dir, "rm run/checkpoint-10/state/*.hashes");
    refused(65, CKPT "verify run/checkpoint-10", "shard-00001.hashes");
    shell(&dir, "mv run/checkpoint-20 b && ln -s ../b run/checkpoint-40 && " CKPT
                "verify run/checkpoint-30");
    refused(65, CKPT "verify run", "run/checkpoint-40: bad: ");
}

Test(ckpt, verify_includes_the_model_beside_the_state)
{
    shell(&dir, EXPORT "run/checkpoint-30 model && mv model/* run/checkpoint-30 && " CKPT
                       "verify run/checkpoint-30");
    says(", with the model beside it\n");
    shell(&dir, "echo >>run/checkpoint-30/config.json");
    refused(65, CKPT "verify run/checkpoint-30", "config.json\" is not the file that SHA256SUMS");
    says("run/checkpoint-30: its state is good, but the model beside it is bad: ");
}

Test(ckpt, export)
{
    shell(&dir, EXPORT "run/checkpoint-10 a && " EXPORT "run/checkpoint-20/ b/ && " EXPORT
                       "run c && diff -r a b && diff -r a c && ls a | tr '\\n' ' '");
    says("a: the bf16 model of run/checkpoint-10, step 10: ", " kB in ",
         "c: the bf16 model of run/checkpoint-30, step 30",
         "SHA256SUMS config.json model.safetensors ");
    shell(&dir, "mkdir empty && " EXPORT "run empty --dtype fp32 && " EXPORT
                "--dtype=fp32 run d && diff -r empty d && cd d && sha256sum -c SHA256SUMS");
    refused(73, EXPORT "run a", "\"a\" exists already and is not overwritten");
    shell(&dir, "ln -s d e");
    refused(73, EXPORT "run e", "\"e\" exists already");
    refused(73, EXPORT "run /proc/model", "\"/proc\"");
    refused(73, "ulimit -f 8; " EXPORT "run f --dtype fp32", "cannot reserve ");
    refused(2, CKPT "diff run run --dtype fp16", "--dtype is \"fp16\"");
    refused(2, EXPORT "run f --dtype fp16", "--dtype fp16 is for GGUF files (--gguf FILE)");
    refused(2, EXPORT "run f --dtype fp8", "it must be one of bf16|fp16|fp32|q8_0");
    refused(2, EXPORT "run", "give either OUT, the folder that is made, or --gguf FILE");
    refused(2, EXPORT "run f --gguf g", "give either OUT");
}

Test(ckpt, export_of_a_damaged_checkpoint)
{
    damage("30");
    refused(65, EXPORT "run a", "is damaged: bytes 0 to ");
    shell(&dir, EXPORT "run a --no-verify && test -f a/model.safetensors");
}

Test(ckpt, export_takes_the_side_files)
{
    shell(&dir, "mkdir side && echo 1 >side/tokenizer.json && echo 2 >side/other && " EXPORT
                "run a --side-files side && cmp side/tokenizer.json a/tokenizer.json && "
                "test ! -e a/other");
    refused(65, EXPORT "run b --side-files nowhere", "nowhere");
    /* A model beside the state has them. */
    shell(&dir, "mv a/* run/checkpoint-30/ && " EXPORT
                "run b --dtype fp32 && cmp b/tokenizer.json side/tokenizer.json");
}

Test(ckpt, diff)
{
    shell(&dir, WRITE "31 untied 1 3 1 1 && mkdir run/x && mv run/checkpoint-31 run/x/");
    ends(1, CKPT "diff run/checkpoint-30 run/x/checkpoint-31", "step: 30 in A, 31 in B\n");
    says("B: run/x/checkpoint-31 (step 31, dp_shard 3)\n",
         "have the same bits, but the position differs\n");
    shell(&dir, "cp -r run/checkpoint-30 same && " CKPT "diff run same");
    says("equal: all 58543 elements of 91 arrays have the same bits\n");
    shell(&dir, EXPORT "run m --dtype fp32 && " CKPT "diff m run/checkpoint-20");
    says("A: m (a Hugging Face model: weights only)\n",
         "equal: all 19512 elements of 30 arrays have the same bits\n");
    shell(&dir, EXPORT "run m16 && " CKPT "diff --dtype bf16 run m16");
    ends(1, CKPT "diff run m16", "model.norm.weight: 24 of 24 elements differ, at most by ");
    damage("30");
    refused(65, CKPT "diff run same", "is damaged");
    ends(1, CKPT "diff run same --no-verify", "1 of ");
    says("different: 1 of 91 arrays, 1 of 58543 elements\n");
    shell(&dir, WRITE "40 tied 1 1 1 1");
    refused(65, CKPT "diff run/checkpoint-40 run/checkpoint-30",
            "the models differ: \"run/checkpoint-40\" has ");
}

Test(ckpt, prune)
{
    refused(0, CKPT "prune run --keep-last 1 --dry-run", "would delete run/checkpoint-10 (");
    says("would delete 2 checkpoints, 574");
    shell(&dir, "touch run/.lock");
    refused(73, "flock run/.lock " CKPT "prune run --keep-last 1", "another process");
    ends(0, CKPT "prune run --keep-last=1 --keep-every=20", "deleted run/checkpoint-10 (306.0 kB)");
    says("deleted 1 checkpoint, 306.0 kB\n");
    shell(&dir, "ls run | tr '\\n' ' '");
    cr_assert_str_eq(shell_output, "checkpoint-20 checkpoint-30 ");
    shell(&dir, "rm run/checkpoint-30/state/*.hashes");
    refused(0, CKPT "prune run --keep-last 1", "deleted 0 checkpoints, 0 B\n");
}

Test(ckpt, prune_deletes_what_was_set_aside_when_asked)
{
    shell(&dir, "mv run/checkpoint-10 run/checkpoint-10.old; cp -r run/checkpoint-20 "
                "run/checkpoint-20.bad; echo x > run/checkpoint-20.bad/manifest.json; "
                "mkdir run/checkpoint-5.old; touch run/.lock run/checkpoint-5.old/optimizer.pt");
    refused(0, CKPT "prune run --keep-last 2", "2 that were set aside (.old, .bad) stay; ");
    refused(0, CKPT "prune run --set-aside --dry-run", "would delete run/checkpoint-20.bad (");
    says("would delete 2 checkpoints, ");
    refused(2, CKPT "prune run --set-aside --keep-every 20", "--keep-last K is missing");
    ends(0, CKPT "prune run --set-aside", "deleted run/checkpoint-10.old (306.0 kB)");
    shell(&dir, "ls run | tr '\\n' ' '");
    cr_assert_str_eq(shell_output, "checkpoint-20 checkpoint-30 checkpoint-5.old ");
    /* Models of earlier ends, beside a later one alone. */
    shell(&dir, "cd run && mkdir model.old model.old-2 model.old-mine model.older && "
                "echo 1 >model.old/config.json");
    refused(0, CKPT "prune run --set-aside", "run/model.old stays, since there is no run/model\n");
    shell(&dir, "mkdir run/model && echo 1 >run/model/config.json");
    refused(0, CKPT "prune run --set-aside --dry-run", "would delete run/model.old-2 (");
    ends(0, CKPT "prune run --set-aside", "deleted run/model.old (2 B)");
    shell(&dir, "ls run | tr '\\n' ' '");
    cr_assert_str_eq(shell_output, "checkpoint-20 checkpoint-30 checkpoint-5.old model "
                                   "model.old-mine model.older ");
    shell(&dir, "mv run/checkpoint-20 run/checkpoint-20.old; rm run/checkpoint-30/state/*.hashes");
    refused(65, CKPT "prune run --set-aside --keep-last 1", "has no good checkpoint, so those");
}

Test(ckpt, prune_needs_good_flags)
{
    refused(2, CKPT "prune run", "--keep-last K is missing");
    refused(2, CKPT "prune run --keep-last 0", "--keep-last is \"0\"; it must be a whole number");
    refused(2, CKPT "prune run --keep-last -1", "--keep-last is \"-1\"");
    refused(2, CKPT "prune run --keep-last 1 --keep-every 2x", "--keep-every is \"2x\"");
    refused(2, CKPT "prune run --keep-last", "--keep-last needs a value: --keep-last K");
    refused(2, CKPT "prune run --keep-last 1 --keep-last 2", "--keep-last is given twice");
    refused(2, CKPT "prune run --keep-last 1 --dry-run=yes", "--dry-run takes no value");
    refused(2, CKPT "prune run --keep-lats 1", "did you mean --keep-last?");
    refused(2, CKPT "prune run other --keep-last 1", "\"other\" is one argument too many");
    refused(2, CKPT "prune --keep-last 1", "a folder is missing; usage: ndtrain ckpt prune RUN");
    refused(65, CKPT "prune run/checkpoint-10 --keep-last 1", "is no run folder");
    refused(65, CKPT "prune nowhere --keep-last 1", "\"nowhere\": No such file");
}

Test(ckpt, help_and_wrong_verbs)
{
    static const char *const verbs[] = {"ls", "verify", "diff", "prune"};
    shell(&dir,
          CKPT "--help >help && " CKPT "-h | cmp - help && " CKPT "help | cmp - help && " ND_TRAIN
               " --version >version && " CKPT "--version | cmp - version && cat help");
    for (int i = 0; i < 4; i++) {
        char command[512];
        says(verbs[i]);
        shell(&dir, shell_line(CKPT "%s run --wrong --help", verbs[i]));
        snprintf(command, sizeof command, "usage: ndtrain ckpt %s ", verbs[i]);
        says(command, "Exit codes: 0 done, 2 ");
        shell(&dir, CKPT "--help");
    }
    ends(2, CKPT, "a verb is missing");
    ends(2, CKPT "verfiy run", "did you mean verify");
    ends(2, CKPT "list", "has no verb \"list\"; ");
    ends(2, CKPT "ls run --josn", "did you mean --json?");
    ends(2, CKPT "verify", "a folder is missing");
    ends(2, CKPT "diff run", "a folder is missing");
    ends(73, CKPT "ls run >/dev/full", "standard output");
}

Test(ckpt, folders_that_are_no_checkpoints)
{
    static const char *const verbs[] = {"verify %s", "diff %s run", "diff run %s"};
    static const struct {
        const char *make, *name, *words;
    } cases[] = {
        {"true", "nowhere", "\"nowhere\": No such file"},
        {"echo >file", "file", "\"file\": Not a directory"},
        {"mkdir -p empty", "empty", "\"empty\" is no run folder"},
        {"mkdir -p new/model; touch new/model/config.json", "new",
         "\"new\" has no checkpoint; its model is new/model"},
        {"mkdir -p half/state", "half", "\"half\" has no manifest.json"},
        {"cp -r run/checkpoint-10 l2; mv l2/manifest.json m; ln -s ../m l2/manifest.json", "l2",
         "manifest.json\" is a link"},
        {"cp -r run/checkpoint-10 l3; mv l3/state s; ln -s ../s l3/state", "l3", "l3/state\" is "},
        {"cp -r run/checkpoint-10 cut; truncate -s 900 cut/manifest.json", "cut",
         "cut/manifest.json\""},
        {"cp -r run/checkpoint-10 new; sed -i 's/\"version\": 1,/\"version\": 3,/' "
         "new/manifest.json",
         "new", "has format version 3; this program reads up to version 2"},
        {"cp -r run/checkpoint-10 flip; sed -i 's/\"step\": 10,/\"step\": 11,/' "
         "flip/manifest.json",
         "flip", "is damaged: its digest"},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        shell(&dir, cases[c].make);
        if (strcmp(cases[c].name, "l2") != 0) { /* which is read as by every command that uses it */
            refused(65, shell_line(EXPORT "%s out", cases[c].name), cases[c].name);
        }
        for (int v = 0; v < 3; v++) {
            char command[512];
            int n = snprintf(command, sizeof command, "%s", CKPT);
            snprintf(command + n, sizeof command - (size_t)n, verbs[v], cases[c].name);
            refused(65, command, cases[c].words);
        }
        shell(&dir, "rm -rf empty half l2 l3 m s cut new flip file");
    }
}

/* Names on the disk and texts of a manifest do not reach the terminal as they are. */
Test(ckpt, control_characters_are_escaped)
{
    shell(&dir, "mkdir \"$(printf 'run/.tmp-checkpoint-7-\\033[2J')\" && " CKPT "ls run");
    says("\\x1b[2J");
    says_not("\033");
}

/* A run of its own: 6 steps, checkpoints 3 and 6, its model in real/model. */
static void train(const char *flags)
{
    shell(&dir, shell_line(ND_LAUNCH " --device cpu --data-path text.txt --validation-path '' "
                                     "--sequence-length 64 --num-steps 6 --checkpoint-frequency 3 "
                                     "--save-dir real %s",
                           flags));
}

static void write_inputs(void)
{
    inputs_write_text(&dir, 100 * 65);
    inputs_write_model(&dir, 32, 64, 2);
}

Test(ckpt, export_is_what_the_run_saved)
{
    write_inputs();
    train("--model-config model.json --num-processes 4 --dp-shard-size 2 --tp-size 2");
    shell(&dir,
          EXPORT "real a && diff -r a real/model && " EXPORT
                 "real/checkpoint-3 b && ! cmp -s a/model.safetensors "
                 "b/model.safetensors && test -f a/tokenizer.json && " EXPORT
                 "real/checkpoint-6 c --dtype fp32 && " CKPT "diff real c && " CKPT "verify real");
    ends(1, CKPT "diff real/checkpoint-3 real", "step: 3 in A, 6 in B\n");
    says("model.layers.1.mlp.up_proj.weight: ", "optimizer.state.model.norm.weight.exp_avg: ");
    shell(&dir, CKPT "ls real");
    says("       6  checkpoint-6       good ");
}

/* The run goes on from a model with a tokenizer; the checkpoint says from which. */
Test(ckpt, export_finds_the_tokenizer_of_the_first_model)
{
    write_inputs();
    train("--model-config model.json --save-model true");
    shell(&dir, "mv real/model first && rm -r real && echo other >first/tokenizer.json && echo "
                "{} >first/generation_config.json && (cd first && sha256sum *.json "
                "*.safetensors >SHA256SUMS)");
    train("--model-path first");
    shell(&dir, EXPORT "real a && diff -r a real/model && test -f a/generation_config.json");
    shell(&dir,
          "mv first second && mv real/model kept && " EXPORT "real b && cmp a/model.safetensors "
          "b/model.safetensors");
    says("warning: ", "the run began with the model \"first\", which is not found from here");
    shell(&dir, EXPORT "real c --side-files second && diff -r a c");
}

Test(ckpt, a_checkpoint_with_a_model_is_a_model)
{
    const char *python = peer_python("torch transformers");
    write_inputs();
    train("--model-config model.json --checkpoint-export-model true --num-processes 2 "
          "--dp-shard-size 2");
    shell(&dir, "cd real/checkpoint-6 && for f in ../model/*; do cmp $f ${f##*/} || exit 1; done");
    shell(&dir, CKPT "verify real && " CKPT "ls real");
    says("with model\n");
    shell(&dir, ND_TRAIN " check --device cpu --data-path text.txt --sequence-length 64 "
                         "--num-steps 1 --model-path real/checkpoint-6");
    if (!python) {
        tempdir_remove(&dir);
        skip_test("ND_PEER_PYTHON names no Python with torch and transformers");
    }
    char command[512];
    snprintf(
        command, sizeof command,
        "'%s' -c \"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; m = "
        "M.from_pretrained('real/checkpoint-6'); t = T.from_pretrained('real/checkpoint-6'); "
        "print(sum(p.numel() for p in m.parameters()), t('ab').input_ids)\"",
        python);
    shell(&dir, command);
    says(" [97, 98]");
}
