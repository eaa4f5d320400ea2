#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time torch's scaled_dot_product_attention on CPU, to compare ndtrain with: causal, forward, BF16, one sequence.

  python scripts/bench_attention_peer.py --threads 2 --sequence 8192 --heads 2 --head-dim 64 --head-dim 128 --repeats 3

Prints one JSON line: the seconds of each repeat for each head size, after one call that does not count.
"""
import argparse
import json
import time

import torch


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("threads", "sequence", "heads", "repeats"):
        p.add_argument(f"--{name}", type=int, required=True)
    p.add_argument("--head-dim", type=int, action="append", required=True)
    return p.parse_args()


def main():
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    seconds = []
    for head_dim in arguments.head_dim:
        q, k, v = (torch.rand(1, arguments.heads, arguments.sequence, head_dim, dtype=torch.bfloat16) - 0.5 for _ in range(3))
        times = []
        with torch.no_grad():
            for _ in range(arguments.repeats + 1):
                begin = time.perf_counter()
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                times.append(time.perf_counter() - begin)
        seconds.append(times[1:])
    print(json.dumps(dict(peer=f"torch {torch.__version__}", seconds=seconds)), flush=True)


if __name__ == "__main__":
    main()
