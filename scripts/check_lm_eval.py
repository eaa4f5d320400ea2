#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare the scores of `ndtrain eval` with those of lm-evaluation-harness, example by example, in FP32.

  python scripts/check_lm_eval.py MODEL REQUESTS.jsonl RESULTS.jsonl NDTRAIN

REQUESTS.jsonl has rows with "context", "choices" and "gold"; RESULTS.jsonl is what `NDTRAIN eval --model MODEL --requests
REQUESTS.jsonl --precision fp32 --jsonl` printed. Here lm_eval makes a task of the same rows, without a network, and scores it
twice: with its own model of transformers (hf), and with NDTRAIN behind lm_eval_ndtrain.py (--serve-stdin). Of each row all
three must have the same acc and acc_norm, the same greedy marks, and log-likelihoods within 1e-4 x their tokens.

The Python needs lm_eval, torch and transformers (pip install lm_eval torch transformers). Exit status: 0 equal, 1 different,
2 cannot be compared, 77 this Python has no lm_eval.
"""
import json
import os
import pathlib
import sys
import tempfile

BOUND_PER_TOKEN = 1e-4  # as in check_generate.py
TASK = """
task: nd_rows
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}, {metric: acc_norm, aggregation: mean, higher_is_better: true}]
"""


class Different(Exception):
    pass


def rows_of(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines() if line.strip()]


def scored_by_lm_eval(lm_eval, manager, **model):
    """[{scores: [(log-likelihood, greedy)], acc, acc_norm}] in the order of the rows."""
    results = lm_eval.simple_evaluate(tasks=["nd_rows"], task_manager=manager, log_samples=True, bootstrap_iters=0, **model)
    samples = sorted(results["samples"]["nd_rows"], key=lambda sample: sample["doc_id"])
    return [{"scores": [tuple(resp) for resp in sample["filtered_resps"]], "acc": sample["acc"], "acc_norm": sample["acc_norm"]}
            for sample in samples]


def own_scores(results):
    return [{"scores": list(zip(row["log_likelihoods"], row["greedy"])), "acc": row["acc"], "acc_norm": row["acc_norm"]} for row in results]


def compare(name, rows, others, tokens_of):
    if len(rows) != len(others):
        raise Different(f"{name} has {len(others)} rows, lm_eval {len(rows)}")
    for i, (row, other) in enumerate(zip(rows, others)):
        for k, ((value, greedy), (own, own_greedy)) in enumerate(zip(row["scores"], other["scores"], strict=True)):
            if not abs(float(value) - own) <= BOUND_PER_TOKEN * tokens_of(i, k):
                raise Different(f"row {i}, choice {k}: {name} gives {own:.9g}, lm_eval {float(value):.9g}")
            if bool(greedy) != bool(own_greedy):
                raise Different(f"row {i}, choice {k}: greedy is {own_greedy} by {name}, {greedy} by lm_eval")
        if (row["acc"], row["acc_norm"]) != (other["acc"], other["acc_norm"]):
            raise Different(f"row {i}: acc and acc_norm are {other['acc']} and {other['acc_norm']} by {name}, {row['acc']} and "
                            f"{row['acc_norm']} by lm_eval")


def check(lm_eval, folder, model, requests, results, program):
    from lm_eval.tasks import TaskManager
    from lm_eval_ndtrain import Server, model_of
    from transformers import AutoTokenizer

    (folder / "rows.yaml").write_text(TASK % json.dumps(str(pathlib.Path(requests).resolve())))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    theirs = scored_by_lm_eval(lm_eval, manager, model="hf", model_args={"pretrained": model, "dtype": "float32", "prefix_token_id": 0}, device="cpu",
                               batch_size=1)
    server = Server(model, ["--precision", "fp32"], program)
    served = scored_by_lm_eval(lm_eval, manager, model=model_of(server))
    if server.close() != 0:
        raise Different("ndtrain eval --serve-stdin did not end with 0")
    tokenizer, rows = AutoTokenizer.from_pretrained(model), rows_of(requests)
    tokens_of = lambda i, k: len(tokenizer.encode(rows[i]["choices"][k], add_special_tokens=False))
    *own, _ = results
    compare("ndtrain eval --requests", theirs, own_scores(own), tokens_of)
    compare("ndtrain eval --serve-stdin", theirs, served, tokens_of)
    print(f"check_lm_eval: {len(theirs)} rows have the scores of lm_eval {lm_eval.__version__}, "
          f"acc {sum(row['acc'] for row in theirs) / len(theirs):.3g}")


def main():
    if len(sys.argv) != 5:
        print(__doc__, file=sys.stderr)
        return 2
    _, model, requests, results, program = sys.argv
    with tempfile.TemporaryDirectory() as name:
        # Before lm_eval and what it imports: nothing is fetched, and nothing is left in the user's caches.
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=name, TOKENIZERS_PARALLELISM="false")
        try:
            import lm_eval
        except ImportError:
            print("check_lm_eval: skipped, as this Python has no lm_eval (pip install lm_eval)")
            return 77
        try:
            check(lm_eval, pathlib.Path(name), model, requests, rows_of(results), program)
        except Different as e:
            print(f"check_lm_eval: {e}", file=sys.stderr)
            return 1
        except (ImportError, OSError, ValueError, KeyError, RuntimeError) as e:
            print(f"check_lm_eval: cannot compare: {e}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
