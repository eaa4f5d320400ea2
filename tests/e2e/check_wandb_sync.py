#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/wandb_sync.py: check_wandb_sync.py SCRIPT NDLAUNCH.

wandb's offline files and trackio's database, read by these packages' own readers, must hold every line once, under its names: where half
a line waits for its end, a second call goes on, the caller is killed and called again, a run is followed to its end, or ndlaunch
starts the script beside a run. This needs the packages, in the Python that ND_PEER_PYTHON names. Failures are those of a stand-in:
a service that fails, a run that dies, damaged files, a missing library.
"""
import contextlib
import json
import math
import os
import pathlib
import sqlite3
import subprocess
import sys
import tempfile
import time

from steps import check

MODEL = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
STAND_IN = '''
import json, os
def put(what, **more):
    with open(os.environ["SENT"], "a") as out:
        out.write(json.dumps({"what": what, **more}) + "\\n")
class Run:
    def define_metric(self, name, step_metric=None, hidden=False): put("define", name=name, step_metric=step_metric)
    def log(self, values):
        if os.environ.get("FAIL_AT") == str(values["train/global_step"]): raise ConnectionError("no <network>")
        put("log", values=values)
    def finish(self): put("finish")
def init(**how):
    put("init", how=how)
    return Run()
def log(values, step): put("log", values={"train/global_step": step, **values})
def finish(): put("finish")
'''


def step_line(step, loss=1.5):
    return json.dumps({"step": step, "loss": loss, "grad_norm": 0.5, "lr": 1e-3, "tokens": 64, "tokens_seen": 64 * step,
                       "wire_bytes": 5, "wire": {"weights": 5}, "step_ms": 7.5, "data_wait_ms": 0.5, "tokens_per_second": 100,
                       "tflops_per_worker_causal": 0.25, "peak_memory_bytes": 1000}) + "\n"


def make_run(folder, steps):
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"start_time": "2026-01-01T00:00:00Z", "config": {
        "train.steps": steps, "data.validation_path": "valid.txt"}}))
    return folder


class Stage:
    def __init__(self, script, folder):
        self.script, self.folder, self.sent = script, folder, folder / "sent"
        for name in ("wandb", "trackio"):
            (folder / f"{name}.py").write_text(STAND_IN)
        self.env = {**os.environ, "PYTHONPATH": str(folder), "SENT": str(self.sent), "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self, *arguments, **env):
        return subprocess.Popen([sys.executable, self.script, *map(str, arguments)], env={**self.env, **env}, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *arguments, code=0, **env):
        process = self.start(*arguments, **env)
        said = process.communicate(timeout=60)[0]
        check(process.returncode == code, f"{arguments} ended with {process.returncode}, not {code}: {said}")
        return said

    def records(self, what):
        lines = self.sent.read_text().splitlines() if self.sent.exists() else []
        return [r for r in map(json.loads, lines) if r["what"] == what]

    def steps(self):
        return [r["values"]["train/global_step"] for r in self.records("log") if "train/loss" in r["values"]]


def check_failing_service(stage):
    run = make_run(stage.folder / "one", 6)
    metrics = run / "metrics.jsonl"
    metrics.write_text(step_line(1) + step_line(2, None) + step_line(3)[:-9])
    stage.run(run, "--mode", "online", "--project", "p")
    how = stage.records("init")[0]["how"]
    check(how["project"] == "p" and how["name"] == "one" and how["mode"] == "online" and how["resume"] == "allow", f"init with {how}")
    check(stage.steps() == [1, 2] and len(stage.records("finish")) == 1, f"sent {stage.steps()} of two whole lines")
    metrics.write_text(step_line(1) + step_line(2, None) + step_line(3) + step_line(4) + step_line(5))
    said = stage.run(run, code=1, FAIL_AT="4")
    check("no <network>" in said, f"a failing service gives {said!r}")
    stage.run(run)
    stage.run(run)
    check(stage.steps() == [1, 2, 3, 3, 4, 5], f"after a failure {stage.steps()} were sent")
    check(len({r["how"]["id"] for r in stage.records("init")}) == 1, "calls for one run have several ids")


def check_other_version(stage):
    """A trackio that has no reader, behind a call that was killed: a line twice is better than none."""
    stage.sent.unlink(missing_ok=True)
    run = make_run(stage.folder / "unread", 2)
    (run / "metrics.jsonl").write_text(step_line(1) + step_line(2))
    (run / "trackio_sync.json").write_text(json.dumps({"id": "x", "offset": len(step_line(1)), "unfinished": True}))
    said = stage.run(run, "--with", "trackio")
    check(f"from byte {len(step_line(1))} on may be there twice" in said and stage.steps() == [2], f"{stage.steps()}: {said}")
    check(not json.loads((run / "trackio_sync.json").read_text())["unfinished"], "it is still unfinished")


def check_dead_run(stage):
    stage.sent.unlink()
    run = make_run(stage.folder / "dies", 40)
    (run / "metrics.jsonl").write_text(step_line(1))
    child = subprocess.Popen(["sleep", "0.5"])
    process = stage.start(run, "--pid", child.pid)
    child.wait()
    said = process.communicate(timeout=60)[0]
    check(process.returncode == 0 and stage.steps() == [1] and stage.records("finish"), f"a run that died: {stage.steps()}: {said}")


def check_ends(stage):
    """A followed run ends at the steps of its newest start, at a stop signal, and when nothing more comes."""
    stage.sent.unlink()
    run = make_run(stage.folder / "longer", 2)
    validation = json.dumps({"step": 2, "validation_loss": 2.0, "validation_ms": 3}) + "\n"
    (run / "metrics.jsonl").write_text(step_line(1) + step_line(2) + validation)
    stage.run(run, "--follow")
    stage.run(run, "--follow") # nothing new: the lines that were sent say that it has ended
    check(stage.steps() == [1, 2], f"a run that had ended gave {stage.steps()}")
    (run / "run-2.json").write_text(json.dumps({"config": {"train.steps": 4, "data.validation_path": "valid.txt"}}))
    process = stage.start(run, "--follow")
    time.sleep(1.5) # not at its end yet
    with open(run / "metrics.jsonl", "a") as out:
        out.write(json.dumps({"event": "resumed", "step": 2}) + "\n" + step_line(3) + step_line(4)
                  + validation.replace('"step": 2', '"step": 4'))
    said = process.communicate(timeout=60)[0]
    check(process.returncode == 0 and stage.steps() == [1, 2, 3, 4], f"a run with more steps gave {stage.steps()}: {said}")
    check(stage.records("init")[-1]["how"]["config"]["train.steps"] == 4, "the settings are not those of the newest start")
    run = make_run(stage.folder / "signal", 40)
    signal = json.dumps({"event": "checkpoint", "step": 3, "reason": "signal"}) + "\n"
    (run / "metrics.jsonl").write_text(step_line(3) + signal)
    check("no new line" not in stage.run(run, "--follow"), "a run that a signal stopped is waited for")
    failed = json.dumps({"event": "ended", "step": 3, "code": 74, "why": "rank 1 was lost"}) + "\n"
    lost = make_run(stage.folder / "failed", 40)
    (lost / "metrics.jsonl").write_text(step_line(3) + failed)
    check("no new line" not in stage.run(lost, "--follow", "--patience", "0.5"), "a run that has failed is not asked for lines")
    process = stage.start(lost, "--follow", "--patience", "60")
    time.sleep(1.5) # ndlaunch starts it again
    check(process.poll() is None, "a job that failed is not waited for")
    with open(lost / "metrics.jsonl", "a") as out:
        out.write(json.dumps({"event": "resumed", "step": 3}) + "\n" + step_line(40)
                  + validation.replace('"step": 2', '"step": 40'))
    said = process.communicate(timeout=60)[0]
    check(process.returncode == 0 and 40 in stage.steps(), f"a job that was started again: {stage.steps()}: {said}")
    (run / "metrics.jsonl").write_text(step_line(3) + signal + json.dumps({"event": "resumed", "step": 3}) + "\n" + step_line(4))
    check("no new line for 0.5 s" in stage.run(run, "--follow", "--patience", "0.5"), "a run that failed")
    check("none came in 0.5 s" in stage.run(stage.folder / "never", "--follow", "--patience", "0.5", code=65), "a run that never starts")


def check_bad_input(stage):
    check("no metrics.jsonl" in stage.run(stage.folder / "none", "--follow", "--pid", str(2**22 + 1), code=65), "no file, no process")
    check("does not exist" in stage.run(stage.folder / "none", code=65), "a folder that is not there")
    bad = make_run(stage.folder / "bad", 1)
    (bad / "metrics.jsonl").write_text(step_line(1) + "what\n")
    check(f"byte {len(step_line(1))}" in stage.run(bad, code=65), "a damaged line is not named")
    short = make_run(stage.folder / "short", 1)
    (short / "metrics.jsonl").write_text(step_line(1))
    (short / "wandb_sync.json").write_text('{"id": "x", "offset": 100000}')
    check("shorter" in stage.run(short, code=65), "a file that became shorter")
    (stage.folder / "wandb.py").write_text("raise ImportError('none here')")
    check("pip install wandb" in stage.run(short, code=2), "a missing library")


def wait_for(holds, words):
    """What another process does in its own time."""
    end = time.monotonic() + 120
    while not holds():
        check(time.monotonic() < end, words)
        time.sleep(0.05)


def launch(folder, ndlaunch, name, code, env, *more):
    """A run of five steps with --log-with wandb."""
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "text.txt").write_bytes(bytes(range(97, 123)) * 400)
    done = subprocess.run([ndlaunch, "--device", "cpu", "--num-processes", "2", "--sequence-length", "64", "--num-steps", "5",
                           "--model-config", "model.json", "--data-path", "text.txt", "--save-model", "false", "--log-with", "wandb",
                           "--save-dir", name, *more], env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=240)
    check(done.returncode == code, f"a run with --log-with wandb ended with {done.returncode}, not {code}:\n{done.stdout}")
    return done.stdout


def check_two_trackers(stage, ndlaunch):
    """--log-with wandb trackio: both get every step, each with a state and a log of its own."""
    stage.sent.unlink(missing_ok=True)
    said = launch(stage.folder, ndlaunch, "both", 0, stage.env, "--tracker-python", sys.executable, "--log-with", "wandb", "trackio")
    states = [stage.folder / "both" / f"{library}_sync.json" for library in ("wandb", "trackio")]
    check(all(f"{library}_sync.log" in said for library in ("wandb", "trackio")), f"the logs are not named:\n{said}")
    wait_for(lambda: len(stage.records("finish")) == 2 and all(map(pathlib.Path.exists, states)),
             f"not both end behind their run: {stage.records('finish')}")
    check(sorted(stage.steps()) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5], f"to two trackers {stage.steps()} were sent")


def check_run_without_library(stage, ndlaunch):
    (stage.folder / "wandb.py").write_text("raise ImportError('none here')")
    check("--tracker-python" in launch(stage.folder, ndlaunch, "no", 2, stage.env), "a run without a Python does not say how to name one")
    launch(stage.folder, ndlaunch, "fails", 0, stage.env, "--tracker-python", sys.executable)
    log = stage.folder / "fails" / "wandb_sync.log"
    wait_for(lambda: "pip install wandb" in log.read_text(), "the log does not say what is missing")


READ_WANDB = """
import importlib.util, json, pathlib, sys
from wandb.proto.wandb_internal_pb2 import Record
try:
    from wandb.sdk.internal.datastore import DataStore
    def records(path):
        store = DataStore()
        store.open_for_scan(path)
        while (data := store.scan_data()) is not None:
            yield Record.FromString(data)
except ImportError: # wandb 0.30 and later have no reader in Python
    import wandb
    spec = importlib.util.spec_from_file_location("wandb_sync", sys.argv[1])
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    records = lambda path: script.wandb_records(wandb, pathlib.Path(path))
found = []
for run in sys.argv[2:]:
    found.append([])
    for path in sorted(pathlib.Path(run).glob("wandb/offline-run-*/*.wandb")):
        for record in records(str(path)):
            if record.WhichOneof("record_type") == "history":
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                found[-1].append(row | {"file": path.name})
print(json.dumps(found))
"""
READ_TRACKIO = """
import json, sys, trackio
from trackio.sqlite_storage import SQLiteStorage
runs = list(trackio.Api().runs("p"))
print(json.dumps([[row | {"train/global_step": row["step"], "file": run.name} for run in runs if run.name.startswith(name.split("/")[-1])
                   for row in SQLiteStorage.get_logs("p", run.name)] for name in sys.argv[2:]]))
"""


class Peer:
    """The real package: the script runs with it, and its own reader gives the rows that it holds of a run."""

    def __init__(self, library, script, folder):
        self.library, self.script, self.folder = library, script, folder
        self.python = os.environ.get("ND_PEER_PYTHON") or sys.executable
        folder.mkdir()
        self.env = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "WANDB_SILENT": "true", "WANDB_MODE": "offline",
                    "WANDB__SERVICE_WAIT": "120", "TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1"}

    def has_it(self):
        code = "import importlib.util, sys; sys.exit(not importlib.util.find_spec(sys.argv[1]))"
        return subprocess.run([self.python, "-c", code, self.library], stdin=subprocess.DEVNULL).returncode == 0

    def start(self, run, *arguments):
        return subprocess.Popen([self.python, self.script, run, "--with", self.library, "--project", "p", *arguments], env=self.env,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ends(self, process):
        said = process.communicate(timeout=240)[0]
        check(process.returncode == 0, f"{self.library} ended with {process.returncode}: {said}")

    def rows(self, runs):
        """For each run the rows that are kept."""
        reader = READ_WANDB if self.library == "wandb" else READ_TRACKIO
        done = subprocess.run([self.python, "-c", reader, self.script, *runs], env=self.env, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=240)
        check(done.returncode == 0, f"{self.library} cannot be read: {done.stdout}{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])


# A check of a peer yields its run and gets the rows of it, so that one reader reads those of all checks.


def steps_of(rows):
    return [row["train/global_step"] for row in rows if "train/loss" in row]


def is_nan(value):
    return value == "NaN" or (isinstance(value, float) and math.isnan(value))


def check_lines(peer):
    """Names and values, half a line, a second call."""
    run = make_run(peer.folder / "one", 6)
    metrics = run / "metrics.jsonl"
    metrics.write_text(step_line(1) + step_line(2, None) + step_line(3)[:-9])
    peer.ends(peer.start(run))
    sent = json.loads((run / f"{peer.library}_sync.json").read_text())["offset"]
    check(sent == len(step_line(1) + step_line(2, None)), f"of two whole lines {sent} bytes were sent")
    validation = {"step": 3, "validation_loss": 2.5, "validation_set_loss": {"web": 2.25, "code": None}, "validation_ms": 3}
    metrics.write_text(step_line(1) + step_line(2, None) + step_line(3) + json.dumps({"event": "resumed", "step": 2}) + "\n"
                       + step_line(3) + json.dumps(validation) + "\n")
    peer.ends(peer.start(run))
    rows = yield run
    check((rows[0]["train/loss"], rows[0]["train/learning_rate"], rows[0]["train/step_ms"]) == (1.5, 1e-3, 7.5), f"it has {rows[0]}")
    check(is_nan(rows[1]["train/loss"]), f"a loss that was not finite is {rows[1]['train/loss']!r}")
    check(steps_of(rows) == [1, 2, 3, 3] and len(rows) == 6, f"two calls gave {rows}")
    check(len({r["file"] for r in rows}) == 1, "calls for one run have several ids")
    check(rows[3]["events/resumed"] == 1 and rows[5]["eval/loss"] == 2.5 and rows[5]["eval/loss/web"] == 2.25 and
          is_nan(rows[5]["eval/loss/code"]), f"behind the steps there are {rows[3:]}")


def write_steps(run, first, count):
    with open(run / "metrics.jsonl", "a") as out:
        out.write("".join(map(step_line, range(first, first + count))))


def check_killed(peer):
    """Killed between what it has sent and what is kept, and called again: every step is there once, in order."""
    part = 300
    last = 3 * part
    run = make_run(peer.folder / "killed", last)
    write_steps(run, 1, part)
    process = peer.start(run, "--follow")
    wait_for(lambda: process.poll() is not None or size_of(peer, run) > 0, f"{peer.library} writes nothing")
    write_steps(run, 1 + part, part)
    time.sleep(1.1) # it looks once in a second; whatever it has sent by then, the outcome is the same
    process.kill()
    said = process.communicate()[0]
    check(process.returncode == -9, f"{peer.library} ended before it was killed: {said}")
    check(json.loads((run / f"{peer.library}_sync.json").read_text())["unfinished"], "a killed call is not known as unfinished")
    write_steps(run, 1 + 2 * part, part)
    peer.ends(peer.start(run))
    steps = steps_of((yield run))
    check(steps == list(range(1, last + 1)), f"after a kill {peer.library} has {len(steps)} steps of {last}, the first that is wrong is "
          f"{next((a, b) for a, b in zip(steps + [None], range(1, last + 2)) if a != b)}")


def size_of(peer, run):
    """More than this is there once a part of the steps is kept."""
    if peer.library == "wandb":
        return sum(max(f.stat().st_size - 40000, 0) for f in run.glob("wandb/offline-run-*/*.wandb"))
    databases = list((peer.folder / "trackio").glob("p.db"))
    if not databases:
        return 0
    with contextlib.closing(sqlite3.connect(f"file:{databases[0]}?mode=ro", uri=True)) as database:
        try:
            return database.execute("SELECT COUNT(*) FROM metrics WHERE run_name LIKE 'killed-%'").fetchone()[0]
        except sqlite3.OperationalError: # no table yet, or it is being written
            return 0


def check_follow(peer):
    run = make_run(peer.folder / "live", 40)
    process = peer.start(run, "--follow")
    with open(run / "metrics.jsonl", "a") as out:
        for step in range(1, 41):
            out.write(step_line(step))
            out.flush()
            time.sleep(0.02)
        out.write(json.dumps({"step": 40, "validation_loss": 2.0, "validation_ms": 3}) + "\n")
    peer.ends(process)
    steps = steps_of((yield run))
    check(steps == list(range(1, 41)), f"a followed run gave {steps}")


def check_beside_a_run(peer, ndlaunch):
    """--log-with: the run starts the script, which ends behind it with every step sent."""
    said = launch(peer.folder, ndlaunch, "beside", 0, peer.env, "--tracker-python", peer.python)
    check("wandb_sync.log" in said, f"the log of the script is not named:\n{said}")
    run = peer.folder / "beside"

    def finished():
        try:
            return not json.loads((run / "wandb_sync.json").read_text())["unfinished"]
        except FileNotFoundError:
            return False

    wait_for(finished, "the script does not end behind its run")
    steps = steps_of((yield run))
    check(steps == [1, 2, 3, 4, 5], f"beside the run {steps} were sent")


def finish(one, rows):
    try:
        one.send(rows)
    except StopIteration:
        pass


def main():
    script, ndlaunch = pathlib.Path(sys.argv[1]).resolve(), os.path.abspath(sys.argv[2])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "doubles").mkdir()
        stage = Stage(script, folder / "doubles")
        check_failing_service(stage)
        check_other_version(stage)
        check_dead_run(stage)
        check_ends(stage)
        check_two_trackers(stage, ndlaunch)
        check_bad_input(stage)
        check_run_without_library(stage, ndlaunch)
        for library, checks in (("wandb", (check_lines, check_killed, lambda peer: check_beside_a_run(peer, ndlaunch))),
                                ("trackio", (check_lines, check_killed, check_follow))):
            peer = Peer(library, script, folder / library)
            if not peer.has_it():
                print(f"skipped: {peer.python} has no {library}; set ND_PEER_PYTHON to one that has")
                continue
            started = [one(peer) for one in checks]
            for one, rows in zip(started, peer.rows([next(one) for one in started]), strict=True):
                finish(one, rows)
            print(f"wandb_sync: {library} holds every line once")


if __name__ == "__main__":
    main()
