# SPDX-License-Identifier: Apache-2.0
"""Multiple choice as the real lm-evaluation-harness scores it: its HFLM on the CPU in F32, on a small model of transformers.

The golden folder holds the model (config.json, weights.json, from which its weights are drawn, tokenizer.json, tokenizer_config.json) and
  plain.jsonl, special.jsonl   rows of tasks as `ndtrain eval --requests` reads them: "context", "choices", "gold", "delimiter"
  plain.json, special.json     for each row what lm_eval gives: "log_likelihoods" and "is_greedy" of its choices, "acc", "acc_norm"; and
                               "bounds" and "deviations", how far each log-likelihood may be, and is as a rule, from that of another
                               program that computes in F32 (class Bound)
"plain" is scored without a beginning of text (add_bos_token=False), "special" with the one that the tokenizer adds, which lm_eval 0.4.13
does by itself, and ndtrain with --add-special-tokens.

The weights are random, as the scores need no trained model. So that all marks occur, a choice is sometimes what the model goes on
with. Rows in which the best choice or the likeliest token leads by less than the bounds are left out: another order of sums may
turn them round. Two equal choices stay in, of which the first must win.
"""
import json
import os
import pathlib
import random
import shutil
import tempfile

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from goldens import draw

U = 2.0**-24
ROWS = 40
TOKENIZER = pathlib.Path(__file__).resolve().parents[2] / "tests/unit/trainer/text/goldens/llama3.json"
CONFIG = dict(vocab_size=430, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=421, eos_token_id=420,
              rope_parameters=dict(rope_type="default", rope_theta=10000.0))
WORDS = ("the quick brown fox jumps over lazy dogs it's they're in1999 n42 pi=3.14159 caf\u00e9 na\u00efve \u00d6l \u041f\u0440\u0438\u0432\u0435\u0442 "
         "\u4f60\u597d \u3053\u3093 other mother gather; and, then? (total) += \n\n \U0001F600 e\u0301").split(" ")
TASK = """
task: rows
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
target_delimiter: "%s"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}, {metric: acc_norm, aggregation: mean, higher_is_better: true}]
"""


class Bound:
    """
    How far a log-likelihood in F32 may be from the exact one, to first order and in the worst case, with no number fitted to results.

    Each place of the forward pass gives a value that is off by at most d: u times the size of the terms for each addition and product in
    it, for sums of n terms in any order (n + 1) u sum |a b| (Higham, Accuracy and Stability, 3.5), and 4 u relative for an exponential,
    a sine or a root. The score changes by its derivative times that, computed in F64: bound = sum |g| d over all places. Where the
    roundings of a sum are independent, its deviation is that of n values within u, at most d / sqrt(3 n), and the score's is
    sqrt(sum g^2 d^2 / 3 n). Another program has its own roundings: twice the bound, and sqrt(2) times the deviation.
    """

    def __init__(self, model):
        self.config = model.config
        self.weights = {name: w.detach().double() for name, w in model.state_dict().items()}
        self.frequencies = model.model.rotary_emb.inv_freq.double()
        self.places = []

    def off(self, x, d, terms=1):
        e = torch.zeros_like(x, requires_grad=True)
        self.places.append((e, d.detach(), (3 * terms) ** -0.5))
        return x + e

    def norm(self, x, weight):
        y = x * (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * weight
        return self.off(y, (x.shape[-1] / 2 + 8) * U * y.abs())

    def product(self, a, b):
        return self.off(a @ b, (a.shape[-1] + 1) * U * (a.abs() @ b.abs()), a.shape[-1])

    def linear(self, x, name):
        return self.product(x, self.weights[name + ".weight"].T)

    def sum(self, a, b):
        return self.off(a + b, U * (a + b).abs())

    def rotated(self, x):
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1]).double()[:, None] * self.frequencies
        cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        error = (6 * angles + 6) * U  # of an angle, by its frequency and product, and of sine and cosine, products and sum
        return self.off(x * cos + turned * sin, torch.cat((error, error), -1) * (x.abs() + turned.abs()))

    def attention(self, h, prefix):
        c, tokens = self.config, h.shape[0]
        heads = lambda name: self.linear(h, f"{prefix}.{name}_proj").view(tokens, -1, c.head_dim).transpose(0, 1)  # (heads, T, D)
        q, k, v = self.rotated(heads("q")), self.rotated(heads("k")), heads("v")
        k, v = (x.repeat_interleave(c.num_attention_heads // c.num_key_value_heads, 0) for x in (k, v))
        scores = self.product(q, k.transpose(1, 2)) / c.head_dim**0.5
        scores = self.off(scores, 2 * U * scores.abs())
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
        p = torch.softmax(scores, -1)
        below = (scores.max(-1, keepdim=True).values - scores).nan_to_num(posinf=0)
        p = self.off(p, p * (tokens + 10 + below) * U)
        return self.linear(self.product(p, v).transpose(0, 1).reshape(tokens, -1), f"{prefix}.o_proj")

    def log_probabilities(self, ids):
        w = self.weights
        x = w["model.embed_tokens.weight"][torch.tensor(ids)]
        for i in range(self.config.num_hidden_layers):
            block = f"model.layers.{i}"
            x = self.sum(x, self.attention(self.norm(x, w[f"{block}.input_layernorm.weight"]), f"{block}.self_attn"))
            h = self.norm(x, w[f"{block}.post_attention_layernorm.weight"])
            gate, up = self.linear(h, f"{block}.mlp.gate_proj"), self.linear(h, f"{block}.mlp.up_proj")
            y = torch.nn.functional.silu(gate) * up
            x = self.sum(x, self.linear(self.off(y, (8 + gate.abs()) * U * y.abs()), f"{block}.mlp.down_proj"))
        logits = self.product(self.norm(x, w["model.norm.weight"]), w["lm_head.weight"].T)
        return torch.log_softmax(logits, -1), logits

    def score(self, ids, begin):
        """(log-likelihood of ids[begin:] behind the others, bound, deviation, whether all are the likeliest, how far those lead)."""
        with torch.enable_grad():
            self.places = []
            rows, logits = (x[begin - 1:] for x in self.log_probabilities(ids[:-1]))
            wanted = torch.tensor(ids[begin:])[:, None]
            each = rows.gather(1, wanted)
            value = each.sum()
            gradients = torch.autograd.grad(value, [place[0] for place in self.places], retain_graph=True)
        # The logarithm of a sum over the vocabulary, the differences, and the sum over tokens.
        spread = (logits.max(-1, keepdim=True).values - logits).gather(1, wanted)
        ends = U * (logits.shape[-1] + 10 + spread.abs() + (each.shape[0] + 2) * each.abs())
        bound = ends.sum().item() + sum((g.abs() * d).sum().item() for g, (_, d, _) in zip(gradients, self.places))
        square = ends.pow(2).sum().item() + sum((g * d * share).pow(2).sum().item() for g, (_, d, share) in zip(gradients, self.places))
        best = logits.topk(2, -1).values
        return value.item(), 2 * bound, (2 * square) ** 0.5, bool((logits.argmax(-1)[:, None] == wanted).all()), (best[:, 0] - best[:, 1]).min().item()


def build():
    model = LlamaForCausalLM(LlamaConfig(use_cache=False, **CONFIG))
    return draw.fill(model, 4009, lambda _, p: (1.0, 0.2) if p.dim() == 1 else (0.0, p.shape[1] ** -0.5)).eval()


def encode_pair(tokenizer, context, continuation, special):
    """lm_eval.api.model.TemplateLM._encode_pair of a causal model, and its prefix for an empty context."""
    if not context:
        return [CONFIG["bos_token_id"]] + tokenizer.encode(continuation, add_special_tokens=False), 1
    blanks = len(context) - len(context.rstrip())
    if blanks > 0:
        continuation = context[-blanks:] + continuation
        context = context[:-blanks]
    whole, part = (tokenizer.encode(text, add_special_tokens=special) for text in (context + continuation, context))
    return whole, len(part)


def goes_on(model, tokenizer, ids, count):
    """The text of the likeliest tokens, or None where it is not text, or reads back as other tokens."""
    begin = len(ids)
    for _ in range(count):
        ids = ids + [model(torch.tensor([ids])).logits[0, -1].argmax().item()]
    text = tokenizer.decode(ids[begin:])
    return text if tokenizer.encode(text, add_special_tokens=False) == ids[begin:] and "\ufffd" not in text else None


def random_row(g, model, tokenizer, delimiter, special):
    context = "".join(g.choice(WORDS) + g.choice([" ", " ", " ", ""]) for _ in range(g.choice([0, 1, 2, 3, 5, 8, 13, 30])))
    choices = [g.choice(WORDS) + g.choice(["", " ", "s "]) + g.choice(WORDS[:9]) * g.randint(0, 1) for _ in range(g.randint(2, 5))]
    if g.random() < 0.3:
        choices[1] = choices[0] + choices[1]  # they begin alike
    ids, _ = encode_pair(tokenizer, context + delimiter if delimiter and context else context, "", special)
    text = goes_on(model, tokenizer, ids[-CONFIG["max_position_embeddings"] + 3:], g.randint(1, 3))
    if text and text.strip():
        choices[-1] = text
    g.shuffle(choices)
    if g.random() < 0.1:
        choices.append(choices[0])
    return {"context": context, "delimiter": delimiter, "choices": choices, "gold": 0}


def is_clear(values, bounds):
    """Whether the best leads by more than the bounds, or is another one's equal."""
    best = max(range(len(values)), key=values.__getitem__)
    return all(values[best] == value or values[best] - value > bounds[best] + bound for value, bound in zip(values, bounds))


def scored(bound, tokenizer, row, special):
    """[(score, bound, deviation, greedy)] of the choices in exact arithmetic; None: too close to call, or a choice without tokens."""
    out = []
    for choice in row["choices"]:
        ids, begin = encode_pair(tokenizer, row["context"], row["delimiter"] + choice, special)
        ids, cut = ids[-CONFIG["max_position_embeddings"] - 1:], max(0, len(ids) - CONFIG["max_position_embeddings"] - 1)
        if not choice or len(ids) <= begin - cut or begin - cut < 1:
            return None
        *score, lead = bound.score(ids, begin - cut)
        if lead < score[1]:
            return None
        out.append(score)
    values, bounds, *_ = zip(*out)
    norms = [value / len(choice) for value, choice in zip(values, row["choices"])]
    return out if is_clear(values, bounds) and is_clear(norms, [b / len(c) for b, c in zip(bounds, row["choices"])]) else None


def make_rows(model, tokenizer, delimiter, special):
    g, bound, rows, scores = random.Random(17 + special), Bound(model), [], []
    while len(rows) < ROWS:
        row = random_row(g, model, tokenizer, delimiter, special)
        exact = scored(bound, tokenizer, row, special)
        if exact:
            best = max(range(len(exact)), key=lambda k: exact[k][0])
            row["gold"] = g.choice([best, g.randrange(len(exact))])
            rows.append(row)
            scores.append(exact)
    return rows, scores


def score_by_lm_eval(folder, rows, delimiter, special):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (work / "rows.yaml").write_text(TASK % (json.dumps(str(work / "rows.jsonl")), delimiter))
        model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1, add_bos_token=special)
        results = lm_eval.simple_evaluate(model=model, tasks=["rows"], task_manager=TaskManager(include_path=name, include_defaults=False),
                                          log_samples=True, bootstrap_iters=0)
    for sample in sorted(results["samples"]["rows"], key=lambda sample: sample["doc_id"]):
        values = [tuple(response) for response in sample["filtered_resps"]]
        yield {"log_likelihoods": [float(value) for value, _ in values], "is_greedy": [bool(greedy) for _, greedy in values],
               "acc": int(sample["acc"]), "acc_norm": int(sample["acc_norm"])}


def make_set(folder, saved, model, name, delimiter, special):
    rows, exact = make_rows(model, AutoTokenizer.from_pretrained(saved), delimiter, special)
    theirs, farthest, spread = list(score_by_lm_eval(saved, rows, delimiter, special)), 0.0, 0.0
    for row, own, other in zip(rows, exact, theirs, strict=True):
        _, other["bounds"], other["deviations"], greedy = map(list, zip(*own))
        assert other["is_greedy"] == greedy, (row, own, other)
        for (value, bound, deviation, _), their in zip(own, other["log_likelihoods"]):
            farthest, spread = max(farthest, abs(value - their) / bound), max(spread, abs(value - their) / deviation)
    assert farthest <= 0.5, f"lm_eval is off by {farthest} of the bounds of two programs"
    bounds = [bound for other in theirs for bound in other["bounds"]]
    print(f"choices, {name}: bounds {min(bounds):.2g} to {max(bounds):.2g}, lm_eval off by {farthest:.2g} of them and {spread:.2g} "
          f"deviations; greedy {sum(sum(o['is_greedy']) for o in theirs)} of {len(bounds)}, acc {sum(o['acc'] for o in theirs)}, "
          f"acc_norm {sum(o['acc_norm'] for o in theirs)} of {len(rows)}")
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in theirs) + "\n]\n")


def make(folder):
    torch.set_grad_enabled(False)
    model = build()
    draw.save(model, folder)
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|eot|>"}) + "\n")
    with tempfile.TemporaryDirectory() as caches:  # nothing is fetched, and nothing is left in the user's caches
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=caches, TOKENIZERS_PARALLELISM="false")
        saved = pathlib.Path(caches) / "model"
        model.save_pretrained(saved)
        shutil.copytree(folder, saved, dirs_exist_ok=True)
        make_set(folder, saved, model, "plain", "", False)
        make_set(folder, saved, model, "special", " ", True)
    torch.set_grad_enabled(True)
