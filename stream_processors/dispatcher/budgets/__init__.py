"""Budgets at admission: what is spent and reserved, and which requests still fit."""
