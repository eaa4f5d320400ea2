#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds on a host with GPUs, checks every op and whole runs there, and measures them: scripts/gpu_check.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."
if ! python=$(python3 -c 'import sys; print(sys.executable)'); then
    echo "gpu_check: python3 is missing; install Python 3.9 or newer" >&2
    exit 2
fi
exec "$python" -B scripts/gpu/check.py "$@"
