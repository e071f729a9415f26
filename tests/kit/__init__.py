"""Helpers of the tests: doubles, kits and processes. Tests import from here, never from another test."""
