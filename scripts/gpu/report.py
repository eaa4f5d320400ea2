# SPDX-License-Identifier: Apache-2.0
"""The records of items, one file each, and the report that is made from them.

A record has the item's state (done, skipped, failed, cut off, waiting), its results (what it printed as JSON objects), and what
a reader wants to know first when it did not end well. A file that is damaged is put aside, and its item runs again.
"""
import io
import json
import os
import pathlib
import sys
import tarfile

import speeds

TAIL = 40  # lines of the log of what did not end well
STATES = ("done", "skipped", "failed", "cut off", "waiting")
FILE_MOST = 16 << 20  # bytes of a file in OUT
NAME = "gpu_check"  # of the files of the report, and of who speaks


def write(path, text):
    """All of it or nothing, whenever the machine stops."""
    new = path.with_name(path.name + ".new")
    with open(new, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(new, path)


# ---- Records ----------------------------------------------------------------------------------------------------------

def record_path(folder, name):
    return pathlib.Path(folder) / "items" / f"{name}.json"


def read_item(path):
    """None for what is no record of this item, whatever is in the file."""
    try:
        value = json.loads(path.read_text())
        complete = value["item"] == path.stem and isinstance(value["results"], list) and isinstance(value["seconds"], int)
        return value if complete and value["state"] in STATES else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def records(folder):
    paths = sorted((pathlib.Path(folder) / "items").glob("*.json"), key=lambda p: (p.stat().st_mtime, p.name))
    return [(p, read_item(p)) for p in paths]


def done(folder):
    """Names of the items that are done."""
    names = []
    for path, value in records(folder):
        if value is None:
            print(f"{NAME}: {path} is damaged; it is kept as {path.name}.damaged, and the item runs again", file=sys.stderr)
            path.rename(path.with_name(path.name + ".damaged"))
        elif value["state"] == "done":
            names.append(value["item"])
    return names


def record(folder, name, **values):
    base = {"item": name, "state": "cut off", "exit_code": None, "seconds": 0, "origin": "", "results": [], "said": [], "tail": [], "opened": {}}
    write(record_path(folder, name), json.dumps({**base, **values}, indent=1) + "\n")


def begin(folder, name, origin):
    """Until its end an item counts as cut off."""
    record(folder, name, origin=origin)


def wait(folder, name):
    """The item waits for another call; what it has already is kept."""
    old = read_item(record_path(folder, name)) or {}
    if old.get("state", "cut off") == "cut off":
        old.pop("item", None)
        record(folder, name, **{**old, "state": "waiting"})


def lines_of(folder, name):
    logs = [record_path(folder, name).with_suffix(suffix) for suffix in (".out", ".err")]
    return [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines() if line.strip()]


def last_line(folder, name):
    """What the item said last that is not a result: how far it is."""
    found = [line for line in lines_of(folder, name) if not line.startswith("{")]
    return found[-1].strip() if found else ""


def objects(lines):
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def end(folder, name, code, seconds, origin, opened):
    """What the item printed and how it ended; code "cut": with its call. Writes the report anew; returns the state."""
    cut, code = code == "cut", 124 if code == "cut" else code
    lines = lines_of(folder, name)
    results = list(objects(lines))
    said = [line for line in lines if "Synthesis" in line or "ERROR SUMMARY" in line][-2:]
    state = "cut off" if cut else "done" if code == 0 else "skipped" if code == 77 else "failed"
    if state == "done":
        results = [value for value in results if not value.get("partial")]
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
    record(folder, name, state=state, exit_code=code, seconds=seconds, origin=origin, results=results, said=said, tail=tail, opened=opened)
    write_report(folder)
    return state


def field(folder, name, key):
    """A value of the results of an item that is done; None when there is none."""
    value = read_item(record_path(folder, name))
    return next((result[key] for result in value["results"] if key in result), None) if value and value["state"] == "done" else None


# ---- The report -------------------------------------------------------------------------------------------------------

def table(title, rows):
    if not rows:
        return []
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = lambda v: f"{v:.4g}" if isinstance(v, float) else str(v).replace("|", "/").replace("\n", " ")
    return ["", f"## {title}", "", "| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)] + \
        ["| " + " | ".join(text(row.get(key, "")) for key in keys) + " |" for row in rows]


def refused(probe):
    return any(probe[key] != 0 for key in ("heuristic", "matmul", "cuda"))


def kernel_rows(results):
    return [{"kernel": name, **values} for value in results if "kernels" in value for name, values in value["kernels"].items()]


def write_report(folder):
    items = [value or {"item": p.stem, "state": "cut off", "exit_code": None, "seconds": 0, "origin": "", "results": [],
                       "said": ["its record is damaged"]} for p, value in records(folder)]
    mode = (folder / "mode").read_text().strip()
    speed = speeds.table(items, dry="dry run" in mode)
    write(folder / f"{NAME}.json", json.dumps({"mode": mode, "speed": speed, "items": items}, indent=1) + "\n")
    write(folder / f"{NAME}.md", "\n".join(lines_of_report(items, mode)) + "\n")
    return items


def lines_of_report(items, mode):
    results = [value for item in items if item["state"] != "skipped" for value in item["results"]]
    of = lambda key: [value for value in results if key in value]
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
    lines += table("Speed", speeds.table(items, dry="dry run" in mode))
    lines += table("Items", [{"item": i["item"], "state": i["state"], "seconds": i["seconds"], "said": " ".join(i["said"])[:160]}
                             for i in items])
    lines += table("Runs", of("run")) + table("torch and transformers", of("compile")) + table("Products", of("product"))
    lines += table("Attention", of("attention")) + table("Attention of separate documents", of("documents"))
    lines += table("Kernels beside a copy", kernel_rows(results))
    lines += table("FP8 beside BF16: linears", of("fp8_products")) + table("FP8 beside BF16: a layer", of("fp8_layer"))
    for value in of("profile"):
        lines += ["", f"## Where the time of two steps of {value['layers']} layers went: {value['profile']}", "", *value["table"]]
    opened = {(program, path): None for item in items for program, paths in item.get("opened", {}).items() for path in paths}
    lines += table("Libraries that were opened", [{"program": program, "file": path} for program, path in opened])
    lines += table("Forms of products that cuBLASLt refuses", [value for value in of("probe") if refused(value)])
    lines += table("Losses", of("losses_of")) + table("Memory", of("memory")) + table("Texts", of("texts"))
    for item in items:
        if item.get("tail"):
            lines += ["", f"## The end of the log of {item['item']} ({item['state']})", "", "```", *item["tail"], "```"]
    return lines


def summary(folder):
    """Prints where the report is and what did not end well; the exit code: 1 something failed, 3 something was skipped."""
    items = write_report(folder)
    deliver(folder)
    print(f"{NAME}: results are in {folder}/{NAME}.md and {NAME}.json")
    for item in items:
        if item["state"] in ("failed", "skipped"):
            print(f"{NAME}: {item['item']} {item['state']}: {' '.join(item['said'])[:300]}", file=sys.stderr)
    states = {item["state"] for item in items}
    return 1 if "failed" in states else 3 if "skipped" in states else 0


# ---- OUT --------------------------------------------------------------------------------------------------------------

def worth_keeping(folder):
    """Records and logs of items; metrics, records and traces of runs; logs of tools. Inputs can be made again."""
    found = [p for pattern in ("items/*", "runs/*/*.json*", "data/*.log", "data/*.csv", "data/*.perfetto.json", "mode") for p in folder.glob(pattern)]
    return sorted((p for p in found if p.is_file()), key=lambda p: (p.stat().st_size, str(p)))


def archive(folder, target):
    """One archive below the limit: where not all fits, the largest files are left out, and a file in it names them."""
    files, left_out = worth_keeping(folder), []
    while True:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for path in files:
                tar.add(path, arcname=f"{NAME}/{path.relative_to(folder)}")
            if left_out:
                text = "".join(f"{path.relative_to(folder)}\n" for path in left_out).encode()
                entry = tarfile.TarInfo(f"{NAME}/left_out.txt")
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))
        if packed.tell() <= FILE_MOST or not files:
            break
        left_out.append(files.pop())
    new = target.with_name(target.name + ".new")
    new.write_bytes(packed.getvalue())
    os.replace(new, target)


def deliver(folder):
    """Copies report, JSON and an archive of the rest into the folder that the variable OUT names, if it is set. After each item,
    so that they are there when the machine is taken away."""
    named = os.environ.get("OUT")
    if not named or not (folder / f"{NAME}.json").exists():
        return
    to = pathlib.Path(named)
    try:
        to.mkdir(parents=True, exist_ok=True)
        for name in (f"{NAME}.md", f"{NAME}.json"):
            if (folder / name).stat().st_size <= FILE_MOST:
                write(to / name, (folder / name).read_text())
        archive(folder, to / f"{NAME}.tar.gz")
    except OSError as error:
        print(f"{NAME}: the results could not be copied to {to}: {error}", file=sys.stderr)
