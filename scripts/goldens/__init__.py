# SPDX-License-Identifier: Apache-2.0
"""What scripts/golden.py makes: whole models, single ops, FP8."""
import json


def write_json(path, value):
    """Writes a file whose lines hold as many keys and numbers as fit, and not one each."""
    lines = [""]
    for part in json.dumps(value, indent=0).split("\n"):
        space = " " if lines[-1].endswith((",", ":")) else ""
        if len(lines[-1] + space + part) > 130:
            lines.append(part)
        else:
            lines[-1] += space + part
    path.write_text("\n".join(lines) + "\n")
