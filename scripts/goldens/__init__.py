# SPDX-License-Identifier: Apache-2.0
"""What scripts/golden.py makes: whole models, single ops, FP8."""
import json
import re
import textwrap


def write_json(path, value):
    """Writes an indented file in which a list of numbers takes a line, or as many as it needs, and not one line for each number."""
    def join(match):
        return "[" + "\n".join(textwrap.wrap(" ".join(match.group(1).split()), 130)) + "]"

    text = re.sub(r"\[([^][{}]*)\]", join, json.dumps(value, indent=1)) + "\n"
    assert json.loads(text) == value, f"{path}: a text holds a bracket"
    path.write_text(text)
