# SPDX-License-Identifier: Apache-2.0
"""Small runs that save checkpoints, and what must hold of their folders; for check_checkpoint_*.py."""
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile

MODEL = dict(model_type="llama", vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
STEPS, INTERVAL, KEPT = 6, 2, 2
FAULTS_EVERY = int(os.environ.get("ND_FAULTS_EVERY", "1")) # tries one of so many faults
LAST = [f"checkpoint-{step}" for step in (4, 6)]  # what a run of STEPS leaves


class Failed(Exception):
    pass


def check(holds, words):
    if not holds:
        raise Failed(words)


def own_environment():
    """Without a job around this one, and without what a parent had ignored: subprocess could not see how a child ends."""
    for variable in [v for v in os.environ if v.startswith(("ND_", "SLURM")) or v in ("RANK", "WORLD_SIZE")]:
        del os.environ[variable]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class Bench:
    """A folder with inputs, in which runs are started."""

    def __init__(self, build, library):
        self.build, self.library = pathlib.Path(build).resolve(), str(pathlib.Path(library).resolve())
        own_environment()
        self._temporary = tempfile.TemporaryDirectory(prefix="nd_test_")
        self.folder = pathlib.Path(os.path.realpath(self._temporary.name))
        (self.folder / "model.json").write_text(json.dumps(MODEL))
        (self.folder / "text.txt").write_text("".join(chr(97 + (i * i // 3 + i // 7) % 26) for i in range(100 * 65)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._temporary.cleanup()

    def command(self, workers, out, *flags, steps=STEPS, interval=INTERVAL):
        return [str(self.build / "ndlaunch"), "--device", "cpu", "--model-config", "model.json", "--data-path", "text.txt",
                "--validation-path", "", "--sequence-length", "64", "--log-level", "info", "--num-processes", str(workers),
                "--dp-shard-size", str(workers), "--num-steps", str(steps), "--save-dir", out, "--checkpoint-frequency",
                str(interval), "--save-total-limit", str(KEPT), *flags]

    def run(self, command, faults=None, timeout=60, prefix=()):
        """The exit code (128 + signal) and all that it printed. `faults`: settings of fault_calls.c, for the worker `rank`."""
        environment = dict(os.environ)
        if faults:
            environment["LD_PRELOAD"] = self.library
            environment |= {f"ND_FAULT_{key.upper()}": str(value) for key, value in faults.items()}
        done = subprocess.run([*prefix, *command], cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
        return (done.returncode if done.returncode >= 0 else 128 - done.returncode), done.stdout

    def train(self, workers, out, *flags, faults=None, code=0, prefix=(), **more):
        if faults:
            faults = dict(folder=self.folder / out, **faults)
        got, printed = self.run(self.command(workers, out, *flags, **more), faults, prefix=prefix)
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

    def remove(self, out):
        shutil.rmtree(self.folder / out, ignore_errors=True)

    def events(self, out):
        lines = (self.folder / out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def curve(self, out):
        """What each step computed, without times; a line "resumed" takes back the later steps above it."""
        steps = {}
        for event in self.events(out):
            if event.get("event") == "resumed":
                steps = {step: value for step, value in steps.items() if step <= event["step"]}
            elif "step_ms" in event:
                steps[event["step"]] = [event[key] for key in ("loss", "grad_norm", "lr", "tokens_seen")]
        return steps

    def names(self, out):
        """The checkpoints of a run folder, with anything else that a save makes."""
        return sorted(name for name in os.listdir(self.folder / out) if "checkpoint-" in name)

    def same(self, out, whole, may_have_more=False):
        """The run has computed what the undisturbed one did, to the byte, and left what it left."""
        check(self.curve(out) == self.curve(whole), f"the steps of {out} are others:\n{self.curve(out)}\n{self.curve(whole)}")
        check(self.model(out) == self.model(whole), f"the model of {out} is another")
        names = self.names(out)
        good = [name for name in names if name.startswith("checkpoint-") and not name.endswith((".bad", ".old"))]
        check(names == good and names[-len(LAST):] == LAST, f"{out} has {names}")
        check(may_have_more or len(names) == len(LAST), f"{out} has {names}")
        for name in LAST:
            check(self.state(out, name) == self.state(whole, name), f"{out}/{name} holds another state")

    def model(self, out):
        return (self.folder / out / "model/model.safetensors").read_bytes()

    def state(self, out, name):
        folder = self.folder / out / name / "state"
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    def exported(self, out, name):
        folder = self.folder / out / name
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file() and path.name != "manifest.json"}

    def whole_files(self, out, name):
        """Each byte of a checkpoint and when it was last changed."""
        folder = self.folder / out / name
        return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
                for path in sorted(folder.rglob("*")) if path.is_file()}


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
