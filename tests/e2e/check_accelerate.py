#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""accelerate's own configuration files, as they are, through --config-file: three steps of a tiny model."""
import json

import steps
from steps import SOURCE, check, test


def setup(t):
    t.text(8000)
    t.model(hidden_size=32, intermediate_size=72)


@test
def files_say_workers_mesh_precision_and_recompute(t):
    """Flags say model, data and length, which a file has no keys for."""
    for name, mesh, recompute in ("tp_hsdp", "2 x 2 x 1 x 2", "none"), ("cp", "1 x 1 x 8 x 1", "full"):
        file = SOURCE / f"tests/unit/runtime/config/fixtures/accelerate_{name}.yaml"
        t.run(f"ndlaunch --config-file {file} --device cpu --model-config model.json --data-path text.txt --sequence-length 64 "
              f"--num-steps 3 --save-dir {name} --save-model=false", says=f"8 workers, mesh {mesh}")
        check(len(t.metrics(name, "loss")) == 3, t.metrics(name))
        config = json.loads(t.read(f"{name}/run.json"))["config"]
        check((config["parallel.recompute"], config["train.precision"]) == (recompute, "bf16"), config)


@test
def a_strategy_as_a_flag_says_what_it_replaces(t):
    """Its strategy as a flag over a file with another mesh."""
    t.run(f"ndtrain check --config-file {SOURCE}/configs/tp_hsdp.yaml --device cpu --model-config model.json --data-path text.txt "
          "--validation-path '' --sequence-length 64 --fsdp-sharding-strategy HYBRID_SHARD",
          says=("--fsdp-sharding-strategy HYBRID_SHARD", "mesh.dp_replicate was 2 and is 1", "mesh.dp_shard was 2 and is -1 ("))


steps.main("accelerate", setup)
