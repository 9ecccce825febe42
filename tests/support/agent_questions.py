"""Questions that the embedded members answer as agents, with the calls that lead to the answer."""

from __future__ import annotations

MILL = ("look_up", {"query": "Silesse Mill"})

ERRANDS = [
    ("Who is the director of the Silesse Mill?", [MILL], "Poris Wentano"),
    ("What is 417 * 38?", [("calculate", {"expression": "417 * 38"})], "15846"),
    (
        "How much do 3 tickets for the Silesse Mill cost?",
        [MILL, ("calculate", {"expression": "3 * 19.88"})],
        "59.64 crowns",
    ),
    ("Hello.", [], "Hello. What would you like to know?"),
]
