# SPDX-License-Identifier: Apache-2.0
"""The folder that a run of ndtrain leaves: metrics.jsonl, run.json, trace.json. All scripts read them through this module."""
import functools
import json
import pathlib
import statistics

WARM_UP = 2  # steps that do not count for speed, when there are more


class Run:
    """Files are read when they are first asked for. OSError: a file is missing; ValueError: it is damaged."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    @functools.cached_property
    def rows(self):
        """The lines of metrics.jsonl that count, in their order: steps, validations and events. The last line of a run that
        still writes, or was killed, may be incomplete; it does not count. Nor do lines of later steps above a line
        "resumed": the run made these steps again."""
        text = (self.folder / "metrics.jsonl").read_text()
        lines = text.splitlines()
        if text and not text.endswith("\n"):
            lines.pop()
        rows = []
        for row in map(json.loads, lines):
            if row.get("event") == "resumed":
                rows = [kept for kept in rows if kept["step"] <= row["step"]]
            rows.append(row)
        return rows

    @functools.cached_property
    def steps(self):
        return [row for row in self.rows if "step_ms" in row]

    @functools.cached_property
    def validations(self):
        return [row for row in self.rows if "validation_loss" in row]

    @functools.cached_property
    def losses(self):
        """Of steps and validations, in their order; None where a loss was not finite."""
        return [row.get("loss", row.get("validation_loss")) for row in self.rows if "loss" in row or "validation_loss" in row]

    @functools.cached_property
    def record(self):
        """run.json: configuration, libraries, machine, memory plan, choices of autotune."""
        return json.loads((self.folder / "run.json").read_text())

    @property
    def config(self):
        """The resolved configuration: "section.key" -> value."""
        return self.record["config"]

    @property
    def planned_bytes(self):
        return self.record["model"]["planned_bytes"]

    @property
    def peak_bytes(self):
        return max(row["peak_memory_bytes"] for row in self.steps)

    @functools.cached_property
    def trace(self):
        """trace.json: where the time of rank 0 went."""
        return json.loads((self.folder / "trace.json").read_text())

    def median(self, key):
        """The median over the steps after the warm-up, or over all steps when there are no more than those."""
        return statistics.median(row[key] for row in self.steps[WARM_UP:] or self.steps)

    def has_ended(self):
        """Whether the last line was written: the validation after the last step where there is one, else the last step."""
        try:
            if any(row.get("event") == "early_stopped" and row["step"] == self.rows[-1]["step"] for row in self.rows):
                return True
            last = "validation_loss" if self.config["data.validation_path"] else "loss"
            return any(row["step"] == self.config["train.steps"] and last in row for row in self.rows)
        except (OSError, ValueError):
            return False
