"""GPU tests skip, with the reason, where there is no GPU."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    here = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none here"))
