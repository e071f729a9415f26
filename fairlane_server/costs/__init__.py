"""Prices of models, the cost of what requests use, and the sums of costs."""
