# SPDX-License-Identifier: Apache-2.0
"""Goldens of single ops: PyTorch in F64, rounded to F32, so that they are the exact result to half a unit in the last
place; rotary tables and the rotation come from transformers' own functions.

One file, ops.safetensors; names are <op>.<tensor>, or <op>.<case>.<tensor>.
"""
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

ROPE_CASES = {
    "default": dict(rope_type="default", rope_theta=10000.0),
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    "llama3": dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64),
}

# (B, Sq, Sk, H, K, D, diag): key j is visible to query i when j <= i + diag.
ATTENTION_CASES = {
    "causal": (2, 9, 9, 4, 2, 8, 0),
    "bottom_right": (1, 5, 11, 6, 2, 8, 6),
    "unmasked": (2, 4, 7, 4, 4, 8, 7),
    "first_rows_blind": (1, 6, 4, 4, 1, 16, -2),
}


class Source:
    """Seeded inputs: F32 values, handed out in F64 with gradients on."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def values(self, *shape, scale=1.0):
        return (scale * torch.randn(shape, generator=self.generator)).double().requires_grad_()

    def integers(self, low, high, *shape):
        return torch.randint(low, high, shape, generator=self.generator)


def rmsnorm(source):
    x, delta, dres = source.values(7, 24), source.values(7, 24), source.values(7, 24)
    weight, dy = source.values(24), source.values(7, 24)
    # The op stores the sum in the activation dtype before it normalises it: F32 here.
    total = (x + delta).detach().float().double().requires_grad_()
    eps = 1e-5
    y = functional.rms_norm(total, (24,), weight, eps)
    (y * dy).sum().backward()
    rstd = (total.detach().square().mean(1) + eps).rsqrt()
    return dict(x=x, delta=delta, weight=weight, dy=dy, dres=dres, sum=total, y=y, rstd=rstd,
                dx=total.grad + dres, dweight=weight.grad)


def rope(source):
    tensors = {}
    heads, dim, positions = 3, 16, 160
    x, dout = source.values(11, heads, dim), source.values(11, heads, dim)
    rows = source.integers(0, positions, 11)
    tensors |= dict(x=x, dout=dout, positions=rows.int())
    for case, parameters in ROPE_CASES.items():
        config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=dim, max_position_embeddings=1024,
                             rope_parameters=dict(parameters))
        rotary = LlamaRotaryEmbedding(config)
        cos, sin = rotary(torch.zeros(1), torch.arange(positions)[None])
        x.grad = None
        q = x.transpose(0, 1)[None]  # (1, heads, n, D)
        out, _ = apply_rotary_pos_emb(q, q, cos[:, rows].double(), sin[:, rows].double())
        out = out[0].transpose(0, 1)
        (out * dout).sum().backward()
        tensors |= {f"{case}.inv_freq": rotary.inv_freq, f"{case}.cos": cos[0, :, : dim // 2],
                    f"{case}.sin": sin[0, :, : dim // 2], f"{case}.out": out, f"{case}.dx": x.grad.clone()}
    return tensors


def swiglu(source):
    gate, up, dout = source.values(5, 13, scale=3.0), source.values(5, 13), source.values(5, 13)
    out = functional.silu(gate) * up
    (out * dout).sum().backward()
    return dict(gate=gate, up=up, dout=dout, out=out, dgate=gate.grad, dup=up.grad)


def attention_case(source, batch, sq, sk, heads, kv_heads, dim, diag):
    """Values in our layout (B, S, H, D); a query that sees no key gives 0 and an LSE of minus infinity."""
    q, dout = source.values(batch, sq, heads, dim), source.values(batch, sq, heads, dim)
    k, v = source.values(batch, sk, kv_heads, dim), source.values(batch, sk, kv_heads, dim)
    blind = max(0, -diag)
    visible = torch.arange(sk)[None, :] <= torch.arange(sq)[:, None] + diag
    seeing = functional.scaled_dot_product_attention(
        q[:, blind:].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible[blind:],
        scale=dim ** -0.5, enable_gqa=True).transpose(1, 2)
    out = torch.cat([torch.zeros(batch, blind, heads, dim, dtype=torch.float64), seeing], dim=1)
    (out * dout).sum().backward()
    keys = k.detach().repeat_interleave(heads // kv_heads, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.detach(), keys) * dim ** -0.5
    lse = scores.masked_fill(~visible, float("-inf")).logsumexp(-1)
    delta = (out * dout).sum(-1).transpose(1, 2)
    return dict(q=q, k=k, v=v, dout=dout, out=out, lse=lse, delta=delta, dq=q.grad, dk=k.grad, dv=v.grad,
                extents=torch.tensor([batch, sq, sk, heads, kv_heads, dim, diag], dtype=torch.int32))


def attention(source):
    tensors = {}
    for case, extents in ATTENTION_CASES.items():
        tensors |= {f"{case}.{key}": value for key, value in attention_case(source, *extents).items()}
    return tensors


def cross_entropy(source):
    """13 columns, the last two padding; rows 2 and 6 are not counted. dlogits is for the mean over counted rows."""
    rows, columns, valid = 9, 13, 11
    logits = source.values(rows, columns, scale=4.0)
    labels = source.integers(0, valid, rows)
    labels[2] = labels[6] = -100
    loss = functional.cross_entropy(logits[:, :valid], labels, ignore_index=-100)
    loss.backward()
    return dict(logits=logits, labels=labels.int(), loss=loss.reshape(1), dlogits=logits.grad)


def embedding(source):
    table, dout = source.values(10, 6), source.values(8, 6)
    ids = torch.tensor([3, 9, 3, 0, 7, 3, 9, 1])
    out = functional.embedding(ids, table)
    (out * dout).sum().backward()
    return dict(table=table, ids=ids.int(), dout=dout, out=out, dtable=table.grad)


def optimizer(source, decay):
    """Five steps; the gradient of the fourth is zero, and one element's is always zero."""
    start, grads = source.values(6).detach(), source.values(5, 6).detach()
    grads[3] = 0
    grads[:, 2] = 0
    tensors = dict(start=start, grads=grads)
    for name, make in {
        "adamw": lambda p: torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay),
        "sgd": lambda p: torch.optim.SGD([p], lr=1e-2, weight_decay=decay),
    }.items():
        p = start.clone().requires_grad_()
        rule = make(p)
        for g in grads:
            p.grad = g.clone()
            rule.step()
        tensors[f"{name}.p"] = p
        if name == "adamw":
            tensors |= {"adamw.m": rule.state[p]["exp_avg"], "adamw.v": rule.state[p]["exp_avg_sq"]}
    return tensors


def make(folder):
    groups = dict(
        rmsnorm=rmsnorm(Source(1)), rope=rope(Source(2)), swiglu=swiglu(Source(3)), attention=attention(Source(4)),
        cross_entropy=cross_entropy(Source(5)), embedding=embedding(Source(6)),
        optimizer_decay=optimizer(Source(7), 0.1), optimizer_plain=optimizer(Source(7), 0.0))
    tensors = {}
    for group, entries in groups.items():
        for key, value in entries.items():
            value = value.detach()
            tensors[f"{group}.{key}"] = (value.float() if value.is_floating_point() else value).contiguous()
    save_file(tensors, folder / "ops.safetensors")
