#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare a run's last validation loss with what Hugging Face transformers computes from the model it saved.

  python scripts/check_model.py runs/FOLDER [--blocks-per-batch 8]

The Python needs torch and transformers. run.json names the validation data (a text, one text or JSON lines with their
tokenizer, of which the cache of their tokens is read, or an llm.c file), the sequence length and the precision; metrics.jsonl holds the loss. transformers runs the saved weights in F32 over the same blocks:
all of the validation file, so train.validation_batches must have been 0. Bound on the relative difference: 1e-5 for a run
and a model in fp32, 1e-2 where either is BF16 or FP8 (2^-8 of every activation or weight). Exit status: 0 within the bound,
1 outside it, 2 the run cannot be checked.
"""
import argparse
import array
import pathlib
import struct
import sys
import time

from run_folder import Run

BOUND_FP32, BOUND_BF16 = 1e-5, 1e-2
IGNORED = -100
PROGRESS_SECONDS = 10


class CannotCheck(Exception):
    pass


def settings_and_validation(folder):
    """The run's configuration and the last validation."""
    run = Run(folder)
    try:
        config, validations = run.config, run.validations
    except (OSError, ValueError) as e:
        raise CannotCheck(f"{folder} cannot be read: {e}") from None
    if config["train.validation_batches"] != 0:
        raise CannotCheck("the run validated on a part of the file; set train.validation_batches to 0")
    if not validations:
        raise CannotCheck(f"{folder}/metrics.jsonl has no validation; set data.validation_path")
    sets = run.record["data"]["validation"]
    path = pathlib.Path(config["data.validation_path"])
    cache = sets[0].get("cache") if len(sets) == 1 else None
    if not cache and not path.is_file():
        raise CannotCheck("only one text, or one llm.c file, can be checked; data.validation_path is "
                          f"{path}, data.tokenizer {config['data.tokenizer']}. `ndtrain eval` computes the loss of any data again")
    return config, validations[-1], cache


def unsigned(data, code):
    values = array.array(code, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def read_cache(path):
    """Ids of a *.tokens file (docs/formats.md), which of them do not count as labels, and where documents end."""
    data = pathlib.Path(path).read_bytes()
    width, tokens, documents, spans = struct.unpack("<12xI3Q", data[:40])
    if data[:8] != b"NDTOKENS" or width not in (2, 4):
        raise CannotCheck(f"{path} is no cache of tokens")
    ids = unsigned(data[4096:4096 + width * tokens], "H" if width == 2 else "I").tolist()
    at = 4096 + (width * tokens + 7) // 8 * 8
    ends = unsigned(data[at:at + 8 * documents], "Q").tolist()
    at += 8 * documents
    pairs = unsigned(data[at:at + 16 * spans], "Q")
    ignored = set()
    for begin, end in zip(pairs[::2], pairs[1::2]):
        ignored.update(range(begin, end))
    return ids, ignored, ends


def read_tokens(path, kind):
    data = pathlib.Path(path).read_bytes()
    if kind == "text":
        return list(data)
    if kind == "llmc":
        magic = int.from_bytes(data[:4], "little")
        return unsigned(data[1024:], "H" if magic == 20240520 else "I").tolist()
    raise CannotCheck(f"{path}: only text and llm.c files can be checked here, not {kind}")


def kind_of(config):
    if config["data.format"] != "auto":
        return config["data.format"]
    return "llmc" if config["data.validation_path"].endswith(".bin") else "text"


def blocks(tokens, length, ignored=()):
    """Inputs and labels of docs/formats.md's blocks: length + 1 tokens each, the last one filled up. Tokens of the places `ignored`
    are no labels."""
    for begin in range(0, len(tokens), length + 1):
        block = tokens[begin : begin + length + 1]
        if len(block) < 2:
            return
        fill = length + 1 - len(block)
        labels = [IGNORED if begin + 1 + i in ignored else label for i, label in enumerate(block[1:])]
        yield block[:-1] + [0] * fill, labels + [IGNORED] * fill


def pairs_of(config, cache):
    length = config["train.sequence_length"]
    tokens, ignored, ends = read_cache(cache) if cache else (read_tokens(config["data.validation_path"], kind_of(config)), (), [])
    if config.get("data.documents") != "separate" or not cache:
        return list(blocks(tokens, length, ignored))
    if not ignored:
        raise CannotCheck("the documents of the run are separate and have no prompts; only rows with prompts are checked one by one")
    pairs = []  # a row is scored as if it were alone: here each has blocks of its own (docs/documents.md)
    for begin, end in zip([0] + ends, ends):
        if end - begin <= length + 1 or config["data.long_rows"] == "cut":
            pairs += blocks(tokens[begin:end], length, {t - begin for t in range(begin, end) if t in ignored})
    return pairs


def say(text):
    print(f"check_model: {text}", file=sys.stderr, flush=True)


def transformers_loss(folder, pairs, per_batch):
    say(f"transformers computes the loss of {len(pairs)} blocks")
    said = time.monotonic()
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as e:
        raise CannotCheck(f"this Python cannot import torch and transformers ({e}); `pip install torch transformers`") from None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(pairs), per_batch):
            inputs, labels = (torch.tensor(t) for t in zip(*pairs[begin : begin + per_batch]))
            logits = model(inputs).logits.flatten(0, 1)
            total += torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum").double().item()
            count += int((labels != IGNORED).sum())
            if time.monotonic() - said > PROGRESS_SECONDS:
                say(f"{begin + len(inputs)} of {len(pairs)} blocks")
                said = time.monotonic()
    return total / count, count


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", type=pathlib.Path, help="a run's folder, with run.json, metrics.jsonl and model/")
    p.add_argument("--blocks-per-batch", type=int, default=8)
    arguments = p.parse_args()
    config, validation, cache = settings_and_validation(arguments.run)
    ours, our_tokens = validation["validation_loss"], validation["validation_tokens"]
    pairs = pairs_of(config, cache)
    theirs, their_tokens = transformers_loss(arguments.run / "model", pairs, arguments.blocks_per_batch)
    if our_tokens != their_tokens:
        raise CannotCheck(f"the run validated {our_tokens} tokens, {config['data.validation_path']} has {their_tokens}")
    fp32 = config["train.precision"] == "fp32" and config["output.dtype"] == "fp32"
    bound = BOUND_FP32 if fp32 else BOUND_BF16
    difference = abs(ours / theirs - 1.0)
    print(f"validation loss {ours:.7g} here, {theirs:.7g} in transformers: relative difference {difference:.2g}, "
          f"bound {bound:g}")
    return 0 if difference <= bound else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (CannotCheck, OSError, KeyError) as error:
        say(error)
        sys.exit(2)
