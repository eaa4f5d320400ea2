# SPDX-License-Identifier: Apache-2.0
"""Our ids and texts beside those of the Python package tokenizers, live: check_tokenizers.py TOOL GOLDENS [all]

For each tokenizer of the folder GOLDENS: code points alone and between letters, random strings over classes of
characters with added tokens and their prefixes, invalid bytes, and long runs; the ids are decoded again by both. Then patterns of
pre-tokenizers: a list with all syntax that is understood, and random ones, those that are refused being left out. ND_TEXT_BYTES
is the number of random bytes per tokenizer (check_tokenizers.sh sets it: 200000, with "all" 1000000), ND_TEXT_FILES names further
tokenizer.json files, with ':' between them.
"""
import array
import glob
import os
import random
import struct
import subprocess
import sys
import tempfile

from tokenizers import Regex, Tokenizer, pre_tokenizers

ALL = sys.argv[3:] == ["all"]
RANDOM_BYTES = int(os.environ["ND_TEXT_BYTES"])
CLASSES = [
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789\u0660\u0664\u00b2\u00bd\u216b\u2461", " ", " \t\n\r\u0085\u00a0\u2003\u2028\u3000",
    "\r\n", "'", "'sStTrReEvVmMlLdD\u017f\u212a", "!?.,;:-_(){}[]<>|/#$%&*+=@^`~\"\\", "\u00e9\u00df\u03b1\u0436\u05d0\u0639\u0915\u4f60\u3042\uac00",
    "\u0301\u0308\u0323\u0345\u094d\u20dd\u0eb8\u093c\u0c4d\u3099\u0334", "\u1100\u1161\u11a8\uac00\ud7a3", "\U0001F600\U0001F468\u200d\u2764\ufe0f", "\u2581", "\u200b\u180e\ufeff\u0000\u001f",
]
# The tokenizers that see all code points with "all", or each where a night's run asks for 10 million bytes; else, and the
# others, see every 29th, each from another one on. Together they have every scanner and every lookup.
NIGHT = ALL and RANDOM_BYTES >= 10000000
NORMAL_FORM = "qwen2_nfc.json"
WHOLE = ("llama3.json", "digits.json", "llama2.json")
RANDOM_PATTERNS = 1500 if NIGHT else 200 if ALL else 60
RUNS = ["a", " ", "\n", "\u2581", "1", "'", "\u4f60", "\U0001F600", " a", "ab", "\r\n", "'s"]
PATTERNS = [
    r"\w+|[^\w\s]+", r"\d+|\D", r"\h+|\H+", r"\S+|\s", r"(?i:'s|k|[a-fs])+", r"(?i)'S|x|(?-i)T+", r"[[a-m][^\s\p{L}]]+", r"[\p{L}&&[^a-m]&&\w]+",
    r"(?<=\p{Ll})(?=\p{Lu})|(?<!\d)\d", r"(?=\s)|(?!\w)", r"", r"x*|\p{M}*", r"(?>\s+)\S|\p{Lu}?+\p{L}", r"\p{^L}{1,9}?\p{L}", r"\P{Lu}{2,}|\p{N}{,2}",
    r"[^\r\n\x{20}]+", r".+", r"\p{Han}+|\p{Hiragana}+|\p{Katakana}+|\p{Hangul}+|\p{Latin}+|\p{Cyrillic}+|\p{Greek}+|\p{Arabic}+|\p{Hebrew}+|"
    r"\p{Devanagari}+|\p{Thai}+",
] + [rf"\p{{{c}}}+" for c in "L M N P S Z C Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co Cn".split()]
LONG_RUNS = ["a", " ", "\u0301\u0323"]  # a megabyte of each with "all"


def ask(tool, path, mode, records, code):
    """Records of bytes or of ids, and what comes back for each."""
    sent = b"".join(struct.pack("<I", len(r)) + (r if code == "B" else array.array("i", r).tobytes()) for r in records)
    done = subprocess.run([tool, path, mode], input=sent, stdout=subprocess.PIPE, check=True)
    at, back, answer = 0, [], done.stdout
    each = 1 if mode in ("decode", "skip") else 4
    for _ in records:
        n = struct.unpack_from("<I", answer, at)[0] * each
        part = answer[at + 4:at + 4 + n]
        back.append(part if each == 1 else array.array("i", part).tolist())
        at += 4 + n
    assert at == len(answer), "the tool wrote more than it was asked for"
    return back


def known_points(first, step):
    """Characters that all packages know alike (proof_texts.c)."""
    newer = subprocess.run([sys.argv[1], "-", "newer"], stdout=subprocess.PIPE, check=True).stdout
    yield from (chr(p) for p in range(first, 0x110000, step) if not 0xD800 <= p < 0xE000 and not newer[p])


def code_points(first, step):
    for c in known_points(first, step):
        yield from (c, "a" + c + "b", "'" + c, " " + c + " 1")


def marked_points(first, step):
    """Code points beside marks of two classes, which normal form C sorts and composes."""
    for c in known_points(first, step):
        yield from ("a\u0301" + c + "\u0323", "\u09c7" + c + "\u0301")


def grouped(texts, size):
    """Several short texts in one: a line is a border for every family but those that see one long word."""
    held = []
    for text in texts:
        held.append(text)
        if len(held) == size:
            yield "\n".join(held)
            held = []
    if held:
        yield "\n".join(held)


def random_texts(tokenizer, seed):
    generator = random.Random(seed)
    tokens = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
    total = 0
    while total < RANDOM_BYTES:
        parts = []
        for _ in range(generator.randint(1, 12)):
            if tokens and generator.random() < 0.15:
                token = generator.choice(tokens)
                parts.append(token[:generator.randint(1, len(token))] if generator.random() < 0.4 else token)
            else:
                parts.append("".join(generator.choices(generator.choice(CLASSES), k=generator.randint(1, 6))))
        text = "".join(parts)
        total += len(text.encode())
        yield text


def invalid_texts(seed):
    generator = random.Random(seed)
    for _ in range(500):
        yield bytes(generator.choices(b"ab \xff\xc3\xa9\xe2\x82\xac\xed\xa0\x80\xf0\x9f\x98\x80\xf4\x90\xc0\xaf", k=generator.randint(1, 12)))


def compare(tool, path, tokenizer, texts, mode):
    """texts: bytes. The ids of both; returns them."""
    tokenizer.encode_special_tokens = mode == "text"
    ours = ask(tool, path, mode, texts, "B")
    for text, ids in zip(texts, ours):
        expected = tokenizer.encode(text.decode(errors="replace"), add_special_tokens=mode == "post").ids
        if ids != expected:
            at = next((i for i, (a, b) in enumerate(zip(ids, expected)) if a != b), min(len(ids), len(expected)))
            sys.exit(f"{path}, {mode}: {text[:300]!r} gives {ids[at:at + 8]} from id {at} on, not {expected[at:at + 8]}")
    return ours


def compare_texts(tool, path, tokenizer, ids, mode):
    for one, text in zip(ids, ask(tool, path, mode, ids, "i")):
        expected = tokenizer.decode(one, skip_special_tokens=mode == "skip").encode()
        if text != expected:
            sys.exit(f"{path}, {mode}: {one[:40]} gives {text[:300]!r}, not {expected[:300]!r}")


def check(tool, path, number):
    tokenizer = Tokenizer.from_file(path)
    step = 1 if NIGHT or (ALL and os.path.basename(path) in WHOLE) else 29
    points = [t.encode() for t in grouped(code_points(number % step, step), 64)]
    if os.path.basename(path) == NORMAL_FORM:
        step = 1 if ALL else 7
        points += [t.encode() for t in grouped(marked_points(number % step, step), 64)]
    mixed = [t.encode() for t in random_texts(tokenizer, number)]
    runs = [(r * n).encode() for r in RUNS for n in (31, 32, 33, 64, 5000)]
    runs += [(r * (1 << 20)).encode() for r in LONG_RUNS if ALL]
    compare(tool, path, tokenizer, points + runs, "parse")
    compare(tool, path, tokenizer, list(invalid_texts(number)), "text")
    ids = compare(tool, path, tokenizer, mixed, "parse")
    compare(tool, path, tokenizer, mixed, "text")
    compare(tool, path, tokenizer, mixed[:200], "post")
    generator = random.Random(number)
    size = tokenizer.get_vocab_size()
    known = [i for i in range(size) if tokenizer.id_to_token(i) is not None]
    ids += [generator.choices(known, k=generator.randint(1, 20)) for _ in range(2000)]
    compare_texts(tool, path, tokenizer, ids, "decode")
    compare_texts(tool, path, tokenizer, ids, "skip")
    print(f"{os.path.basename(path)}: {len(points) * 64} texts of code points, {len(mixed)} random ones, {len(ids)} decoded")


def random_pattern(g, depth=2):
    """Of the syntax that is understood, mostly."""
    atoms = ["a", "b", "A", "'", " ", "1", r"\n", "\u00e9", "\u4f60", r"\s", r"\S", r"\d", r"\w", r"\W", r"\p{L}", r"\P{L}", r"\p{Lu}", r"\p{Ll}", r"\p{N}",
             r"\p{M}", r"\p{P}", "[a-mA-M]", r"[^\s\p{L}]", "[\\p{L}&&[^a-m]]", r"[\r\n]", ".", r"\p{Han}", "[^a-z]", "(?i:[a-fs])", "(?i:'s|k)"]
    repeats = [""] * 8 + ["?", "*", "+", "{2}", "{1,3}", "??", "*?", "+?", "?+", "*+", "++", "{,2}", "{1,2}?", "{2,}"]
    looks = ["(?=%s)", "(?!%s)", "(?<=%s)", "(?<!%s)"]

    def item():
        if depth and g.random() < 0.25:
            return g.choice(["(?:%s)", "(%s)", "(?>%s)"]) % random_pattern(g, depth - 1) + g.choice(repeats)
        if g.random() < 0.15:
            return g.choice(looks) % g.choice(atoms)
        return g.choice(atoms) + g.choice(repeats)

    return "|".join("".join(item() for _ in range(g.randint(1, 3))) for _ in range(g.randint(1, 3)))


def words(splitter, text):
    """The ends of the words of a text, in bytes."""
    ends, byte, char = [], 0, 0
    for _, (_, end) in splitter.pre_tokenize_str(text):
        byte += len(text[char:end].encode())
        char = end
        ends.append(byte)
    return ends


def check_pattern(tool, path, pattern, texts):
    """False: our program refuses the pattern, or a text as too slow."""
    with open(path, "w", encoding="utf-8", newline="") as out:
        out.write(pattern)
    sent = b"".join(struct.pack("<I", len(t)) + t for t in map(str.encode, texts))
    done = subprocess.run([tool, path, "words"], input=sent, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace")
        if not any(known in said for known in (" is not supported: ", " takes too ")):
            sys.exit(f"the pattern {pattern}: {said}")
        return False
    splitter, at = pre_tokenizers.Split(Regex(pattern), "isolated"), 0
    for text in texts:
        n = 4 * struct.unpack_from("<I", done.stdout, at)[0]
        ours = array.array("i", done.stdout[at + 4:at + 4 + n]).tolist()
        at += 4 + n
        try:
            theirs = words(splitter, text)
        except BaseException as error:  # a panic of Rust is no Exception
            if "retry-limit" not in str(error):
                raise
            return False
        if ours != theirs:
            sys.exit(f"the pattern {pattern}: {text!r} has words that end at {ours}, not at {theirs}")
    return True


def check_patterns(tool):
    generator = random.Random(1)
    step = 1 if NIGHT else 4 if ALL else 29
    points = list(grouped(known_points(0, step), 4096))
    mixed = ["".join("".join(generator.choices(generator.choice(CLASSES), k=generator.randint(1, 6))) for _ in range(generator.randint(1, 12)))
             for _ in range(200)]
    taken = 0
    with tempfile.TemporaryDirectory() as work:
        path = os.path.join(work, "pattern")
        for pattern in PATTERNS:
            if not check_pattern(tool, path, pattern, mixed + points):
                sys.exit(f"the pattern {pattern} is refused")
        for _ in range(RANDOM_PATTERNS):
            taken += check_pattern(tool, path, random_pattern(generator), mixed)
    if 2 * taken < RANDOM_PATTERNS:
        sys.exit(f"only {taken} of {RANDOM_PATTERNS} random patterns are understood")
    print(f"{len(PATTERNS)} patterns, and {taken} of {RANDOM_PATTERNS} random ones")


def main():
    tool, folder = sys.argv[1:3]
    paths = [p for p in sorted(glob.glob(os.path.join(folder, "*.json"))) if not p.endswith(".cases.json")]
    paths += [p for p in os.environ.get("ND_TEXT_FILES", "").split(":") if p]
    assert len(paths) >= 12, f"only {len(paths)} tokenizers in {folder}"
    check_patterns(tool)
    for number, path in enumerate(paths):
        check(tool, path, number)


if __name__ == "__main__":
    main()
