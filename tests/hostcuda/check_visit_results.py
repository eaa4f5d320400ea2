#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu/visit results: check_visit_results.py SOURCE COMPILER. The page and the rates come from what a visit.json says, the
rates compile, and a dry run gives neither."""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

SOURCE, COMPILER = pathlib.Path(sys.argv[1]), sys.argv[2:]
sys.path[:0] = [str(SOURCE / "scripts" / "gpu"), str(SOURCE / "scripts"), str(SOURCE / "tests" / "e2e")]
import results
from check import WrongUse
from steps import check

SHOW = """#include <stdio.h>
#include "gpu_rates.h"
int main(void)
{
    for (int i = 0; i < ND_RATED_GPUS; i++) {
        const struct nd_gpu_rates *r = &nd_gpu_rates[i];
        printf("%s %.3g %.4g %.4g %.4g %.2f\\n", r->name, r->bytes_per_second, r->bf16_flops, r->fp8_flops, r->attention_flops, r->memory_share);
    }
    return puts(ND_RATES_FROM) < 0;
}
"""


def item(name, *found):
    return {"item": name, "state": "done", "exit_code": 0, "seconds": 3, "origin": "commit 12ab, an H200", "results": list(found), "said": [],
            "tail": [], "opened": {"ndtrain": ["/x/libcublasLt.so.13"]}}


def product(name, kind, us, tflops):
    return {"product": name, "type": kind, "us": us, "tflops": tflops, "share": 0.9}


def rates_of(folder):
    (folder / "show.c").write_text(SHOW)
    subprocess.run([*COMPILER, "-o", folder / "show", folder / "show.c"], check=True)
    *rows, source = subprocess.run([folder / "show"], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return {row.split()[0]: row.split()[1:] for row in rows}, source


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        before = results.RATES.read_text()
        results.PAGE, results.RATES = folder / "gpu_results.md", folder / "gpu_rates.h"
        results.RATES.write_text(before)
        first, _ = rates_of(folder)
        machine = item("machine", {"date": "2026-01-01T00:00Z", "gpu": "NVIDIA H200, 9.0, 143771 MiB, 580.95", "commit": "12ab"})
        smoke = folder / "smoke.json"
        smoke.write_text(json.dumps({"mode": "on a GPU", "speed": [], "items": [machine, item("probe", {
            "probe": "8b qkv dW", "type": "fp8 vectors", "heuristic": 0, "matmul": 7, "cuda": -1})]}))
        full = folder / "full.json"
        full.write_text(json.dumps({"mode": "on a GPU", "speed": [], "items": [
            machine, item("products", product("qkv", "bf16", 100.0, 600.0), product("o", "bf16", 300.0, 700.0), product("qkv", "f8_e4m3", 50.0, 1200.0),
                          {"attention": "forward", "ms": 1.0, "causal_tflops": 500.0}, {"attention": "backward", "ms": 3.0, "causal_tflops": 400.0}),
            item("kernels", {"kernels": {"a": {"gbps": 4000.0, "share": 0.9}, "b": {"gbps": 4320.0, "share": 0.9}, "c": {"gbps": 4500.0, "share": 0.9}}})]}))
        results.write([smoke, full])
        rates, source = rates_of(folder)
        check(rates["H200"] == ["4.8e+12", "6.75e+14", "1.2e+15", "4.25e+14", "0.90"], f"{rates}")
        check(rates["H100"] == first["H100"] and source == "those of NVIDIA H200 were measured (commit 12ab)", f"{rates}, {source}")
        page = results.PAGE.read_text()
        for words in ("# Results on a GPU", "NVIDIA H200", "| 8b qkv dW | fp8 vectors |", "| qkv | bf16 |", "| ndtrain | libcublasLt.so.13 |"):
            check(words in page, f"no \"{words}\" in {page}")
        again = results.RATES.read_text()
        results.write([smoke])  # nothing was measured there: the rates stay
        check(results.RATES.read_text() == again, "rates are kept where a visit measured none")
        for text, words in ((full.read_text().replace("on a GPU", "dry run on doubles"), "dry run"), ("{", "no visit.json")):
            wrong = folder / "wrong.json"
            wrong.write_text(text)
            try:
                results.write([wrong])
                sys.exit(f"check_visit_results: {words} is accepted")
            except WrongUse as error:
                check(words in str(error), f"{error}")
        check(results.PAGE.exists() and re.search("H200", results.PAGE.read_text()), "a refused file changes nothing")


if __name__ == "__main__":
    main()
