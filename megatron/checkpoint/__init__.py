"""Checkpoints that fit any layout: who wrote what, folders that survive a kill, save and load."""
