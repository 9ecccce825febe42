"""The formats of texts that a grammar compiler can enforce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DATE = (
    "((000[1-9]|00[1-9][0-9]|0[1-9][0-9][0-9]|[1-9][0-9][0-9][0-9])-"
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|"
    "02-(0[1-9]|1[0-9]|2[0-8]))|"
    "([0-9][0-9](0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
    "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_NUMBER = "[0-9]{1,6}"
_MONTHS = f"{_NUMBER}M({_NUMBER}D)?"
_YEARS = f"{_NUMBER}Y({_MONTHS})?"
_MINUTES = f"{_NUMBER}M({_NUMBER}S)?"
_HOURS = f"{_NUMBER}H({_MINUTES})?"
_CLOCK = f"T({_HOURS}|{_MINUTES}|{_NUMBER}S)"

FORMATS: Mapping[str, Mapping[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "duration": {"pattern": f"^P(({_YEARS}|{_MONTHS}|{_NUMBER}D)({_CLOCK})?|{_CLOCK}|{_NUMBER}W)$"},
    "email": {"format": "email", "pattern": r"^[^@]{1,64}@[^.]{1,63}(\.[^.]{1,63})*$"},
    "hostname": {"format": "hostname", "maxLength": 253},
    "ipv4": {"format": "ipv4"},
    "ipv6": {"format": "ipv6"},
    "uri": {"format": "uri", "pattern": "^[^:]{1,40}:"},
    "uuid": {"format": "uuid"},
    "binary": {},
    "password": {},
    "path": {},
}
"""The keywords that enforce each format.

Dates and times are patterns, because the compiler allows days and seconds that do not exist. The
patterns of email addresses and URIs bound the parts inside which a text cannot end. The parts of an
email address are as long as RFC 5321 and RFC 1035 allow. The longest registered scheme of a URI has
36 characters. Formats without keywords allow every text.
"""
