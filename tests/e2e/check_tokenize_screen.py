#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `ndtrain tokenize` shows.

On a terminal a bar: its share, rate and time left must fit each other, before and after the process is stopped for a while, so that
the time of each is known to this program. It is erased at the end, when the command is interrupted, and not drawn elsewhere. The
closing table: each row must have the number that is counted here, from tokenizers whose ids are bytes but for a few.
"""
import gzip
import json
import os
import pty
import random
import re
import select
import signal
import struct
import subprocess
import time

import steps
from steps import check, test

ERASE = "\r\x1b[K"
CELLS = 30
BAR = re.compile(r"\r\[(#*)( *)\] +(\d+) %  ([\d.]+) MB/s(?:  (\d+) s left)? \x1b\[K")
ROW = re.compile(r"  (\S.{27}) ([\d,. ]{15}\d)(?:  (.*))?")
DEADLINE = 120


class Terminal:
    """The standard error of `ndtrain tokenize`."""

    def __init__(self, t, flags):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(t.command(f"ndtrain tokenize {flags}"), cwd=t.folder, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=slave, text=True)
        self.text = ""
        os.close(slave)

    def read(self):
        """Whether there was more to read."""
        check(select.select([self.master], [], [], DEADLINE)[0], f"nothing was drawn for {DEADLINE} s after {self.text!r}")
        try:
            data = os.read(self.master, 65536)
        except OSError:  # what a terminal gives when nobody has its other side
            data = b""
        self.text += data.decode()
        return bool(data)

    def read_bar(self, after):
        while not (bar := BAR.search(self.text, after)):
            check(self.read(), f"it ended without a bar: {self.text!r}")
        return bar

    def end(self, code):
        while self.read():
            pass
        os.close(self.master)
        out, _ = self.process.communicate(timeout=DEADLINE)
        check(self.process.returncode == code, f"it ended with {self.process.returncode}: {out}{self.text!r}")
        return out


def check_bar(bar, total):
    """Share, cells, rate and time left are those of one moment. The seconds that it took so far follow from them."""
    full, blank, percent, rate, left = bar.groups()
    percent, rate = int(percent), float(rate)
    check(len(full) + len(blank) == CELLS, f"cells of {bar[0]!r}")
    low, high = max(percent - 0.5, 0) / 100, min(percent + 0.5, 100) / 100
    check(int(low * CELLS) <= len(full) <= int(high * CELLS), f"share of {bar[0]!r}")
    check(left is not None or percent == 0, f"time left of {bar[0]!r}")
    if left is None or rate < 0.1:
        return low, high, None
    fast, slow = rate + 0.05, rate - 0.05
    least, most = total * 1e-6 * (1 - high) / fast, total * 1e-6 * (1 - low) / slow
    check(least - 0.5 <= int(left) <= most + 0.5, f"{bar[0]!r}: {least:.2f} to {most:.2f} s are left")
    return low, high, (total * 1e-6 * low / fast, total * 1e-6 * high / slow)


def write_rows(t, name, members):
    """Lines of 1 MB in all, again and again. Returns the bytes of the file and those of text."""
    words = [f"{n * n % 9973:x}" for n in range(2000)]
    draw = random.Random(5)
    block = "".join(json.dumps({"text": " ".join(draw.choices(words, k=250))}) + "\n" for _ in range(1000))
    size = len(t.write(name, gzip.compress(block.encode(), 6) * members))
    return size, sum(len(json.loads(line)["text"]) for line in block.splitlines()) * members


@test
def progress_of_one_that_is_stopped(t):
    size, _ = write_rows(t, "long.jsonl.gz", 250)
    began = time.monotonic()
    terminal = Terminal(t, "--tokenizer bytes --input long.jsonl.gz --output-prefix long --threads 1")
    first = terminal.read_bar(0)
    _, high, _ = check_bar(first, size)
    check(high < 0.9, f"the text is too short to be stopped within it: {first[0]!r}")
    os.kill(terminal.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED | os.WNOWAIT)
    while select.select([terminal.master], [], [], 0)[0]:
        terminal.read()
    drawn, stopped = len(terminal.text), time.monotonic()
    time.sleep(1.5)
    slept = time.monotonic() - stopped
    os.kill(terminal.process.pid, signal.SIGCONT)
    second = terminal.read_bar(terminal.read_bar(drawn).end())  # the first may have been counted before
    until = time.monotonic() - began
    low, _, seconds = check_bar(second, size)
    check(low >= 0 and (seconds is None or (slept <= seconds[1] and seconds[0] <= until)),
          f"{second[0]!r} came after {slept:.2f} to {until:.2f} s, not {seconds}")
    terminal.process.send_signal(signal.SIGTERM)
    terminal.end(75)
    after = BAR.sub("", terminal.text)
    check(after.startswith(ERASE) and after.count(ERASE) == 1 and "error" in after, f"after the bar of a stopped one: {after!r}")
    check(not t.has("long.[bi]*", "*.tmp-*"), f"it left {os.listdir(t.folder)}")


@test
def a_whole_bar(t):
    size, text = write_rows(t, "short.jsonl.gz", 12)
    flags = "--tokenizer bytes --input short.jsonl.gz --overwrite --output-prefix short --threads 2"
    terminal = Terminal(t, flags)
    out = terminal.end(0)
    bars = list(BAR.finditer(terminal.text))
    check(bars and BAR.sub("", terminal.text) == ERASE, f"bars, then nothing, are wanted: {terminal.text!r}")
    for bar in bars:
        check_bar(bar, size)
    shares = [int(bar[3]) for bar in bars]
    check(shares == sorted(shares) and shares[-1] == 100 and bars[-1][5] == "0", f"{shares} %, {bars[-1][0]!r}")
    head = re.match(r"1 file, ([\d.]+) MB of text in ([\d.]+) s: ([\d.]+) MB/s, (\d+) tokens/s, 2 threads\n", out)
    check(head and head[1] == f"{text * 1e-6:.1f}", f"{text} bytes of text, but {out!r}")
    seconds, rate, tokens = float(head[2]), float(head[3]), int(head[4])
    for seen, exact, rounding in ((rate, text * 1e-6, 0.05), (tokens, text, 0.5)):  # a token is a byte
        check(exact / (seconds + 0.005) - rounding <= seen <= exact / max(seconds - 0.005, 1e-9) + rounding, f"rates of {out!r}")
    t.run(f"ndtrain tokenize {flags}", never="\x1b")
    check("MB/s" not in t.log, f"a bar outside of a terminal: {t.log!r}")


def byte_pieces():
    """GPT-2's characters for bytes."""
    plain = [b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE]
    other = iter(range(0x100, 0x200))
    return {chr(b if b in plain else next(other)): b for b in range(256)}


BEGIN, END, UNKNOWN = "<|begin|>", "<|eot|>", "<unk>"
WITHOUT = "q"  # the character that has no piece


def write_tokenizer(folder, unknown):
    """Ids are bytes, and three special tokens; a document begins with one of them."""
    vocab = byte_pieces()
    del vocab[WITHOUT]
    vocab.update({BEGIN: 256, END: 257, UNKNOWN: 258})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [{"id": vocab[token], "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for token in (BEGIN, END, UNKNOWN)]
    single = [{"SpecialToken": {"id": BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": single + [{"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {BEGIN: {"id": BEGIN, "ids": [256], "tokens": [BEGIN]}}}
    model = {"type": "BPE", "dropout": None, "unk_token": UNKNOWN if unknown else None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": []}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": level,
        "post_processor": template, "decoder": level, "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


# Each text with the text that its tokens stand for: (prompt, completion) or (None, text). U+FFFD has three bytes.
ROWS = [(b'{"text": "abc"}', None, "abc"),
        (b'{"prompt": "what", "completion": "that"}', "what", "that"),
        (b'{"text": ""}', None, ""),
        (b'{"text": 5}', None, None),
        (b'{"text": "a\xff\xc3(b"}', None, "a\ufffd\ufffd(b"),
        (b'{"text": "x\\ud800y\\udc00\\udc00"}', None, "x\ufffdy\ufffd\ufffd"),
        (b'{"text": "\\u00e9\\ud83d\\ude00"}', None, "\u00e9\U0001f600"),
        (f'{{"text": "{BEGIN}twice"}}'.encode(), None, BEGIN + "twice"),
        (f'{{"text": "one {END} two{END}"}}'.encode(), None, f"one {END} two{END}"),
        (b'{"text": "quick quirk"}', None, "quick quirk"),
        (b'no JSON', None, None),
        (b'{"prompt": "", "completion": ""}', "", ""),
        (b'', None, None)]
BAD, EMPTY, INVALID, INVALID_BYTES, HALVES = 2, 2, 2, 2, 3
DOCUMENTS = len(ROWS) - BAD - EMPTY - 1  # and an empty line, which is none


def count(text, special):
    """Tokens of a text, of which some are special; each other byte is one."""
    rest = text.replace(BEGIN, "").replace(END, "") if special else text
    return len(rest.encode()) + (text.count(BEGIN) + text.count(END) if special else 0)


def expected(special, begin, end):
    """Tokens of all documents, and of prompts."""
    documents = [(prompt or "", text) for _, prompt, text in ROWS if text]
    prompts = sum(count(prompt, special) + begin for prompt, _ in documents if prompt)
    ends = sum(end and not (special and text.endswith(END)) for _, text in documents)  # one that ends so gets no second one
    return sum(count(prompt, special) + count(text, special) + begin for prompt, text in documents) + ends, prompts


def read_table(out):
    lines = out.splitlines()
    rows = {}
    for line in lines[1:-1]:
        row = ROW.fullmatch(line)
        check(row and row[1].strip() not in rows, f"a row of the table: {line!r}")
        rows[row[1].strip()] = (row[2].strip(), (row[3] or "").strip())
    return lines[0], rows, lines[-1]


def check_table(t, name, flags, tokens, ignored, **others):
    """The names of `others` are those of rows; all that are not named must be 0 or absent."""
    out = t.run(f"ndtrain tokenize --input in --overwrite --output-prefix {name} --skip-bad {BAD} {flags}")
    head, rows, last = read_table(out)
    size = (t.folder / f"{name}.bin").stat().st_size
    check(size == 2 * tokens, f"{tokens} tokens are counted, {size} bytes are in the file:\n{out}")
    lengths = struct.unpack_from("<Q", (t.folder / f"{name}.idx").read_bytes(), 18)[0]
    check(lengths == DOCUMENTS, f"{lengths} documents are in the index")
    text = sum(len(((prompt or "") + (text or "")).encode()) for _, prompt, text in ROWS)
    text += INVALID_BYTES - 3 * INVALID  # bytes of the file, not what took their place
    wanted = {"documents": (DOCUMENTS, ""), "tokens": (tokens, ""),
              "tokens that count in loss": (tokens - ignored, f"{100 * (tokens - ignored) / tokens:.1f} %"),
              "bytes per token": (f"{text / tokens:.3f}", ""), "empty documents": (EMPTY, "left out"), "bad lines": (BAD, "left out"),
              "invalid bytes": (INVALID, "became U+FFFD"), "halves of surrogate pairs": (HALVES, "became U+FFFD"),
              "characters without a piece": (0, "left out"), "unknown tokens": (0, ""), "special tokens met": (0, "kept as text"),
              "files of other kinds": (3, "not read"), "folders within": (2, "not read"), **others}
    wanted = {row: (f"{n:,}" if isinstance(n, int) else n, remark) for row, (n, remark) in wanted.items()}
    check(rows == wanted, f"{name}: {({k: (rows.get(k), wanted.get(k)) for k in rows.keys() | wanted if rows.get(k) != wanted.get(k)})}")
    check(re.match(r"1 file, 0\.0 MB of text in ", head), head)
    check(last == f"{name}.bin, .mask and .idx, u16 ids; train with data.path: {name}, data.tokenizer: file", last)


@test
def tables(t):
    for inner in "one", "two":
        (t.folder / "in" / inner).mkdir(parents=True)
    for other in "a.md", "b.csv", "c":
        t.write(f"in/{other}", "not read")
    t.write("in/rows.jsonl", b"\n".join(row for row, _, _ in ROWS) + b"\n")
    write_tokenizer(t.folder / "unknown", True)
    write_tokenizer(t.folder / "dropped", False)
    specials = sum((prompt or "").count(token) + (text or "").count(token) for _, prompt, text in ROWS for token in (BEGIN, END))
    without = sum((text or "").count(WITHOUT) for _, _, text in ROWS)
    tokens, prompts = expected(special=False, begin=0, end=0)
    check_table(t, "bytes", "--tokenizer bytes", tokens, prompts)
    tokens, prompts = expected(special=True, begin=1, end=1)
    check_table(t, "unk", "--tokenizer unknown --append-eod --special-in-text parse", tokens, prompts, **{
        "unknown tokens": (without, ""), "special tokens met": (specials, "became tokens"),
        "documents that begin twice": (1, "the text begins with what is added: --no-special-tokens")})
    tokens, prompts = expected(special=False, begin=1, end=0)
    check_table(t, "drop", "--tokenizer dropped --drop-unknown", tokens - without, prompts, **{
        "characters without a piece": (without, "left out"), "special tokens met": (specials, "kept as text")})


steps.main("tokenize_screen")
