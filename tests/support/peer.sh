# SPDX-License-Identifier: Apache-2.0
# For scripts that run a check with a Python that has other people's packages: $ND_PEER_PYTHON, or python3. peer_with MODULE...
# names it in $python; where it lacks a module, that is said and the test is skipped (exit status 77). A module that is there but
# cannot be imported is the check's own failure.
python=${ND_PEER_PYTHON:-python3}
peer_with() {
    local lacks
    if ! lacks=$("$python" -c 'import importlib.util, sys
print(", ".join(name for name in sys.argv[1:] if not importlib.util.find_spec(name)))' "$@"); then
        echo "failed: $python does not run"
        exit 1
    fi
    if [ -n "$lacks" ]; then
        echo "skipped: $python has no $lacks; set ND_PEER_PYTHON to one that has"
        exit 77
    fi
    export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
}
