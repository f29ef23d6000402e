"""Any torch optimizer, wrapped: the pull toward the initial weights, and averages of iterates."""
