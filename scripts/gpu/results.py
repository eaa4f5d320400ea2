# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu/visit results visit.json ...: writes docs/gpu_results.md from what visits brought back, and the rates that they
measured into trainer/commands/gpu_rates.h, which `ndtrain plan --explain` uses."""
import json
import pathlib
import re
import statistics

import report
from check import WrongUse
from visit import TOP

PAGE, RATES = TOP / "docs/gpu_results.md", TOP / "trainer/commands/gpu_rates.h"
ROW = re.compile(r'^    \{"(\w+)", ([^}]*)\},$', re.MULTILINE)


def read(paths):
    """The items of all files, those of later files in the place of earlier ones of the same name; no repetition of a failure
    that a later visit mended."""
    items = {}
    for path in paths:
        try:
            found = json.loads(pathlib.Path(path).read_text())
            if found["mode"] != "on a GPU":
                raise WrongUse(f"{path} is of a {found['mode']}, which says nothing of a GPU")
            items.update({item["item"]: item for item in found["items"]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WrongUse(f"{path} is no visit.json ({error!r})") from None
    done = {name for name, item in items.items() if item["state"] == "done"}
    return [item for name, item in items.items() if name.removesuffix("-again") not in done or name in done]


def of(items, key):
    return [value for item in items if item["state"] == "done" for value in item["results"] if key in value]


def time_weighted(rows):
    """TFLOP/s of rows together: as many FLOPs by as much time."""
    flops, seconds = sum(r["us"] * r["tflops"] for r in rows), sum(r["us"] for r in rows)
    return flops / seconds if seconds else None


def measured(items):
    """{name of a rate: value} of what is there."""
    products = [row for row in of(items, "product") if row["product"] != "8192 cubed"]
    attention = [{"us": row["ms"] * 1e3, "tflops": row["causal_tflops"]} for row in of(items, "attention")]
    found = {"bf16_flops": time_weighted([r for r in products if r["type"] == "bf16"]),
             "fp8_flops": time_weighted([r for r in products if r["type"] != "bf16"]), "attention_flops": time_weighted(attention)}
    kernels = [value["gbps"] * 1e9 for row in of(items, "kernels") for value in row["kernels"].values()]
    if kernels:
        found["memory_bytes"] = statistics.median(kernels)
    return {key: value for key, value in found.items() if value}


def with_rates(text, gpu, commit, found):
    """gpu_rates.h with what was measured on a GPU in its row."""
    def row(match):
        name, values = match[1], match[2].split(", ")
        if name not in gpu:
            return match[0]
        for at, key in ((2, "bf16_flops"), (3, "fp8_flops"), (4, "attention_flops")):
            if key in found:
                values[at] = f"{found[key]:.0f}e12"
        if "memory_bytes" in found:
            values[5] = f"{found['memory_bytes'] / float(values[0]):.2f}"
        return f'    {{"{name}", {", ".join(values)}}},'

    new = ROW.sub(row, text)
    words = f"those of {gpu.split(',')[0]} were measured (commit {commit})"
    return re.sub(r'(#define ND_RATES_FROM ")[^"]*', lambda m: m[1] + words, new) if new != text else text


def write(paths):
    items = read(paths)
    machine = next(iter(of(items, "gpu")), None)
    if machine is None:
        raise WrongUse("no file says which GPU it was (item machine)")
    lines = report.lines_of_report(items, "on a GPU")
    lines[0] = "# Results on a GPU"
    lines[1:1] = ["", f"Made by `scripts/gpu/visit results` from visits to one {machine['gpu'].split(',')[0]}; docs/cuda.md says how to make one."]
    text = "\n".join(lines) + "\n"
    report.write(PAGE, re.sub(r"(?<=[ `])/\S*/(?=\S)", "", text))  # folders of that machine say nothing elsewhere
    found = measured(items)
    report.write(RATES, with_rates(RATES.read_text(), machine["gpu"], machine["commit"], found))
    print(f"visit: wrote {PAGE} of {len(items)} items; rates measured: {', '.join(found) or 'none'}")
    return 0
