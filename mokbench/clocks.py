"""SM clocks of rows that are read side by side: one that ran at another clock did another thing."""

# Chosen, not derived: above what one row's clock mostly moves by in a run. Section "Clock" of
# docs/measuring-on-a-gpu.md has what a committed run shows of both.
CLOCK_FLOOR = 0.03


def apart(a_mhz: float | None, b_mhz: float | None) -> bool:
    """Whether two clocks differ by more than ``CLOCK_FLOOR``; unknown ones do not."""
    if not a_mhz or not b_mhz:
        return False
    return max(a_mhz, b_mhz) / min(a_mhz, b_mhz) > 1 + CLOCK_FLOOR


def row_notes(
    clock_mhz: float | None, expired_share: float | None, peak_mhz: float | None
) -> list[str]:
    """With what a row's clock has to be read: holds that ended early, and the peak's own clock."""
    notes = []
    if expired_share:
        at = "" if clock_mhz is None else f", here {clock_mhz:.0f} MHz"
        notes.append(
            f"in {100 * expired_share:.0f} % of its samples the GPU was let go (after 5 ms) before "
            "the CPU had queued the pass: the CPU's gaps are in its time, and its SM clock need "
            f"not be that of the rows in turn with it{at}"
        )
    if apart(clock_mhz, peak_mhz):
        notes.append(
            f"peak_tflops is from an SM clock more than {100 * CLOCK_FLOOR:.0f} % off this row's "
            "(peak_sm_clock_mhz, sm_clock_mhz): the share of the peak contains that, "
            "mma_utilization does not"
        )
    return notes
