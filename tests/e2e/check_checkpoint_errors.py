#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Saves whose calls fail: check_checkpoint_errors.py BUILD_FOLDER LIBRARY [all].

One call of one worker fails with ENOSPC, EIO, EROFS or EDQUOT. The run says so once, with rank and reason, keeps its older
checkpoints as they are, removes what it began, goes on, and ends with 0 and the bytes of an undisturbed run; with
checkpoint.on_error: stop it ends with 73. A call that does not return ends it with 124. "all": each call of a save; else
some of each kind.
"""
import concurrent.futures
import errno
import os
import re
import sys

from checkpoint_runs import INTERVAL, MODEL, Bench, check, each

STEPS = 8  # saves of steps 2, 4, 6 and 8
ERRORS = ["ENOSPC", "EIO", "EROFS", "EDQUOT"]
SAID = re.compile(r"^(.*)the checkpoint of step (\d+) is not saved: (.*)$", re.M)


def numbered(calls):
    """[(name, number among the calls of this name, path, saved step)]: those of saves, with what a save does behind its rename."""
    counts, step, found = {}, 0, []
    for name, path in calls:
        counts[name] = counts.get(name, 0) + 1
        temporary = re.match(r"\.tmp-checkpoint-(\d+)-", path)
        step = int(temporary[1]) if temporary else step
        if step:
            found.append((name, counts[name], path, step))
    return found


def must_fail(calls, index):
    """Whether the save cannot be good without this call: all before its rename is durable, and the rename."""
    name, _, path, _ = calls[index]
    if path.startswith(".tmp-checkpoint-"):
        return name not in ("close", "mkdir") # a folder that is there already may not be made again
    commit = [i for i in range(index) if calls[i][0] == "renameat2" and calls[i][2].startswith(".tmp-checkpoint-")]
    return path == "" and name in ("openat", "fsync") and bool(commit) and index - commit[-1] <= 2


def sample(calls, everything):
    """Of the save of step 4 and of the last: each kind of call on each kind of file."""
    seen, chosen = set(), []
    for index, (name, _, path, step) in enumerate(calls):
        kind = (name, re.sub(r"\d+(-nd-\w+)?", "", path) or must_fail(calls, index), step)
        if step in (4, STEPS) and (everything or kind not in seen) and (name != "pwrite64" or index % 7 == 0 or kind not in seen):
            seen.add(kind)
            chosen.append(index)
    return chosen


def check_said(printed, rank, step, code):
    said = SAID.findall(printed)
    check(len(said) == 1, f"the failure is said {len(said)} times:\n{printed}")
    prefix, number, why = said[0]
    check(int(number) == step and os.strerror(code) in why, f"wrong words: {said[0]}")
    check("error" in prefix and (rank == 0 or f":{rank}" in prefix), f"no rank {rank} in: {prefix}")


def expected_names(step):
    """The newest two of the steps that are saved when this one is not."""
    saved = [s for s in range(INTERVAL, STEPS + 1, INTERVAL) if s != step]
    return [f"checkpoint-{s}" for s in saved[-2:]]


def fail_call(bench, rank, calls, index, *flags):
    name, number, path, step = calls[index]
    code = getattr(errno, ERRORS[index % len(ERRORS)])
    out = f"failed-{rank}-{index}"
    log = bench.folder / f"{out}.calls"
    printed = bench.train(2, out, *flags, steps=STEPS, faults=dict(rank=rank, fail=f"{name}:{code}:{number}:1", log=log))
    failed = bool(SAID.search(printed))
    check(failed or not must_fail(calls, index), f"nothing is said:\n{printed}")
    bench.same_result(out)
    told = [event["step"] for event in bench.metrics(out) if event.get("event") == "checkpoint_failed"]
    check(told == ([step] if failed else []), f"metrics.jsonl has failed saves {told}")
    older = f"the state of the last step has no checkpoint; the newest one is that of step {STEPS - INTERVAL}\n"
    check((older in printed) == (failed and step == STEPS), f"not the last save:\n{printed}")
    names = bench.names(out)
    if failed:
        check_said(printed, rank, step, code)
        check(names == expected_names(step), f"left are {names}")
    else: # an older checkpoint could not be deleted, or a call does not matter
        check([n for n in names if not n.startswith(".")][-1] == f"checkpoint-{STEPS}", f"left are {names}")
    for left in names:
        if (bench.folder / "whole" / left).exists():
            check(bench.state(out, left) == bench.state("whole", left), f"{left} holds another state")
    if failed and name in ("fsync", "close") and path.startswith(".tmp-"):
        again = [line for line in log.read_text().splitlines()
                 if re.search(rf" (fsync 0 .*/{re.escape(os.path.basename(path))}|renameat2 0 .*/\.tmp.*)$", line)
                 and f".tmp-checkpoint-{step}-" in line]
        before = [call for call in calls[:index] if call[0] == "fsync" and call[3] == step
                  and os.path.basename(call[2]) == os.path.basename(path)]
        check(len(again) <= len(before), f"a failed fsync is tried again: {again}")
    bench.remove(out)
    return failed


def matrix(bench, everything):
    for rank in range(2):
        calls = numbered(bench.calls(2, rank, "whole", steps=STEPS))
        chosen, failed = sample(calls, everything), []

        def work(index):
            try:
                failed.append(fail_call(bench, rank, calls, index))
            except AssertionError as error:
                raise AssertionError(f"rank {rank}, {ERRORS[index % len(ERRORS)]} of {calls[index]}: {error}") from None
        each(chosen, work)
        check(sum(failed) > len(failed) / 2, f"only {sum(failed)} of {len(failed)} saves failed")
        print(f"rank {rank}: of {len(chosen)} calls that failed, {sum(failed)} cost the checkpoint and none the run")
        if rank == 0:
            bench.remove("whole")


def export(bench, everything):
    """checkpoint.export_model: what is written beside state/, and what is read for it, fails."""
    flags = ("--checkpoint-export-model", "true")
    calls = numbered(bench.calls(2, 0, "exported", *flags, steps=STEPS))
    known = {(c[0], re.sub(r"\d+(-nd-\w+)?", "", c[2])) for c in numbered(bench.calls(2, 0, "plain", steps=STEPS))}
    own = [i for i in sample(calls, everything) if (calls[i][0], re.sub(r"\d+(-nd-\w+)?", "", calls[i][2])) not in known]
    chosen = own if everything else [i for i in own if calls[i][3] == STEPS // 2][::3]
    check(len(chosen) > 8, f"only {[calls[i] for i in chosen]}")
    failed = []
    each(chosen, lambda index: failed.append(fail_call(bench, 0, calls, index, *flags)))
    check(sum(failed) > len(failed) / 2, f"only {sum(failed)} of {len(failed)} saves failed")
    print(f"export: of {len(chosen)} calls that failed, {sum(failed)} cost the checkpoint and none the run")
    bench.remove("exported")
    bench.remove("plain")


def stop(bench):
    """checkpoint.on_error: stop."""
    for rank, call, number in ((0, "fsync", 9), (1, "fallocate", 2), (1, "pwrite64", 40), (0, "renameat2", 2)):
        out = f"stopped-{rank}-{call}"
        printed = bench.train(2, out, "--checkpoint-on-error", "stop", steps=STEPS, code=73,
                              faults=dict(rank=rank, fail=f"{call}:{errno.EIO}:{number}:1"))
        check("is not saved" in printed and os.strerror(errno.EIO) in printed, f"{out} does not say why:\n{printed}")
        names = bench.names(out)
        check(names and all(n.startswith("checkpoint-") for n in names), f"{out} left {names}")
        bench.train(2, out, "--resume-from-checkpoint", "latest", steps=STEPS)
        bench.same_result(out)


def keep_names(bench):
    """A save takes the place of an older checkpoint of the same step, and fails in the middle."""
    for call in ("renameat2", "fsync"):
        bench.train(2, "again", steps=STEPS)
        calls = bench.calls(2, 0, "again", "--resume-from-checkpoint", "6", steps=STEPS)
        shown = [path for name, path in calls if name == "renameat2"]
        check(shown[:1] == ["checkpoint-8"] and shown[1].startswith(".tmp-checkpoint-8"), f"{shown}")
        check(bench.names("again") == ["checkpoint-6", "checkpoint-8", "checkpoint-8.old"], f"{bench.names('again')}")
        bench.remove("again")
        bench.train(2, "again", steps=STEPS)
        kept = bench.whole_files("again", "checkpoint-8") # set aside when the run goes on from step 6
        syncs = [i for i, (name, path) in enumerate([c for c in calls if c[0] == call]) if path == ""]
        number = 2 if call == "renameat2" else syncs[-1] + 1
        printed = bench.train(2, "again", "--resume-from-checkpoint", "6", steps=STEPS,
                              faults=dict(rank=0, fail=f"{call}:{errno.EIO}:{number}:1"))
        check(len(SAID.findall(printed)) == 1, f"{call} did not fail:\n{printed}")
        check(bench.names("again") == ["checkpoint-6", "checkpoint-8.old"], f"{call}: {bench.names('again')}")
        check(bench.whole_files("again", "checkpoint-8.old") == kept, f"{call}: the older checkpoint is another")
        bench.remove("again")


def limits(bench):
    """ulimit -f below the size of a shard: every save fails, on both ranks, and the run does not."""
    bench.model("large.json", hidden_size=256, intermediate_size=512, num_hidden_layers=3)
    # Shared memory between two workers needs files of 8 MiB.
    for workers, kilobytes, model in ((1, 64, "model.json"), (2, 8192, "large.json")):
        printed = bench.train(workers, "limited", "--save-model", "false", "--model-config", model, steps=4,
                              prefix=["bash", "-c", f'ulimit -f {kilobytes}; exec "$@"', "bash"])
        said = SAID.findall(printed)
        check({int(step) for _, step, _ in said} == {2, 4}, f"wrong steps: {said}\n{printed}")
        check(all("File too large" in why for _, _, why in said), f"{said}")
        check(len({(prefix, step) for prefix, step, _ in said}) == len(said), f"said twice: {said}")
        check(bench.names("limited") == [], f"left are {bench.names('limited')}")
        check("no step since this start has a checkpoint" in printed and "the newest one is" not in printed, printed)
        bench.remove("limited")
    # A file system without fallocate.
    for rank in range(2):
        bench.train(2, "no-fallocate", steps=STEPS, faults=dict(rank=rank, fail=f"fallocate:{errno.EOPNOTSUPP}:1:1000"))
        check(bench.names("no-fallocate") == bench.names("whole"), f"{bench.names('no-fallocate')}")
        for name in bench.names("whole"):
            check(bench.state("no-fallocate", name) == bench.state("whole", name), f"without fallocate {name} is another")
        bench.remove("no-fallocate")
    # It neither reserves nor takes another size.
    printed = bench.train(2, "full", steps=4, faults=dict(rank=1, fail=f"fallocate:{errno.ENOSPC}:1:1000"))
    check(len(SAID.findall(printed)) == 2 and bench.names("full") == [], f"{bench.names('full')}:\n{printed}")


def silent(bench):
    """A call that does not return ends the run at its deadline; calls that are slow, one after the other, do not."""
    deadline = ("--comm-timeout-seconds", "4", "--save-model", "false")

    def hang(job):
        rank, call, number = job
        out = f"hung-{rank}-{call}"
        printed = bench.train(2, out, *deadline, steps=STEPS, code=124, faults=dict(rank=rank, slow=f"{call}:600000:{number}:1"))
        check(len(re.findall("has made no progress for 4 s .launch.comm_timeout_seconds.; the file system of .* does not answer",
                             printed)) == 1, f"{out} does not say once why it ended:\n{printed}")
        bench.train(2, out, "--resume-from-checkpoint", "auto", steps=STEPS)
        bench.same_result(out)

    def slow(_):
        printed = bench.train(2, "slow", *deadline, steps=2, faults=dict(rank=0, slow="fsync:700:1:1000"))
        check(bench.names("slow") == ["checkpoint-2"], f"left are {bench.names('slow')}:\n{printed}")
        [saved] = [event for event in bench.metrics("slow") if event.get("event") == "checkpoint"]
        check(saved["save_ms"] > 4000, f"the save took only {saved['save_ms']} ms")

    with concurrent.futures.ThreadPoolExecutor(4) as pool: # they sleep
        jobs = [pool.submit(hang, job) for job in ((0, "fsync", 12), (1, "fsync", 2), (0, "renameat2", 2))] + [pool.submit(slow, None)]
        for done in jobs:
            done.result()


def main():
    with Bench(*sys.argv[1:3]) as bench:
        matrix(bench, sys.argv[3:] == ["all"])
        export(bench, sys.argv[3:] == ["all"])
        stop(bench)
        keep_names(bench)
        limits(bench)
        silent(bench)
    print("check_checkpoint_errors: a save that fails costs its checkpoint and nothing else")


if __name__ == "__main__":
    main()
