"""Raw text, as JSON lines or parquet, to token files; and token files merged into one."""
