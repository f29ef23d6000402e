"""Wrappers around any torch optimizer: the pull toward the initial weights, and averages."""
