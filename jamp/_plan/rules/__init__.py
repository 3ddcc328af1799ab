"""Rules for equations that hold programs, one file for each kind."""

from jamp._plan.rules import calls as calls
from jamp._plan.rules import control_flow as control_flow
from jamp._plan.rules import derivatives as derivatives
from jamp._plan.rules import sharding as sharding
from jamp._plan.rules import solves as solves
from jamp._plan.rules.registry import STRUCTURAL as STRUCTURAL
