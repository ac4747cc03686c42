"""Columns of a block of samples, float64 [..., samples, 3 or 4]; no torch, for the launcher.

start_us on the rank's own clock (on a GPU since the ranks' timers were made, so that float64 holds
single nanoseconds), duration_us, and sm_clock_mhz, NaN where there is none to read. On a GPU also
whether the sample's start was let go before its pass was queued: 1 or 0.
"""

START, DURATION, CLOCK, EXPIRED = range(4)
