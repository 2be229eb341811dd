"""MISMATCH_FULL=1 (`make test-all`) runs whole matrices and whole tables; `make test` a few cases of each."""

from __future__ import annotations

import os

import pytest

FULL = os.environ.get("MISMATCH_FULL") == "1"
full_only = pytest.mark.skipif(not FULL, reason="part of the full suite")
"""On a test, or on a case: pytest.param(..., marks=full_only)."""
