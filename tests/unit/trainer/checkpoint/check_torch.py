# SPDX-License-Identifier: Apache-2.0
"""torch reads what the checkpoint library wrote.

Usage: check_torch.py CHECKPOINT_TOOL NDTRAIN. Run through check_torch.sh.
"""
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

TOOL, NDTRAIN = sys.argv[1:3]
V, C, F, LAYERS, HEADS, KV_HEADS, D = 97, 24, 36, 3, 8, 4, 4
ARRAYS = ("master", "exp_avg", "exp_avg_sq")
BLOCK = {
    "input_layernorm": (C,), "self_attn.q_proj": (HEADS * D, C), "self_attn.k_proj": (KV_HEADS * D, C),
    "self_attn.v_proj": (KV_HEADS * D, C), "self_attn.o_proj": (C, HEADS * D),
    "post_attention_layernorm": (C,), "mlp.gate_proj": (F, C), "mlp.up_proj": (F, C), "mlp.down_proj": (C, F),
}

def shapes(tied):
    result = {"model.embed_tokens.weight": (V, C), "model.norm.weight": (C,)}
    if not tied:
        result["lm_head.weight"] = (V, C)
    for layer in range(LAYERS):
        for name, shape in BLOCK.items():
            result[f"model.layers.{layer}.{name}.weight"] = shape
    return result


def value(array, name, shape):
    """fake_value of fake_state.c."""
    seed = 2166136261
    for c in name.encode():
        seed = (seed ^ c) * 16777619 & 0xFFFFFFFF
    seed = (seed ^ array) * 16777619 & 0xFFFFFFFF
    element = np.arange(int(np.prod(shape)), dtype=np.uint64)
    mixed = (np.uint64(seed) ^ element) * np.uint64(2654435761) & np.uint64(0xFFFFFFFF)
    return torch.from_numpy((mixed >> np.uint64(9)).astype(np.float32)).reshape(shape)


def expected(tied):
    return {name if a == 0 else f"optimizer.state.{name}.{array}": value(a, name, shape)
            for name, shape in shapes(tied).items() for a, array in enumerate(ARRAYS)}


def documented_lines():
    """The lines of docs/checkpoint.md by which torch opens a checkpoint."""
    document = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../../docs/checkpoint.md")
    with open(document, encoding="utf-8") as f:
        block = f.read().split("Torch opens and reshards it:\n\n", 1)[1].split("\n\n", 1)[0]
    assert all(line.startswith("    ") for line in block.split("\n")) and "dcp.load" in block, block
    return textwrap.dedent(block) + "\n"


def check_documented(state, tied):
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=V, hidden_size=C, intermediate_size=F, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                         num_key_value_heads=KV_HEADS, head_dim=D, tie_word_embeddings=tied)
    model = LlamaForCausalLM(config)
    lines = documented_lines()
    assert lines.count("RUN/checkpoint-500/state") == 1, lines
    exec(lines.replace("RUN/checkpoint-500/state", state), {"model": model})
    want = {name: value(0, name, shape) for name, shape in shapes(tied).items()}
    if tied:
        want["lm_head.weight"] = want["model.embed_tokens.weight"]
    found = model.state_dict()
    assert found.keys() == want.keys(), found.keys() ^ want.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), (tied, name)


def check_written(top, mesh, tied, step):
    folder = os.path.join(top, f"run-{step}")
    os.mkdir(folder)
    subprocess.run([TOOL, "write", folder, str(step), "tied" if tied else "untied", *map(str, mesh)], check=True)
    state = os.path.join(folder, f"checkpoint-{step}", "state")
    want = expected(tied)
    # Each file is plain safetensors.
    for file in glob.glob(state + "/*.safetensors"):
        with safe_open(file, "pt") as f:
            assert json.loads(f.metadata()["DCP_SHARDING_INFO"]).keys() == set(f.keys())
            for name in f.keys():
                f.get_tensor(name)
    if step <= 2: # tied and untied
        check_documented(state, tied)
    # torch reshards them: whole tensors in F32, and in BF16.
    target = {name: torch.full_like(t, -3) for name, t in want.items()}
    updates = step - step // 6
    for name in shapes(tied):
        target[f"optimizer.state.{name}.step"] = torch.tensor(-1.0)
    dcp.load(target, storage_reader=HuggingFaceStorageReader(state), no_dist=True)
    for name, tensor in want.items():
        assert torch.equal(target[name], tensor), (mesh, name)
    for name in shapes(tied):
        assert target[f"optimizer.state.{name}.step"].item() == updates, (mesh, name)
    narrow = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in want.items()}
    dcp.load(narrow, storage_reader=HuggingFaceStorageReader(state), no_dist=True)
    for name, tensor in want.items():
        assert torch.equal(narrow[name], tensor.bfloat16()), (mesh, name)
    # Consolidated into a model folder: the weights and nothing else.
    model = os.path.join(folder, "model")
    os.mkdir(model)
    consolidate_safetensors_files(state, model, {name: 1 for name in shapes(tied)})
    found = {}
    for file in glob.glob(model + "/*.safetensors"):
        with safe_open(file, "pt") as f:
            found |= {name: f.get_tensor(name) for name in f.keys()}
    assert found.keys() == shapes(tied).keys(), mesh
    for name, tensor in found.items():
        assert torch.equal(tensor, want[name]), (mesh, name)
    # It is the model that ndtrain export writes.
    exported = os.path.join(folder, "exported")
    subprocess.run([NDTRAIN, "export", folder, exported, "--dtype", "fp32"], check=True, stdout=subprocess.DEVNULL)
    with safe_open(exported + "/model.safetensors", "pt") as f:
        assert set(f.keys()) == found.keys(), mesh
        for name in f.keys():
            assert torch.equal(f.get_tensor(name), found[name]), (mesh, name)
    shutil.copy(exported + "/config.json", model)
    subprocess.run([NDTRAIN, "ckpt", "diff", model, folder], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as top:
        for step, mesh in enumerate([(1, 1, 1, 1), (3, 1, 1, 1), (1, 5, 1, 1), (1, 1, 1, 2), (2, 3, 1, 2), (1, 2, 2, 4)]):
            check_written(top, mesh, step % 2 == 1, step + 1)
    print("check_torch: checkpoints are read by torch", torch.__version__)
