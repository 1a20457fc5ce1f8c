"""Checkpoints: whole or absent, the newest two kept, damage noticed wherever it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpml.training.checkpoint import Checkpoint, CheckpointStore

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def checkpoint(number: int) -> Checkpoint:
    return Checkpoint({"weights": torch.full((3, 2), float(number))}, {"number": number})


def read(store: CheckpointStore) -> int | None:
    data = store.read_newest()
    return None if data is None else int(Checkpoint.from_bytes(data).state["number"])


@given(state=st.dictionaries(st.text(), JSON, max_size=4), seed=st.integers(0, 9))
def test_what_went_in_comes_out(state: dict[str, object], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "float": torch.rand(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        "double": torch.rand(3, generator=generator).double(),
        "count": torch.tensor(7),
        "empty": torch.empty(0),
    }
    again = Checkpoint.from_bytes(Checkpoint(tensors, state).to_bytes())
    assert again.state == state
    assert again.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(again.tensors[name], tensor)
        assert again.tensors[name].dtype == tensor.dtype


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, Checkpoint({}, {}).to_bytes()[:-1]])
def test_bytes_of_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Checkpoint.from_bytes(data)


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert read(store) is None
    for number in (8, 9, 10, 100):
        store.write(number, checkpoint(number))
        assert read(store) == number
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("place", [0, 10, -20, -1])
def test_a_changed_byte_sends_it_back_to_the_one_before(
    place: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path)
    for number in (1, 2):
        store.write(number, checkpoint(number))
    newest = max(tmp_path.iterdir())
    content = bytearray(newest.read_bytes())
    content[place] ^= 4
    newest.write_bytes(content)
    assert read(store) == 1
    assert str(newest) in capsys.readouterr().out
    assert not newest.exists()


def test_a_truncated_one_and_nothing_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = CheckpointStore(tmp_path)
    store.write(1, checkpoint(1))
    [file] = tmp_path.iterdir()
    os.truncate(file, 20)
    assert read(store) is None
    assert "is damaged" in capsys.readouterr().out


def test_what_a_kill_left_of_a_write_is_not_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.write(1, checkpoint(1))
    [file] = tmp_path.iterdir()
    part = tmp_path / f".{file.name}.0123"
    part.write_bytes(file.read_bytes()[:50])
    assert read(store) == 1
    assert not part.exists()
