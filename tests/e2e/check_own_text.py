#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""README.md's three commands from a text to a model that writes, as they stand there.

They run in a folder that looks like a clone of the project with a model in it, under the name that the README uses, but tiny.
"""
import gzip
import json
import os
import re
import shutil

import steps
from steps import SOURCE, check, test

ROWS, VALIDATION_PART = 400, 20


def read_commands():
    section = re.search(r"^## Your own text\n(.*?)^## ", (SOURCE / "README.md").read_text(), re.M | re.S)
    check(section, 'README.md has no section "Your own text"')
    block = re.search(r"(?:^    .*\n)+", section[1], re.M)
    commands = [line.strip() for line in block[0].splitlines()] if block else []
    starts = ["scripts/prepare_data --from ", "ndlaunch ", "ndtrain generate "]
    check(len(commands) == 3 and all(c.startswith(s) for c, s in zip(commands, starts)), f"the three commands of README.md: {commands}")
    return commands


def setup(t):
    t.commands = split, train, _ = read_commands()
    os.environ |= dict(XDG_CACHE_HOME=str(t.folder / "cache"), CUDA_VISIBLE_DEVICES="")
    for source, place in (SOURCE / "scripts/prepare_data", "scripts"), (SOURCE / "tests/unit/trainer/text/goldens/llama3.json", "tokenizer"):
        (t.folder / place).mkdir()
        shutil.copy(source, t.folder / place)
    (t.folder / "tokenizer/llama3.json").rename(t.folder / "tokenizer/tokenizer.json")
    t.write("tokenizer/tokenizer_config.json", '{"eos_token": "<|eot|>"}')
    t.rows = [json.dumps(dict(prompt=f"What is {n}?", completion=f" The number after {n - 1}, and before {n + 1}.\n") if n % 2 else
                         dict(text=f"Once upon a time there were {n} birds on a tree, and the cat waited {n} days.\n")) for n in range(ROWS)]
    t.write(re.search(r"--from (\S+)", split)[1], gzip.compress("".join(row + "\n" for row in t.rows).encode()))
    t.place = re.search(r"--model-path (\S+)", train)[1]


@test
def from_a_text_to_a_model_that_writes(t):
    split, train, generate = t.commands
    t.model("config.json", vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, max_position_embeddings=2048)
    t.write("any.txt", 100 * "any text\n")
    t.run("ndlaunch --model-config config.json --tokenizer tokenizer --data-path any.txt --sequence-length 32 --num-steps 1 "
          "--set output.dir=first")
    (t.folder / "first/model").rename(t.folder / t.place)
    t.remove("cache")
    t.run(split)
    t.run(train, says="validation loss ")
    counted = re.search(r"training data: (\d+) of (\d+) tokens count in the loss", t.out + t.log)
    check(counted and 0 < int(counted[1]) < int(counted[2]), f"prompts do not count: {t.out}{t.log}")
    run = re.search(r"--save-dir (\S+)", train)[1]
    losses = t.metrics(run, "loss")
    check(len(losses) > 1 and losses[-1] < losses[0] - 1, f"what was learned: {losses[0]} to {losses[-1]} in {len(losses)} steps")
    for name in "tokenizer.json", "tokenizer_config.json":
        t.same(f"{run}/model/{name}", f"tokenizer/{name}")
    caches = sorted(path.suffix for path in (t.folder / "cache/ndtrain").iterdir())
    check(caches == [".tokens", ".tokens"], f"one cache for each file: {caches}")
    check(t.run(generate).strip(), "nothing is written")


@test
def rows_of_the_split(t):
    split, train, _ = t.commands
    t.run(split)
    for name, wanted in (("train", [r for n, r in enumerate(t.rows, 1) if n % VALIDATION_PART]),
                         ("valid", [r for n, r in enumerate(t.rows, 1) if n % VALIDATION_PART == 0])):
        check(t.read(f"data/{name}.jsonl").splitlines() == wanted, f"data/{name}.jsonl has other rows")
        check(f"data/{name}.jsonl" in train and f"data/{name}.jsonl" in t.out, f"data/{name}.jsonl is named in both places: {t.out}")
    # Another text beside the first one, which stays as it is.
    before = {path: path.read_bytes() for path in (t.folder / "data").iterdir()}
    t.run(f"{split} --output-prefix other", says=("data/other-train.jsonl", "--data-path data/other-train.jsonl"))
    t.run(f"{split} --output-prefix deep/er/own")
    for stem in "data/other", "deep/er/own":
        lines = sum(len(t.read(f"{stem}-{name}.jsonl").splitlines()) for name in ("train", "valid"))
        check(lines == len(t.rows), f"{stem} has {lines} rows")
    check(all(path.read_bytes() == content for path, content in before.items()), "the first text has changed")


@test
def what_training_refuses_the_split_refuses(t):
    """Before it, and writes nothing."""
    good = '{"text": "a"}\n'
    for name, text, words in (
            ("a.jsonl", good * 30 + '{"text": "x', "line 31, column 10: broken JSON"),
            ("b.jsonl", good + '{"conversations": [{"from": "human", "value": "x"}]}\n', 'line 2: it has "conversations"; rename this key to "messages"'),
            ("c.jsonl", '{"body": "x"}\n', 'line 1: it has no string "text"'),
            ("d.csv", "a,b\n1,2\n", "is a table; write its column of text as JSON lines"),
            ("e.json", '[{"text": "a"}]', "is JSON; write it as JSON lines")):
        t.write(name, text)
        t.run(f"scripts/prepare_data --from {name} --output-prefix refused", 2, words)
    check(not t.has("data/refused*"), "a refused text leaves nothing")


steps.main("own_text", setup)
