#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs check_tokenizers.py with a Python that has tokenizers: $ND_PEER_PYTHON, or python3.
# Without one it says so and is skipped (exit status 77).
set -u
python=${ND_PEER_PYTHON:-python3}
here=$(dirname "$0")
if ! "$python" -c 'import tokenizers' 2>/dev/null; then
    echo "skipped: $python has no tokenizers; set ND_PEER_PYTHON to one that has"
    exit 77
fi
export TOKENIZERS_PARALLELISM=false
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
