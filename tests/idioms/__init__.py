"""Idioms: what users write by hand, measured against float32.

`IDIOMS` holds them by kind and name. `python -m tests.idioms` measures them;
`unsafe.txt` lists the ones that are known to be unsafe.
"""

from pathlib import Path

from ._idiom import Idiom as Idiom
from ._measure import Case as Case
from ._measure import cases as cases
from .distances import DISTANCES
from .losses import LOSSES
from .norms import NORMS
from .positions import POSITIONS
from .recurrences import RECURRENCES
from .statistics import STATISTICS
from .sums import SUMS

IDIOMS: dict[str, dict[str, Idiom]] = {
    "norms": NORMS,
    "losses": LOSSES,
    "distances": DISTANCES,
    "statistics": STATISTICS,
    "sums": SUMS,
    "positions": POSITIONS,
    "recurrences": RECURRENCES,
}
NAMED = {name: idiom for table in IDIOMS.values() for name, idiom in table.items()}

UNSAFE = Path(__file__).parent / "unsafe.txt"
