#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_chat.py with a Python that has transformers: $ND_PEER_PYTHON, or python3. Without one it says so and is skipped
# (exit status 77).
set -u
python=${ND_PEER_PYTHON:-python3}
here=$(dirname "$0")
if ! "$python" -c 'import tokenizers, transformers' 2>/dev/null; then
    echo "skipped: $python has no transformers; set ND_PEER_PYTHON to one that has"
    exit 77
fi
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "$python" "$here/check_chat.py" "$@"
