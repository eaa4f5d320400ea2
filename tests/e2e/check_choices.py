#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`ndtrain eval --requests` beside the real lm-evaluation-harness.

scripts/goldens/choices.py has made the goldens with it, in F32. Example by example, acc, acc_norm and the greedy marks must be the same, and
each log-likelihood must be within the bound of all roundings, and within as many deviations of independent roundings as none of
so many scores should pass. On one thread, on two, and by --serve-stdin.
"""
import array
import json
import shutil
import statistics
import struct

import steps
from steps import SOURCE, check, test

GOLDENS = SOURCE / "tests/parity/goldens/choices"
FALSE_ALARM = 1e-4  # how likely a right program fails by chance


def normal(seed, stream, i):
    """nd_rng_normal of runtime/base/rng.h."""
    c, k0, k1 = (i, 0, stream, 0), seed, 0
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = (p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    (scale,) = struct.unpack("f", struct.pack("f", 1 / struct.unpack("f", struct.pack("f", 53509.92))[0]))
    return array.array("f", [(sum((word & 0xFFFF) + (word >> 16) for word in c) - 4 * 65535) * scale])[0]


def setup(t):
    """The golden with its weights, which weights.json says how to draw."""
    shutil.copytree(GOLDENS, t.folder / "model")
    drawn, head, values = json.loads((GOLDENS / "weights.json").read_text()), {}, array.array("f")
    for name, tensor in drawn["tensors"].items():
        begin, count = 4 * len(values), tensor["shape"][0] * (tensor["shape"] + [1])[1]
        values.extend(tensor["mean"] + tensor["deviation"] * normal(drawn["seed"], tensor["stream"], i) for i in range(count))
        head[name] = {"dtype": "F32", "shape": tensor["shape"], "data_offsets": [begin, 4 * len(values)]}
    text = json.dumps(head).encode()
    t.write("model/model.safetensors", struct.pack("<Q", len(text)) + text + values.tobytes())


def evaluate(t, flags, given=None):
    t.run(f"ndtrain eval --model model --precision fp32 {flags}", given=given)
    return t.rows()


def compare(name, rows, goldens):
    """The most that a score takes of its bound."""
    check(len(rows) == len(goldens), f"{name} has {len(rows)} rows, lm_eval {len(goldens)}")
    scores = sum(len(golden["bounds"]) for golden in goldens)
    most = statistics.NormalDist().inv_cdf(1 - FALSE_ALARM / scores / 2)
    worst = spread = 0.0
    for i, (row, golden) in enumerate(zip(rows, goldens)):
        check(len(row["log_likelihoods"]) == len(golden["log_likelihoods"]), f"{name}, row {i} has {row}, lm_eval {golden}")
        for k, (own, their) in enumerate(zip(row["log_likelihoods"], golden["log_likelihoods"])):
            off, bound, deviation = abs(own - their), golden["bounds"][k], golden["deviations"][k]
            check(off <= bound and off <= most * deviation, f"{name}, row {i}, choice {k}: {own:.9g}, lm_eval has {their:.9g}, which is "
                  f"{off:.2g} off; all roundings bound that by {bound:.2g}, independent ones by {most * deviation:.2g}")
            worst, spread = max(worst, off / bound), max(spread, off / deviation)
        check(row["greedy"] == golden["is_greedy"], f"{name}, row {i}: greedy is {row['greedy']}, in lm_eval {golden['is_greedy']}")
        for key in ("acc", "acc_norm"):
            check(row.get(key) == golden[key], f"{name}, row {i}: {key} is {row.get(key)}, in lm_eval {golden[key]}")
    print(f"check_choices: {name}: {scores} scores are off by at most {worst:.2g} of their bounds and {spread:.2g} deviations")


@test
def scores_are_those_of_lm_eval(t):
    greedy, kinds = 0, set()
    for name, flags in ("plain", ""), ("special", "--add-special-tokens"):
        goldens = json.loads(t.read(f"model/{name}.json"))
        greedy += sum(sum(golden["is_greedy"]) for golden in goldens)
        kinds |= {(golden["acc"], golden["acc_norm"]) for golden in goldens}
        for threads in 1, 2:
            *rows, summary = evaluate(t, f"--requests model/{name}.jsonl --jsonl --threads-per-worker {threads} {flags}")
            compare(f"{name}, {threads} threads", rows, goldens)
            for key in ("acc", "acc_norm"):
                check(abs(summary[key] - sum(g[key] for g in goldens) / len(goldens)) < 1e-12, f"{name}: the summary is {summary}")
        compare(f"{name}, --serve-stdin", evaluate(t, f"--serve-stdin {flags}", t.read(f"model/{name}.jsonl")), goldens)
    check(greedy > 0 and len(kinds) == 4, f"the goldens lack a kind of row: {greedy} greedy choices, acc and acc_norm are {kinds}")


steps.main("choices", setup)
