"""A recording stand-in for deep_ep: keeps the arguments it is called with, moves no rows.

For argument and error paths only; nothing that claims a figure or a right result runs on it.
"""

from types import SimpleNamespace
from typing import Any

import torch

Call = tuple[str, dict[str, Any]]


class Recorder:
    """A module's worth of fakes; ``calls`` holds (name, arguments) in order."""

    __version__ = "9.9.9"

    def __init__(self, num_rows: int = 8, advice: int = 22, fails: str = "") -> None:
        self.calls: list[Call] = []
        recorder = self

        class ElasticBuffer:
            num_bytes = 3 << 20

            def __init__(self, group: object, **arguments: Any) -> None:
                recorder.calls.append(("ElasticBuffer", {"group": group, **arguments}))
                self._hidden = arguments["hidden"]

            def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
                recorder.calls.append(("advice", {"experts": num_experts, "top_k": num_topk}))
                return advice

            def dispatch(self, x: Any, **arguments: Any) -> tuple[Any, ...]:
                recorder.calls.append(("dispatch", {"x": x, **arguments}))
                if fails:
                    raise RuntimeError(fails)
                handle = SimpleNamespace(
                    psum_num_recv_tokens_per_expert=torch.tensor([num_rows], dtype=torch.int32)
                )
                rows = torch.zeros(num_rows, self._hidden, dtype=torch.bfloat16)
                received = (rows, torch.zeros(num_rows, 1)) if isinstance(x, tuple) else rows
                return received, None, torch.ones(num_rows), handle, None

            def combine(self, y: torch.Tensor, **arguments: Any) -> tuple[Any, ...]:
                recorder.calls.append(("combine", {"y": y, **arguments}))
                return torch.zeros(4, self._hidden, dtype=torch.bfloat16), None, None

            def destroy(self) -> None:
                recorder.calls.append(("destroy", {}))

        self.ElasticBuffer = ElasticBuffer
        kind = {"recorder": self, "num_rows": num_rows}
        self.Buffer = type("Buffer", (LegacyBuffer,), kind)

    def named(self, name: str) -> list[dict[str, Any]]:
        """Arguments of every call of that name."""
        return [arguments for called, arguments in self.calls if called == name]


class Hint:
    """A configuration of the legacy Buffer that asks for a made-up size."""

    def __init__(self, recorder: Recorder, num_bytes: int) -> None:
        self._recorder, self._num_bytes = recorder, num_bytes

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        self._recorder.calls.append(("hint", {"hidden_bytes": hidden_bytes, "ranks": ranks}))
        return self._num_bytes


class LegacyBuffer:
    """The first generation's Buffer; a recorder makes a subclass of its own."""

    recorder: Recorder
    num_rows: int

    def __init__(self, *positional: Any, **arguments: Any) -> None:
        self._record("Buffer", positional=positional, **arguments)

    @classmethod
    def _record(cls, name: str, **arguments: Any) -> None:
        cls.recorder.calls.append((name, arguments))

    @classmethod
    def get_dispatch_config(cls, ranks: int) -> Hint:
        return Hint(cls.recorder, 1000)

    @classmethod
    def get_combine_config(cls, ranks: int) -> Hint:
        return Hint(cls.recorder, 3000)

    @classmethod
    def set_num_sms(cls, num_sms: int) -> None:
        cls._record("set_num_sms", num_sms=num_sms)

    @classmethod
    def get_low_latency_rdma_size_hint(
        cls, tokens: int, hidden: int, ranks: int, experts: int
    ) -> int:
        cls._record("rdma_hint", tokens=tokens, hidden=hidden, ranks=ranks, experts=experts)
        return 5000

    def get_dispatch_layout(self, topk_idx: torch.Tensor, experts: int) -> tuple[Any, ...]:
        self._record("layout", topk_idx=topk_idx, experts=experts)
        return "per_rank", None, "per_expert", "is_in_rank", None

    def dispatch(self, x: torch.Tensor, **arguments: Any) -> tuple[Any, ...]:
        self._record("dispatch", x=x, **arguments)
        rows = x[:1].expand(self.num_rows, -1).contiguous()
        ids = torch.tensor([[0, -1]] * self.num_rows)
        return rows, ids, torch.full((self.num_rows, 2), 0.5), [], "handle", None

    def combine(self, y: torch.Tensor, handle: object) -> tuple[Any, ...]:
        self._record("combine", y=y, handle=handle)
        return y[:4], None, None

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, tokens: int, experts: int, **options: Any
    ) -> tuple[Any, ...]:
        given = {"x": x, "topk_idx": topk_idx, "tokens": tokens, "experts": experts}
        self._record("low_latency_dispatch", **given, **options)
        padded = torch.zeros(2, 2 * tokens, x.shape[1], dtype=x.dtype)
        padded[0, 0], padded[1, :2] = 1.0, 2.0
        return padded, torch.tensor([1, 2], dtype=torch.int32), "handle", None, None

    def low_latency_combine(
        self, y: torch.Tensor, topk_idx: Any, topk_weights: Any, handle: object
    ) -> tuple[Any, ...]:
        given = {"y": y, "topk_idx": topk_idx, "topk_weights": topk_weights}
        self._record("low_latency_combine", **given, handle=handle)
        return y[0, :4], None, None

    def destroy(self) -> None:
        self._record("destroy")
