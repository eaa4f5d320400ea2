#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model as a GGUF file, in the hands of others and back: check_gguf.py BUILD SOURCE.

Small models are trained and written with `ndtrain export --gguf`. The package gguf reads every tensor back; llama.cpp cuts texts into
the ids that the package tokenizers gives, and continues a text as `ndtrain generate` does. `ndtrain export` makes the model's folder
again, with the same values and ids, also of a file with a tokenizer of Llama 2's form, which the package gguf writes; a file trains as
its folder does, and blocks of each type stand for the values that the package says. Run through check_gguf.sh.
"""
import filecmp
import hashlib
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import traceback
import urllib.request

import gguf
import numpy
import tokenizers
import xllamacpp

BUILD, SOURCE = (pathlib.Path(path) for path in sys.argv[1:3])
NDTRAIN, GOLDENS = BUILD / "ndtrain", SOURCE / "tests/unit/trainer/text/goldens"
TYPES = {"fp32": gguf.GGMLQuantizationType.F32, "fp16": gguf.GGMLQuantizationType.F16, "bf16": gguf.GGMLQuantizationType.BF16,
         "q8_0": gguf.GGMLQuantizationType.Q8_0}
ENDING = '{% for m in messages %}<s>{{ m["content"] }}{% endfor %}'
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
# Hugging Face's names of the matrices and norms of a block.
BLOCK = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
         "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def check(holds, words):
    if not holds:
        sys.exit(f"check_gguf: {words}")


def run(folder, *arguments, code=0):
    done = subprocess.run([NDTRAIN, *map(str, arguments)], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
                          env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")})
    check(done.returncode == code, f"{arguments} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout, done.stderr


def train(folder, name, config, steps, *flags):
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, **config}))
    run(folder, "train", "--set", "model.config=config.json", "--data-path", "text.txt", "--sequence-length", 64, "--micro-batch-size", 4,
        "--num-steps", steps, "--learning-rate", "3e-3", "--precision", "fp32", "--set", f"output.dir={name}", "--set",
        "output.save_model=true", "--set", "output.dtype=fp32", "--log-level", "error", *flags)
    return folder / name / "model"


def read_safetensors(path):
    data = path.read_bytes()
    size, = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            check(entry["dtype"] == "F32", f"{name} is {entry['dtype']}")
            tensors[name] = numpy.frombuffer(data[begin:end], "<f4").reshape(entry["shape"])
    return tensors


def source_of(name, tensors, heads):
    """The tensor of the model folder, its rows in the order of llama.cpp's family."""
    *parts, kind = name.split(".")
    if parts[0] != "blk":
        return tensors[f"{WHOLE[parts[0]]}.{kind}"]
    rows = tensors[f"model.layers.{parts[1]}.{BLOCK[parts[2]]}.{kind}"]
    if parts[2] in heads:
        rows = rows.reshape(heads[parts[2]], 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    return rows


def check_tensors(folder, model, kind, heads):
    tensors = read_safetensors(model / "model.safetensors")
    name = f"{model.parent.name}-{kind}.gguf"
    run(folder, "export", model.parent, "--gguf", name, "--dtype", kind)
    reader = gguf.GGUFReader(folder / name)
    own = [t for t in reader.tensors if t.name != "rope_freqs.weight"]
    check(len(own) == len(tensors), f"{name} has {len(own)} tensors of {len(tensors)}")
    for tensor in own:
        source = source_of(tensor.name, tensors, heads)
        wanted = TYPES["fp32"] if source.ndim == 1 else TYPES["fp16"] if kind == "q8_0" and source.shape[1] % 32 else TYPES[kind]
        check(tensor.tensor_type == wanted, f"{tensor.name} of {name} is {tensor.tensor_type.name}")
        stored = gguf.quants.quantize(source, wanted)
        check(numpy.array_equal(numpy.asarray(tensor.data).view(numpy.uint8).ravel(), stored.view(numpy.uint8).ravel()),
              f"{tensor.name} of {name} differs")
    return reader


def check_back(folder, model, kind):
    """The folder that a file of this type becomes: the values that it stands for, and the model's own configuration."""
    name = f"{model.parent.name}-{kind}"
    run(folder, "export", f"{name}.gguf", f"back-{name}", "--dtype", "fp32")
    listed = dict(reversed(line.split("  ")) for line in (folder / f"back-{name}" / "SHA256SUMS").read_text().splitlines())
    files = {path.name: path for path in (folder / f"back-{name}").iterdir() if path.name != "SHA256SUMS"}
    check(listed == {file: hashlib.sha256(path.read_bytes()).hexdigest() for file, path in files.items()}, f"SHA256SUMS of back-{name}: {listed}")
    mine, theirs = (read_safetensors(place / "model.safetensors") for place in (model, folder / f"back-{name}"))
    check(mine.keys() == theirs.keys(), f"{mine.keys() ^ theirs.keys()} of {name}")
    for tensor, values in mine.items():
        own = TYPES["fp32"] if values.ndim == 1 else TYPES["fp16"] if kind == "q8_0" and values.shape[1] % 32 else TYPES[kind]
        check(numpy.array_equal(theirs[tensor], gguf.quants.dequantize(gguf.quants.quantize(values, own), own)), f"{tensor} of back-{name}")
    before, after = (json.loads((place / "config.json").read_text()) for place in (model, folder / f"back-{name}"))
    for key in ("vocab_size", "hidden_size", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings", "model_type"):
        check(before.get(key) == after.get(key), f"{key} of back-{name}: {before.get(key)}, then {after.get(key)}")
    said = [run(folder, "generate", "--model", place, "--prompt", "and the", "--max-new-tokens", 30, "--temperature", 0, "--log-level", "error")[0]
            for place in (model, folder / f"{name}.gguf")]
    check(kind != "fp32" or said[0] == said[1], f"{said} of {name}")


SERVERS = []  # kept until the end: now and then the destructor of one waits for its loop for ever


def serve(path):
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = 512
    parameters.cpuparams.n_threads = 1
    parameters.warmup = False
    SERVERS.append(xllamacpp.Server(parameters))
    return SERVERS[-1]


def post(server, path, body):
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def check_texts(folder, model, prompt):
    """The greedy text of llama.cpp, from F32 weights, is ours."""
    run(folder, "export", model, "--gguf", "texts.gguf", "--dtype", "fp32")
    ours, _ = run(folder, "generate", "--model", model, "--prompt", prompt, "--max-new-tokens", 60, "--temperature", 0, "--log-level", "error")
    theirs = post(serve(folder / "texts.gguf"), "/completion", {"prompt": prompt, "n_predict": 60, "temperature": 0})["content"]
    check(len(theirs) > 40 and ours.rstrip("\n").removeprefix(prompt) == theirs.rstrip("\n"), f"ndtrain wrote {ours!r}, llama.cpp {theirs!r}")
    (folder / "texts.gguf").unlink()


def golden_tokenizer(name):
    """Without what llama.cpp does not know; that of Llama 2 gets every merge that its pieces allow."""
    root = json.loads((GOLDENS / f"{name}.json").read_text())
    for token in root["added_tokens"]:
        token.update(single_word=False, lstrip=False, rstrip=False, normalized=False)
    root["model"]["ignore_merges"] = name == "llama3"
    if name == "llama2":
        vocabulary = root["model"]["vocab"]
        root["model"]["merges"] = [[piece[:cut], piece[cut:]] for piece in sorted(vocabulary, key=vocabulary.get)
                                   for cut in range(1, len(piece)) if piece[:cut] in vocabulary and piece[cut:] in vocabulary]
    return root


def make_tokenizer(folder, name):
    root = golden_tokenizer(name)
    place = folder / f"tokenizer-{name}"
    place.mkdir()
    (place / "tokenizer.json").write_text(json.dumps(root))
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot|>", "pad_token": "<|begin|>", "chat_template": ENDING}))
    return place


def copy_keys(plain, out, beginnings=("general.", "llama.", "tokenizer.")):
    for key, field in plain.fields.items():
        if key.startswith(beginnings) and key != "general.architecture":
            out.add_key_value(key, field.contents(), field.types[0], sub_type=field.types[-1] if len(field.types) > 1 else None)


def write(out):
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def write_pieces(folder, model, name):
    """The file of a model with a tokenizer of Llama 2's form, which `ndtrain export --gguf` refuses: a piece has minus the rank of its first merge."""
    root = json.loads((model / "tokenizer.json").read_text())
    pieces = {**root["model"]["vocab"], **{token["content"]: token["id"] for token in root["added_tokens"]}}
    added = {token["id"]: gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED for token in root["added_tokens"]}
    ranks = {}
    for rank, pair in enumerate(root["model"]["merges"]):
        ranks.setdefault("".join(pair), rank)
    tokens = [f"[PAD{i}]" for i in range(448)]
    scores, kinds = [0.0] * 448, [gguf.TokenType.UNUSED] * 448
    for piece, i in pieces.items():
        tokens[i], scores[i] = piece, -1.0 - ranks[piece] if piece in ranks else 0.0
        kinds[i] = (gguf.TokenType.UNKNOWN if piece == root["model"]["unk_token"] else added[i] if i in added else gguf.TokenType.BYTE
                    if re.fullmatch("<0x..>", piece) else gguf.TokenType.NORMAL)
    (model / "tokenizer.json").rename(folder / "pieces.json")
    (model / "tokenizer.json").write_text(json.dumps(golden_tokenizer("gpt2")))
    run(folder, "export", model, "--gguf", "plain.gguf")
    (folder / "pieces.json").rename(model / "tokenizer.json")
    plain, out = gguf.GGUFReader(folder / "plain.gguf"), gguf.GGUFWriter(folder / f"{name}.gguf", "llama")
    copy_keys(plain, out, ("general.name", "llama."))
    out.add_tokenizer_model("llama")
    out.add_tokenizer_pre("default")
    out.add_add_space_prefix(True)
    out.add_token_list(tokens)
    out.add_token_scores(scores)
    out.add_token_types(kinds)
    begin = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).encode("").ids
    out.add_add_bos_token(bool(begin))
    if begin:
        out.add_bos_token_id(begin[0])
    out.add_eos_token_id(pieces["<|eot|>"])
    out.add_unk_token_id(pieces[root["model"]["unk_token"]])
    out.add_chat_template(ENDING)
    for tensor in plain.tensors:
        out.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    write(out)


def check_tokens(folder, name):
    place = make_tokenizer(folder, name)
    peer = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    model = train(folder, f"run-{name}", {"vocab_size": 448, "hidden_size": 32}, 1, "--tokenizer", place)
    if name == "llama2":
        write_pieces(folder, model, name)
    else:
        run(folder, "export", model, "--gguf", f"{name}.gguf")
    fields = gguf.GGUFReader(folder / f"{name}.gguf").fields
    check(fields["tokenizer.chat_template"].contents() == ENDING, "the chat template")
    check(fields["tokenizer.ggml.eos_token_id"].contents() == peer.token_to_id("<|eot|>"), "the end of text")
    run(folder, "export", f"{name}.gguf", f"back-{name}", "--dtype", "fp32")
    back = tokenizers.Tokenizer.from_file(str(folder / f"back-{name}" / "tokenizer.json"))
    config = json.loads((folder / f"back-{name}" / "tokenizer_config.json").read_text())
    check(config["chat_template"] == ENDING and config["eos_token"] == "<|eot|>", f"{config}")
    check(config.get("pad_token") == (None if name == "llama2" else "<|begin|>"), f"{config}")
    server = serve(folder / f"{name}.gguf")
    texts = [case["text"] for case in json.loads((GOLDENS / f"{name}.cases.json").read_text())]
    check(len(texts) > 60, f"{len(texts)} texts of {name}")
    for text in texts:
        theirs = post(server, "/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]
        check(theirs == peer.encode(text, add_special_tokens=False).ids, f"{name}: llama.cpp cuts {text!r} into {theirs}")
        check(back.encode(text).ids == peer.encode(text).ids, f"{name}: the tokenizer that came back cuts {text!r} otherwise")


def refused_tokenizers():
    """Tokenizers whose ids llama.cpp would not give, with what is said of them."""
    def changed(name, change):
        root = golden_tokenizer(name)
        change(root)
        return root

    begin = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    twice = {"type": "TemplateProcessing", "single": [begin, begin, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {
        "<|begin|>": {"id": "<|begin|>", "ids": [golden_token("gpt2", "<|begin|>")], "tokens": ["<|begin|>"]}}}
    for name in ("llama2", "prefix"):
        yield json.loads((GOLDENS / f"{name}.json").read_text()), "is none of the forms"
    yield json.loads((GOLDENS / "gpt2.json").read_text()), "added tokens with single_word"
    yield changed("gpt2", lambda root: root["model"].update(ignore_merges=True)), "convert_hf_to_gguf.py"
    yield changed("gpt2", lambda root: root.update(normalizer={"type": "Replace", "pattern": {"String": "x"}, "content": "y"})), "is none of the forms"
    yield changed("gpt2", lambda root: root.update(post_processor=twice)), "several tokens"


def golden_token(name, content):
    return next(t["id"] for t in golden_tokenizer(name)["added_tokens"] if t["content"] == content)


def check_refusals(folder, model):
    run(folder, "export", model, "--gguf", "there.gguf")
    before = (folder / "there.gguf").read_bytes()
    _, said = run(folder, "export", model, "--gguf", "there.gguf", "--dtype", "fp32", code=73)
    check("there.gguf exists" in said and (folder / "there.gguf").read_bytes() == before, said)
    _, said = run(folder, "export", model, "--gguf", "other.gguf", "--dtype", "q4", code=2)
    check("bf16|fp16|fp32|q8_0" in said, said)
    _, said = run(folder, "export", model, "--gguf", "none/other.gguf", code=73)
    check("none" in said, said)
    done = subprocess.run(["bash", "-c", 'trap "" XFSZ; ulimit -f 1; exec "$@"', "-", NDTRAIN, "export", model, "--gguf", "full.gguf"], cwd=folder,
                          capture_output=True, text=True, timeout=100)
    check(done.returncode == 73 and 'cannot write "full.gguf": File too large' in done.stderr, done.stderr)
    for root, words in refused_tokenizers():
        (model / "tokenizer.json").write_text(json.dumps(root))
        _, said = run(folder, "export", model, "--gguf", "other.gguf", code=65)
        check(words in said, said)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (model / "tokenizer.json").write_text(json.dumps(golden_tokenizer("gpt2")))
    (model / "tokenizer_config.json").unlink()
    _, said = run(folder, "export", model, "--gguf", "other.gguf", code=65)
    check("names no end of text" in said and "such as 0), and remove SHA256SUMS" in said, said)
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").unlink()
    _, said = run(folder, "export", model, "--gguf", "other.gguf", code=65)
    check("has no tokenizer.json" in said, said)
    for arguments in (["there.gguf"], ["there.gguf", "out", "--gguf", "other.gguf"], ["there.gguf", "out", "--dtype", "q8_0"]):
        run(folder, "export", *arguments, code=2)
    left = [path.name for path in folder.iterdir() if path.name.startswith("other.gguf")]
    check(not left, f"left behind: {left}")


def check_blocks(folder):
    """Random blocks of each type that is read, and types that are not."""
    random = numpy.random.default_rng(7)
    config = {"vocab_size": 448, "hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
    model = train(folder, "wide", config, 1, "--tokenizer", folder / "tokenizer-gpt2")
    run(folder, "export", model, "--gguf", "wide.gguf", "--dtype", "fp32")
    plain = gguf.GGUFReader(folder / "wide.gguf")
    for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q5_K", "IQ4_XS"):
        own, out, wanted = gguf.GGMLQuantizationType[kind], gguf.GGUFWriter(folder / f"{kind}.gguf", "llama"), {}
        copy_keys(plain, out)
        block, size = gguf.GGML_QUANT_SIZES[own]
        for tensor in plain.tensors:
            data = numpy.asarray(tensor.data)
            if data.ndim == 2:
                data = random.integers(0, 256, (data.shape[0], data.shape[1] // block, size), numpy.uint8)
                halves = {"F32": (3, 4), "F16": (1, 2), "BF16": (1, 2), "Q6_K": (209, 210), "Q8_0": (1, 2)}.get(kind, (1, 4))
                data[..., halves[0]:halves[1]:2] &= 0xbf  # no infinities
                data = data.reshape(data.shape[0], -1)
                values = gguf.quants.dequantize(data, own)
                if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
                    values = values.reshape(4 if "attn_q" in tensor.name else 2, -1, 2, 256).swapaxes(1, 2).reshape(values.shape)
                *parts, _ = tensor.name.split(".")
                wanted[f"model.layers.{parts[1]}.{BLOCK[parts[2]]}.weight" if parts[0] == "blk" else f"{WHOLE[parts[0]]}.weight"] = values
            out.add_tensor(tensor.name, data, raw_dtype=own if data.dtype == numpy.uint8 else None)
        write(out)
        if kind in ("Q5_K", "IQ4_XS"):
            _, said = run(folder, "export", f"{kind}.gguf", "none", code=65)
            check(f"of the type {kind} (" in said and said.count("\n") == 1, said)
            continue
        run(folder, "export", f"{kind}.gguf", f"of-{kind}", "--dtype", "fp32")
        read = read_safetensors(folder / f"of-{kind}" / "model.safetensors")
        for tensor, values in wanted.items():
            check(numpy.array_equal(read[tensor].view(numpy.uint32), values.view(numpy.uint32)), f"{tensor} of {kind} differs")
    out = gguf.GGUFWriter(folder / "real.gguf", "llama")
    copy_keys(plain, out)
    for tensor in plain.tensors:
        own = gguf.GGMLQuantizationType.Q4_1 if len(tensor.shape) == 2 else gguf.GGMLQuantizationType.F32
        out.add_tensor(tensor.name, gguf.quants.quantize(numpy.asarray(tensor.data), own), raw_dtype=own)
    write(out)
    run(folder, "export", "real.gguf", "of-real")
    same_steps(folder, "real.gguf", "of-real")
    check_faults(folder, "real.gguf")


def same_steps(folder, file, place):
    """A file trains as its folder does, on two workers, and goes on; the saved model has the files of both."""
    losses = []
    for name, model in (("of-file", file), ("of-place", place)):
        shutil.rmtree(folder / name, ignore_errors=True)
        for steps in (1, 2):
            done = subprocess.run([BUILD / "ndlaunch", "--num-processes", "2", "--tp-size", "2", "--model-path", model, "--data-path", "text.txt",
                                   "--tokenizer", "model", "--sequence-length", "32", "--num-steps", str(steps), "--save-dir", name,
                                   "--checkpoint-frequency", "1", "--resume-from-checkpoint", "auto", "--save-model", "true", "--log-level", "error"],
                                  cwd=folder, capture_output=True, text=True, timeout=200, env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")})
            check(done.returncode == 0, f"{model}: {done.stdout}{done.stderr}")
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line and "grad_norm" in line])
    check(len(losses[0]) == 2 and losses[0] == losses[1], f"losses of {file}: {losses}")
    check(not filecmp.dircmp(folder / "of-file/model", folder / "of-place/model").diff_files, f"the models of {file} differ")
    for name in ("of-file", "of-place"):
        run(folder, "export", f"{name}/checkpoint-2", f"out-{name}")
    check(not filecmp.dircmp(folder / "out-of-file", folder / "of-file/model").diff_files, "the checkpoint's model")
    said = [run(folder, "eval", "--model", model, "--data", "text.txt", "--sequence-length", 32, "--jsonl", "--log-level", "error")[0]
            for model in (file, place)]
    check(json.loads(said[0])["loss"] == json.loads(said[1])["loss"], f"{said}")
    run(folder, "plan", "--model-path", file, "--sequence-length", 64)
    for name in ("of-file", "of-place", "out-of-file", "out-of-place"):
        shutil.rmtree(folder / name, ignore_errors=True)


def check_faults(folder, file):
    """Each damaged or foreign file gets one sentence."""
    good = (folder / file).read_bytes()

    def text(words):
        return struct.pack("<Q", len(words)) + words

    def after(words, change):
        at = good.index(text(words)) + 8 + len(words)
        return good[:at] + change + good[at + len(change):]

    bad = {"and no GGUF file": (b"", b"GGML" + good[4:]), "ends behind the file": (good[:-100], good[:len(good) // 2]),
           "ends within its head": (good[:8], good[:200], good[:8] + b"\xff" * 8 + good[16:], good[:16] + b"\xff" * 8 + good[24:],
                                    good[:24] + b"\xff" * 8 + good[32:], after(b"tokenizer.ggml.tokens", struct.pack("<IIQ", 9, 8, 1 << 60))),
           "the key tokenizer.ggml.add_bos_token is there twice": (good.replace(b"tokenizer.ggml.add_eos_token", b"tokenizer.ggml.add_bos_token"),),
           "lacks tensor \"model.layers.0.self_attn.k_proj": (good.replace(text(b"blk.0.attn_k.weight"), text(b"blk.0.attn_v.weight")),),
           "big-endian": (b"GGUF" + bytes([0, 0, 0, 3]) + good[8:],), "version 1;": (b"GGUF" + bytes([1, 0, 0, 0]) + good[8:],),
           "list of them": (after(b"tokenizer.ggml.model", struct.pack("<I", 13)), after(b"tokenizer.ggml.model", struct.pack("<IQ", 8, 4) + b"\xff")),
           "vector nor matrix": (after(b"blk.0.attn_norm.weight", struct.pack("<I", 3)), after(b"blk.0.attn_q.weight", struct.pack("<IQ", 2, 0))),
           "of the type unknown (77)": (after(b"blk.0.attn_norm.weight", struct.pack("<IQI", 1, 256, 77)),),
           "overlaps": (after(b"blk.0.attn_q.weight", struct.pack("<IQQIQ", 2, 256, 256, 3, 0)),),
           "its key rope.dimension_count is 32; only 64": (after(b"llama.rope.dimension_count", struct.pack("<II", 4, 32)),),
           "hidden_size is 0": (after(b"llama.embedding_length", struct.pack("<II", 4, 0)),),
           "it has no llama.context_length": (good.replace(b"llama.context_length", b"llama.context_lengtx"),),
           "lm_head.weight\" is BOOL": (good.replace(text(b"output.weight"), text(b"lm_head.weight")).replace(
               text(b"general.name") + struct.pack("<I", 8) + text(b"model"), text(b"general.name") + struct.pack("<I", 8) + text(b"model" + 31 * b"l")),),
           "config.json asks for": (after(b"llama.feed_forward_length", struct.pack("<II", 4, 96)),),
           "lacks tensor": (after(b"llama.block_count", struct.pack("<II", 4, 3)),), "of 1 layers does not have": (after(b"llama.block_count", struct.pack("<II", 4, 1)),),
           "it has no token_embd.weight": (good.replace(text(b"token_embd.weight"), text(b"token_embx.weight")),),
           "its architecture is mamba;": (good.replace(text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
                                                       text(b"general.architecture") + struct.pack("<I", 8) + text(b"mamba")),),
           "its architecture is l\\x1b[2J;": (good.replace(text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
                                                          text(b"general.architecture") + struct.pack("<I", 8) + text(b"l\x1b[2J")),),
           "its tokenizer cuts texts as gpt-3 does": (good.replace(text(b"gpt-2"), text(b"gpt-3")),),
           "kind gpt3;": (good.replace(text(b"gpt2"), text(b"gpt3")),), "is a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 123456\n",)}
    for words, files in bad.items():
        for content in files:
            (folder / "bad.gguf").write_bytes(content)
            for command in (["export", "bad.gguf", "none"], ["check", "--model-path", "bad.gguf", "--data-path", "text.txt"]):
                _, said = run(folder, *command, code=65)
                check(words in said and said.count("\n") == 1 and said.rstrip("\n").isprintable(), f"{words}: {said!r}")
    os.mkfifo(folder / "fifo.gguf")
    for name in ("fifo.gguf", "absent.gguf"):
        run(folder, "export", name, "none", code=65)
    check(not (folder / "none").exists(), "a folder was left")


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "text.txt").write_text("".join(f"and the lord said unto moses, speak unto the children of israel {i % 7} times.\n"
                                                 for i in range(400)))
        heads = {"attn_q": 4, "attn_k": 2}
        bytes_of = {"vocab_size": 256, "hidden_size": 64, "rope_scaling": LLAMA3_ROPE, "rope_theta": 1000.0}
        model = train(folder, "run", bytes_of, 300)
        for kind in TYPES:
            reader = check_tensors(folder, model, kind, heads)
            check_back(folder, model, kind)
        factors = next(t.data for t in reader.tensors if t.name == "rope_freqs.weight")
        check(factors[0] == 1 and factors[-1] == 8 and (numpy.diff(factors) >= 0).all(), f"factors {factors}")
        both = gguf.GGUFWriter(folder / "both.gguf", "llama")
        copy_keys(reader, both, ("general.", "llama."))
        both.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        both.add_rope_scaling_factor(2.0)
        for tensor in reader.tensors:
            both.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        write(both)
        _, said = run(folder, "export", "both.gguf", "none", code=65)
        check("factors of its RoPE" in said, said)
        check_texts(folder, model, "and the lord")
        # Tied, an odd head, rows that are no blocks of 32, and linear RoPE.
        odd = {"vocab_size": 256, "hidden_size": 40, "head_dim": 18, "tie_word_embeddings": True,
               "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
        model = train(folder, "odd", odd, 300)
        check_tensors(folder, model, "q8_0", heads)
        check_back(folder, model, "q8_0")
        check_texts(folder, model, "speak unto")
        # The halves of a head turn in these families, so no rows change places.
        for family, more in (("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen2", {}), ("qwen3", {"head_dim": 24})):
            own = train(folder, family, {"model_type": family, "vocab_size": 256, "hidden_size": 64, "eos_token_id": 0, **more}, 300)
            check_tensors(folder, own, "fp32", heads if family == "llama" else {})
            check_texts(folder, own, "the lord said")
            check_back(folder, own, "fp32")
        for tokenizer in ("gpt2", "llama3", "qwen2", "digits", "llama2"):
            check_tokens(folder, tokenizer)
        check_blocks(folder)
        check_refusals(folder, folder / "run-gpt2" / "model")
        (model / "tokenizer.json").write_text((GOLDENS / "gpt2.json").read_text())
        _, said = run(folder, "export", model, "--gguf", "other.gguf", code=65)
        check("and the model has 256" in said, said)


try:
    main()
except SystemExit as end:
    print(end.code, file=sys.stderr, flush=True)
    os._exit(1)
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
os._exit(0)
