#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed while they save, and go on: check_checkpoint_kills.py BUILD_FOLDER LIBRARY [all].

The worker dies in the place of each call by which it saves (all), or of every third one.
What is then resumed with "auto" goes on from the last checkpoint that was reported, or from the one that was being saved, ends
with the bytes of a run that was never disturbed, and leaves nothing half-made.
"""
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

from checkpoint_runs import INTERVAL, LAST, STEPS, Bench, check, each, every, resumed_step

RESUME = ("--resume-from-checkpoint", "auto")
EXPORT = ("--checkpoint-export-model",)


def check_complete(bench, out):
    """Nothing with a good name is half a checkpoint. That every byte is right shows when it is resumed."""
    for name in bench.names(out) if (bench.folder / out).exists() else []:
        if not name.startswith("."):
            folder = bench.folder / out / name
            check((folder / "manifest.json").exists(), f"{out}/{name} has no manifest")
            manifest = json.loads((folder / "manifest.json").read_text())
            sizes = sum(path.stat().st_size for path in (folder / "state").glob("*.safetensors"))
            check(sizes == sum(size for size, _ in manifest["writers"]), f"{out}/{name} has {sizes} bytes")


def newest(calls, rank):
    """The checkpoint that is there when a worker dies after these calls: each names the step in its path."""
    saved = [0]
    for name, path in calls:
        found = re.fullmatch(r"\.tmp-checkpoint-(\d+)-[^/]*", path)
        if rank == 0 and name == "renameat2" and found:
            saved.append(int(found[1]))
        elif rank > 0 and found: # it begins to save: what it saved before is committed
            saved.append(int(found[1]) - INTERVAL)
    return saved[-1]


def kill_at(bench, workers, rank, number, whole, calls, flags):
    out = f"killed-{workers}-{rank}-{number}"
    code, printed = bench.end(bench.launch(workers, out, *flags), dict(folder=bench.folder / out, rank=rank, kill=number))
    check(code != 0, f"{out} was not killed:\n{printed}")
    check_complete(bench, out)
    printed = bench.train(workers, out, *RESUME, *flags)
    # The call in whose place rank 1 died names the save that it was in.
    wanted, got = newest(calls[:number if rank else number - 1], rank), resumed_step(printed) or 0
    check(got == wanted, f"the run went on from step {got}, and not from {wanted}:\n{printed}")
    # Behind the last commit only older checkpoints are left to be deleted, which the next save would do.
    bench.same_end(out, whole, may_have_more=wanted == STEPS)
    for name in LAST if flags else []:
        check(bench.exported(out, name) == bench.exported(whole, name), f"{out}/{name} holds another model")
    bench.remove(out)


def killed(bench, workers, rank, whole, calls, flags=()):
    def work(number):
        try:
            kill_at(bench, workers, rank, number, whole, calls, flags)
        except AssertionError as error:
            raise AssertionError(f"rank {rank} of {workers} killed at call {number}, {calls[number - 1]}: {error}") from None
    return work


def matrix(bench, workers, all_calls):
    whole = f"whole-{workers}"
    for rank in range(workers):
        calls = bench.calls(workers, rank, whole)
        names = {name for name, _ in calls}
        wanted = {"mkdir", "openat", "fallocate", "pwrite64", "fsync", "close"} | ({"renameat2", "unlinkat"} if rank == 0 else set())
        check(wanted <= names, f"only {names} are counted")
        numbers = every(calls, 1) if all_calls else every(calls, 20)[rank::3]
        begin = time.monotonic()
        each(numbers, killed(bench, workers, rank, whole, calls))
        print(f"{workers} workers: rank {rank} was killed at {len(numbers)} of {len(calls)} calls, {time.monotonic() - begin:.1f} s")
        if rank < workers - 1:
            bench.remove(whole)


def exporting(bench, all_calls):
    """With a model in each checkpoint: the calls that make it, which come between the state and its manifest."""
    begin = time.monotonic()
    calls = bench.calls(1, 0, "exporting", *EXPORT)
    made = [number for number, (_, path) in enumerate(calls, 1) if re.fullmatch(r"\.tmp-checkpoint-\d+-[^/]*/(?!state|manifest).*", path)]
    paths = {calls[number - 1][1].split("/", 1)[1] for number in made}
    check(any("model.safetensors" in path for path in paths) and any("config.json" in path for path in paths), f"only {paths} are made")
    numbers = made if all_calls else made[::15]
    each(numbers, killed(bench, 1, 0, "exporting", calls, EXPORT))
    print(f"with an exported model: killed at {len(numbers)} of {len(made)} calls that make it, {time.monotonic() - begin:.1f} s")


def is_worker(process, rank):
    words = process.joinpath("cmdline").read_bytes().split(b"\0")
    return b"train" in words and f"RANK={rank}".encode() in process.joinpath("environ").read_bytes().split(b"\0")


def find_worker(launcher, rank):
    """A descriptor of the worker's process, which stays its own when it ends; None while there is none."""
    try:
        for child in pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            process = pathlib.Path(f"/proc/{child}")
            if is_worker(process, rank):
                descriptor = os.pidfd_open(int(child))
                if is_worker(process, rank):
                    return descriptor
                os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        pass
    return None


def disturbed(bench, command, generator, seconds):
    """One start, with a worker that dies after some time, or in the place of one of its calls. The exit code."""
    rank = generator.randrange(2)
    if generator.random() < 0.5:
        faults = dict(folder=bench.folder / "out", rank=rank, kill=generator.randrange(1, 700))
        return bench.end(command, faults)[0]
    with subprocess.Popen(command, cwd=bench.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as launcher:
        worker = None
        while worker is None and launcher.poll() is None:
            time.sleep(0.002)
            worker = find_worker(launcher.pid, rank)
        if worker is not None:
            time.sleep(generator.random() * seconds)
            with contextlib.suppress(ProcessLookupError): # it has ended
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            os.close(worker)
        return launcher.wait(timeout=60)


def restarts(bench, rounds):
    """kill -9 of either rank at any step, again and again, each time resumed by hand."""
    generator = random.Random(1)
    steps, kills = 60, 0
    begin = time.monotonic()
    bench.train(2, "long", steps=steps)
    seconds = time.monotonic() - begin
    command = bench.launch(2, "out", *RESUME, steps=steps)
    for _ in range(rounds):
        for _ in range(5):
            code = disturbed(bench, command, generator, seconds)
            kills += code != 0
            if code == 0:
                break
        if code != 0:
            bench.train(2, "out", *RESUME, steps=steps)
        bench.same_result("out", "long")
        check(set(bench.names("out")) >= {f"checkpoint-{steps - INTERVAL}", f"checkpoint-{steps}"}, f"{bench.names('out')}")
        check(not [name for name in bench.names("out") if not name[-1].isdigit() or name[0] == "."], f"{bench.names('out')}")
        bench.remove("out")
    check(kills > rounds // 2, f"only {kills} kills in {rounds} rounds")
    print(f"{rounds} runs were killed {kills} times and resumed by hand, {time.monotonic() - begin:.1f} s")


def main():
    all_calls = sys.argv[3:] == ["all"]
    with Bench(*sys.argv[1:3]) as bench:
        for workers in (1, 2):
            matrix(bench, workers, all_calls)
        exporting(bench, all_calls)
        restarts(bench, 10)
    print(f"check_checkpoint_kills: every run of {STEPS} steps ended with the bytes of the undisturbed one")


if __name__ == "__main__":
    main()
