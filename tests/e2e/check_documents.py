#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a model learns from separate and from joined documents, and that a resumed run, a second epoch and two nodes have the same
documents: check_documents.py NDTRAIN

200 rows open with a letter, which says how they close. Eight rows with the same opening follow one another, so in a block of joined rows
the closing stands in the row before, always as far back. A model that sees that copies it, and does not learn what the opening means:
a new row alone, as it will be met, then has a high loss, although the loss in training is as low as that of separate rows.
"""
import json
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile

from steps import check

NDTRAIN = pathlib.Path(sys.argv[1]).resolve()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MODEL = dict(model_type="llama", vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=256, rms_norm_eps=1e-5, initializer_range=0.05, tie_word_embeddings=False,
             rope_theta=10000.0)


def run(folder, *arguments, code=0):
    done = subprocess.run([NDTRAIN, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    check(done.returncode == code, f"{' '.join(map(str, arguments))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def write_rows(path, draw, closings, count):
    with open(path, "w") as out:
        for opening, closing in closings:
            for _ in range(count):
                prompt = opening + "".join(draw.choice("01234567") for _ in range(10)) + "="
                out.write(json.dumps({"prompt": prompt, "completion": closing}) + "\n")


def train(folder, out, documents, steps, *more, code=0, data="rows.jsonl", schedule="constant"):
    return run(folder, "train", "--model-config", "model.json", "--data-path", data, "--cache-dir", "cache", "--sequence-length", "127",
               "--micro-batch-size", "4", "--precision", "fp32", "--learning-rate", "3e-3", "--documents", documents, "--num-steps", str(steps),
               "--save-dir", out, "--set", f"optimizer.schedule={schedule}", *more, code=code)


def losses(folder, out):
    lines = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "step_ms" in line}


def check_learning(folder):
    loss = {}
    for documents in ("separate", "join"):
        log = train(folder, documents, documents, 300, schedule="cosine")
        said = "200 documents are separate" if documents == "separate" else "documents are joined"
        check(said in log, f"the run does not say that {said}:\n{log}")
        check(("queries see" in log) == (documents == "separate"), f"{documents}: what queries see of keys:\n{log}")
        blocks = min(int(re.search(r" tokens, (\d+) blocks of", log)[1]), 256)
        check(documents == "join" or f"({blocks} blocks)" in log, f"{blocks} blocks were looked at:\n{log}")
        alone = run(folder, "eval", "--model", f"{documents}/model", "--data", "new.jsonl", "--sequence-length", "127", "--jsonl", "--cache-dir",
                    "cache")
        loss[documents] = json.loads(alone.splitlines()[0] if alone.startswith("{") else alone[alone.index("{"):].splitlines()[0])
        check(loss[documents]["documents"] == "separate", f"new rows are not scored alone: {loss[documents]}")
        check(losses(folder, documents)[300] < 0.05, f"{documents}: the loss in training is {losses(folder, documents)[300]}")
    # Four letters of 26 are 3.3 nats each; what is learned is known for certain.
    check(loss["separate"]["loss"] < 0.05, f"separate rows did not teach the closing: {loss['separate']}")
    check(loss["join"]["loss"] > 0.5, f"joined rows taught the closing, so they show nothing here: {loss['join']}")


def check_said(folder):
    """What the first lines of a run say of its documents is so."""
    rows = [{"prompt": "ab", "completion": "cd"}] * 3
    (folder / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "ab", "completion": "x" * 200}]))
    (folder / "texts.jsonl").write_text(json.dumps({"text": "abcdefgh"}) + "\n" + json.dumps({"text": "ijkl"}) + "\n")
    (folder / "one.txt").write_text("a file is one document")

    def said(out, data, *arguments, code=0):
        return run(folder, "train", "--model-config", "model.json", "--data-path", data, "--cache-dir", "cache", "--sequence-length", "15",
                   "--micro-batch-size", "1", "--num-steps", "1", "--save-model", "false", "--save-dir", out, *arguments, code=code)

    def has(log, *lines):
        for line in lines:
            check(line in log, f'the run does not say "{line}":\n{log}')

    has(said("dropped", "some.jsonl", "--long-rows", "drop"), "training data: 12 tokens,", "training data: 3 documents are separate",
        "training data: 1 rows are longer than a block of 16 tokens and are left out", "and positions begin at 0 in each (",
        "training data: 6 of 12 tokens count in the loss (50.0 %)", "queries see 27.5 % of the keys")
    has(said("cut", "some.jsonl", "--long-rows", "cut", "--set", "data.positions=running"), "tokens and are cut (",
        "and positions run on over a block (")
    has(said("both", "some.jsonl", "--long-rows", "drop", "--validation-path", "some.jsonl"), "validation data: 6 of 12 tokens count")
    records = [json.loads((folder / out / "run.json").read_text()) for out in ("dropped", "both")]
    source, places = records[0]["data"]["sources"][0], [record["memory_plan_bytes"]["places of whole rows"] for record in records]
    check(0 < 2 * places[0] == places[1], f"places of one and of two files take {places} bytes")
    check((source["tokens"], source["documents"]) == (12, 3), f"run.json has what is left out: {source}")
    has(said("texts", "texts.jsonl", "--documents", "separate", "--long-rows", "drop", "--end-of-text", "0"),
        "id 0 (data.end_of_text) does not occur in the first 64 MiB", "data.long_rows drop has no effect, since no row has a prompt",
        "all tokens but the first of each document count in the loss")
    has(said("joined", "texts.jsonl", "--long-rows", "drop", "--end-of-text", "0"), "data.end_of_text has no effect, since documents are joined",
        "data.long_rows drop has no effect, since documents are joined", "training data: all tokens count in the loss")
    has(said("one", "one.txt", "--documents", "separate"), "training data: 1 document: data.documents separate changes nothing")
    has(said("no-id", "one.txt", "--documents", "separate", "--end-of-text", "300", code=2), "data.end_of_text is 300, but bytes end at 255")


def check_resume(folder):
    train(folder, "whole", "auto", 4, "--save-model", "false")
    for step in range(1, 4):
        out = f"resumed{step}"
        train(folder, out, "auto", step, "--save-model", "false", "--checkpoint-interval", "1")
        train(folder, out, "auto", 4, "--save-model", "false", "--resume-from-checkpoint", "latest")
        check(losses(folder, out) == losses(folder, "whole"), f"resumed after step {step}: {losses(folder, out)}, not {losses(folder, 'whole')}")
    log = train(folder, "other", "join", 4, "--resume-from-checkpoint", "resumed3/checkpoint-3", code=2)
    check("was made with data.documents separate, and this run has join" in log, f"another rule is resumed:\n{log}")


def check_packing(folder):
    """Rows of any length fill their blocks, and a resumed run goes on with the same ones."""
    draw = random.Random(5)
    lengths = [min(128, 2 + int(draw.lognormvariate(3, 0.7))) for _ in range(1000)]
    rows = [{"prompt": draw.choice(LETTERS), "completion": "x" * (length - 1)} for length in lengths]
    (folder / "drawn.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    room, in_order = 0, 0
    for length in lengths:
        in_order += length > room
        room = (128 if length > room else room) - length
    log = train(folder, "packed", "auto", 4, "--save-model", "false", data="drawn.jsonl")
    share = float(re.search(r"training data: ([0-9.]+) % of the tokens are padding", log)[1])
    blocks = int(re.search(r"training data: [0-9]+ tokens, ([0-9]+) blocks of 128", log)[1])
    check(share < 1 and blocks < 0.95 * in_order, f"{share} % of {blocks} blocks are padding; there are {in_order} in the order of the file")
    train(folder, "packed2", "auto", 2, "--save-model", "false", "--checkpoint-interval", "1", data="drawn.jsonl")
    train(folder, "packed2", "auto", 4, "--save-model", "false", "--resume-from-checkpoint", "latest", data="drawn.jsonl")
    check(losses(folder, "packed2") == losses(folder, "packed"), f"a resumed run has other rows: {losses(folder, 'packed2')}")


def check_epochs(folder):
    """Without learning each block has the same loss in the second epoch, where it comes at another place."""
    passes = {}
    for documents in ("separate", "join"):
        train(folder, f"epochs-{documents}", documents, 2, "--save-model", "false", "--micro-batch-size", "1", "--learning-rate", "0",
              "--num-steps", "0", "--num-epochs", "2")
        seen = [loss for _, loss in sorted(losses(folder, f"epochs-{documents}").items())]
        half = len(seen) // 2
        passes[documents] = seen[:half], seen[half:]
        check(half > 5 and sorted(passes[documents][0]) == sorted(passes[documents][1]), f"{documents}: the second epoch has other losses: {seen}")
        check(passes[documents][0] != passes[documents][1], f"{documents}: the second epoch has the order of the first one, so it shows little")
    check(not set(passes["separate"][1]) & set(passes["join"][1]), f"separate blocks have losses of joined ones: {passes}")


def check_nodes(folder):
    """Two nodes, each with a worker, have the losses of two workers of one node."""
    ndlaunch = NDTRAIN.with_name("ndlaunch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    subprocess.run([ndlaunch, "--make-key", "key"], cwd=folder, check=True, capture_output=True)
    common = [ndlaunch, "--model-config", "model.json", "--data-path", "rows.jsonl", "--cache-dir", "cache", "--sequence-length", "127",
              "--micro-batch-size", "2", "--precision", "fp32", "--learning-rate", "3e-3", "--dp-shard-size", "2", "--num-steps", "4",
              "--save-model", "false", "--device", "cpu"]
    one = subprocess.run([*common, "--num-processes", "2", "--save-dir", "one-node"], cwd=folder, capture_output=True, text=True, check=False)
    check(one.returncode == 0, one.stderr)
    nodes = [subprocess.Popen([*common, "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(n), "--rdzv-endpoint", endpoint,
                               "--rdzv-key-file", "key", "--save-dir", "two-nodes"], cwd=folder, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True) for n in range(2)]
    said = [node.communicate(timeout=120)[0] for node in nodes]
    check(all(node.returncode == 0 for node in nodes), f"two nodes ended with {[node.returncode for node in nodes]}:\n{said}")
    check("documents are separate" in said[0], f"two nodes do not say that documents are separate:\n{said[0]}")
    check(losses(folder, "two-nodes") == losses(folder, "one-node"), f"two nodes: {losses(folder, 'two-nodes')}, not {losses(folder, 'one-node')}")
    # Rows of 7 and 5 tokens and 4 of padding in one block: 47 of 136 pairs, of which one rank of two has 24.
    (folder / "pair.jsonl").write_text("".join(json.dumps({"prompt": "a", "completion": "b" * (n - 1)}) + "\n" for n in (7, 5)))
    pair = subprocess.run([*common, "--num-processes", "2", "--dp-shard-size", "1", "--cp-size", "2", "--data-path", "pair.jsonl",
                           "--sequence-length", "16", "--micro-batch-size", "1", "--save-dir", "pair"], cwd=folder, capture_output=True,
                          text=True, check=False)
    check("queries see 34.6 % of the keys that they would see in joined documents; the rank of cp with the most pairs has 1.021 times the "
          "mean of the ranks (1 blocks)" in pair.stderr, pair.stderr)
    lines = [json.loads(line) for line in (folder / "pair/metrics.jsonl").read_text().splitlines()]
    check([(line["visible_pairs"], line["balance"]) for line in lines if "step_ms" in line] == 4 * [(47, 48 / 47)], lines)


with tempfile.TemporaryDirectory() as name:
    place = pathlib.Path(name)
    source = random.Random(3)
    pairs = [(letter, "".join(source.choice(LETTERS) for _ in range(4))) for letter in LETTERS[:25]]
    write_rows(place / "rows.jsonl", source, pairs, 8)
    write_rows(place / "new.jsonl", source, pairs, 1)
    (place / "model.json").write_text(json.dumps(MODEL))
    check_learning(place)
    check_said(place)
    check_resume(place)
    check_packing(place)
    check_epochs(place)
    check_nodes(place)
