#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_torch.py with a Python that has torch, safetensors and numpy: $ND_PEER_PYTHON, or python3.
# Without one it says so and is skipped (exit status 77).
set -u
python=${ND_PEER_PYTHON:-python3}
here=$(dirname "$0")
if ! "$python" -c 'import torch, safetensors, numpy' 2>/dev/null; then
    echo "skipped: $python has no torch, safetensors and numpy; set ND_PEER_PYTHON to one that has"
    exit 77
fi
exec timeout 540 "$python" "$here/check_torch.py" "$@"
