"""Be one node of a training on several: torchrun, with an exit code that says whether another try could help.

    python -m hpml.components.train.node -m hpml.components train ...

Options of torchrun come from the environment (PET_NNODES, PET_RDZV_ENDPOINT and so on), as training operators
set it. torchrun itself ends with 1 whatever happened. Here the exit code is that of the worker that failed
first (3, 4, 5: it would fail again), or ExitCode.TERMINATED if another try resumes from the last checkpoint:
after a signal, and when another node or the store was gone. The operators restart a pod for a code of 128 and
above only.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from hpml.core.errors import ExitCode

PASSING = {ExitCode.UNAVAILABLE, ExitCode.INTERRUPTED, ExitCode.TERMINATED}


def main(arguments: Sequence[str]) -> NoReturn:
    """Run torchrun with `arguments`, and end this process with an exit code as the module says."""
    signal.signal(signal.SIGTERM, _leave)  # the first process of a container has no handlers but its own
    code = _run(list(arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is done, and torch takes seconds to take itself apart


def _run(arguments: list[str]) -> int:
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        run.main(arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return exit_code(failure.exitcode)
    except SignalException as error:
        print(f"this node was stopped by {signal.Signals(error.sigval).name}")
        return ExitCode.TERMINATED
    except (RendezvousError, DistError) as error:
        print(f"the other nodes cannot be reached: {' '.join(str(error).split())}")
        return ExitCode.TERMINATED
    return ExitCode.DONE


def exit_code(worker: int) -> int:
    """The exit code of a node whose first failed worker ended with `worker`; -n: by signal n."""
    return ExitCode.TERMINATED if worker < 0 or worker in PASSING else worker


def _leave(_signal: int, _frame: object) -> NoReturn:
    raise SystemExit(ExitCode.TERMINATED)


if __name__ == "__main__":
    main(sys.argv[1:])
