"""The metadata of the three distributions."""

from __future__ import annotations

from hatchling.builders.wheel import WheelBuilder

from tests.support.paths import ROOT

INTEGRATIONS = ("langchain-adafuse", "llama-index-llms-adafuse")
METADATA = {
    "adafuse-llm": WheelBuilder(str(ROOT)).metadata,
    **{name: WheelBuilder(str(ROOT / "integrations" / name)).metadata for name in INTEGRATIONS},
}
