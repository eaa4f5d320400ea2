#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs over several sources, and over epochs, that end at a checkpoint and go on."""
import re

import steps
from steps import check, test

TRAIN = "ndlaunch --device cpu --model-config model.json --sequence-length 64 --precision fp32 --save-dtype fp32 --log-level info"
TWO = f"{TRAIN} --num-processes 2 --dp-shard-size 2 --micro-batch-size 2"


def setup(t):
    """Three sources of 40, 30 and 8 blocks."""
    text = t.text()
    for name, begin, blocks in ("text", 0, 40), ("b", 7000, 30), ("c", 14000, 8):
        t.write(f"{name}.txt", text[begin:begin + blocks * 65])
    t.model(hidden_size=32, intermediate_size=64)


@test
def a_resumed_blend_is_the_run_that_was_not_stopped(t):
    """Four samples a step: the third source gives its 8 in 40 samples, which are over with step 10."""
    blend = ("--data-path '[{path: text.txt, weight: 0.5}, {path: b.txt, weight: 0.3}, {path: c.txt, weight: 0.2, epochs: 1}]' "
             "--validation-path '' --num-steps 12 --checkpoint-frequency 5 --save-total-limit 0")
    t.run(f"{TWO} {blend} --save-dir whole", says="source c: 520 tokens, 8 blocks; 16.7 % of the samples, which read it 1 times\n")
    check(re.findall('"samples": ([0-9]+)', t.read("whole/run.json")) == ["25", "15", "8"], t.read("whole/run.json"))
    tokens = {step: row["source_tokens"] for step, row in t.curve("whole").items()}
    check(list(tokens[12]) == ["text", "b", "c"] and tokens[12]["c"] == 0 and (tokens[6]["c"] > 0 or tokens[7]["c"] > 0), tokens)
    t.run(f"{TWO} {blend} --save-dir out --resume-from-checkpoint whole/checkpoint-5")
    whole = t.curve("whole", behind=5)
    check(len(whole) == 7 and t.curve("out") == whole, (whole, t.curve("out")))
    t.same("whole/model/model.safetensors", "out/model/model.safetensors")
    # On another mesh the samples are the same, and sums are formed in another order.
    t.run(f"{TRAIN} {blend} --num-processes 4 --tp-size 2 --cp-size 2 --micro-batch-size 4 --save-dir other "
          "--resume-from-checkpoint whole/checkpoint-5")
    other = t.curve("other", behind=5)
    check(list(other) == list(whole), other)
    for step, row in whole.items():
        check(other[step]["source_tokens"] == row["source_tokens"] and abs(other[step]["loss"] - row["loss"]) <= 1e-5, (row, other[step]))


@test
def epochs_settle_the_end_saves_and_validations(t):
    """40 blocks, 4 a step: an epoch is 10 steps."""
    epochs = (f"{TWO} --data-path text.txt --validation-path b.txt --validation-batches 1 --checkpointing-steps epoch "
              "--eval-strategy epoch --save-total-limit 0")

    def steps_of(run, key):
        return [row["step"] for row in t.metrics(run) if key in row or row.get("event") == key]

    t.run(f"{epochs} --num-train-epochs 2.55 --save-dir out", says="train.epochs 2.55 of 40 samples, 4 a step: 26 steps")
    for key in "validation_loss", "checkpoint":
        check(steps_of("out", key) == [10, 20, 26], (key, t.metrics()))
    folders = {path.name for path in (t.folder / "out").glob("checkpoint-*")}
    check(folders == {"checkpoint-10", "checkpoint-20", "checkpoint-26"} and len(steps_of("out", "step_ms")) == 26, folders)
    record = t.read("out/run.json")
    check('"train.steps": 26,' in record and len(re.findall('"(train.validation_|checkpoint.)interval": 10,', record)) == 2, record)
    # A resumed run ends where the one that was not stopped did.
    t.run(f"{epochs} --num-train-epochs 2.55 --save-dir fork --resume-from-checkpoint out/checkpoint-20")
    check(steps_of("fork", "validation_loss") == [26], t.metrics("fork"))
    check(len(t.curve("fork")) == 6 and t.curve("fork") == t.curve("out", behind=20), t.curve("fork"))
    t.same("out/model/model.safetensors", "fork/model/model.safetensors")
    # More of them go on.
    t.run(f"{epochs} --num-train-epochs 3 --save-dir more --resume-from-checkpoint out/checkpoint-26")
    check(steps_of("more", "validation_loss") == [30], t.metrics("more"))


steps.main("sources", setup)
