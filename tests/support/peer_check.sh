#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a check where a Python has these modules (peer.sh), for at most so many seconds; 0: as long as Meson lets it.
# peer_check.sh SECONDS "MODULES" CHECK.py ARGUMENT...
set -u
seconds=$1 modules=$2
shift 2
. "$(dirname "$0")/peer.sh"
peer_with $modules
exec timeout "$seconds" "$python" "$@"
