#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Files of tokens on a disk that is full, and by a process that is killed: check_token_disk.py NDTRAIN LIBRARY GOLDENS.

The disk is full from each call on by which ndtrain tokenize, or a run that encodes its text, changes a file. It says so in one
sentence, with code 73, and leaves nothing but what was there before. A process that is killed in the place of each call leaves
nothing that a reader takes for whole; the next one ends as if it had never been, and removes what is left. Also: several runs
that need one cache at once, and a cache with each byte of its header changed.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from steps import check

NDTRAIN, LIBRARY, GOLDENS = sys.argv[1:4]
CONFIG = ('{"model_type": "llama", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, '
          '"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}')
HEADER_BYTES = 72


def start(top, *command, **settings):
    environment = {**os.environ, "ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=0",
                   **{f"ND_DISK_{key.upper()}": str(value) for key, value in settings.items()}}
    if settings:
        environment["LD_PRELOAD"] = LIBRARY
    return subprocess.Popen([NDTRAIN, *command], cwd=top, env=environment, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(top, *command, **settings):
    """The exit code (of a killed one, minus the signal) and what it printed on both streams."""
    process = start(top, *command, **settings)
    out, errors = process.communicate(timeout=120)
    return process.returncode, out, errors


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def calls_of(log):
    lines = log.read_text().splitlines()
    log.unlink()
    return lines


def one_sentence(errors, words):
    lines = [line for line in errors.splitlines() if "error" in line]
    check(len(lines) == 1 and words in lines[0], f"{words!r} in one sentence is wanted, not:\n{errors}")


def tokenize(out, *more):
    return ["tokenize", "--tokenizer", "tok", "--input", "rows.jsonl", "--output-prefix", str(out / "p"), "--threads", "1", *more]


def check_tokenize(top):
    out, log = top / "out", top / "log"
    out.mkdir()
    code, _, errors = run(top, *tokenize(out), folder=out, log=log)
    check(code == 0, errors)
    calls, whole = calls_of(log), files_of(out)
    check(sorted(whole) == ["p.bin", "p.idx", "p.mask"] and len(calls) > 12, f"{sorted(whole)} by {calls}")
    old = {name: b"of before" for name in whole}
    for full in range(1, len(calls) + 1):
        for path in out.iterdir():
            path.unlink()
        code, _, errors = run(top, *tokenize(out), folder=out, full=full)
        call = calls[full - 1].split()[1]
        later = {line.split()[1] for line in calls[full - 1:]}
        if not later & {"open", "pwrite", "fsync", "rename"}:
            check(code == 0 and files_of(out) == whole, f"no room was needed from call {full} ({call}) on: {code}\n{errors}")
            continue
        check(code == 73, f"full at call {full} ({call}): it ended with {code}:\n{errors}")
        one_sentence(errors, "No space left on device")
        check(not files_of(out), f"full at call {full} ({call}): {sorted(files_of(out))} is left")
    # With --overwrite what was there stays as it was, or is gone, but no index is beside another .bin.
    def put_old():
        for name, data in old.items():
            (out / name).write_bytes(data)

    put_old()
    code, _, errors = run(top, *tokenize(out, "--overwrite"), folder=out, log=log)
    check(code == 0, errors)
    calls_over = calls_of(log)
    for full in range(1, len(calls_over) + 1):
        put_old()
        code, _, errors = run(top, *tokenize(out, "--overwrite"), folder=out, full=full)
        left = files_of(out)
        check(code in (0, 73) and (code == 0) == (left == whole), f"full at {full} with --overwrite: {code}, {sorted(left)}\n{errors}")
        if code:
            check(all(old.get(name) == data for name, data in left.items()), f"full at {full} with --overwrite: {sorted(left)}")
    for kill in range(1, len(calls_over) + 1):
        put_old()
        code, _, errors = run(top, *tokenize(out, "--overwrite"), folder=out, kill=kill)
        left = files_of(out)
        check(code == -9 and (left.get("p.bin") == old["p.bin"] or all(left.get(n) != old[n] for n in ("p.idx", "p.mask"))),
              f"killed at call {kill} with --overwrite: {code}, {sorted(left)}\n{errors}")
    for kill in range(1, len(calls) + 1):
        for path in out.iterdir():
            path.unlink()
        code, _, errors = run(top, *tokenize(out), folder=out, kill=kill)
        left = files_of(out)
        check(code == -9, f"killed at call {kill}: {code}\n{errors}")
        check("p.idx" not in left or all(left.get(name) == data for name, data in whole.items()),
              f"killed at call {kill}, p.idx is there beside {sorted(left)}")
        code, _, errors = run(top, *tokenize(out, "--overwrite"))
        check(code == 0 and files_of(out) == whole, f"after a kill at call {kill}: {code}, {sorted(files_of(out))}\n{errors}")


def encode(cache):
    return ["check", "--device", "cpu", "--num-processes", "1", "--sequence-length", "32", "--model-config", "tok/config.json",
            "--tokenizer", "tok", "--data-path", "rows.jsonl", "--cache-dir", str(cache)]


def check_cache(top):
    cache, log = top / "cache", top / "log"
    code, _, errors = run(top, *encode(cache), folder=cache, log=log)
    check(code == 0, errors)
    calls, whole = calls_of(log), files_of(cache)
    check(len(whole) == 1 and all(name.endswith(".tokens") for name in whole) and len(calls) > 8, f"{sorted(whole)} by {calls}")
    for full in range(1, len(calls) + 1):
        shutil.rmtree(cache, ignore_errors=True)
        code, _, errors = run(top, *encode(cache), folder=cache, full=full)
        left = files_of(cache) if cache.exists() else {}
        call = calls[full - 1].split()[1]
        later = {line.split()[1] for line in calls[full - 1:]}
        if not later & {"open", "pwrite", "fsync", "rename", "mkdir"}:
            check(code == 0 and left == whole, f"no room was needed from call {full} ({call}) on: {code}\n{errors}")
            continue
        check(code == 73 and not left, f"full at call {full} ({call}): {code}, {sorted(left)}\n{errors}")
        one_sentence(errors, "No space left on device")
    for kill in range(1, len(calls) + 1):
        shutil.rmtree(cache, ignore_errors=True)
        code, _, errors = run(top, *encode(cache), folder=cache, kill=kill)
        left = files_of(cache) if cache.exists() else {}
        check(code == -9, f"killed at call {kill}: {code}\n{errors}")
        check(all(data == whole.get(name) for name, data in left.items() if name.endswith(".tokens")), f"killed at {kill}: a part")
        code, _, errors = run(top, *encode(cache))
        left = files_of(cache)
        check(code == 0 and left == whole, f"after a kill at call {kill}: {code}, {sorted(left)}\n{errors}")


def check_together(top):
    """One of several processes encodes; the others wait for it, or find the cache."""
    cache = top / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    processes = [start(top, *encode(cache)) for _ in range(4)]
    said = [process.communicate(timeout=120) for process in processes]
    check([process.returncode for process in processes] == [0] * 4, f"{said}")
    check(sum("encoding " in errors + out for out, errors in said) == 1, f"not one has encoded: {said}")
    names = sorted(files_of(cache))
    check(len(names) == 1 and names[0].endswith(".tokens"), f"{names}")


def check_header(top):
    """Each byte of the header: the text is encoded again, and the file is as before."""
    cache = top / "cache"
    tokens = next(cache.glob("*.tokens"))
    whole = tokens.read_bytes()
    for place in range(HEADER_BYTES):
        tokens.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1:])
        code, out, errors = run(top, *encode(cache))
        check(code == 0 and "; it is made again" in errors + out, f"byte {place}: {code}\n{errors}{out}")
        check(tokens.read_bytes() == whole, f"byte {place}: another cache")


def main():
    with tempfile.TemporaryDirectory() as folder:
        top = pathlib.Path(folder)
        (top / "tok").mkdir()
        shutil.copy(os.path.join(GOLDENS, "llama3.json"), top / "tok/tokenizer.json")
        (top / "tok/config.json").write_text(CONFIG)
        (top / "tok/tokenizer_config.json").write_text('{"eos_token": "<|eot|>"}')
        (top / "rows.jsonl").write_text("".join(
            f'{{"prompt": "what is {n}?", "completion": " a number"}}\n' for n in range(3000)))
        check_tokenize(top)
        check_cache(top)
        check_together(top)
        check_header(top)


main()
