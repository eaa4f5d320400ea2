#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes trainer/text/unicode_table.inc: which code points are letters, numbers, white space and parts of words;
trainer/text/property_table.inc: the general category of each code point, some scripts, and \\w, as patterns name them; and
trainer/text/normal_form_table.inc: what normal form C does to them.

    /path/to/python scripts/unicode_tables.py

The classes are those that the Python package tokenizers uses, asked character by character, since equal ids with it are what
the tables are for: \\p{L}, \\p{N} and \\s in its patterns, and \\w beside an added token that is a single word. Debian's
unicode-data and Python's unicodedata are older than its Unicode 16. Needs Python and tokenizers; the version goes to the file.

The tables of normal form C come from the normalizers NFC and NFD of the same package, which are of an older Unicode than its
patterns: what decomposes, the order of marks (found by putting each beside a mark of each known class), and what two characters
compose to. Then the tables are tried against the package on all code points beside marks.
"""
import os
import sys
import unicodedata

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "trainer", "text")
OUTPUT = os.path.join(FOLDER, "unicode_table.inc")
PROPERTIES = os.path.join(FOLDER, "property_table.inc")
NORMAL_FORM = os.path.join(FOLDER, "normal_form_table.inc")
BLOCK = 128  # code points
END = 0x110000
LETTER, NUMBER, SPACE, WORD = 1, 2, 3, 4
CATEGORIES = "Cc Cf Cn Co Cs Ll Lm Lo Lt Lu Mc Me Mn Nd Nl No Pc Pd Pe Pf Pi Po Ps Sc Sk Sm So Zl Zp Zs".split()
SCRIPTS = "Arabic Cyrillic Devanagari Greek Han Hangul Hebrew Hiragana Katakana Latin Thai".split()
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


def categories(points):
    """The place in CATEGORIES of each code point; surrogates, which no text has, are Cs."""
    table = bytearray([CATEGORIES.index("Cs")]) * END
    seen = 0
    for place, name in enumerate(CATEGORIES):
        if name != "Cs":
            members = matching(pattern(rf"\p{{{name}}}+"), points)
            for p in members:
                table[p] = place
            seen += len(members)
    if seen != len(points):
        sys.exit(f"unicode_tables: the categories have {seen} members, not {len(points)}")
    return table


def ranges(members):
    out = []
    for p in sorted(members):
        if out and out[-1][1] == p - 1:
            out[-1][1] = p
        else:
            out.append([p, p])
    return out


def write_properties(points):
    table = categories(points)
    runs = [p << 5 | table[p] for p in range(END) if p == 0 or table[p] != table[p - 1]]
    with open(PROPERTIES, "w", encoding="ascii") as file:
        print("// SPDX-License-Identifier: Apache-2.0", file=file)
        print(f"/* Made by scripts/unicode_tables.py: do not edit. General categories and scripts of tokenizers {tokenizers.__version__}.", file=file)
        print(" * A run of one category is 32 times its first code point, and the place of the category. */", file=file)
        print(f"static const char category_names[{len(CATEGORIES)}][3] = {{" + ", ".join(f'"{c}"' for c in CATEGORIES) + "};", file=file)
        for line in rows("category_runs", "uint32_t", runs, 16):
            print(line, file=file)
        members = {f"script_{name.lower()}": rf"\p{{{name}}}+" for name in SCRIPTS} | {"word_characters": r"\w+"}
        for name, regex in members.items():
            found = ranges(matching(pattern(regex), points))
            print(f"static const uint32_t {name}[{len(found)}][2] = {{", file=file)
            for at in range(0, len(found), 8):
                print("    " + " ".join("{%d, %d}," % tuple(r) for r in found[at:at + 8]), file=file)
            print("};", file=file)
        print("static const struct {\n    const char *name;\n    const uint32_t (*ranges)[2];\n    size_t count;\n} scripts[] = {", file=file)
        for name in map(str.lower, SCRIPTS):
            print(f'    {{"{name}", script_{name}, sizeof script_{name} / sizeof *script_{name}}},', file=file)
        print("};", file=file)
    print(f"{PROPERTIES}: {len(runs)} runs of categories, {len(SCRIPTS)} scripts")


def rows(name, kind, values, per_line):
    yield f"static const {kind} {name}[{len(values)}] = {{"
    for at in range(0, len(values), per_line):
        yield "    " + " ".join(f"{v}," for v in values[at:at + per_line])
    yield "};"


NFC = normalizers.NFC().normalize_str
NFD = normalizers.NFD().normalize_str
ACTIVE = 255  # a starter that joins what is before it, or any character that normal form C changes
HANGUL = range(0xAC00, 0xD7A4)


def mark_classes(points):
    """The marks, each with the number of its class from 1 on, in the order that normal form puts them in."""
    first, last = "\u0334", "\u0345"  # classes 1 and 240, the lowest and the highest one

    def is_above(a, b):
        return NFD("a" + a + b) != "a" + a + b

    def is_mark(c):
        return is_above(c, first) or is_above(last, c)

    known = {}  # a mark of each class
    for p in points:
        c = chr(p)
        if unicodedata.combining(c) and NFD(c) == c and is_mark(c):
            known.setdefault(unicodedata.combining(c), c)
    measures = [c for _, c in sorted(known.items())]
    for i, a in enumerate(measures):
        for j, b in enumerate(measures):
            assert is_above(a, b) == (i > j), (hex(ord(a)), hex(ord(b)))
    marks = {}
    for p in points:
        c = chr(p)
        if NFD(c) == c and is_mark(c):
            equal = [i for i, m in enumerate(measures) if not is_above(c, m) and not is_above(m, c)]
            assert len(equal) == 1, (hex(p), equal)
            marks[p] = equal[0] + 1
    return marks


def decompositions(points):
    return {p: [ord(c) for c in NFD(chr(p))] for p in points if p not in HANGUL and NFD(chr(p)) != chr(p)}


def compositions(parts):
    """(first, second): what they compose to."""
    pairs = {}
    for p, codes in parts.items():
        if NFC(chr(p)) != chr(p):
            continue
        first, second = NFC("".join(map(chr, codes[:-1]))), chr(codes[-1])
        assert len(first) == 1 and NFC(first + second) == chr(p), hex(p)
        pairs[ord(first), ord(second)] = p
    return pairs


def normal_form(text, marks, parts, pairs):
    """Normal form C by the tables, as trainer/text/normalize.c makes it."""
    codes = []
    for c in text:
        p = ord(c)
        if p in HANGUL:
            p -= 0xAC00
            codes += [0x1100 + p // 588, 0x1161 + p % 588 // 28] + ([0x11A7 + p % 28] if p % 28 else [])
        else:
            codes += parts.get(p, [p])
    at = 0
    while at < len(codes):
        end = at
        while end < len(codes) and codes[end] in marks:
            end += 1
        codes[at:end] = sorted(codes[at:end], key=marks.get)
        at = end + 1
    out, starter, before = [], -1, -1
    for p in codes:
        k = marks.get(p, 0)
        made = None
        if starter >= 0 and before < k:
            s = out[starter]
            if 0x1100 <= s < 0x1113 and 0x1161 <= p < 0x1176:
                made = 0xAC00 + ((s - 0x1100) * 21 + p - 0x1161) * 28
            elif s in HANGUL and (s - 0xAC00) % 28 == 0 and 0x11A8 <= p < 0x11C3:
                made = s + p - 0x11A7
            else:
                made = pairs.get((s, p))
        if made:
            out[starter] = made
            continue
        if k == 0:
            starter, before = len(out), -1
        else:
            before = k
        out.append(p)
    return "".join(map(chr, out))


def check_normal_form(points, marks, parts, pairs):
    one, other = "\u0301", "\u0323"  # classes 230 and 220
    for p in points:
        for text in (chr(p), "a" + one + chr(p) + other, "e" + chr(p) + one, chr(p) + other + one):
            if normal_form(text, marks, parts, pairs) != NFC(text):
                sys.exit(f"unicode_tables: normal form C of {[hex(ord(c)) for c in text]} is not that of the tables")


def write_normal_form(points):
    marks = mark_classes(points)
    parts = decompositions(points)
    pairs = compositions(parts)
    check_normal_form(points, marks, parts, pairs)
    table = bytearray(END)
    for p in points:
        table[p] = marks.get(p, ACTIVE if NFC(chr(p)) != chr(p) else 0)
    for _, second in pairs:
        table[second] = table[second] or ACTIVE
    for p in [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]:  # Hangul, which is composed by arithmetic
        table[p] = ACTIVE
    blocks, index = {}, []
    for begin in range(0, END, BLOCK):
        index.append(blocks.setdefault(bytes(table[begin:begin + BLOCK]), len(blocks)))
    assert len(blocks) <= 256 and max(map(len, parts.values())) <= 4
    flat = [[p, *codes, *[0] * (4 - len(codes))] for p, codes in sorted(parts.items())]
    with open(NORMAL_FORM, "w", encoding="ascii") as file:
        print("// SPDX-License-Identifier: Apache-2.0", file=file)
        print(f"/* Made by scripts/unicode_tables.py: do not edit. Normal form C of tokenizers {tokenizers.__version__}:", file=file)
        print(f" * {len(marks)} marks in {max(marks.values())} classes, {len(parts)} decompositions, {len(pairs)} compositions.", file=file)
        print(f" * A byte per code point, {BLOCK} code points a block: 0, the class of a mark, or {ACTIVE}. */", file=file)
        print(f"enum {{ NORMAL_FORM_CLASSES = {max(marks.values())} }};", file=file)
        for line in rows("normal_form_blocks", "uint8_t", index, 32):
            print(line, file=file)
        for line in rows("normal_form_classes", "uint8_t", list(b"".join(blocks)), 32):
            print(line, file=file)
        for name, table in (("decompositions", flat), ("compositions", [[*pair, p] for pair, p in sorted(pairs.items())])):
            print(f"static const uint32_t normal_form_{name}[{len(table)}][{len(table[0])}] = {{", file=file)
            for at in range(0, len(table), 4):
                print("    " + " ".join("{" + ", ".join(map(str, row)) + "}," for row in table[at:at + 4]), file=file)
            print("};", file=file)
    print(f"{NORMAL_FORM}: {len(marks)} marks, {len(parts)} decompositions, {len(pairs)} compositions")


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
    points = [p for p in range(END) if not 0xD800 <= p < 0xE000]
    write_properties(points)
    write_normal_form(points)


if __name__ == "__main__":
    main()
