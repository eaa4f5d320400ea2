# SPDX-License-Identifier: Apache-2.0
"""torch reads what the checkpoint library wrote, and the other way round.

Usage: check_torch.py CHECKPOINT_TOOL NDTRAIN. Run through check_torch.sh.
       check_torch.py golden FOLDER writes what tests/unit/trainer/checkpoint/golden/torch holds.
"""
import glob
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

TOOL, NDTRAIN = sys.argv[1:3]
V, C, F, LAYERS, HEADS, KV_HEADS, D = 97, 24, 36, 3, 8, 4, 4
if TOOL == "golden": # the model of fake_write_golden
    V, C, F, LAYERS, HEADS, KV_HEADS, D = 11, 12, 20, 2, 2, 2, 4
ARRAYS = ("master", "exp_avg", "exp_avg_sq")
BLOCK = {
    "input_layernorm": (C,), "self_attn.q_proj": (HEADS * D, C), "self_attn.k_proj": (KV_HEADS * D, C),
    "self_attn.v_proj": (KV_HEADS * D, C), "self_attn.o_proj": (C, HEADS * D),
    "post_attention_layernorm": (C,), "mlp.gate_proj": (F, C), "mlp.up_proj": (F, C), "mlp.down_proj": (C, F),
}
TITAN = {
    "input_layernorm": "attention_norm", "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
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


def state_name(array, name):
    return name if array == 0 else f"optimizer.state.{name}.{ARRAYS[array]}"


def expected(tied, arrays=3):
    return {state_name(a, n): value(a, n, s) for n, s in shapes(tied).items() for a in range(arrays)}


def model_with_config(model, exported):
    with open(exported + "/config.json") as source, open(model + "/config.json", "w") as target:
        target.write(source.read())
    return model


def documented_lines():
    """The lines of docs/checkpoint.md by which torch opens a checkpoint."""
    document = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../../docs/checkpoint.md")
    with open(document, encoding="utf-8") as f:
        block = f.read().split("Torch opens and reshards it:\n\n", 1)[1].split("\n\n", 1)[0]
    lines = [line.removeprefix("    ") for line in block.split("\n")]
    assert all(line.startswith("    ") for line in block.split("\n")) and "dcp.load" in block, block
    return "\n".join(lines) + "\n"


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
    # The same model as our own export.
    exported = os.path.join(folder, "exported")
    subprocess.run([NDTRAIN, "ckpt", "export", folder, exported, "--dtype", "fp32"], check=True, stdout=subprocess.DEVNULL)
    with safe_open(exported + "/model.safetensors", "pt") as f:
        assert set(f.keys()) == found.keys(), mesh
        for name in f.keys():
            assert torch.equal(f.get_tensor(name), found[name]), (mesh, name)
    subprocess.run([NDTRAIN, "ckpt", "diff", model_with_config(model, exported), folder], check=True,
                   stdout=subprocess.DEVNULL)


def write_ranks(rank, world, port, folder, tied):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (world,))
    state = {}
    for i, (name, tensor) in enumerate(expected(tied).items()):
        # Rows, columns, and replicas.
        placement = Shard(0) if i % 3 == 0 else Shard(1) if i % 3 == 1 and tensor.ndim == 2 else Replicate()
        state[name] = distribute_tensor(tensor, mesh, [placement])
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
    dist.destroy_process_group()


def free_port():
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def check_read(top, tied):
    word = "tied" if tied else "untied"
    # Written by two ranks of torch.
    folder = os.path.join(top, f"torch-{word}")
    mp.spawn(write_ranks, args=(2, free_port(), folder, tied), nprocs=2)
    subprocess.run([TOOL, "read", folder, word, "3"], check=True)
    # A plain file, weights in BF16 and F16 where that is exact, and the names behind "model.".
    plain = os.path.join(top, f"plain-{word}")
    os.mkdir(plain)
    save_file({"model." + n: t for n, t in expected(tied, 1).items()}, plain + "/weights.safetensors")
    subprocess.run([TOOL, "read", plain, word, "1"], check=True)


def interleaved(tensor):
    """Rows of Hugging Face's q and k in Meta's order: the inverse of convert_llama_weights_to_hf.py."""
    rows, cols = tensor.shape
    return tensor.view(rows // D, 2, D // 2, cols).transpose(1, 2).reshape(rows, cols).contiguous()


def check_titan(top):
    names = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
    for layer in range(LAYERS):
        names |= {f"model.layers.{layer}.{hf}": f"layers.{layer}.{titan}" for hf, titan in TITAN.items()}
    state = {}
    for name, shape in shapes(False).items():
        for a in range(3):
            tensor = value(a, name, shape)
            if "q_proj" in name or "k_proj" in name:
                tensor = interleaved(tensor)
            state[state_name(a, names[name.removesuffix(".weight")] + ".weight")] = tensor
    folder = os.path.join(top, "titan")
    os.mkdir(folder)
    save_file(state, folder + "/model.safetensors")
    subprocess.run([TOOL, "read", folder, "untied", "3"], check=True)


if __name__ == "__main__" and TOOL == "golden":
    mp.spawn(write_ranks, args=(2, free_port(), NDTRAIN, False), nprocs=2)
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as top:
        for step, mesh in enumerate([(1, 1, 1, 1), (3, 1, 1, 1), (1, 5, 1, 1), (1, 1, 1, 2), (2, 3, 1, 2), (1, 2, 2, 4)]):
            check_written(top, mesh, step % 2 == 1, step + 1)
        for tied in (False, True):
            check_read(top, tied)
        check_titan(top)
    print("check_torch: checkpoints are read and written by both, torch", torch.__version__)
