#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns a GGUF file, as llama.cpp and Ollama use it, into a model folder that ndtrain trains further.

    scripts/from_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
    ndlaunch --model-path models/smollm2 --data-path rows.jsonl --tokenizer model

Quantised weights (Q4_0, Q4_1, Q4_K, Q6_K, Q8_0 and the others that the package gguf knows) become the F32 values that they stand for.
The folder has config.json, model.safetensors, tokenizer.json, tokenizer_config.json, generation_config.json and SHA256SUMS; it must not
exist, and appears when it is complete. Models of the types llama, qwen2 and qwen3 are read, with tokenizers of the forms that `ndtrain ckpt gguf`
writes. Anything else is refused by its name.

Needs the Python package gguf: pip install gguf. Exit codes: 0 done, 2 wrong usage, 65 a file that is not understood, 73 a folder that
cannot be written.
"""
import argparse
import hashlib
import json
import os
import pathlib
import shutil
import struct
import sys

MARK = "\u2581"
BLOCK = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Patterns of Split by llama.cpp's names (tokenizer.ggml.pre); those of gpt-2 and smollm are ByteLevel's own.
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PATTERNS = {"llama-bpe": WORDS % "{1,3}", "qwen2": WORDS % ""}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5


class Refused(Exception):
    """What is wrong with the file, as a sentence."""


class Fields:
    """The keys of a file; those of the model are asked for without its architecture."""

    def __init__(self, reader):
        self.fields = reader.fields
        self.architecture = self.get("general.architecture")

    def get(self, key, otherwise=None):
        return self.fields[key].contents() if key in self.fields else otherwise

    def need(self, key):
        value = self.get(key)
        if value is None:
            raise Refused(f"the file has no {key}")
        return value

    def own(self, key, otherwise=None):
        return self.get(f"{self.architecture}.{key}", otherwise)

    def own_need(self, key):
        return self.need(f"{self.architecture}.{key}")


def rope_scaling(fields, tensors):
    """The key rope_scaling of config.json, or None. llama.cpp keeps the factors of Llama 3, not the numbers that they follow from."""
    kind = fields.own("rope.scaling.type", "linear")
    factor = fields.own("rope.scaling.factor", fields.own("rope.scale_linear", 1.0)) or 1.0
    if "rope_freqs.weight" in tensors:
        factors = [float(f) for f in tensors["rope_freqs.weight"].data.ravel()]
        known = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": max(factors)}
        half, theta = len(factors), fields.own("rope.freq_base", 10000.0)
        for original in (8192, 4096, 2048, 16384, 32768, 1024, 512, 256, 128, 64):
            if all(abs(a - b) < 1e-3 * b for a, b in zip(factors, llama3_factors(known, original, half, theta))):
                return {**known, "original_max_position_embeddings": original}
        raise Refused("the factors of its RoPE (rope_freqs.weight) are not those of Llama 3.1 to 3.3")
    if kind in ("none", "linear"):
        if fields.own("attention.sliding_window"):
            raise Refused("its attention has a sliding window, which is not read from GGUF files")
        return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else None
    raise Refused(f"its RoPE is scaled by {kind}; none and linear are read")


def llama3_factors(scaling, original, half, theta):
    factors = []
    for i in range(half):
        turns = original * theta ** (-i / half) / (2 * 3.141592653589793) # of the original context
        smooth = (turns - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
        factors.append(1 / (min(max(smooth, 0), 1) * (1 - 1 / scaling["factor"]) + 1 / scaling["factor"]))
    return factors


def make_config(fields, tensors):
    heads, width = fields.own_need("attention.head_count"), fields.own_need("embedding_length")
    config = {"model_type": fields.architecture, "architectures": [ARCHITECTURES[fields.architecture]], "torch_dtype": "float32",
              "vocab_size": int(tensors["token_embd.weight"].shape[1]), "hidden_size": width,
              "intermediate_size": fields.own_need("feed_forward_length"), "num_hidden_layers": fields.own_need("block_count"),
              "num_attention_heads": heads, "num_key_value_heads": fields.own("attention.head_count_kv", heads),
              "head_dim": fields.own("attention.key_length", width // heads), "max_position_embeddings": fields.own_need("context_length"),
              "rms_norm_eps": short(fields.own_need("attention.layer_norm_rms_epsilon")), "rope_theta": fields.own("rope.freq_base", 10000.0),
              "hidden_act": "silu", "tie_word_embeddings": "output.weight" not in tensors,
              "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"), "eos_token_id": fields.get("tokenizer.ggml.eos_token_id")}
    scaling = rope_scaling(fields, tensors)
    if scaling:
        config["rope_scaling"] = scaling
    if fields.architecture == "llama":
        config["attention_bias"], config["mlp_bias"] = "blk.0.attn_q.bias" in tensors, "blk.0.ffn_up.bias" in tensors
    if fields.architecture == "qwen3":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    return config


def short(value):
    """The shortest decimal number that has this value as F32: 1e-05, where F64 would show 9.99999974e-06."""
    return float(next(text for text in (f"{value:.{digits}e}" for digits in range(17))
                      if struct.pack("<f", float(text)) == struct.pack("<f", value)))


# Weights.

def name_of(name):
    """Hugging Face's name of a tensor; None: it is none of a model."""
    *parts, kind = name.split(".")
    if len(parts) == 1 and parts[0] in WHOLE:
        return f"{WHOLE[parts[0]]}.{kind}"
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in BLOCK:
        return f"model.layers.{parts[1]}.{BLOCK[parts[2]]}.{kind}"
    if name == "rope_freqs.weight":
        return None
    raise Refused(f"it has the tensor {name}, which no model of this kind has")


def values_of(tensor, config, dequantize):
    """F32, the rows of q and k in the order of Hugging Face."""
    values = dequantize(tensor.data, tensor.tensor_type)
    part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
    if config["model_type"] == "llama" and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        values = values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return values


def write_weights(path, tensors, config, dequantize):
    """Tensor by tensor, so that no more than one is in memory in F32."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    named = [(name_of(name), tensor) for name, tensor in tensors.items()]
    for name, tensor in named:
        if name:
            size = 4 * int(tensor.n_elements)
            header[name] = {"dtype": "F32", "shape": [int(n) for n in reversed(tensor.shape)], "data_offsets": [offset, offset + size]}
            offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in named:
            if name:
                file.write(values_of(tensor, config, dequantize).astype("<f4").tobytes())


# The tokenizer.

def byte_level(**more):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True, **more}


def word_parts(splitting):
    if splitting == "gpt-2":
        return byte_level()
    if splitting == "smollm":
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level()]}
    if splitting in PATTERNS:
        split = {"type": "Split", "pattern": {"Regex": PATTERNS[splitting]}, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [split, byte_level(use_regex=False)]}
    raise Refused(f"its tokenizer cuts texts as {splitting} does; gpt-2, smollm, {' and '.join(PATTERNS)} are read")


def piece_merges(tokens, scores, kinds):
    """Every pair of pieces that makes a piece, the highest score first."""
    pieces = {token: score for token, score, kind in zip(tokens, scores, kinds) if kind == NORMAL}
    made = sorted((-score, place, token) for place, (token, score) in enumerate(pieces.items()))
    return [f"{token[:cut]} {token[cut:]}" for _, _, token in made for cut in range(1, len(token))
            if token[:cut] in pieces and token[cut:] in pieces]


def make_tokenizer(fields):
    tokens, kinds = fields.need("tokenizer.ggml.tokens"), fields.need("tokenizer.ggml.token_type")
    added = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": kinds[i] != USER_DEFINED} for i, token in enumerate(tokens) if kinds[i] in (CONTROL, USER_DEFINED, UNKNOWN)]
    own = {i["id"] for i in added}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    root = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": None,
            "post_processor": None, "decoder": None, "model": model}
    kind = fields.need("tokenizer.ggml.model")
    if kind == "gpt2":
        splitting = fields.get("tokenizer.ggml.pre")
        if splitting in (None, "default"):
            raise Refused("it does not say how its tokenizer cuts texts (tokenizer.ggml.pre); convert the model anew")
        root["pre_tokenizer"], root["decoder"] = word_parts(splitting), byte_level()
        model["ignore_merges"] = splitting == "llama-bpe"
        model["merges"] = fields.need("tokenizer.ggml.merges")
        # tokenizers gives added tokens the ids behind the pieces, so those before the last piece are pieces too.
        last = max(i for i, k in enumerate(kinds) if k == NORMAL)
        model["vocab"] = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED and (i not in own or i < last)}
    elif kind == "llama":
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
        prepend = [{"type": "Prepend", "prepend": MARK}] if fields.get("tokenizer.ggml.add_space_prefix", True) else []
        root["normalizer"] = {"type": "Sequence", "normalizers": [*prepend, replace]}
        root["decoder"] = {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": MARK}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepend else [])]}
        unknown = fields.get("tokenizer.ggml.unknown_token_id")
        model.update(byte_fallback=True, fuse_unk=True, unk_token=tokens[unknown] if unknown is not None else None)
        model["vocab"] = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
        model["merges"] = piece_merges(tokens, fields.need("tokenizer.ggml.scores"), kinds)
    else:
        raise Refused(f"its tokenizer is of the kind {kind}; gpt2 and llama are read")
    if fields.get("tokenizer.ggml.add_eos_token", False):
        raise Refused("its tokenizer adds an end of text to every text, which is not read from GGUF files")
    begin = fields.get("tokenizer.ggml.bos_token_id")
    adds = kind == "llama" or fields.get("tokenizer.ggml.pre") == "llama-bpe" # llama.cpp's defaults
    if fields.get("tokenizer.ggml.add_bos_token", adds) and begin is not None:
        text = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": tokens[begin], "type_id": 0}}
        root["post_processor"] = {"type": "TemplateProcessing", "single": [text[1], text[0]], "pair": [text[1], text[0], text[1], {
            "Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {tokens[begin]: {"id": tokens[begin], "ids": [begin], "tokens": [tokens[begin]]}}}
    return root, tokens


def make_tokenizer_config(fields, tokens):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    end = fields.get("tokenizer.ggml.eot_token_id", fields.get("tokenizer.ggml.eos_token_id"))
    for name, number in (("bos_token", fields.get("tokenizer.ggml.bos_token_id")), ("eos_token", end),
                         ("pad_token", fields.get("tokenizer.ggml.padding_token_id"))):
        if number is not None:
            config[name] = tokens[number]
    if fields.get("tokenizer.chat_template"):
        config["chat_template"] = fields.get("tokenizer.chat_template")
    return config


def convert(source, folder):
    try:
        import gguf
        from gguf.quants import dequantize
    except ImportError as error:
        raise Refused(f"it takes the Python package gguf to read it, which cannot be imported ({error}): pip install gguf") from error
    if not source.is_file():
        raise Refused("it is no file" if source.exists() else "no such file")
    reader = gguf.GGUFReader(source)
    fields = Fields(reader)
    if (fields.get("split.count") or 1) > 1:
        raise Refused("it is one of several files; join them with llama-gguf-split --merge")
    if fields.architecture not in ARCHITECTURES:
        raise Refused(f"its architecture is {fields.architecture}; {', '.join(ARCHITECTURES)} are read")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise Refused("it has no token_embd.weight")
    config = make_config(fields, tensors)
    tokenizer, tokens = make_tokenizer(fields)
    files = {"config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": make_tokenizer_config(fields, tokens),
             "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    write_weights(folder / "model.safetensors", tensors, config, dequantize)
    write_sums(folder)
    return config


def write_sums(folder):
    """SHA256SUMS, as sha256sum writes it: ndtrain compares the files with it before each start."""
    lines = []
    for path in sorted(folder.iterdir()):
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
        lines.append(f"{digest.hexdigest()}  {path.name}\n")
    (folder / "SHA256SUMS").write_text("".join(lines))


def fail(code, words):
    print("from_gguf: " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in words), file=sys.stderr)
    return code


def main():
    parser = argparse.ArgumentParser(prog="from_gguf.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    options = parser.parse_args()
    folder = options.folder.absolute()
    made = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    own = False
    try:
        if folder.exists():
            return fail(73, f"{folder} exists; remove it, or give another name")
        folder.parent.mkdir(parents=True, exist_ok=True)
        made.mkdir()
        own = True
        config = convert(options.file, made)
        os.rename(made, folder)
    except Refused as error:
        return fail(65, f"{options.file}: {error}")
    except OSError as error:
        return fail(65 if error.filename == str(options.file) else 73, str(error))
    except (ValueError, TypeError, IndexError, KeyError, ArithmeticError, AttributeError, NotImplementedError) as error:
        return fail(65, f"{options.file}: it is no GGUF file, or a damaged one: {type(error).__name__}: {error}")
    finally:
        if own:
            shutil.rmtree(made, ignore_errors=True)
    print(f"{options.folder}: a {config['model_type']} of {config['num_hidden_layers']} layers, {config['vocab_size']} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
