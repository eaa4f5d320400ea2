#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The saved model: it loads onto any mesh with the same bytes, and Hugging Face transformers computes the run's validation loss from it
(scripts/check_model.py: within 1e-5 in FP32, 1e-2 in BF16). The latter needs a Python with torch and transformers, named by
ND_PEER_PYTHON."""
import os
import struct
import sys

import steps
from steps import SOURCE, check, test

ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
VALIDATED = "--sequence-length 64 --set data.validation_path="
BESIDE = ("tokenizer.json tokenizer_config.json special_tokens_map.json tokenizer.model vocab.json merges.txt added_tokens.json "
          "chat_template.jinja chat_template.json generation_config.json").split()
FROM_ONE = "ndlaunch --device cpu --model-path one/model --set data.path=text.txt --num-steps 1 --sequence-length 64"


def setup(t):
    t.write("valid.txt", t.text()[:1299])  # blocks of 65: the last one is short
    # JSON lines, whose tokens are in a cache, with prompts, which do not count.
    t.write("valid.jsonl", [dict(prompt=f"{i} and {i}", completion=f" make {2 * i}") for i in range(40)])
    t.model(max_position_embeddings=8192, rope_theta=10000.0, rope_scaling=ROPE)


def train(t, out, precision, flags):
    t.run(f"ndlaunch --device cpu --set model.config=model.json --set data.path=text.txt --precision {precision} --set "
          f"output.dtype={precision} --set optimizer.schedule=constant --set output.save_model=true --set output.dir={out} {flags}")


@test
def check_model_finds_the_labels_of_the_run(t):
    code = """import check_model as c, pathlib
config, row, cache = c.settings_and_validation(pathlib.Path('labels'))
print('labels', sum(l != c.IGNORED for _, labels in c.pairs_of(config, cache) for l in labels) - row['validation_tokens'])"""
    for validation in "valid.txt", "valid.jsonl":
        train(t, "labels", "fp32", f"--num-processes 1 --num-steps 1 {VALIDATED}{validation}")
        t.run([sys.executable, "-B", "-c", code], says="labels 0\n", PYTHONPATH=str(SOURCE / "scripts"))
        t.remove("labels")


@test
def has_the_same_validation_loss_in_transformers(t):
    python = t.python("torch transformers")
    for precision, validation in ("fp32", "valid.txt"), ("fp32", "valid.jsonl"), ("bf16", "valid.txt"):
        train(t, precision, precision, f"--num-processes 4 --dp-shard-size 2 --tp-size 2 --num-steps 20 {VALIDATED}{validation}")
        t.run([python, SOURCE / "scripts/check_model.py", precision], says="in transformers: relative difference")
        t.remove(precision)


@test
def loads_onto_any_mesh(t):
    """Saved again after a step of size 0, it has the same bytes."""
    train(t, "one", "fp32", "--num-processes 2 --dp-shard-size 2 --sequence-length 64 --num-steps 5")
    for mesh in ("--num-processes 1 --dp-shard-size 1", "--num-processes 4 --dp-shard-size 2 --tp-size 2",
                 "--num-processes 8 --dp-shard-size 2 --cp-size 2 --tp-size 2"):
        t.run(f"{FROM_ONE} --precision fp32 --set optimizer.name=sgd --set optimizer.lr=1e-300 --set optimizer.min_lr=0 "
              f"--set output.dtype=fp32 --set output.dir=again {mesh}")
        t.same("one/model/model.safetensors", "again/model/model.safetensors")
        t.remove("again")


@test
def takes_along_the_tokenizer_of_the_model_it_goes_on_from(t):
    """A model with a tokenizer of its own: ids below 300, so the byte tokenizer is not written."""
    t.write("tokens.bin", struct.pack("<4352I", 20240801, 7, 4096, *[0] * 253, *[i * i // 3 % 300 for i in range(4096)]))
    t.change("model.json", ": 256,", ": 300,")
    tokens = "ndlaunch --device cpu --set data.path=tokens.bin --set data.tokenizer=file --sequence-length 64 --num-steps 1"
    t.run(f"{tokens} --model-config model.json --set output.dir=one")
    check(not t.has("one/model/tokenizer.json"), "the byte tokenizer is written")
    for name in BESIDE:
        t.write(f"one/model/{name}", name)
    t.write("blobs/vocab.json", "vocab.json")
    t.remove("one/model/vocab.json")
    (t.folder / "one/model/vocab.json").symlink_to("../../blobs/vocab.json")
    for path in (t.folder / "one/model").iterdir():
        path.chmod(0o444)
    t.run(f"{tokens} --model-path one/model --set output.dir=two --checkpoint-frequency 1 --checkpoint-export-model true")
    for to in "model", "checkpoint-1":
        for name in BESIDE:
            check(not (t.folder / "two" / to / name).is_symlink(), f"{to}/{name} is a link")
            t.same(f"one/model/{name}", f"two/{to}/{name}")


@test
def has_the_byte_tokenizer_where_the_data_are_bytes(t):
    """With the byte tokenizer only what is not the tokenizer's goes along."""
    train(t, "one", "bf16", "--sequence-length 64 --num-steps 1")
    good = t.read("one/model/tokenizer.json")
    for name in BESIDE:
        t.write(f"one/model/{name}", "other\n")
    t.remove("one/model/SHA256SUMS")
    t.run(f"{FROM_ONE} --set output.dir=two")
    others = [name for name in BESIDE if t.has(f"two/model/{name}") and t.read(f"two/model/{name}") == "other\n"]
    check(t.read("two/model/tokenizer.json") == good and others == ["generation_config.json"], others)
    # Ids of a file may be those of any tokenizer.
    t.run("ndtrain tokenize --tokenizer bytes --input text.txt --output-prefix ids")
    t.run("ndlaunch --device cpu --model-config model.json --data-path ids --tokenizer file --sequence-length 64 --num-steps 1 "
          "--checkpoint-frequency 1 --checkpoint-export-model true --set output.dir=of-ids")
    check(t.has("of-ids/*/config.json") and not t.has("of-ids/*/tokenizer.json"), os.listdir(t.folder / "of-ids"))


@test
def is_verified_by_its_checksums(t):
    """A bit of the weights flips after they were saved: a run that goes on from them says so."""
    go_on = f"{FROM_ONE} --set output.save_model=false --set output.dir=again"
    train(t, "one", "fp32", "--num-processes 2 --dp-shard-size 2 --sequence-length 64 --num-steps 1")
    t.run(["env", "-C", "one/model", "sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"])
    t.run(go_on, says="model: 4 files match SHA256SUMS of one/model")
    t.remove("again")
    weights = bytearray((t.folder / "one/model/model.safetensors").read_bytes())
    weights[-1000] ^= 1
    t.write("one/model/model.safetensors", bytes(weights))
    t.run(go_on, 65, 'model.safetensors" is not the file that SHA256SUMS')
    t.run("ndtrain train --device cpu --model-path one/model --num-steps 1 --set data.path=text.txt --sequence-length 64", 65,
          RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    t.run(f"{go_on} --set model.verify=false", never="SHA256SUMS")
    t.remove("again", "one/model/SHA256SUMS")
    t.run(go_on, says="one/model has no SHA256SUMS")


steps.main("saved_model", setup)
