#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_torch.py where a Python has torch, transformers, safetensors and numpy (tests/support/peer.sh).
set -u
here=$(dirname "$0")
. "$here/../../../support/peer.sh"
peer_with torch transformers safetensors numpy
exec timeout 540 "$python" "$here/check_torch.py" "$@"
