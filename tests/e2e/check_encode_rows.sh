#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_encode_rows.py, with what a Python has of tokenizers, transformers, pyarrow and zstandard (tests/support/peer.sh).
set -u
here=$(dirname "$0")
. "$here/../support/peer.sh"
peer_with
exec timeout 280 "$python" "$here/check_encode_rows.py" "$@"
