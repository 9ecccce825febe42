"""Keep the garbage collector out of the way while a command starts.

Imports and loading create more than 600,000 objects, almost all of which stay until the process
ends. The collector would visit them again and again: a sixth of the CPU time of loading the
embedded members, and again when the process ends.
"""

from __future__ import annotations

import gc


def pause_collection() -> None:
    """Pause the garbage collector until `resume_collection`."""
    gc.disable()


def resume_collection() -> None:
    """Resume the garbage collector if it is paused. It never visits the objects that exist now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
