#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a power failure may leave of a save: check_checkpoint_order.py BUILD_FOLDER LIBRARY.

strace records the system calls of runs that save and delete checkpoints. Each commit must come after all that it promises is
durable, and each deletion after the commit that replaces what goes. Then the recorded calls are put out of order, which the same
check must refuse; so it notices when the program does.
"""
import dataclasses
import random
import re
import shutil
import sys

from checkpoint_runs import KEPT, Bench, check

CALLS = "openat,mkdir,write,pwrite64,fallocate,ftruncate,fsync,fdatasync,sync_file_range,rename,renameat,renameat2,unlink,unlinkat,rmdir"
CHANGES = {"pwrite64", "write", "fallocate", "ftruncate"}


@dataclasses.dataclass(frozen=True)
class Call:
    name: str
    path: str  # of the descriptor, or the first argument
    to: str  # of a rename
    creates: bool
    failed: bool
    begin: int  # lines of the trace: two calls overlap when their lines do
    end: int


def argument_path(name, text, cwd):
    """The path that one call is about, out of its arguments as strace -y prints them."""
    found = re.match(r'(?:AT_FDCWD|\d+)<([^>]*)>, "([^"]*)"', text)
    if found and name not in CHANGES: # there the string is data
        return found[2] if found[2].startswith("/") else f"{found[1]}/{found[2]}"
    found = re.match(r'"([^"]*)"', text) or re.match(r"\d+<([^>]*)>", text)
    return str(cwd / found[1]) if found else ""


def parse(text, cwd):
    """Calls in the order in which they began; programs stay in the folder `cwd`."""
    calls, open_calls = [], {}
    for number, line in enumerate(text.splitlines()):
        found = re.match(r"(\d+) +(.*)", line)
        pid, rest = found[1], found[2]
        if rest.endswith("<unfinished ...>"):
            open_calls[pid] = (number, rest[:-len("<unfinished ...>")])
            continue
        begin = number
        found = re.match(r"<\.\.\. \w+ resumed>(.*)", rest)
        if found:
            begin, head = open_calls.pop(pid)
            rest = head + found[1]
        found = re.match(r"(\w+)\((.*)\) += (-?\d+)", rest)
        if not found:
            continue
        renamed = re.search(r', (?:AT_FDCWD<[^>]*>, )?"([^"]*)"(?:, \w+)?$', found[2]) if found[1].startswith("rename") else None
        calls.append(Call(found[1], argument_path(found[1], found[2], cwd), renamed[1] if renamed else "", "O_CREAT" in found[2],
                          found[3].startswith("-"), begin, number))
    return sorted(calls, key=lambda c: c.begin)


def syncs(calls, path):
    return [c for c in calls if c.name in ("fsync", "fdatasync") and c.path == path and not c.failed]


def durable_between(calls, path, after, before, what):
    """The file or folder is synced once all of `after` ended and before the line `before`; the line at which that is done."""
    begin = max((c.end for c in after), default=-1)
    good = [c.end for c in syncs(calls, path) if c.begin > begin and c.end < before]
    check(good, f"{what} is not durable before line {before + 1}: {path}")
    return min(good)


def check_commit(calls, run, commit):
    temporary = commit.path
    inside = [c for c in calls if not c.failed and c.path.startswith(temporary + "/")]
    files = sorted({c.path for c in inside if c.name == "openat" and c.creates})
    manifest = f"{temporary}/manifest.json"
    check(manifest in files and len(files) >= 3, f"{temporary} has only {files}")
    made = min(c.begin for c in inside if c.path == manifest and c.name == "openat")
    for file in files:
        changes = [c for c in inside if c.path == file and c.name in CHANGES]
        check(changes, f"{file} is empty")
        durable_between(calls, file, changes, commit.begin if file == manifest else made, "a file")
    reserved = {c.path: c for c in inside if c.name in ("fallocate", "ftruncate")}
    for file in files: # a full disk shows before a rank sends data
        if file.endswith(".safetensors") and file.startswith(f"{temporary}/state/"):
            own = file.rsplit("/", 1)[1].split("-model-")[0]
            data = [c for c in inside if c.name == "pwrite64" and f"/{own}-" in c.path]
            check(file in reserved and reserved[file].end < min(c.begin for c in data), f"{file} is not reserved first")
    for folder in (f"{temporary}/state", temporary):
        makes = [c for c in inside if c.path.rsplit("/", 1)[0] == folder
                 and (c.name == "mkdir" or c.creates or c.name.startswith("rename")) and c is not commit]
        durable_between(calls, folder, makes, commit.begin if folder == temporary else made, "a folder")
    # The lines of the saved steps stand in it when rank 0's save begins; another rank's may have begun before.
    metrics = f"{run}/metrics.jsonl"
    begun = [c for c in calls if c.name == "mkdir" and c.path == temporary and not c.failed]
    synced = durable_between(calls, metrics, begun[:1], commit.begin, "the record of its steps")
    check([c for c in calls if c.name == "write" and c.path == metrics and c.end < synced], "no step is recorded")
    return durable_between(calls, run, [commit], sys.maxsize, "the commit")


def check_order(calls, run):
    """Fails when a power failure at some moment could lose a checkpoint, or leave half of one with a good name."""
    durable, commits, deletions = {}, 0, 0  # durable: name to line
    made = [c for c in calls if c.name == "mkdir" and c.path == run and not c.failed]
    for call in calls:
        if call.failed:
            continue
        if call.name.startswith("rename") and re.fullmatch(r"/\.tmp-checkpoint-[^/]*", call.path[len(run):]):
            if not commits:
                durable_between(calls, run.rsplit("/", 1)[0], made, call.begin, "the run folder")
            durable[call.to] = check_commit(calls, run, call)
            commits += 1
        elif call.name.startswith("rename") and call.path.startswith(f"{run}/checkpoint-"):
            check("/.del-checkpoint-" in call.to, f"{call.path} is renamed to {call.to}")
            durable.pop(call.path, None)
            there = [name for name, line in durable.items() if line < call.begin]
            check(len(there) >= KEPT, f"{call.path} goes at line {call.begin + 1}, when only {there} are durable")
            unlinks = [c.begin for c in calls if c.name in ("unlinkat", "unlink", "rmdir") and c.path.startswith(call.to)]
            check(unlinks, f"{call.to} is not deleted")
            durable_between(calls, run, [call], min(unlinks), "a deletion's begin")
            deletions += 1
        elif call.name in ("unlink", "unlinkat", "rmdir") and call.path.startswith(run):
            check("/.del-checkpoint-" in call.path, f"{call.path} is removed")
        elif call.name in CHANGES:
            check(not call.path.startswith(f"{run}/checkpoint-"), f"{call.path} is changed under its good name")
    check(commits >= 3 and deletions >= 1, f"the trace has {commits} commits and {deletions} deletions")


def record(bench, out, workers, *flags, prefix=()):
    trace = bench.folder / f"{out}.trace"
    bench.train(workers, out, *flags, prefix=["strace", "-f", "-y", "--seccomp-bpf", "-s", "400", "-o", str(trace), "-e",
                                              f"trace={CALLS}", *prefix])
    run = str(bench.folder / out)
    calls = [c for c in parse(trace.read_text(), bench.folder) if c.path == run or c.path.startswith(run + "/") or c.path == str(bench.folder)]
    check(calls, f"strace has recorded nothing of {run}")
    return calls, run


def refused(calls, run, what):
    try:
        check_order(calls, run)
    except AssertionError:
        return
    raise AssertionError(f"the check takes a trace in which {what}")


def renumbered(calls):
    return [dataclasses.replace(c, begin=i, end=i) for i, c in enumerate(calls)]


def self_test(calls, run):
    """Traces of programs that would be wrong."""
    for path in sorted({c.path for c in calls if c.name == "fsync" and ("-checkpoint-" in c.path or "/metrics" in c.path)}):
        refused([c for c in calls if not (c.name == "fsync" and c.path == path)], run, f"{path} is never synced")
        late = [c for c in calls if c.name == "fsync" and c.path == path]
        refused(renumbered([c for c in calls if c not in late] + late), run, f"{path} is synced at the end")
    refused([c for c in calls if c.name != "fallocate"], run, "no space is reserved")
    commits = [c for c in calls if c.name.startswith("rename") and re.fullmatch(r"/\.tmp-checkpoint-[^/]*", c.path[len(run):])]
    for commit in commits:
        first = next(i for i, c in enumerate(calls) if c.path.startswith(commit.path))
        early = [c for c in calls if c is not commit]
        refused(renumbered(early[:first + 2] + [commit] + early[first + 2:]), run, "a commit comes first")
    deletion = next(c for c in calls if c.name.startswith("rename") and "/.del-" in c.to)
    gone = [c for c in calls if c is deletion or c.path.startswith(deletion.to)]
    rest, last = [c for c in calls if c not in gone], max(c.begin for c in commits if c.begin < deletion.begin)
    at = next(i for i, c in enumerate(rest) if c.begin == last)
    refused(renumbered(rest[:at] + gone + rest[at:]), run, "a deletion comes before the commit")
    refused(renumbered(rest[:at + 1] + gone + rest[at + 1:]), run, "a deletion comes before the commit is durable")
    for seed in range(50):
        shuffled = list(calls)
        random.Random(seed).shuffle(shuffled)
        refused(renumbered(shuffled), run, f"all calls are shuffled ({seed})")


def same_calls(calls, run, log):
    """fault_calls.c, by which other tests kill and fail calls, has seen all that strace sees (but for the C library's own)."""
    changes = ("mkdir", "pwrite64", "fallocate", "fsync", "renameat2", "rename", "unlinkat", "ftruncate", "sync_file_range")
    counted = [line.split(" ", 3) for line in log.read_text().splitlines()]
    seen = sorted(f"{name} {path}" for _, name, _, path in counted if name in changes and "checkpoint-" in path[len(run):])
    real = sorted(f"{c.name} {c.path}" for c in calls if c.name in changes and "checkpoint-" in c.path[len(run):])
    check(seen == real, f"{len(seen)} calls are counted and {len(real)} are made: {set(seen) ^ set(real)}")


def main():
    if not shutil.which("strace"):
        print("skipped: strace is not installed")
        sys.exit(77)
    with Bench(*sys.argv[1:3]) as bench:
        for out, workers, flags in (("one", 1, ()), ("two", 2, ()), ("exported", 2, ("--checkpoint-export-model", "true"))):
            calls, run = record(bench, out, workers, *flags)
            check_order(calls, run)
            if out != "exported": # there some files are synced twice, so that one of the two is not missed
                self_test(calls, run)
        log = bench.folder / "one.calls"
        bench.remove("one")
        faults = ["env", f"LD_PRELOAD={bench.library}", f"ND_FAULT_FOLDER={bench.folder / 'one'}", "ND_FAULT_RANK=0", f"ND_FAULT_LOG={log}"]
        same_calls(*record(bench, "one", 1, prefix=faults), log)
    print("check_checkpoint_order: every commit and every deletion comes after what it needs, and wrong traces are refused")


if __name__ == "__main__":
    main()
