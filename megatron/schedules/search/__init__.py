"""Searches for shorter plans. You can add a schedule without reading this folder."""
