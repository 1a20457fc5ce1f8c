"""A gated recurrent unit that exports as ONNX's operator, for any number of steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Gru(nn.Module):
    """One layer of gated recurrent units (Cho et al. 2014, arXiv:1406.1078), in one direction or in both.

    The weights are stored as ONNX's operator GRU has them: of each direction (3 * hidden, ...), the gates in
    the order update, reset, new. torch.export unrolls torch.nn.GRU, and so fixes the number of steps.
    """

    def __init__(self, inputs: int, hidden: int, *, directions: int = 1) -> None:
        super().__init__()
        self.hidden, self.directions = hidden, directions
        self.of_inputs = nn.Parameter(torch.empty(directions, 3 * hidden, inputs))
        self.of_hidden = nn.Parameter(torch.empty(directions, 3 * hidden, hidden))
        self.bias = nn.Parameter(torch.empty(directions, 6 * hidden))
        for weights in self.parameters():
            nn.init.uniform_(weights, -(hidden**-0.5), hidden**-0.5)

    def forward(
        self, x: Tensor, *, start: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(batch, steps, inputs) to (batch, steps, directions * hidden), and the last states of that size.

        start: the states to begin with, (batch, directions * hidden); by default zeros. lengths: how many
        steps each row has, int32 (batch,); the rest is padding, where the outputs are zeros.
        """
        batch = x.shape[0]
        if start is None:
            start = x.new_zeros(batch, self.directions * self.hidden)
        begin = start.reshape(batch, self.directions, self.hidden).transpose(0, 1).contiguous()
        steps = self._in_onnx if torch.onnx.is_in_onnx_export() else self._in_torch
        y, last = steps(x, begin, lengths)
        return y, last.transpose(0, 1).reshape(batch, self.directions * self.hidden)

    def _in_onnx(self, x: Tensor, begin: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, steps, _ = x.shape
        y, last = torch.onnx.ops.symbolic_multi_out(
            "GRU",
            (x.transpose(0, 1), self.of_inputs, self.of_hidden, self.bias, lengths, begin),
            {
                "hidden_size": self.hidden,
                "linear_before_reset": 1,
                "direction": "forward" if self.directions == 1 else "bidirectional",
            },
            dtypes=(x.dtype, x.dtype),
            shapes=((steps, self.directions, batch, self.hidden), tuple(begin.shape)),
        )
        return y.permute(2, 0, 1, 3).flatten(2), last

    def _in_torch(self, x: Tensor, begin: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        both = self.directions == 2
        weights = [
            weight for direction in range(self.directions) for weight in self._weights_of_torch(direction)
        ]
        if lengths is None:
            y, last = torch.gru(x, begin, weights, True, 1, 0.0, self.training, both, True)
            return y, last
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        begin = begin[:, packed.sorted_indices]
        data, last = torch.gru(
            packed.data, packed.batch_sizes, begin, weights, True, 1, 0.0, self.training, both
        )
        y, _ = pad_packed_sequence(packed._replace(data=data), batch_first=True, total_length=x.shape[1])
        return y, last[:, packed.unsorted_indices]

    def _weights_of_torch(self, direction: int) -> list[Tensor]:
        """In torch's order of gates: reset, update, new."""

        def turned(weights: Tensor) -> Tensor:
            update, reset, new = weights.chunk(3)
            return torch.cat([reset, update, new])

        of_inputs, of_hidden = self.bias[direction].chunk(2)
        return [
            turned(weights)
            for weights in (self.of_inputs[direction], self.of_hidden[direction], of_inputs, of_hidden)
        ]
