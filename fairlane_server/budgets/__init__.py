"""Budgets: what they may be, when they renew, and how much of them is spent and reserved."""
