#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`ndtrain report` as a reader sees it: check_report.py NDTRAIN [SCREENSHOTS].

Run folders are written here, with names, settings and reasons that try to become markup. Chromium opens the pages: curves must be
there, light and dark, the values under the pointer must be those of the file, nothing may be requested, and the console must stay
empty. Its controls are used as a person does, with the pointer and with the keys alone. Without Chromium this part is skipped; in CI
that is a failure, unless ND_CI_WITHOUT_BROWSER=1 says that this system cannot have one. A report of a million steps must stay
below 200 KB and show the spike of one step; its time, and that of Chromium to draw it, are printed and have wide bounds. A page of
as many runs as one takes, whose curves are all noise, must stay below 1 MB.
"""
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

import browser
from steps import check

EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\"'&"
EVIL_NAME = EVIL[:47]  # of a source: longer ones are cut
MANY = int(os.environ.get("ND_REPORT_STEPS", "1000000"))
MOST_RUNS = 32  # of a page
MANY_SECONDS = 15  # on a loaded machine with sanitizers; the goals are 0.3 s to draw the page, and 200 KB


def report(ndtrain, folder, *arguments, code=0):
    done = subprocess.run([ndtrain, "report", *arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=120)
    check(done.returncode == code, f"report {' '.join(arguments)} ended with {done.returncode}, not {code}:\n{done.stdout}")
    return done.stdout


def step_line(step, loss, more=""):
    return (f'{{"step":{step},"loss":{loss!r},"grad_norm":{1 + 1 / step!r},"lr":0.00029999999999999997,"tokens":2048,'
            f'"tokens_seen":{2048 * step},{more}"wire_bytes":3000,"wire":{{"weights":1000,"gradients":2000,"activations":0,'
            f'"keys_values":0,"other":0}},"step_ms":{20.125 + step % 7},"data_wait_ms":0.5,"tokens_per_second":102400,'
            '"tokens_per_second_per_worker":51200,"tflops_per_worker_causal":0.75,"tflops_per_worker_accelerate":0.8,'
            '"peak_memory_bytes":104857600}\n')


def write_rich_run(folder, steps):
    """Two workers, two sources, two validation sets, FP8 health every tenth step, resumed on another mesh."""
    folder.mkdir()
    lines = []
    for step in range(1, steps + 1):
        more = json.dumps({"source_loss": {"web": 3.0 + 1 / step, EVIL_NAME: 2.0 + 1 / step, "bytes": 2.5 if step == 1 else None},
                           "source_tokens": {"web": 1500, EVIL_NAME: 548}})[1:-1]
        lines.append(step_line(step, 2.5 + 1 / step, more + ",").replace(
            '"tokens_per_second"', f'"slowest_ms":{15.5 + step % 3},"fastest_ms":15.0,"slowest_rank":{step % 4 > 0:d},"tokens_per_second"'))
        if step % 10 == 0:
            worst = {"underflow": 0.01 * step / steps, "underflow_layer": 1, "saturation": 0.001, "saturation_layer": 0, "amax": 448.0,
                     "amax_layer": 1}
            lines.append(json.dumps({"step": step, "fp8_health": {kind: {"self_attn.q_proj": worst, "mlp.down_proj": worst}
                                                                  for kind in ("input", "weight", "gradient")}}) + "\n")
            lines.append(json.dumps({"step": step, "validation_loss": 2.6 if step == steps else 2.5, "validation_tokens": 64, "validation_set_loss": {
                "a": 2.0 + 1 / step, "b": 3.0}, "validation_set_tokens": {"a": 32, "b": 32}, "validation_ms": 4.5}) + "\n")
    lines.insert(steps // 2, json.dumps({"event": "resumed", "step": steps, "from": "/runs/x/checkpoint-9", "restart": 0, "load_ms": 12.5,
                                         "mesh": "2 x 1", "mesh_was": EVIL[:60]}) + "\n")
    lines.append(json.dumps({"event": "sample", "step": steps, "prompt": "Once", "text": EVIL}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    source = {"path": EVIL, "format": "encoded text", "tokens": 123456, "documents": 321, "blocks": 50, "samples": 100, "cache": EVIL}
    (folder / "run.json").write_text(json.dumps({
        "program": "ndtrain", "command": ["ndlaunch"], "mesh": {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1},
        "config": {"train.steps": steps, "train.precision": "fp8", "fp8.recipe": "tensorwise"}, "machine": {"cpus": "0"},
        "model": {"linears": 14, "fp8_linears": 13},
        "data": {"tokenizer": EVIL, "sources": [source | {"name": "web"}, source | {"name": EVIL_NAME}],
                 "validation": [{"name": "a", "path": "a.bin", "format": "llmc", "tokens": 64, "documents": None, "blocks": 2,
                                 "cache": None}]}}))
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-20").mkdir()
    (folder / "trace.json").write_text(json.dumps({"first_step": 3, "steps": steps - 2, "validation_ms": 50.0,
                                                   "gemm_ms": 10.0 * (steps - 2)}))
    return folder


def write_run(folder, steps, slope=1.0, wanted=None):
    folder.mkdir()
    lines = [step_line(step, 2 + 3 / (1 + slope * step)) for step in range(1, steps + 1)]
    for step in range(10, steps + 1, 10):
        lines[step - 1] += json.dumps({"step": step, "validation_loss": 2.1 + 3 / step, "validation_tokens": 4096,
                                       "validation_ms": 8.5}) + "\n"
    lines[steps // 2] += json.dumps({"event": "checkpoint_failed", "step": steps // 2 + 1, "why": EVIL + 40 * " long"}) + "\n"
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "run.json").write_text(json.dumps({
        "program": "ndtrain", "command": ["ndlaunch", EVIL], "config": {"train.steps": wanted or steps, "optimizer.lr": 0.5 * slope,
                                                                        "output.dir": EVIL, "train.seed": 42},
        "mesh": {"dp_shard": 2}, "job": {"hosts": [EVIL]}, "machine": {"device": "cpu"}, "libraries": {"oneDNN": "2.6.3"},
        "model": {"parameters": 1000, "planned_bytes": 99999999}, "memory_plan_bytes": {"weights": 400, EVIL: 100}}))
    (folder / "trace.json").write_text(json.dumps({
        "first_step": 3, "steps": steps - 2, "resident_bytes": 1000, "gemm_ms": 10.0 * (steps - 2), "gemm_calls": 100,
        "communication_ms": 2.0 * (steps - 2), "communication_calls": 10}))
    return folder


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S).group(1))


def check_text(page, runs):
    text = page.read_text()
    check(text.startswith("<!-- ndtrain report -->\n<!doctype html>"), f"{page} begins with {text[:60]!r}")
    check(len(text) < 1 << 20, f"{page} has {len(text)} bytes")
    check("http:" not in text and "https:" not in text, f"{page} names an address of the network")
    check("<img" not in text and text.count("<script>") == 1, f"{page} has markup from a run")
    check(all(len(run["curves"]) >= 6 for run in data_of(page)["runs"]), f"{page} lacks curves")
    for run in runs:
        check(run.name in text, f"{page} does not name {run.name}")


def check_rich(ndtrain, folder):
    run = write_rich_run(folder / "rich", 100)
    report(ndtrain, folder, "rich")
    check_text(run / "report.html", [run])
    return run / "report.html"


def check_table(page, head, *wanted):
    """The page has a table below this heading with these rows."""
    rows = page.evaluate(f"(h => {{ let e = h; while (!e.querySelector('table')) e = e.nextElementSibling; return [...e.querySelectorAll("
                         f"'tbody tr')].map(r => [...r.children].map(c => c.textContent)); }})"
                         f"([...document.querySelectorAll('h2')].find(h => h.textContent === '{head}'))")
    for row in wanted:
        check(list(row) in rows, f"the table {head} has the rows {rows}, without {row}")


def check_rich_in_browser(chrome, path):
    """A chart has the curves that it should have, each in a colour of its own, and the pointer shows all of them."""
    page = chrome.open(path)
    for chart, names in (("source-loss", ("web", EVIL_NAME, "bytes")), ("set-loss", ("a", "b")), ("ranks", ("Slowest", "Fastest")),
                         ("fp8-underflow", ("input", "weight", "gradient")), ("fp8-saturation", ("input", "weight", "gradient"))):
        keys = page.evaluate(f"[...document.querySelectorAll('#{chart} .key')].map(key => key.textContent)")
        check(tuple(keys) == names, f"the chart {chart} has the curves {keys}")
        x, y = page.evaluate(f"(() => {{ const s = document.querySelector('#{chart} svg'); s.scrollIntoView(); const b ="
                             "s.getBoundingClientRect(); return [b.left + b.width * 0.5, b.top + b.height * 0.5]; })()")
        page.move(x, y)
        tip = page.evaluate(f"(t => t.hidden ? '' : t.textContent)(document.querySelector('#{chart} .tip'))")
        check(all(f"\n{name}: " in tip for name in names), f"under the pointer of {chart} stands {tip!r}")
    check_table(page, "Figures", ("times that the run was resumed or went back", "1"), ("step of the best validation", "10"))
    check("The validation loss was lowest after step 10 (2.5), and is 2.6 now." in page.evaluate("document.body.textContent"),
          "a risen validation loss is not said")
    best = "[...document.querySelectorAll('tr')].filter(r => r.textContent.includes(', best validation')).map(r => r.firstChild.textContent)"
    check(page.evaluate(best) == ["checkpoint-10"], f"the best checkpoints are {page.evaluate(best)}")
    check_table(page, "Sample texts", ("100", "Once", EVIL))
    check_table(page, "Events", ("100", "resumed", "from /runs/x/checkpoint-9; restart 0; load ms 12.5; mesh 2 x 1; mesh was " + EVIL[:60]))
    # The trace covers steps 3 to 100: 14 times all seven remainders, 23.125 ms in the mean.
    check_table(page, "Where the time of rank 0 went", ("gemm", "10", "43.2 %"), ("everything else", "13.125", "56.8 %"))
    check_table(page, "Bytes on the wire, sent by rank 0", ("gradients", "1.9531 KiB", "66.7 %"))
    check_table(page, "Slowest rank", ("rank 1 (s1)", "75", "75.0 %", "1.5", "2.5"))
    check_table(page, "Data", ("web", "123.46 k", "321", "2", "150 k", "3.0105"))
    check_table(page, "All values", ("validation_set_loss.a", "2.1", "2.01", "2.01", "100", "2.1", "10", "2.0293", "0"),
                ("fp8_health.input.mlp.down_proj.underflow", "0.001", "0.01", "0.001", "10", "0.01", "100, layer 1", "0.0055", "0"), ("wire.weights", "1000 B", "1000 B", "1000 B", "1", "1000 B", "1", "1000 B", "0"),
                ("source_loss.bytes", "2.5", "2.5", "2.5", "1", "2.5", "1", "2.5", "99"))
    check_table(page, "Settings that differ from their defaults", ("train.precision", "fp8", "bf16"))
    check_table(page, "Settings and surroundings", ("config.fp8.recipe", "tensorwise"), ("mesh.dp_shard", "2"), ("data.tokenizer", EVIL))
    bars = page.evaluate("[...document.querySelectorAll('.share')].map(c => getComputedStyle(c).backgroundImage)")
    check(any("66.7%" in bar for bar in bars), f"the bars of shares are {bars}")
    folds = page.evaluate("[...document.querySelectorAll('details')].map(d => [d.open, d.querySelectorAll('tr').length > 0])")
    check([False, True] in folds, f"what is folded away is {folds}")
    check(not page.problems, f"{path} in the browser: {page.problems}")


CHART = "(() => { const s = document.querySelector('#%s svg'); s.scrollIntoView(); const b = s.getBoundingClientRect();" \
        "return [b.left, b.top, b.width, b.height]; })()"
LABELS = "[...document.querySelectorAll('#loss svg text[text-anchor=middle]')].map(t => t.textContent)"
POINTS = "document.querySelector('#loss .line').getAttribute('points')"


def tip_of(page, chart="loss"):
    return page.evaluate(f"(t => t.hidden ? '' : t.textContent)(document.querySelector('#{chart} .tip'))")


def choose(page, control, value):
    page.evaluate(f"(c => {{ c.value = '{value}'; c.dispatchEvent(new Event(c.type === 'range' ? 'input' : 'change')); }})"
                  f"(document.getElementById('{control}'))")


def check_controls(chrome, path):
    """One run of 100 steps of 2048 tokens: each control does what its name says, and shows the values of the file."""
    page = chrome.open(path)
    left, top, width, height = page.evaluate(CHART % "loss")
    at = lambda part: (left + width * (64 + part * 564) / 640, top + height / 2)
    check(left < 100, f"the first chart begins at {left} pixels")
    whole = page.evaluate(LABELS)
    check(whole == ["20", "40", "60", "80", "100"], f"the steps of the axis are {whole}")
    choose(page, "axis", "tokens")
    page.move(*at(1))
    check(tip_of(page).startswith("204.8 k tokens\n"), f"at the end of the tokens stands {tip_of(page)!r}")
    choose(page, "axis", "seconds")
    page.move(*at(1))
    seconds = sum(20.125 + step % 7 for step in range(1, 101)) / 1e3
    check(abs(float(tip_of(page).split()[0]) - seconds) < 1e-3, f"at the end of the time stands {tip_of(page)!r}, not {seconds}")
    choose(page, "axis", "step")
    linear = page.evaluate(POINTS)
    choose(page, "scale", "log")
    check(page.evaluate(POINTS) != linear and "logarithmic" in page.evaluate("document.querySelector('#loss figcaption').textContent"),
          "the scale is not logarithmic")
    choose(page, "scale", "linear")
    choose(page, "smoothing", "0.9")
    page.move(*at(0))
    page.move(*at(1))
    value, weight, smooth = 0.1, 0.0, 0.0
    for step in range(1, 101):
        smooth, weight = 0.9 * smooth + value * (2 + 3 / (1 + step)), 0.9 * weight + value
    said = float(re.search(r"Loss: .*smoothed ([0-9.]+)", tip_of(page)).group(1))
    check(abs(said - smooth / weight) < 1e-3, f"smoothed is {said}, not {smooth / weight}")
    choose(page, "smoothing", "0")
    page.drag(at(0.2), at(0.4))
    zoomed = [int(text) for text in page.evaluate(LABELS)]
    check(min(zoomed) > 20 and max(zoomed) < 42, f"the seen part has the steps {zoomed}")
    others = page.evaluate(LABELS.replace("#loss", "#lr"))
    check(others == page.evaluate(LABELS), f"another chart shows {others}")
    page.evaluate("document.getElementById('reset').click()")
    check(page.evaluate(LABELS) == whole, "all is not shown again")
    before = page.evaluate("document.querySelectorAll('#loss .line').length")
    page.evaluate("document.querySelectorAll('#loss .key')[1].click()")
    check(page.evaluate("document.querySelectorAll('#loss .line').length") == before - 1, "a curve is not hidden")
    check(page.evaluate("document.querySelectorAll('#loss .key')[1].getAttribute('aria-pressed')") == "false", "the button does not say so")
    page.evaluate("document.querySelectorAll('#loss .key')[1].click()")
    page.evaluate("document.querySelector('#loss svg').focus()")
    page.key("End")
    check(tip_of(page).startswith("step 100\n"), f"End shows {tip_of(page)!r}")
    page.key("ArrowLeft")
    said = page.evaluate("document.querySelector('[aria-live]').textContent")
    check(said.startswith("Loss, step 99, Loss: 2.03,") and tip_of(page).startswith("step 99\n"), f"a screen reader hears {said!r}")
    page.key("+")
    check(page.evaluate(LABELS) != whole, "+ does not zoom")
    for _ in range(60):  # as a key that is held down
        page.key("+")
    page.key("Escape")
    check(page.evaluate(LABELS) == whole, "Escape does not show all")
    for name in page.evaluate("[...document.querySelectorAll('.chart svg')].map(s => s.getAttribute('aria-label'))"):
        check(re.search(r" from .+ to .+, least .+, largest .+Arrow keys", name), f"a chart is called {name!r}")
    check(not page.problems, f"{path} in the browser: {page.problems}")


def check_odd(ndtrain, folder, chrome):
    """A run.json with values of other types costs the sections that need them, and a run without one is not compared."""
    odd, bare = write_run(folder / "odd", 20), write_run(folder / "bare", 20)
    record = json.loads((odd / "run.json").read_text())
    record["config"]["train.seed"] = 2 ** 60 + 1
    (odd / "run.json").write_text(json.dumps(record | {"data": {"sources": {"a": 1}}, "command": {"a": 1}}))
    (bare / "run.json").unlink()
    report(ndtrain, folder, "odd")
    report(ndtrain, folder, "one", "bare", "-o", "bare.html")
    page = chrome.open(odd / "report.html")
    check_table(page, "Settings and surroundings", ("config.train.seed", str(2 ** 60 + 1)), ("command.a", "1"))
    said = page.evaluate("[...document.querySelectorAll('main .bad')].map(p => p.textContent)")
    check(len(said) == 1 and "cannot be drawn" in said[0] and not page.problems, f"an odd run.json is answered by {said}, {page.problems}")
    page = chrome.open(folder / "bare.html")
    heads = page.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    check("Settings that differ between the runs" not in heads, "a run differs from one without run.json")


def check_runs_switch(chrome, path):
    """A run is switched off and on again in all charts."""
    page = chrome.open(path)
    lines = "[...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('.line.c1').length)"
    before = page.evaluate(lines)
    press = "[...document.querySelectorAll('.key')].find(k => k.textContent === 'two').click()"
    page.evaluate(press)
    check(sum(before) > 6 and sum(page.evaluate(lines)) == 0, f"the run has the curves {page.evaluate(lines)}")
    page.evaluate(press)
    check(page.evaluate(lines) == before, "the run does not come back")


def check_in_browser(chrome, path, curves, shots):
    """Each curve has ink of its own colour, and the pointer shows the values of the step below it."""
    page = chrome.open(path)
    for dark in (False, True):
        page.set_dark(dark)
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        check((sum(map(int, re.findall(r"\d+", paper)[:3])) < 384) == dark, f"the paper is {paper}, dark is {dark}")
        ink = page.evaluate("[...document.querySelectorAll('#loss .line')].map(line => getComputedStyle(line).stroke)")
        check(len(set(ink)) == len(ink) == curves and paper not in ink, f"the colours of the curves are {ink} on {paper}")
        if shots:
            page.screenshot(shots / f"{path.stem}-{'dark' if dark else 'light'}.png")
    boxes = page.evaluate("[...document.querySelectorAll('.chart svg')].map(s => { const b = s.getBoundingClientRect();"
                          "return [b.width, b.height, s.querySelectorAll('polyline, circle').length]; })")
    check(all(width > 200 and height > 80 and lines > 0 for width, height, lines in boxes), f"the charts are {boxes}")
    broken = page.evaluate("[...document.querySelectorAll('.events td:nth-child(2)')].filter(cell => { const range = document.createRange();"
                           "range.selectNodeContents(cell); return range.getClientRects().length > 1; }).map(cell => cell.textContent)")
    check(broken == [], f"these kinds of events stand on several lines: {broken}")
    x, y = page.evaluate("(() => { const s = document.querySelector('#loss svg'); s.scrollIntoView(); const b ="
                         "s.getBoundingClientRect(); return [b.left + b.width * 0.5, b.top + b.height * 0.5]; })()")
    page.move(x, y)
    tip = page.evaluate("(t => t.hidden ? '' : t.textContent)(document.querySelector('#loss .tip'))")
    check(re.match(r"step \d+\n", tip), f"under the pointer stands {tip!r}")
    theme = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(theme)
    page.evaluate("document.getElementById('theme').click()")
    check(page.evaluate(theme) != before, "the button does not change the colours")
    check(not page.problems, f"{path} in the browser: {page.problems}")
    return tip


def end_of_both():
    """The means of the last tenth of the losses of write_run, and their difference."""
    one, two = (sum(2 + 3 / (1 + slope * step) for step in range(steps * 9 // 10 + 1, steps + 1)) / (steps / 10)
                for steps, slope in ((100, 1.0), (80, 0.5)))
    return "loss at the end, mean of the last tenth", f"{one:.5g}", f"{two:.5g} ({(two / one - 1) * 100:+.2f} %)"


def check_pages(ndtrain, folder, shots):
    one, two = write_run(folder / "one", 100), write_run(folder / "two", 80, slope=0.5, wanted=100)
    os.utime(two / "metrics.jsonl", (1, 1))  # long ago: it does not run any more
    for _ in range(2):  # a report is replaced
        said = report(ndtrain, folder, "one")
    check(said == "one: finished: all 100 steps, 1 checkpoint not written\nreport: one/report.html\n", f"report says {said!r}")
    said = report(ndtrain, folder, "one", "two", "-o", "both.html")
    check("\ntwo: ended early, after step 80 of 100" in said, f"report says {said!r}")
    (folder / "other").mkdir()
    write_run(folder / "other/one", 20)
    said = report(ndtrain, folder, "one", "other/one", "-o", "names.html")
    check(said.startswith("one: ") and "\nother/one: finished: all 20" in said, f"two runs with one name are {said!r}")
    check_text(one / "report.html", [one])
    check_text(folder / "both.html", [one, two])
    check("finished: all 100 steps, 1 checkpoint not written" in (one / "report.html").read_text(), "no verdict")
    check("ended early, after step 80 of 100" in (folder / "both.html").read_text(), "no verdict of the second run")
    rich = check_rich(ndtrain, folder)
    if not browser.find():
        return False
    with browser.Browser(folder) as chrome:
        tip = check_in_browser(chrome, one / "report.html", 2, shots)
        step = int(re.match(r"step (\d+)", tip).group(1))
        loss = float(re.search(r"Loss: ([0-9.]+)", tip).group(1))
        check(abs(loss - (2 + 3 / (1 + step))) < 1e-3, f"the loss under the pointer is not that of the file: {tip!r}")
        check_in_browser(chrome, folder / "both.html", 2, shots)
        check_in_browser(chrome, rich, 2, shots)
        check_controls(chrome, one / "report.html")
        check_runs_switch(chrome, folder / "both.html")
        page = chrome.open(folder / "both.html")
        check_table(page, "Settings that differ between the runs", ("config.optimizer.lr", "0.5", "0.25"))
        check_table(page, "Figures; in brackets against the first run", end_of_both())
        check_rich_in_browser(chrome, rich)
        check_odd(ndtrain, folder, chrome)
    return True


def check_many(ndtrain, folder):
    run = folder / "many"
    run.mkdir()
    rest = step_line(1, 2.5).partition('"loss":2.5')[2]
    with open(run / "metrics.jsonl", "w") as out:
        for begin in range(1, MANY + 1, 1000):
            out.write("".join(f'{{"step":{s},"loss":{50.0 if s == MANY // 2 + 1 else 2.5}{rest}'
                              for s in range(begin, min(begin + 1000, MANY + 1))))
    begin = time.monotonic()
    report(ndtrain, folder, "many", "-o", "many.html")
    seconds = time.monotonic() - begin
    size = (folder / "many.html").stat().st_size
    highest = max(data_of(folder / "many.html")["runs"][0]["curves"]["loss"]["high"])
    check(highest == 50, f"the spike is gone: the highest value is {highest}")
    check(size < 200000 and seconds < MANY_SECONDS, f"a report of {MANY} steps has {size} bytes and took {seconds:.1f} s")
    drawn = ""
    if browser.find():
        with browser.Browser(folder) as chrome:
            page = chrome.open(folder / "many.html")
            ms = page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
            check(page.evaluate("document.querySelectorAll('.line').length") > 6 and ms < 1000 * MANY_SECONDS, f"drawn in {ms:.0f} ms")
            drawn = f", drawn in {ms / 1000:.2f} s"
    return f"{MANY} steps ({(run / 'metrics.jsonl').stat().st_size >> 20} MiB) in {seconds:.2f} s, {size >> 10} KiB{drawn}"


def write_noisy_run(folder, seed):
    """800 steps behind a million others, a validation after each 16, 100 checkpoints, and a run.json of 5 KB."""
    folder.mkdir()
    noise = random.Random(seed)
    lines = []
    for step in range(1000001, 1000801):
        spike = 50 if seed == 7 and step == 1000400 else 0
        line = json.loads(step_line(step, spike + 2.5 + noise.random()))
        for key in ("grad_norm", "step_ms", "data_wait_ms", "tokens_per_second", "wire_bytes", "peak_memory_bytes"):
            line[key] *= 1 + noise.random()
        line["lr"] *= noise.random() * 1e-3
        lines.append(json.dumps(line) + "\n")
        if step % 16 == 0:
            lines.append(json.dumps({"step": step, "validation_loss": 2.5 + noise.random(), "validation_tokens": 4096,
                                     "validation_ms": 8.5}) + "\n")
        if step % 8 == 0:
            lines.append(json.dumps({"event": "checkpoint", "step": step, "reason": "interval", "bytes": 123456789, "save_ms": 1234.5,
                                     "blocked_ms": 12.5}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    config = {f"group.setting_number_{i}": f"value {i}" for i in range(100)}
    (folder / "run.json").write_text(json.dumps({"config": config | {"train.steps": 1000800, "train.seed": seed}, "mesh": {"dp_shard": 8},
                                                 "machine": {f"part_{i}": EVIL for i in range(10)}}))


def check_most_runs(ndtrain, folder):
    names = [f"noisy-{i}" for i in range(MOST_RUNS)]
    for i, name in enumerate(names):
        write_noisy_run(folder / name, i)
    said = report(ndtrain, folder, *names, "many", "-o", "most.html", code=2)
    check(str(MOST_RUNS) in said, f"{MOST_RUNS} runs are not the most of a page: {said!r}")
    report(ndtrain, folder, *names, "-o", "most.html")
    check_text(folder / "most.html", [folder / name for name in names])
    curves = [run["curves"] for run in data_of(folder / "most.html")["runs"]]
    check(len(curves) == MOST_RUNS and all(len(curve["step"]) >= 20 for run in curves for curve in run.values()),
          "a curve has fewer than 20 intervals")
    check([max(run["loss"]["high"]) > 50 for run in curves] == [i == 7 for i in range(MOST_RUNS)], "the spike of one run is gone")
    return f"{MOST_RUNS} noisy runs, {(folder / 'most.html').stat().st_size >> 10} KiB"


def check_bad_input(ndtrain, folder):
    (folder / "none").mkdir()
    (folder / "mine.html").write_text("<p>mine")
    bad = folder / "bad"
    bad.mkdir()
    (bad / "metrics.jsonl").write_text(step_line(1, 2.0) + "what\n" + step_line(2, 2.0))
    for arguments, code, words in (((), 2, "a run folder is missing"), (("one", "two"), 2, "-o FILE"), (("one", "--outptu", "x"), 2,
                                   "--output"), (("none",), 65, "no metrics.jsonl"), (("nowhere",), 65, "no folder"),
                                   (("bad",), 65, "line 2"), (("one", "-o", "mine.html"), 73, "no report of ndtrain"),
                                   (("one", "-o", "mine.md"), 2, "a page of HTML"), (("one", "-o", "-"), 2, "a page of HTML"),
                                   (("one", "-o", ""), 2, "a page of HTML"), (("one", "-o", "nowhere/x.html"), 73, "nowhere")):
        said = report(ndtrain, folder, *arguments, code=code)
        check(words in said, f"report {' '.join(arguments)} says {said!r}, without {words!r}")
    check((folder / "mine.html").read_text() == "<p>mine", "a file that is no report was replaced")
    (bad / "metrics.jsonl").write_text(step_line(1, 2.0) + step_line(2, 2.0)[:-9])  # half a line, without run.json
    check("bad: at step 1 " in report(ndtrain, folder, "bad"), "half a line counts")


def main():
    ndtrain = str(pathlib.Path(sys.argv[1]).resolve())
    shots = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    with tempfile.TemporaryDirectory(prefix="nd_report_") as name:
        folder = pathlib.Path(name)
        seen = check_pages(ndtrain, folder, shots)
        check_bad_input(ndtrain, folder)
        print("report:", check_many(ndtrain, folder))
        print("report:", check_most_runs(ndtrain, folder))
    if not seen:
        print("skipped: no page was opened, as there is no Chromium here; scripts/setup --tests installs it")
        return 1 if os.environ.get("CI") and os.environ.get("ND_CI_WITHOUT_BROWSER") != "1" else 0
    print("report: the pages are as they should be in Chromium")
    return 0


if __name__ == "__main__":
    sys.exit(main())
