#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Files of tokens on a disk that is full, and by a process that is killed.

The disk is full from each call on by which ndtrain tokenize, or a run that encodes its text, changes a file. It says so in one
sentence, with code 73, and leaves nothing but what was there before. A process that is killed in the place of each call leaves
nothing that a reader takes for whole; the next one ends as if it had never been, and removes what is left. Also: several runs
that need one cache at once, and a cache with each byte of its header changed.
"""
import steps
from steps import SOURCE, check, test

TOKENIZE = "ndtrain tokenize --tokenizer tok --input rows.jsonl --output-prefix out/p --threads 1"
OVERWRITE = f"{TOKENIZE} --overwrite"
ENCODE = ("ndtrain check --device cpu --num-processes 1 --sequence-length 32 --model-config tok/config.json --tokenizer tok "
          "--data-path rows.jsonl --cache-dir out")
HEADER_BYTES = 72


def setup(t):
    t.write("tok/tokenizer.json", (SOURCE / "tests/unit/trainer/text/goldens/llama3.json").read_bytes())
    t.write("tok/tokenizer_config.json", '{"eos_token": "<|eot|>"}')
    t.model("tok/config.json", vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    t.write("rows.jsonl", [dict(prompt=f"what is {n}?", completion=" a number") for n in range(3000)])


def left(t):
    return {path.name: path.read_bytes() for path in (t.folder / "out").glob("*")}


def disturbed(t, words, code=None, **settings):
    """Runs the command with settings of disk_calls.c."""
    t.run(words, code, LD_PRELOAD=str(t.build / "tests/e2e/libnd_disk_calls.so"), ASAN_OPTIONS="verify_asan_link_order=0:detect_leaks=0",
          ND_DISK_FOLDER=str(t.folder / "out"), **{f"ND_DISK_{key.upper()}": str(value) for key, value in settings.items()})


def calls_of(t, words):
    """The names of the calls that the command makes, and the files that it leaves."""
    disturbed(t, words, 0, log=t.folder / "log")
    calls = [line.split()[1] for line in t.read("log").splitlines()]
    t.remove("log")
    check(len(calls) > 8, calls)
    return calls, left(t)


def is_full_or_killed(t, words, again, begin, last):
    """At each call. `begin` makes the folder as it is before; where the file `last` is, all of them are whole."""
    begin()
    calls, whole = calls_of(t, words)
    for full in range(1, len(calls) + 1):
        begin()
        disturbed(t, words, full=full)
        what = f"full at call {full} ({calls[full - 1]}): {t.code}, {sorted(left(t))}\n{t.out}{t.log}"
        if not {"open", "pwrite", "fsync", "rename", "mkdir"} & set(calls[full - 1:]):
            check(t.code == 0 and left(t) == whole, f"no room was needed; {what}")
            continue
        said = [line for line in t.log.splitlines() if "error" in line]
        check(t.code == 73 and not left(t) and len(said) == 1 and "No space left on device" in said[0], what)
    for kill in range(1, len(calls) + 1):
        begin()
        disturbed(t, words, 137, kill=kill)
        check(not any(name.endswith(last) for name in left(t)) or whole.items() <= left(t).items(), f"killed at {kill}: {sorted(left(t))}")
        t.run(again)
        check(left(t) == whole, f"after a kill at call {kill}: {sorted(left(t))}")
    return whole


@test
def files_of_the_command(t):
    def begin():
        t.remove("out")
        (t.folder / "out").mkdir()

    whole = is_full_or_killed(t, TOKENIZE, OVERWRITE, begin, ".idx")
    check(sorted(whole) == ["p.bin", "p.idx", "p.mask"], sorted(whole))


@test
def files_that_are_replaced(t):
    """What was there stays as it was, or is gone, but no index is beside another .bin."""
    def put_old():
        for name in "p.bin", "p.idx", "p.mask":
            t.write(f"out/{name}", "of before")

    put_old()
    calls, whole = calls_of(t, OVERWRITE)
    for full in range(1, len(calls) + 1):
        put_old()
        disturbed(t, OVERWRITE, full=full)
        check(t.code in (0, 73) and (t.code == 0) == (left(t) == whole), f"full at {full}: {t.code}, {sorted(left(t))}\n{t.log}")
        check(t.code == 0 or set(left(t).values()) <= {b"of before"}, f"full at {full}: {sorted(left(t))}")
    for kill in range(1, len(calls) + 1):
        put_old()
        disturbed(t, OVERWRITE, 137, kill=kill)
        files = left(t)
        check(files.get("p.bin") == b"of before" or all(files.get(name) != b"of before" for name in ("p.idx", "p.mask")),
              f"killed at call {kill}: {sorted(files)}")


@test
def a_cache(t):
    whole = is_full_or_killed(t, ENCODE, ENCODE, lambda: t.remove("out"), ".tokens")
    check(len(whole) == 1 and all(name.endswith(".tokens") for name in whole), sorted(whole))


@test
def several_runs_need_one_cache(t):
    """One of several processes encodes; the others wait for it, or find the cache."""
    t.wait([t.start(ENCODE, f"log{r}") for r in range(4)], 0)
    said = [t.read(f"log{r}") for r in range(4)]
    check(sum("encoding " in log for log in said) == 1, f"not one has encoded: {said}")
    check(len(left(t)) == 1 and next(iter(left(t))).endswith(".tokens"), sorted(left(t)))


@test
def each_byte_of_the_header_of_a_cache(t):
    """The text is encoded again, and the file is as before."""
    t.run(ENCODE)
    (name, whole), = left(t).items()
    for place in range(HEADER_BYTES):
        t.write(f"out/{name}", whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1:])
        t.run(ENCODE, says="; it is made again")
        check(left(t) == {name: whole}, f"byte {place}: another cache")


steps.main("token_disk", setup)
