# SPDX-License-Identifier: Apache-2.0
"""What scripts/golden.py makes: whole models, single ops, FP8."""
