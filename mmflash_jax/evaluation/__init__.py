"""Measures of acceptance, exactness and accuracy, and their reports."""
