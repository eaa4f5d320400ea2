#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_torch.py with a Python that has torch, transformers, safetensors and numpy: $ND_PEER_PYTHON, or python3.
# Without one it says so and is skipped (exit status 77). With CI=true a $ND_PEER_PYTHON that lacks them is a failure.
set -u
python=${ND_PEER_PYTHON:-python3}
here=$(dirname "$0")
if ! why=$("$python" -c 'import torch, transformers, safetensors, numpy' 2>&1); then
    echo "skipped: $python has no torch, transformers, safetensors and numpy; set ND_PEER_PYTHON to one that has"
    if [ -n "${ND_PEER_PYTHON:-}" ] && [ "${CI:-}" = true ]; then
        echo "failed: ND_PEER_PYTHON is set, but cannot be used: ${why##*$'\n'}"
        exit 1
    fi
    exit 77
fi
exec timeout 540 "$python" "$here/check_torch.py" "$@"
