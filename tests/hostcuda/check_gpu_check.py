#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_check.sh without a GPU: check_gpu_check.py SOURCE BUILD_FOLDER.

Once with the real programs on the doubles; then with stand-ins for programs, tools and torch that are missing, wrong, slow
or killed: each must be said in the report and by the exit code, none may pass for done.
"""
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

SOURCE, BUILD = (pathlib.Path(p).resolve() for p in sys.argv[1:3])
TESTED = "echo '[====] Synthesis: Tested: {n} | Passing: {n} | Failing: 0 | Crashing: 0 ' >&2"
LIST = 'case "$*" in *--list*) printf "attention: 3 tests\\n├── backward\\nmatmul: 1 test\\n"; exit;; esac\n'
SUITE = LIST + TESTED.format(n=3)
PEER = """case "$*" in
*--fit*) echo '{"fit_layers": 2, "tried": []}';;
*) echo '{"tokens_per_second": 10.0, "layers": 2, "compile": true, "checkpoint": true, "torch": "2.0"}';;
esac"""
SANITIZER = 'while [ "${1#--}" != "$1" ]; do [ "$1" != --target-processes ] && [ "$1" != --error-exitcode ] || shift; shift; done\n' \
    'echo "========= ERROR SUMMARY: 0 errors"; exec "$@"'
# Writes what a run of ndtrain leaves; ${FAIL_ABOVE} layers and more do not fit.
LAUNCH = r'''
import json, os, pathlib, sys
a = sys.argv[1:]
values = dict(v.split("=", 1) for flag, v in zip(a, a[1:]) if flag == "--set")
flags = dict((flag, v) for flag, v in zip(a, a[1:]) if flag.startswith("--") and flag != "--set")
layers = json.load(open(values["model.config"]))["num_hidden_layers"]
if layers >= int(os.environ.get("FAIL_ABOVE", "999")):
    print("out of device memory: the plan needs 9 GiB in one piece", file=sys.stderr)
    sys.exit(71)
folder = pathlib.Path(values["output.dir"])
folder.mkdir(parents=True)
config = {"model.config": values["model.config"], "train.precision": flags["--precision"],
          "parallel.recompute": values.get("parallel.recompute", "none"), "train.sequence_length": flags["--sequence-length"]}
(folder / "run.json").write_text(json.dumps({"config": config, "memory_plan_bytes": {"state": 1 << 30}}))
loss = float(os.environ.get("LOSS_" + folder.name, "5.0"))
with open(folder / "metrics.jsonl", "w") as f:
    for step in range(int(flags["--num-steps"])):
        f.write(json.dumps({"step": step + 1, "loss": loss, "step_ms": 10.0, "tokens_per_second": 20.0,
                            "tflops_per_worker_causal": 1.0, "tflops_per_worker_accelerate": 1.0,
                            "peak_memory_bytes": float(os.environ.get("USED", 1.2e9))}) + "\n")
'''


def check(holds, words):
    if not holds:
        sys.exit(f"check_gpu_check: {words}")


class Place:
    """A build folder of stand-ins and a folder of results, both gone with the parent."""

    def __init__(self, parent, name, real=False):
        self.out, self.build = parent / name / "out", parent / name / "build"
        self.programs = self.build / "tests" / "hostcuda"
        self.programs.mkdir(parents=True)
        for program in ("ndlaunch", "ndtrain"):
            if real:
                (self.programs / program).symlink_to(BUILD / "tests" / "hostcuda" / program)
        if not real:
            self.program("ndlaunch", LAUNCH, sys.executable)
        self.program("test_hostcuda_ops", SUITE)
        self.program("test_hostcuda_goldens", SUITE)
        self.program("nd_bench_kernels", """echo '{"kernels": {"add": {"us": 1.0, "gbps": 9.0, "share": 0.93}}}'""")
        self.program("nd_bench_gpu", """echo '{"product": "o", "type": "bf16", "us": 1.0, "share": 0.97}'""")
        self.environment = {**os.environ, "ND_GPU_LIMIT": "5000", "ND_GPU_BUILD": str(self.build), "ND_PEER_PYTHON": self.program("peer", PEER),
                            "ND_GPU_SANITIZER": self.program("sanitizer", SANITIZER)}

    def program(self, name, text, interpreter="/bin/sh"):
        path = self.programs / name
        path.write_text(f"#!{interpreter}\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def start(self, phase, to=subprocess.PIPE, **environment):
        return subprocess.Popen([SOURCE / "scripts" / "gpu_check.sh", "--dry-run", "--phase", phase, "--out", self.out],
                                env={**self.environment, **environment}, stdin=subprocess.DEVNULL, stdout=to,
                                stderr=subprocess.STDOUT, text=True)

    def call(self, phase, status, *words, **environment):
        started = self.start(phase, **environment)
        output, _ = started.communicate(timeout=600)
        check(started.returncode == status, f"{phase} ended with {started.returncode}, not {status}:\n{output[-3000:]}")
        for word in words:
            check(word in output, f"no \"{word}\" in:\n{output[-3000:]}")
        return output

    def record(self):
        return json.loads((self.out / "gpu_check.json").read_text())

    def state(self, name):
        return next((item["state"] for item in self.record()["items"] if item["item"] == name), None)

    def expect(self, **states):
        for name, state in states.items():
            name = name.replace("_", "-")
            check(self.state(name) == state, f"{name} is {self.state(name)}, not {state}")

    def verdict(self, words):
        return next(row for row in self.record()["speed"] if words in row["run"])


def everything(parent):
    p = Place(parent, "everything", real=True)
    p.call("all", 0)
    record = p.record()
    left = [item["item"] for item in record["items"] if item["state"] != "done"]
    check(not left and len(record["items"]) > 18, f"not done: {left}, {len(record['items'])} items")
    check(len(record["speed"]) == 7, "the table of speeds has a row for each figure")
    for row in record["speed"]:
        check(row["verdict"] == "dry run" and row["measured"] != "-" and row["at least"] and row["goal"], f"{row}")
    text = (p.out / "gpu_check.md").read_text()
    for words in ("No GPU took part", "| run | measured | at least | goal |", "tflops_causal", "speed_of_light"):
        check(words in text, f"no \"{words}\" in gpu_check.md")
    again = p.call("all", 0)
    check("gpu_check: ops" not in again, f"done items were run again:\n{again}")
    # A GPU on which three layers do not fit (88 MiB of plan) and two do.
    p.program("peer", "exit 1")
    (p.out / "items" / "8b-all-bf16.json").unlink()
    p.call("bench", 0, ND_DOUBLE_MEMORY="86")
    row = p.verdict("all 32 layers, F32 state, full recompute, bf16")
    check("3 layers do not fit" in row["remark"], f"{row}")


def torch_is_missing(parent):
    p = Place(parent, "torch")
    bare = p.program("bare", f'exec {sys.executable} -I -S "$@"')
    p.call("bench", 3, "torch-fit skipped", "torch cannot be imported", ND_PEER_PYTHON=bare)
    p.expect(torch_fit="skipped", torch_most="skipped", products="done")
    row = p.verdict("PyTorch")
    check(row["verdict"] == "not measured" and "torch-" in row["remark"], f"{row}")
    check("**Skipped:** " in (p.out / "gpu_check.md").read_text(), "the report says what was skipped")
    p.call("bench", 3, "is not there; ND_PEER_PYTHON", ND_PEER_PYTHON="/nowhere/python")
    p.call("bench", 0)  # and once it is there, it is compared
    check(p.verdict("PyTorch")["measured"] == "2 x", f"{p.verdict('PyTorch')}")


def sanitizer_is_missing(parent):
    p = Place(parent, "sanitizer")
    p.call("conformance", 3, "compute-sanitizer is not there", ND_GPU_SANITIZER="/nowhere/compute-sanitizer")
    p.expect(sanitizer_attention="skipped", sanitizer_matmul="skipped", ops="done")
    unsupported = p.program("unsupported", "echo '========= Error: Device not supported'; exit 1")
    p.call("conformance", 3, "does not support this device", ND_GPU_SANITIZER=unsupported)
    finds = p.program("finds", "echo '========= Invalid __global__ write'; " + TESTED.format(n=3) + "; exit 9")
    p.call("conformance", 1, "sanitizer-matmul failed", ND_GPU_SANITIZER=finds)
    p.call("conformance", 0)


def tests_that_do_not_pass(parent):
    p = Place(parent, "tests")
    p.program("test_hostcuda_ops", LIST + TESTED.format(n=0))
    p.program("test_hostcuda_goldens", TESTED.format(n=2) + "; exit 1")
    p.call("conformance", 1, "ops failed", "no test ran", "goldens failed")
    (p.programs / "test_hostcuda_ops").unlink()
    p.call("conformance", 1, "test_hostcuda_ops was not built", "has no list of its tests")
    p.program("test_hostcuda_ops", SUITE)
    p.program("test_hostcuda_goldens", SUITE)
    p.call("conformance", 0)
    for name, value, words in (("LOSS_rowwise", "5.4", "rowwise"), ("LOSS_bf16", "nan", "bf16")):
        p = Place(parent, name)
        p.call("conformance", 1, "losses failed", **{name: value})
    p = Place(parent, "memory")
    p.call("conformance", 1, "memory failed", "the driver reports", USED="9e9")
    p = Place(parent, "no-run")
    p.program("ndlaunch", "exit 2")
    p.call("conformance", 1, "small-bf16 failed", "losses failed", "memory failed")
    p.call("bench", 1, "8b-all-bf16 failed", "8b-half-fp8 failed")
    check(p.verdict("16 layers")["verdict"] == "not measured", f"{p.verdict('16 layers')}")


def a_smaller_gpu(parent):
    p = Place(parent, "smaller")
    counter = p.programs / "tokens"
    p.program("nd_bench_gpu", f"echo \"$*\" >>{counter}; case \"$*\" in *'tokens 16'*) exit 71;; esac")
    p.call("bench", 1, "8b-all-bf16 failed", "products failed", FAIL_ABOVE="1")
    check(p.verdict("products")["verdict"] == "not measured", f"{p.verdict('products')}")


def damaged_results(parent):
    p = Place(parent, "damaged")
    p.call("conformance", 0)
    (p.out / "items" / "ops.json").write_text('{"item": "ops", "state": "do')
    (p.out / "items" / "goldens.json").write_bytes(b"\0" * 64)
    (p.out / "items" / "small-bf16.json").write_text('{"item": "ops", "state": "done", "results": [], "seconds": 1}')
    (p.out / "items" / "losses.json").write_text("[]")
    (p.out / "gpu_check.json").write_text("{{{")
    output = p.call("conformance", 0, "ops.json is damaged", "goldens.json is damaged", "small-bf16.json is damaged",
                    "losses.json is damaged")
    check("gpu_check: ops\n" in output and "gpu_check: small-fp32\n" not in output, f"what ran again:\n{output}")
    p.expect(ops="done", goldens="done", small_bf16="done", losses="done")


def wait_for(path):
    for _ in range(2400):
        if path.exists():
            return
        time.sleep(0.05)
    sys.exit(f"check_gpu_check: {path} did not appear")


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_lock(path):
    with open(path) as f:
        fcntl.flock(f, fcntl.LOCK_EX)


def killed_half_way(parent):
    p = Place(parent, "killed")
    mark = p.programs / "mark"
    p.program("test_hostcuda_ops", LIST + f"echo $$ >{mark}.new; mv {mark}.new {mark}; sleep 120")
    for how in (signal.SIGTERM, signal.SIGKILL):
        started = p.start("conformance", subprocess.DEVNULL)
        wait_for(mark)
        slow = int(mark.read_text())
        started.send_signal(how)
        started.wait(timeout=100)
        check(json.loads((p.out / "items" / "ops.json").read_text())["state"] == "cut off", "what was cut off is said")
        if how == signal.SIGTERM:
            check(not is_alive(slow), "what it started has ended with it")
        else:  # what it started lives on: no second call beside it
            p.call("conformance", 2, "something that it started")
            os.kill(slow, signal.SIGKILL)
            wait_for_lock(p.out / "lock")
        mark.unlink()
    p.program("test_hostcuda_ops", SUITE)
    p.call("conformance", 0)
    p.expect(ops="done")


def the_time_is_up(parent):
    p = Place(parent, "time")
    p.call("bench", 75, "call it again", ND_GPU_LIMIT="1")
    p.expect(kernels="done", products="waiting", torch_fit="waiting", torch_most="waiting")
    check(p.state("8b-torch-bf16") == "waiting", p.state("8b-torch-bf16"))
    check("**Waiting:** " in (p.out / "gpu_check.md").read_text(), "the report says what waits")
    p.call("bench", 0)


def wrong_use(parent):
    p = Place(parent, "use")
    p.call("nothing", 2, "--phase is build")
    (p.programs / "ndlaunch").unlink()
    p.call("bench", 2, "ndlaunch is not there")
    p = Place(parent, "mode")
    p.out.mkdir()
    (p.out / "mode").write_text("on a GPU\n")
    p.call("bench", 2, "results of another mode")


def main():
    with tempfile.TemporaryDirectory() as folder:
        for case in (wrong_use, torch_is_missing, sanitizer_is_missing, tests_that_do_not_pass, a_smaller_gpu, damaged_results,
                     killed_half_way, the_time_is_up, everything):
            begin = time.monotonic()
            case(pathlib.Path(folder))
            print(f"{case.__name__}: {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
