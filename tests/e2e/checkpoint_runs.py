# SPDX-License-Identifier: Apache-2.0
"""Small runs that save checkpoints, and what must hold of their folders; for check_checkpoint_*.py."""
import concurrent.futures
import os
import re
import subprocess
import tempfile

import steps
from steps import check

MODEL = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1)
STEPS, INTERVAL, KEPT = 6, 2, 2
LAST = [f"checkpoint-{step}" for step in (4, 6)]  # what a run of STEPS leaves


class Bench(steps.Steps):
    """A folder with inputs, in which runs are started."""

    def __init__(self, build, library):
        self._temporary = tempfile.TemporaryDirectory(prefix="nd_test_")
        super().__init__(os.path.abspath(build), os.path.realpath(self._temporary.name))
        self.library = os.path.abspath(library)
        steps.put_back_surroundings()
        self.model(**MODEL)
        self.text(100 * 65)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._temporary.cleanup()

    def launch(self, workers, out, *flags, steps=STEPS):
        """The words of a run."""
        words = ("ndlaunch --device cpu --model-config model.json --data-path text.txt --validation-path '' --sequence-length 64 "
                 f"--log-level info --num-processes {workers} --dp-shard-size {workers} --num-steps {steps} --save-dir {out} "
                 f"--checkpoint-frequency {INTERVAL} --save-total-limit {KEPT}")
        return [*self.command(words), *flags]

    def end(self, command, faults=None):
        """The exit code (128 + signal) and all that it printed. `faults`: settings of fault_calls.c, for the worker `rank`."""
        environment = os.environ | {f"ND_FAULT_{key.upper()}": str(value) for key, value in (faults or {}).items()}
        if faults:
            environment["LD_PRELOAD"] = self.library
        done = subprocess.run(command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=60)
        return (done.returncode if done.returncode >= 0 else 128 - done.returncode), done.stdout

    def train(self, workers, out, *flags, faults=None, code=0, prefix=(), **more):
        if faults:
            faults = dict(folder=self.folder / out, **faults)
        got, printed = self.end([*prefix, *self.launch(workers, out, *flags, **more)], faults)
        check(got == code, f"{out} ended with {got}, not {code}:\n{printed[-3000:]}")
        return printed

    def calls(self, workers, rank, out, *flags, **more):
        """The calls of an undisturbed run: [(name, path below the run folder)]."""
        log = self.folder / f"{out}.calls"
        log.unlink(missing_ok=True)
        self.train(workers, out, *flags, faults=dict(rank=rank, log=log), **more)
        lines = sorted((line.split(" ", 3) for line in log.read_text().splitlines()), key=lambda line: int(line[0]))
        numbers = [int(line[0]) for line in lines]
        check(numbers == list(range(1, len(lines) + 1)), f"the calls of {out} are not numbered: {numbers}")
        return [(line[1], line[3][len(str(self.folder / out)) + 1:]) for line in lines]

    def names(self, out):
        """The checkpoints of a run folder, with anything else that a save makes."""
        return sorted(name for name in os.listdir(self.folder / out) if "checkpoint-" in name)

    def same_result(self, out, whole="whole"):
        """The run has computed what the undisturbed one did, to the byte."""
        check(self.curve(out) == self.curve(whole), f"the steps of {out} are others:\n{self.curve(out)}\n{self.curve(whole)}")
        self.same(f"{out}/model/model.safetensors", f"{whole}/model/model.safetensors")

    def same_end(self, out, whole, may_have_more=False):
        """The run has also left what the undisturbed one left."""
        self.same_result(out, whole)
        names = self.names(out)
        good = [name for name in names if name.startswith("checkpoint-") and not name.endswith((".bad", ".old"))]
        check(names == good and names[-len(LAST):] == LAST, f"{out} has {names}")
        check(may_have_more or len(names) == len(LAST), f"{out} has {names}")
        for name in LAST:
            check(self.state(out, name) == self.state(whole, name), f"{out}/{name} holds another state")

    def state(self, out, name):
        return {path.name: path.read_bytes() for path in (self.folder / out / name / "state").iterdir()}

    def exported(self, out, name):
        return {path.name: path.read_bytes() for path in (self.folder / out / name).iterdir()
                if path.is_file() and path.name != "manifest.json"}

    def whole_files(self, out, name):
        """Each byte of a checkpoint and when it was last changed."""
        folder = self.folder / out / name
        return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
                for path in folder.rglob("*") if path.is_file()}


def each(jobs, work):
    """work(job) for all of them, two at a time; the first failure ends the test."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, job) for job in jobs]:
            done.result()


def every(calls, k):
    """1-based numbers of the calls to try: all that are no write of data, and every k-th write."""
    writes, numbers = 0, []
    for number, (name, _) in enumerate(calls, 1):
        writes += name == "pwrite64"
        if name != "pwrite64" or writes % k == 1 or k == 1:
            numbers.append(number)
    return numbers


def resumed_step(printed):
    found = re.search(r"resumed after step (\d+) from", printed)
    return int(found[1]) if found else None
