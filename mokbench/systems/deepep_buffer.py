"""What the exchanges through DeepEP's buffers share: which SM counts to try, and how they end."""

from collections.abc import Sequence
from typing import Any

import torch

from mokbench.systems.expanded_experts import ExpandedExperts

# Even, since the legacy Buffer splits them in two.
_SM_COUNTS = (8, 16, 24, 32, 64)


class BufferExchange:
    """A subclass makes all of these."""

    num_sms: int
    advised_sms: int
    _share: int  # SMs of this rank
    _buffer: Any
    _experts: ExpandedExperts

    @property
    def candidates(self) -> Sequence[int]:
        """SM counts worth trying: some that fit this rank's share, and the advised one."""
        fitting = {count for count in _SM_COUNTS if count <= self._share}
        return sorted(fitting | {self.advised_sms})

    def close(self) -> None:
        """Free the buffer; collective."""
        self._experts.close()
        torch.cuda.synchronize()
        self._buffer.destroy()
