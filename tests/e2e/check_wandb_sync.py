#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/wandb_sync.py: check_wandb_sync.py SCRIPT NDLAUNCH.

A stand-in for wandb and trackio records what is sent: every step arrives under its names, a second call goes on where the first one
stopped, half a line waits for its end, a followed run is followed to its end. With the real packages, where the Python that
ND_PEER_PYTHON names has them: an offline run of wandb must hold every step, and so must the database of trackio.
"""
import json
import math
import os
import pathlib
import sqlite3
import subprocess
import sys
import tempfile
import time

MODEL = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
STAND_IN = '''
import json, os
def put(what, **more):
    with open(os.environ["SENT"], "a") as out:
        out.write(json.dumps({"what": what, **more}) + "\\n")
class Run:
    def define_metric(self, name, step_metric=None): put("define", name=name, step_metric=step_metric)
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


def check(holds, words):
    if not holds:
        sys.exit(f"check_wandb_sync: {words}")


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


def check_resumable(stage):
    run = make_run(stage.folder / "one", 6)
    metrics = run / "metrics.jsonl"
    metrics.write_text(step_line(1) + step_line(2, None) + step_line(3)[:-9])
    stage.run(run, "--mode", "offline", "--project", "p")
    how = stage.records("init")[0]["how"]
    check(how["project"] == "p" and how["name"] == "one" and how["mode"] == "offline" and how["resume"] == "allow", f"init with {how}")
    check(stage.steps() == [1, 2] and len(stage.records("finish")) == 1, f"sent {stage.steps()} of two whole lines")
    values = stage.records("log")[0]["values"]
    check(values["train/loss"] == 1.5 and values["train/learning_rate"] == 1e-3 and values["train/step_ms"] == 7.5, f"sent {values}")
    check(math.isnan(stage.records("log")[1]["values"]["train/loss"]), "a loss that was not finite is a number")
    metrics.write_text(step_line(1) + step_line(2, None) + step_line(3) + json.dumps({"event": "resumed", "step": 2}) + "\n" + step_line(3)
                       + json.dumps({"step": 3, "validation_loss": 2.5, "validation_set_loss": {"web": 2.25, "code": None},
                                     "validation_ms": 3}) + "\n")
    stage.run(run)
    stage.run(run)
    check(stage.steps() == [1, 2, 3, 3], f"three calls sent {stage.steps()}")
    check(len({r["how"]["id"] for r in stage.records("init")}) == 1, "calls for one run have several ids")
    check([r["values"]["eval/loss"] for r in stage.records("log") if "eval/loss" in r["values"]] == [2.5], "no validation")
    sets = [r["values"] for r in stage.records("log") if "eval/loss/web" in r["values"]]
    check([v["eval/loss/web"] for v in sets] == [2.25] and math.isnan(sets[0]["eval/loss/code"]), f"sets of a validation: {sets}")
    check(any("events/resumed" in r["values"] for r in stage.records("log")), "no event")
    with open(metrics, "a") as out:
        out.write(step_line(4) + step_line(5))
    said = stage.run(run, code=1, FAIL_AT="5")
    check("no <network>" in said, f"a failing service gives {said!r}")
    stage.run(run)
    check(stage.steps()[-3:] == [4, 4, 5], f"after a failure {stage.steps()} were sent")


def check_follow(stage):
    stage.sent.unlink()
    run = make_run(stage.folder / "live", 40)
    process = stage.start(run, "--follow", "--with", "trackio")
    with open(run / "metrics.jsonl", "a") as out:
        for step in range(1, 41):
            out.write(step_line(step))
            out.flush()
            time.sleep(0.02)
        out.write(json.dumps({"step": 40, "validation_loss": 2.0, "validation_ms": 3}) + "\n")
    said = process.communicate(timeout=60)[0]
    check(process.returncode == 0 and stage.steps() == list(range(1, 41)), f"a followed run gave {stage.steps()}: {said}")
    stage.sent.unlink()
    run = make_run(stage.folder / "dies", 40)
    (run / "metrics.jsonl").write_text(step_line(1))
    child = subprocess.Popen(["sleep", "0.5"])
    process = stage.start(run, "--pid", child.pid)
    child.wait()
    said = process.communicate(timeout=60)[0]
    check(process.returncode == 0 and stage.steps() == [1] and stage.records("finish"), f"a run that died: {stage.steps()}: {said}")


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


def check_beside_a_run(stage, ndlaunch):
    """--log-with: the run starts the script, which ends behind it with every step sent."""
    stage.sent.unlink(missing_ok=True)
    (stage.folder / "wandb.py").write_text(STAND_IN)
    (stage.folder / "model.json").write_text(json.dumps(MODEL))
    (stage.folder / "text.txt").write_bytes(bytes(range(97, 123)) * 400)
    command = [ndlaunch, "--device", "cpu", "--num-processes", "2", "--sequence-length", "64", "--num-steps", "5", "--model-config",
               "model.json", "--data-path", "text.txt", "--save-model", "false", "--log-with", "wandb"]

    def run(name, code, *more):
        done = subprocess.run([*command, "--save-dir", name, *more], env=stage.env, cwd=stage.folder, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
        check(done.returncode == code, f"a run with --log-with wandb ended with {done.returncode}, not {code}:\n{done.stdout}")
        return done.stdout

    check("--tracker-python" in run("no", 2), "a run without a Python does not say how to name one")
    said = run("beside", 0, "--tracker-python", sys.executable)
    check("wandb_sync.log" in said, f"the log of the script is not named:\n{said}")
    wait_for(lambda: stage.records("finish"), "the script does not end behind its run")
    check(stage.steps() == [1, 2, 3, 4, 5], f"beside the run {stage.steps()} were sent")
    (stage.folder / "wandb.py").write_text("raise ImportError('none here')")
    run("fails", 0, "--tracker-python", sys.executable)
    log = stage.folder / "fails" / "wandb_sync.log"
    wait_for(lambda: "pip install wandb" in log.read_text(), "the log does not say what is missing")


def real(library):
    """A Python that has it, or None."""
    python = os.environ.get("ND_PEER_PYTHON", sys.executable)
    found = subprocess.run([python, "-c", f"import {library}"], stdin=subprocess.DEVNULL, capture_output=True)
    return python if found.returncode == 0 else None


def check_real_wandb(script, folder):
    """An offline run is a file of records; each history record has the values of one call."""
    python = real("wandb")
    if not python:
        return "without the real wandb"
    run = make_run(folder / "real", 30)
    (run / "metrics.jsonl").write_text("".join(step_line(s) for s in range(1, 31)))
    env = {**os.environ, "WANDB_DIR": str(folder), "HOME": str(folder), "WANDB_SILENT": "true"}
    done = subprocess.run([python, script, run, "--mode", "offline"], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=240)
    check(done.returncode == 0, f"wandb offline: {done.stdout}{done.stderr}")
    reader = """
import json, pathlib, sys
from wandb.proto import wandb_internal_pb2
def records(data): # blocks of 32 KiB as LevelDB's log has them, behind a header of 7 bytes
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4:at + 6], "little"), data[at + 6]
        parts += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4): # whole, or the last part
            yield parts
            parts = b""
steps = []
for path in pathlib.Path(sys.argv[1]).rglob("*.wandb"):
    for part in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(part)
        if record.WhichOneof("record_type") == "history":
            items = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            steps.append(items.get("train/global_step"))
print(json.dumps(steps))
"""
    done = subprocess.run([python, "-c", reader, folder], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    check(done.returncode == 0 and json.loads(done.stdout) == list(range(1, 31)), f"wandb's file has {done.stdout}{done.stderr}")
    return "with the real wandb"


def check_real_trackio(script, folder):
    """trackio keeps a run in a database of SQLite."""
    python = real("trackio")
    if not python:
        return "without the real trackio"
    run = make_run(folder / "kept", 5)
    (run / "metrics.jsonl").write_text("".join(step_line(s) for s in range(1, 6)))
    env = {**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([python, script, run, "--with", "trackio", "--project", "p"], env=env, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=240)
    check(done.returncode == 0, f"trackio: {done.stdout}{done.stderr}")
    steps = []
    for path in (folder / "trackio").rglob("*.db"):
        with sqlite3.connect(path) as database:
            steps += [step for step, in database.execute("SELECT step FROM metrics ORDER BY step")]
    check(steps == list(range(1, 6)), f"trackio has steps {steps}: {done.stdout}{done.stderr}")
    return "with the real trackio"


def main():
    script = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        stage = Stage(script, folder)
        check_resumable(stage)
        check_follow(stage)
        check_bad_input(stage)
        check_beside_a_run(stage, os.path.abspath(sys.argv[2]))
        said = f"{check_real_wandb(script, folder)}, {check_real_trackio(script, folder)}"
    print(f"wandb_sync: every step was sent, {said}")


if __name__ == "__main__":
    main()
