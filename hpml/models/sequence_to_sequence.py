"""What every network is that answers sequences: an encoder, and a decoder that has a state."""

from __future__ import annotations

from torch import Tensor, nn

from hpml.artifacts.operation import TensorSpec

PADDING = 0  # the id that fills up rows


class SequenceToSequenceNetwork(nn.Module):
    """An encoder and a decoder, which are exported as a graph each.

    encoder: source ids (batch, source), filled up with PADDING on the right, to the tensors `encoded`.
    decoder: target ids (batch, target) and the tensors `encoded` to logits (batch, target, vocabulary), the
    scores of what comes after each, and the tensors `present`. Of these `present.X` is what `past.X` has to
    be for the ids that come next: all of a target may be given at once, or step by step.
    """

    encoder: nn.Module
    decoder: nn.Module
    encoded: tuple[TensorSpec, ...]
    present: tuple[TensorSpec, ...]

    def forward(self, source_ids: Tensor, input_ids: Tensor) -> Tensor:
        """Logits (batch, target, vocabulary) of what comes after each of `input_ids` (batch, target)."""
        logits: Tensor = self.decoder(input_ids, *self.encoder(source_ids))[0]
        return logits
