#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""No allocation inside a step or a validation: a run of 12 makes exactly as many allocations of its own as a run of 2, on every rank. Nor
does a new token allocate. (The preflight's RANK is 0 too, but rank 0 ends later and writes last.)"""
import steps
from steps import check, test


def setup(t):
    t.write("text.txt", 20000 * "x")
    lines, length = [], 1
    while sum(map(len, lines)) < 20000:
        lines.append("\n" + (length - 1) * "x")
        length = length * 7 % 41
    t.write("lines.txt", "".join(lines)[:20000])
    t.model(hidden_size=32, intermediate_size=64)


def counts(t, words):
    """The allocations of each rank."""
    t.remove("counts")
    (t.folder / "counts").mkdir()
    t.run(words, LD_PRELOAD=str(t.build / "tests/e2e/libnd_count_allocations.so"), ND_COUNT_DIR="counts")
    return {path.name: int(path.read_text()) for path in (t.folder / "counts").iterdir()}


def expect_equal(few, many, ranks, what):
    """Runs of few and of many of these things allocate alike."""
    check(len(few) == ranks and min(few.values()) > 10, f"the counter counts {few}")
    check(few == many, f"{what}: {few} allocations, and with more {many}")


@test
def none_for_a_new_token(t):
    """Three requests in two slots, without a tokenizer: a text would grow."""
    t.write("rows.jsonl", [dict(ids=[1, 2, 3]), dict(ids=[4, 5, 6]), dict(ids=[7])])
    t.run("ndlaunch --device cpu --set model.config=model.json --set data.path=text.txt --sequence-length 64 --num-steps 1 "
          "--num-processes 1 --output-dir out --set data.validation_path=")
    t.remove("out/model/tokenizer.json", "out/model/SHA256SUMS")
    for mesh in "--num-processes 1", "--num-processes 2 --tp-size 2", "--num-processes 1 --temperature 1 --top-p 0.9":
        both = []
        for tokens in 8, 80:
            both.append(counts(t, "ndlaunch generate --model out/model --prompt-file rows.jsonl --max-batch 2 --ignore-eos "
                                  f"--max-new-tokens {tokens} {mesh}"))
            check(t.out.count(f'"new_tokens":{tokens},') == 3, t.out)
        expect_equal(*both, 1 + ("tp" in mesh), f"72 more tokens with {mesh}")


@test
def none_inside_a_step(t):
    for ranks, mesh in (
            (1, "--dp-shard-size 1"), (4, "--dp-shard-size 2 --tp-size 2"),
            (4, "--dp-shard-size 2 --tp-size 2 --precision fp8 --fp8-all-gather --fp8-filter mlp --fp8-health-interval 1"),
            (1, "--dp-shard-size 1 --precision fp8 --fp8-recipe rowwise --fp8-health-interval 1"),
            (2, "--dp-shard-size 2 --precision fp8 --fp8-recipe delayed"),
            (4, "--dp-replicate-size 2 --dp-shard-size 1 --cp-size 2 --set parallel.cp_comm=ring --set parallel.recompute=full --data-path "
                "'[{path: text.txt, weight: 2}, {path: text.txt, weight: 1}]' --validation-path '[text.txt, text.txt]'"),
            (4, "--cp-size 4 --sequence-length 128 --documents separate --data-path lines.txt --set data.end_of_text=10 "
                "--validation-path lines.txt")):
        both = []
        for number in 2, 12:
            t.remove("out")
            both.append(counts(t, "ndlaunch --device cpu --set model.config=model.json --set data.path=text.txt --sequence-length 64 "
                                  f"--num-steps {number} --set optimizer.schedule=constant --set train.gradient_accumulation_steps=2 "
                                  "--set log.interval=1 --set data.validation_path=text.txt --set train.validation_interval=1 "
                                  "--set train.validation_batches=1 --set output.save_model=false --set output.dir=out "
                                  f"--log-with tensorboard --num-processes {ranks} {mesh}"))
        expect_equal(*both, ranks, f"10 more steps with {mesh}")


steps.main("allocations", setup)
