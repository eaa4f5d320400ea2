#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""README.md's three commands from a text to a model that writes, as they stand there: check_own_text.py SOURCE BUILD.

They run in a folder that looks like a clone of the project with a model in it, under the name that the README uses, but tiny.
"""
import gzip
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from steps import check

SOURCE, BUILD = (pathlib.Path(path) for path in sys.argv[1:3])
MODEL = {"model_type": "llama", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 2048}
ROWS, VALIDATION_PART = 400, 20


def read_commands():
    text = (SOURCE / "README.md").read_text()
    section = re.search(r"^## Your own text\n(.*?)^## ", text, re.M | re.S)
    check(section, 'README.md has no section "Your own text"')
    block = re.search(r"(?:^    .*\n)+", section[1], re.M)
    commands = [line.strip() for line in block[0].splitlines()] if block else []
    starts = ["scripts/prepare_data --from ", "ndlaunch ", "ndtrain generate "]
    check(len(commands) == 3 and all(c.startswith(s) for c, s in zip(commands, starts)), f"the three commands of README.md: {commands}")
    return commands


def run(clone, command):
    environment = {**os.environ, "PATH": f"{BUILD}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(clone / "cache"),
                   "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", "-c", command], cwd=clone, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=1000)
    check(done.returncode == 0, f"{command}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout, done.stderr


def make_model(clone, name):
    tokenizer = clone / "tokenizer"
    tokenizer.mkdir()
    shutil.copy(SOURCE / "tests/unit/trainer/text/goldens/llama3.json", tokenizer / "tokenizer.json")
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": "<|eot|>"}')
    (clone / "config.json").write_text(json.dumps(MODEL))
    (clone / "any.txt").write_text("any text\n" * 100)
    run(clone, "ndlaunch --model-config config.json --tokenizer tokenizer --data-path any.txt --sequence-length 32 --num-steps 1 "
               "--set output.dir=first")
    os.rename(clone / "first/model", clone / name)
    shutil.rmtree(clone / "cache")


def write_rows(path):
    rows = [json.dumps({"prompt": f"What is {n}?", "completion": f" The number after {n - 1}, and before {n + 1}.\n"} if n % 2 else
                       {"text": f"Once upon a time there were {n} birds on a tree, and the cat waited {n} days.\n"})
            for n in range(ROWS)]
    with gzip.open(path, "wt") as file:
        file.writelines(row + "\n" for row in rows)
    return rows


def check_rows(clone, commands, rows):
    out, _ = run(clone, commands[0])
    for name, wanted in (("train", [r for n, r in enumerate(rows, 1) if n % VALIDATION_PART]),
                         ("valid", [r for n, r in enumerate(rows, 1) if n % VALIDATION_PART == 0])):
        check((clone / f"data/{name}.jsonl").read_text().splitlines() == wanted, f"data/{name}.jsonl has other rows")
        check(f"data/{name}.jsonl" in commands[1] and f"data/{name}.jsonl" in out, f"data/{name}.jsonl is named in both places: {out}")


def check_prefix(clone, command, rows):
    """Another text beside the first one, which stays as it is."""
    before = {path.name: path.read_bytes() for path in (clone / "data").iterdir()}
    out, _ = run(clone, command + " --output-prefix other")
    check("data/other-train.jsonl" in out and "--data-path data/other-train.jsonl" in out, f"the files' names: {out}")
    run(clone, command + " --output-prefix deep/er/own")
    for stem in ("data/other", "deep/er/own"):
        lines = sum(len((clone / f"{stem}-{name}.jsonl").read_text().splitlines()) for name in ("train", "valid"))
        check(lines == len(rows), f"{stem} has {lines} rows")
    check(all((clone / "data" / name).read_bytes() == content for name, content in before.items()), "the first text has changed")


def check_refusals(clone):
    """What training refuses, the split refuses before it, and writes nothing."""
    good = '{"text": "a"}\n'
    cases = [("a.jsonl", good * 30 + '{"text": "x', 'line 31, column 10: broken JSON'),
             ("b.jsonl", good + '{"conversations": [{"from": "human", "value": "x"}]}\n', 'line 2: it has "conversations"; rename this key to "messages"'),
             ("c.jsonl", '{"body": "x"}\n', 'line 1: it has no string "text"'),
             ("d.csv", "a,b\n1,2\n", "is a table; write its column of text as JSON lines"),
             ("e.json", "[{\"text\": \"a\"}]", "is JSON; write it as JSON lines")]
    for name, text, words in cases:
        (clone / name).write_text(text)
        done = subprocess.run(["scripts/prepare_data", "--from", name, "--output-prefix", "refused"], cwd=clone, text=True,
                              stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, stdout=subprocess.PIPE, timeout=100)
        check(done.returncode == 2 and words in done.stderr, f"{name} ended with {done.returncode}: {done.stdout}{done.stderr}")
    check(not list((clone / "data").glob("refused*")), "a refused text leaves nothing")


def check_run(clone, command):
    folder = clone / re.search(r"--save-dir (\S+)", command)[1]
    out, errors = run(clone, command)
    said = out + errors
    counted = re.search(r"training data: (\d+) of (\d+) tokens count in the loss", said)
    check(counted and 0 < int(counted[1]) < int(counted[2]), f"prompts do not count: {said}")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [step["loss"] for step in steps if "loss" in step]
    check(len(losses) > 1 and losses[-1] < losses[0] - 1, f"what was learned: {losses[0]} to {losses[-1]} in {len(losses)} steps")
    check(re.search(r"validation loss [\d.]+", said), f"a validation: {said}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        check((folder / "model" / name).read_bytes() == (clone / "tokenizer" / name).read_bytes(), f"the model's {name}")
    caches = sorted(path.suffix for path in (clone / "cache/ndtrain").iterdir())
    check(caches == [".tokens", ".tokens"], f"one cache for each file: {caches}")


def main():
    commands = read_commands()
    with tempfile.TemporaryDirectory() as folder:
        clone = pathlib.Path(folder)
        (clone / "scripts").mkdir()
        shutil.copy(SOURCE / "scripts/prepare_data", clone / "scripts/prepare_data")
        make_model(clone, re.search(r"--model-path (\S+)", commands[1])[1])
        rows = write_rows(clone / re.search(r"--from (\S+)", commands[0])[1])
        check_rows(clone, commands, rows)
        check_prefix(clone, commands[0], rows)
        check_refusals(clone)
        check_run(clone, commands[1])
        out, _ = run(clone, commands[2])
        check(out.strip(), "nothing is written")


main()
