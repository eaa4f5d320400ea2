# SPDX-License-Identifier: Apache-2.0
"""Items of the phases bench and torch: kernels, products, the 8B shape here and in PyTorch."""
import array
import csv
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys

import report
import speeds
from place import NO_MEMORY, Cut, Failure, Skip, complain, need_fp8, output_of, run, say, tool
from run_folder import Run

GIB = 2**30
MODEL, TOY_MODEL = "configs/llama-3.1-8b/config.json", "configs/model-small.json"
# Left free beside the plan: what the driver keeps, and the code of kernels, which is loaded at their first use.
SPARE_BYTES = GIB // 2


def with_tokens_that_fit(place, program, *arguments):
    """A benchmark, with fewer tokens where 8192 do not fit the GPU."""
    tokens, code = 16 if place.dry else 8192, NO_MEMORY
    while tokens >= 16 and code == NO_MEMORY:
        code = run([program, *arguments, "--tokens", tokens])
        tokens //= 2
    return code


def fp8_beside_bf16(place, kind):
    """`ndtrain bench --products` or `--layer` on the shape of the 8B model. A time that is not above 0 is a failure."""
    need_fp8(place, "fp8")
    model, sequence = (TOY_MODEL, 32) if place.dry else (MODEL, 8192)
    repeats = ["--repeats", 1] if kind == "layer" and place.dry else []
    command = [place.programs / "ndtrain", "bench", f"--{kind}", "--jsonl", "--device", "cuda", "--model-config", model,
               "--sequence-length", sequence, *repeats]
    rows = []
    with subprocess.Popen([str(c) for c in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                          close_fds=False) as process:
        for line in process.stdout:
            rows.append(json.loads(line))
            say({f"fp8_{kind}": model, **rows[-1]})
    if process.returncode != 0:
        return process.returncode
    times = [value for row in rows for key, value in row.items() if key.endswith("_seconds")]
    if not times or not all(value > 0 for value in times):
        raise Failure(f"ndtrain bench --{kind} gave these times: {times}")
    return 0


# ---- The 8B shape -----------------------------------------------------------------------------------------------------

class Shape:
    """A run of the 8B shape: its inputs, made when they are needed, and the flags that plan and run share. In FP8 weights are
    gathered as codes, as accelerate does: those of all 32 layers fit an H200, and are made once a step."""

    def __init__(self, place, name, precision, recompute="none", options=(), profile=False, workers=1):
        self.place, self.name, self.workers = place, name, workers
        self.sequence = 64 if place.dry else 8192
        self.accumulation = 1 if profile else 2 if place.dry else 16
        self.steps = 2 if profile else 3 if place.dry else 4
        codes = ["--set", "fp8.all_gather=true"] if precision == "fp8" else []
        self.flags = ["--set", "data.format=llmc", "--set", "data.tokenizer=file", "--sequence-length", self.sequence,
                      "--gradient-accumulation-steps", self.accumulation, "--precision", precision, "--set",
                      f"parallel.recompute={recompute}", *codes, *options]
        self.model = json.loads(pathlib.Path(TOY_MODEL if place.dry else MODEL).read_text())

    @property
    def folder(self):
        return self.place.out / "runs" / self.name

    def config(self, layers):
        path = self.place.out / "data" / f"layers-{layers}.json"
        path.write_text(json.dumps({**self.model, "num_hidden_layers": layers}))
        return path

    def write_tokens(self, path):
        """Random ids in the format of llm.c."""
        count = self.sequence * self.accumulation * self.workers * (self.steps + 2) + 1024
        header = array.array("i", [0] * 256)
        header[0:3] = array.array("i", [20240801, 7, count])
        draw = random.Random(1)
        words = array.array("I", (draw.randrange(self.model["vocab_size"]) for _ in range(count)))
        with open(path, "wb") as f:
            header.tofile(f)
            words.tofile(f)

    def planned_bytes(self, layers):
        """By `ndtrain plan`; None where it does not say. A dry run has no driver that holds memory."""
        text = output_of([str(c) for c in (self.place.programs / "ndtrain", "plan", "--device", "cuda", "--workers", self.workers, "--set",
                                           f"model.config={self.config(layers)}", *self.flags)])
        parts = {name: float(number) * (GIB if unit == "GiB" else GIB >> 10)
                 for name, number, unit in re.findall(r"^ +(total|driver and libraries) +([\d.]+) (MiB|GiB)", text, re.MULTILINE)}
        if "total" not in parts:
            return None
        if self.place.dry:
            return parts["total"] - parts.get("driver and libraries", 0.0)
        return parts["total"] + SPARE_BYTES

    def layers_that_fit(self, asked):
        """The most that the GPU's memory holds by plan, at most `asked`."""
        memory = self.place.memory_bytes
        for layers in range(asked, 0, -1) if memory else ():
            planned = self.planned_bytes(layers)
            if planned is None:
                break
            if planned <= memory:
                if layers < asked:
                    complain(f"{layers} of {asked} layers fit by plan: {planned / GIB:.2f} of {memory / GIB:.2f} GiB")
                return layers
        return asked

    def train(self, layers, under=()):
        tokens = self.place.out / "data" / f"tokens-{self.name}.bin"
        self.write_tokens(tokens)
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            return run([*under, self.place.programs / "ndlaunch", "--device", "cuda", "--workers", self.workers, "--set",
                        f"model.config={self.config(layers)}", "--set", f"data.path={tokens}", *self.flags, "--num-steps",
                        self.steps, "--set", "output.save_model=false", "--set", f"output.dir={self.folder}"])
        finally:
            tokens.unlink(missing_ok=True)


def run_8b(place, name, asked, recompute, precision, *options):
    """S 8192, with fewer layers where so many do not fit the GPU. What is cut off leaves the steps that it made."""
    need_fp8(place, precision)
    run_shape(Shape(place, name, precision, recompute, options), asked)


def run_shape(shape, asked):
    place, name = shape.place, shape.name
    layers = shape.layers_that_fit(asked)
    try:
        code = shape.train(layers)
        while code == NO_MEMORY and layers > 1:  # libraries took more than the plan knew of
            layers -= 2 if layers > 4 else 1
            code = shape.train(layers)
    except Cut:
        if (shape.folder / "metrics.jsonl").exists() and Run(shape.folder).steps:
            say({**speeds.summary(name, Run(shape.folder), place.gpu, asked), "partial": True})
        raise
    if code != 0:
        raise Failure
    say(speeds.summary(name, Run(shape.folder), place.gpu, asked))


def kernel_name(name):
    """Without the arguments, which stand in the last parentheses."""
    depth = 0
    for i in range(len(name) - 1, -1, -1) if name.endswith(")") else ():
        depth += {")": 1, "(": -1}.get(name[i], 0)
        if depth == 0:
            return name[:i]
    return name


def kernel_times(path):
    """{kernel: nanoseconds of each launch}, from a CSV with a column for the metric, as ncu --page raw writes it."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    times = {}
    for row in csv.DictReader(lines[start:]):
        try:
            nanoseconds = float(row["gpu__time_duration.sum"].replace(",", ""))
            times.setdefault(kernel_name(row["Kernel Name"])[:90], []).append(nanoseconds)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # the row of units
    return times


def profiled(place, precision):
    """Where a step's time goes: every kernel of two steps of two layers, each timed alone by Nsight Compute."""
    if place.dry and not os.environ.get("ND_GPU_NCU"):
        raise Skip("Nsight Compute (ncu) needs a GPU")
    ncu = tool("ND_GPU_NCU", "ncu")
    if not os.access(ncu, os.X_OK):
        raise Skip("Nsight Compute (ncu) is not there")
    need_fp8(place, precision)
    log = place.out / "data" / f"profile-{precision}.csv"
    log.unlink(missing_ok=True)
    code = Shape(place, f"profile-{precision}", precision, profile=True).train(2, under=[
        ncu, "--target-processes", "all", "--clock-control", "none", "--metrics", "gpu__time_duration.sum", "--print-units", "base",
        "--csv", "--page", "raw", "--log-file", log])
    times = kernel_times(log)
    if not times:
        print("\n".join(log.read_text(errors="replace").splitlines()[-5:]) if log.exists() else "", file=sys.stderr)
        raise Skip(f"ncu gave no times of kernels (exit code {code})")
    total = sum(map(sum, times.values()))
    for name, each in sorted(times.items(), key=lambda pair: -sum(pair[1])):
        say({"profile": precision, "kernel": name, "launches": len(each), "ms": sum(each) * 1e-6,
             "us_each": sum(each) / len(each) * 1e-3, "share": sum(each) / total})


# ---- PyTorch ----------------------------------------------------------------------------------------------------------

def peer(place, *arguments):
    """PyTorch on the same shape, with as many micro-batches a step. It finds its own libraries."""
    if not shutil.which(place.peer):
        raise Skip(f"{place.peer} is not there; ND_PEER_PYTHON names a Python with torch and transformers")
    model, sequence, accumulation = (TOY_MODEL, 64, 2) if place.dry else (MODEL, 8192, 16)
    return run([place.peer, "scripts/gpu/peer.py", "--model", model, "--sequence-length", sequence, "--accumulation", accumulation,
                "--steps", 2, "--warm-up", 1, *(["--device", "cpu"] if place.dry else []), *arguments],
               env={**os.environ, "LD_LIBRARY_PATH": place.own_library_path})


def layer_as_torch(place, precision):
    """One layer of the 8B shape, from equal weights on equal tokens: three steps of SGD here and in PyTorch."""
    if not shutil.which(place.peer):
        raise Skip(f"{place.peer} is not there; ND_PEER_PYTHON names a Python with torch and transformers")
    model, sequence = (TOY_MODEL, 64) if place.dry else (MODEL, 2048)
    inputs, folder = place.out / "data" / f"layer-{precision}", place.out / "runs" / f"layer-{precision}"
    script = [place.peer, "scripts/gpu/layer.py"]
    bare = {**os.environ, "LD_LIBRARY_PATH": place.own_library_path}
    for old in (inputs, folder):
        shutil.rmtree(old, ignore_errors=True)
    try:
        code = run([*script, "make", "--model", model, "--sequence-length", sequence, "--folder", inputs], env=bare)
        if code == 0:
            code = run([place.programs / "ndlaunch", "--device", "cuda", "--workers", 1, "--set", f"model.path={inputs / 'model'}", "--set",
                        f"data.path={inputs / 'tokens.bin'}", "--set", "data.format=llmc", "--set", "data.tokenizer=file", "--sequence-length",
                        sequence, "--precision", precision, "--optimizer", "sgd", "--lr", "0.1", "--schedule", "constant", "--weight-decay",
                        0, "--max-grad-norm", 0, "--num-steps", 3, "--set", "output.save_model=false", "--set", f"output.dir={folder}"])
        if code == 0:
            code = run([*script, "compare", "--folder", inputs, "--run", folder, "--precision", precision,
                        *(["--device", "cpu"] if place.dry else [])], env=bare)
        return code
    finally:
        shutil.rmtree(inputs, ignore_errors=True)  # some GiB


def torch_most(place):
    """The most layers that fit, compiled, with checkpoints."""
    layers = report.field(place.out, "torch-fit", "fit_layers")
    if layers is None:
        raise Skip("it is not known how many layers PyTorch fits (item torch-fit)")
    return peer(place, "--layers", layers, "--fewer", "--checkpoint", "--compile")


def beside_torch(place, name, *options):
    """The same number of layers here."""
    layers = report.field(place.out, "torch-most", "layers")
    if layers is None:
        raise Skip("PyTorch was not measured (item torch-most)")
    run_8b(place, name, int(layers), "full", "bf16", *options)
