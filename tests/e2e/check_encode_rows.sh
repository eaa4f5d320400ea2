#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_encode_rows.py with $ND_PEER_PYTHON, which may have tokenizers, transformers, pyarrow and
# zstandard, or python3.
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec timeout 280 "${ND_PEER_PYTHON:-python3}" "$(dirname "$0")/check_encode_rows.py" "$@"
