// SPDX-License-Identifier: Apache-2.0
/* Runs that save, die and go on, as a user starts them. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/inputs.h"
#include "tests/support/shell.h"

enum { S = 64, COMMAND_MAX = 3000 };

static tempdir dir;

static void setup(void)
{
    const char *text = inputs_write_text(&dir, 200 * (S + 1));
    tempdir_write(&dir, "other.txt", text, 199 * (S + 1));
    inputs_write_model(&dir, 32, 64, 2);
    shell(&dir, "sed s/64/96/ model.json > wide.json");
}

TEMPDIR_SUITE(checkpoints, setup, .timeout = 120);

#define TRAIN                                                                                      \
    ND_LAUNCH                                                                                      \
    " --device cpu --model-config model.json --data-path text.txt --validation-path '' "           \
    "--sequence-length 64 --log-level info "
#define TWO TRAIN "--num-processes 2 --dp-shard-size 2 "

/*
 * "curve FILE": what a run computed in each of its steps, without times. After a line "resumed"
 * the lines above it that have later steps do not count.
 */
#define CURVE                                                                                      \
    "curve() { awk -F'[:,]' '/\"event\":\"resumed\"/ { for (s in c) if (s + 0 > $4 + 0) delete "   \
    "c[s] } "                                                                                      \
    "/\"step_ms\"/ { s = $2; sub(/,\"wire_bytes.*/, \"\"); c[s] = $0 } "                           \
    "END { for (s = 1; s in c; s++) print c[s] }' $1/metrics.jsonl; }; "
/* The two runs computed the same in the same number of steps, and have the same model. */
#define SAME(a, b, steps)                                                                          \
    CURVE "curve " a " > 1; curve " b " > 2; test $(wc -l < 1) = " steps " && cmp 1 2 && cmp " a   \
          "/model/model.safetensors " b "/model/model.safetensors"
/* Waits until the path exists, half a minute at most. */
#define AWAIT(path)                                                                                \
    "n=0; until ls -d " path                                                                       \
    " > /dev/null 2>&1 || test $n -ge 300; do sleep 0.1; n=$((n+1)); done; "

/* The command ends with this code and this sentence, and changes no file in the folder `out`; a
 * start that fails while it loads leaves its run-2.json there. */
static void refused(int code, const char *command, const char *words)
{
#define SUMS "find out -type f ! -name 'run-*' ! -name .lock | LC_ALL=C sort | xargs sha256sum "
    shell(&dir, SUMS "> before");
    shell_ends(&dir, code, command, words);
    shell(&dir, SUMS "| cmp - before");
}

/* Numbers of the model that only some families have are in its checkpoints. */
Test(checkpoints, a_model_with_windows_goes_on)
{
    shell(&dir, "sed -i 's/\"llama\"/\"mistral\", \"sliding_window\": 11/' model.json && "
                "grep -q mistral model.json");
    shell(&dir, TWO "--num-steps 6 --save-dir whole --checkpoint-frequency 2");
    shell_ends(&dir, 0,
               TWO "--num-steps 6 --save-dir out --checkpoint-frequency 2 "
                   "--resume-from-checkpoint whole/checkpoint-4",
               "resumed after step 4");
    shell(&dir, "cmp whole/model/model.safetensors out/model/model.safetensors");
}

Test(checkpoints, a_signal_saves_and_the_run_goes_on)
{
#define LONG "--num-steps 2000 --log-interval 500 --checkpoint-frequency 1500 "
#define STOPPED(resumed)                                                                           \
    "& pid=$!; n=0; until awk '/\"resumed\"/ { r++ } { step = /step_ms/ } END { exit !(step && r " \
    "== " resumed ") }' out/metrics.jsonl 2>/dev/null || test $n -ge 600; do sleep 0.05; "         \
    "n=$((n+1)); done; kill -%s $pid; wait $pid"
    static const char *const signals[] = {"USR1", "TERM", "INT"};
    shell(&dir, TWO LONG "--save-dir whole --save-total-limit 0");
    for (int i = 0; i < 3; i++) { /* a background job of a shell ignores INT */
        shell_ends(&dir, 75,
                   shell_line("env --default-signal=INT " TWO LONG
                              "--save-dir out --resume-from-checkpoint auto " STOPPED("%d"),
                              i, signals[i]),
                   "; to go on, give the same command with --save-dir /",
                   "/out --resume-from-checkpoint latest");
        shell(&dir,
              shell_line(
                  "test $(grep -c '\"reason\":\"signal\"' out/metrics.jsonl) = %d && ! test -e "
                  "out/model",
                  i + 1));
    }
    /* One whose last state has no checkpoint is no success of the signal. */
    shell_ends(&dir, 73,
               "ulimit -f 200; " TRAIN "--num-processes 1 --save-model false " LONG
               "--save-dir full & pid=$!; n=0; until grep -q step_ms full/metrics.jsonl "
               "2>/dev/null || test $n -ge 600; do sleep 0.05; n=$((n+1)); done; "
               "kill -TERM $pid; wait $pid",
               "is not saved: ", "whose checkpoint could not be saved");
    /* One that saves no more names the checkpoint that it went on from. */
    shell_ends(&dir, 75,
               shell_line(TWO LONG "--save-dir out --resume-from-checkpoint auto "
                                   "--checkpoint-frequency 0 --save-model false " STOPPED("3"),
                          "TERM"),
               "; the newest checkpoint is that of step ");
    shell(&dir, TWO LONG "--save-dir out --resume-from-checkpoint auto");
    shell(&dir, SAME("whole", "out", "2000"));
}

/* The same line in a batch script, whether the job is new, was requeued, or ended. */
Test(checkpoints, auto_begins_goes_on_and_ends)
{
    static const char command[] =
        TWO "--num-steps 6 --save-dir out --checkpoint-frequency 3 --resume-from-checkpoint auto";
    shell(&dir, command);
    shell(&dir, "grep -c resumed out/metrics.jsonl | grep -qx 0");
    shell_ends(&dir, 0, command, "resumed after step 6 from", "nothing is left to do after step 6");
    shell(&dir, "test -e out/model/model.safetensors && ! test -e out/model.old");
    /* The command of another run, which would take this one for its own. */
    static const char *const others[][2] = {
        {"--set model.seed=9",
         "model.seed was 42, and this one has 9; give another --save-dir for a run of its own, or "
         "more steps"},
        {"--learning-rate 7e-3 --resume-allow optimizer.lr",
         "optimizer.lr was 0.0003, and this one has 0.007"},
        {"--precision fp32", "train.precision was bf16, and this one has fp32"}};
    for (int i = 0; i < 3; i++) {
        refused(2, shell_line("%s %s", command, others[i][0]), others[i][1]);
    }
    /* The model of a later step goes before the checkpoints of later steps: a start that ends
     * between both leaves none that another start would take for its own. */
    shell_ends(&dir, 73,
               "strace -f -qq -o /dev/null -P $PWD/out/checkpoint-6 -e trace=renameat2 "
               "-e inject=renameat2:error=EROFS " TWO
               "--num-steps 3 --save-dir out --checkpoint-frequency 3 --resume-from-checkpoint 3",
               "Read-only file system");
    shell(&dir, "test -d out/checkpoint-6 && ! test -e out/model && mv out/model.old out/model");
    /* The model of a state that is gone is set aside, and one that was deleted is saved again. */
    shell(&dir, TWO "--num-steps 3 --save-dir out --checkpoint-frequency 3 "
                    "--resume-from-checkpoint 3 && test -e out/model.old && "
                    "cmp -s out/model/model.safetensors out/model.old/model.safetensors; "
                    "test $? = 1 && mv out/checkpoint-6.old out/checkpoint-6 && "
                    "rm -r out/model out/model.old");
    shell(&dir, command);
    shell(&dir, "test -e out/model/model.safetensors && ! test -e out/model.old");
    shell(&dir, "mv out/checkpoint-6 big && ln -s ../big out/checkpoint-6");
    shell_ends(&dir, 0, command, "nothing is left to do after step 6");
    shell_ends(&dir, 0,
               TWO "--num-steps 6 --save-dir out --checkpoint-frequency 3 "
                   "--resume-from-checkpoint 3",
               "checkpoint 6 is not before the one that the run goes on from");
    shell(&dir, "test -d out/checkpoint-6/state && test -L out/checkpoint-6.old && test -d big");
    /* A run that died before its first checkpoint begins again in its folder. */
    shell(&dir, "mv out whole; mkdir out; cp whole/run.json out; head -2 whole/metrics.jsonl > "
                "out/metrics.jsonl; printf '{\"step\":3,\"lo' >> out/metrics.jsonl");
    shell_ends(&dir, 0, command, "resumed after step 0 from the start");
    shell(&dir, SAME("whole", "out", "6"));
}

Test(checkpoints, latest_finds_the_newest_run_of_the_configuration)
{
    shell(&dir, TWO "--num-steps 4 --checkpoint-frequency 2");
    shell(&dir, TWO "--num-steps 3 --checkpoint-frequency 3");
    shell(&dir, TWO "--num-steps 1 --save-model false");
    shell_ends(&dir, 0, TWO "--num-steps 5 --checkpoint-frequency 3 --resume-from-checkpoint true",
               "runs/run-2/checkpoint-3");
    shell(&dir, "test -d runs/run-2/checkpoint-5 && ! test -e runs/run-4");
    shell_ends(&dir, 0, TWO "--num-steps 5 --resume-from-checkpoint runs/run-1",
               "runs/run-1/checkpoint-4");
    /* Another folder is given: the old run stays as it is. */
    shell_ends(&dir, 0,
               TWO "--num-steps 4 --save-dir fork --resume-from-checkpoint runs/run-1/checkpoint-2",
               "run folder: fork");
    shell(&dir, "grep '\"step\":3,' fork/metrics.jsonl && ! grep '\"step\":2,\"loss' "
                "fork/metrics.jsonl && ! test -e fork/run-2.json");
}

#define VALIDATED                                                                                  \
    TWO "--num-steps 4 --checkpoint-frequency 2 --save-model false --validation-path long.txt "    \
        "--set train.validation_interval=2 --save-dir "

#define SHORT " --set train.validation_batches=3 "
#define VALIDATIONS(run)                                                                           \
    "grep -o '\"step\":.*\"validation_loss\".*\"validation_tokens\":[0-9]*' " run "/metrics.jsonl"

/* The state of a step is durable long before its validation has ended, and a validation that was
 * cut off is made up, once. */
Test(checkpoints, a_failure_in_a_validation_costs_no_step)
{
    static const char *const signals[] = {"KILL", "TERM"};
    shell(&dir, "i=0; while [ $i -lt 500 ]; do cat text.txt; i=$((i+1)); done > long.txt");
    shell(&dir, VALIDATED "whole" SHORT "; " VALIDATIONS("whole") " > 1; test $(wc -l < 1) = 2");
    for (int i = 0; i < 2; i++) {
        shell_ends(&dir, i ? 75 : 137,
                   shell_line("rm -rf out; " VALIDATED
                              "out & pid=$!; " AWAIT("out/checkpoint-2") "kill -%s $pid; wait $pid",
                              signals[i]));
        shell(&dir, "test -d out/checkpoint-2 && ! grep validation_loss out/metrics.jsonl");
        shell_ends(&dir, 0, VALIDATED "out --resume-from-checkpoint latest" SHORT,
                   "resumed after step 2");
        shell(&dir, VALIDATIONS("out") " | cmp - 1");
    }
    shell_ends(&dir, 0, VALIDATED "out --resume-from-checkpoint latest" SHORT,
               "resumed after step 4");
    shell(&dir, VALIDATIONS("out") " | cmp - 1");
    /* With a damaged line the last validation is made again, and no earlier one is the best. */
    shell_ends(&dir, 0,
               "sed -i '1s/.*/damaged/' out/metrics.jsonl; " VALIDATED
               "out --resume-from-checkpoint latest" SHORT "--load-best-model-at-end true",
               "resumed after step 4", "validations before step 4 do not count for the best one");
    shell(&dir, VALIDATIONS("out") " > 2; tail -1 1 | cat 1 - | cmp - 2");
    shell_ends(&dir, 0,
               VALIDATED "fork --resume-from-checkpoint out --set train.validation_batches=2",
               "resume: a validation was over at most 6 sequences and is over at most 4");
}

#define RESUMED                                                                                    \
    "--num-steps 6 --save-dir out --checkpoint-frequency 2 --resume-from-checkpoint latest "

/* Without restarts, the end of a job tells how to go on. */
Test(checkpoints, a_failed_job_names_its_newest_checkpoint)
{
    shell_ends(&dir, 137,
               TWO "--num-steps 100000 --lr-scheduler constant --save-dir out --log-interval 50000 "
                   "--checkpoint-frequency 50 & pid=$!; " AWAIT(
                       "out/checkpoint-*") "kill -9 $(ps -o pid= --ppid $pid | tail -1); wait $pid",
               "the newest checkpoint is that of step ", "/out --resume-from-checkpoint latest");
}

Test(checkpoints, must_fit_the_run)
{
    shell(&dir, TWO "--num-steps 4 --save-dir out --checkpoint-frequency 2");
    refused(2, TWO RESUMED "--data-path other.txt", "other training data");
    refused(2, TWO RESUMED "--data-path '[text.txt, other.txt]'",
            ", whose order it goes on in, and this run has [text.txt, other.txt] (digest ");
    shell_ends(&dir, 0,
               TWO "--num-steps 6 --save-dir fork --resume-from-checkpoint out --data-path "
                   "other.txt --resume-allow data.path",
               "resume: data.path has another content (digest ");
    refused(2, TWO RESUMED "--model-config wide.json",
            "has intermediate_size 64, and the model of this run has 96");
    refused(2, TWO RESUMED "--micro-batch-size 2",
            "made with 2 samples a step, and this run has 4");
    says_not("for instance");
    shell_ends(&dir, 0,
               TWO "--num-steps 6 --save-dir twice --resume-from-checkpoint out --micro-batch-size "
                   "2 --resume-allow samples_per_step --checkpoint-frequency 9",
               "a step had 2 samples and has 4", "--resume-allow", "behind sample 8",
               "count on from 4");
    shell(&dir, "grep -q '\"samples_seen\": 16,' twice/checkpoint-6/manifest.json");
    refused(2, TRAIN "--num-processes 1 " RESUMED,
            "this run has 1; keep the product of train.micro_batch_size, "
            "train.gradient_accumulation_steps and the data-parallel ranks, for instance with "
            "--gradient-accumulation-steps 2");
    refused(2, TWO RESUMED "--sequence-length 32", "train.sequence_length 64, and this run has 32");
    refused(2, TWO RESUMED "--optimizer sgd", "optimizer.name adamw, and this run has sgd");
    refused(2, TWO RESUMED "--learning-rate 7e-3",
            "optimizer.lr 0.0003, and this run has 0.007; use the same value, or allow the change "
            "with --resume-allow optimizer.lr");
    refused(2, TWO RESUMED "--lr-scheduler linear --precision fp8 --seed 9",
            "give --resume-allow data.shuffle_seed,model.seed,train.precision,optimizer.schedule");
    shell_ends(&dir, 0,
               TWO "--num-steps 6 --save-dir colder --resume-from-checkpoint out "
                   "--learning-rate 7e-3 --resume-allow optimizer.lr --dump-tensors '*' "
                   "--dump-steps 4",
               "resume: optimizer.lr was 0.0003 and is 0.007",
               "no tensor is dumped: log.dump_steps is 4, and the run goes on after step 4");
    refused(2, TWO RESUMED "--resume-allow train.steps", "train.steps, which allows nothing");
    refused(2, TWO RESUMED "--set data.shuffle_seed=7", "data.shuffle_seed 42, and this run has 7");
    refused(2, TWO RESUMED "--num-steps 3", "already at step 4, and train.steps is 3");
    refused(65, TWO "--num-steps 6 --save-dir out --resume-from-checkpoint 3",
            "no checkpoint-3; the newest there are: checkpoint-2, checkpoint-4");
    refused(65, TWO "--num-steps 6 --resume-from-checkpoint nowhere", "there is no such folder");
    refused(65, TWO "--num-steps 6 --resume-from-checkpoint .", "holds no checkpoint");
    refused(65, TWO "--num-steps 6 --resume-from-checkpoint lates",
            "--resume-from-checkpoint (checkpoint.resume) is lates, but there is no such folder "
            "(did you mean latest?)");
    refused(2, TWO "--num-steps 6 --save-dir new --resume-from-checkpoint out --optimizer sgd",
            "optimizer.name adamw, and this run has sgd");
    shell_ends(&dir, 0,
               TWO "--num-steps 6 --save-dir plain --resume-from-checkpoint out --optimizer sgd "
                   "--resume-allow optimizer.name --checkpoint-verify false "
                   "--checkpoint-frequency 6",
               "has moments of AdamW, which are left out",
               "was loaded without comparing its checksums");
    shell_ends(&dir, 0,
               TWO "--num-steps 7 --save-dir adam --resume-from-checkpoint plain "
                   "--resume-allow optimizer.name --checkpoint-frequency 7",
               "has no moments of AdamW, so these begin at zero");
    shell_ends(&dir, 1, ND_TRAIN " ckpt diff plain adam", "\nexp_avg_sq: only in B\n");
    refused(65, TWO "--num-steps 6 --save-dir new --resume-from-checkpoint out/model",
            "holds no checkpoint: neither checkpoint-N nor manifest.json of ndtrain");
    shell(&dir, "! test -e new");
    refused(73, TWO "--num-steps 6 --save-dir out", "already holds a run");
    shell_ends(&dir, 0, TWO RESUMED "--data-path other.txt --resume-allow data.path",
               "resumed after step 4");
}

/* Rank 0 refuses to begin. The other rank waits for the name of the run folder, and
 * gets the failure. */
Test(checkpoints, no_rank_waits_for_a_folder_that_is_not_opened)
{
    static const char *const flags[] = {"--checkpoint-frequency 2", ""};
    inputs_write_model(&dir, 512, 1536, 2); /* more than 8 MiB */
    for (int i = 0; i < 2; i++) {
        shell_ends(
            &dir, 73,
            shell_line("ulimit -f 16384; " TWO "--num-steps 2 --save-dir out%d %s", i, flags[i]),
            "ulimit -f");
        says_not("did not end in time");
    }
}

/* Neither does one wait when rank 0 cannot rename a damaged checkpoint, or a later one. */
Test(checkpoints, no_rank_waits_for_a_checkpoint_that_cannot_be_set_aside)
{
    shell(&dir, TWO "--num-steps 4 --save-dir out --checkpoint-frequency 2 --save-model false && "
                    "truncate -s -1 $(ls out/checkpoint-4/state/*.safetensors | tail -1)");
    for (int i = 0; i < 2; i++) {
        shell_ends(
            &dir, 73,
            shell_line(
                "strace -f -qq -o /dev/null -e trace=renameat2 -e inject=renameat2:error=EROFS " TWO
                "--num-steps 6 --save-dir out --save-model false --resume-from-checkpoint %s",
                i ? "2" : "latest"),
            "Read-only file system");
        says_not("did not end in time");
        shell(&dir, "test -d out/checkpoint-4 && ! ls -d out/*.bad out/*.old 2>/dev/null");
    }
}

/* 2 shards, then 1 worker with the same samples a step, then tensor parallelism. */
Test(checkpoints, go_to_another_mesh)
{
    shell(&dir, TWO "--num-steps 2 --save-dir out --checkpoint-frequency 2 --precision fp32 "
                    "--lr-scheduler constant");
    shell_ends(&dir, 0,
               TRAIN "--num-processes 1 --micro-batch-size 2 --num-steps 4 --save-dir out "
                     "--checkpoint-frequency 2 --precision fp32 --lr-scheduler constant "
                     "--resume-from-checkpoint latest",
               "resume: mesh.dp_shard was 2 and is 1");
    says_not("no checkpoints are saved");
    says_not("a validation was over");
    shell_ends(&dir, 0,
               TRAIN "--num-processes 4 --tp-size 2 --dp-shard-size 2 --num-steps 6 --save-dir out "
                     "--precision fp32 --lr-scheduler constant --resume-from-checkpoint latest",
               "resumed after step 4", "with --checkpoint-frequency 2 they are, as before",
               "the mesh was 1 x 1 x 1 x 1 (");
    shell(&dir, "grep -q '\"mesh\":\"1 x 1 x 1 x 1 (.*\"mesh_was\":\"1 x 2 x 1 x 1 (' "
                "out/metrics.jsonl && test $(grep -c mesh_was out/metrics.jsonl) = 2");
    shell(&dir,
          TWO "--num-steps 6 --save-dir whole --precision fp32 --lr-scheduler constant && " CURVE
              "curve whole > 1; curve out > 2; test $(wc -l < 2) = 6 && "
              "paste -d: 1 2 | awk -F: '{ a = $3 + 0; b = $10 + 0; d = a - b; "
              "if (d * d > 1e-10) exit 1 }'");
}

Test(checkpoints, a_damaged_one_is_set_aside_for_the_one_before)
{
    shell(&dir, TWO "--num-steps 6 --save-dir out --checkpoint-frequency 2");
    shell(&dir, "truncate -s -1 $(ls out/checkpoint-6/state/*.safetensors | tail -1)");
    /* A checkpoint that was named is not replaced by another. */
    refused(65, TWO "--num-steps 8 --save-dir out --resume-from-checkpoint 6 2>&1", "checkpoint-6");
    shell(&dir, "test -d out/checkpoint-6 && ! test -e out/checkpoint-6.bad");
    /* Another run that begins with these finds the next good one, and renames nothing here. */
    shell_ends(&dir, 0,
               "timeout 60 " TWO "--num-steps 8 --save-dir other --resume-from-checkpoint out",
               "resumed after step 4");
    shell(&dir, "test -d out/checkpoint-6 && ! test -e out/checkpoint-6.bad");
    /* A fresh run that could not begin leaves its folder to the next. */
    refused(65, TWO "--num-steps 8 --save-dir fork --resume-from-checkpoint out/checkpoint-6",
            "checkpoint-6");
    shell_ends(&dir, 0,
               TWO "--num-steps 5 --save-dir fork --resume-from-checkpoint out/checkpoint-4",
               "resumed after step 4");
    shell(&dir, "test -e fork/run.json && ! test -e fork/run-2.json");
    shell(&dir, "for c in 2 4 6; do truncate -s 9 out/checkpoint-$c/manifest.json; done");
    refused(65, TWO RESUMED, "no checkpoint that can be used");
    /* Once they are set aside, auto does not begin afresh over them. */
    shell(&dir, "for c in 2 4 6; do mv out/checkpoint-$c out/checkpoint-$c.bad; done");
    refused(65, TWO "--num-steps 6 --save-dir out --resume-from-checkpoint auto",
            "checkpoint-4.bad");
}

/* Neither is another run gone on from, nor are its checkpoints renamed. */
Test(checkpoints, a_damaged_one_is_not_replaced_by_that_of_another_run)
{
    static const char *const words[] = {"latest", "auto"};
    shell(&dir, TWO "--num-steps 4 --checkpoint-frequency 2 --save-model false");
    shell(&dir, TWO "--num-steps 3 --checkpoint-frequency 3 --save-model false; mv runs/run-2 a");
    for (int i = 0; i < 2; i++) {
        char command[COMMAND_MAX];
        shell(&dir, "rm -rf runs/run-2; cp -r a runs/run-2; truncate -s -1 "
                    "$(ls runs/run-2/checkpoint-3/state/*.safetensors | tail -1)");
        snprintf(command, sizeof command,
                 TWO "--num-steps 6 --checkpoint-frequency 2 --resume-from-checkpoint %s",
                 words[i]);
        shell_ends(&dir, 65, command, "no checkpoint of ", "runs/run-2 can be used");
        shell(&dir, "test -d runs/run-2/checkpoint-3.bad && test -d runs/run-1/checkpoint-4 && "
                    "! ls -d runs/run-1/*.old runs/run-1/*.bad 2>/dev/null");
        /* Nor when the job is started again. */
        shell_ends(&dir, 65, command, "checkpoint-3.bad is damaged");
    }
}

/* Nor does a run without checkpoints share its own. */
Test(checkpoints, two_runs_do_not_share_a_folder)
{
    static const char *const firsts[][2] = {{"--checkpoint-frequency 50", "out/checkpoint-50"},
                                            {"--save-model false", "out/metrics.jsonl"}};
    for (int i = 0; i < 2; i++) {
        shell_ends(
            &dir, 73,
            shell_line("rm -rf out; " TWO
                       "--num-steps 100000 --lr-scheduler constant --save-dir out %s "
                       "> log 2>&1 & pid=$!; " AWAIT("%s") TWO
                       "--num-steps 100000 --lr-scheduler constant --save-dir out "
                       "--resume-from-checkpoint auto; code=$?; kill $pid; wait $pid; exit $code",
                       firsts[i][0], firsts[i][1]),
            "another process trains in");
        says_not("did not end in time");
    }
}

Test(checkpoints, a_full_disk_costs_the_checkpoint_and_not_the_run)
{
    shell_needs_disk(&dir, "small");
    inputs_write_model(&dir, 128, 256, 2); /* 4 MB a checkpoint: room for one, not for two */
    shell_ends(&dir, 0,
               "unshare -rm sh -c \"mount -t tmpfs -o size=7000k none small && " TWO
               "--num-steps 6 --save-dir small/out --checkpoint-frequency 2 --save-model false; "
               "code=\\$?; cp -r small/out out; exit \\$code\"",
               "keeping 4 more checkpoints", "the checkpoint of step 4 is not saved: ");
    shell(&dir, "test -d out/checkpoint-2 && grep -q checkpoint_failed out/metrics.jsonl && "
                "! ls -d out/.tmp* 2>/dev/null");
    shell_ends(&dir, 73,
               "unshare -rm sh -c \"mount -t tmpfs -o size=7000k none small && " TWO
               "--num-steps 6 --save-dir small/out --checkpoint-frequency 2 --save-model false "
               "--checkpoint-on-error stop\"");
    shell_ends(&dir, 73,
               "unshare -rm sh -c \"mount -t tmpfs -o size=4000k none small && " TWO
               "--num-steps 6 --save-dir small/out --checkpoint-frequency 2\"",
               "a checkpoint");
    /* Two fit, and leave no room for a third. */
    shell_ends(&dir, 73,
               "unshare -rm sh -c \"mount -t tmpfs -o size=10500k none small && " TWO
               "--num-steps 4 --save-dir small/out --checkpoint-frequency 2 "
               "--save-model false && " TWO
               "--num-steps 6 --save-dir small/out --checkpoint-frequency 2 "
               "--save-model false --resume-from-checkpoint latest\"",
               "of the 2 checkpoints there `ndtrain ckpt prune ");
}

/* Makes ./worker, which runs a command in a place of mounts of its own before it becomes rank 1. */
#define WORKER(command)                                                                            \
    "cat > worker <<'END'\n#!/bin/sh\ntest \"$RANK $1\" = '1 train' && exec unshare -rm sh -c "    \
    "'" command " && exec \"$0\" \"$@\"' " ND_TRAIN " \"$@\"\nexec " ND_TRAIN                      \
    " \"$@\"\nEND\nchmod +x worker"

/* Rank 1 alone has a disk of its own where rank 0 has the run folder: without a folder of that
 * name, with one, and with one that holds a run. */
Test(checkpoints, a_run_folder_that_some_rank_does_not_see_is_refused)
{
    static const char *const cases[][2] = {
        {"true", "nothing is /"},
        {"mkdir mine/out", "another folder is /"},
        {"mkdir mine/out && echo {} > mine/out/run.json", "another folder is /"}};
    shell_needs_disk(&dir, "mine");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        shell(&dir, shell_line(WORKER("mount -t tmpfs none mine && %s"), cases[i][0]));
        shell_ends(&dir, 73,
                   "ND_WORKER=./worker " TWO "--num-steps 4 --save-dir mine/out "
                   "--checkpoint-frequency 2 --set launch.comm_timeout_seconds=10",
                   "rank 1 on ", cases[i][1]);
        shell(&dir, "! ls -d mine/out/*checkpoint-* mine/out/run.json 2>/dev/null");
    }
}

/* Rank 1 alone reads other bytes in the newest checkpoint: memory or a cache of its host is bad. */
Test(checkpoints, damage_that_one_rank_alone_finds_condemns_no_checkpoint)
{
    shell(&dir, TWO "--num-steps 4 --save-dir out --checkpoint-frequency 2 --save-model false && "
                    "cp -r out/checkpoint-4 bad");
    shell(&dir, "for f in bad/state/*.safetensors; do printf wrong | dd of=$f bs=1 conv=notrunc "
                "seek=$(($(stat -c %s $f) - 9)) 2>/dev/null; done");
    shell_needs_disk(&dir, "mine");
    shell(&dir, WORKER("mount --bind bad out/checkpoint-4"));
    refused(74,
            "ND_WORKER=./worker " TWO "--num-steps 6 --save-dir out --checkpoint-frequency 2 "
            "--resume-from-checkpoint latest",
            "finds damage where rank 0 finds none");
}

/* Each write takes four seconds, and the update may wait for one. */
Test(checkpoints, a_disk_that_does_not_answer_has_a_deadline)
{
    shell_ends(&dir, 124,
               "strace -f -qq -o /dev/null -e trace=pwrite64 -e "
               "inject=pwrite64:delay_enter=4000000 " ND_TRAIN
               " train --device cpu --model-config model.json --data-path text.txt "
               "--validation-path '' --sequence-length 64 --num-steps 6 --save-dir out "
               "--checkpoint-frequency 2 --set launch.comm_timeout_seconds=1",
               "does not answer");
}

/* The checkpoint of the last step has the model that the run saves. */
Test(checkpoints, can_be_models_too)
{
    shell(&dir, TWO "--num-steps 4 --save-dir out --checkpoint-frequency 2 "
                    "--checkpoint-export-model true --checkpoint-checksum sha256 "
                    "--checkpoint-staging wait");
    shell(&dir,
          "for f in model.safetensors config.json tokenizer.json; do cmp out/model/$f "
          "out/checkpoint-4/$f || exit 1; done; grep -q sha256 out/checkpoint-4/manifest.json");
    shell_ends(&dir, 0,
               TWO "--num-steps 6 --save-dir out --resume-from-checkpoint 2 "
                   "--checkpoint-frequency 9",
               "resumed after step 2", "from here on checkpoints hold no Hugging Face model");
}
