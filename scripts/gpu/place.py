# SPDX-License-Identifier: Apache-2.0
"""Where a check runs, and what the items of all phases share: how they report, and how they start programs."""
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import report

NO_MEMORY, SKIPPED = 71, 77  # exit codes: a run that lacks memory; what an item could not do here


class Skip(Exception):
    """An item cannot be done on this machine; the text says why."""


class Failure(Exception):
    """An item failed; the text says why, and may be empty where a program has said it."""


class Cut(Exception):
    """The time of an item, or of the call, is up."""


@dataclasses.dataclass
class Place:
    dry: bool
    out: pathlib.Path
    build: pathlib.Path
    programs: pathlib.Path  # folder of ndlaunch, ndtrain and the benchmarks
    tests: pathlib.Path  # with _ops or _goldens at its end
    jobs: int
    seconds_per_test: int
    gpu: str  # "NVIDIA H200, 9.0, 143771 MiB, 580.95"; empty without nvidia-smi
    commit: str
    peer: str  # the Python with torch
    own_library_path: str  # LD_LIBRARY_PATH before this program added to it
    gpus: int = 1  # that jobs see
    small_steps: int = 20  # of runs of the small model
    small_shape: tuple = (512, 4)  # tokens of a sequence, sequences of a micro-batch
    micro_batches: int = 16  # of a step of the 8B shape
    expected: dict = dataclasses.field(default_factory=dict)  # losses that the doubles gave, by the name of the run
    lock: int = -1

    @property
    def mode(self):
        return "dry run on doubles" if self.dry else "on a GPU"

    @property
    def origin(self):
        return f"commit {self.commit}, {self.gpu or 'no nvidia-smi'}"

    @property
    def has_fp8(self):
        found = re.search(r", *(\d+\.\d+)", self.gpu)
        return self.dry or bool(found) and float(found.group(1)) >= 8.9

    @property
    def memory_bytes(self):
        """Of the GPU; None where it is not known."""
        if self.dry:
            return int(os.environ.get("ND_DOUBLE_MEMORY", "65536")) << 20
        found = re.search(r"(\d+) MiB", self.gpu)
        return int(found.group(1)) << 20 if found else None

    def make_folders(self):
        """Everything that this call starts inherits the lock: what outlives a killed call must not share the GPU with the
        next one."""
        try:
            for name in ("items", "data", "runs"):
                (self.out / name).mkdir(parents=True, exist_ok=True)
            (self.out / "mode").write_text(self.mode + "\n")
        except OSError as error:
            print(f"{report.NAME}: {self.out} cannot be written: {error}", file=sys.stderr)
            sys.exit(73)
        self.out = self.out.resolve()
        self.lock = os.open(self.out / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        os.set_inheritable(self.lock, True)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"{report.NAME}: another call still works in {self.out}, or something that it started does; wait for it or "
                  "end it", file=sys.stderr)
            sys.exit(2)


def say(value):
    """One result of an item."""
    print(json.dumps(value), flush=True)


def complain(text):
    print(f"{report.NAME}: {text}", file=sys.stderr, flush=True)


def run(command, **options):
    """The exit code of a program, whose output is the item's own."""
    sys.stdout.flush()
    options.setdefault("stdin", subprocess.DEVNULL)
    try:
        return subprocess.run([str(c) for c in command], close_fds=False, **options).returncode
    except OSError as error:
        complain(f"{command[0]} cannot be started: {error.strerror}")
        return 127


def output_of(command, timeout=30, codes=(0,)):
    """What a short command prints, without the last line end; empty when it ends with another code."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode in codes else ""


def tool(variable, name):
    """A tool of the toolkit: the one that the variable names, on PATH, or in the toolkit."""
    named = os.environ.get(variable)
    return named or shutil.which(name) or output_of(["scripts/find_cuda"]) + f"/bin/{name}"


def need_fp8(place, precision):
    if precision == "fp8" and not place.has_fp8:
        raise Skip(f"FP8 needs compute capability 8.9: {place.gpu}")
