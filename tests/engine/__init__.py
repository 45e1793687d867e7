"""A simulated vLLM 0.32 engine that is as strict as the real one. See README.md."""

from tests.engine.core import Limits
from tests.engine.engine import Engine
from tests.engine.faults import Fault, Faults, Rule
from tests.engine.http_messages import Received
from tests.engine.threaded import ThreadedEngine

__all__ = ["Engine", "Fault", "Faults", "Limits", "Received", "Rule", "ThreadedEngine"]
