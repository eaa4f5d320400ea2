// SPDX-License-Identifier: Apache-2.0
/* Runs over several sources, and over epochs, that end at a checkpoint and go on. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/inputs.h"
#include "tests/support/shell.h"

enum { S = 64 };

static tempdir dir;

/* Three sources of 40, 30 and 8 blocks. */
static void setup(void)
{
    const char *text = inputs_write_text(&dir, 40 * (S + 1));
    tempdir_write(&dir, "b.txt", text + 7000, 30 * (S + 1));
    tempdir_write(&dir, "c.txt", text + 14000, 8 * (S + 1));
    inputs_write_model(&dir, 32, 64, 2);
}

TEMPDIR_SUITE(sources, setup, .timeout = 120);

#define TRAIN                                                                                      \
    ND_LAUNCH                                                                                      \
    " --device cpu --model-config model.json --sequence-length 64 --precision fp32 --save-dtype "  \
    "fp32 --log-level info "
#define TWO TRAIN "--num-processes 2 --dp-shard-size 2 --micro-batch-size 2 "
/* "steps RUN N": what the run computed in each step behind step N, without times and traffic. */
#define STEPS                                                                                      \
    "steps() { sed -n 's/,\"wire_bytes.*\"step_ms.*//p' $1/metrics.jsonl | awk -F'[:,]' -v n=$2 "  \
    "'$2 > n'; }; "

/* Four samples a step: the third source gives its 8 in 40 samples, which are over with step 10. */
#define BLEND                                                                                      \
    "--data-path '[{path: text.txt, weight: 0.5}, {path: b.txt, weight: 0.3}, "                    \
    "{path: c.txt, weight: 0.2, epochs: 1}]' --validation-path '' --num-steps 12 "                 \
    "--checkpoint-frequency 5 --save-total-limit 0 "

Test(sources, a_resumed_blend_is_the_run_that_was_not_stopped)
{
    shell(&dir, TWO BLEND "--save-dir whole");
    says("source c: 520 tokens, 8 blocks; ", "which read it 1 times\n");
    shell(&dir,
          "test \"$(sed -n 's/ *\"samples\": //p' whole/run.json | tr -d '\\n')\" = 25,15,8,");
    shell(&dir, "t='\"source_tokens\":{\"text\":[0-9]*,\"b\":[0-9]*,\"c\":'; "
                "grep '^{\"step\":12,' whole/metrics.jsonl | grep -q \"$t\"0 && "
                "grep '^{\"step\":[67],' whole/metrics.jsonl | grep -q \"$t\"[1-9]");
    shell(&dir, TWO BLEND "--save-dir out --resume-from-checkpoint whole/checkpoint-5");
    shell(&dir, STEPS "steps whole 5 > 1; steps out 0 > 2; test $(wc -l < 2) = 7 && cmp 1 2 && "
                      "cmp whole/model/model.safetensors out/model/model.safetensors");
    /* On another mesh the samples are the same, and sums are formed in another order. */
    shell(&dir, TRAIN BLEND "--num-processes 4 --tp-size 2 --cp-size 2 --micro-batch-size 4 "
                            "--save-dir other --resume-from-checkpoint whole/checkpoint-5");
    shell(&dir, STEPS "for r in whole other; do steps $r 5 > $r.steps; "
                      "grep -o '\"source_tokens\":{[^}]*}' $r.steps > $r.tokens; done; "
                      "test $(wc -l < other.tokens) = 7 && cmp whole.tokens other.tokens && "
                      "paste -d: whole.steps other.steps | awk -F'\"loss\":' 'NF != 3 { exit 1 } "
                      "{ d = $2 - $3; if (d * d > 1e-10) exit 1 }'");
}

/* 40 blocks, 4 a step: an epoch is 10 steps. */
#define EPOCHS                                                                                     \
    TWO "--data-path text.txt --validation-path b.txt --validation-batches 1 "                     \
        "--checkpointing-steps epoch --eval-strategy epoch --save-total-limit 0 "
#define EXPECT_STEPS(run, pattern, steps)                                                          \
    shell(&dir, "test \"$(grep -E '" pattern "' " run "/metrics.jsonl | "                          \
                "grep -oE '\"step\":[0-9]+' | tr -dc '0-9\\n' | tr '\\n' ' ')\" = '" steps " '")

Test(sources, epochs_settle_the_end_saves_and_validations)
{
    shell(&dir, EPOCHS "--num-train-epochs 2.55 --save-dir out");
    says("train.epochs 2.55 of 40 samples, 4 a step: 26 steps");
    EXPECT_STEPS("out", "validation_loss", "10 20 26");
    EXPECT_STEPS("out", "\"event\":\"checkpoint\"", "10 20 26");
    shell(&dir, "test \"$(ls -d out/checkpoint-* | sort -V | tr '\\n' "
                "' ')\" = "
                "'out/checkpoint-10 out/checkpoint-20 out/checkpoint-26 ' && "
                "test $(grep -c '\"step_ms\"' out/metrics.jsonl) = 26");
    shell(&dir, "grep -qF '\"train.steps\": 26,' out/run.json && test $(grep -cE "
                "'\"(train.validation|checkpoint.)_?interval\": 10,' out/run.json) = 2");
    /* A resumed run ends where the one that was not stopped did. */
    shell(&dir, EPOCHS "--num-train-epochs 2.55 --save-dir fork --resume-from-checkpoint "
                       "out/checkpoint-20");
    EXPECT_STEPS("fork", "validation_loss", "26");
    shell(&dir, STEPS "steps out 20 > 1; steps fork 0 > 2; test $(wc -l < 2) = 6 && cmp 1 2 && "
                      "cmp out/model/model.safetensors fork/model/model.safetensors");
    /* More of them go on. */
    shell(&dir, EPOCHS "--num-train-epochs 3 --save-dir more --resume-from-checkpoint "
                       "out/checkpoint-26");
    EXPECT_STEPS("more", "validation_loss", "30");
}
