"""Try each new grammar in a child process, before it is compiled here.

A hostile grammar can crash llguidance, keep it busy, or fill the memory. The child has no
member's tokens, only the 256 bytes. Limits of llguidance bound the work that members' tokens add.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Final

from adafuse_llm.child import begin, limit_process, run_limited
from adafuse_llm.errors import GrammarError, QueueFullError
from adafuse_llm.grammar.matchers import byte_tokenizer, compiled, next_bytes

logger = logging.getLogger(__name__)

MAX_CPU_SECONDS: Final = 2
"""Maximum CPU time of a trial. Trials of common schemas take 0.01 to 0.05 seconds."""

MAX_BYTES: Final = 128 * 2**20
"""Maximum memory of a trial."""

STACK_BYTES: Final = 2**20
"""Bytes of a trial's stack. llguidance reads grammars recursively, so deeply nested ones crash it.
Threads of this process have 2 MiB or more, so a grammar that a trial survives is harmless here."""

MAX_WAIT_SECONDS: Final = 30.0
"""Maximum seconds that a trial waits until it can start, and maximum seconds that it then takes."""

MAX_TRIALS: Final = 8
"""Maximum number of trials at the same time."""

MAX_VERDICTS: Final = 1_000
"""Maximum number of harmless grammars that are remembered and not tried again."""

_places = threading.BoundedSemaphore(MAX_TRIALS)
_has_started = threading.Event()
_harmless: OrderedDict[bytes, None] = OrderedDict()


def try_grammar(lark: str) -> None:
    """Try a grammar in a child process. If no child process could ever start, log a warning.

    Raises:
        GrammarError: the grammar is harmful.
        QueueFullError: the machine is too busy, or can start no further process now.
    """
    key = hashlib.sha256(lark.encode()).digest()
    if key in _harmless:
        return
    busy = QueueFullError(
        f"the grammar could not be tried within {MAX_WAIT_SECONDS:g} seconds, because the machine "
        "is busy. Simplify the grammar, or try again later."
    )
    if not _places.acquire(timeout=MAX_WAIT_SECONDS):
        raise busy
    # the child ends when its task does, or when it exceeds a limit
    try:
        child = run_limited(compile_here, MAX_WAIT_SECONDS, lark=lark)
        _has_started.set()
    except subprocess.TimeoutExpired:
        raise busy from None
    except OSError as error:
        # an earlier trial could start, so what the machine lacks now may come back
        if _has_started.is_set():
            raise QueueFullError(
                f"the process that tries the grammar did not start ({error}). Try again later."
            ) from error
        _warn(str(error))
    else:
        if child.returncode:
            raise GrammarError(
                f"the process that tried the grammar ended with exit code {child.returncode}: the "
                f"grammar takes more than {MAX_CPU_SECONDS} seconds of computing or "
                f"{MAX_BYTES // 2**20} MiB of memory, or it crashes the library llguidance. "
                "Simplify it."
            )
    finally:
        _places.release()
    _harmless[key] = None
    if len(_harmless) > MAX_VERDICTS:
        _harmless.popitem(last=False)


@functools.cache
def _warn(reason: str) -> None:
    logger.warning(
        "grammars are compiled without a trial in another process, because none can be started "
        "(%s). Do not accept grammars or schemas from strangers",
        reason,
    )


def compile_here(lark: str) -> None:
    """Compile a grammar within limits. The child process calls this function."""
    # what costs the same for every grammar comes before the limits
    byte_tokenizer()
    begin()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the parent would keep all errors in memory
    limit_process(MAX_CPU_SECONDS, MAX_BYTES)
    survived: list[bool] = []

    def work() -> None:
        matcher = compiled(byte_tokenizer(), lark)
        if not matcher.is_error():  # else, whoever compiles the grammar finds the same error
            with suppress(GrammarError):
                next_bytes(matcher)
        survived.append(True)

    # only a thread can have a stack of another size
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    sys.exit(not survived)
