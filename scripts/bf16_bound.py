# SPDX-License-Identifier: Apache-2.0
"""How far a score of a Llama in BF16 may be from the same score in exact arithmetic.

docs/numerics.md names the places where a forward pass in BF16 rounds. Rounding a value x to BF16's 8 bits gives x (1 + e) with
|e| <= U = 2^-8. A score is a smooth function of all these e, so to first order its error is the sum of g_i e_i, where g_i is its
derivative by e_i, which is computed here in F64 by differentiating a forward pass that has a factor 1 + e_i at each place. Two
bounds follow, without a number that was fitted to results:

  worst   U sum |g_i|: all roundings at their largest, and each in the worse direction
  sigma   U sqrt(sum g_i^2 / 3): the standard deviation, where roundings are independent; an e that is uniform in [-U, U] has
          the variance U^2 / 3, and real ones have less, since only x just above a power of two has |e| up to U

Sums in F32 add about 2^-24 of the terms' sizes for each term, which is nothing beside 2^-8.
"""
import copy

U = 2.0**-8


def _rotated(torch, x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Scorer:
    """The model of transformers, whose weights are rounded to BF16 first, in F64."""

    def __init__(self, torch, model):
        self.torch, self.config = torch, model.config
        self.weights = {name: w.detach().to(torch.bfloat16).double() for name, w in model.state_dict().items()}
        self.rotary = copy.deepcopy(model.model.rotary_emb)  # model.to(bfloat16) would round its frequencies
        self.points = []

    def rounded(self, x):
        e = self.torch.zeros_like(x, requires_grad=True)
        self.points.append(e)
        return x * (1 + e)

    def norm(self, x, weight):
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return self.rounded(x * scale * weight)

    def linear(self, x, name):
        return self.rounded(x @ self.weights[name + ".weight"].T)

    def attention(self, h, prefix, cos, sin):
        torch, c = self.torch, self.config
        tokens, heads, kv_heads = h.shape[0], c.num_attention_heads, c.num_key_value_heads
        split = lambda x: x.view(tokens, -1, c.head_dim).transpose(0, 1)  # (heads, T, D)
        q, k, v = (split(self.linear(h, f"{prefix}.{name}_proj")) for name in "qkv")
        q, k = self.rounded(_rotated(torch, q, cos, sin)), self.rounded(_rotated(torch, k, cos, sin))
        k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) / c.head_dim**0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        # Not the sum below the fraction: it has the probabilities before they are rounded.
        mix = self.rounded(torch.softmax(scores.masked_fill(later, float("-inf")), -1)) @ v
        return self.linear(self.rounded(mix).transpose(0, 1).reshape(tokens, -1), f"{prefix}.o_proj")

    def logits(self, ids):
        torch, w = self.torch, self.weights
        x = w["model.embed_tokens.weight"][torch.tensor(ids)]
        cos, sin = (t[0].double() for t in self.rotary(x[None].float(), torch.arange(len(ids))[None]))
        for i in range(self.config.num_hidden_layers):
            block = f"model.layers.{i}"
            h = self.norm(x, w[f"{block}.input_layernorm.weight"])
            x = self.rounded(x + self.attention(h, f"{block}.self_attn", cos, sin))
            h = self.norm(x, w[f"{block}.post_attention_layernorm.weight"])
            gate, up = self.linear(h, f"{block}.mlp.gate_proj"), self.linear(h, f"{block}.mlp.up_proj")
            x = self.rounded(x + self.linear(self.rounded(torch.nn.functional.silu(gate) * up), f"{block}.mlp.down_proj"))
        return self.norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T  # F32, so not rounded

    def score(self, ids, begin):
        """(exact, worst, sigma) of the log-likelihood of ids[begin:] behind the ids before them."""
        torch = self.torch
        with torch.enable_grad():
            self.points = []
            rows = torch.log_softmax(self.logits(ids[:-1])[begin - 1 :], -1)
            value = rows.gather(1, torch.tensor(ids[begin:])[:, None]).sum()
            gradients = torch.autograd.grad(value, self.points)
        worst = U * sum(g.abs().sum().item() for g in gradients)
        return value.item(), worst, U * (sum(g.pow(2).sum().item() for g in gradients) / 3) ** 0.5
