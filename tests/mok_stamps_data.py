"""What two CTAs of a MoK kernel may have stamped."""

import numpy as np

from mokbench.mok_config import STAMPS

# %globaltimer counts from 1970; float64 would lose its last digits.
NOW = 1_790_000_000_123_456_789

# Two CTAs' stamps in ns from NOW, by name.
FULL = {
    "begun": (1000, 1200),
    "staged": (3000, 2500),
    "entered": (5000, 4600),
    "scheduled": (6100, 6500),
    "pulled": (20000, 21000),
    "waited": (700, 300),
    "gemm1_begun": (7000, 7250),
    "gemm1_ended": (30000, 29000),
    "gemm2_begun": (15000, 14000),
    "gemm2_ended": (40000, 41000),
    "returned": (50000, 50100),
    "summed": (60000, 61500),
}


def stamps(at=NOW, **changes):
    """[CTA, STAMPS] of times from ``at``; "waited" and what is zero stay as they are."""
    columns = [(FULL | changes)[name] for name in STAMPS]
    own = np.array(columns, dtype=np.int64).T
    since = np.array([name != "waited" for name in STAMPS])
    return np.where((own != 0) & since, own + at, own)
