# SPDX-License-Identifier: Apache-2.0
"""Items of the phases bench and torch: kernels, products, the 8B shape here and in PyTorch."""
import array
import json
import math
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys

import conformance
import report
import speeds
from place import NO_MEMORY, Cut, Failure, Skip, complain, need_fp8, output_of, run, say
from run_folder import Run

GIB = 2**30
MODEL, TOY_MODEL = "configs/llama-3.1-8b/config.json", "configs/model-small.json"
TWO_LAYERS = "scripts/gpu/two_layers.json"  # `visit expect` makes it
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

    def __init__(self, place, name, precision, recompute="none", options=(), workers=1, steps=0, changes=None, halve=False, sequence=0,
                 accumulation=0, device="cuda"):
        """changes: of the model's config.json. halve: half as many layers are tried where so many do not fit."""
        self.place, self.name, self.workers, self.halve, self.device = place, name, workers, halve, device
        self.sequence = sequence or (64 if place.dry else 8192)
        self.accumulation = accumulation or (2 if place.dry else place.micro_batches)
        self.steps = steps or (3 if place.dry else 4)
        codes = ["--set", "fp8.all_gather=true"] if precision == "fp8" else []
        self.flags = ["--set", "data.format=llmc", "--set", "data.tokenizer=file", "--sequence-length", self.sequence,
                      "--gradient-accumulation-steps", self.accumulation, "--precision", precision, "--set",
                      f"parallel.recompute={recompute}", *codes, *options]
        self.model = {**json.loads(pathlib.Path(TOY_MODEL if place.dry else MODEL).read_text()), **(changes or {})}

    @property
    def folder(self):
        return self.place.out / "runs" / self.name

    def config(self, layers):
        path = self.place.out / "data" / f"{self.name}-{layers}.json"
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
                                           f"model.config={self.config(layers)}", *self.flags)], codes=(0, 1))  # 1: does not fit
        parts = {name: float(number) * (GIB if unit == "GiB" else GIB >> 10)
                 for name, number, unit in re.findall(r"^ +(total|driver and libraries) +([\d.]+) (MiB|GiB)", text, re.MULTILINE)}
        if "total" not in parts:
            return None
        if self.place.dry:
            return parts["total"] - parts.get("driver and libraries", 0.0)
        return parts["total"] + SPARE_BYTES

    def fewer(self, layers):
        """How many are tried where so many do not fit."""
        return layers // 2 if self.halve else layers - 1

    def layers_that_fit(self, asked):
        """The most that the GPU's memory holds by plan, at most `asked`."""
        memory, layers = self.place.memory_bytes, asked
        while memory and layers > 0:
            planned = self.planned_bytes(layers)
            if planned is None:
                break
            if planned <= memory:
                if layers < asked:
                    complain(f"{layers} of {asked} layers fit by plan: {planned / GIB:.2f} of {memory / GIB:.2f} GiB")
                return layers
            layers = self.fewer(layers)
        return asked

    def train(self, layers):
        tokens = self.place.out / "data" / f"tokens-{self.name}.bin"
        self.write_tokens(tokens)
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            return run([self.place.programs / "ndlaunch", "--device", self.device, "--workers", self.workers, "--set",
                        f"model.config={self.config(layers)}", "--set", f"data.path={tokens}", *self.flags, "--num-steps",
                        self.steps, "--set", "output.save_model=false", "--set", f"output.dir={self.folder}"])
        finally:
            tokens.unlink(missing_ok=True)


def run_8b(place, name, asked, recompute, precision, *options):
    """S 8192, with fewer layers where so many do not fit the GPU. What is cut off leaves the steps that it made."""
    need_fp8(place, precision)
    run_shape(Shape(place, name, precision, recompute, options), asked)


def half_8b(place, name, asked, precision, *options):
    """No recompute, and half as many layers where so many do not fit."""
    need_fp8(place, precision)
    run_shape(Shape(place, name, precision, options=options, halve=True), asked)


def run_shape(shape, asked):
    """Prints how the run was, and returns it."""
    place, name = shape.place, shape.name
    layers = shape.layers_that_fit(asked)
    try:
        code = shape.train(layers)
        while code == NO_MEMORY and layers > 1:  # libraries took more than the plan knew of
            layers = shape.fewer(layers)
            code = shape.train(layers)
    except Cut:
        if (shape.folder / "metrics.jsonl").exists() and Run(shape.folder).steps:
            say({**speeds.summary(name, Run(shape.folder), place.gpu, asked), "partial": True})
        raise
    if code != 0:
        raise Failure
    made = Run(shape.folder)
    say(speeds.summary(name, made, place.gpu, asked))
    return made


def first_step(made):
    """Loss and norm of the gradient, which all of forward and backward has a part in."""
    return {key: made.steps[0][key] for key in ("loss", "grad_norm")}


def cpu_two_layers(place, precision):
    """The first step of two_layers by this machine's CPUs: about five minutes on two cores, and 16 GB of memory."""
    shape = Shape(place, f"8b-two-{precision}", precision, "full", ("--optimizer", "sgd"), steps=1, accumulation=1, device="cpu")
    if shape.train(2) != 0:
        raise Failure
    return first_step(Run(shape.folder))


def two_layers(place, precision):
    """The first step beside a CPU's, which has the same initial bits and tokens, multiplies in the same types and adds in another
    order: the bounds are those of beside_doubles. A toy has the loss of logits that know nothing in its place: with V of them, of
    variance s2, ln V + s2 / 2. The last norm makes rows of C numbers of mean square 1, so s2 is C times the square of the weights'
    deviation. A token's loss deviates by s, and BF16 rounds logits by less than a hundredth."""
    need_fp8(place, precision)
    shape = Shape(place, f"8b-two-{precision}", precision, steps=3, accumulation=1)
    made = run_shape(shape, 2)
    got, bound = first_step(made), 0.03 if precision == "fp8" else 0.01
    if place.dry:
        s2 = shape.model["hidden_size"] * shape.model["initializer_range"]**2
        want = {"loss": math.log(shape.model["vocab_size"]) + s2 / 2}
        bound += 4 * math.sqrt(s2 / shape.sequence) / want["loss"]
    else:
        want = json.loads(pathlib.Path(TWO_LAYERS).read_text())[precision]
    worst = max(abs(got[key] - want[key]) / want[key] for key in want)
    say({"losses_of": shape.name, "against": "a CPU", "steps": len(made.losses), "worst_relative": worst, "bound": bound,
         "losses": made.losses, **got})
    if not worst <= bound or not all(math.isfinite(loss) for loss in made.losses):
        raise Failure(f"the losses of two layers are {made.losses}; the first step has {got} and should have {want}, within "
                      f"{100 * bound:.1f} %")


def train_quarter(place, precision):
    """Two layers of a quarter of the 8B width, with its heads of 128 and four of them for one of keys: what the doubles can compute
    in seconds."""
    changes = {} if place.dry else {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 3584,
                                    "vocab_size": 256}
    shape = Shape(place, f"quarter-{precision}", precision, steps=2, changes=changes, sequence=64 if place.dry else 128, accumulation=1)
    if shape.train(2) != 0:
        raise Failure
    return Run(shape.folder)


def quarter(place, precision):
    need_fp8(place, precision)
    conformance.beside_doubles(place, f"quarter-{precision}", train_quarter(place, precision), precision)


def profiled(place, what):
    """Where a step's time goes: begin, end and stream of each kernel and copy, by a library that CUDA loads into the program. The
    same for PyTorch."""
    try:
        import activity
    except ImportError:
        raise Skip("scripts/gpu/activity.py is not there") from None
    library, log = place.programs / "libnd_activity.so", place.out / "data" / f"activity-{what}"
    if not library.exists():
        raise Skip(f"{library} was not built")
    if what != "torch":
        need_fp8(place, what)
    log.unlink(missing_ok=True)
    os.environ.update({"CUDA_INJECTION64_PATH": str(library), "ND_ACTIVITY_FILE": str(log)})
    layers = report.field(place.out, "torch-same" if what == "torch" else f"8b-half-{what}", "layers") or 2
    if what == "torch":
        code = peer(place, "--layers", layers, "--compile")
    else:
        code = Shape(place, f"profile-{what}", what, steps=3).train(int(layers))
    if not log.exists():
        raise Skip(f"no activity was recorded (exit code {code})")
    found = activity.summary(log)
    say({"profile": what, "layers": layers, "summary": found, "table": activity.table(found).splitlines()})
    activity.perfetto(log, place.out / "data" / f"{what}.perfetto.json")
    return code


# ---- PyTorch ----------------------------------------------------------------------------------------------------------

def peer(place, *arguments):
    """PyTorch on the same shape, with as many micro-batches a step. It finds its own libraries."""
    if not shutil.which(place.peer):
        raise Skip(f"{place.peer} is not there; ND_PEER_PYTHON names a Python with torch and transformers")
    model, sequence, accumulation = (TOY_MODEL, 64, 2) if place.dry else (MODEL, 8192, place.micro_batches)
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


def torch_same(place, asked):
    """As many layers as here, without recompute: each block compiled, then as it is."""
    return peer(place, "--layers", report.field(place.out, "8b-half-bf16", "layers") or asked, "--fewer", "--halve", "--compile", "--seconds", 170)


def same_as_torch(place, name):
    """Here once more, where PyTorch fits fewer layers."""
    theirs, ours = (report.field(place.out, item, "layers") for item in ("torch-same", "8b-half-bf16"))
    if theirs is None:
        raise Skip("PyTorch was not measured (item torch-same)")
    if theirs == ours:
        say({"same_layers": theirs})
    else:
        half_8b(place, name, int(theirs), "bf16")


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
