"""Where there is no GPU, Triton kernels are run in Triton's interpreter: asked for here, before anything imports it."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tested: on the GPU, else on the host by the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
