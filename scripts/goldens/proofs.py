# SPDX-License-Identifier: Apache-2.0
"""Digests of the ids that the Python package tokenizers gives the texts of tests/unit/trainer/text/proof_texts.c.

    /path/to/python scripts/goldens/proofs.py build/tests/unit/trainer/text/text_tool [--only NAME] [TOKENIZER.json ...]

writes tests/unit/trainer/text/proofs.txt, for the goldens and the further files (those of scripts/fetch_tokenizers): the
SHA-256 of each tokenizer.json, and for each alphabet the first 16 digits of the SHA-256 of each chunk's ids: for each text, 32
bits with their number, and the ids, first with special tokens parsed, then, for random texts, with them as text. "texts" are the
digests of the texts.
With --only nothing is written: the texts of NAME are compared live, and the first with other ids is shown.
"""
import array
import glob
import hashlib
import os
import struct
import subprocess
import sys

import tokenizers
from tokenizers import Tokenizer

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "unit", "trainer", "text")
ALPHABETS = "words numbers blanks signs marks scripts points tokens repeats bytes alone letters marked composed runs".split()
SPECIAL = ALPHABETS[:10]  # those with special tokens
NORMAL_FORM = ("marked", "composed")  # for tokenizers with a normal form
DIGITS = 16
# camel's pattern is quadratic on long runs of capitals, where we refuse it and the package takes its time.
LEFT_OUT = {("camel", "repeats")}


def chunks(alphabet):
    return {"runs": 4, "composed": 1}.get(alphabet, 8)


def alphabets_for(name):
    return [a for a in ALPHABETS if (name, a) not in LEFT_OUT and (a not in NORMAL_FORM or name.endswith("_nfc"))]


def texts_of(tool, alphabet, chunk):
    return subprocess.run([tool, f"{ALPHABETS.index(alphabet)}:{chunk}", "texts"], stdout=subprocess.PIPE, check=True).stdout


def split(records):
    at, texts = 0, []
    while at < len(records):
        n = struct.unpack_from("<I", records, at)[0]
        texts.append(records[at + 4:at + 4 + n])
        at += 4 + n
    return texts


def expected(tokenizer, texts, as_text):
    """What the tool writes for these texts, by the package."""
    tokenizer.encode_special_tokens = as_text
    encodings = tokenizer.encode_batch_fast([t.decode(errors="replace") for t in texts], add_special_tokens=False)
    return [struct.pack("<I", len(e)) + array.array("i", e.ids).tobytes() for e in encodings]


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def compare(tool, path):
    tokenizer = Tokenizer.from_file(path)
    for alphabet in alphabets_for(os.path.basename(path)[:-5]):
        for chunk in range(chunks(alphabet)):
            records = texts_of(tool, alphabet, chunk)
            for mode in ("parse", "text")[:1 + (alphabet in SPECIAL)]:
                ours = subprocess.run([tool, path, mode], input=records, stdout=subprocess.PIPE, check=True).stdout
                at = 0
                for text, ids in zip(split(records), expected(tokenizer, split(records), mode == "text")):
                    if ours[at:at + len(ids)] != ids:
                        sys.exit(f"{path}, {alphabet}, chunk {chunk}, {mode}: {text!r} has the ids {array.array('i', ids[4:]).tolist()}")
                    at += len(ids)
    print(f"{path}: no differences")


def main():
    tool, *paths = sys.argv[1:]
    only = paths[1] if paths[:1] == ["--only"] else None
    paths = paths[2:] if only else paths
    goldens = [p for p in sorted(glob.glob(os.path.join(FOLDER, "goldens", "*.json"))) if not p.endswith(".cases.json")]
    files = {os.path.basename(p)[:-5]: p for p in goldens + paths}
    if only:
        return compare(tool, files[only])
    records = {(a, c): texts_of(tool, a, c) for a in ALPHABETS for c in range(chunks(a))}
    lines = [f"# Made by scripts/goldens/proofs.py with tokenizers {tokenizers.__version__}: do not edit."]
    lines += [" ".join(["texts", a, *(sha256(records[a, c])[:DIGITS] for c in range(chunks(a)))]) for a in ALPHABETS]
    for name, path in files.items():
        tokenizer = Tokenizer.from_file(path)
        with open(path, "rb") as file:
            lines.append(f"{name} file {sha256(file.read())}")
        for a in alphabets_for(name):
            digests = []
            for c in range(chunks(a)):
                texts = split(records[a, c])
                ids = expected(tokenizer, texts, False) + (expected(tokenizer, texts, True) if a in SPECIAL else [])
                digests.append(sha256(b"".join(ids))[:DIGITS])
            lines.append(" ".join([name, a, *digests]))
        print(name, flush=True)
    with open(os.path.join(FOLDER, "proofs.txt"), "w", encoding="ascii") as out:
        out.write("\n".join(lines) + "\n")
    print(f"{len(files)} files, {sum(map(len, records.values()))} bytes of texts and their lengths for each")


if __name__ == "__main__":
    main()
