"""Folders that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""

TOKENIZERS = ROOT.parent / "shared" / "data" / "tokenizers"
SCHEMA_SUITE = ROOT.parent / "shared" / "data" / "json-schema-test-suite" / "draft2020-12"
"""Data outside the repository; tests that need it skip when it is absent."""
