#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run tasks of lm-evaluation-harness on a model, scored by `ndtrain eval --serve-stdin`.

  python scripts/lm_eval_ndtrain.py --model runs/small-1 --tasks arc_easy,hellaswag [--limit 100] [-- FLAGS OF ndtrain eval]

Tasks of multiple choice (loglikelihood) are supported; rolling log-likelihoods and generated answers are not. The Python
needs lm_eval (pip install lm_eval), which loads the tasks. The scores are printed as JSON.
"""
import argparse
import json
import pathlib
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).resolve().parent.parent / "build" / "ndtrain"


class Server:
    """One `ndtrain eval --serve-stdin`, which answers a line with a line."""

    def __init__(self, model, flags=(), program=PROGRAM):
        command = [str(program), "eval", "--model", str(model), "--serve-stdin", *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")

    def score(self, context, continuation):
        """(log-likelihood, whether each token is the likeliest)."""
        self.process.stdin.write(json.dumps({"context": context, "choices": [continuation]}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"ndtrain eval ended with {self.process.wait()}; see its message above")
        row = json.loads(line)
        if "error" in row:
            raise ValueError(row["error"])
        return row["log_likelihoods"][0], row["greedy"][0]

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait()


def model_of(server):
    from lm_eval.api.model import LM

    class NdtrainLM(LM):
        def loglikelihood(self, requests, disable_tqdm=False):
            return [server.score(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            raise NotImplementedError("lm_eval_ndtrain: tasks of rolling log-likelihoods; use `ndtrain eval --data` for a loss")

        def generate_until(self, requests, disable_tqdm=False):
            raise NotImplementedError("lm_eval_ndtrain: tasks of generated answers; only multiple choice is supported")

    return NdtrainLM()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="as for ndtrain eval")
    p.add_argument("--tasks", required=True, help="names of tasks, a comma list")
    p.add_argument("--limit", type=float, help="examples of each task, or a share of them")
    p.add_argument("flags", nargs="*", help="of ndtrain eval, behind --")
    o = p.parse_args()
    try:
        import lm_eval
    except ImportError:
        print("lm_eval_ndtrain: this Python has no lm_eval; pip install lm_eval", file=sys.stderr)
        return 2
    server = Server(o.model, o.flags)
    results = lm_eval.simple_evaluate(model=model_of(server), tasks=o.tasks.split(","), limit=o.limit)
    server.close()
    print(json.dumps(results["results"], indent=2, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
