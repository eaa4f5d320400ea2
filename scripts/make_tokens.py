#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns text or JSON lines into token files that ndtrain reads, with any Hugging Face tokenizer.

    scripts/make_tokens.py --tokenizer meta-llama/Llama-3.1-8B --output data/stories stories.jsonl
    scripts/make_tokens.py --tokenizer ./tokenizer.json --format llmc --output data/book book.txt

writes data/stories.bin and data/stories.idx (Megatron), or data/book.bin (llm.c). Then train with
`data.path: data/stories`, `data.tokenizer: file` and a model whose vocab_size holds the tokenizer's ids.

A .jsonl file is one document a line, under the key "text" (--key); any other file is one document of text. Special
tokens are added as the tokenizer does by default (often a beginning of sequence; --no-special-tokens leaves them out);
--append-eos ends each document with the tokenizer's end of sequence. Inputs are read in pieces, so a file may be larger
than the memory; outputs appear under their names only when they are complete.

Needs the Python package transformers, or tokenizers for a tokenizer.json.
"""
import argparse
import array
import json
import os
import struct
import sys

from token_files import MegatronWriter, little_endian

LLMC_GPT2 = (20240520, 1, "H")
LLMC_LLAMA3 = (20240801, 7, "I")
BATCH_DOCUMENTS = 256


class Encoder:
    """A tokenizer of either package behind one method."""

    def __init__(self, name, special_tokens, append_eos):
        self.special_tokens = special_tokens
        if os.path.isfile(name):
            self.encode_all, self.vocab, eos = self._from_file(name)
        else:
            self.encode_all, self.vocab, eos = self._from_transformers(name)
        self.tail = []
        if append_eos:
            if eos is None:
                sys.exit(f"tokenize: {name} names no end-of-sequence token; leave --append-eos out")
            self.tail = [eos]

    def _from_transformers(self, name):
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            sys.exit(f"tokenize: the Python package transformers cannot be imported ({error}): pip install transformers; "
                     "or give a tokenizer.json, for which the package tokenizers is enough")
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (ImportError, OSError, ValueError) as error:
            sys.exit(f"tokenize: no tokenizer {name}: {error}")
        tokenizer.model_max_length = sys.maxsize  # no warning about long documents: they are packed into blocks

        def encode_all(texts, special):
            return tokenizer(texts, add_special_tokens=special)["input_ids"]
        return encode_all, len(tokenizer), tokenizer.eos_token_id

    def _from_file(self, path):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            sys.exit(f"tokenize: the Python package tokenizers cannot be imported ({error}): pip install tokenizers")
        try:
            tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # the package raises nothing more special
            sys.exit(f"tokenize: {path} is no tokenizer.json: {error}")
        names = ("<|end_of_text|>", "<|endoftext|>", "</s>")
        known = (tokenizer.token_to_id(n) for n in names)

        def encode_all(texts, special):
            return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=special)]
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        return encode_all, max(ids) + 1, next((i for i in known if i is not None), None)

    def documents(self, texts):
        return [ids + self.tail for ids in self.encode_all(texts, self.special_tokens)]


def cut_place(text):
    """Where a long text may be cut: the last newline between two characters that are no white space. Byte-level BPE gives
    the same ids on both sides as for the whole; -1 when there is none."""
    at = text.rfind("\n")
    while at > 0 and (at + 1 >= len(text) or text[at - 1].isspace() or text[at + 1].isspace()):
        at = text.rfind("\n", 0, at)
    return at + 1 if at > 0 else -1


def text_pieces(path, piece_chars):
    held = ""
    with open(path, encoding="utf-8", newline="") as file:
        while True:
            more = file.read(piece_chars)
            held += more
            if not more:
                break
            at = cut_place(held)
            if at > 0:
                yield held[:at]
                held = held[at:]
    if held:
        yield held


def encode_text(encoder, path, piece_chars):
    """One document, piece by piece."""
    ids = array.array("q")
    for number, piece in enumerate(text_pieces(path, piece_chars)):
        ids.extend(encoder.encode_all([piece], encoder.special_tokens and number == 0)[0])
    ids.extend(encoder.tail)
    yield ids


def row_text(path, number, line, key):
    try:
        row = json.loads(line)
    except ValueError as error:
        sys.exit(f"tokenize: {path} line {number}: {error}")
    if not isinstance(row, dict) or not isinstance(row.get(key), str):
        hint = ""
        if isinstance(row, dict) and "prompt" in row:
            hint = "; rows with prompts are for ndtrain tokenize or scripts/encode_rows.py, which write a loss mask"
        sys.exit(f'tokenize: {path} line {number} has no string under "{key}"{hint}')
    return row[key]


def encode_jsonl(encoder, path, key):
    batch = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                batch.append(row_text(path, number, line, key))
            if len(batch) == BATCH_DOCUMENTS:
                yield from encoder.documents(batch)
                batch = []
    if batch:
        yield from encoder.documents(batch)


def encode_inputs(encoder, arguments):
    for path in arguments.inputs:
        if path.endswith(".jsonl"):
            yield from encode_jsonl(encoder, path, arguments.key)
        else:
            yield from encode_text(encoder, path, arguments.piece_mb << 20)


def publish(*pairs):
    for temporary, final in pairs:
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, final)


def write_megatron(documents, vocab, output):
    with MegatronWriter(output, vocab) as out:
        for ids in documents:
            out.add(ids)
        out.commit()
        return out.tokens


def write_llmc(documents, vocab, output):
    magic, version, typecode = LLMC_GPT2 if vocab <= 65536 else LLMC_LLAMA3
    count = 0
    with open(output + ".bin.tmp", "wb") as file:
        file.write(bytes(1024))
        for ids in documents:
            file.write(little_endian(typecode, ids))
            count += len(ids)
            if count >= 1 << 31:
                sys.exit("tokenize: an llm.c file holds less than 2^31 tokens: use --format megatron")
        file.seek(0)
        file.write(struct.pack("<3i", magic, version, count))
    publish((output + ".bin.tmp", output + ".bin"))
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", help="text or .jsonl files, UTF-8")
    parser.add_argument("--tokenizer", required=True, help="a name or folder for AutoTokenizer, or a tokenizer.json")
    parser.add_argument("--output", required=True, help="path without suffix")
    parser.add_argument("--format", choices=("megatron", "llmc"), default="megatron")
    parser.add_argument("--key", default="text", help="key of the document in a line of JSON")
    parser.add_argument("--append-eos", action="store_true", help="end each document with the end-of-sequence token")
    parser.add_argument("--no-special-tokens", action="store_true", help="add no beginning of sequence and the like")
    parser.add_argument("--piece-mb", type=int, default=16, help="text is read in pieces of this many million characters")
    arguments = parser.parse_args()
    if arguments.piece_mb < 1:
        parser.error("--piece-mb is at least 1")
    for path in arguments.inputs:
        if not os.path.isfile(path):
            sys.exit(f"tokenize: {path} is not a file")
    encoder = Encoder(arguments.tokenizer, not arguments.no_special_tokens, arguments.append_eos)
    write = write_megatron if arguments.format == "megatron" else write_llmc
    try:
        count = write(encode_inputs(encoder, arguments), encoder.vocab, arguments.output)
    except (OSError, ValueError) as error:
        sys.exit(f"tokenize: {error}")
    finally:
        if os.path.exists(arguments.output + ".bin.tmp"):
            os.remove(arguments.output + ".bin.tmp")
    suffix = ".bin" if arguments.format == "llmc" else ""
    print(f"{count} tokens, ids below {encoder.vocab}; train with data.path: {arguments.output}{suffix}, "
          "data.tokenizer: file")


if __name__ == "__main__":
    main()
