"""Turns raw text (JSON lines or parquet) into token files, and merges token files."""
