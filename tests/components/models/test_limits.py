"""Time and memory for building a network: refused by arithmetic, before anything is allocated."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hpml import models
from hpml.artifacts.model import ArchitectureSpec
from hpml.core import memory
from hpml.core.errors import ConfigInvalid, HpmlError, explained
from tests.image_tasks import image_task


def build(name: str, **arguments: Any) -> torch.nn.Module:
    return models.build(ArchitectureSpec(name=name, arguments=arguments), image_task())


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write the user's module `usersnet`, whose code is given."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(code: str) -> str:
        (tmp_path / "usersnet.py").write_text(f"import time, torch\nfrom torch import nn\n{code}\n")
        monkeypatch.delitem(sys.modules, "usersnet", raising=False)
        return "usersnet:net"

    return write


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (
            "cnn",
            {"width": 10**6},
            r"its 90,000,077,000,013 weights take 360.0 TB, this machine has .* of .*B left",
        ),
        (
            "resnet18",
            {"width": 100_000},
            r"the model resnet18 does not fit into memory: its 27,\d+,\d+,\d+,\d+ weights",
        ),
        ("vit", {"dim": 400_000}, "does not fit into memory"),
        (
            "cnn",
            {"width": 10**12},
            r"does not fit into memory: it asks for a tensor of 72,000,000,000,000.0 TB",
        ),
        ("cnn", {"width": 10**19}, "does not fit into memory: one of its sizes has more than 64 bits"),
        ("vit", {"depth": 10**12}, "depth to 1000"),
        ("cnn", {"width": 0}, "width 0"),
        ("resnet18", {"width": -1}, "width -1"),
    ],
)
def test_sizes_beyond_the_machine_are_refused_by_arithmetic(
    name: str, arguments: dict[str, int], said: str
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigInvalid, match=said):
        build(name, **arguments)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB, of petabytes


def test_a_tensor_of_the_users_code_that_does_not_fit_is_refused(users: Any) -> None:
    path = users("def net(**sizes): return nn.Linear(10**6, 10**7)")
    with pytest.raises(ConfigInvalid, match=r"it asks for a tensor of 40.0 TB, this machine has"):
        build(path)


def test_building_within_limits_draws_the_same_weights() -> None:
    from hpml.models.resnet import ResNet18

    torch.manual_seed(3)
    expected = ResNet18(in_channels=1, num_classes=10, width=8).state_dict()
    torch.manual_seed(3)
    found = build("resnet18", width=8).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("time.sleep(60)", "importing usersnet did not end in 1 s"),
        ("def net(**sizes):\n    while True: pass", "building the model usersnet:net did not end in 1 s"),
        (
            "def net(**sizes):\n    while True:\n        try: time.sleep(60)\n        except Exception: pass",
            "building the model usersnet:net did not end",
        ),
    ],
)
def test_code_that_does_not_end_is_ended(
    code: str, said: str, users: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "BUILD_S", 1.0)  # time to import torch.nn, too
    with pytest.raises(ConfigInvalid, match=said):
        build(users(code))


def test_the_limit_is_over_when_the_network_is_built(users: Any) -> None:
    before = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 3600, 7)
    try:
        build(users("def net(**sizes): return nn.Linear(2, 2)"))
        assert signal.getsignal(signal.SIGALRM) is before
        assert signal.getitimer(signal.ITIMER_REAL) == (pytest.approx(3600, rel=0.1), 7)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_a_process_may_take_all_memory_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import resource; from hpml.core import memory\n"
        "memory.total_bytes = lambda: 2**28; memory.hardware.gpu_names = lambda: ()\n"
        "memory.limit_process(); bytearray(2**27); print('half')\n"
        "bytearray(2**29)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "half\n" and "MemoryError" in ended.stderr
    assert 2**28 < memory.total_bytes() >= memory.available_bytes() > 0


@pytest.mark.parametrize(
    "error", [MemoryError("9 GB"), RuntimeError("[x] DefaultCPUAllocator: can't allocate memory: 9 GB")]
)
def test_running_out_of_memory_is_said_so(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, explained():
        raise error
    assert ended.value.code == HpmlError.exit_code
    said = capsys.readouterr().err
    assert said.startswith("error: out of memory: ") and "9 GB" in said and "foresaw" not in said
