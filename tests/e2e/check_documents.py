#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a model learns from separate and from joined documents, and that a resumed run, a second epoch and two nodes have the same
documents.

200 rows open with a letter, which says how they close. Eight rows with the same opening follow one another, so in a block of joined rows
the closing stands in the row before, always as far back. A model that sees that copies it, and does not learn what the opening means:
a new row alone, as it will be met, then has a high loss, although the loss in training is as low as that of separate rows.
"""
import json
import random
import re

import steps
from steps import check, test

LETTERS = "abcdefghijklmnopqrstuvwxyz"
COMMON = "--model-config model.json --cache-dir cache --validation-path ''"
TRAIN = f"ndtrain train {COMMON} --sequence-length 127 --micro-batch-size 4 --precision fp32 --learning-rate 3e-3"


def setup(t):
    draw = random.Random(3)
    pairs = [(letter, "".join(draw.choice(LETTERS) for _ in range(4))) for letter in LETTERS[:25]]
    for name, count in ("rows", 8), ("new", 1):
        t.write(f"{name}.jsonl", [dict(prompt=opening + "".join(draw.choice("01234567") for _ in range(10)) + "=", completion=closing)
                                  for opening, closing in pairs for _ in range(count)])
    t.model(intermediate_size=128, num_key_value_heads=4, max_position_embeddings=256, rms_norm_eps=1e-5, initializer_range=0.05,
            tie_word_embeddings=False, rope_theta=10000.0)


def train(t, out, documents, number, more="", code=0, says=(), data="rows.jsonl", schedule="constant"):
    t.run(f"{TRAIN} --data-path {data} --documents {documents} --num-steps {number} --save-dir {out} "
          f"--set optimizer.schedule={schedule} {more}", code, says)


def losses(t, out):
    return {row["step"]: row["loss"] for row in t.metrics(out) if "step_ms" in row}


@test
def separate_rows_teach_what_joined_ones_do_not(t):
    loss = {}
    for documents in "separate", "join":
        train(t, documents, documents, 300, says="200 documents are separate" if documents == "separate" else "documents are joined",
              schedule="cosine")
        check(("queries see" in t.log) == (documents == "separate"), f"{documents}: what queries see of keys:\n{t.log}")
        blocks = min(int(re.search(r" tokens, (\d+) blocks of", t.log)[1]), 256)
        check(documents == "join" or f"({blocks} blocks)" in t.log, f"{blocks} blocks were looked at:\n{t.log}")
        t.run(f"ndtrain eval --model {documents}/model --data new.jsonl --sequence-length 127 --jsonl --cache-dir cache")
        loss[documents], = t.rows()
        check(loss[documents]["documents"] == "separate", f"new rows are not scored alone: {loss[documents]}")
        check(losses(t, documents)[300] < 0.05, f"{documents}: the loss in training is {losses(t, documents)[300]}")
    # Four letters of 26 are 3.3 nats each; what is learned is known for certain.
    check(loss["separate"]["loss"] < 0.05, f"separate rows did not teach the closing: {loss['separate']}")
    check(loss["join"]["loss"] > 0.5, f"joined rows taught the closing, so they show nothing here: {loss['join']}")


@test
def what_is_said_is_so(t):
    """What the first lines of a run say of its documents."""
    t.write("some.jsonl", [dict(prompt="ab", completion="cd")] * 3 + [dict(prompt="ab", completion=200 * "x")])
    t.write("texts.jsonl", [dict(text="abcdefgh"), dict(text="ijkl")])
    t.write("one.txt", "a file is one document")

    def said(out, data, flags, *says, code=0):
        t.run(f"ndtrain train {COMMON} --data-path {data} --sequence-length 15 --micro-batch-size 1 --num-steps 1 --save-model false "
              f"--save-dir {out} {flags}", code, says)

    said("dropped", "some.jsonl", "--long-rows drop", "training data: 12 tokens,", "training data: 3 documents are separate",
         "training data: 1 rows are longer than a block of 16 tokens and are left out", "and positions begin at 0 in each (",
         "training data: 6 of 12 tokens count in the loss (50.0 %)", "queries see 27.5 % of the keys")
    said("cut", "some.jsonl", "--long-rows cut --set data.positions=running", "tokens and are cut (", "and positions run on over a block (")
    said("both", "some.jsonl", "--long-rows drop --validation-path some.jsonl", "validation data: 6 of 12 tokens count")
    records = [json.loads(t.read(f"{out}/run.json")) for out in ("dropped", "both")]
    source, places = records[0]["data"]["sources"][0], [record["memory_plan_bytes"]["places of whole rows"] for record in records]
    check(0 < 2 * places[0] == places[1], f"places of one and of two files take {places} bytes")
    check((source["tokens"], source["documents"]) == (12, 3), f"run.json has what is left out: {source}")
    said("texts", "texts.jsonl", "--documents separate --long-rows drop --end-of-text 0",
         "id 0 (data.end_of_text) does not occur in the first 64 MiB", "data.long_rows drop has no effect, since no row has a prompt",
         "all tokens but the first of each document count in the loss")
    said("joined", "texts.jsonl", "--long-rows drop --end-of-text 0", "data.end_of_text has no effect, since documents are joined",
         "data.long_rows drop has no effect, since documents are joined", "training data: all tokens count in the loss")
    said("one", "one.txt", "--documents separate", "training data: 1 document: data.documents separate changes nothing")
    said("no-id", "one.txt", "--documents separate --end-of-text 300", "data.end_of_text is 300, but bytes end at 255", code=2)


@test
def a_resumed_run_has_the_same_documents(t):
    train(t, "whole", "auto", 4, "--save-model false")
    for step in range(1, 4):
        out = f"resumed{step}"
        train(t, out, "auto", step, "--save-model false --checkpoint-interval 1")
        train(t, out, "auto", 4, "--save-model false --resume-from-checkpoint latest")
        check(losses(t, out) == losses(t, "whole"), f"resumed after step {step}: {losses(t, out)}, not {losses(t, 'whole')}")
    train(t, "other", "join", 4, "--resume-from-checkpoint resumed3/checkpoint-3", 2,
          "was made with data.documents separate, and this run has join")


@test
def rows_of_any_length_fill_their_blocks(t):
    """A resumed run goes on with the same ones."""
    draw = random.Random(5)
    lengths = [min(128, 2 + int(draw.lognormvariate(3, 0.7))) for _ in range(1000)]
    t.write("drawn.jsonl", [dict(prompt=draw.choice(LETTERS), completion=(length - 1) * "x") for length in lengths])
    room, in_order = 0, 0
    for length in lengths:
        in_order += length > room
        room = (128 if length > room else room) - length
    train(t, "packed", "auto", 4, "--save-model false", data="drawn.jsonl")
    share = float(re.search(r"training data: ([0-9.]+) % of the tokens are padding", t.log)[1])
    blocks = int(re.search(r"training data: [0-9]+ tokens, ([0-9]+) blocks of 128", t.log)[1])
    check(share < 1 and blocks < 0.95 * in_order, f"{share} % of {blocks} blocks are padding; there are {in_order} in the order of the file")
    train(t, "packed2", "auto", 2, "--save-model false --checkpoint-interval 1", data="drawn.jsonl")
    train(t, "packed2", "auto", 4, "--save-model false --resume-from-checkpoint latest", data="drawn.jsonl")
    check(losses(t, "packed2") == losses(t, "packed"), f"a resumed run has other rows: {losses(t, 'packed2')}")


@test
def a_second_epoch_has_the_same_documents(t):
    """Without learning each block has the same loss in the second epoch, where it comes at another place."""
    passes = {}
    for documents in "separate", "join":
        train(t, documents, documents, 0, "--save-model false --micro-batch-size 1 --learning-rate 0 --num-epochs 2")
        seen = [loss for _, loss in sorted(losses(t, documents).items())]
        half = len(seen) // 2
        passes[documents] = seen[:half], seen[half:]
        check(half > 5 and sorted(seen[:half]) == sorted(seen[half:]), f"{documents}: the second epoch has other losses: {seen}")
        check(seen[:half] != seen[half:], f"{documents}: the second epoch has the order of the first one, so it shows little")
    check(not set(passes["separate"][1]) & set(passes["join"][1]), f"separate blocks have losses of joined ones: {passes}")


@test
def two_nodes_have_the_documents_of_one(t):
    """Each node with a worker."""
    two = (f"ndlaunch --device cpu {COMMON} --data-path rows.jsonl --sequence-length 127 --micro-batch-size 2 --precision fp32 "
           "--learning-rate 3e-3 --dp-shard-size 2 --num-steps 4 --save-model false")
    t.run(f"{two} --num-processes 2 --save-dir one-node")
    t.run("ndlaunch --make-key key")
    meet = f"--nnodes 2 --nproc-per-node 1 --rdzv-endpoint 127.0.0.1:{steps.port()} --rdzv-key-file key --save-dir two-nodes"
    t.wait([t.start(f"{two} {meet} --node-rank {n}", f"log{n}") for n in range(2)], 0)
    check("documents are separate" in t.read("log0"), f"two nodes do not say that documents are separate:\n{t.read('log0')}")
    check(losses(t, "two-nodes") == losses(t, "one-node"), f"two nodes: {losses(t, 'two-nodes')}, not {losses(t, 'one-node')}")
    # Rows of 7 and 5 tokens and 4 of padding in one block: 47 of 136 pairs, of which one rank of two has 24.
    t.write("pair.jsonl", [dict(prompt="a", completion=(n - 1) * "b") for n in (7, 5)])
    t.run(f"{two} --num-processes 2 --dp-shard-size 1 --cp-size 2 --data-path pair.jsonl --sequence-length 16 --micro-batch-size 1 "
          "--save-dir pair", says="queries see 34.6 % of the keys that they would see in joined documents; the rank of cp with the most pairs "
                                  "has 1.021 times the mean of the ranks (1 blocks)")
    rows = [row for row in t.metrics("pair") if "step_ms" in row]
    check([(row["visible_pairs"], row["balance"]) for row in rows] == 4 * [(47, 48 / 47)], rows)


steps.main("learned_documents", setup)
