#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--dump-tensors as a user has it. What a dump holds is computed again here from its weights and inputs; a dump changes no bit of a run;
every mesh's dump has the values of one worker's; a planted difference is found; wrong names, a full disk and earlier dumps."""
import json
import math
import shutil
import struct

import steps
from steps import check, test

MODEL = dict(architectures=["LlamaForCausalLM"], vocab_size=257, hidden_size=32, intermediate_size=64, head_dim=8, max_position_embeddings=64,
             rms_norm_eps=1e-5, initializer_range=0.3, tie_word_embeddings=False, rope_theta=10000.0, hidden_act="silu")
EPSILON = 2.0 ** -24  # of F32, rounded
SAMPLES = 8
# The parts of a mesh: name, workers, flags.
MESHES = [("tp", 2, "--tp-size 2"), ("fsdp", 2, "--dp-shard-size 2"), ("hsdp_cp", 4, "--dp-replicate-size 2 --cp-size 2"),
          ("fsdp_tp_cp", 8, "--dp-shard-size 2 --tp-size 2 --cp-size 2 --recompute full"), ("copies", 4, "--tp-size 4 --tiled-mlp 2")]
FP32, SGD = "--precision fp32", "--precision fp32 --optimizer sgd --max-grad-norm 0"


def setup(t):
    t.model("m.json", **MODEL)
    t.model("olmo.json", **MODEL | dict(model_type="olmo2", architectures=["Olmo2ForCausalLM"], vocab_size=256))
    t.write("t.bin", struct.pack("<256i", 20240520, 1, 6000, *253 * [0]) +
            struct.pack("<6000H", *(255 if i % 11 == 9 or i % 29 == 5 else i * i * 7 % 251 for i in range(6000))))


def train(name, flags, workers=1, dump=("*", "1-2"), model="m.json"):
    words = flags.split()
    samples = SAMPLES // 2 // math.prod(int(words[i + 1]) for i, w in enumerate(words) if w in ("--dp-shard-size", "--dp-replicate-size"))
    dumped = f"--dump-tensors '{dump[0]}' --dump-steps '{dump[1]}'" if dump else ""
    return (f"ndlaunch --device cpu --num-processes {workers} --model-config {model} --data-path t.bin --data-format llmc --tokenizer file "
            f"--sequence-length 16 --micro-batch-size {samples} --gradient-accumulation-steps 2 --num-steps 3 --save-dir {name} "
            f"--save-dtype fp32 --documents separate --set data.end_of_text=255 {dumped} {flags}")


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


def diff(t, a, b, code, says=(), flags=""):
    t.run(f"ndtrain ckpt diff {a} {b} {flags}", code, says)


@test
def no_bit_of_a_run_changes(t):
    """In any recipe that fuses casts into the ops before them."""
    for name, workers, flags in (("fp32", 1, FP32), ("bf16", 2, "--precision bf16 --tp-size 2"),
                                 ("tensor", 1, "--precision fp8 --fp8-recipe tensorwise"),
                                 ("delayed", 1, "--precision fp8 --fp8-recipe delayed --recompute selective")):
        t.run(train(f"{name}_dumped", flags, workers, ("*", "2")))
        t.run(train(name, flags, workers, None))
        t.same_runs(name, f"{name}_dumped", 3)
        diff(t, *2 * [f"{name}_dumped/dumps/step-2"], 0, "\nequal: ")
        check(not t.has(f"{name}/dumps"), f"{name} has a dump that it did not ask for")
        check([path.name for path in t.folder.glob(f"{name}_dumped/dumps/*")] == ["step-2"], f"{name}: other steps were dumped")


def check_meshes(t):
    """Bounds: tests/parity/test_mesh.c. The gradient of a tensor's part is less sure than that of all of it by what cancels."""
    for model in "m.json", "olmo.json":
        t.run(train(f"{model}_one", SGD, model=model))
        for name, workers, mesh in MESHES:
            t.run(train(f"{model}_{name}", f"{SGD} {mesh}", workers, model=model))
            for step in 1, 2:
                sides = f"{model}_one/dumps/step-{step}", f"{model}_{name}/dumps/step-{step}"
                if step == 1:  # it has not the same bits as one worker, or nothing was cut
                    diff(t, *sides, 1)
                diff(t, *sides, 1 if name == "copies" else 0, () if name == "copies" else "\nequal: ", "--tolerance 1e-5")
                missing = [line.split(":")[0] for line in t.out.splitlines() if "only in" in line]
                if name == "copies":  # K 2 on tp 4: gradients of copies are parts
                    check(missing and all(line.endswith(("k_proj.output.grad", "v_proj.output.grad")) for line in missing), t.out)
                    t.says(never="elements differ")


def plant(path, name):
    """Flips the lowest bit of the second element of a tensor."""
    data = bytearray(path.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    at = 8 + size + json.loads(data[8:8 + size])[name]["data_offsets"][0]
    data[at + 4] ^= 1
    path.write_bytes(bytes(data))


def check_planted(t):
    """What is computed first is named, whatever its place in the file or its rank."""
    a, b = "m.json_tp/dumps/step-1", "planted/dumps/step-1"
    t.run(train("planted", f"{SGD} --tp-size 2", 2))
    diff(t, a, b, 0)
    plant(t.folder / b / "rank-0.safetensors", "lm_head.weight.grad")
    plant(t.folder / b / "rank-1.safetensors", "micro-1/model.layers.1.mlp.up_proj.output.grad")
    plant(t.folder / b / "rank-0.safetensors", "micro-1/model.layers.1.input.grad")
    diff(t, a, b, 1, " micro-1/model.layers.1.mlp.up_proj.output.grad\n")
    check(t.out.endswith(" micro-1/model.layers.1.mlp.up_proj.output.grad\n") and t.out.count("1 of ") == 3, t.out)
    for rank in 0, 1:  # a part that one side lacks, the first or the last of a tensor, is a difference
        path = t.folder / b / f"rank-{rank}.safetensors"
        path.rename(t.folder / "away")
        diff(t, a, b, 1, ("q_proj.weight: has another number of elements", "lm_head.weight.grad: "))
        (t.folder / "away").rename(path)
    path = t.folder / b / "rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    diff(t, a, b, 65, "rank-0.safetensors")
    for other in "planted", "planted/dumps", "planted/model":
        diff(t, a, other, 65, "dumps")


def check_notes(t):
    """Where a tensor of rank 1 belongs: with as many elements outside of it, or in one of another shape than rank 0 says."""
    good, name = "m.json_tp/dumps/step-1", "micro-0/model.layers.0.mlp.up_proj.output"
    data = (t.folder / good / "rank-1.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    shutil.copytree(t.folder / good, t.folder / "notes")
    cases = [("shape", [64, 65], "another shape"), ("shape", [65, 64], "another shape")]
    cases += [(key, value, "where " + name) for key, value in (
        ("rows", [[1, 65]]), ("rows", [[-1, 63]]), ("columns", [33, 65]), ("columns", [-1, 31]), ("elements", [1, 2049]),
        ("elements", [-1, 2047]), ("order", "1"))]
    for key, value, words in cases:
        head = json.loads(data[8:8 + size])
        head["__metadata__"][name] = json.dumps({**json.loads(head["__metadata__"][name]), key: value})
        head = json.dumps(head).encode()
        t.write("notes/rank-1.safetensors", struct.pack("<Q", len(head)) + head + data[8 + size:])
        diff(t, good, "notes", 65, words)


@test
def parts_of_large_tensors_are_those_of_two_workers(t):
    """A tensor of more than 8 MiB is copied in parts, and logits of many ids come in tiles; two workers have half of each."""
    t.model("large.json", **MODEL | dict(num_hidden_layers=1, intermediate_size=70000, vocab_size=1537))
    for name, workers in ("one", 1), ("tp", 2):
        t.run(train(name, f"{FP32} --tp-size {workers} --set output.save_model=false", workers, ("*.gate_proj.*, lm_head.output", "1"),
                    "large.json"))
    diff(t, "one/dumps/step-1", "tp/dumps/step-1", 0, "\nequal: ", "--tolerance 1e-5")


@test
def what_cannot_be_dumped_is_refused(t):
    for dump, words in ((("model.layers.1.mlp.gate_prj.weight", "1"), ("model.layers.1.mlp.gate_proj.weight", "N.mlp.down_proj.input")),
                        (("*.weight, *.qkv_proj.output", "1"), ('"*.qkv_proj.output"', "lm_head.output")),
                        (("model.layers.2.input", "1"), "model.layers.0.input"),
                        (("*", "4"), ("log.dump_steps", "train.steps")), (("*", ""), ("log.dump_tensors", "log.dump_steps"))):
        t.run(train("refused", FP32, dump=dump), 2, words)
        check(not t.has("refused"), "a refused run has left a folder")
    t.run(t.limited("-f 117", train("full", f"{FP32} --set output.save_model=false", dump=("*", "1"))), 73,
          "dumps/step-1/rank-0.safetensors")
    check(not t.has("full/dumps/step-1/*"), "a part of a dump was left")


def check_others(t):
    """Dumps of other models and of some tensors, and an earlier one."""
    diff(t, "olmo.json_one/dumps/step-1", "m.json_one/dumps/step-1", 1,  # of 256 and of 257 ids
         [f"{name}: has another number of elements" for name in ("lm_head.weight", "micro-0/lm_head.output")])
    t.write("old/dumps/step-1/rank-0.safetensors", "of an earlier run")
    t.run(train("old", f"{FP32} --dp-replicate-size 2", 2, ("lm_head.weight", "1")))  # of which rank 1 has nothing
    check(t.read("old/dumps/step-1/rank-0.safetensors") == "of an earlier run", "an earlier dump is not as it was")
    check([path.name for path in t.folder.glob("old/dumps-2/step-1/*")] == ["rank-0.safetensors"], "rank 1 has written a file")
    check(list(read(t.folder / "old/dumps-2/step-1/rank-0.safetensors")) == ["lm_head.weight"], "there is no new one")
    for a, b, side in ("old/dumps-2", "m.json_one/dumps", "B"), ("m.json_one/dumps", "old/dumps-2", "A"):
        diff(t, f"{a}/step-1", f"{b}/step-1", 1, f"model.embed_tokens.weight: only in {side}")
        t.says(never="\nlm_head.weight:")


@test
def dumps_hold_what_is_computed_on_any_mesh(t):
    check_meshes(t)
    check_values(read(t.folder / "m.json_one/dumps/step-2/rank-0.safetensors"))
    check_notes(t)
    check_planted(t)
    check_others(t)


steps.main("dumps", setup)
