# SPDX-License-Identifier: Apache-2.0
"""Opens folders written by hf_model_tool with transformers, and the other way round.

Usage: check_transformers.py HF_MODEL_TOOL.
"""
import os
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file

TOOL = sys.argv[1]
transformers.utils.logging.disable_progress_bar()


def expected(name, shape):
    count = 1
    for n in shape:
        count *= n
    e = torch.arange(count, dtype=torch.int64)
    return (((sum(name.encode()) + 31 * e) % 251 - 128).to(torch.float32) / 256).reshape(shape)


def check_model(folder, dtype, tied):
    model, info = transformers.LlamaForCausalLM.from_pretrained(
        folder, torch_dtype="auto", output_loading_info=True)
    for kind, names in info.items():
        assert not names, (folder, kind, names)
    assert model.dtype == dtype, (folder, model.dtype)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    state = model.state_dict()
    for name, tensor in state.items():
        source = "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name
        assert torch.equal(tensor.float(), expected(source, tuple(tensor.shape))), (folder, name)
    logits = model(torch.arange(40)[None]).logits
    assert logits.shape == (1, 40, 256) and torch.isfinite(logits.float()).all()
    return model


def byte_characters():
    """GPT-2's map, from its definition: printable Latin-1 stands for itself, the others follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)}


def check_tokenizer(tokenizer):
    assert len(tokenizer) == 256
    for byte, character in byte_characters().items():
        assert tokenizer.convert_tokens_to_ids(character) == byte, byte
        assert tokenizer.convert_ids_to_tokens(byte) == character, byte
    surrogates = range(0xD800, 0xE000)
    texts = ["", " ", "a", "Hello, world!\n\n  two  spaces\t", " leading", "I'm don't  ..  ' s", "\r\n\x00\x7f"]
    points = [p for p in [*range(0x3000), *range(0x3000, 0x110000, 37), 0x10FFFF] if p not in surrogates]
    texts += ["".join(chr(p) for p in points[i:i + 500]) for i in range(0, len(points), 500)]
    seen = set()
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode()), text[:20]
        assert tokenizer.decode(ids) == text, text[:20]
        seen |= set(ids)
    # What no UTF-8 text contains.
    assert set(range(256)) - seen == {0xC0, 0xC1, *range(0xF5, 0x100)}, set(range(256)) - seen


def check_reverse(model, folder, **options):
    model.save_pretrained(folder, **options)
    subprocess.run([TOOL, "verify", folder], check=True)


with tempfile.TemporaryDirectory() as top:
    for dtype_name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        for tied in (False, True):
            for shard in (0, 30000):
                folder = os.path.join(top, f"{dtype_name}-{tied}-{shard}")
                subprocess.run([TOOL, "write", folder, dtype_name, "tied" if tied else "untied",
                                str(shard)], check=True)
                subprocess.run([TOOL, "verify", folder], check=True)
                if shard == 0:
                    tensors = load_file(os.path.join(folder, "model.safetensors"))
                    assert ("lm_head.weight" in tensors) == (not tied)
                model = check_model(folder, dtype, tied)
                check_reverse(model, folder + "-back")
                check_reverse(model, folder + "-back-sharded", max_shard_size=30000)
                check_reverse(model.to(torch.float16), folder + "-back-half")
    check_tokenizer(transformers.AutoTokenizer.from_pretrained(folder))
    check_tokenizer(transformers.PreTrainedTokenizerFast.from_pretrained(folder))
    check_tokenizer(transformers.PreTrainedTokenizerFast(
        tokenizer_file=os.path.join(folder, "tokenizer.json")))
print("check_transformers: models and tokenizer open, transformers", transformers.__version__)
