#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time torch's distributed checkpoints of the tensors of a checkpoint of ours, sharded over the ranks, to compare with.

  python -m torch.distributed.run --standalone --nproc-per-node 2 scripts/bench_dcp_peer.py FOLDER CHECKPOINT

Names and shapes are those of CHECKPOINT/manifest.json: of each parameter the F32 master weight and both moments, and the number
of updates as a tensor without dimensions. Each rank holds a part of the first dimension of each tensor.

Rank 0 prints one JSON line: how many tensors and bytes they are, a synchronous save until it is durable, how long async_save holds its caller, a load into the
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


def read_shapes(checkpoint):
    """Name -> shape of every tensor in the state of a checkpoint of ours; a shape of no dimensions is a number of updates."""
    manifest = json.loads((pathlib.Path(checkpoint) / "manifest.json").read_text())
    shapes = {}
    for name, tensor in manifest["tensors"].items():
        for array in manifest["state"]["arrays"]:
            shapes[name if array == "master" else f"optimizer.state.{name}.{array}"] = tuple(tensor["shape"])
        if len(manifest["state"]["arrays"]) > 1:
            shapes[f"optimizer.state.{name}.step"] = ()
    return shapes


def make_state(shapes, mesh):
    return {name: distribute_tensor(torch.randn(shape), mesh, [Shard(0)]) if shape else torch.zeros(()) for name, shape in shapes.items()}


def untouched_state(state):
    """The same tensors in memory that nobody has touched."""
    return {name: DTensor.from_local(torch.empty_like(tensor.to_local()), tensor.device_mesh, tensor.placements, shape=tensor.shape,
                                     stride=tensor.stride()) if isinstance(tensor, DTensor) else torch.zeros(())
            for name, tensor in state.items()}


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
    shapes = read_shapes(sys.argv[2])
    state = make_state(shapes, mesh)

    def save(name):
        dcp.save(state, checkpoint_id=folder / name)
        if dist.get_rank() == 0:
            sync_folder(folder / name)

    timed(lambda: save("warm"))
    save_ms, _ = timed(lambda: save("sync"))
    async_ms, future = timed(lambda: dcp.async_save(state, checkpoint_id=folder / "async"))
    future.result()
    load_ms, _ = timed(lambda: dcp.load(state, checkpoint_id=folder / "sync"))
    fresh = untouched_state(state)
    fresh_ms, _ = timed(lambda: dcp.load(fresh, checkpoint_id=folder / "sync"))
    if dist.get_rank() == 0:
        size = sum(4 * torch.Size(shape).numel() for shape in shapes.values())
        print(json.dumps(dict(tensors=len(shapes), bytes=size, save_ms=save_ms, async_blocked_ms=async_ms, load_ms=load_ms, load_fresh_ms=fresh_ms)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
