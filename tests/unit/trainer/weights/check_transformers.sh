#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_transformers.py where a Python has torch, transformers and safetensors (tests/support/peer.sh).
set -u
here=$(dirname "$0")
. "$here/../../../support/peer.sh"
peer_with torch transformers safetensors
exec timeout 540 "$python" "$here/check_transformers.py" "$@"
