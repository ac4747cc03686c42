"""Regression gate: run-level series, their statistics, history files, verdicts, confirmation."""
