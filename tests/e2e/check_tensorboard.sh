#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_tensorboard.py where a Python has tensorboard (tests/support/peer.sh).
set -u
here=$(dirname "$0")
. "$here/../support/peer.sh"
peer_with tensorboard
# Meson has malloc fill memory. That is for our programs; the reader of event files takes megabytes for each file that it opens.
export ND_PERTURB=${MALLOC_PERTURB_:-0}
exec env MALLOC_PERTURB_=0 timeout 280 "$python" "$here/check_tensorboard.py" "$@"
