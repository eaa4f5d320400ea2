#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare what `ndtrain generate` and `ndtrain eval --requests` give with what Hugging Face transformers gives.

  python scripts/check_generate.py greedy MODEL PROMPTS.jsonl RESULTS.jsonl     rows with "ids"; greedy, in FP32
  python scripts/check_generate.py choices MODEL REQUESTS.jsonl RESULTS.jsonl   rows with "context", "choices", "gold"
  python scripts/check_generate.py bf16 MODEL REQUESTS.jsonl RESULTS.jsonl      the same, with --precision bf16

RESULTS.jsonl is the output with --jsonl and, but for bf16, --precision fp32.

  greedy    every id must be the likeliest one after those before it; transformers' own generate continues the first five
            prompts too
  choices   each log-likelihood as lm-evaluation-harness defines it must be within 1e-4 x its tokens, and acc and acc_norm
            the same
  bf16      how far the log-likelihoods are from those of transformers in FP32, as a root mean square and at most, must be
            within 1.5 times what transformers itself is off in BF16 (.to(bfloat16)). And each must be within the bound of its
            roundings (bf16_bound.py) of the same score in F64 with weights in BF16, and within as many deviations of
            independent roundings as none of so many scores should pass

Several checks, each of four words, may stand one after the other. The Python needs torch and transformers. Exit status:
0 equal, 1 different, 2 cannot be compared.
"""
import json
import pathlib
import statistics
import sys

import bf16_bound

BOUND_PER_TOKEN = 1e-4  # of a log probability: 24 bits of logits below 2^8, summed over the vocabulary
FALSE_ALARM = 1e-4  # how likely a right program fails by chance
GENERATED = 5  # prompts that transformers' own generate continues, which is slow


class Different(Exception):
    pass


def rows_of(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines() if line.strip()]


def load(folder):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # the results were made with --ignore-eos
    model.generation_config.pad_token_id = 0
    return torch, model


def gap_at(torch, model, ids):
    """How far the likeliest token is above the second, after these ids."""
    best = torch.topk(model(torch.tensor([ids])).logits[0, -1], 2).values
    return (best[0] - best[1]).item()


def check_greedy(folder, prompts, results):
    torch, model = load(folder)
    if len(prompts) != len(results):
        raise Different(f"{len(prompts)} prompts, but {len(results)} results")
    tokens = 0
    for i, (prompt, result) in enumerate(zip(prompts, results)):
        own, theirs = result["ids"], prompt["ids"]
        inputs = torch.tensor([theirs])
        # The likeliest ids after the prompt and after each of our own: they are the same if and only if each of ours is greedy.
        expected = model(torch.tensor([theirs + own[:-1]])).logits[0, len(theirs) - 1 :].argmax(-1).tolist()
        if i < GENERATED:
            out = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=len(own))
            expected = out[0, len(theirs) :].tolist()
        if own != expected:
            at = next(k for k, (a, b) in enumerate(zip(own, expected)) if a != b)
            gap = gap_at(torch, model, theirs + expected[:at])
            raise Different(f"prompt {i}: token {at} is {own[at]}, in transformers {expected[at]}, which is {gap:.3g} above the second")
        tokens += len(own)
    print(f"check_generate: {len(prompts)} prompts, {tokens} ids equal to those of transformers")


def encode_pair(tokenizer, context, continuation):
    """lm_eval.api.model.TemplateLM._encode_pair of a causal model."""
    blanks = len(context) - len(context.rstrip())
    if blanks > 0:
        continuation = context[-blanks:] + continuation
        context = context[:-blanks]
    whole = tokenizer.encode(context + continuation, add_special_tokens=False)
    return whole, len(tokenizer.encode(context, add_special_tokens=False))


def score(torch, model, ids, begin):
    logits = torch.log_softmax(model(torch.tensor([ids[:-1]])).logits[0].double(), dim=-1)
    wanted = torch.tensor(ids[begin:])
    rows = logits[begin - 1 :]
    return rows.gather(1, wanted[:, None]).sum().item(), bool((rows.argmax(-1) == wanted).all())


def check_choices(folder, requests, results):
    from transformers import AutoTokenizer

    torch, model = load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    *rows, summary = results
    right = right_norm = 0
    for i, (request, row) in enumerate(zip(requests, rows, strict=True)):
        scores = []
        for k, choice in enumerate(request["choices"]):
            ids, begin = encode_pair(tokenizer, request["context"], request.get("delimiter", "") + choice)
            value, greedy = score(torch, model, ids, begin)
            scores.append(value)
            if abs(value - row["log_likelihoods"][k]) > BOUND_PER_TOKEN * (len(ids) - begin):
                raise Different(f"request {i}, choice {k}: {row['log_likelihoods'][k]:.9g}, in transformers {value:.9g}")
            if greedy != row["greedy"][k]:
                raise Different(f"request {i}, choice {k}: greedy is {row['greedy'][k]}, in transformers {greedy}")
        norms = [value / len(choice) for value, choice in zip(scores, request["choices"])]
        acc, acc_norm = (int(v.index(max(v)) == request["gold"]) for v in (scores, norms))
        if (acc, acc_norm) != (row["acc"], row["acc_norm"]):
            raise Different(f"request {i}: acc {row['acc']} and acc_norm {row['acc_norm']}, in transformers {acc} and {acc_norm}")
        right, right_norm = right + acc, right_norm + acc_norm
    if abs(summary["acc"] - right / len(rows)) > 1e-12 or abs(summary["acc_norm"] - right_norm / len(rows)) > 1e-12:
        raise Different(f"the summary is {summary}, but {right} and {right_norm} of {len(rows)} are right")
    print(f"check_generate: {len(rows)} requests scored as by transformers: acc {summary['acc']}, acc_norm {summary['acc_norm']}")


def root_mean_square(values):
    return (sum(v * v for v in values) / len(values)) ** 0.5


def check_bf16(folder, requests, results):
    from transformers import AutoTokenizer

    torch, model = load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [(encode_pair(tokenizer, request["context"], request.get("delimiter", "") + choice), value)
             for request, row in zip(requests, results) for choice, value in zip(request["choices"], row["log_likelihoods"])]
    exact = [score(torch, model, ids, begin)[0] for (ids, begin), _ in pairs]
    shares = check_bound(bf16_bound.Scorer(torch, model), pairs)
    model = model.to(torch.bfloat16)
    theirs = [score(torch, model, ids, begin)[0] - e for ((ids, begin), _), e in zip(pairs, exact)]
    own = [value - e for (_, value), e in zip(pairs, exact)]
    for name, size in (("root mean square", root_mean_square), ("at most", lambda values: max(map(abs, values)))):
        if not size(own) <= 1.5 * size(theirs):
            raise Different(f"log-likelihoods in BF16 are off by {size(own):.4g} ({name}), in transformers by {size(theirs):.4g}")
    print(f"check_generate: {len(pairs)} log-likelihoods in BF16 are off by {root_mean_square(own):.3g} (root mean square), "
          f"in transformers by {root_mean_square(theirs):.3g}; {shares}")


def check_bound(scorer, pairs):
    """Every fifth score, which takes a backward pass; and how much of the bounds the errors take."""
    errors = [(value, *scorer.score(ids, begin)) for (ids, begin), value in pairs[::5]]
    deviations = statistics.NormalDist().inv_cdf(1 - FALSE_ALARM / len(errors) / 2)
    worst = max(abs(value - exact) / most for value, exact, most, _ in errors)
    spread = [(value - exact) / sigma for value, exact, _, sigma in errors]
    farthest = max(map(abs, spread))
    if not (worst <= 1 and farthest <= deviations):
        raise Different(f"log-likelihoods in BF16 are off by up to {worst:.3g} of the bound of all roundings, and by {farthest:.3g} "
                        f"deviations of independent ones, which {deviations:.3g} bound")
    return (f"{worst:.2g} of the bound of their roundings, at most {farthest:.2g} of {deviations:.2g} deviations, "
            f"{root_mean_square(spread):.2g} as a rule")


def main():
    checks = {"greedy": check_greedy, "choices": check_choices, "bf16": check_bf16}
    wanted = [sys.argv[i:i + 4] for i in range(1, len(sys.argv), 4)]
    if not wanted or any(len(words) != 4 or words[0] not in checks for words in wanted):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        for name, folder, given, results in wanted:
            checks[name](folder, rows_of(given), rows_of(results))
    except Different as e:
        print(f"check_generate: {e}", file=sys.stderr)
        return 1
    except (ImportError, OSError, ValueError, KeyError) as e:
        print(f"check_generate: cannot compare: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
