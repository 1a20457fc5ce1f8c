"""A PyTorch module by its import path, run as it is. The user's own code: it runs in the measured process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, JsonValue

from hpml.artifacts.measurements import EngineSettings
from hpml.artifacts.operation import Operation
from hpml.core import hardware
from hpml.core.errors import ConfigInvalid, HpmlError, StageFailed
from hpml.measuring.subjects.base import Opened
from hpml.measuring.subjects.tensors import Declared, FromOutside, Signature, operation_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hpml.measuring.subjects.base import Arrays


def _named(answer: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a module returned: one, several in a row, or several by name."""
    import torch

    if isinstance(answer, Mapping):
        named = [(str(name), value) for name, value in answer.items()]
    elif isinstance(answer, tuple | list):
        named = [(f"output {index}", value) for index, value in enumerate(answer)]
    else:
        named = [("output", answer)]
    return [(name, value) for name, value in named if isinstance(value, torch.Tensor)]


class TorchSubject(FromOutside):
    """What the callable `path`, "package.module:callable", returns when it is called with `arguments`.

    import_paths: folders in which modules are looked for as well, after all others. task, operation: of the
    network of a recipe, of what it is asked; without them it is called with its inputs in order.
    """

    subject: Literal["torch"] = "torch"
    path: str
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    import_paths: tuple[Path, ...] = ()
    device: Literal["cpu", "cuda"] = "cpu"
    task: dict[str, JsonValue] = Field(default_factory=dict)
    operation: Operation | None = None

    def declared_inputs(self) -> Sequence[Declared]:
        """Those of the operation, or those that the user described."""
        if self.operation:
            return [(one.name, one.dtype, one.shape) for one in self.operation.inputs]
        return [(tensor.name, tensor.dtype, (None, *tensor.shape)) for tensor in self.inputs]

    def signature(self, sizes: Mapping[str, int]) -> Signature:
        """The inputs of the operation, or those that the user described: a module itself tells of none.

        Raises ConfigInvalid if there are none, or as `operation_tensors` does.
        """
        if self.operation:
            return Signature(operation_tensors(self.path, self.operation, sizes))
        if not self.inputs:
            raise ConfigInvalid(
                f"nothing says what the module {self.path} takes",
                fix="give the shape of each input, without the batch: --input 3x32x32, or --data FILE.npz",
            )
        return Signature(self.inputs)

    def open(self, *, threads: int, spinning: bool | None = None) -> Opened:
        """Call the callable, and put the module it returns into evaluation mode on its device."""
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise StageFailed(f"{self.path} cannot run on a GPU", why="torch finds none here")
        torch.set_num_threads(threads)
        # TF32 would round the products of an fp32 network to 11 bits.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        sys.path += [str(folder) for folder in self.import_paths]
        module = self._module().eval().to(self.device)
        if self.operation:
            return self._opened(module, self.operation)
        stream = torch.cuda.current_stream() if self.device == "cuda" else None

        def predict(arrays: list[Any]) -> None:
            with torch.inference_mode():
                module(*[torch.from_numpy(array).to(self.device) for array in arrays])
            if stream is not None:
                stream.synchronize()

        def outputs(arrays: Arrays) -> dict[str, Any]:
            on_device = [torch.from_numpy(array).to(self.device) for array in self._in_order(arrays)]
            with torch.inference_mode():
                answer = module(*on_device)
            return {name: tensor.float().cpu().numpy() for name, tensor in _named(answer)}

        return Opened(predict, self._in_order, self.device, stream, outputs=outputs)

    def _opened(self, module: nn.Module, operation: Operation) -> Opened:
        from hpml.tasks import task_of
        from hpml.tasks.torch_session import TorchSession

        session = TorchSession(module, task_of(self.task), [operation], self.device)
        return Opened(
            lambda feeds: session.run(feeds, operation.name),
            self.feeds,
            self.device,
            session.stream,
            outputs=lambda arrays: session.run(self.feeds(arrays), operation.name),
        )

    def candidates(self, threads: int) -> tuple[EngineSettings, ...]:
        """As users run it: torch has a thread for each physical core unless it is told otherwise."""
        return (EngineSettings(threads=min(threads, hardware.usable_cores())),)

    def _module(self) -> nn.Module:
        import importlib

        from torch import nn

        from hpml.models.limits import memory_limit

        module_name, _, attribute = self.path.partition(":")
        try:
            make = getattr(importlib.import_module(module_name), attribute)
            with memory_limit(f"the module {self.path}"):
                module = make(**self.arguments)
        except HpmlError:
            raise
        except Exception as error:  # a user's module can fail in any way
            of_recipe = "" if "in_channels" in self.arguments else ", or --recipe FILE for those of a recipe"
            raise StageFailed(
                f"cannot make the module {self.path}",
                why=f"{type(error).__name__}: {error}",
                fix=f"check the spelling and the arguments (--arg width=32{of_recipe}); it was called with "
                f"{', '.join(self.arguments) or 'none'}",
            ) from None
        if not isinstance(module, nn.Module):
            raise StageFailed(f"{self.path} returned a {type(module).__name__}, not a torch.nn.Module")
        return module

    def _in_order(self, arrays: Arrays) -> list[Any]:
        return list(self.feeds(arrays).values())
