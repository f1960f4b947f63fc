"""Crash-safe checkpoints on disk and on the Hub, without a word of PPO."""
