# SPDX-License-Identifier: Apache-2.0
"""What a report says of one run, the table of speeds, and the speed of light that they are compared with."""
import json
import pathlib
import statistics

# Dense TFLOP/s in BF16 and FP8 by the data sheets, by what a GPU's name contains; the first that fits counts.
PEAKS = [("H100 PCIe", 756, 1513), ("H200", 989, 1979), ("GH200", 989, 1979), ("H100", 989, 1979), ("B200", 2250, 4500),
         ("A100", 312, None), ("L40S", 362, 733)]
MEANT_FOR = "H200"


def peaks(gpu):
    return next(((bf16 * 1e12, (fp8 or bf16) * 1e12) for name, bf16, fp8 in PEAKS if name in gpu), None)


def share_of_light(gpu, config, sequence, fp8, rate):
    """Tokens a second by those that products alone would allow at the peak of the type each uses: the blocks' linears in FP8
    where asked, the rest in BF16, attention causal. None where the GPU's peak is not known."""
    known = peaks(gpu)
    if known is None:
        return None
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, size = config["num_attention_heads"], config.get("head_dim") or hidden // config["num_attention_heads"]
    kv = config.get("num_key_value_heads", heads)
    linear = layers * (hidden * size * (2 * heads + 2 * kv) + 3 * hidden * config["intermediate_size"])
    attention = layers * 6 * heads * size * sequence  # half of 12
    head = 6 * hidden * config["vocab_size"]
    return rate * (6 * linear / known[1 if fp8 else 0] + (attention + head) / known[0])


def summary(name, run, gpu, asked=None):
    """One result. asked: the number of layers that was wanted, where fewer may have been run."""
    if not run.steps:
        raise ValueError(f"{run.folder} has no step")
    settings, steps = run.config, run.steps
    shape = json.loads(pathlib.Path(settings["model.config"]).read_text())
    rate, fp8 = run.median("tokens_per_second"), settings["train.precision"] == "fp8"
    out = {"run": name, "layers": shape["num_hidden_layers"], "precision": settings["train.precision"],
           "recompute": settings["parallel.recompute"], "steps": len(steps), "tokens_per_second": rate,
           "step_ms": run.median("step_ms"), "tflops_causal": run.median("tflops_per_worker_causal"),
           "tflops_accelerate": run.median("tflops_per_worker_accelerate"),
           "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"],
           "planned_gib": run.planned_bytes / 2**30, "used_gib": run.peak_bytes / 2**30}
    share = share_of_light(gpu, shape, int(settings["train.sequence_length"]), fp8, rate)
    if share is not None:
        out["speed_of_light"] = share
    if asked is not None and asked != shape["num_hidden_layers"]:
        out["note"] = f"{asked} layers do not fit this GPU"
    return out


def first(items, name, key):
    """(value, result) of a done item, or (None, why there is none)."""
    for item in items:
        if item["item"] == name:
            for result in item["results"] if item["state"] == "done" else []:
                if key in result:
                    return result[key], result
            return None, f"{name}: {item['state']}" + (f", {' '.join(item['said'])[:120]}" if item["said"] else "")
    return None, f"{name}: not run"


def row(what, value, unit, least, goal, remark, stands_for):
    out = {"run": what, "measured": "-" if value is None else f"{value:,.0f}{unit}" if value >= 100 and not unit else f"{value:.3g}{unit}",
           "at least": f"{least:,}{unit}", "goal": f"{goal:,}{unit}"}
    if value is None:
        out["verdict"] = "not measured"
    elif stands_for:
        out["verdict"] = stands_for
    else:
        out["verdict"] = "goal reached" if value >= goal else "reached" if value >= least else "below"
    out["remark"] = remark
    return out


VARIANTS = (("plain", ""), ("CUDA graphs", "-graphs"), ("autotune", "-autotune"))


def best(items, name):
    """(tokens/s, result, how it was run with those of the others) of the fastest of a run and of the same with an option, with as
    many layers as fitted; or (None, why there is none, "")."""
    found = []
    for how, suffix in VARIANTS:
        rate, result = first(items, name + suffix, "tokens_per_second")
        if rate is not None:
            found.append((result["layers"], rate, how, result))
    if not found:
        return None, first(items, name, "tokens_per_second")[1], ""
    layers, rate, how, result = max(found, key=lambda f: f[:2])
    others = [f"{f[2]} {f[1]:,.0f}" for f in found if f[2] != how and f[0] == layers]
    return rate, result, how + (f"; {', '.join(others)} tokens/s" if others else "")


def joined(*parts):
    return "; ".join(part for part in parts if part)


def light_of(items, name, gpu):
    """(share of the speed of light, remark, whether layers are fewer) of the fastest of a run's kinds."""
    rate, result, how = best(items, name)
    if rate is None:
        return None, result, False
    if "speed_of_light" not in result:
        return None, f"the data sheet of {gpu or 'this GPU'} is not in scripts/gpu/speeds.py", False
    return result["speed_of_light"], joined(f"{rate:,.0f} tokens/s, {how}", result.get("note")), "note" in result


def against_torch(items, names, torch):
    """The fastest run of the first of `names` with as many layers as PyTorch had."""
    theirs, other = first(items, torch, "tokens_per_second")
    if theirs is None:
        return None, other
    for name in names:
        ours, mine, run_how = best(items, name)
        if ours is not None and mine["layers"] == other["layers"]:
            break
    else:
        return None, mine if ours is None else f"{mine['layers']} layers here, {other['layers']} there"
    slower = other.get("tokens_per_second_compiled")
    why = other.get("compiled_failed", f"which has {slower:,.0f}" if slower else "")
    how = f"torch {other['torch']}, " + ("compiled" if other["compile"] else f"not compiled{why and f' ({why})'}")
    return ours / theirs, f"{other['layers']} layers: {ours:,.0f} and {theirs:,.0f} tokens/s ({how}); {run_how}"


def shares(items, name, pick):
    for item in items:
        if item["item"] == name and item["state"] == "done":
            found = [pair for result in item["results"] for pair in pick(result)]
            if found:
                worst = min(found, key=lambda pair: pair[1])
                middle = statistics.median(share for _, share in found)
                return 100 * worst[1], f"the least of {len(found)}, {worst[0]}; the median is {100 * middle:.0f} %"
    return None, first(items, name, "")[1]


def table(items, dry):
    """One row for each figure to reach on one H200; items as report.py keeps them."""
    gpu = first(items, "machine", "gpu")[0] or ""
    stands_for = "dry run" if dry else "" if MEANT_FOR in gpu else f"for an {MEANT_FOR}"
    rows = []
    for precision, least, goal in (("bf16", 6500, 8000), ("fp8", 8500, 11000)):
        value, result, how = best(items, f"8b-all-{precision}")
        note = "" if value is None else result.get("note", "")
        rows.append(row(f"all 32 layers, F32 state, full recompute, {precision}, tokens/s", value, "", least, goal,
                        result if value is None else joined(how, note), stands_for or ("fewer layers" if note else "")))
    value, remark = against_torch(items, ("8b-half-bf16", "8b-torch-same"), "torch-same")
    rows.append(row("as many layers without recompute, bf16, beside PyTorch", value, " x", 1.2, 1.4, remark, stands_for))
    value, remark = against_torch(items, ("8b-torch-bf16",), "torch-most")
    rows.append(row("the most layers that PyTorch fits, bf16, beside PyTorch", value, " x", 1.2, 1.4, remark, stands_for))
    for precision, least, goal in (("bf16", 55, 62), ("fp8", 42, 50)):
        value, remark, fewer = light_of(items, f"8b-half-{precision}", gpu)
        rows.append(row(f"16 layers, no recompute, {precision}, share of the speed of light", None if value is None else 100 * value,
                        " %", least, goal, remark, stands_for or ("fewer layers" if fewer else "")))
    value, remark = shares(items, "products", lambda r: [(f"{r['product']} {r['type']}", r["share"])] if "product" in r else [])
    rows.append(row("products beside a plain loop of cuBLASLt", value, " %", 85, 95, remark, stands_for))
    value, remark = shares(items, "kernels", lambda r: [(k, v["share"]) for k, v in r.get("kernels", {}).items()])
    equal, other = shares(items, "kernels", lambda r: [(k, v["share_of_equal"]) for k, v in r.get("kernels", {}).items() if "share_of_equal" in v])
    if equal is not None:
        remark += f"; beside a copy of as many bytes {equal:.0f} %, {other}"
    rows.append(row("elementwise kernels beside a copy", value, " %", 80, 90, remark, stands_for))
    return rows
