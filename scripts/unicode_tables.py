#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes trainer/text/unicode_table.inc: which code points are letters, numbers, white space and parts of words.

    /path/to/python scripts/unicode_tables.py

The classes are those that the Python package tokenizers uses, asked character by character, since equal ids with it are what
the tables are for: \\p{L}, \\p{N} and \\s in its patterns, and \\w beside an added token that is a single word. Debian's
unicode-data and Python's unicodedata are older than its Unicode 16. Needs Python and tokenizers; the version goes to the file.
"""
import os
import sys

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

OUTPUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "trainer", "text", "unicode_table.inc")
BLOCK = 128  # code points
END = 0x110000
LETTER, NUMBER, SPACE, WORD = 1, 2, 3, 4
# Code points of \p{L} and \p{N} in Unicode 16.0, and of \s.
EXPECTED = {"letters": 141028, "numbers": 1911, "blanks": 25}


def matching(splitter, points):
    """The code points that are left when everything else is removed."""
    text = "".join(map(chr, points))
    return {points[i] for _, (begin, end) in splitter.pre_tokenize_str(text) for i in range(begin, end)}


def pattern(regex):
    return pre_tokenizers.Split(Regex(regex), "removed", invert=True)


def word_characters(points):
    """Beside a word character an added token with single_word does not match."""
    tokenizer = Tokenizer(models.BPE(vocab={}, merges=[]))
    tokenizer.add_tokens([AddedToken("<|>", single_word=True, normalized=False)])
    text = "".join(chr(p) + "<|> " for p in points)
    free = {points[begin // 5] for begin, _ in tokenizer.encode(text).offsets}
    return set(points) - free


def classes():
    points = [p for p in range(END) if not 0xD800 <= p < 0xE000]
    letters = matching(pattern(r"\p{L}+"), points)
    numbers = matching(pattern(r"\p{N}+"), points)
    blanks = matching(pattern(r"\s+"), points)
    words = word_characters(points)
    counts = {"letters": len(letters), "numbers": len(numbers), "blanks": len(blanks)}
    if counts != EXPECTED:
        sys.exit(f"unicode_tables: tokenizers {tokenizers.__version__} has {counts}, Unicode 16 has {EXPECTED}")
    digits = pre_tokenizers.Digits(individual_digits=True)
    text = "".join(map(chr, sorted(numbers)))
    if len(digits.pre_tokenize_str(text)) != len(numbers):
        sys.exit("unicode_tables: the pre-tokenizer Digits splits at other characters than \\p{N}")
    table = bytearray(END)
    for members, value in ((letters, LETTER), (numbers, NUMBER), (blanks, SPACE)):
        for p in members:
            table[p] = value
    for p in words:
        table[p] |= WORD
    return table, counts | {"word characters": len(words)}


def rows(name, kind, values, per_line):
    yield f"static const {kind} {name}[{len(values)}] = {{"
    for at in range(0, len(values), per_line):
        yield "    " + " ".join(f"{v}," for v in values[at:at + per_line])
    yield "};"


def main():
    table, counts = classes()
    blocks, index = {}, []
    for begin in range(0, END, BLOCK):
        part = table[begin:begin + BLOCK]
        packed = bytes(part[i] | part[i + 1] << 4 for i in range(0, BLOCK, 2))
        index.append(blocks.setdefault(packed, len(blocks)))
    kind = "uint8_t" if len(blocks) <= 256 else "uint16_t"
    with open(OUTPUT, "w", encoding="ascii") as file:
        print("// SPDX-License-Identifier: Apache-2.0", file=file)
        print("/* Made by scripts/unicode_tables.py: do not edit. Unicode 16.0, as tokenizers "
              f"{tokenizers.__version__} has it:", file=file)
        print(" * " + ", ".join(f"{n} {name}" for name, n in counts.items()) + ".", file=file)
        print(f" * Two code points a byte, the lower one in the lower half; {BLOCK} code points a block. */", file=file)
        for line in rows("unicode_blocks", kind, index, 32):
            print(line, file=file)
        for line in rows("unicode_classes", "uint8_t", list(b"".join(blocks)), 32):
            print(line, file=file)
    print(f"{OUTPUT}: {len(blocks)} blocks, {counts}")


if __name__ == "__main__":
    main()
