"""Tables of Parquet and Arrow files, as Hugging Face's `datasets` and pyarrow write them, read by pyarrow.

In batches of few rows: what is held in memory is a page of each column that is read, whatever the size of
the file. `datasets` is not needed for that, and would bring fsspec, dill (a pickle) and an HTTP client along.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc
from pyarrow import parquet as pq

from hpml.core import regular_files
from hpml.core.errors import StageFailed
from hpml.data_files.archive import most_bytes

SUFFIXES = (".parquet", ".arrow", ".feather")
BATCH_ROWS = 64
BUFFER_BYTES = 2**20
_PARQUET, _ARROW_FILE = b"PAR1", b"ARROW1"


class Table:
    """One file of columns. rows: of an Arrow file 0, they are not counted.

    Raises StageFailed, here and while it is read, if it is damaged or of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._refusing():
            if why := regular_files.problem(path):
                raise ValueError(f"it {why}")
            with path.open("rb") as file:
                start = file.read(len(_ARROW_FILE))
            self._is_parquet, self._is_arrow_file = start.startswith(_PARQUET), start == _ARROW_FILE
            if self._is_parquet:
                with pq.ParquetFile(path) as parquet:
                    self.schema: pa.Schema = parquet.schema_arrow
                    self.rows: int = parquet.metadata.num_rows
                    expands_to = sum(
                        parquet.metadata.row_group(group).total_byte_size
                        for group in range(parquet.metadata.num_row_groups)
                    )
                    if expands_to > most_bytes(path.stat().st_size):
                        raise ValueError(f"it expands to {expands_to} bytes")
            else:
                with pa.memory_map(str(path)) as source:
                    reader = ipc.open_file(source) if self._is_arrow_file else ipc.open_stream(source)
                    self.schema, self.rows = reader.schema, 0

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """All rows in their order, some at a time, of these columns."""
        with self._refusing():
            if self._is_parquet:
                with pq.ParquetFile(self.path, buffer_size=BUFFER_BYTES, pre_buffer=False) as parquet:
                    yield from parquet.iter_batches(BATCH_ROWS, columns=list(columns), use_threads=False)
                return
            with pa.memory_map(str(self.path)) as source:
                for batch in self._arrow_batches(source):
                    batch.validate(full=True)  # offsets that lead outside are not noticed by reading alone
                    for start in range(0, len(batch), BATCH_ROWS):
                        yield batch.slice(start, BATCH_ROWS).select(list(columns))

    def _arrow_batches(self, source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
        if not self._is_arrow_file:
            yield from ipc.open_stream(source)
            return
        reader = ipc.open_file(source)
        yield from map(reader.get_batch, range(reader.num_record_batches))

    def features(self) -> dict[str, Any]:
        """What `datasets` noted of each column, by its name; empty where something else wrote the file."""
        noted = (self.schema.metadata or {}).get(b"huggingface")
        try:
            features = json.loads(noted)["info"]["features"] if noted else {}
        except (ValueError, KeyError, TypeError, RecursionError):
            return {}
        return features if isinstance(features, dict) else {}

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn what reading a file of any content raises into StageFailed."""
        try:
            yield
        except (pa.ArrowException, ValueError, OSError, EOFError) as error:
            raise StageFailed(
                f"{self.path} is refused, truncated, corrupt or no file of Parquet, Arrow or Feather",
                why=" ".join(str(error).split())[:200],
                fix="write or fetch it again",
            ) from None
