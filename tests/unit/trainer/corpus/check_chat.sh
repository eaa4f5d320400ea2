#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_chat.py where a Python has transformers (tests/support/peer.sh).
set -u
here=$(dirname "$0")
. "$here/../../../support/peer.sh"
peer_with tokenizers transformers
exec "$python" "$here/check_chat.py" "$@"
