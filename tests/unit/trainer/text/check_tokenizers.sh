#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_tokenizers.py with a Python that has tokenizers: $ND_PEER_PYTHON, or python3.
# Without one it says so and is skipped (exit status 77).
set -u
python=${ND_PEER_PYTHON:-python3}
here=$(dirname "$0")
if ! "$python" -c 'import tokenizers' 2>/dev/null; then
    echo "skipped: $python has no tokenizers; set ND_PEER_PYTHON to one that has"
    exit 77
fi
export TOKENIZERS_PARALLELISM=false
exec timeout 1780 "$python" "$here/check_tokenizers.py" "$@"
