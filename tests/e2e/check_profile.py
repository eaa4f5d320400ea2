#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--profile-steps of a run of four workers: check_profile.py NDLAUNCH. All ranks are in one file, on one clock, each call lies within
its step, and members of a group name their collectives alike."""
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

MODEL = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
RANKS, SLACK_US = 4, 1.0  # times are rounded to nanoseconds


def check(holds, words):
    if not holds:
        sys.exit(f"check_profile: {words}")


def main():
    ndlaunch = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "model.json").write_text(json.dumps(MODEL))
        (folder / "text.txt").write_bytes(bytes(range(97, 123)) * 800)
        done = subprocess.run([ndlaunch, "--device", "cpu", "--num-processes", str(RANKS), "--dp-shard-size", "2", "--tp-size", "2",
                               "--sequence-length", "64", "--num-steps", "5", "--set", "model.config=model.json", "--set",
                               "data.path=text.txt", "--set", "output.dir=run", "--set", "output.save_model=false",
                               "--profile-steps", "3-4"], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=240)
        check(done.returncode == 0 and "profile of 4 ranks" in done.stdout, f"the run ended with {done.returncode}:\n{done.stdout}")
        events = json.loads((folder / "run" / "profile.json").read_text())["traceEvents"]
        check(not (folder / "run" / "profile").exists(), "parts are left")
    steps, calls, names = {}, collections.Counter(), collections.defaultdict(set)
    for event in events:
        if event.get("cat") == "step":
            steps[event["pid"], event["name"]] = (event["ts"], event["ts"] + event["dur"])
    check(sorted(steps) == [(r, f"step {s}") for r in range(RANKS) for s in (3, 4)], f"steps are {sorted(steps)}")
    for event in (e for e in events if e["ph"] == "X" and e["cat"] != "step"):
        inside = [begin - SLACK_US <= event["ts"] and event["ts"] + event["dur"] <= end + SLACK_US
                  for (rank, _), (begin, end) in steps.items() if rank == event["pid"]]
        check(sum(inside) == 1, f"{event} lies in {sum(inside)} steps")
        calls[event["pid"], event["cat"]] += 1
        args = event.get("args", {})
        if args.get("group") == "world":
            names[event["pid"]].add((args["op"], args["sequence"]))
    for rank in range(RANKS):
        check(calls[rank, "gemm"] > 0 and calls[rank, "communication"] > 0, f"rank {rank} has {calls}")
        check(names[rank] == names[0], f"collectives of the world are {names[rank]} on rank {rank}, and {names[0]} on rank 0")
    starts = [steps[rank, "step 3"][0] for rank in range(RANKS)]
    check(min(starts) >= 0, f"step 3 begins at {starts}")
    print(f"profile: {sum(calls.values())} calls of {RANKS} ranks in two steps")


if __name__ == "__main__":
    main()
