"""Columns of a block of samples, float64 [..., samples, 3]; no torch, for the launcher.

start_us on the rank's own clock, duration_us, and sm_clock_mhz, NaN where there is none to read.
"""

START, DURATION, CLOCK = range(3)
