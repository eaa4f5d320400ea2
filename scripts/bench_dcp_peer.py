#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time torch's distributed checkpoints of 56 M parameters and two moments in F32, sharded over the ranks, to compare with.

  python -m torch.distributed.run --standalone --nproc-per-node 2 scripts/bench_dcp_peer.py FOLDER

Rank 0 prints one JSON line: a synchronous save until it is durable, how long async_save holds its caller, a load into the
tensors that were saved, and a load into tensors whose memory nobody has touched, which is what a resumed run of ours does.
"""
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

LAYERS, WIDTH = 24, 1080  # 24 x 2 x 1080 x 1080: 56.0 M


NAMES = [f"layers.{layer}.{name}.{kind}" for layer in range(LAYERS) for name in ("a", "b") for kind in ("w", "m", "v")]


def make_state(mesh):
    return {name: distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(0)]) for name in NAMES}


def untouched_state(mesh):
    return {name: DTensor.from_local(torch.empty(WIDTH // mesh.size(), WIDTH), mesh, [Shard(0)]) for name in NAMES}


def sync_folder(folder):
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def timed(call):
    dist.barrier()
    begin = time.perf_counter()
    result = call()
    dist.barrier()
    return (time.perf_counter() - begin) * 1e3, result


def main():
    folder = pathlib.Path(sys.argv[1])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = make_state(mesh)

    def save(name):
        dcp.save(state, checkpoint_id=folder / name)
        if dist.get_rank() == 0:
            sync_folder(folder / name)

    timed(lambda: save("warm"))
    save_ms, _ = timed(lambda: save("sync"))
    async_ms, future = timed(lambda: dcp.async_save(state, checkpoint_id=folder / "async"))
    future.result()
    load_ms, _ = timed(lambda: dcp.load(state, checkpoint_id=folder / "sync"))
    fresh = untouched_state(mesh)
    fresh_ms, _ = timed(lambda: dcp.load(fresh, checkpoint_id=folder / "sync"))
    if dist.get_rank() == 0:
        print(json.dumps(dict(save_ms=save_ms, async_blocked_ms=async_ms, load_ms=load_ms, load_fresh_ms=fresh_ms)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
