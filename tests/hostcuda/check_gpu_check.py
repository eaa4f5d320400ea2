#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_check.sh without a GPU: check_gpu_check.py SOURCE BUILD_FOLDER.

Once with the real programs on the doubles; then with stand-ins for programs, tools and torch that are missing, wrong, slow
or killed: each must be said in the report and by the exit code, none may pass for done.
"""
import argparse
import concurrent.futures
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import tempfile
import time

SOURCE, BUILD = (pathlib.Path(p).resolve() for p in sys.argv[1:3])
sys.path.insert(0, str(SOURCE / "tests" / "e2e"))
from steps import check
TESTED = "echo '[====] Synthesis: Tested: {n} | Passing: {n} | Failing: 0 | Crashing: 0 ' >&2"
LIST = 'case "$*" in *--list*) printf "attention: 3 tests\\n├── backward\\nmatmul: 1 test\\n"; exit;; esac\n'
SUITE = LIST + TESTED.format(n=3)
PEER = """case "$*" in
*--fit*) echo '{"fit_layers": 2, "tried": []}';;
*) echo '{"tokens_per_second": 10.0, "layers": 2, "compile": true, "checkpoint": true, "torch": "2.0"}';;
esac"""
# Beside the real programs, which train what layer.py makes, the peer makes a model without torch.
MAKER = """import os, pathlib, subprocess, sys
a = sys.argv[1:]
if "make" not in a:
    os.execv({peer!r}, [{peer!r}, *a])
sys.path.insert(0, "scripts/gpu")
import layer
folder = pathlib.Path(a[a.index("--folder") + 1])
folder.mkdir(parents=True)
(folder / "text.txt").write_bytes(bytes(range(97, 123)) * 20)
code = subprocess.run([{launch!r}, "--device", "cuda", "--workers", "1", "--set", "model.config=configs/model-small.json", "--set",
                       f"data.path={{folder}}/text.txt", "--set", "data.tokenizer=bytes", "--sequence-length", "32", "--num-steps", "1",
                       "--set", f"output.dir={{folder}}/run"]).returncode
(folder / "run" / "model").rename(folder / "model")
layer.write_tokens(folder / "tokens.bin", int(a[a.index("--sequence-length") + 1]) + 1, 256)
sys.exit(code)
"""
# Like the real one, it takes a query of what the GPU has not done yet for an error, unless told to leave answers alone.
SANITIZER = """answers=all
while [ "${1#--}" != "$1" ]; do
    case "$1" in
    --report-api-errors) answers=$2; shift;;
    --target-processes | --error-exitcode | --launch-timeout) shift;;
    esac
    shift
done
if [ "$answers" != no ]; then
    echo '========= Program hit cudaErrorNotReady (error 600) due to "device not ready" on CUDA API call to cudaStreamQuery.'
    "$@"
    exit 9
fi
echo '========= ERROR SUMMARY: 0 errors'
exec "$@\""""
# The output of libnd_activity.so: two products and an update in each of three steps.
ACTIVITY = "nd_activity 1 130000 7\nn 0 gemm\nn 1 adamw\n" + "".join(
    f"k {t + 10} {t + 50} 0 7 0 1 1 1 32 1 1 16 0\nk {t + 60} {t + 90} 0 7 0 1 1 1 32 1 1 16 0\nk {t + 90} {t + 99} 0 7 1 1 1 1 32 1 1 16 0\n"
    for t in (100, 200, 300))
# Writes what a run of ndtrain leaves; ${FAIL_ABOVE} layers and more do not fit.
LAUNCH = r'''
import json, os, pathlib, sys
a = sys.argv[1:]
values = dict(v.split("=", 1) for flag, v in zip(a, a[1:]) if flag == "--set")
flags = dict((flag, v) for flag, v in zip(a, a[1:]) if flag.startswith("--") and flag != "--set")
layers = json.load(open(values["model.config"]))["num_hidden_layers"] if "model.config" in values else 1
if layers >= int(os.environ.get("FAIL_ABOVE", "999")):
    print("out of device memory: the plan needs 9 GiB in one piece", file=sys.stderr)
    sys.exit(71)
folder = pathlib.Path(values["output.dir"])
folder.mkdir(parents=True)
config = {"model.config": values.get("model.config", ""), "train.precision": flags["--precision"],
          "parallel.recompute": values.get("parallel.recompute", "none"), "train.sequence_length": flags["--sequence-length"],
          "fp8.all_gather": values.get("fp8.all_gather", "false")}
transport = "nccl" if flags.get("--nccl-alone") == "true" or int(flags["--workers"]) > 1 else "self"
(folder / "run.json").write_text(json.dumps({"config": config, "autotune": {}, "machine": {"transport": transport}, "model": {"planned_bytes": 1 << 30}}))
loss = float(os.environ.get("LOSS_" + folder.name, "5.0"))
with open(folder / "metrics.jsonl", "w") as f:
    for step in range(min(100, int(flags["--num-steps"]))):
        f.write(json.dumps({"step": step + 1, "loss": loss, "step_ms": 10.0, "tokens_per_second": 20.0,
                            "tflops_per_worker_causal": 1.0, "tflops_per_worker_accelerate": 1.0,
                            "peak_memory_bytes": float(os.environ.get("USED", 1.2e9)) + step * int(os.environ.get("GROWS", "0"))}) + "\n")
'''
# `ndtrain plan`, by which a layer needs 30 GiB.
PLAN = r'''
import json, sys
layers = json.load(open(dict(v.split("=", 1) for v in sys.argv if v.startswith("model.config="))["model.config"]))["num_hidden_layers"]
print(f"memory plan of rank 0, 1 thread:\n  total                       {30.0 * layers:.2f} GiB")
'''


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
            self.program("ndtrain", """case "$1" in generate) echo '{"ids":[1]}';; *) exit 1;; esac""")
        self.program("test_hostcuda_ops", SUITE)
        self.program("test_hostcuda_goldens", SUITE)
        self.program("nd_bench_kernels", """echo '{"kernels": {"add": {"us": 1.0, "gbps": 9.0, "share": 0.93, "share_of_equal": 0.97}}}'""")
        self.program("nd_bench_gpu", """echo '{"product": "o", "type": "bf16", "us": 1.0, "share": 0.97}'""")
        activity = self.programs / "activity"
        activity.write_text(ACTIVITY)
        (self.programs / "libnd_activity.so").touch()
        recorded = f'[ -z "$ND_ACTIVITY_FILE" ] || cp {activity} "$ND_ACTIVITY_FILE"\n'
        self.program("recorded", f'{recorded}exec {BUILD}/tests/hostcuda/ndlaunch "$@"')
        self.environment = {**os.environ, "ND_GPU_LIMIT": "5000", "ND_GPU_BUILD": str(self.build), "ND_PEER_PYTHON": self.program("peer", recorded + PEER),
                            "ND_GPU_SANITIZER": self.program("sanitizer", SANITIZER)}

    def program(self, name, text, interpreter="/bin/sh"):
        path = self.programs / name
        path.write_text(f"#!{interpreter}\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def start(self, phase, to=subprocess.PIPE, only=None, **environment):
        return subprocess.Popen([SOURCE / "scripts" / "gpu_check.sh", "--dry-run", "--phase", phase, "--out", self.out,
                                 *(["--only", only] if only else [])], env={**self.environment, **environment},
                                stdin=subprocess.DEVNULL, stdout=to, stderr=subprocess.STDOUT, text=True)

    def call(self, phase, status, *words, only=None, **environment):
        started = self.start(phase, only=only, **environment)
        output, _ = started.communicate(timeout=900)
        check(started.returncode == status, f"{phase} ended with {started.returncode}, not {status}:\n{output[-3000:]}")
        for word in words:
            check(word in output, f"no \"{word}\" in:\n{output[-3000:]}")
        return output

    def ran(self, phase, status, **how):
        """Names of the items that a call has run."""
        return [line.split()[1] for line in self.call(phase, status, **how).splitlines() if line.endswith(" s")]

    def text(self):
        return (self.out / "gpu_check.md").read_text()

    def record(self):
        return json.loads((self.out / "gpu_check.json").read_text())

    def item(self, name):
        return next((item for item in self.record()["items"] if item["item"] == name), {"state": None})

    def state(self, name):
        return self.item(name)["state"]

    def expect(self, **states):
        for name, state in states.items():
            name = name.replace("_", "-")
            check(self.state(name) == state, f"{name} is {self.state(name)}, not {state}")

    def verdict(self, words):
        return next(row for row in self.record()["speed"] if words in row["run"])


def everything(parent):
    p = Place(parent, "everything", real=True)
    launch = str(BUILD / "tests" / "hostcuda" / "ndlaunch")
    p.environment["ND_PEER_PYTHON"] = p.program("maker", MAKER.format(peer=p.environment["ND_PEER_PYTHON"], launch=launch), sys.executable)
    (p.programs / "ndlaunch").unlink()
    (p.programs / "recorded").rename(p.programs / "ndlaunch")
    p.call("all", 0)
    record = p.record()
    left = [item["item"] for item in record["items"] if item["state"] != "done"]
    check(not left and len(record["items"]) > 24, f"not done: {left}, {len(record['items'])} items")
    check(len(record["speed"]) == 8, "the table of speeds has a row for each figure")
    for row in record["speed"]:
        check(row["verdict"] == "dry run" and row["measured"] != "-" and row["at least"] and row["goal"], f"{row}")
    text = p.text()
    for words in ("No GPU took part", "| run | measured | at least | goal |", "tflops_causal", "tflops_accelerate", "speed_of_light",
                  "## Kernels beside a copy", "layers went: torch", "| gemm | products |", "rowwise_with_gw_hp_seconds", "| fp8 delayed |"):
        check(words in text, f"no \"{words}\" in gpu_check.md")
    row = p.verdict("elementwise")
    check("beside a copy of as many bytes" in row["remark"], f"{row}")
    row = p.verdict("16 layers, no recompute, bf16")
    check(all(how in row["remark"] for how in ("plain", "CUDA graphs", "autotune")), f"{row}")
    again = p.call("all", 0)
    check("gpu_check: ops" not in again, f"done items were run again:\n{again}")
    # A GPU on which three layers do not fit (88 MiB of plan) and two do; what is named runs again, and nothing else.
    ran = p.ran("bench", 0, only="8b-all-bf16,pro*cts", ND_DOUBLE_MEMORY="86")
    check(ran == ["machine", "products", "8b-all-bf16"] or ran == ["products", "8b-all-bf16"], f"ran: {ran}")
    item = p.item("8b-all-bf16")
    check("3 layers do not fit" in item["results"][-1]["note"], f"{item}")
    row = p.verdict("all 32 layers, F32 state, full recompute, bf16")
    check("plain" not in row["remark"], f"a run of fewer layers is put beside others: {row}")


def torch_is_missing(parent):
    p = Place(parent, "torch")
    bare = p.program("bare", f'exec {sys.executable} -I -S "$@"')
    items = "torch-*,8b-torch-*"
    p.call("torch", 3, "torch-fit skipped", "torch cannot be imported", only=items, ND_PEER_PYTHON=bare)
    p.expect(torch_same="skipped", torch_fit="skipped", torch_most="skipped")
    row = p.verdict("the most layers that PyTorch fits")
    check(row["verdict"] == "not measured" and "torch-" in row["remark"], f"{row}")
    check("**Skipped:** " in p.text(), "the report says what was skipped")
    p.call("torch", 3, "is not there; ND_PEER_PYTHON", only=items, ND_PEER_PYTHON="/nowhere/python")
    ran = p.ran("torch", 0)  # once it is there, it is compared, and nothing else runs in this phase
    check(all(name == "machine" or "torch" in name for name in ran), f"ran: {ran}")
    for words in ("without recompute, bf16, beside PyTorch", "the most layers that PyTorch fits"):
        check(p.verdict(words)["measured"] == "2 x", f"{p.verdict(words)}")


def torch_is_measured_compiled_first(parent):
    """What becomes of PyTorch's two kinds: the faster counts, fewer layers follow when memory is short, and the time is kept."""
    sys.path.insert(0, str(SOURCE / "scripts" / "gpu"))
    import peer

    def measured(answers, seconds=480.0, halve=True):
        """(exit code, last result, (layers, compiled) of each try), where each kind of so many layers answers a code or tokens/s."""
        tries, said = [], []

        def child(a, layers, *flags, limit=None):
            compiled = "--compile" in flags
            tries.append((layers, compiled))
            answer = answers[layers, compiled]
            return (0, {"tokens_per_second": answer, "layers": layers, "compile": compiled}) if answer > 100 else (answer, {"error": "none"})

        peer.child, peer.say = child, said.append
        a = argparse.Namespace(steps=1, accumulation=1, warm_up=1, checkpoint=False, compile=True, layers=16, halve=halve, seconds=seconds)
        return peer.fewer(a), said[-1], tries

    both = {(16, True): 300.0, (16, False): 200.0}
    code, result, tries = measured(both)
    check(code == 0 and result["compile"] and result["tokens_per_second_not_compiled"] == 200.0 and tries == [(16, True), (16, False)], f"{result}")
    check(measured(both, seconds=59)[2] == [(16, True)], "without a minute left, what is compiled is enough")
    code, result, _ = measured({(16, True): 1, (16, False): 200.0})
    check(code == 0 and not result["compile"] and result["compiled_failed"] == "none", f"{result}")
    code, result, tries = measured({(16, True): 71, (8, True): 300.0, (8, False): 71})
    check(code == 0 and result["layers"] == 8 and result["not_compiled_failed"] == "none" and (16, False) not in tries, f"{result}, {tries}")
    check(measured({(16, True): 71, (15, True): 300.0, (15, False): 200.0}, halve=False)[1]["layers"] == 15, "one layer less")
    check(measured({(16, True): 1, (16, False): 1})[0] == 1, "a failure of both is one")
    check(measured({(n, True): 71 for n in (16, 8, 4, 2, 1)})[0] == 71, "not even one layer fits")


def a_layer_is_that_of_torch(parent):
    """The real programs and the real PyTorch, on a small shape; and a loss that is not PyTorch's."""
    python = os.environ.get("ND_PEER_PYTHON") or sys.executable
    if subprocess.run([python, "-c", "import torch, transformers"], stderr=subprocess.DEVNULL).returncode != 0:
        print(f"a_layer_is_that_of_torch: left out, as {python} has no torch and transformers", flush=True)
        return
    p = Place(parent, "layer", real=True)
    p.call("torch", 0, only="torch-layer-*", ND_PEER_PYTHON=python)
    for precision in ("fp32", "bf16"):
        result = p.item(f"torch-layer-{precision}")["results"][-1]
        check(result["as_torch"] and result["steps"] == 3 and len(set(result["losses"])) == 3, f"{result}")
    wrong = p.program("wrong", f'''case "$*" in *compare*) sed -i 's/"loss":[0-9.]*/"loss":5.0/' {p.out}/runs/layer-fp32/metrics.jsonl;; esac
exec {python} "$@"''')
    p.call("torch", 1, "torch-layer-fp32 failed", only="torch-layer-fp32", ND_PEER_PYTHON=wrong)


def tools_are_missing(parent):
    p = Place(parent, "tools")
    p.call("conformance", 3, "compute-sanitizer is not there", only="ops,sanitizer-*", ND_GPU_SANITIZER="/nowhere/compute-sanitizer")
    p.expect(sanitizer_attention="skipped", sanitizer_matmul="skipped", ops="done")
    unsupported = p.program("unsupported", "echo '========= Error: Device not supported'; exit 1")
    p.call("conformance", 3, "does not support this device", only="sanitizer-*", ND_GPU_SANITIZER=unsupported)
    blind = p.program("blind", TESTED.format(n=3))
    p.call("conformance", 1, "has watched no process", only="sanitizer-*", ND_GPU_SANITIZER=blind)
    finds = p.program("finds", "echo '========= Invalid __global__ write'; " + TESTED.format(n=3) + "; exit 9")
    p.call("conformance", 1, "sanitizer-matmul failed", only="sanitizer-*", ND_GPU_SANITIZER=finds)
    check("## The end of the log of sanitizer-matmul (failed)" in p.text() and "\n========= Invalid __global__ write\n" in p.text(),
          "the report shows the end of the log of what failed")
    p.call("conformance", 0, only="sanitizer-*")
    p.call("bench", 3, "no activity was recorded", only="profile-bf16")
    (p.programs / "libnd_activity.so").unlink()
    p.call("bench", 3, "libnd_activity.so was not built", only="profile-bf16")


def tests_that_do_not_pass(parent):
    p = Place(parent, "tests")
    p.program("test_hostcuda_ops", LIST + TESTED.format(n=0))
    p.program("test_hostcuda_goldens", TESTED.format(n=2) + "; exit 1")
    p.call("conformance", 1, "ops failed", "no test ran", "goldens failed", "small-fp32 done")
    (p.programs / "test_hostcuda_ops").unlink()
    p.call("conformance", 1, "test_hostcuda_ops was not built", "has no list of its tests")
    p.program("test_hostcuda_ops", SUITE)
    p.program("test_hostcuda_goldens", SUITE)
    p.call("conformance", 0)
    for name, value, items in (("LOSS_rowwise", "5.4", "small-*,losses"), ("LOSS_bf16", "nan", "small-*,losses"), ("GROWS", "4096", "memory"),
                               ("LOSS_graphs-fp8-true", "5.1", "graphs-*"), ("LOSS_alone-bf16-true", "5.1", "nccl-alone-*"),
                               ("LOSS_again2", "5.1", "deterministic"),
                               ("LOSS_tuned-bf16-2", "5.1", "autotune-*"), ("LOSS_tuned-bf16", "5.1", "autotune-*")):
        p.call("conformance", 1, " failed: ", only=items, **{name: value})
    p.expect(graphs_bf16="done", graphs_fp8="failed", autotune_bf16="failed", autotune_fp8="done", memory="failed", nccl_alone_bf16="failed",
             nccl_alone_fp8="done")
    for used, words in (("9e9", "not as planned"), ("9e8", "not as planned"), ("1.2e9", "as planned")):
        p.call("conformance", 1, "memory done", only="memory", USED=used)  # others have failed before
        check(p.item("memory")["results"][-1]["memory"] == words, f"{p.item('memory')}")
    p.program("ndtrain", 'echo "$*"')
    p.call("conformance", 1, "texts failed", "text 1 on the GPU is", only="texts")
    no_cpu = 'case "$*" in *cpu*) echo "built without the CPU backend" >&2; exit 2;; esac; echo "{}"'
    p.program("ndtrain", no_cpu)
    p.call("conformance", 1, "texts done", only="texts")  # others have failed before
    check(p.item("texts")["results"][-1]["texts"] == "as one at a time", f"{p.item('texts')}")
    p.program("ndlaunch", "exit 2")
    p.call("conformance", 1, "small-bf16 failed", "memory failed", only="small-bf16,memory,graphs-bf16")
    p.call("bench", 1, "8b-all-bf16 failed", "8b-half-fp8 failed", only="8b-all-bf16,8b-half-*")
    check(p.verdict("16 layers")["verdict"] == "not measured", f"{p.verdict('16 layers')}")


def jobs_on_several_gpus(parent):
    """Stand-ins: losses of a mesh that differ, a launcher that outlives its killed worker or says another reason."""
    p = Place(parent, "several")
    p.call("several", 1, "mesh-1x2x1x1 failed", "they may differ by", only="mesh-*", **{"LOSS_mesh-1x2x1x1": "5.01"})
    p.expect(mesh_2x1x1x1="done", mesh_1x2x1x1="failed", mesh_1x1x2x1_ring="done")
    p.call("several", 1, "8b-fsdp-bf16-blocks done", only="8b-fsdp-bf16-blocks")  # a mesh has failed before
    p.call("several", 1, "workers and not 2", only="killed-rank")
    two = 'import subprocess\ntwo = [subprocess.Popen(["sleep", "300"]) for _ in range(2)]\n'
    end = "two[1].wait()\ntwo[0].kill()\ntwo[0].wait()\n"
    p.program("ndlaunch", two + LAUNCH + end + "print('rank 1 failed first: another reason')\nsys.exit(1)", sys.executable)
    p.call("several", 1, "killed-rank failed", "the job ended with 1", only="killed-rank")
    p.program("ndlaunch", two + LAUNCH + end + "print('rank 1 failed first: signal 9')\nsys.exit(137)", sys.executable)
    p.call("several", 1, "killed-rank done", only="killed-rank")  # a mesh has failed before


def a_smaller_gpu(parent):
    p = Place(parent, "smaller")
    counter = p.programs / "tokens"
    p.program("nd_bench_gpu", f"echo \"$*\" >>{counter}; case \"$*\" in *'tokens 16'*) exit 71;; esac")
    p.call("bench", 1, "8b-all-bf16 failed", "products failed", only="products,8b-all-bf16", FAIL_ABOVE="1")
    check(p.verdict("products")["verdict"] == "not measured", f"{p.verdict('products')}")
    # By plan two of three layers fit 64 GiB, so three are not even tried.
    p.program("ndtrain", PLAN, sys.executable)
    check(p.ran("bench", 1, only="8b-all-bf16", FAIL_ABOVE="3")[-1] == "8b-all-bf16", "products failed before, and is not run")
    item = p.item("8b-all-bf16")
    check(item["results"][-1]["layers"] == 2 and "3 layers do not fit" in item["results"][-1]["note"], f"{item}")
    log = (p.out / "items" / "8b-all-bf16.err").read_text()
    check("2 of 3 layers fit by plan" in log and "out of device memory" not in log, log)


def what_is_cut_off_leaves_its_steps(parent):
    p = Place(parent, "steps")
    p.program("ndlaunch", LAUNCH + "import time; time.sleep(600)", sys.executable)
    output = p.call("bench", 75, "8b-half-bf16-graphs cut off", only="kernels,8b-half-bf16-graphs", ND_GPU_LIMIT="75")
    results = p.item("8b-half-bf16-graphs")["results"]
    check(results, f"what was cut off has no result:\n{output}")
    result = results[-1]
    check(result["partial"] and result["steps"] == 3 and result["tokens_per_second"] == 20.0, f"{result}")
    check(p.verdict("16 layers, no recompute, bf16")["verdict"] == "not measured", "what was cut off is no result")
    check("| 8b-half-bf16-graphs |" in p.text().partition("## Runs")[2], "the report shows the steps that there are")
    p.program("ndlaunch", LAUNCH, sys.executable)
    p.call("bench", 0, only="8b-half-bf16-graphs")
    check("partial" not in p.item("8b-half-bf16-graphs")["results"][-1], "a whole run is no part of one")


def results_are_delivered(parent):
    """In the folder OUT, also by a call that fails, and with no file above 16 MiB."""
    p = Place(parent, "delivered")
    out = parent / "delivered" / "OUT"
    (p.out / "data").mkdir(parents=True)
    (p.out / "data" / "large.log").write_bytes(os.urandom(17 << 20))
    (p.out / "data" / "tokens.bin").write_bytes(bytes(1000))
    p.program("nd_bench_gpu", "exit 3")
    p.call("bench", 1, only="kernels,products,8b-half-bf16", OUT=str(out))
    check(sorted(f.name for f in out.iterdir()) == ["gpu_check.json", "gpu_check.md", "gpu_check.tar.gz"], f"{list(out.iterdir())}")
    for name in ("gpu_check.md", "gpu_check.json"):
        check((out / name).read_bytes() == (p.out / name).read_bytes(), f"{name} is another")
    check((out / "gpu_check.tar.gz").stat().st_size < 16 << 20, "the archive is too large")
    with tarfile.open(out / "gpu_check.tar.gz") as archive:
        names = set(archive.getnames())
        left_out = archive.extractfile("gpu_check/left_out.txt").read().decode()
    check({"gpu_check/items/products.json", "gpu_check/items/products.err", "gpu_check/runs/8b-half-bf16/metrics.jsonl",
           "gpu_check/mode"} <= names, f"{names}")
    check("gpu_check/data/tokens.bin" not in names and left_out == "data/large.log\n", f"{names}, left out: {left_out}")


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
    p.program("test_hostcuda_ops", LIST + f"echo $$ >{mark}.new; mv {mark}.new {mark}; exec sleep 120")
    for how in (signal.SIGTERM, signal.SIGKILL):
        started = p.start("conformance", subprocess.DEVNULL)
        wait_for(mark)
        slow = int(mark.read_text())
        started.send_signal(how)
        started.wait(timeout=100)
        check(json.loads((p.out / "items" / "attention-8b.json").read_text())["state"] == "cut off", "what was cut off is said")
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
    p.call("all", 75, "call it again", only="kernels,products,torch-fit,torch-most,8b-torch-bf16", ND_GPU_LIMIT="1")
    p.expect(products="done", kernels="waiting", torch_fit="waiting", torch_most="waiting")
    check(p.state("8b-torch-bf16") == "waiting", p.state("8b-torch-bf16"))
    check("**Waiting:** " in p.text(), "the report says what waits")
    # One that hangs ends with the call, those after it wait, and the next call begins with it.
    p.program("nd_bench_kernels", "sleep 1")
    p.program("nd_bench_gpu", "echo it hangs; sleep 600")
    output = p.call("bench", 75, "products: it hangs (", "products cut off", only="kernels,products,8b-half-bf16", ND_GPU_LIMIT="75")
    p.expect(kernels="waiting", products="cut off")
    p.expect(**{"8b-half-bf16": "done"})
    check("\nit hangs\n" in p.text(), f"what was cut off shows the end of its log:\n{output}")
    p.program("nd_bench_gpu", """echo '{"product": "o", "type": "bf16", "us": 1.0, "share": 0.97}'""")
    p.call("bench", 0, only="kernels,products,8b-half-*")
    for precision in ("bf16", "fp8"):
        config = json.loads((p.out / "runs" / f"8b-half-{precision}" / "run.json").read_text())["config"]
        check(config["fp8.all_gather"] == ("true" if precision == "fp8" else "false"), f"{precision}: {config}")


def wrong_use(parent):
    p = Place(parent, "use")
    p.call("nothing", 2, "--phase is build")
    (p.programs / "ndlaunch").unlink()
    p.call("bench", 2, "ndlaunch is not there")
    p = Place(parent, "mode")
    p.out.mkdir()
    (p.out / "mode").write_text("on a GPU\n")
    p.call("bench", 2, "results of another mode")


def wheels_come_first(parent):
    """The libraries that torch opens, then those of the toolkit; what the user has set stays in front."""
    root = parent / "wheels"
    (root / "scripts").mkdir(parents=True)
    (root / "cwd" / "scripts").mkdir(parents=True)
    for part in ("cu13", "cudnn"):
        (root / "site" / "nvidia" / part / "include").mkdir(parents=True)
        (root / "site" / "nvidia" / part / "include" / "a.h").touch()
    for path, text in ((root / "cwd" / "scripts" / "find_cuda", "echo /toolkit"),
                       (root / "python", f'PYTHONPATH={root}/site exec {sys.executable} -S "$@"')):
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    code = f"""import os, sys, types
sys.path.insert(0, {str(SOURCE / 'scripts' / 'gpu')!r})
import check
check.set_paths(types.SimpleNamespace(peer={str(root / 'python')!r}))
print(os.environ["LD_LIBRARY_PATH"])"""
    said = subprocess.run([sys.executable, "-c", code], cwd=root / "cwd", env={**os.environ, "LD_LIBRARY_PATH": "/mine"},
                          stdout=subprocess.PIPE, text=True).stdout
    folders = [f for f in said.strip().split(":") if f in ("/mine", "/toolkit/lib64") or f.startswith(str(root))]
    check(folders == ["/mine", *(f"{root}/site/nvidia/{part}/lib" for part in ("cudnn", "cu13")), "/toolkit/lib64"], f"{said}")


def timed(case, parent):
    begin = time.monotonic()
    case(parent)
    print(f"{case.__name__}: {time.monotonic() - begin:.0f} s", flush=True)


def main():
    cases = (everything, the_time_is_up, killed_half_way, tests_that_do_not_pass, jobs_on_several_gpus, wheels_come_first, wrong_use, torch_is_measured_compiled_first, a_layer_is_that_of_torch, torch_is_missing, tools_are_missing,
             a_smaller_gpu, damaged_results, what_is_cut_off_leaves_its_steps, results_are_delivered)
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:  # the others mostly wait
        for running in [pool.submit(timed, case, pathlib.Path(folder)) for case in cases]:
            running.result()


if __name__ == "__main__":
    main()
