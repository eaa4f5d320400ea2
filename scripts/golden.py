#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the goldens under tests/parity/goldens with PyTorch and transformers, or check the committed ones.

  python scripts/golden.py [--only ops llama2 ...] [--out FOLDER]
  python scripts/golden.py --check

Needs torch, transformers, safetensors and, for `fp8`, torchao, for `choices`, lm_eval and accelerate (all from PyPI).
Everything is seeded and runs on one thread, so the same versions on the same processor give the same bytes. Another
processor may round F32 sums in another order: --check makes them again in a temporary folder and compares values,
with 2e-6 relative L2 per tensor, 2^-11 of trained weights (inputs, integers and codes exactly).
"""
import argparse
import filecmp
import json
import math
import pathlib
import sys
import tempfile

import torch
from safetensors.torch import load_file

from goldens import greedy, models, ops

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
DEFAULT_OUT = REPOSITORY / "tests" / "parity" / "goldens"
TOLERANCE = 2e-6


def makers():
    """Name -> function(folder) for every golden, in the order in which they are made."""
    table = {"ops": ops.make}
    for name in models.MODELS:
        table[name] = lambda folder, name=name: models.make(name, folder)
    table["greedy"] = greedy.make
    table["fp8"] = make_fp8
    table["choices"] = make_choices
    return table


def make_fp8(folder):
    from goldens import fp8  # only this one needs torchao
    fp8.make(folder)


def make_choices(folder):
    from goldens import choices  # only this one needs lm_eval
    choices.make(folder)


def json_numbers(value, path=""):
    """Flattens a JSON value to (path, leaf) pairs."""
    if isinstance(value, dict):
        for key in value:
            yield from json_numbers(value[key], f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from json_numbers(item, f"{path}[{i}]")
    else:
        yield path, value


def compare_json(made, committed):
    a, b = (dict(json_numbers(json.loads(p.read_text()))) for p in (made, committed))
    for path in sorted(a.keys() | b.keys()):
        if path.startswith(".versions.") or path == ".transformers_version":
            continue
        x, y = a.get(path), b.get(path)
        if isinstance(x, float) and isinstance(y, float):
            # Distances of rounded runs move by per cents when one sum is ordered otherwise.
            loose = path.startswith(".bf16.") or "fp8" in committed.parts
            if not math.isclose(x, y, rel_tol=0.1 if loose else 1e-5, abs_tol=1e-3 if loose else 1e-9):
                yield f"{path}: {y} committed, {x} made now"
        elif x != y:
            yield f"{path}: {y!r} committed, {x!r} made now"


def compare_tensors(made, committed):
    a, b = load_file(made), load_file(committed)
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            yield f"{name}: only in one of the two"
        elif a[name].shape != b[name].shape or a[name].dtype != b[name].dtype:
            yield f"{name}: another shape or dtype"
        elif a[name].dtype != torch.float32:
            if not torch.equal(a[name], b[name]):
                yield f"{name}: differs"
        else:
            # Infinities and NaNs must be in the same places; then the distance of the finite rest counts.
            finite = torch.isfinite(b[name])
            if not torch.equal(finite, torch.isfinite(a[name])):
                yield f"{name}: not finite in other places"
                continue
            x, y = a[name][finite].double(), b[name][finite].double()
            distance = ((x - y).norm() / y.norm().clamp_min(1e-30)).item()
            tolerance = 2**-11 if name.startswith("final.") else TOLERANCE  # Adam magnifies rounding
            if distance > tolerance:
                yield f"{name}: relative L2 distance {distance:.2e}, above {tolerance}"


def check(made, committed):
    """Prints what differs between two golden folders; True when nothing does."""
    good = True
    for path in sorted(p for p in made.rglob("*") if p.is_file()):
        other = committed / path.relative_to(made)
        if not other.exists():
            faults = ["is not committed"]
        elif filecmp.cmp(path, other, shallow=False):
            faults = []
        elif path.suffix == ".jsonl":
            faults = ["differs"]
        elif path.suffix == ".json":
            faults = list(compare_json(path, other))
        else:
            faults = list(compare_tensors(path, other))
        for fault in faults:
            good = False
            print(f"{path.relative_to(made)}: {fault}")
    return good


def make(names, folder):
    table = makers()
    for name in names:
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        table[name](target)
        size = sum(p.stat().st_size for p in target.rglob("*") if p.is_file())
        print(f"{name}: {size / 1024:.0f} KiB", flush=True)


def main():
    table = makers()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(table), default=list(table))
    parser.add_argument("--out", type=pathlib.Path, default=DEFAULT_OUT)
    parser.add_argument("--check", action="store_true", help="compare with the goldens in --out instead of writing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if not arguments.check:
        make(arguments.only, arguments.out)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        made = pathlib.Path(temporary)
        make(arguments.only, made)
        good = check(made, arguments.out)
    print("goldens: all equal" if good else "goldens: some differ")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
