"""Measuring tricks, each a small thing with one reason to exist."""
