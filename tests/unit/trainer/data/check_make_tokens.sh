#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_make_tokens.py where a Python has tokenizers (tests/support/peer.sh).
set -u
here=$(dirname "$0")
. "$here/../../../support/peer.sh"
peer_with tokenizers
exec timeout 540 "$python" "$here/check_make_tokens.py" "$@"
