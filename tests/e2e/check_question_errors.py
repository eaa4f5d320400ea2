#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Questions about files that fail: check_question_errors.py BUILD_FOLDER LIBRARY [all].

Each command runs once undisturbed, which counts its questions (question_calls.c): stat, open, opendir, readdir, realpath and
statvfs on the files of the test. Then one of them fails with EIO, EMFILE or EACCES. An error says nothing about what is there: the
command ends with 74 (73 where it was to write) and one sentence with a path and the reason, or does what it did undisturbed.
No checkpoint gets another name, and a run that goes on never begins again at step 1. "all": each call; else some of each kind.
"""
import errno
import itertools
import json
import os
import re
import shutil
import subprocess
import sys

from checkpoint_runs import Bench, check, each

ERRORS = ["EIO", "EMFILE", "EACCES"]
REASONS = {name: os.strerror(getattr(errno, name)) for name in ERRORS}
VARIES = re.compile(r"\d+(\.\d+)? (s|ms|MB/s|GB/s|tokens/s|min)\b|[0-9.]+ GB/s|\d{4}-\d\d-\d\d[T ][0-9:]+Z?|nd-\w+|\bwork-\S*?/|0x\w+|"
                    r"\d+ (us|kB)\b|[0-9.]+ are free")


class Command:
    def __init__(self, name, arguments, keep=()):
        self.name, self.arguments, self.keep = name, arguments, keep # keep: files whose bytes are the result


def commands(bench):
    run = ["--device", "cpu", "--model-config", "model.json", "--data-path", "data/*.txt", "--validation-path", "", "--sequence-length",
           "64", "--num-steps", "6", "--save-dir", "run", "--checkpoint-frequency", "2", "--save-total-limit", "2", "--log-level", "info"]
    out = ["model/model.safetensors"]
    return [
        Command("auto", ["train", *run, "--resume-from-checkpoint", "auto"], out),
        Command("latest", ["train", *run, "--resume-from-checkpoint", "latest"], out),
        Command("check", ["check", *run, "--resume-from-checkpoint", "auto"]),
        Command("plan", ["plan", *run]),
        Command("ls", ["ckpt", "ls", "run", "--json"]),
        Command("verify", ["ckpt", "verify", "run"]),
        Command("prune", ["ckpt", "prune", "run", "--keep-last", "1"]),
        Command("export", ["export", "run", "out"]),
        Command("diff", ["ckpt", "diff", "run/checkpoint-4", "run/checkpoint-4"]),
        Command("generate", ["generate", "--model", "run", "--tokenizer", "bytes", "--prompt", "abc", "--max-new-tokens", "4", "--temperature",
                             "0", "--device", "cpu"]),
        Command("eval", ["eval", "--model", "run", "--tokenizer", "bytes", "--data", "data", "--device", "cpu"]),
        Command("tokenize", ["tokenize", "--tokenizer", "bytes", "--input", "data", "--output-prefix", "tokens"]),
        Command("report", ["report", "run"]),
    ]


class Work:
    """A fresh copy of the folder for each try."""
    numbers = itertools.count()

    def __init__(self, bench):
        self.bench, self.folder = bench, bench.folder / f"work-{next(self.numbers)}"
        shutil.copytree(bench.folder / "origin", self.folder, symlinks=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder)

    def call(self, command, fail=0, code="EIO"):
        log = self.folder.with_suffix(".log")
        environment = dict(os.environ, LD_PRELOAD=self.bench.library, ND_QUESTION_FOLDER=str(self.folder), ND_QUESTION_LOG=str(log),
                           ND_QUESTION_FAIL=str(fail), ND_QUESTION_ERRNO=str(getattr(errno, code)), OMP_NUM_THREADS="1",
                           XDG_CACHE_HOME=str(self.folder / "cache"))
        done = subprocess.run([str(self.bench.build / "ndtrain"), *command.arguments], cwd=self.folder, env=environment,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        lines = [line.split(" ", 2) for line in log.read_text().splitlines()] if log.exists() else []
        log.unlink(missing_ok=True)
        self.code, self.printed = done.returncode, done.stdout.replace(str(self.folder) + "/", "")
        self.questions = [(name, path[len(str(self.folder)) + 1:]) for number, name, path in lines if number != "0"]
        # What a process began itself under a temporary name, it may remove.
        self.changes = {(name, re.sub(r"(old|bad)-[0-9]+", r"\1", path[len(str(self.folder)) + 1:])) for number, name, path in lines
                        if number == "0" and ".tmp-" not in path and not path.endswith(".part")}
        return self

    def result(self, command):
        """What the command is for: what it printed without times, or the files that it made."""
        steps = []
        metrics = self.folder / "run/metrics.jsonl"
        if command.keep and metrics.exists():
            events = [json.loads(line) for line in metrics.read_text().splitlines()]
            steps = [(e["step"], e["loss"]) for e in events if "step_ms" in e]
        files = {name: (self.folder / "run" / name).read_bytes() for name in command.keep if (self.folder / "run" / name).exists()}
        printed = "" if command.keep else VARIES.sub("", self.printed)
        return self.code, steps, files, sorted(n for n in os.listdir(self.folder / "run") if n.startswith("checkpoint-")), printed


def sample(questions, everything):
    """One of each kind of call on each kind of file, and of those an N-th; or all."""
    seen, chosen = set(), []
    for number, (name, path) in enumerate(questions, 1):
        kind = name, re.sub(r"\d+", "", path)
        if everything or kind not in seen:
            chosen.append(number)
        seen.add(kind)
    return chosen if everything else chosen[::2]


def try_one(bench, job):
    command, clean, whole, number, code = job
    name, path = clean.questions[number - 1]
    with Work(bench) as work:
        work.call(command, number, code)
        where = f"{command.name}, call {number}: {name} of {path} fails with {code}; ended with {work.code}:\n{work.printed[-2500:]}"
        names = os.listdir(work.folder / "run")
        check(not [n for n in names if re.match(r"checkpoint-\d+\.", n)], f"a checkpoint is set aside: {names}; {where}")
        check({f"checkpoint-{step}" for step in (4,)} <= set(names) or command.name == "prune" or work.result(command) == whole,
              f"a checkpoint is gone: {names}; {where}")
        got = work.result(command)
        said = [line for line in work.printed.splitlines() if REASONS[code] in line]
        # A save that fails is named, and the run goes on; so does one whose profile or record of what is kept fails.
        if got == whole or (command.keep and work.code == 0 and got[:3] == whole[:3] and said):
            return
        check(work.code in (73, 74), where)
        # EACCES is the one error of access that answers it: this process may not write there. Any other error answers nothing.
        check(name != "access" or work.code == (73 if code == "EACCES" else 74), f"a question that fails is no answer; {where}")
        # A rename that is not known to be durable is taken back.
        check(work.code == 73 or work.changes <= clean.changes, f"changes that an undisturbed run does not make: {work.changes - clean.changes}; {where}")
        check(said and any(re.search(r'["/]|\brun\b', line) for line in said), f"no reason is said; {where}")
        metrics = (work.folder / "run/metrics.jsonl").read_text()
        check(metrics.count('{"step":1,') == 1, f"the run began again; {where}")


def side_files(bench):
    """The tokenizer of a model of the Hugging Face cache is a link. Where it cannot be followed, the model is saved and the run ends with 74."""
    with Work(bench) as work:
        blobs, snapshot = work.folder / "hub/blobs", work.folder / "hub/snapshots/1"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        saved = work.call(Command("first", [a if a != "6" else "4" for a in commands(bench)[0].arguments]))
        check(saved.code == 0, saved.printed)
        for path in (work.folder / "run/model").iterdir():
            path.rename(blobs / path.name)
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
        shutil.rmtree(work.folder / "run")
        run = Command("hub", ["train", "--device", "cpu", "--model-path", "hub/snapshots/1", "--data-path", "data/a.txt", "--validation-path", "",
                              "--tokenizer", "hub/snapshots/1", "--append-eod", "false", "--sequence-length", "64", "--num-steps", "1", "--save-dir", "run"])
        for _ in range(2):  # and the first run keeps the tokens
            shutil.rmtree(work.folder / "run", ignore_errors=True)
            clean = work.call(run)
            check(clean.code == 0 and (work.folder / "run/model/tokenizer_config.json").exists(), clean.printed)
        asked = [number for number, (name, path) in enumerate(clean.questions, 1) if name == "realpath" and "tokenizer_config" in path]
        check(asked, "no link is followed")
        for number, code in itertools.product(asked, ERRORS):
            shutil.rmtree(work.folder / "run")
            work.call(run, number, code)
            check(work.code == 74 and REASONS[code] in work.printed and "leads out" not in work.printed, f"{work.code}:\n{work.printed}")
            check((work.folder / "run/model/model.safetensors").exists(), "the model is lost")


def no_locks(bench):
    """Where the file system has no locks, a run goes on with a warning, and nothing is deleted by another command."""
    for command in commands(bench):
        if command.name in ("auto", "prune"):
            with Work(bench) as work:
                locks = [number for number, (name, path) in enumerate(work.call(command).questions, 1) if name == "flock" and path == "run/.lock"]
            check(len(locks) == 1, f"{command.name} locks {len(locks)} times")
            for code in ("ENOLCK", "ENOSYS", "EOPNOTSUPP"):
                with Work(bench) as work:
                    before = sorted(os.listdir(work.folder / "run"))
                    work.call(command, locks[0], code)
                    check("has no locks" in work.printed and work.code == (0 if command.name == "auto" else 73), f"{work.code}:\n{work.printed}")
                    check(command.name == "auto" or "second run" not in work.printed, f"the advice is that of a run:\n{work.printed}")
                    check(command.name == "auto" or sorted(os.listdir(work.folder / "run")) == before, "prune deleted something")


def main():
    everything = sys.argv[3:] == ["all"]
    with Bench(sys.argv[1], sys.argv[2]) as bench:
        origin = bench.folder / "origin"
        (origin / "data").mkdir(parents=True)
        (origin / "model.json").write_text((bench.folder / "model.json").read_text())
        for part in "ab":
            (origin / f"data/{part}.txt").write_text((bench.folder / "text.txt").read_text())
        first = Command("first", [a if a != "6" else "4" for a in commands(bench)[0].arguments][:-2])
        done = subprocess.run([str(bench.build / "ndtrain"), *first.arguments], cwd=origin, capture_output=True, text=True, timeout=120)
        check(done.returncode == 0, done.stderr)
        jobs = []
        for command in commands(bench):
            with Work(bench) as work:
                clean = work.call(command)
                whole = work.result(command)
            check(whole[0] == 0, f"{command.name} ended with {whole[0]}:\n{clean.printed}")
            check(clean.questions, f"{command.name} asks nothing")
            for index, number in enumerate(sample(clean.questions, everything)):
                for code in ERRORS if everything else [ERRORS[index % len(ERRORS)]]:
                    jobs.append((command, clean, whole, number, code))
        side_files(bench)
        no_locks(bench)
        print(f"{len(jobs)} failing questions")
        failures = []

        def note(job):
            try:
                try_one(bench, job)
            except AssertionError as failure:
                failures.append(str(failure))

        each(jobs, note)
        check(not failures, f"{len(failures)} of {len(jobs)} ended otherwise:\n" + "\n\n".join(failures[:40]))


if __name__ == "__main__":
    main()
