"""A PyTorch module by its import path, run as it is. The user's own code: it runs in the measured process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from components.benchmark.subjects.base import Opened
from components.benchmark.subjects.tensors import FromOutside, Signature
from components.errors import ConfigInvalid, HpmlError, StageFailed

if TYPE_CHECKING:
    from torch import nn

    from components.benchmark.subjects.base import Arrays


class TorchSubject(FromOutside):
    """What the callable `path`, "package.module:callable", returns when it is called without arguments.

    import_paths: folders in which modules are looked for as well, after all others.
    """

    subject: Literal["torch"] = "torch"
    path: str
    import_paths: tuple[Path, ...] = ()
    device: Literal["cpu", "cuda"] = "cpu"

    def signature(self, sizes: Mapping[str, int]) -> Signature:
        """The inputs that the user described: a module does not tell what it takes.

        Raises ConfigInvalid if there are none.
        """
        if not self.inputs:
            raise ConfigInvalid(
                f"nothing says what the module {self.path} takes",
                fix="give the shape of each input, without the batch: --input 3x32x32",
            )
        return Signature(self.inputs)

    def open(self, *, threads: int) -> Opened:
        """Call the callable, and put the module it returns into evaluation mode on its device."""
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise StageFailed(f"{self.path} cannot run on a GPU", why="torch finds none here")
        torch.set_num_threads(threads)
        # TF32 would round the products of an fp32 network to 11 bits.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        sys.path += [str(folder) for folder in self.import_paths]
        module = self._module().eval().to(self.device)
        stream = torch.cuda.current_stream() if self.device == "cuda" else None

        def predict(arrays: list[Any]) -> None:
            with torch.inference_mode():
                module(*[torch.from_numpy(array).to(self.device) for array in arrays])
            if stream is not None:
                stream.synchronize()

        return Opened(predict, self._in_order, self.device, stream)

    def _module(self) -> nn.Module:
        import importlib

        from torch import nn

        module_name, _, attribute = self.path.partition(":")
        try:
            module = getattr(importlib.import_module(module_name), attribute)()
        except HpmlError:
            raise
        except Exception as error:  # a user's module can fail in any way
            raise StageFailed(
                f"cannot make the module {self.path}",
                why=f"{type(error).__name__}: {error}",
                fix="check the spelling; modules are looked for in the current folder, and the callable gets "
                "no arguments",
            ) from None
        if not isinstance(module, nn.Module):
            raise StageFailed(f"{self.path} returned a {type(module).__name__}, not a torch.nn.Module")
        return module

    def _in_order(self, arrays: Arrays) -> list[Any]:
        return list(self.feeds(arrays).values())
