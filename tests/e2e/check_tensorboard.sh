#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_tensorboard.py where a Python has tensorboard (tests/support/peer.sh).
set -u
here=$(dirname "$0")
. "$here/../support/peer.sh"
peer_with tensorboard
exec timeout 280 "$python" "$here/check_tensorboard.py" "$@"
