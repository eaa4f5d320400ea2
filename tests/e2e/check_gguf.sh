#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_gguf.py with a Python that has gguf, xllamacpp (a llama.cpp) and tokenizers (tests/support/peer.sh).
set -u
here=$(dirname "$0")
. "$here/../support/peer.sh"
peer_with gguf xllamacpp tokenizers
exec timeout 280 "$python" "$here/check_gguf.py" "$@"
