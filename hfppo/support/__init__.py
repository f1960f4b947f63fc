"""Helpers that know nothing of PPO."""
