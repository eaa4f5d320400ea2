#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--dump-tensors as a user has it: check_dumps.py BUILD. What a dump holds is computed again here from its weights and inputs; a dump
changes no bit of a run; every mesh's dump has the values of one worker's; a planted difference is found; wrong names, a full disk
and earlier dumps."""
import concurrent.futures
import hashlib
import json
import math
import os
import pathlib
import resource
import shutil
import struct
import subprocess
import sys
import tempfile

from steps import check

MODEL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
         "rms_norm_eps": 1e-5, "initializer_range": 0.3, "tie_word_embeddings": False, "rope_theta": 10000.0, "hidden_act": "silu"}
OLMO = {**MODEL, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "vocab_size": 256}
EPSILON = 2.0 ** -24  # of F32, rounded
SAMPLES = 8
# The parts of a mesh: name, workers, flags.
MESHES = [("tp", 2, ["--tp-size", "2"]),
          ("fsdp", 2, ["--dp-shard-size", "2"]),
          ("hsdp_cp", 4, ["--dp-replicate-size", "2", "--cp-size", "2"]),
          ("fsdp_tp_cp", 8, ["--dp-shard-size", "2", "--tp-size", "2", "--cp-size", "2", "--recompute", "full"]),
          ("copies", 4, ["--tp-size", "4", "--tiled-mlp", "2"])]


def run(build, folder, name, flags, workers=1, dump=("*", "1-2"), expected=0, model="m.json", limit=None):
    samples = SAMPLES // 2 // math.prod(int(flags[i + 1]) for i, f in enumerate(flags) if f in ("--dp-shard-size", "--dp-replicate-size"))
    command = [build / "ndlaunch", "--device", "cpu", "--num-processes", str(workers), "--model-config", model, "--data-path", "t.bin",
               "--data-format", "llmc", "--tokenizer", "file", "--sequence-length", "16", "--micro-batch-size", str(samples),
               "--gradient-accumulation-steps", "2", "--num-steps", "3", "--save-dir", name, "--save-dtype", "fp32",
               "--documents", "separate", "--set", "data.end_of_text=255"]
    command += ["--dump-tensors", dump[0], "--dump-steps", dump[1]] if dump else []
    done = subprocess.run([*command, *flags], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=240, preexec_fn=limit)
    check(done.returncode == expected, f"{name} {flags} ended with {done.returncode}, not {expected}:\n{done.stdout}")
    return done.stdout


def read(path):
    """The tensors of a file, and their places: {name: (rows, values, note)}; values are lists of rows, or of elements."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8:8 + size])
    notes = head.pop("__metadata__")
    tensors = {}
    for name, t in head.items():
        begin, end = (8 + size + at for at in t["data_offsets"])
        check(t["dtype"] == "F32", f"{name} has the type {t['dtype']}")
        values = list(struct.unpack(f"<{(end - begin) // 4}f", data[begin:end]))
        width = t["shape"][1] if len(t["shape"]) > 1 else 1
        tensors[name] = [values[i:i + width] for i in range(0, len(values), width)], json.loads(notes[name])
    return tensors


def times(a, b, size=None):
    """a b^T, and what it may be off by: the length of its sums times their epsilon, of the sums of absolute values."""
    return [[(math.fsum(x * y for x, y in zip(p, q)), len(p) * EPSILON * math.fsum(abs(x * y) for x, y in zip(p, q))) for q in b] for p in a]


def turned(a):
    return [list(column) for column in zip(*a)]


def close(what, got, expected):
    check(len(got) == len(expected) and len(got[0]) == len(expected[0]), f"{what} is {len(got)} x {len(got[0])}")
    for g, e in zip(got, expected):
        for x, (y, bound) in zip(g, e):
            check(abs(x - y) <= bound + 2 * EPSILON * abs(y), f"{what} has {x} in place of {y}, which differs by more than {bound}")


def check_values(tensors):
    """Products and norms of both layers, from what the file says they read."""
    def of(name, micro=0):
        return tensors[f"micro-{micro}/{name}"][0]

    for layer in (0, 1):
        at = f"model.layers.{layer}."
        above = "model.norm.input" if layer == 1 else "model.layers.1.input"
        for norm, before in (("input_layernorm", "input"), ("post_attention_layernorm", "post_attention_layernorm.input")):
            weight = [w[0] for w in tensors[f"{at}{norm}.weight"][0]]
            rows = []
            for x in of(at + before):
                scale = 1 / math.sqrt(math.fsum(v * v for v in x) / len(x) + MODEL["rms_norm_eps"])
                rows.append([(v * scale * w, 40 * EPSILON * abs(v * scale * w)) for v, w in zip(x, weight)])
            close(f"{at}{norm}.output", of(f"{at}{norm}.output"), rows)
        for linear, x, y in (("self_attn.q_proj", "input_layernorm.output", "self_attn.q_proj.output"),
                             ("self_attn.k_proj", "input_layernorm.output", "self_attn.k_proj.output"),
                             ("self_attn.v_proj", "input_layernorm.output", "self_attn.v_proj.output"),
                             ("self_attn.o_proj", "self_attn.o_proj.input", "self_attn.o_proj.output"),
                             ("mlp.gate_proj", "post_attention_layernorm.output", "mlp.gate_proj.output"),
                             ("mlp.up_proj", "post_attention_layernorm.output", "mlp.up_proj.output"),
                             ("mlp.down_proj", "mlp.down_proj.input", "mlp.down_proj.output")):
            weight = tensors[f"{at}{linear}.weight"][0]
            close(at + y, of(at + y), times(of(at + x), weight))
            dy = {"o_proj": "post_attention_layernorm.input.grad", "down_proj": None}.get(linear.split(".")[1], y + ".grad")
            dy = [of(at + dy, m) if dy else of(above + ".grad", m) for m in (0, 1)]
            close(f"{at}{linear}.weight.grad", tensors[f"{at}{linear}.weight.grad"][0],
                  times(turned(dy[0] + dy[1]), turned(of(at + x, 0) + of(at + x, 1))))
            if linear in ("self_attn.o_proj", "mlp.down_proj"):
                close(f"{at}{x}.grad", of(f"{at}{x}.grad"), times(dy[0], turned(weight)))
        for x, gate, up in zip(of(at + "mlp.down_proj.input"), of(at + "mlp.gate_proj.output"), of(at + "mlp.up_proj.output")):
            for v, g, u in zip(x, gate, up):
                y = g / (1 + math.exp(-g)) * u
                check(abs(v - y) <= 16 * EPSILON * abs(y) + 1e-30, f"SwiGLU of {g} and {u} is {v}, not {y}")
        for q in ("query", "key"):  # a rotation keeps the lengths of heads, and the first token as it is
            before, after = of(f"{at}self_attn.{q[0]}_proj.output"), of(f"{at}self_attn.{q}_states")
            check(before[0] == after[0] and before != after, f"{q} of the first token is turned, or none is")
            for x, y in ((x[i:i + 8], y[i:i + 8]) for x, y in zip(before, after) for i in range(0, len(x), 8)):
                lengths = [math.fsum(v * v for v in head) for head in (x, y)]
                check(abs(lengths[1] - lengths[0]) <= 32 * EPSILON * lengths[0], f"a head of {q} of the length {lengths[0]} has {lengths[1]}")
        sums = [[(a + b, 0) for a, b in zip(x, y)] for x, y in
                zip(of(at + "post_attention_layernorm.input"), of(at + "mlp.down_proj.output"))]
        close(above, of(above), sums)
    close("lm_head.output", of("lm_head.output"), times(of("model.norm.output"), tensors["lm_head.weight"][0]))


def fingerprint(folder):
    """What a run computed: losses, norms, and the weights that it saved."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [(r["loss"], r["grad_norm"]) for r in records if "grad_norm" in r]
    check(len(steps) == 3, f"{folder} has the steps {steps}")
    return steps, hashlib.sha256((folder / "model/model.safetensors").read_bytes()).hexdigest()


def check_same(build, folder):
    """No bit of a run changes, in any recipe that fuses casts into the ops before them."""
    for name, flags in (("fp32", ["--precision", "fp32"]), ("bf16", ["--precision", "bf16", "--tp-size", "2"]),
                        ("tensor", ["--precision", "fp8", "--fp8-recipe", "tensorwise"]),
                        ("delayed", ["--precision", "fp8", "--fp8-recipe", "delayed", "--recompute", "selective"])):
        workers = 2 if "--tp-size" in flags else 1
        run(build, folder, name + "_dumped", flags, workers, ("*", "2"))
        run(build, folder, name, flags, workers, None)
        check(fingerprint(folder / name) == fingerprint(folder / (name + "_dumped")), f"{name}: a dump changed the run")
        check("\nequal: " in diff(build, folder, *2 * [f"{name}_dumped/dumps/step-2"])[1], f"{name}: a dump is not equal to itself")
        check(not (folder / name / "dumps").exists(), f"{name} has a dump that it did not ask for")
        check([p.name for p in (folder / f"{name}_dumped/dumps").iterdir()] == ["step-2"], f"{name}: other steps were dumped")


def diff(build, folder, a, b, *flags):
    done = subprocess.run([build / "ndtrain", "ckpt", "diff", a, b, *flags], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=120)
    return done.returncode, done.stdout


def check_meshes(build, folder):
    """Bounds: tests/parity/test_mesh.c. The gradient of a tensor's part is less sure than that of all of it by what cancels."""
    for model in ("m.json", "olmo.json"):
        flags = ["--precision", "fp32", "--optimizer", "sgd", "--max-grad-norm", "0"]
        run(build, folder, model + "_one", flags, model=model)
        for name, workers, mesh in MESHES:
            run(build, folder, f"{model}_{name}", flags + mesh, workers, model=model)
            for step in (1, 2):
                a, b = f"{model}_one/dumps/step-{step}", f"{model}_{name}/dumps/step-{step}"
                code, said = diff(build, folder, a, b, "--tolerance", "1e-5")
                missing = [line for line in said.splitlines() if "only in" in line]
                if name == "copies":  # K 2 on tp 4: gradients of copies are parts
                    check(missing and all(line.split(":")[0].endswith(("k_proj.output.grad", "v_proj.output.grad")) for line in missing) and
                          "elements differ" not in said, f"{a} and {b}:\n{said}")
                else:
                    check(code == 0 and "\nequal: " in said, f"{a} and {b}:\n{said}")
                check(step > 1 or diff(build, folder, a, b)[0] == 1, f"{name} has the same bits as one worker, so nothing was cut")


def plant(path, name):
    """Flips the lowest bit of the second element of a tensor."""
    data = bytearray(path.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    at = 8 + size + json.loads(data[8:8 + size])[name]["data_offsets"][0]
    data[at + 4] ^= 1
    path.write_bytes(bytes(data))


def check_planted(build, folder):
    """What is computed first is named, whatever its place in the file or its rank."""
    a, b = "m.json_tp/dumps/step-1", "planted/dumps/step-1"
    run(build, folder, "planted", ["--precision", "fp32", "--optimizer", "sgd", "--max-grad-norm", "0", "--tp-size", "2"], 2)
    check(diff(build, folder, a, b)[0] == 0, "two equal runs have different dumps")
    plant(folder / b / "rank-0.safetensors", "lm_head.weight.grad")
    plant(folder / b / "rank-1.safetensors", "micro-1/model.layers.1.mlp.up_proj.output.grad")
    plant(folder / b / "rank-0.safetensors", "micro-1/model.layers.1.input.grad")
    code, said = diff(build, folder, a, b)
    check(code == 1 and said.splitlines()[-1].endswith(" micro-1/model.layers.1.mlp.up_proj.output.grad") and said.count("1 of ") == 3,
          f"three planted differences:\n{said}")
    for rank in 0, 1:  # a part that one side lacks, the first or the last of a tensor, is a difference
        path = folder / b / f"rank-{rank}.safetensors"
        path.rename(folder / "away")
        code, said = diff(build, folder, a, b)
        check(code == 1 and "q_proj.weight: has another number of elements" in said and "lm_head.weight.grad: " in said,
              f"the part of rank {rank} is missing:\n{said}")
        (folder / "away").rename(path)
    (folder / b / "rank-0.safetensors").write_bytes((folder / b / "rank-0.safetensors").read_bytes()[:-1])
    code, said = diff(build, folder, a, b)
    check(code == 65 and "rank-0.safetensors" in said, f"a damaged file:\n{said}")
    for other in ("planted", "planted/dumps", "planted/model"):
        code, said = diff(build, folder, a, other)
        check(code == 65 and "dumps" in said, f"a dump and {other}: {code}\n{said}")


def check_notes(build, folder):
    """Where a tensor of rank 1 belongs: with as many elements outside of it, or in one of another shape than rank 0 says."""
    good, name = folder / "m.json_tp/dumps/step-1", "micro-0/model.layers.0.mlp.up_proj.output"
    data = (good / "rank-1.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    shutil.copytree(good, folder / "notes")
    cases = [("shape", [64, 65], "another shape"), ("shape", [65, 64], "another shape")]
    cases += [(key, value, "where " + name) for key, value in (
        ("rows", [[1, 65]]), ("rows", [[-1, 63]]), ("columns", [33, 65]), ("columns", [-1, 31]), ("elements", [1, 2049]),
        ("elements", [-1, 2047]), ("order", "1"))]
    for key, value, words in cases:
        head = json.loads(data[8:8 + size])
        head["__metadata__"][name] = json.dumps({**json.loads(head["__metadata__"][name]), key: value})
        head = json.dumps(head).encode()
        (folder / "notes/rank-1.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data[8 + size:])
        code, said = diff(build, folder, good, "notes")
        check(code == 65 and words in said, f"{key} is {value}: {code}\n{said}")


def check_large(build, folder):
    """A tensor of more than 8 MiB is copied in parts, and logits of many ids come in tiles: both are those of two workers, which have
    half of each."""
    (folder / "large.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 1, "intermediate_size": 70000, "vocab_size": 1537}))
    for name, workers in ("large_one", 1), ("large_tp", 2):
        run(build, folder, name, ["--precision", "fp32", "--tp-size", str(workers), "--set", "output.save_model=false"], workers,
            ("*.gate_proj.*, lm_head.output", "1"), model="large.json")
    code, said = diff(build, folder, "large_one/dumps/step-1", "large_tp/dumps/step-1", "--tolerance", "1e-5")
    check(code == 0 and "\nequal: " in said, f"large tensors:\n{said}")


def check_refused(build, folder):
    flags = ["--precision", "fp32"]
    for dump, words in ((("model.layers.1.mlp.gate_prj.weight", "1"), ["model.layers.1.mlp.gate_proj.weight", "N.mlp.down_proj.input"]),
                        (("*.weight, *.qkv_proj.output", "1"), ['"*.qkv_proj.output"', "lm_head.output"]),
                        (("model.layers.2.input", "1"), ["model.layers.0.input"]),
                        (("*", "4"), ["log.dump_steps", "train.steps"]), (("*", ""), ["log.dump_tensors", "log.dump_steps"])):
        said = run(build, folder, "refused", flags, 1, dump, 2)
        check(all(word in said for word in words), f"--dump-tensors {dump}:\n{said}")
        check(not (folder / "refused").exists(), "a refused run has left a folder")
    code, said = diff(build, folder, "olmo.json_one/dumps/step-1", "m.json_one/dumps/step-1")  # of 256 and of 257 ids
    check(code == 1 and all(f"{name}: has another number of elements" in said for name in ("lm_head.weight", "micro-0/lm_head.output")),
          f"dumps of models of other sizes:\n{said}")
    old = folder / "old/dumps/step-1/rank-0.safetensors"
    old.parent.mkdir(parents=True)
    old.write_text("of an earlier run")
    run(build, folder, "old", [*flags, "--dp-replicate-size", "2"], 2, ("lm_head.weight", "1"))  # of which rank 1 has nothing
    check(old.read_text() == "of an earlier run" and list(read(folder / "old/dumps-2/step-1/rank-0.safetensors")) == ["lm_head.weight"],
          "an earlier dump is not as it was, or there is no new one")
    check([path.name for path in (folder / "old/dumps-2/step-1").iterdir()] == ["rank-0.safetensors"], "rank 1 has written a file")
    for a, b, side in (("old/dumps-2", "m.json_one/dumps", "B"), ("m.json_one/dumps", "old/dumps-2", "A")):
        code, said = diff(build, folder, a + "/step-1", b + "/step-1")
        check(code == 1 and f"model.embed_tokens.weight: only in {side}" in said and "\nlm_head.weight:" not in said,
              f"a dump of one tensor and one of all:\n{said}")

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))

    said = run(build, folder, "full", flags + ["--set", "output.save_model=false"], 1, ("*", "1"), 73, limit=limit)
    check("dumps/step-1/rank-0.safetensors" in said, f"a file that cannot be written:\n{said}")
    check(not list((folder / "full/dumps/step-1").iterdir()), "a part of a dump was left")


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "m.json").write_text(json.dumps(MODEL))
        (folder / "olmo.json").write_text(json.dumps(OLMO))
        head = [20240520, 1, 6000] + [0] * 253
        (folder / "t.bin").write_bytes(struct.pack("<256i", *head) + struct.pack("<6000H", *(255 if i % 11 == 9 or i % 29 == 5 else i * i * 7 % 251 for i in range(6000))))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            same = pool.submit(check_same, build, folder)
            check_meshes(build, folder)
            same.result()
        check_values(read(folder / "m.json_one/dumps/step-2/rank-0.safetensors"))
        check_notes(build, folder)
        check_planted(build, folder)
        check_refused(build, folder)
        check_large(build, folder)
    print("dumps: all good")


if __name__ == "__main__":
    main()
