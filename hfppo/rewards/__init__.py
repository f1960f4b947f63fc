"""Reward functions: their contract, calling and combining them, and the kinds that come with the package."""
