#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Parts of scripts/gpu_check.sh that handle JSON.

  gpu_report.py done FOLDER                         names of the items that are done; damaged ones are put aside and named
  gpu_report.py begin FOLDER ITEM ORIGIN            ITEM has begun; until its end it counts as cut off
  gpu_report.py wait FOLDER ITEM                    ITEM waits for another call
  gpu_report.py end FOLDER ITEM CODE SECONDS ORIGIN   what it printed and how it ended (CODE cut: with its call); prints its
                                                    state and writes the report anew
  gpu_report.py report FOLDER                       gpu_check.json and gpu_check.md; exit code 1: something failed, 3: nothing
                                                    failed but something was not done
  gpu_report.py versions                            of the CUDA Toolkit and of the libraries that are opened at run time
  gpu_report.py inputs MODEL LAYERS FOLDER TOKENS   a config.json of that many layers, and random tokens (llm.c format)
  gpu_report.py run NAME RUN_FOLDER GPU LAYERS      one line of JSON about a run of ndtrain
  gpu_report.py same RUN RUN                        fails unless two runs have the same losses, digit for digit
  gpu_report.py replayed RUN REPLAY REPLAY          fails unless a run with autotune and its replays agree as they should
  gpu_report.py profile PRECISION CSV               the times of each kernel in Nsight Compute's CSV
  gpu_report.py losses RUNS NAME...                 fails unless the small runs' losses agree as they should
  gpu_report.py memory RUN_FOLDER IDLE_BYTES        fails unless the driver's memory in use is that of the plan
  gpu_report.py field FOLDER ITEM KEY               a value of an item's results, or nothing
"""
import array
import csv
import ctypes
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys

import gpu_table

WARM_UP = 2
TAIL = 40  # lines of the log of what did not end well
GIB = 2**30
# CUDA's context, cuBLASLt, cuDNN and the code of the kernels that were used, beside the plan.
BESIDE_PLAN = 1.5 * GIB
GRANULE = 2**21  # of the driver's account


def write(path, text):
    """All of it or nothing, whenever the machine stops."""
    new = path.with_name(path.name + ".new")
    with open(new, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(new, path)


def item_path(folder, name):
    return pathlib.Path(folder) / "items" / f"{name}.json"


def read_item(path):
    """None for what is no record of this item, whatever is in the file."""
    try:
        value = json.loads(path.read_text())
        complete = value["item"] == path.stem and isinstance(value["results"], list) and isinstance(value["seconds"], int)
        return value if complete and value["state"] in ("done", "skipped", "failed", "cut off", "waiting") else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def records(folder):
    paths = sorted((pathlib.Path(folder) / "items").glob("*.json"), key=lambda p: (p.stat().st_mtime, p.name))
    return [(p, read_item(p)) for p in paths]


def done(folder):
    for path, value in records(folder):
        if value is None:
            print(f"gpu_check: {path} is damaged; it is kept as {path.name}.damaged, and the item runs again", file=sys.stderr)
            path.rename(path.with_name(path.name + ".damaged"))
        elif value["state"] == "done":
            print(value["item"])


def record(folder, name, **values):
    base = {"item": name, "state": "cut off", "exit_code": None, "seconds": 0, "origin": "", "results": [], "said": [], "tail": []}
    write(item_path(folder, name), json.dumps({**base, **values}, indent=1) + "\n")


def begin(folder, name, origin):
    record(folder, name, origin=origin)


def wait(folder, name):
    old = read_item(item_path(folder, name))
    if old is None or old["state"] == "cut off":
        record(folder, name, state="waiting")


def objects(path):
    for line in path.read_text(errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def end(folder, name, code, seconds, origin):
    cut, code = code == "cut", 124 if code == "cut" else int(code)
    logs = [item_path(folder, name).with_suffix(suffix) for suffix in (".out", ".err")]
    results = list(objects(logs[0]))
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if "Synthesis" in line or "ERROR SUMMARY" in line][-2:]
    state = "cut off" if cut else "done" if code == 0 else "skipped" if code == 77 else "failed"
    if cut:
        said.append(f"cut off after {seconds} s, as the time of the call was up")
    elif code in (124, 137):
        said.append(f"ran past its time of {seconds} s")
    elif state == "failed":
        said += [line for line in lines if line not in said and not line.startswith("{")][:-3:-1]
    said += [str(value["skipped"]) for value in results if "skipped" in value]
    if state == "failed" and not said:
        said.append(f"exit code {code} and no word")
    tail = [] if state in ("done", "skipped") else [line[:400] for line in lines if not line.startswith("{")][-TAIL:]
    record(folder, name, state=state, exit_code=code, seconds=int(seconds), origin=origin, results=results, said=said, tail=tail)
    write_report(pathlib.Path(folder))
    print(state)


def field(folder, name, key):
    value = read_item(item_path(folder, name))
    for result in value["results"] if value and value["state"] == "done" else []:
        if key in result:
            print(result[key])
            return 0
    return 1


def steps_of(run):
    lines = (pathlib.Path(run) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row and "step_ms" in row]


def versions():
    found = {}
    for name, files, function, argument in (("cuBLASLt", ("libcublasLt.so.13", "libcublasLt.so.12"), "cublasLtGetVersion", False),
                                            ("cuDNN", ("libcudnn.so.9",), "cudnnGetVersion", False),
                                            ("NCCL", ("libnccl.so.2",), "ncclGetVersion", True)):
        for file in files:
            try:
                call = getattr(ctypes.CDLL(file), function)
            except (OSError, AttributeError):
                continue
            number, call.restype = ctypes.c_int(0), ctypes.c_int if argument else ctypes.c_size_t
            found[name] = (call(ctypes.byref(number)), number.value)[1] if argument else call()
            break
    for name, command in (("nvcc", [os.environ.get("ND_NVCC", "nvcc"), "--version"]), ("cc", [os.environ.get("CC", "cc"), "--version"])):
        try:
            said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=30).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        number = re.search(r"\bV?(\d+\.\d+\.\d+)", said)
        found[name] = number.group(1) if number else "?"
    print(json.dumps({"libraries": found}))


def inputs(model, layers, folder, tokens):
    config = json.loads(pathlib.Path(model).read_text())
    config["num_hidden_layers"] = int(layers)
    folder = pathlib.Path(folder)
    (folder / f"layers-{layers}.json").write_text(json.dumps(config))
    header = array.array("i", [0] * 256)
    header[0:3] = array.array("i", [20240801, 7, int(tokens) + 1024])
    draw = random.Random(1)
    words = array.array("I", (draw.randrange(config["vocab_size"]) for _ in range(int(tokens) + 1024)))
    with open(folder / f"tokens-{layers}.bin", "wb") as f:
        header.tofile(f)
        words.tofile(f)


def planned_bytes(folder):
    return json.loads((pathlib.Path(folder) / "run.json").read_text())["model"]["planned_bytes"]


def run(name, folder, gpu, layers):
    steps = steps_of(folder)
    if not steps:
        raise ValueError(f"{folder} has no step")
    settings = json.loads((pathlib.Path(folder) / "run.json").read_text())["config"]
    shape = json.loads(pathlib.Path(settings["model.config"]).read_text())
    timed = steps[WARM_UP:] or steps
    middle = lambda key: statistics.median(row[key] for row in timed)
    rate, fp8 = middle("tokens_per_second"), settings["train.precision"] == "fp8"
    out = {"run": name, "layers": shape["num_hidden_layers"], "precision": settings["train.precision"],
           "recompute": settings["parallel.recompute"], "steps": len(steps), "tokens_per_second": rate,
           "step_ms": middle("step_ms"), "tflops_causal": middle("tflops_per_worker_causal"),
           "tflops_accelerate": middle("tflops_per_worker_accelerate"),
           "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"],
           "planned_gib": planned_bytes(folder) / GIB, "used_gib": max(row["peak_memory_bytes"] for row in steps) / GIB}
    share = gpu_table.share_of_light(gpu, shape, int(settings["train.sequence_length"]), fp8, rate)
    if share is not None:
        out["speed_of_light"] = share
    if int(layers) != shape["num_hidden_layers"]:
        out["note"] = f"{layers} layers do not fit this GPU"
    print(json.dumps(out))


def losses_of(run):
    """Of the steps, and of validations, in their order."""
    lines = (pathlib.Path(run) / "metrics.jsonl").read_text().splitlines()
    return [row.get("loss", row.get("validation_loss")) for row in map(json.loads, lines) if "loss" in row or "validation_loss" in row]


def same(one, other):
    a, b = losses_of(one), losses_of(other)
    print(json.dumps({"deterministic": a == b, "losses": len(a)}))
    if a != b:
        first = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        print(f"{one} and {other}: of {len(a)} and {len(b)} losses, validations among them, number {first + 1} differs first: "
              f"{a[first:first + 3]} and {b[first:first + 3]}", file=sys.stderr)
    return 0 if a == b and a else 1


def replayed(tuned, one, other):
    """Replays digit for digit among themselves, and in step 1 with the run that chose; then that one's attention may add in
    another order, as autotune is refused where that order is fixed."""
    a, b, c = (losses_of(p) for p in (tuned, one, other))
    near = len(a) == len(b) and all(abs(x - y) <= 0.01 * y for x, y in zip(a, b))
    choices = json.loads((pathlib.Path(tuned) / "run.json").read_text()).get("autotune")
    good = a[:1] == b[:1] and a and b == c and near and choices is not None
    print(json.dumps({"replayed": bool(good), "losses": len(a)}))
    if not good:
        print(f"losses of the run that chose {a[:4]}, of its replays {b[:4]} and {c[:4]}; "
              f"its record {'has no' if choices is None else 'has'} choices", file=sys.stderr)
    return 0 if good else 1


def without_arguments(name):
    depth = 0
    for i in range(len(name) - 1, -1, -1) if name.endswith(")") else ():
        depth += {")": 1, "(": -1}.get(name[i], 0)
        if depth == 0:
            return name[:i]
    return name


def profile(precision, path):
    """Kernels by the time that they take together; csv with a column for the metric, as ncu --page raw writes it."""
    lines = pathlib.Path(path).read_text(errors="replace").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    times = {}
    for row in csv.DictReader(lines[start:]):
        try:
            nanoseconds = float(row["gpu__time_duration.sum"].replace(",", ""))
            times.setdefault(without_arguments(row["Kernel Name"])[:90], []).append(nanoseconds)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # the row of units
    total = sum(map(sum, times.values()))
    for name, each in sorted(times.items(), key=lambda pair: -sum(pair[1])):
        print(json.dumps({"profile": precision, "kernel": name, "launches": len(each), "ms": sum(each) * 1e-6,
                          "us_each": sum(each) / len(each) * 1e-3, "share": sum(each) / total}))
    return 0 if times else 1


def losses(runs, *names):
    """BF16 within 1 % of F32, every FP8 recipe within 3 % of BF16, at each step of the small model."""
    bad = 0
    for name in names:
        against, bound = ("fp32", 0.01) if name == "bf16" else ("bf16", 0.03)
        try:
            rows = [[row["loss"] for row in steps_of(pathlib.Path(runs) / run)] for run in (name, against)]
        except (OSError, ValueError) as error:
            print(f"the losses of {name} cannot be compared with those of {against}: {error}", file=sys.stderr)
            bad = 1
            continue
        # A NaN is no number that is small.
        worst = max((abs(x - y) / y for x, y in zip(*rows)), default=float("nan"))
        alike = len(rows[0]) == len(rows[1]) and all(abs(x - y) <= bound * y for x, y in zip(*rows)) and rows[0] != []
        bad += not alike
        print(json.dumps({"losses_of": name, "against": against, "steps": len(rows[0]), "worst_relative": worst, "bound": bound}))
    return 1 if bad else 0


def memory(folder, idle):
    """What the driver has given away: the plan, which counts what was in use when it was made, and what CUDA takes later."""
    steps, planned = steps_of(folder), planned_bytes(folder)
    used = max(row["peak_memory_bytes"] for row in steps)
    grown = steps[-1]["peak_memory_bytes"] - steps[0]["peak_memory_bytes"]
    fits = planned - GRANULE <= used <= planned + BESIDE_PLAN and grown <= 0
    print(json.dumps({"memory": "as planned" if fits else "not as planned", "planned_gib": planned / GIB, "used_gib": used / GIB,
                      "beside_plan_gib": (used - planned) / GIB, "in_use_before_gib": int(idle) / GIB, "grown_in_the_run_gib": grown / GIB}))
    if not fits:
        print(f"the driver reports {used / GIB:.2f} GiB in use, the plan has {planned / GIB:.2f}, CUDA itself may keep "
              f"{BESIDE_PLAN / GIB:.2f}; from the first to the last step {grown / GIB:.2f} GiB were added", file=sys.stderr)
    return 0 if fits else 1


def table(title, rows):
    if not rows:
        return []
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = lambda v: f"{v:.4g}" if isinstance(v, float) else str(v).replace("|", "/").replace("\n", " ")
    return ["", f"## {title}", "", "| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)] + \
        ["| " + " | ".join(text(row.get(key, "")) for key in keys) + " |" for row in rows]


def kernel_rows(results):
    return [{"kernel": name, **values} for value in results if "kernels" in value for name, values in value["kernels"].items()]


def write_report(folder):
    items = [value or {"item": p.stem, "state": "cut off", "exit_code": None, "seconds": 0, "origin": "", "results": [],
                       "said": ["its record is damaged"]} for p, value in records(folder)]
    mode = (folder / "mode").read_text().strip()
    results = [value for item in items if item["state"] in ("done", "failed", "cut off") for value in item["results"]]
    of = lambda key: [value for value in results if key in value]
    speed = gpu_table.speed(items, dry="dry run" in mode)
    write(folder / "gpu_check.json", json.dumps({"mode": mode, "speed": speed, "items": items}, indent=1) + "\n")
    lines = [f"# ndtrain: {mode}", ""]
    if "dry run" in mode:
        lines += ["No GPU took part: nothing here says how fast one is, nor that one computes the same.", ""]
    for value in of("commit"):
        lines.append("- " + ", ".join(f"{k} {v}" for k, v in value.items()))
    for words in dict.fromkeys(", ".join(f"{k} {v}" for k, v in value["libraries"].items()) for value in of("libraries")):
        lines.append("- " + words)
    origins = sorted({item["origin"] for item in items if item["origin"]})
    if len(origins) > 1:
        lines += ["", "**Results of several states of the program or machine:** " + "; ".join(origins) + "."]
    for state in ("failed", "skipped", "cut off", "waiting"):
        there = [item for item in items if item["state"] == state]
        if there:
            lines += ["", f"**{state.capitalize()}:** " + "; ".join(
                item["item"] + (f" ({' '.join(item['said'])[:200]})" if item["said"] else "") for item in there) + "."]
    lines += table("Speed", speed)
    lines += table("Items", [{"item": i["item"], "state": i["state"], "seconds": i["seconds"], "said": " ".join(i["said"])[:160]}
                             for i in items])
    lines += table("Runs", of("run")) + table("torch and transformers", of("compile")) + table("Products", of("product"))
    lines += table("Attention", of("attention")) + table("Kernels beside a copy", kernel_rows(results))
    lines += table("Kernels of two steps of two layers, timed one by one", of("profile"))
    lines += table("Losses", of("losses_of")) + table("Memory", of("memory"))
    for item in items:
        if item.get("tail"):
            lines += ["", f"## The end of the log of {item['item']} ({item['state']})", "", "```", *item["tail"], "```"]
    write(folder / "gpu_check.md", "\n".join(lines) + "\n")
    return items


def report(folder):
    items = write_report(pathlib.Path(folder))
    print(f"gpu_check: results are in {folder}/gpu_check.md and gpu_check.json")
    for item in items:
        if item["state"] in ("failed", "skipped"):
            print(f"gpu_check: {item['item']} {item['state']}: {' '.join(item['said'])[:300]}", file=sys.stderr)
    states = {item["state"] for item in items}
    return 1 if "failed" in states else 3 if "skipped" in states else 0


if __name__ == "__main__":
    commands = {"done": (done, 1), "begin": (begin, 3), "wait": (wait, 2), "end": (end, 5), "report": (report, 1),
                "versions": (versions, 0), "inputs": (inputs, 4), "run": (run, 4), "same": (same, 2), "losses": (losses, -2), "memory": (memory, 2),
                "field": (field, 3), "replayed": (replayed, 3), "profile": (profile, 2)}
    wanted = commands.get(sys.argv[1] if len(sys.argv) > 1 else "", (None, 0))
    given = len(sys.argv) - 2
    if wanted[0] is None or (given != wanted[1] and not (wanted[1] < 0 and given >= -wanted[1])):
        sys.exit(__doc__)
    sys.exit(wanted[0](*sys.argv[2:]))
