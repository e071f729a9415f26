"""Evaluation of versions on sets of examples: the sets, scores of single answers, and comparisons of versions."""
