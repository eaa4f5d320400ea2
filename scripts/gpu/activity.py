#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where a GPU's time went: activity.py FILE [--steps N] [--perfetto OUT.json] [--json]

FILE is what libnd_activity.so wrote (tests/gpu/activity.c says how): begin, end and stream of each kernel, copy and fill of a
process, ndtrain or any other. The table has the time of each family of kernels in the last N whole steps (2), the gaps in which
the GPU did nothing, and how much of the collectives ran beside other work. A step ends with the update of the weights; a file
in which fewer than two updates are is shown whole. --perfetto writes all records for https://ui.perfetto.dev.
"""
import argparse
import bisect
import collections
import json
import re
import shutil
import subprocess
import sys

# By the source file, which nvcc writes into the names of our kernels. All files of kernels/cuda with kernels are here.
OURS = {"attention": "attention", "attention_cached": "attention", "attention_plain": "attention", "cross_entropy": "loss",
        "documents": "attention", "elementwise": "elementwise", "embedding": "embedding", "fp8": "fp8", "fp8_cast": "fp8",
        "optimizer": "optimizer", "rmsnorm_bwd": "norm", "rmsnorm_fwd": "norm", "rope": "rope", "swiglu": "swiglu"}
SOURCE = re.compile(r"_GLOBAL__N__[0-9a-f]+_\d+_(\w+?)_cu_")
# Those of libraries and of PyTorch, whose fused kernels have the names of the operations in them; the first that is found counts.
OTHERS = [(family, re.compile(pattern, re.IGNORECASE)) for family, pattern in (
    ("collectives", r"nccl"),
    ("attention", r"cudnn|flash|fmha|sdpa|attention"),
    ("products", r"nvjet|gemm|gemv|cutlass|xmma|splitk|cublas"),
    ("optimizer", r"adam|multi_tensor|foreach"),
    ("norm", r"rms_?norm|layer_?norm|rsqrt"),
    ("loss", r"cross_entropy|softmax|nll_loss"),
    ("fp8", r"fp8|float8|e4m3|amax"),
    ("swiglu", r"swiglu|silu"),
    ("rope", r"rope|rotary|_cos_|_sin_"),
    ("embedding", r"embedding|indexselect"),
    ("elementwise", r"elementwise|triton|reduce|copy|fill|catarray"))]
COPY_KINDS = {1: "host to device", 2: "device to host", 8: "device to device", 9: "host to host", 10: "peer to peer"}

Event = collections.namedtuple("Event", "begin end device stream family name details")  # nanoseconds
Trace = collections.namedtuple("Trace", "process events lost")


class Unreadable(Exception):
    """What is wrong with a file."""


def family_of(name):
    """The family of a kernel, by its mangled name."""
    source = SOURCE.search(name)
    if source and source[1] in OURS:
        return OURS[source[1]]
    return next((family for family, pattern in OTHERS if pattern.search(name)), "other")


def demangled(names):
    """Short names for people. Those of nvcc's unnamed namespaces begin with their source file."""
    long = names
    if shutil.which("c++filt"):
        done = subprocess.run(["c++filt"], input="\n".join(names), stdout=subprocess.PIPE, text=True)
        long = done.stdout.split("\n")[:len(names)] if done.returncode == 0 else names
    short = []
    for raw, text in zip(names, long):
        text = re.sub(r"^(void|int) ", "", text.replace("(anonymous namespace)::", ""))
        source = SOURCE.search(raw)
        if source:
            inner = re.match(r"nd::map\w*_kernel<(\w+)", text)  # the name of what it does to each element
            text = f"{source[1]}: {inner[1] if inner else re.split('[<(]', text)[0]}"
        short.append(re.split(r"[<(]", text)[0] if len(text) > 70 and not source else text)
    return short


def event_of(kind, fields, names):
    begin, end, device, stream, what = (int(f) for f in fields[:5])
    if kind == "k":
        if what not in names or len(fields) != 13:
            raise ValueError
        gx, gy, gz, bx, by, bz, registers, shared = (int(f) for f in fields[5:])
        name, details = names[what], {"grid": [gx, gy, gz], "block": [bx, by, bz], "registers": registers, "shared_bytes": shared}
        return Event(begin, end, device, stream, family_of(name), name, details)
    name = "copy, " + COPY_KINDS.get(what, f"kind {what}") if kind == "c" else "fill"
    return Event(begin, end, device, stream, "copies", name, {"bytes": int(fields[5])})


def read(path):
    """All records of a file. What a killed process has not written to its end, the last line, is left out."""
    try:
        with open(path, errors="replace") as f:
            lines = f.read().split("\n")[:-1]
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from None
    head = re.fullmatch(r"nd_activity 1 \d+ (\d+)", lines[0] if lines else "")
    if not head:
        raise Unreadable(f"{path} was not written by libnd_activity.so; its first line is {lines[:1]}")
    events, names, lost = [], {}, 0
    for number, line in enumerate(lines[1:], 2):
        kind, _, rest = line.partition(" ")
        try:
            if kind == "n":
                key, name = rest.split(" ", 1)
                names[int(key)] = name
            elif kind == "d":
                lost += int(rest)
            else:
                event = event_of({"k": "k", "c": "c", "s": "s"}[kind], rest.split(), names)
                if 0 < event.begin <= event.end:  # a record that was flushed before its end has a time of 0
                    events.append(event)
                else:
                    lost += 1
        except (KeyError, ValueError, IndexError):
            raise Unreadable(f"{path}: line {number} is no record: {line[:80]}") from None
    return Trace(int(head[1]), sorted(events), lost)


# ---- Intervals: sorted lists of (begin, end) that do not touch ----------------------------------------------------------

def union(events):
    merged = []
    for begin, end in sorted((e[0], e[1]) for e in events):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        elif end > begin:
            merged.append([begin, end])
    return merged


def length(intervals):
    return sum(end - begin for begin, end in intervals)


def common(one, other):
    """Nanoseconds that are in both."""
    i = j = total = 0
    while i < len(one) and j < len(other):
        total += max(0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


# ---- Steps and their summary ------------------------------------------------------------------------------------------

def ends_of_steps(events):
    """The end of the last kernel of each update: kernels of the optimizer with no product between them belong together."""
    ends, updating = [], False
    for e in events:
        if e.family == "optimizer":
            if updating:
                ends[-1] = max(ends[-1], e.end)
            else:
                ends.append(e.end)
            updating = True
        elif e.family in ("products", "attention"):
            updating = False
    return ends


def within(events, begin, end):
    """What ran between two times, cut off there."""
    return [e._replace(begin=max(e.begin, begin), end=min(e.end, end)) for e in events if e.end > begin and e.begin < end]


def longest_gaps(events, busy, count):
    order = sorted(events, key=lambda e: e.end)
    ends, begins = [e.end for e in order], [e.begin for e in events]
    gaps = sorted(((after[0] - before[1], before[1], after[0]) for before, after in zip(busy, busy[1:])), reverse=True)[:count]
    return [{"seconds": gap * 1e-9, "after": order[bisect.bisect_left(ends, begin)].name,
             "before": events[bisect.bisect_left(begins, end)].name} for gap, begin, end in gaps]


def summary(path, steps=2):
    """Of the last whole steps of the GPU that did most; seconds are of all these steps together."""
    trace = read(path)
    if not trace.events:
        raise Unreadable(f"{path} has no record of a kernel or copy")
    device = collections.Counter(e.device for e in trace.events).most_common(1)[0][0]
    events = [e for e in trace.events if e.device == device]
    ends = ends_of_steps(events)
    whole = max(0, min(steps, len(ends) - 1))
    begin, end = (ends[-1 - whole], ends[-1]) if whole else (events[0].begin, max(e.end for e in events))
    events = within(events, begin, end)
    busy, window = union(events), end - begin
    families, kernels = {}, {}
    for family in {e.family for e in events}:
        own, rest = union(e for e in events if e.family == family), union(e for e in events if e.family != family)
        families[family] = {"seconds": length(own) * 1e-9, "share": length(own) / window,
                            "alone_seconds": (length(own) - common(own, rest)) * 1e-9,
                            "count": sum(e.family == family for e in events)}
    for e in events:
        kernel = kernels.setdefault(e.name, {"family": e.family, "seconds": 0.0, "count": 0})
        kernel["seconds"] += (e.end - e.begin) * 1e-9
        kernel["count"] += 1
    longest = sorted(kernels.items(), key=lambda item: -item[1]["seconds"])[:20]
    gaps = longest_gaps(events, busy, 5)
    shown = [name for name, _ in longest] + [gap[key] for gap in gaps for key in ("after", "before")]
    short = dict(zip(shown, demangled(shown)))
    collective = families.get("collectives", {"seconds": 0.0, "alone_seconds": 0.0})
    return {
        "process": trace.process, "device": device, "steps": whole, "lost_records": trace.lost,
        "seconds": window * 1e-9, "busy_seconds": length(busy) * 1e-9, "gap_seconds": (window - length(busy)) * 1e-9,
        "gaps": max(0, len(busy) - 1), "longest_gaps": [{**g, "after": short[g["after"]], "before": short[g["before"]]} for g in gaps],
        "collective_seconds": collective["seconds"], "exposed_collective_seconds": collective["alone_seconds"],
        "families": dict(sorted(families.items(), key=lambda item: -item[1]["seconds"])),
        "kernels": [{"name": short[name], **value} for name, value in longest]}


def table(s):
    """The summary in Markdown; times are of one step."""
    per = 1e3 / max(1, s["steps"])
    what = f"{s['steps']} steps" if s["steps"] else "the whole file, which has no two updates of the weights"
    lines = [f"Process {s['process']}, GPU {s['device']}, {what}; ms are of one step of {s['seconds'] * per:.3f} ms"
             if s["steps"] else f"Process {s['process']}, GPU {s['device']}, {what}: {s['seconds'] * per:.3f} ms", "",
             "| family | ms | share | ms alone | launches |", "|---|---|---|---|---|"]
    for name, f in s["families"].items():
        lines.append(f"| {name} | {f['seconds'] * per:.3f} | {100 * f['share']:.1f} % | {f['alone_seconds'] * per:.3f} | "
                     f"{f['count'] / max(1, s['steps']):.0f} |")
    lines.append(f"| nothing (gaps) | {s['gap_seconds'] * per:.3f} | {100 * s['gap_seconds'] / s['seconds']:.1f} % | | "
                 f"{s['gaps'] / max(1, s['steps']):.0f} |")
    if s["collective_seconds"] > 0:
        hidden = s["collective_seconds"] - s["exposed_collective_seconds"]
        lines += ["", f"Collectives: {s['collective_seconds'] * per:.3f} ms, of which {hidden * per:.3f} ms "
                      f"({100 * hidden / s['collective_seconds']:.0f} %) beside other work"]
    lines += ["", "| longest gap, us | after | before |", "|---|---|---|"]
    lines += [f"| {g['seconds'] * 1e6:.1f} | {g['after']} | {g['before']} |" for g in s["longest_gaps"]]
    lines += ["", "| kernel | family | ms | launches | us each |", "|---|---|---|---|---|"]
    lines += [f"| {k['name']} | {k['family']} | {k['seconds'] * per:.3f} | {k['count'] / max(1, s['steps']):.0f} | "
              f"{k['seconds'] / k['count'] * 1e6:.1f} |" for k in s["kernels"]]
    if s["lost_records"]:
        lines += ["", f"{s['lost_records']} records were lost: times are too short, gaps too long"]
    return "\n".join(lines)


def perfetto(path, out):
    """All records as a trace of chrome://tracing, which Perfetto reads; streams are threads, GPUs processes."""
    trace = read(path)
    names = sorted({e.name for e in trace.events})
    short, first = dict(zip(names, demangled(names))), min((e.begin for e in trace.events), default=0)
    rows = [{"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"GPU {device} of process {trace.process}"}}
            for device in sorted({e.device for e in trace.events})]
    rows += [{"ph": "M", "name": "thread_name", "pid": device, "tid": stream, "args": {"name": f"stream {stream}"}}
             for device, stream in sorted({(e.device, e.stream) for e in trace.events})]
    rows += [{"ph": "X", "name": short[e.name], "cat": e.family, "pid": e.device, "tid": e.stream, "ts": (e.begin - first) / 1e3,
              "dur": (e.end - e.begin) / 1e3, "args": e.details} for e in trace.events]
    with open(out, "w") as f:
        json.dump({"displayTimeUnit": "ms", "traceEvents": rows}, f)


def main():
    p = argparse.ArgumentParser(prog="activity.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file")
    p.add_argument("--steps", type=int, default=2)
    p.add_argument("--perfetto", metavar="OUT.json")
    p.add_argument("--json", action="store_true", help="the summary as JSON")
    a = p.parse_args()
    try:
        found = summary(a.file, a.steps)
        print(json.dumps(found, indent=1) if a.json else table(found))
        if a.perfetto:
            perfetto(a.file, a.perfetto)
    except (Unreadable, OSError) as error:
        print(f"activity: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
