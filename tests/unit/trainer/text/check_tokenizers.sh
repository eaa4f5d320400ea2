#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_tokenizers.py where a Python has tokenizers (tests/support/peer.sh).
set -u
here=$(dirname "$0")
. "$here/../../../support/peer.sh"
peer_with tokenizers
# What it may take: a part for the code points and patterns, and a second for each 5,000 random bytes of each tokenizer. An idle
# machine takes a fifth of that.
if [ "${3:-}" = all ]; then
    fixed=1500 ND_TEXT_BYTES=${ND_TEXT_BYTES:-1000000}
else
    fixed=300 ND_TEXT_BYTES=${ND_TEXT_BYTES:-200000}
fi
export ND_TEXT_BYTES
tokenizers=$(($(ls "$2"/*.json | grep -vc '\.cases\.json$') + $(tr ':' '\n' <<<"${ND_TEXT_FILES:-}" | grep -c .)))
seconds=$(((fixed + tokenizers * ND_TEXT_BYTES / 5000) * ${ND_TEST_TIME_FACTOR:-1}))
timeout "$seconds" "$python" "$here/check_tokenizers.py" "$@"
status=$?
[ $status != 124 ] || echo "check_tokenizers: stopped after $seconds s"
exit $status
