#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_transformers.py with a Python that has torch, transformers and safetensors: $ND_PEER_PYTHON, or python3.
# Without one it says so and is skipped (exit status 77).
set -u
python=${ND_PEER_PYTHON:-python3}
here=$(dirname "$0")
if ! "$python" -c 'import torch, transformers, safetensors' 2>/dev/null; then
    echo "skipped: $python has no torch, transformers and safetensors; set ND_PEER_PYTHON to one that has"
    exit 77
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec timeout 540 "$python" "$here/check_transformers.py" "$@"
