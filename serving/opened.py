"""A model with its queue: what is served until another takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from hpml.serving.apis.completions import Completions
from hpml.serving.batching import Batcher
from hpml.serving.config import ServerConfig
from hpml.serving.model import ServedModel
from hpml.serving.prometheus import Metrics
from hpml.serving.recording import Recorder

_LOOK_S = 0.05


class Opened:
    """A model, what asks it, and the operations by the names that clients use."""

    def __init__(
        self, model: ServedModel, config: ServerConfig, metrics: Metrics, recorder: Recorder | None
    ) -> None:
        self.model, self.operations = model, model.operations
        self.batcher = Batcher(
            model.runs,
            max_rows=config.max_batch_rows,
            max_queue_s=config.max_queue_ms / 1e3,
            metrics=metrics,
            drift=model.drift,
            record=partial(recorder.add, model.spec.operations[0]) if recorder else None,
        )
        self.completions = (
            Completions(model.texts, model.name, self.batcher, model.spec.operations) if model.texts else None
        )
        self._requests = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """For a request, from its headers to its outputs: as long, the engine stays."""
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    async def close(self) -> None:
        """As soon as the last request is answered, and the last text told."""
        while self._requests or (self.completions and self.completions.running):
            await asyncio.sleep(_LOOK_S)
        await asyncio.to_thread(self.batcher.close)
        if self.completions:
            self.completions.close()
