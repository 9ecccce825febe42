"""The process that tries one grammar for `adafuse_llm.text.isolation`, and then ends."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from adafuse_llm.errors import GrammarError
from adafuse_llm.text.closing import MAX_SECONDS, Effort, Failure, found_closing
from adafuse_llm.text.matchers import byte_tokenizer, compiled

READY = "ready\n"
"""What the process writes before it reads the grammar."""

FOUND = "found "
REFUSED = "refused "
"""What the process writes before the text that it found, or before the reason."""

MAX_CPU_SECONDS = 2
"""Maximum CPU time of a trial in seconds. Trials of common schemas take 0.01 to 0.05."""

MAX_BYTES = 128 * 2**20
"""Maximum memory of a trial. macOS does not enforce it."""

STACK_BYTES = 2**20
"""Stack of a trial. llguidance reads grammars recursively, so deep ones crash it. Threads of the
main process have 2 MiB or more, so what a trial survives is harmless there."""

NICENESS = 10
"""How much less urgent a trial is than the main process."""

OUT_OF_MEMORY = 3
"""Exit code of a trial without memory."""


def main(*, search: bool) -> None:
    """Read a grammar from the standard input, try it, and write the answer.

    Args:
        search: whether to search for a text that fits the grammar, too.
    """
    byte_tokenizer()
    _write(READY)
    lark = sys.stdin.buffer.read().decode()
    _limit()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_try, args=(lark, search))
    thread.start()
    thread.join()


def _write(text: str) -> None:
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _limit() -> None:
    """Limit what this process may use. The system ends it if it uses more."""
    try:
        import resource
    except ImportError:  # Windows
        return
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = math.ceil(time.process_time()) + MAX_CPU_SECONDS
    hardest = resource.getrlimit(resource.RLIMIT_CPU)[1]
    with suppress(OSError, ValueError):  # a lower limit is already set
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hardest))
    with suppress(OSError, ValueError):  # as before, or macOS
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _try(lark: str, search: bool) -> None:
    try:
        _write(_answer(lark, search=search))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _answer(lark: str, *, search: bool) -> str:
    matcher = compiled(byte_tokenizer(), lark)
    if matcher.is_error():
        return FOUND  # the main process finds the same error
    try:
        if not search:
            matcher.compute_bitmask()
            return FOUND
        found = found_closing(matcher, Effort(expires=time.thread_time() + MAX_SECONDS))
    except GrammarError as error:
        return f"{REFUSED}{error}"
    return f"{REFUSED}{found.value}" if isinstance(found, Failure) else FOUND + found.decode()
