"""Callbacks: what may see a rollout and an update, and those that come with the package."""
